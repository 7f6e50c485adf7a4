"""The number of samples in each shard: from the sizes.json files beside the shards, or estimated.

One rank of a node reads the files; the others map the array that it has written.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from streamload import limits, urls
from streamload.cache.placement import SharedDecision
from streamload.cache.tier import memory_root
from streamload.descriptors import in_this_process
from streamload.errors import DataError, OrderDiverged, OriginDenied, OriginNotFound, StreamloadError
from streamload.loader.options import LoaderOptions
from streamload.origins.origin import OriginOptions, open_origin
from streamload.ranks.distributed import can_compare, first_value, first_with_details
from streamload.shards.samples import ShardScanner, border
from streamload.topology import Topology, run_name
from streamload.urls import UrlList
from streamload.urls.listing import around, segments

logger = logging.getLogger("streamload")

_LIMIT_BYTES = 64 << 20
_LIMIT_SAMPLES = 1 << 40
_SHARDS_ESTIMATED, _HEAD_BYTES = 8, 2 << 20
_BRIEF = OriginOptions(connect_seconds=5.0, stall_seconds=5.0, attempts=3)
_AT_ONCE = OriginOptions(parts=1)
_STRICT = (
    ". sizes.json decides how samples are divided among nodes, and no node may miss it: make it readable, "
    "have the server answer 404, or initialise torch.distributed first, so that ranks compare what they found"
)

Sizes = npt.NDArray[np.int64] | None
"""The samples of each shard of a source; None: they are unknown."""
_Names: TypeAlias = "Sequence[Sequence[str] | _Numbered]"
_UNKNOWN = -1
_CHUNK_BYTES, _PIECE_BYTES = 1 << 20, 64 << 10
"""Read at once from a file, and parsed at once."""


class ShardSizes:
    """The samples of each shard of a loader's sources, read once; ranks that are joined agree on them.

    Args:
        options: of the loader.
        digest: makes a digest of its data.

    Attributes:
        are_used: whether weights of sources were multiplied by them.
    """

    def __init__(self, options: LoaderOptions, digest: Callable[[], str]):
        self._options, self._digest = options, digest
        self._sizes: list[Sizes] | None = None
        self._are_agreed = False  # with the other ranks
        self.are_used = False
        self._units: list[int] | None = None

    def read(self, topology: Topology, groups: int) -> list[Sizes]:
        """The samples of each shard of each source, by sizes.json.

        Joined ranks agree on what they found. Others can't, so with more than one group an unclear answer is
        an error: no node may miss a file.

        Args:
            topology: of this rank.
            groups: of the run.

        Raises:
            OrderDiverged: another rank found other sizes.
        """
        options, is_joined = self._options, can_compare(topology.world_size)
        if self._sizes is None:
            self._sizes = self._read_on_node(topology, strict=groups > 1 and not is_joined)
        if is_joined and not self._are_agreed:
            name = f"sizes {self._digest()} {options.seed} {options.train}"
            self._sizes = agree_on_sizes(self._sizes, name, topology, are_used=self.are_used)
            self._are_agreed = True
        return self._sizes

    def _read_on_node(self, topology: Topology, strict: bool) -> list[Sizes]:
        """The samples of each shard of each source, read by one rank of a node."""
        options = self._options

        def read() -> list[Sizes]:
            storage = options.storage_options
            return [read_sizes(source.urls, storage, strict) for source in options.sources]

        if topology.local_world_size == 1:
            return read()
        name = run_name(topology, f"sizes {options.urls.fingerprint()}")
        decision = SharedDecision(memory_root(options.settings()), ["sizes", name])
        weakref.finalize(self, in_this_process(decision.close))
        counts = [len(source.urls) for source in options.sources]
        return decision.share(read, _written, lambda path: _mapped(path, counts))

    def units(self, topology: Topology, groups: int) -> list[int]:
        """The units that upsampling factors multiply: samples of each source, listed or estimated; or shards.

        OpenCLIP draws shards by their factors, so that each sample comes in proportion to its factor. Ranks
        that nothing joins don't estimate: a server that fails one of them would give it other shares.

        Args:
            topology: of this rank.
            groups: of the run.
        """
        if self._units is None:
            self._units, self.are_used = self._find_units(topology, groups), True
        return self._units

    def _find_units(self, topology: Topology, groups: int) -> list[int]:
        sources, sizes = self._options.sources, self.read(topology, groups)
        if len(sources) == 1 or all(shard_sizes is not None and shard_sizes.size for shard_sizes in sizes):
            return [1 if shard_sizes is None else int(shard_sizes.sum()) for shard_sizes in sizes]
        storage, world_size = self._options.storage_options, topology.world_size
        may_estimate = world_size == 1 or can_compare(world_size)
        samples = [
            int(counts.sum())
            if counts is not None
            else estimate_samples(source.urls, storage)
            if may_estimate
            else None
            for counts, source in zip(sizes, sources, strict=True)
        ]
        units = [count for count in samples if count]
        if len(units) < len(sources):
            units = [len(source.urls) for source in sources]
        name = f"factors {self._options.urls.fingerprint()} {self._options.seed}"
        agreed: list[int] = json.loads(first_value(name, json.dumps(units), world_size))
        if topology.rank == 0:
            _log_units([source.name for source in sources], samples, agreed)
        return agreed

    @staticmethod
    def digest(sizes: Sequence[Sizes]) -> str:
        """A digest of the samples of each shard of each source."""
        digest = xxhash.xxh3_64()
        for shard_sizes in sizes:
            digest.update(b"unknown" if shard_sizes is None else shard_sizes.astype("<i8", copy=False).data)
            digest.update(b"|")
        return digest.hexdigest()


def read_sizes(shards: UrlList, storage_options: dict[str, Any] | None, strict: bool = False) -> Sizes:
    """The number of samples in each shard; None if one isn't listed, or can't be (a pipe).

    A sizes.json is `{shard's base name: samples}`, in the folder of the shards, as OpenCLIP reads it.

    Args:
        shards: their URLs.
        storage_options: for their origins.
        strict: only a missing file counts as no sizes.json; otherwise an unreadable one does, too.

    Raises:
        OriginError: reading a sizes.json failed; a missing one is no failure.
        DataError: strict, and it isn't JSON.
    """
    if any(urls.scheme(shard) == "pipe" for shard in shards.kinds()):
        return None
    listed: dict[str, _Listed] = {}
    sizes: list[npt.NDArray[np.int64]] = []
    for url, runs in itertools.groupby(_by_folder(shards), operator.itemgetter(0)):
        names = [names for _, names in runs]
        if url not in listed:
            listed[url] = _read(url, storage_options, strict, names)
        found = listed[url].of(names)
        if found is None:
            return None
        sizes.append(found)
    return sizes[0] if len(sizes) == 1 else np.concatenate(sizes)


@dataclass(frozen=True, slots=True)
class _Numbered:
    """Names that differ in a number: a URL's name costs ten times as much as the number."""

    template: str
    numbers: range

    def __iter__(self) -> Iterator[str]:
        return map(self.template.__mod__, self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


def _by_folder(shards: UrlList) -> Iterator[tuple[str, Sequence[str] | _Numbered]]:
    """Yield base names of the shards in order, each time with the URL of the sizes.json beside them."""
    for before, numbers, width, after in segments(shards.node):
        shard_urls = [before]
        if numbers is not None:
            low, high = (f"{number:0{width}d}" for number in (numbers[0], numbers[-1]))
            first, last = before + low + after, before + high + after
            name = around(urls.basename(first), low, urls.basename(last), high)
            if name is not None and _url_beside(first) == _url_beside(last):
                start, end = (text.replace("%", "%%") for text in name)
                yield _url_beside(first), _Numbered(f"{start}%0{width}d{end}", numbers)
                continue
            shard_urls = [f"{before}{number:0{width}d}{after}" for number in numbers]
        for shard in shard_urls:
            yield _url_beside(shard), (urls.basename(shard),)


class _Listed:
    """What a sizes.json says, an array as long as it lists the expected names in their order, then a dict.

    Args:
        names: the base names that are expected: of the shards.
    """

    def __init__(self, names: _Names):
        self._names = names
        self._expected: Iterator[str] | None = itertools.chain.from_iterable(names)
        self._sizes = np.empty(sum(map(len, names)), np.int64)
        self._filled = 0
        self._by_name: dict[str, Any] = {}

    def add(self, listed: dict[str, Any]) -> None:
        """Add some of its members, in order."""
        if self._expected is not None and [*listed] == [*itertools.islice(self._expected, len(listed))]:
            with contextlib.suppress(ValueError):
                values = _checked(listed.values())
                self._sizes[self._filled : self._filled + len(values)] = values
                self._filled += len(values)
                return
        self._look_up().update(listed)

    def of(self, names: _Names) -> Sizes:
        """The sizes of shards by their base names; None if one isn't listed."""
        if names is self._names and self._expected is not None and self._filled == len(self._sizes):
            return self._sizes
        try:
            values = _checked(map(self._look_up().get, itertools.chain.from_iterable(names)))
        except ValueError:
            return None
        return np.array(values, np.int64)

    def _look_up(self) -> dict[str, Any]:
        if self._expected is not None:
            self._expected = None
            names = itertools.chain.from_iterable(self._names)
            self._by_name = dict(zip(names, self._sizes[: self._filled].tolist(), strict=False))
        return self._by_name


def _read(url: str, storage_options: dict[str, Any] | None, strict: bool, names: _Names) -> _Listed:
    """What a sizes.json says, parsed as it arrives; nothing where there is none.

    Raises:
        OriginError: reading it failed; strict: or the store denies it, as some do where there is none.
        DataError: strict, and it isn't JSON.
    """
    listed = _Listed(names)
    try:
        for members in _members(_chunks(url, storage_options)):
            listed.add(members)
    except (FileNotFoundError, OriginNotFound):
        pass
    except OriginDenied as exc:
        if strict:
            raise OriginDenied(f"{exc}{_STRICT}") from exc
    except (ValueError, RecursionError) as exc:
        problem = f"{urls.redact(url)} is not a JSON object ({exc})"
        if strict:
            raise DataError(f"{problem}{_STRICT}") from exc
        logger.warning("%s: the number of samples is unknown", problem)
    else:
        return listed
    return _Listed([])


def _members(chunks: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the members of a JSON object, in pieces.

    A piece ends at a comma before which the text is JSON once it is closed: at no comma in a name or value.

    Raises:
        ValueError: it isn't a JSON object.
    """
    text, least_bytes, is_first = bytearray(), _PIECE_BYTES, True
    for chunk in chunks:
        text += chunk
        while (comma := text.find(b",", least_bytes)) > 0:
            try:
                members = json.loads(text[:comma] + b"}")
            except ValueError:
                least_bytes = 2 * comma
                continue
            yield members
            del text[:comma]
            text[0:1] = b"{"
            least_bytes, is_first = _PIECE_BYTES, False
    members = json.loads(text)
    if not isinstance(members, dict):
        raise ValueError(f"a {type(members).__name__}")  # noqa: TRY004
    if not members and not is_first:
        raise ValueError("nothing after a comma")
    yield members


def _checked(samples: Iterable[Any]) -> list[int]:
    """The numbers of samples of some shards.

    Raises:
        ValueError: one is none.
    """
    numbers = list(samples)
    if not set(map(type, numbers)) <= {int} or not 0 <= min(numbers) <= max(numbers) < _LIMIT_SAMPLES:
        raise ValueError("not a number of samples")
    return numbers


def _written(sizes: Sequence[Sizes]) -> bytes:
    """The content of a file for the other ranks of a node."""
    unknown = np.array([_UNKNOWN], np.int64)
    return b"".join((unknown if shard_sizes is None else shard_sizes).tobytes() for shard_sizes in sizes)


def _mapped(path: Path, counts: Sequence[int]) -> list[Sizes]:
    """The sizes in a file of `_written`, mapped.

    Args:
        counts: the number of shards of each source.

    Raises:
        ValueError: the file isn't whole.
    """
    numbers: npt.NDArray[np.int64] = np.asarray(np.memmap(path, np.int64, "r"))
    sizes: list[Sizes] = []
    for count in counts:
        is_known = numbers.size > 0 and numbers[0] != _UNKNOWN
        sizes.append(numbers[:count] if is_known else None)
        if numbers.size < (count if is_known else 1):
            raise ValueError(f"{path} was cut")
        numbers = numbers[count if is_known else 1 :]
    return sizes


def estimate_samples(shards: Sequence[str], storage_options: dict[str, Any] | None) -> int | None:
    """About how many samples shards have, by the sizes and first 2 MiB of up to eight of them.

    Exact if there are no more than eight, none of them larger.

    Args:
        shards: their URLs.
        storage_options: for their origins.

    Returns:
        None: the size of a shard is known only at its end (most commands, compressed shards), or none of them
        can be read.
    """
    looked_at = shards[:: -(-len(shards) // _SHARDS_ESTIMATED) or 1]
    with limits.Threads(len(looked_at), "streamload-sizes") as pool:
        counts = list(pool.map(lambda url: _estimated(url, storage_options), looked_at))
    readable = [count for count in counts if count is not None]
    return round(sum(readable) / len(readable) * len(shards)) if readable else None


def _estimated(shard: str, storage_options: dict[str, Any] | None) -> float | None:
    """About how many samples one shard has; None if its size isn't known, or it can't be read."""
    scanner = ShardScanner(checksums=False)
    with (
        contextlib.suppress(StreamloadError, OSError),  # the reader of the shard will report it
        contextlib.closing(open_origin(shard, storage_options, _BRIEF)) as origin,
    ):
        version = origin.version()
        if version.size is None:
            return None
        entries = scanner.feed(origin.read(0, min(version.size, _HEAD_BYTES), version))
        if version.size <= _HEAD_BYTES:
            return len(entries) + len(scanner.finish()[0])
        return version.size * len(entries) / border(entries[-1]) if entries else None
    return None


def agree_on_sizes(
    sizes: Sequence[Sizes], name: str, topology: Topology, *, are_used: bool = False
) -> list[Sizes]:
    """Compare the sizes of all sources with those of the first rank that calls this; return what all use.

    A rank that found no sizes.json where the first one did (its server answers 404) uses the first one's. No
    rank waits for a later one.

    Args:
        sizes: what this rank found.
        name: of what is compared, the same on all ranks.
        topology: of this rank.
        are_used: this rank has used its sizes already, so it can't use others.

    Raises:
        OrderDiverged: the first rank found others, or none where this rank found some.
        RankFailed: the first rank has ended.
    """
    counts = ", ".join(
        "none" if shard_sizes is None else f"{len(shard_sizes)} shards, {shard_sizes.sum():,} samples"
        for shard_sizes in sizes
    )
    summary = f"rank {topology.rank} found {counts} ({ShardSizes.digest(sizes)})"
    first, details = first_with_details(name, summary, lambda: _as_json(sizes), topology.world_size)
    if first.rpartition(" found ")[2] == summary.rpartition(" found ")[2]:
        return [*sizes]
    lacks_some = any(ours is None for ours in sizes) and not are_used
    shared = _from_json(details()) if lacks_some else list[Sizes]([None] * len(sizes))
    agrees = [
        ours is None or (theirs is not None and np.array_equal(ours, theirs))
        for ours, theirs in zip(sizes, shared, strict=True)
    ]
    if not (lacks_some and all(agrees)):
        raise OrderDiverged(
            f"the ranks found different sizes.json files, which decide how long an epoch is and how samples "
            f"are divided among them: {first}, {summary}. All nodes have to see the same file, or none"
        )
    logger.warning("%s, and uses the numbers of samples that %s", summary, first)
    return shared


def _as_json(sizes: Sequence[Sizes]) -> str:
    return json.dumps([None if shard_sizes is None else shard_sizes.tolist() for shard_sizes in sizes])


def _from_json(text: str) -> list[Sizes]:
    return [None if samples is None else np.array(samples, np.int64) for samples in json.loads(text)]


def _url_beside(shard: str) -> str:
    """The URL of the sizes.json in a shard's folder."""
    if urls.is_local(shard):
        return str(urls.local_path(shard).parent / "sizes.json")
    return f"{shard.partition('?')[0].rpartition('/')[0]}/sizes.json"


def _chunks(url: str, storage_options: dict[str, Any] | None) -> Iterator[bytes]:
    """Yield the content of a file.

    Raises:
        FileNotFoundError, OriginError: it can't be read.
        ValueError: it is larger than any sizes.json.
    """
    with contextlib.ExitStack() as stack:
        if urls.is_local(url):
            file = stack.enter_context(urls.local_path(url).open("rb"))
            chunks: Iterator[bytes] = iter(lambda: file.read(_CHUNK_BYTES), b"")
        else:
            stream = open_origin(url, storage_options, _AT_ONCE).open()
            stack.callback(stream.close)
            chunks = stream.chunks()
        read_bytes = 0
        for chunk in chunks:
            read_bytes += len(chunk)
            if read_bytes > _LIMIT_BYTES:
                raise ValueError(f"more than {_LIMIT_BYTES:,} bytes")
            yield chunk


def _log_units(names: Sequence[str], samples: Sequence[int | None], units: Sequence[int]) -> None:
    """Log what upsampling factors are multiplied by where there is no sizes.json."""
    advice = "put a sizes.json beside the shards ({shard name: samples}) for exact shares"
    unknown = [name for name, count in zip(names, samples, strict=True) if not count]
    if unknown:
        logger.warning(
            "upsampling factors are multiplied by shards, as the number of samples of source %s is unknown: "
            "OpenCLIP's shares only if all shards have equally many. Otherwise %s, or mix Sources",
            *(", ".join(unknown), advice),
        )
        return
    counts = ", ".join(f"{count:,} in source {name}" for name, count in zip(names, units, strict=True))
    logger.info("upsampling factors are multiplied by about these samples: %s; %s", counts, advice)
