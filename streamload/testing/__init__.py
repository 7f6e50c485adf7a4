"""Public helpers for tests and measurements: shards, misbehaving servers and origins, kills, broken disks."""
