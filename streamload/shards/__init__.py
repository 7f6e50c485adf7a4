"""The shard format: tar bytes in, samples out, and the index that records them. Knows no origins or tiers."""
