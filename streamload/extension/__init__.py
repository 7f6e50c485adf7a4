"""The contract of an extension: a feature that adds to batches, without the kernel's knowledge of it.

An `Extension` is made of options (loader/registered.py) and is picklable. It has a part in each worker
(`worker.py`) and one in the rank (`rank.py`); their hooks are called once a batch. A loader without
extensions has no parts and calls none.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

from streamload.extension.rank import (
    RankPart,
    RecordedEvents,
    Run,
    RunPosition,
    TakenBatch,
    Widths,
    Yielded,
    YieldedInfo,
)
from streamload.extension.worker import (
    BatchColumn,
    BatchRows,
    ReadProgress,
    RowsStep,
    SampleReader,
    ShardRows,
    StepsAhead,
    StepSampler,
    StepsStart,
    WorkerPart,
    WorkerProcess,
)
from streamload.order.events import Event

__all__ = [
    "BatchColumn",
    "BatchRows",
    "Event",
    "Extension",
    "RankPart",
    "ReadProgress",
    "RecordedEvents",
    "RowsStep",
    "Run",
    "RunPosition",
    "SampleReader",
    "ShardRows",
    "StepSampler",
    "StepsAhead",
    "StepsStart",
    "TakenBatch",
    "Widths",
    "WorkerPart",
    "WorkerProcess",
    "Yielded",
    "YieldedInfo",
]


class Extension:
    """A feature of a loader: picklable, as it goes to the workers. Its defaults add nothing.

    Attributes:
        name: the key of its part of messages.
        most_steps: how many steps of a rank its workers make ahead at most; None: any number.
    """

    name: ClassVar[str]
    most_steps: int | None = None

    @property
    def facts(self) -> Collection[str]:
        """The names of the built-in facts that it needs."""
        return ()

    def refuse_unusable(self, options: Any) -> None:
        """Refuse options with which it can't be used.

        Args:
            options: of the loader, `LoaderOptions`.

        Raises:
            OptionError: it says which, and what to give instead.
        """

    def in_worker(self, process: WorkerProcess) -> WorkerPart | None:
        """Its part in a worker process; None: it has none there."""
        return None

    def in_rank(self, run: Run) -> RankPart | None:
        """Its part in the rank; None: it has none."""
        return None
