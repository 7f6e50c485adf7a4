"""The contract of an extension: a feature that adds to batches, without the kernel's knowledge of it.

An `Extension` is made of options (loader/registered.py) and is picklable. It refuses options, and says which
steps and values it needs (here). It has a part in each worker (`worker.py`) and one in the rank (`rank.py`);
their hooks are called once a batch. A loader without extensions has no parts and calls none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
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
from streamload.order.steps import ListedSteps, Split, StepOptions
from streamload.shards.samples import Entry

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
        takes_preprocess: whether `preprocess=` is for this extension, which makes the images by it.
        most_steps: how many steps of a rank its workers make ahead at most; None: any number.
        keep: takes the index entry of a sample, with the facts of the user's columns; False leaves the sample
            out, as Shards(keep=…) does. Pure. None: all samples are used.
    """

    name: ClassVar[str]
    takes_preprocess: ClassVar[bool] = False
    most_steps: int | None = None
    keep: Callable[[Entry], bool] | None = None

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

    def refuse_split(self, split: Split) -> None:
        """Refuse steps that the ranks and groups of a run share in a way in which it can't be used.

        Raises:
            OptionError: it says what to give instead.
        """

    def refuse_rows(self, rows: int, options: Any, assembly: Callable[[], Any]) -> None:
        """Refuse another size of a rank's batch.

        Args:
            rows: of a rank in a step.
            options: of the loader.
            assembly: returns the recipe of its batches (`BatchAssembly`).

        Raises:
            OptionError: it says why.
        """

    @property
    def listed_steps(self) -> ListedSteps | None:
        """The steps of each epoch, if it lists them; None: all are of `batch_size`."""
        return None

    def block_steps(self, batch: int) -> int | None:
        """The number of steps that it plans together, by the samples of one; None: it plans none."""
        return None

    def step_options(self, steps: StepOptions) -> StepOptions:
        """Options of the steps of a run, by those without this extension."""
        return steps

    def image_maker(self, options: Any, plan: Any) -> Any:
        """The maker of a batch's images: `ImagePlan`, `ImageMaker`, or a function as given.

        Args:
            options: of the loader.
            plan: what makes them without this extension; None: nothing does, or it takes `preprocess=`.
        """
        return plan

    def assembly(self, assembly: Any, options: Any, split: Split | None) -> Any:
        """The recipe of batches (`BatchAssembly`) with what it adds.

        Args:
            assembly: without this extension.
            options: of the loader.
            split: of the steps of a run; None: no run has begun.
        """
        return assembly

    def in_run(self, options: Any, config: Any, plain: Any) -> Extension:
        """The extension as a run has it, once it is known what its workers read; by default itself.

        Args:
            options: of the loader.
            config: of the run's workers (`WorkerConfig`), with the extensions of the options.
            plain: the recipe of batches without any extension (`BatchAssembly`).

        Raises:
            OptionError: the run can't have it.
        """
        return self

    def in_worker(self, process: WorkerProcess) -> WorkerPart | None:
        """Its part in a worker process; None: it has none there."""
        return None

    def in_rank(self, run: Run) -> RankPart | None:
        """Its part in the rank; None: it has none."""
        return None
