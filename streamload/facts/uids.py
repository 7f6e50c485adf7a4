"""Lists of samples to keep, by uids: `Shards(keep="subset.npy")`, such as DataComp's subset files (step G).

A fact of a sample, 1 or 0, says if it is listed; it is kept beside the index as others are. The list is one
file of a node, which all processes that make such facts map:

    <cache_dir>/columns/<digest>/uids    the first halves of all uids, then the second ones: little-endian
                                /uids.lock, uids.new    while a process makes it

The digest is of the uids. The file counts towards the cache's limit, and is evicted as columns are: then it
is made again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128, xxh3_128_hexdigest

from streamload.batches.fields import read_json
from streamload.cache.locks import FileLock
from streamload.cache.selection import KeySpec
from streamload.cache.tier import Tier
from streamload.columns.columns import RowRoom, open_home
from streamload.descriptors import Descriptor
from streamload.errors import CacheError, OptionError, SampleError
from streamload.options import Settings
from streamload.shards.columns import LISTED, Column, FactSample, Values
from streamload.shards.facts import column_digest
from streamload.shards.json_paths import at_path
from streamload.shards.record import write_at
from streamload.shards.samples import JOINED, Entry

if TYPE_CHECKING:
    from streamload.join import JoinedRows

Halves = npt.NDArray[np.uint64]
_UID_BYTES, _DIGITS = 16, 32
_AT_ONCE = 1 << 20
"""Uids that are read at once."""
_ATTEMPTS = 10
_mapped: dict[tuple[Path, str], tuple[Halves, Halves]] = {}
"""The copies that this process has mapped, by cache directory and digest."""


@dataclass(frozen=True, slots=True)
class UidList:
    """A list of uids in a file, and its copy in a cache directory.

    Attributes:
        source: a .npy file of ascending uids.
        digest: 32 hex characters, of the uids.
        count: how many there are.
        settings: of the cache.
    """

    source: Path
    digest: str
    count: int
    settings: Settings

    @classmethod
    def read(cls, source: Path, settings: Settings) -> UidList:
        """Check a file and digest it: some 3 s for 10**8 pairs of integers, most of it for reading.

        Raises:
            OptionError: there is no such file, or no ascending uids in it.
        """
        digests, count, last = (xxh3_128(), xxh3_128()), 0, np.empty((0, 2), np.uint64)
        for uids in _uids_in(source):
            first, second = np.concatenate([last, uids]).T
            falls = (first[1:] < first[:-1]) | ((first[1:] == first[:-1]) & (second[1:] < second[:-1]))
            if falls.any():
                place = count - len(last) + int(falls.argmax()) + 1
                raise OptionError(
                    f"keep={str(source)!r}: the uids aren't sorted, from number {place} on; sort them: "
                    f"np.save(path, np.sort(np.load(path)))"
                )
            for digest, half in zip(digests, uids.T, strict=True):
                digest.update(half.astype("<u8").tobytes())
            count, last = count + len(uids), uids[-1:]
        if not count:
            raise OptionError(f"keep={str(source)!r}: there are no uids in it, so no sample would be used")
        return cls(source, _joined(*(digest.digest() for digest in digests)), count, settings)

    def has(self, uids: Halves) -> npt.NDArray[np.bool_]:
        """Return which uids are listed: bool[N], from uint64[N, 2].

        Raises:
            CacheError: there is no room for the list.
        """
        which = self.settings.cache_dir, self.digest
        first, second = _mapped[which] = _mapped.get(which) or self.map()
        starts = np.minimum(np.searchsorted(first, uids[:, 0]), self.count - 1)
        has_first = first[starts] == uids[:, 0]
        listed: npt.NDArray[np.bool_] = has_first & (second[starts] == uids[:, 1])
        for place in np.flatnonzero(has_first & ~listed):  # chance, or several uids begin alike
            stop = np.searchsorted(first, uids[place, 0], "right")
            run = second[starts[place] : stop]
            listed[place] = (
                run[min(int(np.searchsorted(run, uids[place, 1])), len(run) - 1)] == uids[place, 1]
            )
        return listed

    def map(self) -> tuple[Halves, Halves]:
        """Map the node's copy, made if it is missing or damaged, by one process."""
        folder = self.settings.cache_dir / "columns" / self.digest
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(OSError, ValueError):  # of an empty file
                if (halves := self._map(folder / "uids")) is not None:
                    os.utime(folder)
                    return halves
            try:
                self._make(folder)
            except FileNotFoundError:
                continue  # evicted meanwhile
            except OSError as exc:
                raise CacheError(f"the uids of keep={str(self.source)!r} can't be stored: {exc}") from exc
        raise CacheError(f"{folder} vanishes whenever the uids of keep={str(self.source)!r} are there")

    def _map(self, path: Path) -> tuple[Halves, Halves] | None:
        """Map the file; None if these aren't its uids."""
        halves = np.asarray(np.memmap(path, "<u8", "r"))
        first, second = halves[: self.count], halves[self.count :]
        is_whole = len(halves) == 2 * self.count
        digests = [xxh3_128(half.data).digest() for half in (first, second)]
        return (first, second) if is_whole and _joined(*digests) == self.digest else None

    def _make(self, folder: Path) -> None:
        tier, size_bytes = self._open_tier(), _UID_BYTES * self.count
        folder.mkdir(mode=0o700, exist_ok=True)
        lock = FileLock.acquire(folder / "uids.lock", create=True, wait=True)
        if lock is None:
            return
        with contextlib.closing(lock):
            with contextlib.suppress(OSError, ValueError):
                if self._map(folder / "uids") is not None:
                    return  # another process has made it
            if not RowRoom(lambda: tier).has(size_bytes):
                raise CacheError(f"{size_bytes:,} bytes have no room in {tier.root}: raise cache_size")
            written = 0
            with Descriptor.open(folder / "uids.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
                for uids in _uids_in(self.source):
                    for half in range(2):
                        start = 8 * (half * self.count + written)
                        write_at(file, uids[:, half].astype("<u8").tobytes(), start)
                    written += len(uids)
            if self._map(folder / "uids.new") is None:
                raise OptionError(
                    f"keep={str(self.source)!r}: the file has changed since the loader was made"
                )
            (folder / "uids.new").rename(folder / "uids")

    def _open_tier(self) -> Tier:
        return open_home(self.settings.cache_dir, self.settings)


@dataclass(frozen=True, slots=True)
class IsListed:
    """Whether a sample's uid is listed: 1 or 0. A sample without a uid isn't."""

    uids: UidList
    key: KeySpec
    digest: str
    dtype: str = "<u2"
    from_members: bool = True
    check_name: str = ""

    def needs(self, extensions: Collection[str]) -> Collection[str]:
        """Select those of a sample's extensions whose bytes are needed; none of them an image's."""
        chosen = self.key.choose(extensions)
        return () if chosen is None else (chosen[0],)

    def make(self, samples: Sequence[FactSample]) -> Values:
        """Return the value of each sample."""
        uids = [self._uid(sample) for sample in samples]
        halves = np.frombuffer(b"".join(uid or bytes(_UID_BYTES) for uid in uids), ">u8").reshape(-1, 2)
        is_known = np.array([uid is not None for uid in uids], np.bool_)
        return (is_known & self.uids.has(halves.astype(np.uint64))).astype(np.float64)

    def _uid(self, sample: FactSample) -> bytes | None:
        chosen = self.key.choose(sample.members)
        if chosen is None or chosen[1] is None:
            return None
        with contextlib.suppress(SampleError, ValueError):
            for leaf in at_path(read_json(sample.members[chosen[0]], "uid", SampleError), chosen[1]):
                uid = bytes.fromhex(leaf) if isinstance(leaf, str) and len(leaf) == _DIGITS else b""
                return uid if len(uid) == _UID_BYTES else None
        return None


def listed_uids(source: str | Path, key: str, settings: Settings, join: JoinedRows | None = None) -> Column:
    """The fact by which `Shards(keep=…)` leaves out samples that a file doesn't list.

    Args:
        source: of the uids.
        key: of the field with a sample's uid, `json:uid`.
        settings: of the cache.
        join: rows of another file, in which uids may be; None: there is none.

    Raises:
        OptionError: the file can't be used, or the key names no field.
    """
    spec = KeySpec.parse(key)
    if not all(path for _, path in spec.choices):
        raise OptionError(f"keep_key={key!r}; expected a field of a JSON member, such as 'json:uid'")
    uids = UidList.read(Path(source).expanduser().absolute(), settings)
    listed = IsListed(uids, spec, column_digest(["uids", uids.digest, uids.count, spec.choices]))
    if JOINED not in spec.extensions:
        return listed
    if join is None:
        raise OptionError(f"keep_key={key!r} needs the file: Shards(join=…)")
    join.table.check(spec)
    return join.column(listed)


def is_kept(entry: Entry) -> bool:
    """True if the fact of a sample says that it is listed."""
    return entry.facts[LISTED] == 1


def _joined(first: bytes, second: bytes) -> str:
    return xxh3_128_hexdigest(first + second)


def _uids_in(source: Path) -> Iterator[Halves]:
    """The uids of a file, some at a time: uint64[N, 2].

    Raises:
        OptionError: the file can't be read, or isn't one of uids.
    """
    try:
        uids = np.load(source, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as exc:
        raise OptionError(f"keep={str(source)!r} can't be read as a .npy file of uids: {exc}") from exc
    dtype = uids.dtype if isinstance(uids, np.ndarray) and uids.ndim == 1 else np.dtype("V")
    names = dtype.names or ()
    is_pairs = [dtype[name].newbyteorder("=") for name in names] == [np.uint64] * 2
    if not is_pairs and dtype not in (np.dtype(f"S{_DIGITS}"), np.dtype(f"U{_DIGITS}")):
        raise OptionError(
            f"keep={str(source)!r} has {getattr(uids, 'dtype', uids)} of shape {getattr(uids, 'shape', '')}; "
            f'expected one uid a row, as two uint64 (dtype "u8,u8") or as 32 hex digits (S32 or U32)'
        )
    for start in range(0, len(uids), _AT_ONCE):
        rows = uids[start : start + _AT_ONCE]
        if is_pairs:
            yield np.stack([rows[name].astype(np.uint64) for name in names], axis=1)
            continue
        try:
            digits = bytes.fromhex(rows.astype(f"S{_DIGITS}").tobytes().decode("ascii"))
            yield np.frombuffer(digits, ">u8").reshape(len(rows), 2).astype(np.uint64)
        except ValueError as exc:
            raise OptionError(
                f"keep={str(source)!r}: a uid from number {start} on isn't 32 hex digits"
            ) from exc
