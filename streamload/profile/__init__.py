"""`streamload bench`: how fast this machine reads, decodes and loads given shards, and what limits it."""
