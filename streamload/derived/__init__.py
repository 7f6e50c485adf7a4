"""What is computed once from a shard and kept in its place: shards with prepared images."""
