"""A loader's options: checked once, then frozen."""

from __future__ import annotations

import itertools
import multiprocessing
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from streamload.cache.selection import KEEP, Keep, Repeat
from streamload.errors import OptionError
from streamload.extension import Extension
from streamload.loader.destination import DeviceOption
from streamload.loader.groups import Batches, Cache, Images, Order, Shards, Workers, check_flag
from streamload.loader.sources import SourceOptions
from streamload.options import Settings, options, read_settings
from streamload.options.storage import copy_options
from streamload.options.values import at_least, parse_choice
from streamload.order.steps import Split, StepOptions, StepTable
from streamload.shards.columns import LISTED, Column
from streamload.torch_internals import is_importing_main, is_main_from_stdin
from streamload.urls import UrlList

if TYPE_CHECKING:
    from streamload.batches.caption_choice import CaptionChoice
    from streamload.batches.images import Preprocess
    from streamload.derived.calls.features import Features
    from streamload.join import JoinedRows
    from streamload.steering import Policy
    from streamload.steering.replay import Replay

Output = Literal["tuple", "dict", "hf"]

MODEL_INPUTS = {"image": "pixel_values", "text": "input_ids", "label": "labels"}
"""The values of a batch by the names that transformers' models use."""
MAIN_GUARD = (
    'put all that runs the training under `if __name__ == "__main__":`, or pass '
    'workers=Workers(multiprocessing_context="fork")'
)
_PICKLED = (
    "tokenizer", "preprocess", "shards.keep", "shards.facts", "repeat", "shards.storage_options",
    "batches.sample_weight", "batches.cost", "batches.extensions", "workers.map_sample",
    "workers.collate", "cache.shared_options",
)  # fmt: skip
"""The user's own objects, which are sent to the workers."""


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """The arguments of make_loader, and what follows from them.

    Attributes:
        batch_size, num_batches: of a training whose steps are listed the most rows, and all of its steps.
        features, mixing, repeat, join: as the groups have them, checked.
        columns: facts of samples, by name; with those that extensions bring.
        extensions: of all options, and the user's own.
        is_past: steps of a run are made again, each with few samples of many shards.
    """

    sources: tuple[SourceOptions, ...]
    tokenizer: Any
    preprocess: Preprocess | None
    batch_size: int
    num_workers: int
    num_samples: int | None
    num_batches: int | None
    seed: int
    shuffle: int | None
    train: bool
    output: Output
    device: DeviceOption
    cache_dir: str | Path | None
    cache_size: str | int | None
    shards: Shards
    images: Images
    order: Order
    batches: Batches
    cache: Cache
    workers: Workers
    features: Mapping[str, Features]
    columns: Mapping[str, Column]
    mixing: Policy | Replay | None
    repeat: Repeat | None
    join: JoinedRows | None
    extensions: tuple[Extension, ...]
    is_past: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.shuffle, bool):
            raise OptionError(
                f"shuffle={self.shuffle}: give the number of positions that a sample may move, 0 for the "
                f"order as listed, or None for the default"
            )
        at_least(1, batch_size=self.batch_size, num_samples=self.num_samples)
        at_least(0, num_workers=self.num_workers, shuffle=self.shuffle)
        parse_choice(self.output, get_args(Output), "output")
        check_flag(self.train, "train")
        functions = {
            "preprocess": self.preprocess,
            "keep": None if LISTED in self.columns else self.shards.keep,
            "map_sample": self.workers.map_sample,
        }
        for name, function in functions.items():
            if function is not None and not callable(function):
                raise OptionError(f"{name}={function!r}; expected a function, or None")
        if self.tokenizer is not None and not callable(self.tokenizer):
            raise OptionError(
                f"tokenizer is a {type(self.tokenizer).__name__}; expected open_clip's, one of "
                f"transformers, or a function from a list of str to ids [N, L]"
            )

    def settings(self) -> Settings:
        """The options that variables can set, too, resolved now.

        Raises:
            OptionError: a variable's value can't be read.
        """
        arguments = {row.name: row.argument for row in options() if row.argument}
        return read_settings(**{name: operator.attrgetter(place)(self) for name, place in arguments.items()})

    @property
    def keeps(self) -> dict[str, Keep]:
        """The functions that leave samples out, by name: that of keep=, and those of extensions."""
        keep = self.shards.keep
        if isinstance(keep, str | Path):
            from streamload.facts.uids import is_kept

            keep = is_kept
        functions = {
            KEEP: keep,
            **{extension.name: extension.keep for extension in self.extensions},
        }
        return {name: keep for name, keep in functions.items() if keep is not None}

    @property
    def left_out_by(self) -> list[str]:
        """The names under which samples that are left out are counted."""
        return [*self.keeps, *(extension.name for extension in self.extensions if extension.counts_cells)]

    @property
    def leave_out_file(self) -> Path | None:
        """The file of samples that are left out, by default one of the journal; None: none can be."""
        file, journal = self.shards.leave_out, self.order.journal
        if file is None and journal is not None and self.train:
            file = Path(journal) / "left_out.jsonl"
        return None if file is None else Path(file).absolute()

    @property
    def settled_device(self) -> torch.device | None:
        """The device of the batches; None: host memory, or "auto", until an epoch begins."""
        return self.device if isinstance(self.device, torch.device) else None

    @property
    def storage_options(self) -> dict[str, Any] | None:
        """Of fsspec; None if there are none."""
        storage_options = self.shards.storage_options
        return None if storage_options is None else copy_options(storage_options) or None

    @property
    def start_method(self) -> str:
        """Start method of workers: "fork", "spawn" or "forkserver"."""
        return self.workers.multiprocessing_context or multiprocessing.get_start_method()

    def refuse_to_start_workers(self) -> None:
        """Refuse workers in a process that Python doesn't let have any.

        Raises:
            OptionError: it says what to do.
        """
        if not self.num_workers:
            return
        if multiprocessing.current_process().daemon:
            raise OptionError(
                f"num_workers={self.num_workers} in a daemonic process (of a multiprocessing.Pool, or a "
                f"worker of another DataLoader), which Python doesn't let start any: give make_loader "
                f"num_workers=0 there, or start that process with daemon=False, as "
                f"concurrent.futures.ProcessPoolExecutor does"
            )
        if self.start_method != "fork" and is_main_from_stdin():
            raise OptionError(
                f"workers that are started by {self.start_method!r} import the main script, and a script "
                f"from stdin can't be imported: write the script to a file and run that file, or pass "
                f'num_workers=0 or workers=Workers(multiprocessing_context="fork")'
            )
        if is_importing_main() and self.start_method != "fork":
            raise OptionError(
                f"a worker that was started by {self.start_method!r} imports the main script, and the script "
                f"iterates a loader while it is imported: {MAIN_GUARD}"
            )

    def refuse_unpicklable(self) -> None:
        """Refuse the first argument that can't be pickled, if workers aren't forked.

        Raises:
            OptionError: it names the argument.
        """
        if self.start_method == "fork":
            return
        for name, exc in self.unpicklable():
            raise OptionError(
                f"{name}= can't be sent to the workers: {exc}. They are started by {self.start_method!r}, so "
                f"it must be picklable: define its functions and classes at the top level of a module, or "
                f'pass workers=Workers(multiprocessing_context="fork")'
            ) from exc

    def unpicklable(self) -> Iterator[tuple[str, Exception]]:
        """The user's own arguments that can't be pickled, by name, and why."""
        for name in _PICKLED:
            try:
                ForkingPickler.dumps(operator.attrgetter(name)(self))
            except Exception as exc:
                yield name.rpartition(".")[2], exc

    @property
    def urls(self) -> UrlList:
        """The shards of all sources."""
        first, *more = (source.urls for source in self.sources)
        return sum(more, first)

    @property
    def has_cells(self) -> bool:
        """True if `batch_size` counts cells, of any number of samples."""
        return any(extension.counts_cells for extension in self.extensions)

    @property
    def has_modalities(self) -> bool:
        """True if there are rows without an image or without a text."""
        return any(source.modality != "image-text" for source in self.sources)

    @property
    def first_shards(self) -> list[int]:
        """The index of each source's first shard among those of the run."""
        return list(itertools.accumulate((len(source.urls) for source in self.sources[:-1]), initial=0))

    def with_extensions(self, extensions: tuple[Extension, ...]) -> LoaderOptions:
        """The same with extensions; where one lists the steps of an epoch, sizes are those of its steps.

        Raises:
            OptionError: nothing says the rows of a batch, or two extensions do; the number of steps isn't
                `num_batches`.
        """
        listing = [extension.name for extension in extensions if extension.listed_steps is not None]
        if len(listing) > 1:
            raise OptionError(f"{' and '.join(listing)} both list the steps of an epoch: leave one out")
        options = replace(self, extensions=extensions)
        steps = options.listed_steps
        if steps is None:
            if self.batch_size is None:
                raise OptionError(
                    "batch_size=None: batches are made here; give 1, and index the single sample of each "
                    "batch"
                )
            return options
        if self.num_batches not in (None, steps.count):
            raise OptionError(
                f"num_batches={self.num_batches}, and an extension lists {steps.count} steps for each epoch: "
                f"leave num_batches= out"
            )
        return replace(options, batch_size=steps.most_rows, num_batches=steps.count)

    @property
    def listed_steps(self) -> StepTable | None:
        """The steps of each epoch, where an extension lists them."""
        steps = (extension.listed_steps for extension in self.extensions)
        return next((listed for listed in steps if listed is not None), None)

    def block_steps(self, batch: int) -> int | None:
        """The steps that are planned together, of so many samples over all ranks; None: none are."""
        counts = (extension.block_steps(batch) for extension in self.extensions)
        return next((count for count in counts if count is not None), None)

    def step_options(self, split: Split, block_steps: int | None) -> StepOptions:
        """Options of the steps of a run.

        Args:
            split: of a step, or of the largest.
            block_steps: the steps of a block; None: they aren't planned by block.

        Raises:
            OptionError: ranks can't share the groups of steps of several sizes.
        """
        steps = StepOptions(split, block_steps=block_steps)
        for extension in self.extensions:
            steps = extension.step_options(steps)
        return steps

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that select samples, which need a member for every key; beside map_sample for none."""
        shards = self.shards
        if self.workers.map_sample is not None:
            return () if self.preprocess is None or shards.image_key is None else (shards.image_key,)
        return tuple(key for key in (shards.image_key, shards.text_key, shards.label_key) if key is not None)

    @property
    def captions(self) -> CaptionChoice | None:
        """The choice of a sample's caption; None: there is none, or captions are one member."""
        key = self.shards.text_key
        if key is None or not {":", ";"}.intersection(key):
            return None
        from streamload.batches.caption_choice import CaptionChoice

        return CaptionChoice.parse(key, self.shards.text_key_probs)

    @property
    def choice(self) -> tuple[str, ...]:
        """What a state records of keys, facts, repeats and joined rows; not the facts of extensions."""
        shards = self.shards
        names = [(key,) if isinstance(key, str) else key for key in shards.facts or ()]
        facts = [f"{name}={self.columns[name].digest}" for name in itertools.chain(*names)]
        if LISTED in self.columns:
            facts.append(f"keep={self.columns[LISTED].digest}")
        if self.has_modalities:
            facts += [f"{source.name}: {source.modality}" for source in self.sources]
        if self.repeat is not None:
            facts.append(f"repeat={self.repeat.digest}")
        if self.join is not None:
            facts.append(f"join={self.join.choice}")
        if self.workers.map_sample is not None:
            return ("map_sample", *self.keys, *facts)
        label = () if shards.label_key is None else (shards.label_key,)
        kind = () if shards.label_type == "int" else (shards.label_type,)
        if shards.text_key_probs is not None:
            facts.append(f"text_key_probs={[*map(float, shards.text_key_probs)]}")
        return (shards.image_key or "", shards.text_key or "", *label, *kind, *facts)

    @property
    def epochs_continue(self) -> bool:
        """True if an epoch starts where the last one stopped, in the middle of a pass."""
        sized = self.num_batches is not None or self.num_samples is not None
        return self.train and (sized or self.order.endless or len(self.sources) > 1)


def whole_number(name: str, value: Any) -> int:
    """A whole number of any integer type as an int.

    Raises:
        OptionError: another type; it names the argument.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise OptionError(f"{name}={value!r}; expected a whole number")
