"""The contract of what observes a run: figures, alerts, a verdict, a published page, a trace.

The kernel counts (metrics/, rank_process.py) and calls an `Observer`, which registered.py makes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from streamload.metrics.findings import OnAlert, Requests, SlowestRank, Verdict
from streamload.worker.messages import Batch

if TYPE_CHECKING:
    from streamload.cache.tier import Tier


class RunTrace(Protocol):
    """Spans of a loader's processes for a number of steps.

    Attributes:
        is_done: all steps were taken, or `stop` was called.
    """

    is_done: bool

    def stop(self) -> None:
        """End the spans; those so far can be merged. Idempotent."""
        ...

    def merge(self, path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> int:
        """Add the spans to a trace that `torch.profiler.profile.export_chrome_trace` wrote.

        Args:
            path: of the trace, .json or .json.gz.
            out: where the result is written; None: over it.

        Returns:
            How many spans were added.

        Raises:
            OptionError: it is no such trace.
        """
        ...


class Observer(Protocol):
    """Observes one rank, in the process that made it.

    Attributes:
        requests: what it was asked to show.
        slowest: the other rank that waits most for data; set by RankMonitor.
        device: of the batches; None: nothing says that they leave host memory. Set by the loader.
        reported: means by source of what the training reports. Set by the loader.
    """

    requests: Requests
    slowest: SlowestRank | None
    device: torch.device | None
    reported: Sequence[Mapping[str, Any]]

    # What the loader does.

    def open(self, tier: Tier, run: str, functions: Mapping[str, str], *, are_local: bool) -> None:
        """A run begins: publish it.

        Args:
            tier: that the rank reads.
            run: its name.
            functions: the argument whose function has most of a stage's time, by stage.
            are_local: the shards are files that are read in place.
        """
        ...

    def start_epoch(self, is_running: Callable[[], bool]) -> None:
        """An epoch begins; its workers run.

        Args:
            is_running: whether it still goes on.
        """
        ...

    def waited(self, waited_ns: int) -> None:
        """The training loop has just waited for so long."""
        ...

    def took(self, batch: Batch) -> None:
        """The training loop gets a batch, as its worker made it."""
        ...

    def end_epoch(self, epoch: int) -> None:
        """The last batch of an epoch was taken."""
        ...

    def close(self) -> None:
        """The run ends, and with it all that was opened for it. Idempotent."""
        ...

    def tick(self, is_due: bool = False) -> None:
        """Publish and look at the alerts, unless that was done in the last second. Thread-safe."""
        ...

    def wait_ratio(self) -> float:
        """The share of the last minute in which the training loop waited for data."""
        ...

    # What the training asks for: see Loader.

    def verdict(self, seconds: float) -> Verdict:
        """Verdict on what has limited the training over the last seconds."""
        ...

    def on_alert(self, call: OnAlert) -> None:
        """Call a function with each alert from now on."""
        ...

    def trace(self, steps: int) -> RunTrace:
        """Record spans for a number of steps."""
        ...

    def metrics(self) -> dict[str, float]:
        """The numbers of this rank since the last call."""
        ...

    def record(self, folder: Path) -> None:
        """Record this rank's numbers from the next second on."""
        ...

    def serve_metrics(self, listen: str) -> str | None:
        """Serve the metrics of this node's runs; returns the URL."""
        ...
