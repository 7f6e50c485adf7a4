"""Rows 7 to 11 and 23: origins that cut, stall, refuse, lie, or change under one's hands."""

import contextlib
import os
import random
import socket
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from streamload.cache.shard import shard_of
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from tests.faults.data import SAMPLES, Data, Truth, samples_of
from tests.faults.oracle import Attempt
from tests.faults.readers import PATIENT, QUICK, Reading, read_in_child
from tests.faults.rows import Row
from tests.support.disks import shown_instead, why_no_small_disk
from tests.support.kills import Child, Stage

_BORDER = 512
_AWAY = replace(PATIENT, connect_seconds=0.5, stall_seconds=0.5)
"""The waits between attempts are those of a training; what counts as no answer is shorter."""


def overwritten(attempt: Attempt) -> None:
    """An object is replaced by another of the same size: between two fills, or while it comes."""
    own = Data(attempt.place / "data", 100 + attempt.seed, spawn=False, counts=[30])
    with contextlib.closing(own):
        shard, (path,), server = own.shards[0], own.paths, own.server
        old, size = own.samples[shard.digest], own.largest_bytes
        other = another_version(own, attempt)
        at = attempt.rng.uniform(0.05, 0.95)
        if attempt.variant == "between a fill and its take-over":
            server.stop_after(at)
            with Child(lambda stage: read_in_child(Reading(attempt.root, own.shards))) as child:
                _wait_for_request(server, 1)
                child.join(0.1)
                child.kill()
            os.replace(other, path)
            server.go_on()
            seen, result = reading_of(attempt, own)
        else:
            fault = Fault(
                first=1, cut_after_bytes=int(at * size), ignore_conditions="ignor" in attempt.variant
            )
            honest = Fault(first=1, ignore_conditions=True) if "ignor" in attempt.variant else Fault(first=1)
            server.misbehave(path.name, fault, honest)
            with replacing(server, other, path):
                seen, result = reading_of(attempt, own)
        new = samples_of(path)
        attempt.happened[attempt.variant] += path.stat().st_ino != 0 and new != old
        whole = seen in (old, new)
        part = result["error"] is not None and seen in (old[: len(seen)], new[: len(seen)])
        attempt.check("B", whole or part, f"{len(seen)} samples are of no one version")
        if not whole:
            attempt.check_error(result["error"], "DatasetChanged|OriginError|ShardError", shard.name)
        own.samples[shard.digest], own.content[shard.digest] = new, path.read_bytes()
        if result["error"] is not None:  # the next run starts with what is there now
            attempt.check_next_start(own)


def another_version(own: Truth, attempt: Attempt) -> Path:
    """The same tar, of the same size, whose images are other bytes."""
    content = bytearray(own.paths[0].read_bytes())
    rng = random.Random(attempt.seed)
    with tarfile.open(own.paths[0]) as tar:
        for info in tar:
            if info.name.endswith(".jpg"):
                content[info.offset_data : info.offset_data + info.size] = rng.randbytes(info.size)
    other = attempt.place / "other.tar"
    other.write_bytes(content)
    os.utime(other, ns=(10**18 + attempt.seed, 10**18 + attempt.seed * 10**9))
    return other


@contextlib.contextmanager
def replacing(
    server: Any, other: Path, path: Path, prepare: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Replace a file once its first request was cut, right after `prepare`."""
    before = len(server.log)

    def replace_it() -> None:
        while len(server.log) <= before or not server.log[before].sent:
            time.sleep(0.0005)
        prepare()
        os.replace(other, path)

    thread = threading.Thread(target=replace_it)
    thread.start()
    yield
    thread.join()


def reading_of(attempt: Attempt, own: Data) -> tuple[Any, dict[str, Any]]:
    """The samples of the first shard, and the whole result."""
    result = read_in_child(Reading(attempt.root, own.shards))
    return result["seen"].get(own.shards[0].digest, []), result


def _wait_for_request(server: Any, count: int) -> None:
    deadline = time.monotonic() + 10
    while len(server.log) < count and time.monotonic() < deadline:
        time.sleep(0.001)


def cut(attempt: Attempt) -> None:
    """A body ends early, some times in a row."""
    data = attempt.borrow(attempt.seed)
    place = attempt.rng.randrange(len(data.shards))
    size, name = len(data.content[data.shards[place].digest]), data.paths[place].name
    times = attempt.rng.randrange(1, 4)
    at = attempt.rng.randrange(1, size)
    if "border" in attempt.variant:
        at = member_borders(data, place)[attempt.rng.randrange(3 * SAMPLES - 1)]
    framing: Any = "length"
    if "no length" in attempt.variant:
        framing = "close"
    elif "chunks" in attempt.variant:
        framing = "chunked"
    reset = attempt.variant.startswith("reset")
    fault = Fault(first=times, cut_after_bytes=at, framing=framing, reset=reset)
    first = len(data.server.log)
    data.server.misbehave(name, fault)
    result = read_in_child(Reading(attempt.root, data.shards))
    data.server.misbehave(name)
    requests = [r for r in data.server.log[first:] if r.path == name]
    attempt.happened[attempt.variant] += sum(r.status in {200, 206} for r in requests[:times])
    if framing == "close" and result["error"] is not None:  # nobody can know that more was to come
        attempt.check_error(result["error"], "OriginError|ShardError", data.shards[place].name)
        _check_until(attempt, data, result)
        attempt.check_next_start(data)
        return
    attempt.check_no_error(result["error"])
    attempt.check_all(data.differences(result["seen"]))
    bytes_ = result["counts"]["origin_bytes"]
    attempt.check("N", bytes_ <= 1.05 * data.total_bytes, f"{bytes_:,} bytes for {data.total_bytes:,}")
    attempt.check_all(data.published_differences(attempt.root))


def _check_until(attempt: Attempt, data: Data, result: dict[str, Any]) -> None:
    """What came before an error is right."""
    for digest, seen in result["seen"].items():
        right = seen == data.samples[digest][: len(seen)]
        attempt.check("B", right, f"the {len(seen)} samples in front of the error aren't the origin's")


def member_borders(data: Data, place: int) -> list[int]:
    """Where members end in a shard: a tar that is cut there is a valid tar to most readers."""
    with tarfile.open(data.paths[place]) as tar:
        return [info.offset for info in tar.getmembers()[1:]]


def stalled(attempt: Attempt) -> None:
    """Nothing comes any more, or ten bytes a second: found within the deadline, on a new connection."""
    data = attempt.borrow(attempt.seed)
    place = attempt.rng.randrange(len(data.shards))
    size, name = len(data.content[data.shards[place].digest]), data.paths[place].name
    kind, _, which = attempt.variant.partition(", ")
    origin = PATIENT if which == "deadlines of a training" else replace(QUICK, slow_bytes=2000)
    if kind == "slow":
        fault, limit = Fault(first=1, bytes_per_second=10.0), origin.slow_seconds
    elif kind == "no answer":
        fault, limit = Fault(first=1, silent=True), origin.stall_seconds
    else:
        fault, limit = Fault(first=1, stall_after_bytes=attempt.rng.randrange(size)), origin.stall_seconds
    first = len(data.server.log)
    data.server.misbehave(name, fault)
    result = read_in_child(Reading(attempt.root, data.shards, origin=origin, deadline_seconds=90))
    data.server.misbehave(name)
    requests = [r for r in data.server.log[first:] if r.path == name]
    attempt.happened[attempt.variant] += len(requests) > 1
    attempt.check_no_error(result["error"])
    attempt.check_all(data.differences(result["seen"]))
    if len(requests) > 1:
        took = requests[1].seconds - requests[0].seconds
        attempt.check_seconds(took, limit + 1.5, "a new connection came after")


def refusing(attempt: Attempt) -> None:
    """The origin is down or asks to be left alone, and comes back."""
    if attempt.variant in {"refused", "black hole"}:
        _down(attempt)
    elif attempt.variant == "DNS gone":
        _no_name(attempt)
    else:
        _burst(attempt)


def _burst(attempt: Attempt) -> None:
    data = attempt.borrow(attempt.seed)
    status = int(attempt.variant.split()[0])
    pause = 1 if "Retry-After" in attempt.variant else 0
    names = attempt.rng.sample([path.name for path in data.paths], 2)
    first = len(data.server.log)
    for name in names:
        headers = {"Retry-After": str(pause)} if pause else {}
        data.server.misbehave(name, Fault(first=1 if pause else 3, status=status, headers=headers))
    result = read_in_child(Reading(attempt.root, data.shards))
    for name in names:
        data.server.misbehave(name)
    log = data.server.log[first:]
    refused = [r for r in log if r.status == status]
    attempt.happened[attempt.variant] += len(refused)
    attempt.check_no_error(result["error"])
    attempt.check_all(data.differences(result["seen"]))
    attempt.check("N", len(log) <= len(refused) + len(data.paths) * 1.5, f"{len(log)} requests")
    for name in names if pause else []:
        times = [r.seconds for r in log if r.path == name]
        gap = times[1] - times[0] if len(times) > 1 else 0.0
        attempt.check("E", gap >= pause, f"asked to wait {pause} s, came back after {gap:.2f} s")


def _down(attempt: Attempt) -> None:
    """The server's port refuses connections, or swallows them, for a second; half of the data has come."""
    own = Data(attempt.place / "data", attempt.seed % 3, spawn=False, bytes_per_second=1.5e6)
    port, half = own.server.port, len(own.shards) // 2 * SAMPLES
    back_at = 0.0

    def outage(samples: int) -> None:
        """In the reader's thread, so that what it has ahead meets a dead port in the filler's."""
        nonlocal back_at
        if samples == half:
            own.server.close()
            with _black_hole(port) if attempt.variant == "black hole" else contextlib.nullcontext():
                time.sleep(1.0)
            own.server = ShardServer(own.place, port=port)
            back_at = time.monotonic()

    with contextlib.closing(own):
        reading = Reading(attempt.root, own.shards, between=outage, ahead=3, origin=_AWAY)
        result = read_in_child(reading)
        seconds = time.monotonic() - back_at
    attempt.happened[attempt.variant] += result["counts"]["origin_retries"]
    attempt.check_no_error(result["error"])
    attempt.check_all(own.differences(result["seen"]))
    attempt.check_seconds(seconds, 5.0, "from when it was back it took")


@contextlib.contextmanager
def _black_hole(port: int) -> Iterator[None]:
    """A port that lets connections hang: its queue is full, and nobody takes any."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        yield


def _no_name(attempt: Attempt) -> None:
    """The origin's name can't be resolved for a second: /etc/hosts, as one process sees it, lacks it."""
    data = attempt.borrow(attempt.seed, spawn=True)
    hosts, resolver = attempt.place / "hosts", attempt.place / "resolv.conf"
    hosts.write_text("127.0.0.1 localhost\n")
    resolver.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    port = data.server.url.rpartition(":")[2]
    shards = [shard_of(f"http://origin.test:{port}/{path.name}", None) for path in data.paths]

    def work(stage: Stage) -> Any:
        shown_instead(hosts, Path("/etc/hosts"))
        shown_instead(resolver, Path("/etc/resolv.conf"))
        try:
            socket.getaddrinfo("origin.test", 80)
            gone = False
        except socket.gaierror:
            gone = True
        back = threading.Timer(1.0, hosts.write_text, ["127.0.0.1 localhost origin.test\n"])
        back.start()
        began = time.monotonic()
        result = read_in_child(Reading(attempt.root, shards, origin=_AWAY))
        return [result, gone, time.monotonic() - began]

    with Child(work) as child:
        result, gone, seconds = child.finish(60)
    attempt.happened[attempt.variant] += gone
    attempt.check_no_error(result["error"])
    seen = {
        own.digest: result["seen"].get(there.digest, [])
        for own, there in zip(data.shards, shards, strict=True)
    }
    attempt.check_all(data.differences(seen))
    attempt.check_seconds(seconds - 1.0, 5.0, "from when it was back it took")


def lying(attempt: Attempt) -> None:
    """After a cut, the answer to the range isn't what was asked for."""
    data = attempt.borrow(attempt.seed)
    place = attempt.rng.randrange(len(data.shards))
    size, name = len(data.content[data.shards[place].digest]), data.paths[place].name
    at = attempt.rng.randrange(_BORDER, size - _BORDER)
    off = f"bytes {at - 100}-{size - 1}/{size}"
    lie = {
        "the whole with 200": Fault(first=1, ignore_range=True),
        "another Content-Range": Fault(first=1, headers={"Content-Range": off}),
        "another total": Fault(first=1, headers={"Content-Range": f"bytes {at}-{size - 1}/{size + 512}"}),
        "no Content-Range": Fault(first=1, headers={"Content-Range": ""}),
        "416": Fault(first=1, status=416, headers={"Content-Range": f"bytes */{size}"}),
        "416 without a size": Fault(first=1, status=416),
        "length contradicts range": Fault(first=1, headers={"Content-Length": str(size - at - 7)}),
        "an encoding": Fault(first=1, headers={"Content-Encoding": "gzip"}),
    }[attempt.variant]
    first = len(data.server.log)
    data.server.misbehave(name, Fault(first=1, cut_after_bytes=at), lie)
    result = read_in_child(Reading(attempt.root, data.shards))
    data.server.misbehave(name)
    requests = [r for r in data.server.log[first:] if r.path == name]
    attempt.happened[attempt.variant] += len(requests) > 1
    if result["error"] is None:
        attempt.check_all(data.differences(result["seen"]))
    else:
        attempt.check_error(result["error"], "OriginError|ShardError", data.shards[place].name)
        _check_until(attempt, data, result)
    attempt.check_all(data.published_differences(attempt.root))
    attempt.check_next_start(data)


def slow_down(attempt: Attempt) -> None:
    """The bandwidth falls to a tenth in mid-run, and recovers."""
    fast = 3e6
    own = Data(attempt.place / "data", attempt.seed % 3, spawn=False, bytes_per_second=fast)
    third = len(own.shards) * SAMPLES // 3

    def change(samples: int) -> None:
        if samples == third:
            own.server.link.bytes_per_second = fast / 10
            attempt.happened["a tenth"] += 1
        elif samples == 2 * third:
            own.server.link.bytes_per_second = fast

    with contextlib.closing(own):
        result = read_in_child(Reading(attempt.root, own.shards, between=change, origin=PATIENT))
        attempt.check_no_error(result["error"])
        attempt.check_all(own.differences(result["seen"]))
        retries = result["counts"]["origin_retries"]
        attempt.check("N", retries == 0, f"{retries} retries although bytes kept coming")


ROWS = [
    Row(
        7,
        "object overwritten",
        "object overwritten at the origin between or during fills: another ETag, the same size",
        "BE",
        "All samples of a shard are of one version, or there is an error",
        overwritten,
        count=150,
        variants=(
            "between a fill and its take-over",
            "between two requests",
            "between two requests, If-Range ignored",
        ),
    ),
    Row(
        8,
        "body cut",
        "body cut with and without a stated length, at a member's border too; reset; 1 to 3 times",
        "NBE",
        "It goes on at the byte, with at most 5 % more bytes; what can't be known to be cut is an error",
        cut,
        count=350,
        variants=(
            "with a length",
            "with a length, at a border",
            "no length",
            "no length, at a border",
            "in chunks",
            "in chunks, at a border",
            "reset",
        ),
    ),
    Row(
        9,
        "stall",
        "nothing for ever, no answer, 10 bytes a second",
        "NBL",
        "A dead connection is left in 15 s, a crawling one in 30 s, for a new one",
        stalled,
        count=96,
        short=3,
        variants=(
            "silence",
            "no answer",
            "slow",
            *(f"{kind}, deadlines of a training" for kind in ("silence",)),
            *("silence", "no answer", "slow") * 4,
        ),
    ),
    Row(
        10,
        "origin away",
        "503 and 429 with Retry-After, 500, 502, 504; refused; black hole; DNS gone and back",
        "NDBL",
        "It backs off as it is asked to, and goes on within 5 s after the origin is back",
        refusing,
        count=90,
        variants=(
            "503 with Retry-After",
            "429 with Retry-After",
            "500 thrice",
            "502 thrice",
            "504 thrice",
            "503 thrice",
            "refused",
            "black hole",
            "DNS gone",
        ),
        needs=why_no_small_disk,
    ),
    Row(
        11,
        "wrong answer to a range",
        "200 and the whole; wrong, contradicting or no Content-Range; 416; an encoding",
        "BE",
        "Never a byte that isn't the origin's: it is right, or an error",
        lying,
        count=240,
        variants=(
            "the whole with 200",
            "another Content-Range",
            "another total",
            "no Content-Range",
            "416",
            "416 without a size",
            "length contradicts range",
            "an encoding",
        ),
    ),
    Row(
        23,
        "bandwidth falls",
        "bandwidth falls to a tenth in a run, then recovers",
        "NDB",
        "No error and no retry, as long as bytes come",
        slow_down,
        count=12,
        short=1,
    ),
]
