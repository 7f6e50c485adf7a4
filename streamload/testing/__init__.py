"""Test helpers for users: shards, a misbehaving server, a faulty origin, and a check of exact resumption."""
