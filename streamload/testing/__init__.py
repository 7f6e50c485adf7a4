"""Test helpers for users: shards, servers and origins that fail, exact resumption, a suite for extensions."""
