"""The loader's prefetcher: fills the shards that a run needs next; a fallback policy for disks that fail."""
