"""Simulated trainings in which the best shares of the sources are known, for policies of mixing."""
