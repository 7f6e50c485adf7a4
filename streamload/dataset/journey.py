"""The journey of a sample inside a worker, one step per line: the one place that knows all the rooms.

Steps A (the list of shards) and K (the rank) are in loader/, L (the device) in device.py.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import multiprocessing.util
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, get_worker_info

from streamload.cache.follow import Shard
from streamload.cache.shard_cache import ShardCache
from streamload.cache.tier import Tier
from streamload.dataset.messages import Batch, Recipe, Start, Trouble
from streamload.errors import CacheFull, CaptionError, DataError, SampleError, TooManyBadSamples
from streamload.handoff import Board, Slots, own_empty, shared_empty
from streamload.metrics import Counters
from streamload.order.cursor import Cursor
from streamload.order.group import GroupOrder, References
from streamload.order.keys import pick, sample_seed
from streamload.order.plan import shard_order
from streamload.origins.origin import Origin, open_origin
from streamload.prefetch.ahead import Ahead
from streamload.prefetch.itinerary import Itinerary
from streamload.transforms.examples import BatchInProgress, Sample

logger = logging.getLogger("streamload")

_POLL_SECONDS = 0.004
_SLOW_SECONDS = 30.0
_NO_ROOM_SECONDS = 10.0
_STAND_INS = 64
_EARLIER_STAND_INS = 8


class StreamDataset(IterableDataset[Batch]):
    """The samples of a run as batches; a DataLoader iterates it in its workers, or in the rank itself."""

    def __init__(self, recipe: Recipe, board: Board, slots: Sequence[Slots] = ()):
        self._recipe = recipe
        self._board = board
        self._slots = slots
        self._reading: Reading | None = None

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        if self._reading is None or self._reading.pid != os.getpid():
            worker, workers = (info.id, info.num_workers) if info else (0, 0)
            slots = self._slots[worker] if self._slots else None
            self._reading = Reading(self._recipe, self._board, worker, workers, slots)
            if workers:
                multiprocessing.util.Finalize(self, self._reading.close, exitpriority=10)
        return self._reading.batches(Start(**self._board.read_order()))

    def close(self) -> None:
        """Stop what runs in this process."""
        if self._reading is not None and self._reading.pid == os.getpid():
            self._reading.close()
        self._reading = None


class _Visit(NamedTuple):
    """One use of one sample."""

    epoch: int
    pass_: int
    shard: int
    number: int


class _Superseded(Exception):
    """The rank has given another order."""


class Reading:
    """One process that reads: its tier, its fills, its place in the order; it lasts from epoch to epoch."""

    def __init__(self, recipe: Recipe, board: Board, worker: int, workers: int, slots: Slots | None):
        self.pid = os.getpid()
        self._parent = os.getppid()
        self._recipe = recipe
        self._board = board
        self._worker, self._workers = worker, workers
        self._counts = Counters(board.counters[worker + 1 if workers else 0])
        self._tier = Tier(recipe.tier_root, recipe.tier_limit_bytes, self._counts)
        self._cache = ShardCache(
            self._tier,
            recipe.shards,
            recipe.selection,
            skip=recipe.skip,
            counts=self._counts,
            counted=lambda shard: shard % max(1, workers) == worker,
        )
        origins = functools.partial(_open_origin, recipe, self._counts)
        self._ahead = Ahead(self._tier, origins, threads=recipe.fills, counts=self._counts)
        self._slots = slots
        self._fresh = shared_empty if workers else own_empty
        self._itineraries: dict[int, Itinerary] = {}
        self._generation = -1
        self._any_made = False

    def batches(self, start: Start) -> Iterator[Batch]:
        """This process's share of an epoch: of the rank's batches every n-th, n the number of workers."""
        self._forget_itineraries()
        self._cache.keep_open(())
        self._generation = start.generation
        if self._slots is not None:
            self._slots.take_back()
        steps = range(start.steps) if start.steps is not None else itertools.count()
        try:
            for step in itertools.islice(steps, self._worker, None, self._workers or 1):
                slices = self._recipe.deal.slices(start.step + step, self._recipe.rank)  # E
                references = self._references(start, start.step + step, slices)  # B, C, D while F, G go on
                made = self._make(start.epoch, sum(stop - first for _, first, stop in slices), references)
                if made is None:
                    self._check_end(step)
                    return
                values, troubles = made  # H, I, J
                cursors = {str(g): self._itineraries[g].cursor(stop).to_json() for g, _, stop in slices}
                self._let_go()
                if self._slots is not None:
                    values = self._slots.hand_over(values, self._counts)
                yield Batch(values, start.step + step, cursors, troubles)
        except _Superseded:
            return

    def close(self) -> None:
        """Stop the fills and let go of the tier; once is enough."""
        self._ahead.close()
        self._forget_itineraries()
        self._cache.close()

    def _forget_itineraries(self) -> None:
        for itinerary in self._itineraries.values():
            itinerary.close()
        self._itineraries = {}

    def _references(
        self, start: Start, step: int, slices: list[tuple[int, int, int]]
    ) -> Iterator[References | None]:
        """The references of a batch, some at a time as they become known; fewer where the sequence ends.

        In training a step that isn't full on all ranks isn't taken on any: then the last thing given is None.
        """
        waiting = _Waiting()
        for group, first, stop in slices:
            itinerary = self._itineraries.get(group)
            if itinerary is None:
                itinerary = self._itineraries[group] = self._begin(start, group)
            while first < stop and self._await(itinerary, first + 1, waiting):
                known = itinerary.known(stop)
                yield itinerary.take(first, known)
                first = known
        if self._recipe.train:
            for group, _, _ in slices:
                whole = self._recipe.deal.start(step + 1, group)
                if not self._await(self._itineraries[group], whole, waiting):
                    yield None
                    return

    def _await(self, itinerary: Itinerary, position: int, waiting: _Waiting) -> bool:
        """Wait until all references before a position are known; False if there are not as many."""
        while not itinerary.reaches(position):
            if not itinerary.follow(self._cache):
                self._pause(waiting, itinerary.blocked(self._cache))
        return itinerary.has(position)

    def _begin(self, start: Start, group: int) -> Itinerary:
        recipe, count, cursor = self._recipe, len(self._recipe.shards), start.cursors.get(str(group))
        order = GroupOrder(
            recipe.order,
            count,
            recipe.first_group + group,
            start.epoch,
            start=Cursor.from_json(cursor) if cursor else None,
            passes=1 if recipe.one_pass else None,
        )

        def next_pass() -> npt.NDArray[np.int64]:
            """An epoch that is one pass is followed by the next epoch's."""
            if not recipe.one_pass or not recipe.train:
                return np.empty(0, np.int64)
            return shard_order(recipe.order, count, group, start.epoch + 1, 0)

        return Itinerary(order, next_pass, recipe.shards, self._tier)

    def _check_end(self, step: int) -> None:
        """The sequence has ended before this step: see whether it should have.

        Raises:
            NoValidSamples: it had no sample.
            DataError: in training it has too few for one step.
        """
        is_share = not self._recipe.train and self._recipe.order.groups > 1
        if not is_share:  # a rank's share of an evaluation may be empty
            self._cache.complain_if_barren()
        if self._recipe.train and step == 0:
            raise DataError(
                f"the data has fewer usable samples than one step takes ({self._recipe.deal.batch}): lower "
                f"batch_size, or give num_batches to go round and round"
            )

    def _pause(self, waiting: _Waiting, blocked: list[int]) -> None:
        """Bytes aren't there yet: see to it that they come, and wait a moment."""
        if self._board.generation != self._generation or (self._workers and os.getppid() != self._parent):
            raise _Superseded
        self._want(blocked)
        self._ahead.check()
        if blocked:
            first = self._recipe.shards[blocked[0]]
            # While the training loop does something else, what has no room may get it by and by.
            patience = min(
                waiting.seconds(), self._ahead.refused_seconds(first), self._board.wanted_seconds()
            )
            if patience > _NO_ROOM_SECONDS:
                raise CacheFull(self._no_room(first))
            if waiting.is_due():
                view = self._cache.view(blocked[0])
                who = "this process" if self._ahead.filling(first) else "another process, or nobody yet"
                logger.warning("a batch has waited %.0f s for %r, filled by %s", waiting.seconds(), view, who)
        with self._counts.timed("bytes_wait_ns"):
            time.sleep(_POLL_SECONDS)

    def _no_room(self, shard: Shard) -> str:
        return (
            f"no room for {shard.name} in the cache at {self._tier.root}: its limit of "
            f"{self._tier.limit_bytes:,} bytes is less than the shards that have to be open at once "
            f"({self._recipe.order.lanes} lanes and a window of {self._recipe.order.window} samples); "
            f"raise cache_size or lower shuffle"
        )

    def _want(self, blocked: Sequence[int] = ()) -> None:
        """Tell the fills what is needed, in order of need, and the other processes how far this one is."""
        needed = dict.fromkeys(blocked)
        later: dict[int, None] = {}
        for itinerary in self._itineraries.values():
            needed.update(dict.fromkeys(itinerary.shards_in_use()))
            if self._any_made:
                later.update(dict.fromkeys(itinerary.coming(self._shards_ahead())))
        shards = self._recipe.shards
        self._ahead.want(
            [shards[shard] for shard in needed], [shards[shard] for shard in later if shard not in needed]
        )

    def _shards_ahead(self) -> int:
        mean = self._cache.mean_bytes()
        if not mean:
            return 1
        room = self._tier.limit_bytes / 4
        return max(1, int(min(self._recipe.ahead_bytes, room) / mean))

    def _make(
        self, epoch: int, size: int, references: Iterator[References | None]
    ) -> tuple[dict[str, Any], list[Trouble]] | None:
        """Turn references into the values of a batch, each as soon as it is known; None: no batch."""
        self._want()
        batch = self._recipe.examples.begin(size, self._empty)
        troubles: list[Trouble] = []
        found = 0
        with contextlib.closing(batch), _one_thread():
            for part in references:
                if part is None:
                    return None
                found += len(part.shards)
                with self._counts.timed("transform_ns"):
                    for visit in zip(*(column.tolist() for column in part), strict=True):
                        trouble = self._place(batch, _Visit(epoch, *visit))
                        if trouble is not None:
                            troubles.append(trouble)
            if not found:
                return None
            with self._counts.timed("transform_ns"):
                values = batch.finish()
        self._any_made = True
        return values, troubles

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a tensor of a batch: a slot's, where there is one."""
        tensor = self._slots.empty(shape, dtype) if self._slots is not None else None
        return self._fresh(shape, dtype) if tensor is None else tensor

    def _place(self, batch: BatchInProgress, visit: _Visit) -> Trouble | None:
        """Put one sample into a batch or, where it can't be used, in training another in its stead."""
        seed = sample_seed(self._recipe.order.seed, *visit)
        sample = self._sample(visit.shard, visit.number)
        try:
            batch.add(sample, seed)
            return None
        except SampleError as exc:
            if not self._recipe.skip:
                raise
            trouble = Trouble(_cause(exc), sample.url, sample.key, str(exc))
        if not self._recipe.train:
            return trouble
        for shard, number in itertools.islice(self._stand_ins(visit, seed), _STAND_INS):
            with contextlib.suppress(SampleError):
                batch.add(self._sample(shard, number), seed)
                return trouble
        raise TooManyBadSamples(
            f"{sample.key} in {sample.url} can't be used, nor can any of {_STAND_INS} samples near it"
        )

    def _stand_ins(self, visit: _Visit, seed: int) -> Iterator[tuple[int, int]]:
        """What may stand for a sample, depending on data alone.

        Some earlier ones of its shard, then the later ones, then those of the shards listed behind it.
        """
        usable, _ = self._cache.arrived(visit.shard)
        earlier = usable[usable < visit.number]
        for attempt in range(_EARLIER_STAND_INS if len(earlier) else 0):
            yield visit.shard, int(earlier[pick(seed, attempt, len(earlier))])
        count = len(self._recipe.shards)
        for shard in (visit.shard, *((visit.shard + distance) % count for distance in range(1, count))):
            found = visit.number if shard == visit.shard else -1
            while (found := self._next_usable(shard, found)) >= 0:
                yield shard, found

    def _next_usable(self, shard: int, after: int) -> int:
        """The first usable sample of a shard behind `after`, waited for; -1 if there is none."""
        waiting = _Waiting()
        while True:
            usable, ended = self._cache.arrived(shard)
            later = usable[usable > after]
            if len(later):
                return int(later[0])
            if ended:
                return -1
            self._pause(waiting, [shard])

    def _sample(self, shard: int, number: int) -> Sample:
        """A sample's bytes; waited for where they have to be fetched again."""
        waiting = _Waiting()
        while (found := self._cache.read(shard, number)) is None:
            self._pause(waiting, [shard])
        entry, data = found
        members = {
            extension: data[start - entry.start : start - entry.start + size]
            for extension, start, size in entry.members
        }
        return Sample(entry.key, self._recipe.shards[shard].name, members)

    def _let_go(self) -> None:
        """Close the shards that no reference to come is in, and tell the others."""
        in_use = {shard for itinerary in self._itineraries.values() for shard in itinerary.shards_in_use()}
        self._cache.keep_open(in_use)
        for itinerary in self._itineraries.values():
            itinerary.tell_progress()


def _open_origin(recipe: Recipe, counts: Counters, shard: Shard, stop: threading.Event) -> Origin:
    return open_origin(shard.url, recipe.storage_options, recipe.origin, counts, stop)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch from spreading an image over threads, which costs more than it gains."""
    threads = torch.get_num_threads()
    if threads == 1:  # as in every DataLoader worker
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Waiting:
    """How long a worker has been waiting for one thing, and when to say so again."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._told = 0

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def is_due(self) -> bool:
        """Whether a line should be logged: after each half minute once."""
        if self.seconds() < _SLOW_SECONDS * (self._told + 1):
            return False
        self._told += 1
        return True


def _cause(error: SampleError) -> str:
    return "caption" if isinstance(error, CaptionError) else "decode"
