"""The sample order (steps B to E): which sample comes when, and where. Pure: no I/O, no clock, no torch."""
