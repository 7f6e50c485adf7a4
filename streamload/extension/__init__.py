"""The contract of an extension: a feature that adds to batches, without the kernel's knowledge of it.

An `Extension` is made of options (loader/registered.py) and is picklable. It has a part in each worker
(`worker.py`) and one in the rank (`rank.py`); their hooks are called once a batch. A loader without
extensions has no parts and calls none.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

from streamload.extension.rank import (
    RankPart as RankPart,
)
from streamload.extension.rank import (
    RecordedEvents as RecordedEvents,
)
from streamload.extension.rank import (
    Run as Run,
)
from streamload.extension.rank import (
    RunPosition as RunPosition,
)
from streamload.extension.rank import (
    TakenBatch as TakenBatch,
)
from streamload.extension.rank import (
    Widths as Widths,
)
from streamload.extension.rank import (
    Yielded as Yielded,
)
from streamload.extension.rank import (
    YieldedInfo as YieldedInfo,
)
from streamload.extension.worker import (
    BatchColumn as BatchColumn,
)
from streamload.extension.worker import (
    BatchRows as BatchRows,
)
from streamload.extension.worker import (
    ReadProgress as ReadProgress,
)
from streamload.extension.worker import (
    RowsStep as RowsStep,
)
from streamload.extension.worker import (
    SampleReader as SampleReader,
)
from streamload.extension.worker import (
    ShardRows as ShardRows,
)
from streamload.extension.worker import (
    StepsAhead as StepsAhead,
)
from streamload.extension.worker import (
    StepSampler as StepSampler,
)
from streamload.extension.worker import (
    StepsStart as StepsStart,
)
from streamload.extension.worker import (
    WorkerPart as WorkerPart,
)
from streamload.extension.worker import (
    WorkerProcess as WorkerProcess,
)
from streamload.order.events import Event as Event


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
