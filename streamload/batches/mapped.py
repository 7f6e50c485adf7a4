"""A batch of what a function of the user's makes of samples: `map_sample=`, and `collate=` (steps I, J)."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from streamload.batches.collate import collate, in_cells, named
from streamload.batches.draws import UserDraws
from streamload.batches.images import BatchImages
from streamload.batches.in_progress import (
    Allocate,
    Bounds,
    Choose,
    Collate,
    MakingCosts,
    MapSample,
    Room,
    in_batch,
)
from streamload.errors import add_note
from streamload.shards.samples import Sample

_MAP_SAMPLE_SEED, _COLLATE_SEED = 0x9E37_79B9_7F4A_7C15, 0xD1B5_4A32_D192_ED03
"""XORed into seeds, so that each function draws its own random numbers."""


class _Mapped(NamedTuple):
    """A parsed sample."""

    sample: Sample
    image: Any
    seed: int


class MappedBatch:
    """The results of the user's map_sample.

    Args:
        map_sample: makes the values of a sample.
        collate: makes a batch of them; None: they are stacked.
        draws: of both, in this process.
        choose_image: of a sample's members.
        images: makes them; None: map_sample gets their bytes.
        allocate: makes the batch's tensors.
        add_members: adds members that aren't in its shard to a sample; None: there are none.
    """

    def __init__(
        self,
        map_sample: MapSample,
        collate: Collate | None,
        draws: UserDraws,
        choose_image: Choose,
        images: BatchImages | None,
        allocate: Allocate,
        add_members: Callable[[Sample], Sample] | None = None,
    ):
        self._map_sample = map_sample
        self._add_members = add_members
        self._choose_image = choose_image
        self._collate = collate
        self._images = images
        self.decodes = True
        self._allocate = allocate
        self._values: list[Mapping[str, Any]] = []
        self._keys: list[str] = []
        self._urls: list[str] = []
        self._seed = 0
        self._exit = ExitStack()
        if images is not None:
            self._exit.callback(images.close)
        self._draws = draws
        self._generators = self._exit.enter_context(self._draws.generators(map_sample, collate))

    def parse(self, sample: Sample, seed: int, room: Room | None = None) -> _Mapped:
        """Choose the image of a sample; the user's function itself parses all else."""
        if self._add_members is not None:
            sample = self._add_members(sample)
        if self._images is None:
            return _Mapped(sample, None, seed)
        choice = self._choose_image(sample.members)
        if choice is None:
            return _Mapped(sample, None, seed)
        is_prepared = sample.prepared == choice[0]
        return _Mapped(sample, self._images.parse(sample.members[choice[0]], is_prepared, seed), seed)

    def add(self, parsed: _Mapped) -> None:
        """Add a sample, given the result of `parse`."""
        sample, image, seed = parsed
        raw: dict[str, Any] = {"__key__": sample.key, "__url__": sample.url}
        raw.update((extension, bytes(data)) for extension, data in sample.members.items())
        if self._images is None:
            value = self._map(raw, seed)
        elif image is None:
            value = self._map(raw, seed ^ _MAP_SAMPLE_SEED)
        else:
            self._images.add(image)
            try:
                value = self._map({**raw, "image": self._images.last_image()}, seed ^ _MAP_SAMPLE_SEED)
            except BaseException:
                self._images.drop_last()
                raise
        self._values.append(value)
        self._keys.append(sample.key)
        self._urls.append(sample.url)
        self._seed ^= seed

    def _map(self, raw: dict[str, Any], seed: int) -> Mapping[str, Any]:
        again = raw if self._draws.is_checked else copy.deepcopy(raw)
        self._generators.seed(seed)
        value = self._map_sample(raw)
        if not self._draws.is_checked:
            self._draws.check(self._map_sample, again, self._generators, seed, value)
        if not isinstance(value, Mapping):
            raise TypeError(
                f"map_sample returned a {type(value).__name__} for {raw['__key__']}; expected a dict"
            )
        return value

    def finish(self, bounds: Bounds | None = None, parts: Sequence[int] | None = None) -> dict[str, Any]:
        """The collated results, with keys and URLs."""
        try:
            values = self._collated(parts) if self._values else {}
        except Exception as exc:
            add_note(exc, in_batch(self._keys))
            raise
        return {**values, "__key__": self._keys, "__url__": self._urls}

    def _collated(self, parts: Sequence[int] | None) -> dict[str, Any]:
        if self._collate is not None:
            self._generators.seed(self._seed ^ _COLLATE_SEED)
            if parts is None:
                return named(self._collate(self._values))
            stops = itertools.accumulate(parts, initial=0)
            cells = [self._values[first:stop] for first, stop in itertools.pairwise(stops)]
            return in_cells([named(self._collate(cell)) for cell in cells])
        stacked = {}
        if self._images is not None:
            for name in self._values[0]:
                images = self._images.as_batch([value.get(name) for value in self._values])
                if images is not None:
                    stacked[name] = images
        if not stacked:
            return collate(self._values, self._allocate)
        unstacked = [{k: v for k, v in value.items() if k not in stacked} for value in self._values]
        return {**stacked, **collate(unstacked, self._allocate)}

    def measured(self) -> MakingCosts:
        """What making it has cost."""
        return MakingCosts(*((0, 0) if self._images is None else self._images.timed_ns))

    def close(self) -> None:
        """Restore the random generators. Idempotent."""
        self._exit.close()
