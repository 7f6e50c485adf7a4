"""Copies behind an fsspec URL that many nodes share: between the tier of a node and the origins (step F)."""
