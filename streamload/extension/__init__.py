"""The contract of an extension: a feature that adds to batches, without the kernel's knowledge of it.

An `Extension` is made of options (loader/registered.py) and is picklable. It refuses options, and says which
steps and values it needs (here). It has a part in each worker (`worker.py`) and one in the rank (`rank.py`);
their hooks are called once a batch. A loader without extensions has no parts and calls none. What hooks get
are the kernel's own classes (`kernel.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from streamload.extension.kernel import CLASSES
from streamload.extension.rank import CellSize, RankPart, RecordedEvents, RowWidths, Yielded
from streamload.extension.worker import BatchColumn, ReadProgress, WorkerPart
from streamload.order.events import Event
from streamload.order.steps import Split, StepOptions, StepTable
from streamload.shards.columns import Fact, Facts
from streamload.shards.samples import Entry

if TYPE_CHECKING:
    from streamload.extension.kernel import (
        Batch,
        BatchAssembly,
        BatchInfo,
        BatchRows,
        EpochStart,
        LoaderOptions,
        MakesImages,
        Position,
        RankStep,
        Reader,
        Run,
        Sampler,
        ShardRows,
        StepsAhead,
        WorkerConfig,
        WorkerProcess,
    )
else:

    def __getattr__(name: str) -> type:
        """Import a class of the kernel when it is asked for."""
        if name not in CLASSES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(CLASSES[name]), name)


__all__ = [
    "Batch",
    "BatchAssembly",
    "BatchColumn",
    "BatchInfo",
    "BatchRows",
    "CellSize",
    "Entry",
    "EpochStart",
    "Event",
    "Extension",
    "Fact",
    "LoaderOptions",
    "Position",
    "RankPart",
    "RankStep",
    "ReadProgress",
    "Reader",
    "RecordedEvents",
    "RowWidths",
    "Run",
    "Sampler",
    "ShardRows",
    "Split",
    "StepOptions",
    "StepTable",
    "StepsAhead",
    "WorkerConfig",
    "WorkerPart",
    "WorkerProcess",
    "Yielded",
]


class Extension:
    """A feature of a loader: picklable, as it goes to the workers. Its defaults add nothing.

    Subclass it as a frozen dataclass, whose fields are its options:

        @dataclass(frozen=True)
        class LongCaptions(Extension):
            least_bytes: int
            name = "long_captions"

            def keep(self, entry):
                return entry.caption_bytes >= self.least_bytes

    Attributes:
        name: the key of its part of messages, and of what it counts.
        takes_preprocess: whether `preprocess=` is for this extension, which makes the images by it.
        counts_cells: whether positions and `batch_size` count cells, of any number of samples, not samples.
        most_steps: how many steps of a rank its workers make ahead at most; None: any number.
        keep: takes the index entry of a sample, with the facts of the user's columns; False leaves the sample
            out, which is counted under the extension's name (`stats().samples_left_out`). Pure. None: all
            samples are used.
    """

    name: ClassVar[str]
    takes_preprocess: ClassVar[bool] = False
    counts_cells: ClassVar[bool] = False
    most_steps: int | None = None
    keep: Callable[[Entry], bool] | None = None

    @property
    def own_facts(self) -> Facts:
        """Facts that it brings, by name, as `Shards(facts=…)` has them; its index entries and rows have them.

            return {"words": (word_count, "1")}

        An equal one of Shards or of another extension is the same fact; another one of that name is refused.
        """
        return {}

    @property
    def facts(self) -> Collection[str]:
        """The names of the built-in facts that it needs: `return ("width", "height")`."""
        return ()

    def refuse_unusable(self, options: LoaderOptions) -> None:
        """Refuse options with which it can't be used.

            if not options.train:
                raise OptionError("LongCaptions() is for training")

        Args:
            options: of the loader.

        Raises:
            OptionError: it says which, and what to give instead.
        """

    def refuse_split(self, split: Split) -> None:
        """Refuse steps that the ranks and groups of a run share in a way in which it can't be used.

            if split.batch % split.ranks:
                raise OptionError(f"{split.ranks} ranks don't share {split.batch} samples evenly")

        Raises:
            OptionError: it says what to give instead.
        """

    def refuse_rows(self, rows: int, options: LoaderOptions, assembly: Callable[[], BatchAssembly]) -> None:
        """Refuse another size of a rank's batch.

            if rows > self.most_rows:
                raise OptionError(f"{rows} rows of a batch, of at most {self.most_rows}")

        Args:
            rows: of a rank in a step.
            options: of the loader.
            assembly: returns the recipe of its batches.

        Raises:
            OptionError: it says why.
        """

    @property
    def listed_steps(self) -> StepTable | None:
        """The steps of each epoch that it lists; None: all are of `batch_size`.

        return StepTable(((256, 32), (576, 16)), count=1000, seed=self.seed)
        """
        return None

    def planned_by(self, options: LoaderOptions) -> Sequence[str | Callable[[Entry], object]]:
        """What decides which samples a planned step has: `return [f"at most {self.most_bytes} bytes"]`.

        It is part of each state. A run that resumes with another one may do so between two blocks only.

        Args:
            options: of the loader.
        """
        return ()

    def plans_as(self, state: Mapping[str, object]) -> bool:
        """True if it plans steps by the limits of a state's run, where `planned_by` is the same, too."""
        return True

    def left_block(
        self, state: Mapping[str, object], position: Position, block: tuple[int, int, int]
    ) -> tuple[int, ...] | None:
        """Numbers by which it can plan the rest of a block that a run leaves, to go on with other steps.

        They become part of the state of each group, `GroupState.past`. None: it has to go on with the same.

        Args:
            state: of the loader.
            position: of it, within the block.
            block: where it began, its steps, and the positions of each.
        """
        return None

    def block_steps(self, batch: int) -> int | None:
        """The number of steps that it plans together: `return 4096 // batch`; None: it plans none.

        Args:
            batch: samples of one step.
        """
        return None

    def step_options(self, steps: StepOptions) -> StepOptions:
        """Options of the steps of a run: `return replace(steps, seq_lens=self.seq_lens)`.

        Args:
            steps: those without this extension.
        """
        return steps

    def image_maker(self, options: LoaderOptions, plan: MakesImages | None) -> MakesImages | None:
        """The maker of a batch's images: `return MyImages(self.size)`, an `ImageMaker`.

        Args:
            options: of the loader.
            plan: what makes them without this extension; None: nothing does, or it takes `preprocess=`.
        """
        return plan

    def assembly(self, assembly: BatchAssembly, options: LoaderOptions, split: Split | None) -> BatchAssembly:
        """The recipe of batches with what it adds: `return replace(assembly, trim=Trimming(8))`.

        Args:
            assembly: without this extension.
            options: of the loader.
            split: of the steps of a run; None: no run has begun.
        """
        return assembly

    def in_run(self, options: LoaderOptions, config: WorkerConfig, plain: BatchAssembly) -> Extension:
        """The extension as a run has it, once it is known what its workers read; by default itself.

            return replace(self, shards=len(config.shards))

        Args:
            options: of the loader.
            config: of the run's workers, with the extensions of the options.
            plain: the recipe of batches without any extension.

        Raises:
            OptionError: the run can't have it.
        """
        return self

    def in_worker(self, process: WorkerProcess) -> WorkerPart | None:
        """Its part in a worker process: `return MyWorkerPart(self)`; None: it has none there."""
        return None

    def in_rank(self, run: Run) -> RankPart | None:
        """Its part in the rank: `return MyRankPart(run)`; None: it has none."""
        return None
