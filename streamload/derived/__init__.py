"""Values that are computed once: shards with prepared images, in place of a shard; rows of modules."""
