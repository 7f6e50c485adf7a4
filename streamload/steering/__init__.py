"""Which weights the sources get next, decided from summaries of what the training reported.

Pure: a policy sees a `Summary` and its own memory, and returns weights. A loader asks it at its decision
steps. No torch, and no I/O but the log of decisions.
"""

from streamload.steering.policy import Decided, Policy, as_policy, weights_of
from streamload.steering.summary import Signal, SourceSummary, Summary

__all__ = ["Decided", "Policy", "Signal", "SourceSummary", "Summary", "as_policy", "weights_of"]
