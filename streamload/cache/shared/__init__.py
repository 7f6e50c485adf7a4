"""The shared cache: copies behind an fsspec URL, between the tiers of nodes and the origins."""
