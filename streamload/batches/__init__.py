"""Rows to tensors: samples are decoded, tokenized and assembled into the values of a batch (steps I, J)."""
