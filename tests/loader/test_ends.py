"""An epoch ends where its data ends: not where a function stops, and not where a sample is lost.

Each function of the user's raises StopIteration at one sample, in training and evaluation, with workers and
without. Losses are planted at each place that passes samples on.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streamload import Source
from streamload.errors import NotSendable, PassMismatch, PolicyError
from streamload.extension import Extension, RankPart, WorkerPart
from streamload.ipc.queues import MessageQueue
from streamload.loader.epoch import InOrder
from streamload.loader.loader import Loader
from streamload.order.lanes import Lanes
from streamload.order.plan import OrderOptions, pass_order
from streamload.shards.samples import Entry
from streamload.testing.shards import write_shards
from streamload.worker import loop, sampler
from streamload.worker.reference_stream import ReferenceStream
from tests.support import flat

TRAIN = pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
WORKERS = pytest.mark.parametrize("workers", [0, 2])
LAST = "00001000019"
"""The key of the sample at which functions stop that see keys."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    write_shards(folder, [20, 20, 20])
    return f"{folder}/{{00000..00002}}.tar"


def make(data: str, cache: Path, **options: Any) -> Loader:
    defaults = {"batch_size": 4, "multiprocessing_context": "fork" if options.get("num_workers") else None}
    return flat.make_loader(data, **{**defaults, "cache_dir": cache, "cache_size": "1GB", **options})


def ids(texts: list[str]) -> torch.Tensor:
    return torch.zeros(len(texts), 4, dtype=torch.long)


def pixels(image: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image.convert("RGB").resize((4, 4))).transpose(2, 0, 1).copy())


def options_that_stop_in(option: str) -> dict[str, Any]:
    """Options with which one function raises StopIteration at a sample."""
    calls = itertools.count(1)

    def stopping_preprocess(image: Any) -> torch.Tensor:
        if next(calls) == 17:
            next(iter(()))
        return pixels(image)

    def stopping_tokenizer(texts: list[str]) -> torch.Tensor:
        if any("index 19" in text for text in texts):
            next(iter(()))
        return ids(texts)

    def at_last(raw: Any, value: Any) -> Any:
        if (raw["__key__"] if isinstance(raw, dict) else raw.key) == LAST:
            raise StopIteration
        return value

    def stopping_map(raw: Any) -> dict[str, Any]:
        at_last(raw, None)
        return {"value": 1}

    def stopping_collate(samples: list[Any]) -> dict[str, Any]:
        if next(calls) == 5:
            next(iter(()))
        return {"value": torch.zeros(len(samples))}

    def stopping_keep(entry: Any) -> bool:
        return bool(at_last(entry, True))

    def stopping_number(raw: Any) -> float:
        return float(at_last(raw, 1.0))

    return {
        "preprocess": {"preprocess": stopping_preprocess, "tokenizer": ids},
        "tokenizer": {"preprocess": pixels, "tokenizer": stopping_tokenizer},
        "map_sample": {"map_sample": stopping_map},
        "collate": {"map_sample": lambda raw: {"value": 1}, "collate": stopping_collate},
        "keep": {"map_sample": lambda raw: {"value": 1}, "keep": stopping_keep},
        "facts": {
            "map_sample": lambda raw: {"value": 1},
            "facts": {"fact": stopping_number},
            "keep": lambda entry: True,
        },
        "repeat": {"map_sample": lambda raw: {"value": 1}, "repeat": stopping_number},
        "sample_weight": {"preprocess": pixels, "tokenizer": ids, "sample_weight": stopping_number},
    }[option]


@WORKERS
@pytest.mark.parametrize(
    ("option", "train", "where"),
    [
        (option, train, where)
        for option, where in {
            "preprocess": r"in sample '\d+' of .*\.tar",
            "tokenizer": r"in the batch of samples '\d+', ",
            "map_sample": f"in sample '{LAST}' of .*\\.tar",
            "collate": r"in the batch of samples '\d+', ",
            "keep": f"in keep=, for sample '{LAST}'",
            "facts": f"in a function of facts=, for sample '{LAST}'",
            "repeat": f"in the function of repeat=, for sample '{LAST}'",
            "sample_weight": f"in the function of sample_weight=, for sample '{LAST}'",
        }.items()
        for train in (True, False)
        if train or option not in ("repeat", "sample_weight")
    ],
)
def test_a_function_that_stops_is_an_error_that_names_it_and_the_sample(
    option: str, train: bool, where: str, workers: int, data: str, tmp_path: Path
) -> None:
    options = options_that_stop_in(option)
    with (
        make(data, tmp_path, train=train, num_workers=workers, **options) as loader,
        pytest.raises(RuntimeError, match=rf"\.stopping_\w+ raised StopIteration\(\) \(.*{where}"),
    ):
        list(loader)


def test_a_function_that_stops_while_samples_are_counted_is_named_too(data: str, tmp_path: Path) -> None:
    """By `list()`, which asks for the length: the indexes are in the cache already."""
    kept = {"map_sample": lambda raw: {"value": 1}, "train": True, "num_workers": 0}
    with make(data, tmp_path, **kept) as loader:
        list(loader)
    with (
        make(data, tmp_path, **{**options_that_stop_in("repeat"), "num_workers": 0}) as loader,
        pytest.raises(
            RuntimeError, match=r"stopping_number raised StopIteration\(\) \(.*function of repeat="
        ),
    ):
        len(loader)


class Stopping(Extension):
    """Stops in one of its hooks."""

    name = "stopping"

    def __init__(self, hook: str):
        self.hook = hook

    def in_worker(self, process: Any) -> WorkerPart | None:
        if self.hook == "in_worker":
            raise StopIteration
        return self._part(WorkerPart)

    def in_rank(self, run: Any) -> RankPart | None:
        return self._part(RankPart)

    def _part(self, kind: Any) -> Any:
        owner, _, name = self.hook.partition(".")
        part = kind()

        def stopping_hook(*_: object) -> Any:
            raise StopIteration

        if owner == kind.__name__:
            setattr(part, name, stopping_hook)
        return part


HOOKS = ["in_worker"]
HOOKS += [f"WorkerPart.{name}" for name in ("sampler", "start_epoch", "may_begin", "before_step", "columns")]
HOOKS += ["WorkerPart.finish"]
HOOKS += [f"RankPart.{name}" for name in ("start_epoch", "before_batch", "taken", "yielded", "values")]
HOOKS += ["RankPart.shaped", "RankPart.end_epoch"]


@WORKERS
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_of_an_extension_that_stops_is_an_error_that_names_it(
    hook: str, workers: int, data: str, tmp_path: Path
) -> None:
    with (
        make(
            data, tmp_path, preprocess=pixels, tokenizer=ids, num_workers=workers, extensions=[Stopping(hook)]
        ) as loader,
        pytest.raises(RuntimeError, match=r"in_worker|stopping_hook"),
    ):
        list(loader)


def test_a_policy_that_stops_is_an_error(data: str, tmp_path: Path) -> None:
    def stopping_policy(summary: Any) -> Any:
        next(iter(()))

    sources = [Source([data], name="one"), Source([data.replace("{00000..00002}", "00000")], name="two")]
    options = {"mixing": stopping_policy, "num_samples": 1000, "map_sample": lambda raw: {"value": 1}}
    with (
        flat.make_loader(sources, batch_size=4, num_workers=0, cache_dir=tmp_path, **options) as loader,
        pytest.raises(PolicyError, match="StopIteration"),
    ):
        list(loader)


class Unreadable:
    """Raises where it is unpickled."""

    def __init__(self, error: type[Exception]):
        self.error = error

    def __reduce__(self) -> Any:
        return _raised, (self.error,)


def _raised(error: type[Exception]) -> None:
    raise error


@pytest.mark.parametrize("error", [StopIteration, queue.Empty])
def test_a_batch_that_stops_where_it_is_unpickled_is_an_error(error: type[Exception]) -> None:
    messages = MessageQueue()
    messages.put((0, Unreadable(error)))
    with pytest.raises(NotSendable, match=error.__name__):
        messages.get(timeout=1)


# Losses, planted at each place that passes samples on.


def one_fewer(rows: Any) -> Any:
    return rows[:-1] if len(rows) > 1 else rows


def lose_a_reference(patch: pytest.MonkeyPatch) -> None:
    """The lanes give a reference less than they have of the shards."""
    give = Lanes.take
    lost: list[int] = []

    def take(self: Lanes, *args: Any) -> Any:
        references = give(self, *args)
        if lost or len(references) < 2:
            return references
        lost.append(int(references[-1]))
        return references[:-1]

    patch.setattr(Lanes, "take", take)


def lose_a_visit(patch: pytest.MonkeyPatch) -> None:
    """The sampler drops a sample of a step."""
    take = sampler.Step._take
    calls = itertools.count()

    def taken(self: Any, *args: Any) -> Any:
        visits = take(self, *args)
        return one_fewer(visits) if next(calls) == 3 else visits

    patch.setattr(sampler.Step, "_take", taken)


def lose_a_sample(patch: pytest.MonkeyPatch) -> None:
    """A worker ends reading a part of a batch before its last sample."""
    read = loop.WorkerLoop._read
    calls = itertools.count()

    def reading(self: Any, *args: Any) -> Iterator[Any]:
        *rows, last = read(self, *args)
        yield from [*rows, one_fewer(last) if next(calls) == 3 else last]

    patch.setattr(loop.WorkerLoop, "_read", reading)


def end_early(patch: pytest.MonkeyPatch) -> None:
    """A stream of references is taken for finished in the middle of the pass."""
    has = ReferenceStream.has
    patch.setattr(ReferenceStream, "has", lambda self, stop: stop <= 40 and has(self, stop))
    patch.setattr(ReferenceStream, "is_over", property(lambda self: has(self, 41) or self._order.finished))


@WORKERS
@TRAIN
@pytest.mark.parametrize("lose", [lose_a_visit, lose_a_sample])
def test_a_lost_sample_is_an_error_at_the_end_of_the_epoch(
    lose: Callable[[pytest.MonkeyPatch], None],
    train: bool,
    workers: int,
    data: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lose(monkeypatch)
    options = {"map_sample": lambda raw: {"value": 1}, "num_workers": workers}
    message = "after (59|58) samples, where 60 were due: .* indexes have 60 samples; 0 couldn't be used"
    with make(data, tmp_path, train=train, **options) as loader, pytest.raises(PassMismatch, match=message):
        list(loader)


@TRAIN
@pytest.mark.parametrize("lose", [lose_a_reference, end_early])
def test_an_order_that_gives_less_than_the_shards_have_is_an_error_at_its_end(
    lose: Callable[[pytest.MonkeyPatch], None],
    train: bool,
    data: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lose(monkeypatch)
    with (
        make(data, tmp_path, train=train, map_sample=lambda raw: {"value": 1}, num_workers=0) as loader,
        pytest.raises(PassMismatch, match="indexes have 60 samples; 0 couldn't be used"),
    ):
        list(loader)


def test_an_epoch_that_ends_before_its_last_step_is_an_error(data: str, tmp_path: Path) -> None:
    options = {"map_sample": lambda raw: {"value": 1}, "num_workers": 0, "num_batches": 4}
    with make(data, tmp_path, train=True, **options) as loader:
        batches = iter(loader)
        next(batches)
        loader._run.epoch.plan(6)
        with pytest.raises(PassMismatch, match="an epoch of 7 batches has ended after 4"):
            list(batches)


@WORKERS
@TRAIN
def test_a_worker_that_ends_without_a_word_is_an_error(
    train: bool, workers: int, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = loop.WorkerLoop.batches
    monkeypatch.setattr(
        loop.WorkerLoop, "batches", lambda self, start: itertools.islice(batches(self, start), 3)
    )
    options = {"map_sample": lambda raw: {"value": 1}, "num_workers": workers}
    with (
        make(data, tmp_path, train=train, **options) as loader,
        pytest.raises(PassMismatch, match=r"ended before batch [36] of the epoch, and none of them says"),
    ):
        list(loader)


def test_a_stop_that_torch_passes_on_is_no_end() -> None:
    class Stopped:
        def __iter__(self) -> Stopped:
            return self

        def __next__(self) -> Any:
            raise StopIteration("Caught StopIteration in DataLoader worker process 0.")

    with pytest.raises(PassMismatch, match="Caught StopIteration"):
        InOrder(Stopped()).next(lambda: None)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_resume_reads_on_where_a_function_leaves_out_the_next_shards(
    num_workers: int, tmp_path: Path
) -> None:
    shards = [str(path) for path in write_shards(tmp_path / "data", [8] * 6)]

    def keep(entry: Entry) -> bool:
        return entry.key[:5] in ("00000", "00005")

    def made(cache: str) -> Loader:
        return make(
            shards, tmp_path / cache, keep=keep, num_workers=num_workers, lanes=1, shuffle=0, seed=seed,
            tokenizer=ids, preprocess=pixels, with_keys=True, output="dict", max_bad_samples=None,
        )  # fmt: skip

    def order_of(seed: int) -> list[int]:
        plan = OrderOptions(seed=seed, groups=1, lanes=1, window=0)
        return [*pass_order(plan, np.arange(6), 0, 0, 0).tolist()]

    # A shard with samples, at least three without one, and the other with samples.
    seed = next(seed for seed in range(1000) if {order_of(seed)[0], order_of(seed)[4]} == {0, 5})
    with made("one") as loader:
        batches = iter(loader)
        next(batches), next(batches)
        state = loader.state_dict()
        rest = [batch["__key__"] for batch in batches]
    with made("two") as loader:
        loader.load_state_dict(state)
        assert [batch["__key__"] for batch in loader] == rest
    assert len(rest) == 2
