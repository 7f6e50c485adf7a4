"""Bytes near: bounded directories of shards that are shared by all workers, ranks and jobs of a node."""
