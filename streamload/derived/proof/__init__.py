"""Proof that stored rows are those that a module computes now."""
