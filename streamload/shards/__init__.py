"""The shard format: a tar parser, samples, and their index. Independent of origins and tiers."""
