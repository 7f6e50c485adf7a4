"""Ranks with other shards, options or states are told so; ranks that only use their loaders unevenly go on.

The rules are tried on a store of torch.distributed, the errors and trainings by two real ranks.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

import streamload
from streamload.errors import OptionError, RankFailed
from streamload.ranks import distributed, loaders, monitor
from streamload.ranks.loaders import Comparison, RankLoaders
from streamload.testing.shards import read_oracle, write_shards
from tests.support import flat
from tests.support.tiers import until

SCRIPT = Path(__file__).parents[1] / "support" / "launched.py"
MAIN, IMAGES, OTHER = {"seed": 0, "batch_size": 4}, {"seed": 0, "batch_size": 2}, {"seed": 1, "batch_size": 4}


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[RankLoaders]:
    monkeypatch.setattr(loaders, "_PATIENCE_SECONDS", 0.0)
    store = torch.distributed.HashStore()
    return [RankLoaders(store, rank, 3) for rank in range(3)]


def ask(comparison: Comparison, batches: int) -> None:
    """Ask for batches."""
    for _ in range(batches):
        comparison.check()


def test_ranks_with_one_loader_know_so_by_a_few_requests(ranks: list[RankLoaders]) -> None:
    requests = []

    class Counted:
        def __init__(self, store: Any):
            self.store = store

        def __getattr__(self, name: str) -> Any:
            requests.append(name)
            return getattr(self.store, name)

    for rank in ranks:
        rank.store = Counted(rank.store)
    comparisons = [rank.add(MAIN) for rank in ranks]
    for comparison in comparisons:
        ask(comparison, 5)
        assert comparison.is_settled
    assert len(requests) <= 5 * len(ranks)


def test_of_two_loaders_the_later_one_is_refused_and_the_earlier_one_too_if_it_has_not_begun(
    ranks: list[RankLoaders],
) -> None:
    early = ranks[0].add(MAIN)
    early.check()
    early.check()  # the others aren't there, and nobody waits for them
    late = ranks[1].add(OTHER)
    ask(late, 3)
    with pytest.raises(OptionError, match="seed=0 on rank 0 and 1 on rank 1"):
        late.check()
    third = ranks[2].add(MAIN)
    ask(third, 3)
    with pytest.raises(OptionError, match="seed=1 on rank 1 and 0 on rank 2"):
        third.check()


def test_a_few_batches_of_another_loader_are_no_difference(ranks: list[RankLoaders]) -> None:
    """One rank shows some images, while the others have begun to train."""
    training = ranks[1].add(MAIN)
    ask(training, 2)
    ask(ranks[0].add(IMAGES), 3)
    ask(ranks[0].add(MAIN), 5)
    ask(training, 3)


def test_of_many_differences_the_first_have_their_values(ranks: list[RankLoaders]) -> None:
    ranks[0].add(dict.fromkeys("abcde", 0))
    comparison = ranks[1].add(dict.fromkeys("abcde", 1))
    ask(comparison, 3)
    with pytest.raises(OptionError, match=r"a=0 on rank 0 and 1 on rank 1; b=.*; c=.*; and also d, e\."):
        comparison.check()


@pytest.mark.parametrize(
    ("first", "others"),
    [
        ([IMAGES, MAIN], [MAIN]),  # rank 0 shows some images before the training
        ([MAIN, IMAGES], [MAIN]),
        ([MAIN, IMAGES, OTHER], [MAIN, OTHER]),  # between two
        ([MAIN, OTHER, IMAGES], [MAIN]),  # rank 0 is ahead
        ([MAIN], [MAIN, OTHER]),
        ([MAIN, MAIN], [MAIN]),
    ],
)
@pytest.mark.parametrize("rank_0_is_first", [True, False])
def test_loaders_that_one_rank_has_beside_those_of_all_are_no_difference(
    first: list[Mapping[str, Any]],
    others: list[Mapping[str, Any]],
    rank_0_is_first: bool,
    ranks: list[RankLoaders],
) -> None:
    added = []
    order = [(0, first), (1, others), (2, others)]
    for rank, descriptions in order if rank_0_is_first else order[::-1]:
        added += [ranks[rank].add(description) for description in descriptions]
    for comparison in added:
        ask(comparison, 5)


def test_a_rank_that_comes_to_the_loader_of_the_others_in_time_is_no_difference(
    ranks: list[RankLoaders], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaders, "_PATIENCE_SECONDS", 60.0)
    ranks[0].add(IMAGES)
    comparison = ranks[1].add(MAIN)
    ask(comparison, 3)
    monkeypatch.setattr(loaders.time, "sleep", lambda _: ranks[0].add(MAIN))
    comparison.check()


def test_a_process_group_of_later_knows_nothing_of_one_before_it_in_the_same_store(
    ranks: list[RankLoaders],
) -> None:
    before = [rank.add(MAIN) for rank in ranks]
    again = [RankLoaders(ranks[0].store, rank, 2) for rank in range(2)]
    for comparison in [rank.add(OTHER) for rank in again]:
        ask(comparison, 5)
        assert comparison.is_settled
    assert before


def only_key(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"]}


def make(urls: Any, cache: Path, **options: Any) -> streamload.Loader:
    defaults: dict[str, Any] = {"batch_size": 4, "num_workers": 0, "map_sample": only_key, "with_keys": True}
    return flat.make_loader(urls, **{**defaults, "cache_dir": cache, "cache_size": "1GB", **options})


def keys(loader: Any, steps: int = 1000) -> list[str]:
    return [key for _, batch in zip(range(steps), loader, strict=False) for key in batch["__key__"]]


def joined(rank: int, place: Path, name: str) -> None:
    store = f"file://{place}/store-{name}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)


def differ(rank: int, data: Path, place: Path) -> None:
    """One of two ranks, which differ anew in each process group."""
    loaders._PATIENCE_SECONDS = distributed._AGREE_SECONDS = 0.2
    monitor._LOADERS_SECONDS = 0.1
    paths = sorted(str(path) for path in data.glob("*.tar"))
    joined(rank, place, "states")
    with make(paths, place / "cache", num_batches=8) as loader:
        states = [loader.state_dict() for _ in zip(range(3), loader, strict=False)]
    torch.distributed.destroy_process_group()
    cases: list[tuple[str, Any, dict[str, Any], int | None]] = [
        ("shards='6 from 0000.*by their order", paths if rank else paths[::-1], {}, None),
        ("shards='[56] from 0000", paths[rank:], {}, None),
        ("seed=", paths, {"seed": rank}, None),
        ("batch_size=", paths, {"batch_size": 4 + rank}, None),
        ("shuffle=", paths, {"shuffle": 8 + rank, "lanes": 2}, None),
        ("blank_captions=", paths, {"blank_captions": bool(rank)}, None),
        ("keep=", paths, {"keep": bool} if rank else {}, None),
        ("position=", paths, {}, 1 + rank),
        ("epoch=|position=", paths, {}, rank or None),
    ]
    for number, (match, urls, options, state) in enumerate(cases):
        joined(rank, place, str(number))
        with make(urls, place / "cache", **{"num_batches": 8, **options}) as loader:
            if state is not None:
                loader.load_state_dict(states[state])
            with pytest.raises((OptionError, RankFailed), match=match) as caught:
                keys(loader)
        assert "rank 0" in str(caught.value)
        assert "rank 1" in str(caught.value)
        torch.distributed.destroy_process_group()


def one_after_the_other(rank: int, data: Path, place: Path) -> None:
    """Rank 0 takes many batches before rank 1, with another seed, is there; both end."""
    monitor._LOADERS_SECONDS = loaders._PATIENCE_SECONDS = 0.1
    joined(rank, place, "late")
    with make(str(data), place / "cache", seed=rank, endless=True, shuffle=8, lanes=2) as loader:
        if rank == 0:
            batches = iter(loader)
            keys(batches, 5)
        torch.distributed.barrier()
        if rank == 1:
            batches = iter(loader)
        kind = OptionError if rank else RankFailed
        with pytest.raises(kind, match="seed=0 on rank 0 and 1 on rank 1"):
            until(lambda: next(batches) is None)
    torch.distributed.destroy_process_group()


def go_on(rank: int, data: Path, place: Path, mirrors: list[str]) -> None:
    """Trainings that are right: of mirrors, with evaluations and other loaders on one rank."""
    loaders._PATIENCE_SECONDS = 60.0  # rather than on a busy machine none
    lines: list[str] = []
    distributed.logger.warning = lambda text, *values: lines.append(text % values)  # type: ignore[assignment]
    joined(rank, place, "right")
    if rank == 0:
        assert len(keys(make(str(data), place / "eval", train=False))) == 60
        assert keys(make(str(data), place / "images", batch_size=3, num_batches=9, shuffle=8, lanes=2), 1)
    with make(mirrors[rank], place / f"cache-{rank}") as loader:
        batches = iter(loader)
        first = keys(batches, 1)
        torch.distributed.all_reduce(torch.ones(1))
        trained = first + keys(batches)
        state = loader.state_dict()
    if rank == 1:
        placed = [
            make(str(data), place / "placed", seed=seed, rank=seed, world_size=2, shuffle=8, lanes=2)
            for seed in (0, 1)
        ]
        assert [len(keys(loader, 3)) for loader in placed] == [12, 12]
    with make(mirrors[rank], place / f"cache-{rank}") as loader:
        loader.load_state_dict(state)
        again = keys(loader)
    both = distributed.gather((trained, again, lines), 2)
    torch.distributed.destroy_process_group()
    for epoch in range(2):
        yielded = both[0][epoch] + both[1][epoch]
        assert len(yielded) == len(set(yielded)) == 56
    assert not [line for *_, lines in both for line in lines if "goes on without" in line]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards") / "data"
    write_shards(folder, [10] * 6, seed=4)
    return folder


def test_both_ranks_name_the_option_the_shards_or_the_state_that_differ(data: Path, tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(differ, (data, tmp_path), nprocs=2, start_method="fork")


def test_a_rank_that_trains_already_is_told_of_one_that_comes_later(data: Path, tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(
        one_after_the_other, (data, tmp_path), nprocs=2, start_method="fork"
    )


def test_mirrors_evaluations_and_loaders_of_one_rank_are_no_difference(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "another mount" / "of" / "them"
    shutil.copytree(data, other)
    mirrors = [str(data), str(other)]
    torch.multiprocessing.start_processes(go_on, (data, tmp_path, mirrors), nprocs=2, start_method="fork")
    assert len([key for path in data.glob("*.tar") for key, _ in read_oracle(path)]) == 60


@pytest.mark.deep
def test_under_torchrun_another_seed_on_each_rank_ends_the_job(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "shards")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    command = [sys.executable, *torchrun, str(SCRIPT), "seeds", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert ended.returncode
    assert "seed=0 on rank 0 and 1 on rank 1" in ended.stderr + ended.stdout
