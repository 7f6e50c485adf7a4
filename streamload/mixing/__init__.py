"""The public names for mixing sources: policies that choose weights, and the words of a policy of one's own.

from streamload.mixing import Schedule
order = Order(mixing=Schedule({10_000: {"own": 2}}))
loader = make_loader([Source("own.tar"), Source("web.tar")], order=order)

In a run, `decisions.py` asks the policy by what the training reports (`reports.py`), and keeps a log
(`log.py`). `batch_size.py` asks that of batch_policy=. The policies themselves are pure, in
streamload/steering.
"""

from streamload.steering import Decided, Policy, SourceSummary, Summary
from streamload.steering.alignment import AlignmentBalanced
from streamload.steering.progress import Progress
from streamload.steering.replay import Replay
from streamload.steering.schedule import Schedule
from streamload.steering.target import Target
from streamload.steering.token_shares import TokenShares

__all__ = [
    "AlignmentBalanced",
    "Decided",
    "Policy",
    "Progress",
    "Replay",
    "Schedule",
    "SourceSummary",
    "Summary",
    "Target",
    "TokenShares",
]
