"""The loader's prefetcher: fills the shards that a run needs next, and stores what it can where disks fail."""
