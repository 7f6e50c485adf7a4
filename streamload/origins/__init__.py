"""Where shards live: pipes, HTTP, object stores, files; `open_origin` gives one by its URL (step F)."""
