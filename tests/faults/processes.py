"""Rows 12, 16 and 20: the loader itself, with its policies, its workers and what the machine lets it have."""

import contextlib
import itertools
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import streamload
from benchmarks import process_tree
from streamload import Workers
from streamload.testing.faults import Fault
from tests.faults.data import Data, digest_of
from tests.faults.oracle import Attempt
from tests.faults.readers import Reading, read_in_child
from tests.faults.rows import Row
from tests.support import flat
from tests.support.disks import small_disk, why_no_small_disk
from tests.support.kills import Child, Stage

TRAINING = "training"
"""The stage of a training that has its first samples."""
COUNTS = (10, 10, 10, 10)
_PATIENCE_SECONDS = 60.0
_FEW_DESCRIPTORS = 16
_LITTLE_MEMORY_BYTES = 256 << 20

_DENIED = b"<?xml version='1.0'?><Error><Code>ExpiredToken</Code><Message>expired</Message></Error>"
BAD_ANSWERS = {
    "HTML page": (Fault(body=b"<!DOCTYPE html><html><body>Sign in</body></html>" * 40), "ShardFormatError"),
    "empty file": (Fault(body=b""), "ShardFormatError"),
    "404": (Fault(status=404), "OriginNotFound"),
    "403": (Fault(status=403), "OriginDenied"),
    "expired credentials": (Fault(status=400, body=_DENIED), "OriginError"),
}


def bad_answer(attempt: Attempt) -> None:
    """One shard of four isn't one: an error, or the others exactly once and the one counted."""
    import_torch()
    data = attempt.borrow(attempt.seed, counts=COUNTS)
    kind, _, policy = attempt.variant.partition(", ")
    place = attempt.rng.randrange(len(data.shards))
    fault, error = BAD_ANSWERS[kind]
    name = data.paths[place].name
    first = len(data.server.log)
    data.server.misbehave(name, fault)
    options = {"num_workers": 0, "on_error": policy, "seed": attempt.seed}
    with Child(lambda stage: _train(data, attempt.root, options)) as child:
        result = child.finish(60)
    data.server.misbehave(name)
    attempt.happened[kind] += any(request.path == name for request in data.server.log[first:])
    if policy == "raise":
        attempt.check_error(result["error"], error, data.shards[place].name)
        return
    attempt.check_no_error(result["error"])
    expected = all_samples(data, but=data.shards[place].digest)
    _check_samples(attempt, expected, result["samples"])
    given_up = result["stats"]["shards_given_up"]
    attempt.check("E", given_up == 1, f"{given_up} shards were counted as given up")


def workers(attempt: Attempt) -> None:
    """A training with workers, begun by each start method, ends in one of the ways in which they do.

    In a process with a /dev/shm of its own, so that what is left there is known to be the attempt's.
    """
    import_torch()
    data = attempt.borrow(attempt.seed, spawn=True, counts=COUNTS)

    def alone(stage: Stage) -> Any:
        small_disk(Path("/dev/shm"), 1 << 30)
        _workers(attempt, data)
        deadline = time.monotonic() + _PATIENCE_SECONDS  # what tracks semaphores ends after all others
        while (left := sorted(os.listdir("/dev/shm"))) and time.monotonic() < deadline:
            time.sleep(0.02)
        attempt.check("L", not left, f"left in /dev/shm: {left}")
        return [attempt.wrong, attempt.happened]

    with Child(alone, limit_seconds=300) as child:
        wrong, happened = child.finish(280)
    attempt.check_all(tuple(found) for found in wrong)
    attempt.happened.update(happened)


def _workers(attempt: Attempt, data: Data) -> None:
    method, _, event = attempt.variant.partition(", ")

    options = {"num_workers": 2, "multiprocessing_context": method}
    end_training(attempt, event, lambda stage: _end(event, stage, data, attempt, options))
    attempt.check_next_start(data)


def end_training(attempt: Attempt, event: str, train: Callable[[Stage], list[tuple[str, str]]]) -> None:
    """Let a training run in a session of its own until the event ends it; L: nothing is left running.

    Args:
        attempt: what is wrong is noted there.
        event: "Ctrl-C" and "SIGKILL" come from outside, any other is the training's own doing.
        train: enters the stage TRAINING with its first samples; returns what is wrong after its event.
    """

    def work(stage: Stage) -> Any:
        os.setsid()  # so that all that it starts can be told
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return train(stage)

    with Child(work) as child:
        if event == "Ctrl-C":
            child.stage.wait_for(TRAINING, 60)
            os.killpg(child.pid, signal.SIGINT)
            child.join(_PATIENCE_SECONDS)
            attempt.check("L", child.status is not None, "Ctrl-C did not end it")
        elif event == "SIGKILL":
            child.stage.wait_for(TRAINING, 60)
            child.kill()
        else:
            attempt.check_all(tuple(found) for found in child.finish(90))
        session = child.pid
    attempt.happened[event] += 1
    left = gone_from(session)
    attempt.check("L", not left, f"still running: {left}")


def _end(
    event: str, stage: Stage, data: Data, attempt: Attempt, options: dict[str, Any]
) -> list[tuple[str, str]]:
    """Train to the event; what is wrong afterwards."""
    wrong: list[tuple[str, str]] = []
    loader = _loader(data, attempt.root, options)
    batches = iter(loader)
    samples = [next(batches)]
    stage.enter(TRAINING)
    if event in {"Ctrl-C", "SIGKILL"}:
        for _ in batches:
            time.sleep(0.1)
        time.sleep(60)
    elif event == "worker killed":
        os.kill(a_worker(), signal.SIGKILL)
        # WorkerDied in a batch, torch's own word between two, neither if all of its batches were made before.
        with contextlib.suppress(RuntimeError):
            for _ in batches:
                time.sleep(0.05)
        del batches
        samples = list(loader)
        wrong = differences(all_samples(data), _flat(samples))
    elif event == "persistent workers":
        samples += batches
        wrong = differences(all_samples(data), _flat(samples))
        wrong += differences(all_samples(data), _flat(list(loader)))
    elif event == "dropped":
        del batches, loader
        return wrong
    elif event == "early break":
        del batches
        for _ in loader:
            break
    loader.close()
    return wrong


def little(attempt: Attempt) -> None:
    """Less of the machine than usual: shared memory, descriptors, address space."""
    if attempt.variant == "/dev/shm of 1 MB":
        import_torch()
        data = attempt.borrow(attempt.seed, spawn=True, counts=COUNTS)
        with Child(lambda stage: _with_small_shm(data, attempt)) as child:
            result, batch_bytes = child.finish(90)
        attempt.happened[attempt.variant] += batch_bytes > 1 << 20
        attempt.check_no_error(result["error"])
        _check_samples(attempt, sorted(key for key, _ in all_samples(data)), result["samples"])
        return
    data = attempt.borrow(attempt.seed, spawn=True)
    few = attempt.variant == "16 more descriptors"

    def work(stage: Stage) -> Any:
        if few:
            limit = _limit_for(_FEW_DESCRIPTORS)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        else:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * os.sysconf("SC_PAGE_SIZE") + _LITTLE_MEMORY_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return read_in_child(Reading(attempt.root, data.shards, threads=4, ahead=5))

    with Child(work) as child:
        result = child.finish(60)
    attempt.happened[attempt.variant] += 1
    attempt.check_no_error(result["error"])
    attempt.check_all(data.differences(result["seen"]))
    attempt.check_next_start(data)


def _limit_for(descriptors: int) -> int:
    """The RLIMIT_NOFILE under which a process can open so many more."""
    held = {int(name) for name in os.listdir("/proc/self/fd")}
    free = (number for number in itertools.count() if number not in held)
    return next(itertools.islice(free, descriptors - 1, None)) + 1


def _with_small_shm(data: Data, attempt: Attempt) -> Any:
    small_disk(Path("/dev/shm"), 1 << 20)
    keys: list[str] = []
    batch_bytes, error = 0, None
    try:
        with streamload.make_loader(
            data.urls,
            batch_size=10,
            num_workers=2,
            batches=streamload.Batches(with_keys=True),
            cache_dir=attempt.root,
            cache_size="1GB",
        ) as loader:
            for images, _, names in loader:
                batch_bytes = images.numel() * images.element_size()
                keys += names["__key__"]
    except Exception as exc:
        error = {"kinds": [kind.__name__ for kind in type(exc).__mro__], "text": str(exc)}
    return [{"samples": sorted(keys), "error": error}, batch_bytes]


def _train(data: Data, root: Path, options: dict[str, Any]) -> dict[str, Any]:
    """One epoch of the raw samples; what came, and what ended it."""
    samples: list[list[str]] = []
    error, stats = None, {}
    try:
        with _loader(data, root, options) as loader:
            try:
                for batch in loader:
                    samples += _flat([batch])
            finally:
                stats = loader.stats().as_dict()
    except Exception as exc:
        error = {"kinds": [kind.__name__ for kind in type(exc).__mro__], "text": str(exc)}
    return {"samples": sorted(samples), "stats": stats, "error": error}


def _loader(data: Data, root: Path, options: dict[str, Any]) -> streamload.Loader:
    return flat.make_loader(
        data.urls,
        workers=Workers(map_sample=describe),
        batch_size=1,
        cache_dir=root,
        cache_size="1GB",
        **options,
    )


def describe(sample: dict[str, Any]) -> dict[str, Any]:
    """Which sample it is, and a digest of its members."""
    members = {name: content for name, content in sample.items() if not name.startswith("__")}
    return {"key": sample["__key__"], "digest": digest_of(members)}


def _flat(batches: list[Any]) -> list[list[str]]:
    return sorted([batch["key"][0], batch["digest"][0]] for batch in batches)


def all_samples(data: Data, but: str = "") -> list[Any]:
    return sorted(sample for digest, samples in data.samples.items() if digest != but for sample in samples)


def _check_samples(attempt: Attempt, expected: list[Any], got: list[Any]) -> None:
    attempt.check_all(differences(expected, got))


def differences(expected: list[Any], got: list[Any]) -> list[tuple[str, str]]:
    """N, D and B of an epoch in which samples may come in any order."""
    if got == expected:
        return []
    missing = len([sample for sample in expected if sample not in got])
    strange = len([sample for sample in got if sample not in expected])
    doubled = len(got) - len({str(sample) for sample in got})
    found = (("N", missing, "missing"), ("B", strange, "not the origin's"), ("D", doubled, "doubled"))
    return [(letter, f"{count} samples {what}") for letter, count, what in found if count]


def a_worker() -> int:
    """The number of a worker of this process's DataLoader, by the name that torch gives them."""
    for pid in process_tree.pids():
        with contextlib.suppress(FileNotFoundError):
            if Path(f"/proc/{pid}/comm").read_text().startswith("pt_data_worker"):
                return pid
    raise ProcessLookupError("there is no worker")


def gone_from(session: int) -> list[str]:
    """Which processes of a session are there after they had time to go."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        left = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                name, _, rest = path.read_text().rpartition(")")
            except OSError:
                continue
            state, _, _, sid = rest.split()[:4]
            if int(sid) == session and state != "Z":
                left.append(name)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def import_torch() -> None:
    """Before the fork, so that it is done once; nothing is computed: its threads don't survive a fork."""
    import torch.utils.data  # noqa: F401

    getattr(streamload, "make_loader")  # noqa: B009


_METHODS = ("fork", "forkserver", "spawn")
_EVENTS = ("early break", "dropped", "persistent workers", "worker killed", "Ctrl-C", "SIGKILL")

ROWS = [
    Row(
        12,
        "not a shard",
        "HTML page with status 200; empty file; 404; 403; expired credentials",
        "NDBEL",
        '`on_error="raise"` is an error that names the shard; `skip` counts it and gives all others once',
        bad_answer,
        count=100,
        variants=tuple(f"{kind}, {policy}" for policy in ("raise", "skip") for kind in BAD_ANSWERS),
    ),
    Row(
        16,
        "processes",
        "fork, forkserver, spawn × worker SIGKILL, persistent workers, early break, dropped, Ctrl-C, SIGKILL",
        "NDBTL",
        "However a training ends, no process, no lock and no shared memory is left",
        workers,
        needs=why_no_small_disk,
        count=36,
        short=3,
        variants=tuple(f"{method}, {event}" for event in _EVENTS for method in _METHODS),
    ),
    Row(
        20,
        "little of the machine",
        "/dev/shm of 1 MB; 16 descriptors, 256 MB of address space beyond what the start took",
        "NDBL",
        "Batches larger than /dev/shm come through; fills and readers live on little",
        little,
        count=30,
        variants=("/dev/shm of 1 MB", "16 more descriptors", "256 MB of memory"),
        needs=why_no_small_disk,
    ),
]
