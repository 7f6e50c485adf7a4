"""The features of a batch, in a worker: rows that are stored are read, of the others the inputs are made."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from streamload.batches.images import BatchImages, ImageAssembly
from streamload.batches.in_progress import Allocate
from streamload.columns.columns import FIRST
from streamload.derived.calls.feature_rows import FeaturesRead, FeatureStart, stacked
from streamload.derived.calls.features import FeatureInputs
from streamload.derived.proof.reads import ReadNames, Reads, watched
from streamload.derived.proof.rounding import SEVERAL_ROWS
from streamload.derived.proof.row_check import HITS_BETWEEN, RowChecks
from streamload.derived.store.keys import Naming, SampleKey
from streamload.derived.store.results import is_whole_numbers, layout_of
from streamload.derived.store.row_store import RowPlace, RowStore, open_store
from streamload.derived.store.sealed import Row
from streamload.errors import CacheCorrupt, FeatureNotCacheable, SampleError
from streamload.features.names import NameOf, checksum_of
from streamload.shards.samples import Sample

ROWS, INPUTS, READ = " rows", " inputs", " read"
"""Suffixes of a feature's values in a batch: rows, inputs of others, FeaturesRead."""
AwaitRows = Callable[[RowStore, str, Mapping[bytes, int]], None]
"""Waits for rows from other nodes: the store that takes them, the fingerprint, shards by their names."""
_CHECKED = 4
"""Images an epoch that a worker checks for not depending on a seed."""
_OTHER_SEEDS = tuple(k * 0x9E37_79B9_7F4A_7C15 & (1 << 64) - 1 for k in range(1, 9))
"""Seeds under which each checked image is made again. A step that acts on one image of ten is missed once in
44 epochs of a worker: 0.9 to the power of 4 times 9 draws."""


@dataclass(frozen=True, slots=True)
class FeatureAssembly:
    """Recipe by which a worker makes a feature."""

    name: str
    inputs: FeatureInputs
    images: ImageAssembly | None  # how images become the module's inputs; None: it takes texts
    place: RowPlace | None  # where rows are; None: nowhere that a worker may read
    label: str  # of the rows
    variants: int  # random variants of an image that have rows

    @property
    def are_shared(self) -> bool:
        """True if its rows can come from other nodes: those of samples, with one row each."""
        return self.images is not None and self.variants == 1 and self.place is not None

    def batch_factory(
        self, start: FeatureStart, name_of: NameOf, await_rows: AwaitRows | None = None
    ) -> MakeFeature:
        """A function that makes the feature of an empty batch, for an epoch.

        Args:
            name_of: names the columns of a sample's shard, see `ColumnNames.of`.
            await_rows: waits for rows from other nodes; None: there are none.
        """
        return functools.partial(FeatureInProgress, _ColumnReading(self, start, name_of, await_rows))


class _ColumnReading:
    """The rows of an epoch, as a worker looks them up."""

    def __init__(
        self,
        assembly: FeatureAssembly,
        start: FeatureStart,
        name_of: NameOf,
        await_rows: AwaitRows | None,
    ):
        self.assembly = assembly
        self._name_of = name_of
        self._await_rows = await_rows if assembly.are_shared else None
        self.fingerprint = start.fingerprint
        self.is_watched = start.is_watched
        self.reads: ReadNames | None = None
        is_checked = start.is_checked and (start.is_first or start.hits_between is not None)
        between = start.hits_between or HITS_BETWEEN
        self._checks = RowChecks(between, is_first=start.is_first) if is_checked else None
        self._is_checked_again = start.hits_between is not None
        self._canaries_left = 0
        self.checks = 0 if assembly.variants > 1 else _CHECKED
        self.ns = 0
        self.make_images = None if assembly.images is None else assembly.images.batch_factory()
        self._naming = Naming(bytes.fromhex(start.fingerprint), b"", is_row=True)
        self._is_known: dict[bytes, bool] = {}

    def key(self, sample: Sample, seed: int, variant: int, slot_seed: int | None = None) -> SampleKey:
        """The key of a sample's row. See there."""
        name, variants = b"" if self.assembly.place is None else self._name_of(sample), self.assembly.variants
        place = -1 if name is None else sample.number * variants + variant
        if name and variants > 1:  # another number of variants has other places
            name = xxh3_128_digest(b"%b %d" % (name, variants))
        return SampleKey(sample.key, seed, name or b"", place if name else min(place, 0), slot_seed)

    def read(self, keys: Sequence[SampleKey], shards: Sequence[int] = ()) -> list[Row | None]:
        """The rows of some keys that are there.

        Args:
            shards: of the samples that the keys are of; none: no other node has rows of them.
        """
        start_ns, rows = time.monotonic_ns(), dict[bytes, Row]()
        names = [self._naming.name(key) for key in keys] if self.fingerprint else []
        store = None if self.assembly.place is None else open_store(self.assembly.place)
        if store is not None and names:
            if self._await_rows is not None:
                shard_of = {key.name: shard for key, shard in zip(keys, shards, strict=True) if key.name}
                self._await_rows(store, self.fingerprint, shard_of)
            rows = store.read(names, self.assembly.label)
            if early := self._stored_early(keys, names, rows):
                found = store.read(list(early.values()), self.assembly.label)
                rows = rows | {name: found[other] for name, other in early.items() if other in found}
        stored = [rows.get(name) for name in names] if rows else [None] * len(keys)
        self.ns += time.monotonic_ns() - start_ns
        return [row if row is not None and self._is_readable(row) else None for row in stored]

    def _stored_early(
        self, keys: Sequence[SampleKey], names: Sequence[bytes], rows: Mapping[bytes, Row]
    ) -> dict[bytes, bytes]:
        """Under what missing rows are if they were stored before their columns had a name, by their names."""
        first = FIRST * self.assembly.variants
        return {
            name: self._naming.name(key._replace(name=b""))
            for key, name in zip(keys, names, strict=True)
            if key.name and key.place < first and name not in rows
        }

    def is_canary(self, row: Row, *, has_inputs: bool) -> bool:
        """True if the input of a stored row is made, too, so that the rank computes it again.

        Args:
            has_inputs: whether the batch has inputs of missing rows: a module that isn't built is for those.
        """
        if self._checks is None or not (has_inputs or self._is_checked_again):
            return False
        if not self._canaries_left and self._checks.is_due(1):
            self._checks.checked()
            is_whole = any(map(is_whole_numbers, layout_of(row.layout).leaves))
            self._canaries_left = SEVERAL_ROWS if is_whole else 1
        if not self._canaries_left:
            return False
        self._canaries_left -= 1
        if not self._canaries_left and not self._is_checked_again:
            self._checks = None
        return True

    def watch(self) -> contextlib.AbstractContextManager[Reads | None]:
        """Record what making an input reads, for the first few."""
        return watched(of_project=True) if self.is_watched else contextlib.nullcontext()

    def _is_readable(self, row: Row) -> bool:
        """True if the layout is known here: a class in it may be of a module that isn't imported."""
        if row.layout not in self._is_known:
            try:
                layout_of(row.layout)
                self._is_known[row.layout] = True
            except CacheCorrupt:
                self._is_known[row.layout] = False
        return self._is_known[row.layout]


@dataclass(slots=True)
class ParsedFeature:
    """One sample's part of a feature, until its row is known or its input is made."""

    key: SampleKey
    members: Mapping[str, memoryview]
    image: str
    is_prepared: bool
    seed: int
    shard: int
    row: Row | None = None
    is_known: bool = False
    unnamed: Callable[[], SampleKey] | None = None  # gives its key later, if the name wasn't known yet

    @property
    def data(self) -> memoryview:
        """Of its image, which is read now if it wasn't needed until now."""
        return self.members[self.image]


class FeatureInProgress:
    """A feature of a batch to which samples are added one by one, each parsed first."""

    def __init__(self, reading: _ColumnReading, size: int, allocate: Allocate):
        self.name = reading.assembly.name
        self._reading = reading
        self._make_images = reading.make_images
        self._size, self._allocate = size, allocate
        self._images: BatchImages | None = None  # of the rows that are missing; made for the first
        self._parsed: list[ParsedFeature] = []  # not looked up yet
        self._keys: list[SampleKey] = []
        self._rows: list[Row | None] = []
        self._places: list[int] = []  # of those whose inputs are made
        self._unnamed: dict[int, Callable[[], SampleKey]] = {}  # by place

    def parse(self, sample: Sample, image: str, is_prepared: bool, seed: int) -> ParsedFeature:
        """Key of a sample's row; of a text's only its place, until the batch is whole. See Column."""
        if self._make_images is None:
            digest = xxh3_64_intdigest(sample.key.encode("utf-8", "surrogatepass"))
            key, unnamed = self._key(sample, 0, 0, digest)
            return ParsedFeature(key, sample.members, image, is_prepared, 0, sample.shard, unnamed=unnamed)
        checksum = checksum_of(sample.members) if sample.checksum is None else sample.checksum
        variants = self._reading.assembly.variants
        variant = seed % variants
        fixed = xxh3_64_intdigest(f"{checksum} {variant}".encode())
        key, unnamed = self._key(sample, checksum if variants == 1 else fixed, variant)
        parsed = ParsedFeature(key, sample.members, image, is_prepared, fixed, sample.shard, unnamed=unnamed)
        self._parsed.append(parsed)
        return parsed

    def _key(
        self, sample: Sample, seed: int, variant: int, slot_seed: int | None = None
    ) -> tuple[SampleKey, Callable[[], SampleKey] | None]:
        """The key of a sample's row; what gives it later, if the name isn't known yet."""
        key = self._reading.key(sample, seed, variant, slot_seed)
        if key.place >= 0:
            return key, None
        without_bytes = sample._replace(members={})
        return key, functools.partial(self._reading.key, without_bytes, seed, variant, slot_seed)

    def add(self, parsed: Any) -> None:
        """Add a sample: its row if there is one, else its input.

        Raises:
            SampleError: its image can't be used; the batch is unchanged.
        """
        if self._make_images is None:
            self._append(parsed)
            return
        if not parsed.is_known:
            self._look_up()
        place, row = len(self._rows), parsed.row
        if row is None:
            self._decode(parsed)
            self._places.append(place)
        elif self._reading.is_canary(row, has_inputs=bool(self._places)):
            with contextlib.suppress(SampleError):  # its own row is there
                self._decode(parsed)
                self._places.append(place)
        self._rows.append(row)
        self._append(parsed)

    def _append(self, parsed: ParsedFeature) -> None:
        if parsed.unnamed is not None:
            self._unnamed[len(self._keys)] = parsed.unnamed
        self._keys.append(parsed.key)

    def drop_last(self) -> None:
        """Remove the sample that was added last."""
        self._keys.pop()
        self._unnamed.pop(len(self._keys), None)
        if self._make_images is None:
            return
        self._rows.pop()
        if self._places and self._places[-1] == len(self._rows):
            self._places.pop()
            assert self._images is not None
            self._images.drop_last()

    def finish(self, texts: Any) -> dict[str, Any]:
        """The values of the samples that were added; texts are a tensor of ids, or a list."""
        inputs: Any = None
        for place, key_of in self._unnamed.items():  # by now more of a shard may have arrived
            self._keys[place] = key_of()
        if self._make_images is None:
            self._keys = [_of_text(key, text) for key, text in zip(self._keys, texts, strict=True)]
            self._rows = self._reading.read(self._keys)
            self._places = [place for place, row in enumerate(self._rows) if row is None]
            stored = ((place, row) for place, row in enumerate(self._rows) if row is not None)
            self._places += [
                place for place, row in stored if self._reading.is_canary(row, has_inputs=bool(self._places))
            ]
            inputs = _taken(texts, self._places)
        elif self._images is not None:
            inputs = self._images.finish([str(self._keys[place][0]) for place in self._places])["image"]
        layout, bodies = stacked(self._rows, self._allocate)
        missing = [place for place, row in enumerate(self._rows) if row is None]
        keys = [self._keys[place] for place in self._places]
        reading = self._reading
        read_ns, reading.ns = reading.ns, 0
        read = FeaturesRead(
            *(reading.fingerprint, layout, missing, keys, self._places, len(self._rows), read_ns),
            reading.reads,
        )
        values: dict[str, Any] = {f"{self.name}{READ}": read}
        if bodies is not None:
            values[f"{self.name}{ROWS}"] = bodies
        if self._places:
            values[f"{self.name}{INPUTS}"] = inputs
            if self._reading.assembly.inputs == "sample":
                values[f"{self.name}{INPUTS} text"] = _taken(texts, self._places)
        return values

    def close(self) -> None:
        """Restore the random generators. Idempotent."""
        if self._images is not None:
            self._images.close()

    def _look_up(self) -> None:
        """Read the rows of all samples that were parsed since the last time: one query for many."""
        keys, shards = ([parsed.key for parsed in self._parsed], [parsed.shard for parsed in self._parsed])
        rows = self._reading.read(keys, shards)
        for parsed, row in zip(self._parsed, rows, strict=True):
            parsed.row, parsed.is_known = row, True
        self._parsed.clear()

    def _decode(self, parsed: ParsedFeature) -> None:
        if self._images is None:
            assert self._make_images is not None
            room = self._size + (1 if self._reading.checks else 0)  # _refuse_chance adds one for a moment
            self._images = self._make_images(room, self._allocate)
        images = self._images
        with self._reading.watch() as reads:
            images.add(images.parse(parsed.data, parsed.is_prepared, parsed.seed))
        if reads is not None:
            self._reading.is_watched, self._reading.reads = False, reads.names()
        if self._reading.checks > 0:
            self._reading.checks -= 1
            self._refuse_chance(images, parsed)

    def _refuse_chance(self, images: BatchImages, parsed: ParsedFeature) -> None:
        """Make the same input under other seeds; it has to be the same.

        Raises:
            FeatureNotCacheable: it isn't.
        """
        first = torch.as_tensor(images.last_image()).clone()
        for other in _OTHER_SEEDS:
            is_same = False  # as when it fails under this seed alone
            with contextlib.suppress(SampleError):
                images.add(images.parse(parsed.data, parsed.is_prepared, parsed.seed ^ other))
                is_same = torch.equal(first, torch.as_tensor(images.last_image()))
                images.drop_last()
            if not is_same:
                raise FeatureNotCacheable(
                    f"the images of the feature {self.name!r} are random: a stored row would repeat one draw "
                    f"for ever; give Features a preprocess= without random steps, or variants=K for rows of "
                    f"K draws"
                )


MakeFeature = Callable[[int, Allocate], FeatureInProgress]
"""Makes the feature of an empty batch, by its size."""


def _of_text(key: SampleKey, text: Any) -> SampleKey:
    """The key of a text's row: found by the text itself, as a sample may have another one in each pass."""
    if isinstance(text, str):
        seed = xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))
        return key._replace(key=("text", text), seed=seed)
    data = text.contiguous()
    digest, dtype = xxh3_64_intdigest(data.view(torch.uint8).numpy()), str(data.dtype)
    return key._replace(key=("ids", dtype, digest), seed=xxh3_64_intdigest(dtype.encode(), digest))


def _taken(texts: Any, places: Sequence[int]) -> Any:
    if isinstance(texts, torch.Tensor):
        return texts[torch.as_tensor(places, dtype=torch.long)]
    return [texts[place] for place in places]
