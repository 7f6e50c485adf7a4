"""Rows of several lengths, and sizes of batches: extensions (streamload/extension/), and a policy's words.

A policy of batch sizes is written with the names here. `padding.py` has the lengths of a batch's rows;
`buckets.py` the steps of rows of like length, by `costs.py`, `cells.py` and `steps.py`; `bounds.py` what
groups agree on; `in_flight.py` the limits of what is made ahead; `microbatches.py` and `part_size.py` the
parts of a step; `modalities.py` rows without an image or a text.
"""

from streamload.steering.batch_size import BatchPolicy, Measured, SizeDecided, ThroughputBalanced

__all__ = ["BatchPolicy", "Measured", "SizeDecided", "ThroughputBalanced"]
