"""Ranks of a run that torch.distributed joins: they agree on values, and report waits and failures.

`distributed.py` has the calls of a loader: values that all ranks gather or agree on. The rest is imported
where ranks are joined: in `agreement.py` rank 0 decides step by step, `monitor.py` watches the others by what
each rank writes to torch.distributed's store (`heartbeats.py`, `reports.py`), and `loaders.py` compares their
loaders.
"""
