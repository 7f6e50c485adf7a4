"""Rows 26, 27, 33 and 40: answers whose framing never ends, and versions that nothing proves, or that lie."""

import contextlib
import io
import itertools
import os
import tarfile
from dataclasses import replace
from pathlib import Path

from streamload.cache.shard import shard_of
from streamload.testing.faults import Fault
from tests.faults.data import Data, Truth, samples_of
from tests.faults.oracle import Attempt
from tests.faults.origin import another_version, reading_of, replacing
from tests.faults.readers import QUICK, Reading, read_in_child
from tests.faults.rows import Row

_NONE = {"ETag": "", "Last-Modified": ""}
_UNPROVEN = {"no validators": _NONE, "a weak ETag": {**_NONE, "ETag": 'W/"1"'}}
_MANY = 400
_SMALL_FIRST = replace(QUICK, first_get_bytes=16_000)
"""Shards of an attempt are small: so a fill of one has several requests."""


def endless(attempt: Attempt) -> None:
    """What frames a body comes a few bytes at a time and never ends, once or each time."""
    data = attempt.borrow(attempt.seed)
    place = attempt.rng.randrange(len(data.shards))
    name, (drip, _, again) = data.paths[place].name, attempt.variant.partition(", ")
    framing = "length" if drip in {"header", "continue"} else "chunked"
    fault = Fault(first=None if again else 1, drip=drip, framing=framing)  # type: ignore[arg-type]
    first = len(data.server.log)
    data.server.misbehave(name, fault)
    result = read_in_child(Reading(attempt.root, data.shards, origin=QUICK))
    data.server.misbehave(name)
    requests = [r for r in data.server.log[first:] if r.path == name]
    attempt.happened[attempt.variant] += len(requests) > 1
    if again:
        attempt.check_error(result["error"], "OriginTimeout", data.shards[place].name)
        attempt.check_next_start(data)
    else:
        attempt.check_no_error(result["error"])
        attempt.check_all(data.differences(result["seen"]))
    for before, after in itertools.pairwise(requests):
        took = after.seconds - before.seconds
        attempt.check_seconds(
            took, QUICK.stall_seconds + QUICK.backoff_limit_seconds + 1.5, "it was left after"
        )


def unproven(attempt: Attempt) -> None:
    """A transfer is cut, its object is overwritten by one of the same size, and no validator tells."""
    own = Data(attempt.place / "data", 200 + attempt.seed, spawn=False, counts=[30])
    kind, _, unchanged = attempt.variant.partition(", ")
    with contextlib.closing(own):
        shard, (path,), server = own.shards[0], own.paths, own.server
        old, other = own.samples[shard.digest], another_version(own, attempt)
        at = int(attempt.rng.uniform(0.05, 0.95) * own.largest_bytes)
        cut = Fault(first=1, cut_after_bytes=at, headers=_UNPROVEN[kind])
        server.misbehave(path.name, cut, Fault(headers=_UNPROVEN[kind]))
        with contextlib.nullcontext() if unchanged else replacing(server, other, path):
            seen, result = reading_of(attempt, own)
        new = samples_of(path)
        attempt.happened[attempt.variant] += len(server.log) > 1
        if unchanged:
            attempt.check_no_error(result["error"])
            attempt.check_all(own.differences(result["seen"]))
            return
        part = result["error"] is not None and seen in (old[: len(seen)], new[: len(seen)])
        attempt.check("B", seen in (old, new) or part, f"{len(seen)} samples are of no one version")
        if seen not in (old, new):
            attempt.check_error(result["error"], "DatasetChanged|OriginError|ShardError", shard.name)
        own.samples[shard.digest], own.content[shard.digest] = new, path.read_bytes()
        server.misbehave(path.name)
        if result["error"] is not None:
            attempt.check_next_start(own)


def balanced(attempt: Attempt) -> None:
    """Each answer comes from one of two backends, whose ETags differ; the bytes don't, or do."""
    own = Data(attempt.place / "data", 300 + attempt.seed, spawn=False, counts=[20, 30])
    with contextlib.closing(own):
        backends = _backends(attempt, own, "1")
        reading = Reading(attempt.root, own.shards, origin=_SMALL_FIRST)
        if attempt.variant == "read by range":
            reading = replace(reading, limit_bytes=own.room_bytes(0.3), no_room_seconds=0.1)
        elif attempt.variant == "overwritten":
            _overwritten(attempt, own, reading)
            return
        result = read_in_child(reading)
        attempt.happened[attempt.variant] += len(set(backends[: len(own.server.log)])) > 1
        attempt.check_no_error(result["error"])
        attempt.check_all(own.differences(result["seen"]))


def _backends(attempt: Attempt, own: Data, version: str) -> list[str]:
    """Let each next answer have the ETag of one of two backends, for a version; the first two have both."""
    first = attempt.rng.randrange(2)
    chosen = [first, 1 - first, *(attempt.rng.randrange(2) for _ in range(_MANY - 2))]
    etags = [f'"{version}-of-backend-{backend}"' for backend in chosen]
    own.server.misbehave("*", *(Fault(first=1, headers={"ETag": etag}) for etag in etags))
    return etags


def _overwritten(attempt: Attempt, own: Data, reading: Reading) -> None:
    """The first shard is replaced while it comes: by one of another date, behind the same backends."""
    shard, path = own.shards[0], own.paths[0]
    old, other = own.samples[shard.digest], another_version(own, attempt)
    with replacing(own.server, other, path, lambda: _backends(attempt, own, "2")):
        result = read_in_child(reading)
    seen, new = result["seen"].get(shard.digest, []), samples_of(path)
    attempt.happened[attempt.variant] += new != old
    part = result["error"] is not None and seen in (old[: len(seen)], new[: len(seen)])
    attempt.check("B", seen in (old, new) or part, f"{len(seen)} samples are of no one version")
    if seen not in (old, new):
        attempt.check_error(result["error"], "DatasetChanged|OriginError|ShardError", shard.name)


def replaced(attempt: Attempt) -> None:
    """A local shard is replaced between two runs by one of equal size and time, with samples elsewhere."""
    own = Data(attempt.place / "data", 400 + attempt.seed, spawn=False, counts=[20, 30])
    own.close_server()
    shards = [shard_of(str(path), None) for path in own.paths]
    truth = Truth(own.paths, shards)
    result = read_in_child(Reading(attempt.root, shards))
    attempt.check_no_error(result["error"])
    attempt.check_all(truth.differences(result["seen"]))
    path, before = own.paths[1], own.paths[1].stat()
    content = _in_another_order(path, attempt)
    if attempt.variant == "in place":
        path.write_bytes(content)
    else:
        other = attempt.place / "other.tar"
        other.write_bytes(content)
        other.replace(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    now = path.stat()
    is_alike = (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    attempt.happened[attempt.variant] += is_alike and content != truth.content[shards[1].digest]
    truth = Truth(own.paths, shards)
    result = read_in_child(Reading(attempt.root, shards))
    attempt.check_no_error(result["error"])
    attempt.check_all(truth.differences(result["seen"]))


def _in_another_order(path: Path, attempt: Attempt) -> bytes:
    """The tar with its samples in another order: of the same size."""
    samples: dict[str, list[tuple[tarfile.TarInfo, bytes]]] = {}
    with tarfile.open(path) as tar:
        for info in tar:
            file = tar.extractfile(info)
            samples.setdefault(info.name.partition(".")[0], []).append((info, file.read() if file else b""))
    keys = list(samples)
    attempt.rng.shuffle(keys)
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for key in keys:
            for info, content in samples[key]:
                tar.addfile(info, io.BytesIO(content))
    return made.getvalue()


ROWS = [
    Row(
        26,
        "framing without an end",
        "a header, `100 Continue`, a chunk's size or trailers, a few bytes at a time, once or for ever",
        "NDBEL",
        "A connection whose framing never ends is left like a silent one",
        endless,
        count=50,
        variants=("header", "continue", "chunk size", "trailers", "header, for ever"),
    ),
    Row(
        27,
        "no proof of the version",
        "object overwritten while it comes, at the same size, without validators or with a weak ETag alone",
        "NDBE",
        "What follows a cut is compared from the first byte on: one version, or an error",
        unproven,
        count=80,
        variants=(
            "no validators",
            "a weak ETag",
            "no validators, unchanged",
            "a weak ETag, unchanged",
        ),
    ),
    Row(
        33,
        "backends with ETags of their own",
        "a load balancer whose backends have different ETags: in fills, in reads by range, and overwritten",
        "NDBE",
        "Each shard is taken whole from one answer, and none is given up",
        balanced,
        count=60,
        variants=("filled", "read by range", "overwritten"),
    ),
    Row(
        40,
        "local shard replaced",
        "a local shard replaced by a file of equal size and time, by a rename or in place",
        "NDB",
        "The file is indexed anew: no sample's bytes are read where another's are",
        replaced,
        count=40,
        variants=("by a rename", "in place"),
    ),
]
