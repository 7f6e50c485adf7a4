"""Row 11 with real S3 stores, read by s3:// URLs as a user has them; two of them answer as S3 never would."""

import atexit
import contextlib
import functools
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.stores.relay import Exchange, Relay
from benchmarks.stores.store import KINDS, Store
from streamload.cache.shard import Shard, shard_of
from streamload.errors import CacheCorrupt
from streamload.metrics import Counters
from streamload.origins.origin import Origin, open_origin
from streamload.shards.index import IndexReader
from streamload.testing.shards import ShardOptions, write_shards
from tests.faults.data import Truth, samples_of
from tests.faults.oracle import Attempt
from tests.faults.origin import another_version
from tests.faults.readers import QUICK, Reading, read_in_child
from tests.faults.rows import Row
from tests.support.kills import Child

_OPTIONS = ShardOptions(padding_bytes=(4000, 9000))
_SAMPLES = (40, 12)
_PATIENT = replace(QUICK, stall_seconds=5.0, slow_seconds=10.0)
"""While the wire is held, nobody is to lose patience."""
_PATIENCE_SECONDS = 60.0
_SETTLE_SECONDS = 0.2
"""In which a store reads what it has been asked for. s3rver overwrites an object in place, and its ETag
later: what it reads meanwhile is a mixture under the old ETag, which nobody can see from outside."""


@functools.cache
def running(name: str) -> Store:
    """A store, started when it is first asked for; it ends with this process."""
    store = Store(KINDS[name])
    atexit.register(store.close)
    return store


class Stored(Truth):
    """Two shards in a store, read through a wire that can be held and cut."""

    def __init__(self, store: Store, attempt: Attempt):
        self.store = store
        self.wire = Relay(store.port)
        self.folder = uuid.uuid4().hex
        storage = store.storage_options(self.wire.endpoint)
        paths = write_shards(attempt.place / "data", _SAMPLES, seed=attempt.seed, options=_OPTIONS)
        urls = [store.put(self._key(path), path) for path in paths]

        def opened(shard: Shard, stop: threading.Event, counts: Counters) -> Origin:
            return open_origin(shard.url, storage, _PATIENT, counts, stop)

        super().__init__(paths, [shard_of(url, storage) for url in urls], opened)

    def replace_first(self, other: Path) -> None:
        """Another object under the name of the first shard."""
        self.store.put(self._key(self.paths[0]), other)

    def asked(self, since: int = 0) -> list[Exchange]:
        """The requests for bytes of the first shard, by the wire."""
        name = self._key(self.paths[0])
        return [e for e in self.wire.log[since:] if e.method == "GET" and name in e.path]

    def ranges(self, since: int = 0) -> list[int]:
        """Where those of them began that were answered."""
        return [e.start or 0 for e in self.asked(since) if e.status in {200, 206}]

    def _key(self, path: Path) -> str:
        return f"{self.folder}/{path.name}"


@contextlib.contextmanager
def stored(name: str, attempt: Attempt) -> Iterator[Stored]:
    data = Stored(running(name), attempt)
    with data.wire:
        yield data


def with_store(name: str, attempt: Attempt) -> None:
    """One form of trouble with a store."""
    with stored(name, attempt) as data:
        match attempt.variant:
            case "asked wrongly":
                _asked_wrongly(attempt, data)
            case "connection cut":
                _cut(attempt, data)
            case "filler killed":
                _killed(attempt, data)
            case _:
                _replaced(attempt, data)


def _asked_wrongly(attempt: Attempt, data: Stored) -> None:
    """How the store answers what row 11 is about; then a fill without any trouble."""
    store, key = data.store, f"{data.folder}/{data.paths[0].name}"
    size = data.paths[0].stat().st_size
    for what, how in {
        "a range": {"Range": "bytes=512-1023"},
        "a range behind the end": {"Range": f"bytes={size}-{size + 511}"},
        "If-Match of another version": {"IfMatch": '"0"', "Range": "bytes=512-1023"},
    }.items():
        attempt.happened[f"{what}: {store.status_of(key, **how)}"] += 1
    _check_whole(attempt, data, _read(attempt, data))


def _cut(attempt: Attempt, data: Stored) -> None:
    """The connection breaks, one to three times; the fill goes on behind the last range that came whole."""
    data.wire.cut_after(
        attempt.rng.randrange(1, data.paths[0].stat().st_size // 4), attempt.rng.randrange(1, 4)
    )
    result = _read(attempt, data)
    attempt.happened[attempt.variant] += data.wire.cuts
    _check_whole(attempt, data, result)
    again = len(data.ranges()) - len(set(data.ranges()))
    attempt.check("N", again <= 2 * data.wire.cuts, f"{again} ranges came again for {data.wire.cuts} cuts")


def _killed(attempt: Attempt, data: Stored) -> None:
    """The filler is killed in mid-fill; the next one goes on by a range behind what verifies."""
    before = _kill_in_mid_fill(attempt, data)
    result = _read(attempt, data)
    attempt.happened[attempt.variant] += 1
    _check_whole(attempt, data, result)
    answers = data.asked(before)
    if answers and answers[0].start and answers[0].status == 200:
        return  # as if with the whole: which bytes these are nobody knows, so they are asked for again
    first = min(data.ranges(before), default=0)
    attempt.check("N", first > 0, "what was verified was fetched again")


def _replaced(attempt: Attempt, data: Stored) -> None:
    """Another object comes between a fill and its take-over, or in mid-fill, as the connection breaks.

    One version is read, or that is an error.
    """
    if "shorter" in attempt.variant:
        other = write_shards(attempt.place / "other", [5], seed=attempt.seed + 1, options=_OPTIONS)[0]
    else:
        other = another_version(data, attempt)
    if "take-over" in attempt.variant:
        _kill_in_mid_fill(attempt, data)
        data.replace_first(other)
        before = len(data.wire.log)
        result = _read(attempt, data)
    else:
        data.wire.hold_after(_somewhere(attempt, data))
        with Child(lambda stage: read_in_child(_reading(attempt, data))) as child:
            attempt.check("L", data.wire.held.wait(_PATIENCE_SECONDS), "nothing was held back")
            time.sleep(_SETTLE_SECONDS)
            data.replace_first(other)
            before = len(data.wire.log)
            data.wire.cut_after(1, 1)  # a shard comes in one answer: what is left of it is asked for again
            result = child.finish(_PATIENCE_SECONDS)
    attempt.happened[attempt.variant] += len(data.asked(before)) > 0
    first = data.shards[0].digest
    old, new, seen = data.samples[first], samples_of(other), result["seen"].get(first, [])
    if result["error"] is None:
        attempt.check("B", seen in (old, new), f"{len(seen)} samples are of no one version")
    else:
        attempt.check(
            "B", seen in (old[: len(seen)], new[: len(seen)]), "what came before the error is mixed"
        )
        attempt.check_error(result["error"], "DatasetChanged|OriginError|ShardError", data.shards[0].name)
    # What is published is one version, and the other is what the next run may find instead.
    published = attempt.root / "shards" / first / "data"
    is_new = not published.exists() or published.read_bytes() == other.read_bytes()
    if is_new:
        data.samples[first], data.content[first] = new, other.read_bytes()
    attempt.check_all(data.published_differences(attempt.root))
    attempt.check_next_start(data)


def _kill_in_mid_fill(attempt: Attempt, data: Stored) -> int:
    """Kill a reader once so much of the first shard is there; how many requests there had been."""
    data.wire.hold_after(_somewhere(attempt, data))
    with Child(lambda stage: read_in_child(_reading(attempt, data))) as child:
        attempt.check("L", data.wire.held.wait(_PATIENCE_SECONDS), "nothing was held back")
        attempt.check("L", _some_is_filled(attempt.root), "no sample was filled of what had come")
        child.kill()
    data.wire.go_on()
    return len(data.wire.log)


def _some_is_filled(root: Path) -> bool:
    """Wait until a part holds a sample; False if none does in good time."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        for part in (root / "parts").glob("*.*"):
            with contextlib.suppress(OSError, CacheCorrupt), IndexReader(part) as index:
                if index.count:
                    return True
        time.sleep(0.005)
    return False


def _somewhere(attempt: Attempt, data: Stored) -> int:
    """Bytes on the wire by which a part of the first shard has come."""
    return int(data.paths[0].stat().st_size * attempt.rng.uniform(0.3, 0.6))


def _reading(attempt: Attempt, data: Stored) -> Reading:
    return Reading(attempt.root, data.shards, open_origin=data.open_origin, ahead=0)


def _read(attempt: Attempt, data: Stored) -> dict[str, Any]:
    with Child(lambda stage: read_in_child(_reading(attempt, data))) as child:
        found: dict[str, Any] = child.finish(_PATIENCE_SECONDS)
        return found


def _check_whole(attempt: Attempt, data: Stored, result: dict[str, Any]) -> None:
    attempt.check_no_error(result["error"])
    attempt.check_all(data.differences(result["seen"]))
    attempt.check_all(data.published_differences(attempt.root))


_DIFFERS = {
    "swift": "answers as S3 does",
    "rclone": "ranges come with status 200, so none is trusted; If-Match is ignored",
    "s3rver": "If-Match is ignored",
}

ROWS = [
    Row(
        11,
        f"real store: {name}",
        f"{name}'s S3 ({differs}): connection cut, filler killed, object replaced in mid-fill",
        "NDBEC",
        "A real store's answers lead to its bytes in one version, or to an error",
        functools.partial(with_store, name),
        count=48,
        variants=(
            "asked wrongly",
            "connection cut",
            "filler killed",
            "replaced in mid-fill",
            "replaced by a shorter one in mid-fill",
            "replaced before a take-over",
        ),
        needs=KINDS[name].why_not,
    )
    for name, differs in _DIFFERS.items()
]
