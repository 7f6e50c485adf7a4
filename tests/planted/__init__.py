"""Planted bugs: a table of them over all rooms (plants/), and that some test fails with each."""
