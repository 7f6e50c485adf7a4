"""What is computed once: shards with prepared images, in place of a shard; rows of what modules compute."""
