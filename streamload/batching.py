"""The public names for batch sizes that change in a run, and the words of a policy of one's own."""

from streamload.steering.batch_size import BatchPolicy, Measured, SizeDecided, ThroughputBalanced

__all__ = ["BatchPolicy", "Measured", "SizeDecided", "ThroughputBalanced"]
