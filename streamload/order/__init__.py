"""B to E: which sample comes when, on which rank and worker. Pure arithmetic: no I/O, no clock, no torch."""
