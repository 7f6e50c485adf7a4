"""Tiers: bounded directories of shards that all workers, ranks and jobs of a node share."""
