"""Steps of another size from the middle of a run on: agreed, recorded, and resumed at every step."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

import streamload
from streamload import Batches, Images, Patches, Source
from streamload.errors import OptionError, StateMismatch
from streamload.loader.state import sealed
from streamload.testing.shards import write_shards
from streamload.worker.loop import WorkerLoop
from streamload.worker.messages import Batch, EpochStart
from tests.loader.test_buckets import tokenize
from tests.support import flat

COUNTS = [40, 52, 61, 33, 47, 58]  # 291


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("resized")
    return [str(path) for path in write_shards(directory, COUNTS, seed=3)]


def only_key(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"]}


def make(urls: Any, cache: Path, **options: Any) -> streamload.Loader:
    defaults: dict[str, Any] = {"batch_size": 12, "num_workers": 0, "shuffle": 40, "lanes": 4}
    defaults |= {"map_sample": only_key, "with_keys": True, "cache_dir": cache, "cache_size": "1GB"}
    return flat.make_loader(urls, **{**defaults, **options})


def ranks_of(urls: Any, cache: Path, ranks: int, **options: Any) -> list[streamload.Loader]:
    size = options.pop("batch_size", 12) // ranks
    return [
        make(urls, cache, rank=rank, world_size=ranks, batch_size=size, **options) for rank in range(ranks)
    ]


def keys_by_step(loaders: list[streamload.Loader], epochs: int = 1) -> list[list[str]]:
    """The keys of each global step."""
    return [
        [key for batch in batches for key in batch["__key__"]]
        for _ in range(epochs)
        for batches in zip(*loaders, strict=True)
    ]


class Run:
    """A run whose sizes and weights are set after some steps; its batches, and the state after each.

    Attributes:
        changed: the step of its epoch that set_batch_size returned, for each call.
    """

    def __init__(
        self,
        loader: streamload.Loader,
        sizes: dict[int, int],
        epochs: int,
        weights: dict[int, dict[str, float]] | None = None,
    ) -> None:
        self.batches: list[list[str]] = []
        self.states: list[Any] = []
        self.changed: list[int] = []
        decided: list[tuple[int, int, int]] = []  # after so many batches: from which step of which epoch on
        starts = []
        with loader:
            for epoch in range(epochs):
                starts.append(len(self.batches))
                for batch in loader:
                    self.batches.append(batch["__key__"])
                    count = len(self.batches)
                    if count in sizes:
                        self.changed.append(loader.set_batch_size(sizes[count]))
                        decided.append((count, self.changed[-1], epoch))
                    if weights and count in weights:
                        decided.append((count, loader.set_weights(weights[count]), epoch))
                    self.states.append(json.loads(json.dumps(loader.state_dict())))
        starts.append(len(self.batches))
        self._effects = [
            (count, min(starts[epoch] + step, starts[epoch + 1])) for count, step, epoch in decided
        ]

    @property
    def rows(self) -> list[int]:
        return [len(batch) for batch in self.batches]

    def known_at(self, cut: int) -> list[list[str]]:
        """The batches after a step, up to those of which its state can't know the size or the weights."""
        stop = min((effect for count, effect in self._effects if count > cut + 1), default=None)
        return self.batches[cut + 1 : stop]


def rest_of(run: Run, cut: int, loaders: list[streamload.Loader], epochs: int) -> None:
    """Resume after a step on other loaders, and compare all that follows."""
    expected = run.known_at(cut)
    try:
        for loader in loaders:
            loader.load_state_dict(run.states[cut])
        assert keys_by_step(loaders, epochs)[: len(expected)] == expected, cut
    finally:
        for loader in loaders:
            loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_have_another_size_from_the_step_that_is_returned(
    workers: int, data: list[str], tmp_path: Path
) -> None:
    """The samples and their order stay those of the run without the change."""
    with make(data, tmp_path / "plain") as loader:
        plain = [key for batch in loader for key in batch["__key__"]]
    run = Run(make(data, tmp_path / "cache", num_workers=workers), {3: 20, 8: 5}, 1)
    first, second = 3 + 2 * workers, 8 + 2 * workers  # prefetch_factor batches of each worker are in flight
    assert run.changed == [first, second]
    assert run.rows[:second] == [12] * first + [20] * (second - first)
    assert set(run.rows[second:]) == {5}
    given = [key for batch in run.batches for key in batch]
    assert given[: len(plain)] == plain[: len(given)]
    assert len(given) == sum(run.rows[:second]) + (291 - sum(run.rows[:second])) // 5 * 5


def test_an_epoch_of_num_batches_keeps_its_batches(data: list[str], tmp_path: Path) -> None:
    with make(data, tmp_path, num_batches=10) as loader:
        run = Run(loader, {4: 7, 15: 3}, 3)
        assert len(loader) == 10
        assert (loader.num_samples, loader.batch_size) == (30, 3)
    assert run.rows == [12] * 4 + [7] * 11 + [3] * 15


def test_an_epoch_of_num_samples_keeps_its_samples(data: list[str], tmp_path: Path) -> None:
    with make(data, tmp_path, num_samples=125) as loader:
        assert len(loader) == 10
        run = Run(loader, {4: 7}, 2)
        assert len(loader) == 17
        assert loader.num_samples == 119
    assert run.changed == [4]
    assert run.rows == [12] * 4 + [7] * 11 + [7] * 17  # 48 + 77 = 125


@pytest.mark.parametrize("workers", [0, 2])
def test_a_size_that_comes_too_late_for_an_epoch_is_that_of_the_next(
    workers: int, data: list[str], tmp_path: Path
) -> None:
    """Workers that have made their last batch make no more, even if some smaller ones would fit."""
    run = Run(make(data, tmp_path, num_samples=125, num_workers=workers), {10: 3}, 2)
    assert run.changed == [0]
    assert run.rows == [12] * 10 + [3] * 41
    run = Run(make(data, tmp_path, num_samples=125, num_workers=workers), {9: 3}, 2)
    assert run.changed == [9 if workers == 0 else 10]
    assert run.rows == [12] * 9 + ([3] * 5 if workers == 0 else [12]) + [3] * 41


def test_sizes_that_are_set_between_epochs_count_from_the_next_step(data: list[str], tmp_path: Path) -> None:
    with make(data, tmp_path, num_workers=2) as loader:
        assert loader.set_batch_size(50) == 0
        assert [len(batch["__key__"]) for batch in loader] == [50] * 5
        assert loader.set_batch_size(70) == 0
        assert len(loader) == 4
        assert [len(batch["__key__"]) for batch in loader] == [70] * 4
        loader.set_epoch(0)
        assert [len(batch["__key__"]) for batch in loader] == [70] * 4
        assert loader.set_batch_size(12) == 0
        assert [len(batch["__key__"]) for batch in loader] == [12] * 24
        assert "batch_sizes" not in loader.state_dict()


LENGTHS: list[dict[str, Any]] = [{}, {"num_batches": 9}, {"num_samples": 100}]


@pytest.mark.deep
@pytest.mark.parametrize(
    "length", [pytest.param(length, marks=[pytest.mark.deep] * (not length)) for length in LENGTHS]
)
def test_resumed_after_each_step_on_another_layout(
    length: dict[str, Any], data: list[str], tmp_path: Path
) -> None:
    """Before, between and after two decisions and their effects, and over the end of epochs."""
    sizes = {2: 24, 5: 8, 6: 8, 11: 4, 13: 20}
    run = Run(make(data, tmp_path / "whole", num_workers=2, **length), sizes, 2)
    assert {12, 24, 4, 20} <= set(run.rows)
    ends = list(itertools.accumulate(run.rows))
    for cut in range(0, len(run.batches) - 1, 1 if len(run.batches) < 40 else 7):
        epoch = run.states[cut]["epoch"]
        ranks, workers = [(1, 0), (2, 0), (4, 0), (1, 3)][cut % 4]
        loaders = ranks_of(data, tmp_path / f"{cut}", ranks, num_workers=workers, **length)
        rest_of(run, cut, loaders, 2 - epoch)
    assert ends[-1] > 150


@pytest.mark.deep
@pytest.mark.parametrize("bucketing", [pytest.param("step", marks=pytest.mark.deep), 48])
def test_with_bucketing_a_size_changes_between_blocks(
    bucketing: Any, data: list[str], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"map_sample": None, "text_padding": "longest", "text_pad_multiple": 1}
    options |= {"bucketing": bucketing, "batch_size": 8, "num_batches": 20, "tokenizer": tokenize}
    options |= {"output": "dict"}
    run = Run(make(data, tmp_path / "whole", num_workers=1, **options), {5: 16, 12: 4, 13: 4}, 2)
    # Blocks of 48 samples have 6 steps of 8, or 3 of 16; at first they grow: 1, 1, 2, 4 steps.
    assert run.changed == ([8, 14, 14] if bucketing == 48 else [7, 14, 14])
    first, second, _ = run.changed
    assert run.rows == [8] * first + [16] * (second - first) + [4] * (40 - second)
    keys = [key for batch in run.batches for key in batch]
    assert len(set(keys[:256])) == 256  # the next block has samples of the next pass, too
    for cut in range(0, 39, 2):
        ranks, workers = [(1, 0), (2, 0), (4, 0)][cut // 2 % 3]
        size = options["batch_size"] // ranks
        loaders = [
            make(
                data, tmp_path / f"{cut}", rank=rank, world_size=ranks, num_workers=workers,
                **{**options, "batch_size": size},
            )
            for rank in range(ranks)
        ]  # fmt: skip
        for loader in loaders:
            loader.load_state_dict(run.states[cut])
        found = []
        for _ in range(2 if cut < 19 else 1):
            for batches in zip(*loaders, strict=True):
                assert len({batch["text"].shape for batch in batches}) == 1
                parts = zip(*(batch["__key__"] for batch in batches), strict=True)
                found.append(list(itertools.chain.from_iterable(parts)))
        expected = run.known_at(cut)
        assert found[: len(expected)] == expected, cut
        for loader in loaders:
            loader.close()


def test_sizes_and_weights_change_together(data: list[str], tmp_path: Path) -> None:
    def mixed() -> list[Source]:
        return [Source(data[:4], 3, "a"), Source(data[4:], 1, "b")]

    options = {"num_batches": 16}
    weights = {5: {"b": 3}, 9: {"a": 0}}
    run = Run(make(mixed(), tmp_path / "whole", num_workers=2, **options), {3: 24, 6: 8}, 2, weights=weights)
    assert run.rows == [12] * 7 + [24] * 3 + [8] * 22
    names = {path: set(keys) for path, keys in zip(data, map(_keys_of, data), strict=True)}
    of_b = [sum(key in names[data[4]] | names[data[5]] for key in batch) for batch in run.batches]
    assert of_b == [3] * 7 + [6] * 2 + [12] + [4] * 3 + [8] * 19
    for cut in range(0, 31, 2):
        ranks, workers = [(1, 0), (2, 0), (4, 0), (1, 1)][cut // 2 % 4]
        loaders = ranks_of(mixed(), tmp_path / f"{cut}", ranks, num_workers=workers, **options)
        rest_of(run, cut, loaders, 2 if cut < 15 else 1)


def _keys_of(path: str) -> Iterator[str]:
    from streamload.testing.shards import read_oracle

    return (key for key, _ in read_oracle(path))


def test_workers_that_learn_of_changes_late_take_the_same_samples(
    data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each begins a batch only when the training loop waits for it, and finds changes that are over."""
    mixed = [Source(data[:4], 3, "a"), Source(data[4:], 1, "b")]
    batches_of = WorkerLoop.batches

    def late(loop: WorkerLoop, start: EpochStart) -> Iterator[Batch]:
        made = batches_of(loop, start)
        for number in itertools.count(loop._worker, loop._workers or 1):
            control = loop._control
            while loop._workers and not (control.taken >= number and control.wanted_seconds()):
                time.sleep(0.001)
            try:
                yield next(made)
            except StopIteration:
                return

    monkeypatch.setattr(WorkerLoop, "batches", late)
    sizes = {2: 24, 4: 8, 5: 4, 7: 20, 8: 16, 11: 4}
    weights: dict[int, dict[str, float]] = {1: {"b": 3}, 3: {"a": 1}, 6: {"b": 1}, 9: {"a": 9}, 10: {"a": 0}}
    options: dict[str, Any] = {"num_batches": 20, "prefetch_factor": 1}
    late_run = Run(make(mixed, tmp_path, num_workers=3, **options), sizes, 1, weights)
    shifted = [{count + 3: value for count, value in of.items()} for of in (sizes, weights)]
    at_once = Run(make(mixed, tmp_path, **options), shifted[0], 1, shifted[1])
    assert late_run.batches == at_once.batches


def test_groups_of_several_nodes_have_equal_parts(data: list[str], tmp_path: Path) -> None:
    options = {"groups": 2, "num_batches": 10, "batch_size": 12}
    with make(data, tmp_path / "one", **options) as loader:
        run = Run(loader, {4: 20}, 2)
    nodes = ranks_of(data, tmp_path / "two", 2, **options)
    found = []
    for number, batches in enumerate(zip(*nodes, strict=True)):
        found.append([key for batch in batches for key in batch["__key__"]])
        if number == 3:
            assert [loader.set_batch_size(10) for loader in nodes] == [4, 4]
    assert [sorted(keys) for keys in found] == [sorted(keys) for keys in run.batches[:10]]
    states = [loader.state_dict() for loader in nodes]
    with make(data, tmp_path / "again", **options) as loader:
        loader.load_state_dict(states)
        assert [sorted(keys) for keys in keys_by_step([loader])] == [sorted(k) for k in run.batches[10:]]
    for loader in nodes:
        loader.close()
    with make(data, tmp_path / "one", **options) as loader, pytest.raises(OptionError, match="equal parts"):
        loader.set_batch_size(9)


def test_another_batch_size_by_options_replaces_the_size_that_was_set(
    data: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(make(data, tmp_path), {3: 20}, 1)
    with make(data, tmp_path, batch_size=10) as loader:
        loader.load_state_dict(run.states[5])
        batches = keys_by_step([loader])
    assert {len(batch) for batch in batches} == {10}
    whole = [key for batch in run.batches[6:] for key in batch]
    assert [key for batch in batches for key in batch][: len(whole)] == whole[: 10 * len(batches)]
    assert "batch_size × ranks is 10, not 12 as when sizes were set" in caplog.text
    loaders = ranks_of(data, tmp_path, 3)
    with pytest.raises(StateMismatch, match="20 samples, which 3 ranks can't share evenly"):
        loaders[0].load_state_dict(run.states[5])


def test_another_bucketing_between_two_blocks_of_a_size_that_was_set(data: list[str], tmp_path: Path) -> None:
    options: dict[str, Any] = {"map_sample": None, "text_padding": "longest", "tokenizer": tokenize}
    options |= {"batch_size": 8, "num_batches": 30, "output": "dict"}
    run = Run(make(data, tmp_path, bucketing=48, **options), {7: 16}, 1)
    assert run.changed == [8]
    for steps, fits in [(8, True), (9, False), (11, True), (13, False)]:
        with make(data, tmp_path, bucketing="step", **options) as loader:
            if fits:
                loader.load_state_dict(run.states[steps - 1])
                assert [len(batch) for batch in keys_by_step([loader])] == [16] * (30 - steps)
            else:
                left = 11 - steps if steps < 11 else 14 - steps
                with pytest.raises(StateMismatch, match=f"ends in {left} steps.*size \\(16\\)"):
                    loader.load_state_dict(run.states[steps - 1])


def test_shards_may_be_appended_after_a_size_was_set(data: list[str], tmp_path: Path) -> None:
    with make(data[:4], tmp_path, num_batches=6) as loader:
        run = Run(loader, {3: 20}, 1)
    with make(data, tmp_path, num_batches=6) as loader:
        loader.load_state_dict(run.states[-1])
        assert [len(batch) for batch in keys_by_step([loader])] == [20] * 6


def of_two_ranks(rank: int, data: list[str], place: Path) -> None:
    """The ranks are asked for different sizes, with different numbers of workers."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place}/rendezvous", rank=rank, world_size=2
    )
    options = {"num_samples": 300, "num_workers": 1 + rank, "batch_size": 6}
    with make(data, place / f"cache-{rank}", rank=rank, world_size=2, **options) as loader:
        rows, changed = [], -1
        for number, batch in enumerate(loader):
            rows.append(len(batch["__key__"]))
            if number == 3:
                changed = loader.set_batch_size(10 if rank == 0 else -1)
    (place / f"{rank}.json").write_text(json.dumps([changed, rows]))
    torch.distributed.destroy_process_group()


def test_all_ranks_change_at_one_step_to_the_size_of_rank_0(data: list[str], tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(of_two_ranks, (data, tmp_path), nprocs=2, start_method="fork")
    for rank in range(2):
        changed, rows = json.loads((tmp_path / f"{rank}.json").read_text())
        assert changed == 4 + 2 * 2
        assert rows == [6] * 8 + [10] * 10  # 96 + 200 of 300


@pytest.mark.parametrize(
    ("options", "rows", "message"),
    [
        ({}, 0, "batch_size=0; expected a whole number of at least 1"),
        ({}, 2.5, "batch_size=2.5; expected a whole number"),
        ({"train": False}, 8, "is for training: an evaluation has one batch_size"),
        (
            {"map_sample": None, "images": Images(patches=Patches(8, (4, 9), steps=[(4, 9)]))},
            8,
            "of one size",
        ),
    ],
)
def test_sizes_that_can_not_be_are_refused_and_change_nothing(
    options: dict[str, Any], rows: Any, message: str, data: list[str], tmp_path: Path
) -> None:
    with make(data, tmp_path, **options) as loader:
        before = loader.state_dict()
        with pytest.raises(OptionError, match=message):
            loader.set_batch_size(rows)
        assert loader.state_dict() == before


@pytest.mark.parametrize(
    "sizes",
    [
        {"base": 12, "step": 1, "resizes": []},
        {"base": 12, "step": 1, "resizes": [[31, 5, 1]]},
        {"base": 0, "step": 1, "resizes": [[24, 5, 1]]},
        {"base": 12, "step": -1, "resizes": [[24, 5, 1]]},
        {"base": 12, "step": 1, "resizes": [[24, 0, 1]]},
        [12, 1],
    ],
)
def test_damaged_sizes_in_a_state_are_refused(sizes: Any, data: list[str], tmp_path: Path) -> None:
    with make(data, tmp_path) as loader:
        next(iter(loader))
        state = sealed({**loader.state_dict(), "batch_sizes": sizes})
        with pytest.raises(StateMismatch, match="not a valid state"):
            loader.load_state_dict(state)


def test_batches_of_several_sizes_are_cut_into_microbatches(data: list[str], tmp_path: Path) -> None:
    options: dict[str, Any] = {"map_sample": None, "batches": Batches(microbatch=5), "num_batches": 6}
    with make(data, tmp_path, **options) as loader:
        for number, batch in enumerate(loader):
            parts = [part.rows.stop - part.rows.start for part in loader.microbatches(batch)]
            assert parts == ([5, 5, 2] if number < 2 else [5, 3])
            if number == 1:
                loader.set_batch_size(8)
