"""Changes of a run that policies decide on: the weights of its sources, the size of its batches.

`decisions.py` asks the policy of mixing= by what the training reports (`reports.py`, `means.py`), and keeps
a log (`log.py`); `batch_size.py` asks that of batch_policy=. Policies are pure, in steering/.
"""
