"""`streamload bench`: what this machine makes of some shards, beside the least that the work can cost."""
