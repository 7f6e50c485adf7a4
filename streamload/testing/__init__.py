"""Public helpers for tests and measurements: real photographs as shards, and a server that can misbehave."""
