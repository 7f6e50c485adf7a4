"""Test helpers for users: shards, servers that fail, exact resumption, a suite for extensions."""
