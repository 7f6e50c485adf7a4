"""Origins of shards: HTTP, object stores, pipes, local files. `open_origin` opens one by its URL (step F)."""
