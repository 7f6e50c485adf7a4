"""Rows 35 and 41: what all ranks of a run wait for, and has to be named: a rank's shards, one slow shard."""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import streamload
from streamload import Cache, Order, Workers
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from tests.faults.data import Data
from tests.faults.oracle import Attempt
from tests.faults.processes import all_samples, describe, differences, import_torch
from tests.faults.rows import Row
from tests.support.kills import Child

COUNTS = (10,) * 8
_BATCH = 2
_WAIT_SECONDS = 2.0
_SLOW_BYTES_PER_SECOND = 30_000


def shards_gone(attempt: Attempt) -> None:
    """All shards of one of two ranks go in the middle of an epoch; the other sits in its all-reduce."""
    import_torch()
    kind, _, end = attempt.variant.partition(", ")
    comes_back = end == "comes back"
    data = attempt.borrow(attempt.seed, spawn=True, counts=COUNTS)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ShardServer(data.place))
        server.stop_after(0.5)
        urls = [[f"{url}/{path.name}" for path in data.paths] for url in (data.server.url, server.url)]
        wait = 60.0 if comes_back else _WAIT_SECONDS
        ranks = [
            stack.enter_context(
                Child(functools.partial(_rank, rank, urls[rank], attempt.place, wait), limit_seconds=120)
            )
            for rank in (0, 1)
        ]
        _await(attempt.place / "begun-1")
        server.misbehave("*", Fault(status=int(kind)))
        first = len(server.log)
        server.go_on()
        if comes_back:
            _await(attempt.place / "told-0")
            server.misbehave("*")
        near, far = (rank.finish(100) for rank in ranks)
        attempt.happened[attempt.variant] += any(r.status == int(kind) for r in server.log[first:])
    for one in (near, far):
        told = [line for line in one["said"] if line.startswith("rank 1 of 2 has waited")]
        attempt.check("E", bool(told), f"rank {one['rank']} wasn't told who waits: {one['said'][:3]}")
        attempt.check(
            "E",
            any(f"{server.url}/" in line and kind in line and "until" in line for line in told),
            f"nobody was told for what and until when: {told[:2]}",
        )
    if comes_back:
        for one in (near, far):
            attempt.check_no_error(one["error"])
        taken = sorted(near["samples"] + far["samples"])
        attempt.check_all(differences(all_samples(data), taken))
        return
    attempt.check_error(far["error"], "OriginOutage", f"{server.url}/")
    attempt.check("E", "rank 1 of 2" in (far["error"] or {"text": ""})["text"], "the error names no rank")
    attempt.check("E", near["error"] is not None, "the other rank went on")
    why = "rank 1 of 2 has failed, and with it the run: OriginOutage"
    attempt.check("E", any(line.startswith(why) for line in near["said"]), "the other rank wasn't told why")
    strange = [sample for sample in near["samples"] + far["samples"] if sample not in all_samples(data)]
    attempt.check("B", not strange, f"{len(strange)} samples aren't the origin's")


def _rank(rank: int, urls: list[str], place: Path, wait: float, stage: Any) -> dict[str, Any]:
    """One of two ranks, each on a node of its own: it steps together with the other."""
    import torch

    from streamload.loader import worker_config
    from streamload.origins.origin import OriginOptions
    from streamload.ranks import monitor
    from streamload.worker import blocked

    monitor._POLL_SECONDS, monitor._STILL_SECONDS = 0.1, 0.3
    monitor._WAIT_SECONDS = monitor._OUTAGE_SECONDS = 0.5
    blocked.REPORT_SECONDS = 0.1
    worker_config.OriginOptions = functools.partial(  # type: ignore[assignment,misc]
        OriginOptions, attempts=2, backoff_seconds=0.01, backoff_limit_seconds=0.05
    )
    os.environ["STREAMLOAD_ORIGIN_WAIT"] = str(wait)
    samples: list[list[str]] = []
    error = None
    with _said(place / f"told-{rank}") as said:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{place}/rendezvous", rank=rank, world_size=2
        )
        loader = streamload.make_loader(
            urls,
            workers=Workers(map_sample=describe),
            batch_size=_BATCH,
            num_workers=1,
            order=Order(num_batches=sum(COUNTS) // 2 // _BATCH, groups=2, rank=rank, world_size=2, lanes=1),
            shuffle=0,
            cache=Cache(ahead="1KB"),
            cache_dir=place / f"node-{rank}",
            cache_size="1GB",
        )
        try:
            for batch in loader:
                torch.distributed.all_reduce(torch.ones(1))
                (place / f"begun-{rank}").touch()
                samples += [list(pair) for pair in zip(batch["key"], batch["digest"], strict=True)]
        except Exception as exc:
            error = {"kinds": [kind.__name__ for kind in type(exc).__mro__], "text": str(exc)}
        loader.close()
    return {"rank": rank, "samples": samples, "error": error, "said": said}


@contextlib.contextmanager
def _said(flag: Path) -> Iterator[list[str]]:
    """What is logged meanwhile; a file is there once a rank is named."""
    said: list[str] = []

    def note(record: logging.LogRecord) -> None:
        said.append(record.getMessage())
        if said[-1].startswith("rank "):
            flag.touch()

    handler = logging.Handler()
    handler.emit = note  # type: ignore[method-assign]
    logger = logging.getLogger("streamload")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def _await(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def slow_shard(attempt: Attempt) -> None:
    """One shard of eight comes slowly: each batch waits a moment for it."""
    import_torch()
    data = attempt.borrow(attempt.seed, counts=COUNTS)
    place = attempt.rng.randrange(len(data.shards))
    name = data.paths[place].name
    data.server.misbehave(name, Fault(bytes_per_second=_SLOW_BYTES_PER_SECOND))
    with Child(lambda stage: _train(data, attempt.root, int(attempt.variant[0]))) as child:
        samples, stats, error, said = child.finish(90)
    data.server.misbehave(name)
    attempt.happened[attempt.variant] += stats["data_wait_seconds"] > 0
    attempt.check_no_error(error)
    attempt.check_all(differences(all_samples(data), sorted(samples)))
    worst = next(iter(stats["shard_wait_seconds"]), "no shard")
    attempt.check("E", worst == data.shards[place].name, f"{worst} is named for {name}")
    lines = [line for line in said if "one shard is slow" in line]
    attempt.check("E", bool(lines), "no line names a slow shard")
    attempt.check("E", all(name in line for line in lines), f"another shard is named: {lines[:2]}")


def _train(data: Data, root: Path, workers: int) -> Any:
    from streamload.loader import checks

    checks._SLOW_SHARD_SECONDS = 0.1
    samples: list[list[str]] = []
    error = None
    with (
        _said(root.with_name("told")) as said,
        streamload.make_loader(
            data.urls,
            workers=Workers(map_sample=describe),
            batch_size=_BATCH,
            num_workers=workers,
            cache_dir=root,
            cache_size="1GB",
        ) as loader,
    ):
        try:
            for batch in loader:
                samples += [list(pair) for pair in zip(batch["key"], batch["digest"], strict=True)]
        except Exception as exc:
            error = {"kinds": [kind.__name__ for kind in type(exc).__mro__], "text": str(exc)}
        stats = loader.stats().as_dict()
    return [samples, stats, error, said]


ROWS = [
    Row(
        35,
        "a rank's shards go",
        "all shards of one of two ranks answer 404 or 503 in mid-epoch, for good or for a while",
        "NDBLE",
        "All ranks are told which one waits, for what and until when; they go on, or end, together",
        shards_gone,
        count=24,
        short=2,
        variants=("404, for good", "404, comes back", "503, for good", "503, comes back"),
    ),
    Row(
        41,
        "one slow shard",
        "one shard of eight comes slowly, so that each batch waits a moment",
        "NDBE",
        "The waits are added up by shard, and the slow one is named in `stats()` and in the log",
        slow_shard,
        count=24,
        variants=("2 workers", "0 workers"),
    ),
]
