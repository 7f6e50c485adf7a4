"""Rows 34, 37 and 38: orders of groups without samples, of far windows, and of nodes that disagree."""

import contextlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import streamload
from streamload import Workers
from streamload.testing.faults import EMPTY_PAGE, Fault
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, read_oracle, write_shards
from tests.faults.oracle import Attempt
from tests.faults.processes import describe, import_torch
from tests.faults.rows import Row
from tests.support import flat
from tests.support.kills import Child, Stage

_STEPS = 40
_RANKS = 64
_FORMS = {
    "3 of 4 shards missing": ((10, 10, 10, 10), 3, 4),
    "fewer samples than groups": ((3,), 0, 8),
    "fewer shards than groups": ((4, 4), 1, 7),
}
"""Of each: samples of the shards, how many of these are missing, groups."""


def more_groups(attempt: Attempt) -> None:
    """A run of given length on two ranks, some groups of which have no sample; cut, and resumed."""
    counts, missing, groups = _FORMS[attempt.variant]
    paths = write_shards(attempt.place / "data", list(counts), seed=attempt.seed)
    there = {key for path in paths[missing:] for key, _ in read_oracle(path)}
    cut = attempt.rng.randrange(1, _STEPS)
    with ShardServer(attempt.place / "data") as server:
        for path in paths[:missing]:
            server.misbehave(path.name, Fault(status=404))
        urls = [f"{server.url}/{path.name}" for path in paths]
        ranks = {"groups": groups, "world_size": 2, "num_batches": _STEPS, "batch_size": 1, "lanes": 2}

        def run(cache: str, states: Any = None) -> Any:
            with contextlib.ExitStack() as stack:
                loaders = [
                    stack.enter_context(_loader(urls, attempt.place / cache, rank=rank, **ranks))
                    for rank in range(2)
                ]
                for loader in loaders if states else ():
                    loader.load_state_dict(states)
                given: list[list[str]] = [[], []]
                saved: list[Any] = []
                iterators = [iter(loader) for loader in loaders]
                for step in range(_STEPS):
                    for own, iterator in zip(given, iterators, strict=True):
                        own += [key for batch in [next(iterator, None)] if batch for key in batch["key"]]
                    if step + 1 == cut:
                        saved = [loader.state_dict() for loader in loaders]
                return given, saved

        given, states = _in_child(lambda: run("cache"))
        rest, _ = _in_child(lambda: run("empty", states))
    attempt.happened[attempt.variant] += 1
    for own, later in zip(given, rest, strict=True):
        attempt.check("N", len(own) == _STEPS, f"a rank gave {len(own)} batches of {_STEPS}")
        attempt.check("D", later == own[cut:], "it went on with other samples than before")
    found = {key for own in given for key in own}
    attempt.check("B", found <= there, f"{len(found - there)} samples are of shards that are missing")
    attempt.check("N", found >= there, f"{len(there - found)} samples never came")


def far_windows(attempt: Attempt) -> None:
    """Windows of most of an epoch: one rank of many follows it, is cut, and goes on."""
    window = int(attempt.variant.replace(",", ""))
    (path,) = write_shards(attempt.place, [1000], options=ShardOptions(image_side=(1, 1)))
    shards = window * 3 // 2000
    steps = shards * 1000 // 4096
    # The end of the pass gives out half a window at once: that is where cursors have to reach far back.
    cut = attempt.rng.randrange(steps - window // 2 // 4096, steps)
    options = {"shuffle": window, "batch_size": 4096 // _RANKS, "rank": 0, "world_size": _RANKS, "groups": 1}

    def run(state: Any = None) -> Any:
        with _loader([str(path)] * shards, attempt.root, lanes=8, **options) as loader:
            loader.set_epoch(1)
            if state:
                loader.load_state_dict(state)
            given, saved = [], None
            for number, batch in enumerate(loader, 1):
                given.append(list(batch["key"]))
                saved = loader.state_dict() if number == cut else saved
            return given, saved

    whole, state = _in_child(run)
    rest, _ = _in_child(lambda: run(state))
    attempt.happened["windows"] += 1
    attempt.check("N", len(whole) == steps, f"{len(whole)} batches, not {steps}")
    attempt.check("D", rest == whole[cut:], "it went on with other samples than before")
    most = max(Counter(key for batch in whole for key in batch).values(), default=0)
    attempt.check("D", most <= shards, f"a sample came {most} times from {shards} shards")


def other_sizes(attempt: Attempt) -> None:
    """The second of two nodes doesn't see the sizes.json by which the first cuts the groups."""
    counts = [40, 10, 25, 5, 30, 10]
    paths = write_shards(attempt.place / "data", counts, seed=attempt.seed)
    sizes = attempt.place / "data" / "sizes.json"
    written = json.dumps({path.name: count for path, count in zip(paths, counts, strict=True)})
    nodes = {"groups": 2, "world_size": 2, "num_batches": 12, "batch_size": 5}

    def train(urls: list[str], rank: int, states: Any = None, **options: Any) -> Any:
        with _loader(urls, attempt.place / f"node-{rank}", rank=rank, **{**nodes, **options}) as loader:
            if states:
                loader.load_state_dict(states)
            return [key for batch in loader for key in batch["key"]], loader.state_dict()

    with ShardServer(attempt.place / "data") as server:
        urls = [f"{server.url}/{path.name}" for path in paths]
        sizes.write_text(written)
        if attempt.variant == "gone at a resume":
            # In the middle of a pass: 12 of 24 batches.
            states = [_in_child(lambda rank=rank: train(urls, rank, num_batches=6))[1] for rank in range(2)]
            sizes.unlink()
            error = _error_of(lambda: train(urls, 0, states))
            expected = "StateMismatch"
        elif attempt.variant == "not there, torch.distributed":
            error = _compared(attempt, train, [str(path) for path in paths], sizes)
            expected = "OrderDiverged"
        else:
            _in_child(lambda: train(urls, 0))
            page = attempt.variant == "page with status 200"
            server.misbehave("sizes.json", Fault(body=EMPTY_PAGE) if page else Fault(status=403))
            error = _error_of(lambda: train(urls, 1))
            expected = "DataError" if page else "OriginDenied"
    attempt.happened[attempt.variant] += 1
    attempt.check_error(error, expected, "sizes.json")


def _compared(attempt: Attempt, train: Any, paths: list[str], sizes: Path) -> Any:
    """The error of the second of two nodes that torch.distributed joins; the first finds no sizes.json."""
    written = sizes.read_text()

    def node(rank: int) -> Any:
        import torch.distributed

        # Ranks of one node would share what the first of them found.
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": "2"}
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{attempt.place}/rendezvous", rank=rank, world_size=2
        )
        if rank == 0:
            sizes.unlink()
            train(paths, 0)
        torch.distributed.barrier()
        if rank == 1:
            sizes.write_text(written)
            return _caught(lambda: train(paths, 1))
        return None

    with Child(lambda stage: node(0)) as first, Child(lambda stage: node(1)) as second:
        first.finish(90)
        return second.finish(90)


def _in_child(work: Any) -> Any:
    """What it returns in a process of its own."""
    import_torch()

    def done(stage: Stage) -> Any:
        return work()

    with Child(done) as child:
        return child.finish(120)


def _error_of(work: Any) -> Any:
    return _in_child(lambda: _caught(work))


def _caught(work: Any) -> Any:
    try:
        work()
    except Exception as exc:
        return {"kinds": [kind.__name__ for kind in type(exc).__mro__], "text": str(exc)}
    return None


def _loader(urls: list[str], cache: Path, **options: Any) -> streamload.Loader:
    defaults = {"num_workers": 0, "shuffle": 20, "lanes": 2, "cache_size": "1GB", "max_bad_shards": None}
    return flat.make_loader(
        urls, workers=Workers(map_sample=describe), cache_dir=cache, **{**defaults, **options}
    )


ROWS = [
    Row(
        34,
        "more groups than shards",
        "groups without samples: shards missing, or too few; a global batch smaller than `groups`",
        "NDBL",
        "Each rank gives as many full batches; every sample that is there comes; a resume is exact",
        more_groups,
        count=60,
        variants=tuple(_FORMS),
    ),
    Row(
        37,
        "far windows",
        "`shuffle` of two thirds of an epoch, cut near its end and resumed",
        "NDL",
        "The epoch ends with its last batch, and goes on exactly from any cut",
        far_windows,
        count=9,
        short=1,
        variants=("200,000", "400,000", "1,000,000"),
    ),
    Row(
        38,
        "other sizes.json",
        "one of two nodes gets 403, a page, or none; `sizes.json` gone between save and resume",
        "EL",
        "Nodes that would divide the samples differently are told, before a batch is given",
        other_sizes,
        count=40,
        variants=(
            "403",
            "page with status 200",
            "not there, torch.distributed",
            "gone at a resume",
        ),
    ),
]
