"""The same faults on webdataset's `cache_dir`, used as its documentation says.

    wds.WebDataset(urls, shardshuffle=False, cache_dir=...)

over http, which it fetches by curl. An exception of any kind counts as its error (E); its cache has no limit
unless asked for one and checks it every 30 s, so K isn't asked of it; it has no index, so C is that a cached
file holds the origin's bytes. Everything else is the rows' own.
"""

import os
import shlex
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from streamload.testing.faults import Fault
from tests.faults import origin, pipe, processes
from tests.faults.data import SAMPLES, Data, Samples, digest_of
from tests.faults.oracle import Attempt
from tests.faults.readers import Hang
from tests.support.kills import Child, ChildFailed, Hit, Moment, Stage, kill_loop

_DEADLINE_SECONDS = 15.0
_READERS = 4


def import_webdataset() -> None:
    """Before a fork, so that it is done once."""
    import webdataset  # noqa: F401


def read_all(urls: list[str], cache: Path) -> dict[str, Any]:
    """One epoch; samples by URL, and the error that ended it."""
    import webdataset as wds

    cache.mkdir(exist_ok=True)
    seen: dict[str, Samples] = {}
    error = None
    try:
        for sample in wds.WebDataset(urls, shardshuffle=False, cache_dir=str(cache)):
            members = {name: value for name, value in sample.items() if not name.startswith("__")}
            seen.setdefault(sample["__url__"], []).append([sample["__key__"], digest_of(members)])
    except Exception as exc:
        error = {"kinds": [kind.__name__ for kind in type(exc).__mro__], "text": str(exc)}
    return {"seen": seen, "error": error}


def _reading(urls: list[str], cache: Path) -> dict[str, Any]:
    """The same in a process with a deadline: some of its waits have none."""
    import_webdataset()

    def work(stage: Stage) -> Any:
        os.setsid()
        return read_all(urls, cache)

    with Child(work) as child:
        if child.join(_DEADLINE_SECONDS) is None:
            os.killpg(child.pid, signal.SIGKILL)
            text = f"not done after {_DEADLINE_SECONDS:g} s"
            return {"seen": {}, "error": {"kinds": [Hang.__name__], "text": text}}
        if child.status != 0:
            raise ChildFailed(child.error or f"ended with {child.status}")
        return child.result  # type: ignore[no-any-return]


def _differences(data: Data, urls: list[str], seen: dict[str, Samples]) -> list[tuple[str, str]]:
    return data.differences(
        {shard.digest: seen.get(url, []) for shard, url in zip(data.shards, urls, strict=True)}
    )


def _check_cache(attempt: Attempt, data: Data, cache: Path) -> None:
    """T and C of its directory after a next start."""
    contents = {path.name: path.read_bytes() for path in data.paths}
    for path in cache.iterdir():
        if path.name not in contents:
            attempt.check("T", False, f"{path.name} was left")
        elif path.read_bytes() != contents[path.name]:
            attempt.check("C", False, f"{path.name} is cached with other bytes than the origin's")


def kills(attempt: Attempt) -> None:
    """Row 1: four processes on one cache directory, one of them killed at a random time."""
    import_webdataset()
    data = attempt.borrow(attempt.seed, spawn=True, bytes_per_second_per_connection=4e6)
    cache = attempt.place / "cache"
    moments = [Moment("reading", attempt.rng.uniform(0, 0.3)) for _ in range(2)]

    def reading(first: int) -> Any:
        urls = [*data.urls[first:], *data.urls[:first]]

        def work(stage: Stage) -> Any:
            stage.enter("reading")
            return read_all(urls, cache)

        return work

    def look(hit: Hit) -> None:
        attempt.happened["reading"] += hit.stage is not None

    with ExitStack() as stack:
        others = [stack.enter_context(Child(reading(first))) for first in range(1, _READERS)]
        results = [
            kill_loop(reading(0), moments, after_kill=look)[1],
            *(child.finish(60) for child in others),
        ]
    for result in [*results, _reading(data.urls, cache)]:
        attempt.check_no_error(result["error"])
        attempt.check_all(_differences(data, data.urls, result["seen"]))
    _check_cache(attempt, data, cache)


def rotten(attempt: Attempt) -> None:
    """Row 6: a cached file is changed on disk. It has no index and no names: the file alone."""
    data = attempt.borrow(attempt.seed)
    cache = attempt.place / "cache"
    _reading(data.urls, cache)
    one, other = attempt.rng.sample([path.name for path in data.paths], 2)
    content = bytearray((cache / one).read_bytes())
    change = attempt.variant.partition(" in ")[0]
    if change == "bit flipped":
        at = content.find(b"\xff\xd8\xff", attempt.rng.randrange(len(content) // 2))
        content[at + 3 + attempt.rng.randrange(500)] ^= 1 << attempt.rng.randrange(8)
        (cache / one).write_bytes(content)
    elif change == "cut":
        os.truncate(cache / one, attempt.rng.randrange(1, len(content)))
    else:
        (cache / one).rename(attempt.place / "aside")
        (cache / other).rename(cache / one)
        (attempt.place / "aside").rename(cache / other)
    attempt.happened[change] += 1
    result = _reading(data.urls, cache)
    attempt.check_no_error(result["error"])
    attempt.check_all(_differences(data, data.urls, result["seen"]))


def cut(attempt: Attempt) -> None:
    """Row 8: a body that ends early: resumed, or an error, or begun anew; and right at the next start."""
    data = attempt.borrow(attempt.seed)
    place = attempt.rng.randrange(len(data.shards))
    size, path = len(data.content[data.shards[place].digest]), data.paths[place]
    at = attempt.rng.randrange(1, size)
    if "border" in attempt.variant:
        at = origin.member_borders(data, place)[attempt.rng.randrange(3 * SAMPLES - 1)]
    framing: Any = "close" if "no length" in attempt.variant else "length"
    framing = "chunked" if "chunks" in attempt.variant else framing
    fault = Fault(first=1, cut_after_bytes=at, framing=framing, reset=attempt.variant.startswith("reset"))
    first = len(data.server.log)
    data.server.misbehave(path.name, fault)
    result = _reading(data.urls, attempt.place / "cache")
    data.server.misbehave(path.name)
    attempt.happened[attempt.variant] += any(r.path == path.name for r in data.server.log[first:])
    _check_exact_or_error(attempt, data, data.urls, result)
    again = _reading(data.urls, attempt.place / "cache")
    attempt.check_no_error(again["error"])
    attempt.check_all(_differences(data, data.urls, again["seen"]))


def bad_answer(attempt: Attempt) -> None:
    """Row 12: something that isn't a shard: an error."""
    data = attempt.borrow(attempt.seed, counts=processes.COUNTS)
    kind = attempt.variant.partition(", ")[0]
    name = attempt.rng.choice(data.paths).name
    first = len(data.server.log)
    data.server.misbehave(name, processes.BAD_ANSWERS[kind][0])
    result = _reading(data.urls, attempt.place / "cache")
    data.server.misbehave(name)
    attempt.happened[kind] += any(request.path == name for request in data.server.log[first:])
    if result["error"] is None:
        attempt.check("E", False, f"no error, {sum(map(len, result['seen'].values()))} samples")
    elif "Hang" in result["error"]["kinds"]:
        attempt.check("L", False, result["error"]["text"])


def piped(attempt: Attempt) -> None:
    """Row 13: a command that fails at first: exact, or an error and exact at the next start."""
    data = attempt.borrow(attempt.seed)
    place = attempt.rng.randrange(len(data.shards))
    command, times = pipe.pipe_command(attempt, data.paths[place])
    urls = [f"pipe:cat {shlex.quote(str(path))}" for path in data.paths]
    urls[place] = f"pipe:{command}"
    result = _reading(urls, attempt.place / "cache")
    attempt.happened[attempt.variant] += min(times, pipe.runs_of(attempt))
    _check_exact_or_error(attempt, data, urls, result)
    for _ in range(times):
        again = _reading(urls, attempt.place / "cache")
    attempt.check_no_error(again["error"])
    attempt.check_all(_differences(data, urls, again["seen"]))


def workers(attempt: Attempt) -> None:
    """Row 16: its loader with two workers, ended in the ways in which trainings do."""
    import_webdataset()
    processes.import_torch()
    data = attempt.borrow(attempt.seed, spawn=True, counts=processes.COUNTS)
    method, _, event = attempt.variant.partition(", ")
    cache = attempt.place / "cache"

    processes.end_training(attempt, event, lambda stage: _end(event, method, stage, data, cache))
    again = _reading(data.urls, cache)
    attempt.check_no_error(again["error"])
    attempt.check_all(_differences(data, data.urls, again["seen"]))
    _check_cache(attempt, data, cache)


def _end(event: str, method: str, stage: Stage, data: Data, cache: Path) -> list[tuple[str, str]]:
    import webdataset as wds

    cache.mkdir()
    # nodesplitter and workersplitter are its defaults: each worker reads its share of the shards.
    dataset = wds.WebDataset(data.urls, shardshuffle=False, cache_dir=str(cache)).map(processes.describe)
    loader = wds.WebLoader(
        dataset, batch_size=None, num_workers=2, multiprocessing_context=method, persistent_workers=True
    )
    samples = iter(loader)
    got = [next(samples)]
    stage.enter(processes.TRAINING)
    if event in {"Ctrl-C", "SIGKILL"}:
        for _ in samples:
            time.sleep(0.1)
        time.sleep(60)
    elif event == "worker killed":
        os.kill(processes.a_worker(), signal.SIGKILL)
        try:
            for _ in samples:
                time.sleep(0.05)
        except RuntimeError:
            stage.enter("worker died")
        del samples, loader  # with persistent workers its loader can't be used again after that
        return []
    elif event == "persistent workers":
        got += samples
        return [
            wrong
            for epoch in (got, list(loader))
            for wrong in processes.differences(
                processes.all_samples(data), sorted([one["key"], one["digest"]] for one in epoch)
            )
        ]
    return []


def _check_exact_or_error(attempt: Attempt, data: Data, urls: list[str], result: dict[str, Any]) -> None:
    if result["error"] is None:
        attempt.check_all(_differences(data, urls, result["seen"]))
    elif "Hang" in result["error"]["kinds"]:
        attempt.check("L", False, result["error"]["text"])


BY_NAME = {
    "killed at random": (kills, 60),
    "bytes rot": (rotten, 60),
    "body cut": (cut, 63),
    "not a shard": (bad_answer, 20),
    "pipe": (piped, 21),
    "processes": (workers, 12),
}
"""Which rows it meets, and how often at full count."""
