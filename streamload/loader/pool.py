"""The workers of a loader and the tier that they read: started for one order, ended with the loader."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import signal
import weakref
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader

from streamload import limits
from streamload.descriptors import in_this_process
from streamload.errors import StreamloadError
from streamload.ipc import ControlBlock
from streamload.loader.options import LoaderOptions
from streamload.loader.rank_run import RankRun
from streamload.loader.worker_config import worker_config_for
from streamload.origins.origin import import_origins
from streamload.torch_internals import (
    end_by_kill,
    preload,
    protect_workers,
    running_iterator,
    shut_down_workers,
)
from streamload.transforms.plan import Statistics
from streamload.worker.loop import StreamDataset
from streamload.worker.messages import Message, WorkerConfig, whole_batch

if TYPE_CHECKING:
    from streamload.ipc.buffers import BufferPool

_BATCHES_HELD = 3
"""Batches of one worker that a training loop usually holds at a time, at most."""
_UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)
"""Errors of pickling, depending on the object and on Python's version."""


class WorkerPool:
    """A DataLoader over persistent workers, or over this process where there are none.

    Args:
        owner: the loader; the pool is closed when it is garbage-collected.
        run: of the loader; its order is settled.

    Attributes:
        order: by which the workers read.
        statistics: by which images that arrive as bytes are to be normalised, if any.
        extensions: of the run that aren't those of the options.
        tier: that they read.
        run: its name on this node.
        shards: how many this rank reads in a pass; one that it shares counts on the rank with its beginning.
        images: how they are made; None: batches have none.
        functions: the argument whose function has most of a stage's time, by stage.
        are_local: the shards are files that are read in place.

    Raises:
        CacheError: the cache directory can't be used.
        OptionError: this process can't have workers.
    """

    def __init__(self, owner: object, run: RankRun):
        options, control = run.options, run.process.control
        options.refuse_to_start_workers()
        config, placed = worker_config_for(options, run.schedule)
        self.tier, self.run = placed.tier, config.run
        self.shards, continued = _own_shards(config)
        self._continued = [config.shards[number] for number in continued]
        self._close_tier = weakref.finalize(owner, in_this_process(placed.close))
        self.order = run.schedule.order
        own_ids = set(map(id, options.extensions))  # two of a dataclass may be equal
        self.extensions = [part for part in config.extensions if id(part) not in own_ids]
        images = config.assembly.images if options.images.dtype == "float32" else None
        self.statistics: Statistics | None = None if images is None else images.unnormalised
        self.images = config.assembly.images
        self.functions = _functions(options, config)
        self.are_local = all(config.shards.are_local())
        self._options = options
        try:
            self.batches, dataset = _data_loader(options, config, control)
        except BaseException:
            self._close_tier()
            raise
        self._stop = weakref.finalize(owner, in_this_process(_stop), control, self.batches, dataset)

    def start_epoch(self) -> Iterator[Message]:
        """The batches of the epoch in the control block, as they arrive; the first call starts the workers.

        Raises:
            OptionError: an argument can't be sent to the workers.
            LimitReached: there may be no more processes, threads or open files.
        """
        try:
            with _on_cpu(), _signals_held(self.batches):
                batches = iter(self.batches)
        except _UNPICKLABLE:
            self._options.refuse_unpicklable()
            raise
        except (OSError, RuntimeError) as exc:
            if isinstance(exc, StreamloadError) or not limits.advice(exc):
                raise
            raise limits.reached("the worker processes can't be started", exc) from exc
        protect_workers(batches)
        return batches

    def lost(self, given_up: int) -> int:
        """Number of lost shards, of those that count on this rank.

        Args:
            given_up: of all that it reads, also those that begin on another rank, which gave them up as well.
        """
        gone = sum(
            any(self.tier.tombstone(digest).exists() for digest in shard.digests) for shard in self._continued
        )
        return max(0, given_up - gone)

    def close(self) -> None:
        """End the workers and release the tier. Idempotent."""
        self._stop()
        self._close_tier()


def _data_loader(
    options: LoaderOptions, config: WorkerConfig, control: ControlBlock
) -> tuple[DataLoader[Message], StreamDataset]:
    import_origins(
        options.urls.kinds(), options.storage_options, config.shared.url if config.shared else None
    )
    ahead = options.workers.prefetch_factor
    for extension in config.extensions:
        if extension.most_steps is not None and options.num_workers:
            ahead = min(ahead, -(-extension.most_steps // options.num_workers))
    several, method = options.num_workers > 0, None
    buffers: list[BufferPool] = []
    if several:
        from streamload.ipc.buffers import buffers_for
        from streamload.ipc.queues import context_with_queues

        buffers = buffers_for(options.num_workers, ahead + _BATCHES_HELD)
        method = context_with_queues(options.workers.multiprocessing_context)
    dataset = StreamDataset(
        config, control, buffers, ahead=options.workers.prefetch_factor * options.num_workers
    )
    batches: DataLoader[Message] = DataLoader(
        dataset,
        batch_size=None,
        num_workers=options.num_workers,
        collate_fn=whole_batch,
        persistent_workers=several,
        in_order=not several,  # InOrder puts them in order: a worker that is slow gets fewer
        prefetch_factor=options.workers.prefetch_factor if several else None,
        multiprocessing_context=method,
    )
    return batches, dataset


def _functions(options: LoaderOptions, config: WorkerConfig) -> dict[str, str]:
    """The arguments that are functions of the user's, by the stage that their time is counted in."""
    workers, images = options.workers, config.assembly.images
    stages = {}
    if options.tokenizer is not None:
        stages["tokenize"] = "tokenizer="
    if workers.collate is not None:
        stages["collate"] = "collate="
    if workers.map_sample is not None and images is None:
        stages["decode"] = "map_sample="
    if options.preprocess is not None and images is not None and images.runs_as_given:
        stages["resize"] = "preprocess="
    return stages


def _on_cpu() -> contextlib.AbstractContextManager[object]:
    """Make the CPU torch's default device, which forked workers inherit.

    Only if another one is the default: in workers forked under this, each torch call takes 1 µs more.
    """
    try:
        is_default = torch.get_default_device().type == "cpu"
    except AttributeError:  # torch 2.7, where another one was set and unset again
        is_default = True
    return contextlib.nullcontext() if is_default else torch.device("cpu")


@contextlib.contextmanager
def _signals_held(source: DataLoader[Message]) -> Iterator[None]:
    """Start workers with SIGINT and SIGTERM blocked, which they inherit; both are delivered afterwards.

    A forkserver, and other processes that it starts later, must not inherit a blocked SIGTERM.
    """
    if running_iterator(source) is not None or not source.num_workers:
        yield
        return
    method = (source.multiprocessing_context or multiprocessing).get_start_method()
    if method != "fork":
        resource_tracker.ensure_running()  # else the first worker would start it, which unblocks SIGINT
    others = set(multiprocessing.active_children())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        if method == "forkserver":
            preload("streamload.forkserver")
            forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        yield
    finally:
        end_by_kill(set(multiprocessing.active_children()) - others)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop(control: ControlBlock, batches: DataLoader[Message], dataset: StreamDataset) -> None:
    """End a loader's workers, and the fills of this process."""
    control.order.withdraw()
    shut_down_workers(batches)
    dataset.close()


def _own_shards(config: WorkerConfig) -> tuple[int, list[int]]:
    """Number of shards that begin in a rank's groups, and the numbers of those that it only continues."""
    count, begin, continued = 0, set(), set()
    for source in config.sources:
        for pieces in source.pieces.values():
            begins = {source.first + shard for shard, part in pieces.parts.items() if part.start == 0}
            continues = {source.first + shard for shard in pieces.parts} - begins
            count += pieces.shards.size - len(continues)
            begin |= begins
            continued |= continues
    return count, sorted(continued - begin)
