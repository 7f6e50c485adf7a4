"""Ranks of a run that torch.distributed joins: they agree on values, and report waits and failures.

`distributed.py` has the calls of a loader: values that all ranks gather or agree on, and the other ranks
(`Ranks`, `RankMonitor`). `agreement.py` lets rank 0 decide step by step. What ranks write to
torch.distributed's store beside that is in `heartbeats.py` and `reports.py`.
"""
