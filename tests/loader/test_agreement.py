"""What all ranks of a run, and a resumed run, have to find alike: sizes.json, and the list of shards."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

import streamload
from streamload.ranks import distributed
from streamload.testing.faults import EMPTY_PAGE, Fault
from streamload.testing.server import ShardServer
from streamload.testing.shards import read_oracle, write_shards
from tests.support import flat

COUNTS = [40, 10, 25, 5, 30, 10]


def only_key(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"]}


def make(urls: Any, cache: Path, **options: Any) -> streamload.Loader:
    defaults: dict[str, Any] = {"batch_size": 5, "num_workers": 0, "shuffle": 20, "lanes": 2}
    defaults |= {"map_sample": only_key, "with_keys": True, "cache_dir": cache, "cache_size": "1GB"}
    return flat.make_loader(urls, **{**defaults, **options})


def keys(batches: Any) -> list[str]:
    return [key for batch in batches for key in batch["__key__"]]


def taken(loader: streamload.Loader, batches: int) -> list[str]:
    return keys(batch for _, batch in zip(range(batches), loader, strict=False))


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    return [str(path) for path in write_shards(tmp_path / "data", COUNTS, seed=2)]


def sizes_beside(paths: list[str]) -> Path:
    return Path(paths[0]).with_name("sizes.json")


def write_sizes(paths: list[str]) -> None:
    sizes = {Path(path).name: count for path, count in zip(paths, COUNTS, strict=False)}
    sizes_beside(paths).write_text(json.dumps(sizes))


DIFFERENT = r"different sizes\.json files.* rank 0 found none .*, rank 1 found 6 shards, 120 samples"


def of_two_ranks(rank: int, paths: list[str], url: str, place: Path) -> None:
    """On a node each, rank 0 reads first, then rank 1; the server answers 404 to one of them."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    distributed._AGREE_SECONDS = 0.2  # for the other rank's counts at the end of an epoch
    rendezvous = f"file://{place}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    urls = [f"{url}/{Path(path).name}" for path in paths]
    steps: dict[str, Any] = {"num_batches": 4}
    cases: list[tuple[bool, bool, dict[str, Any], int]] = [
        (True, True, {"groups": 2, **steps}, 20),
        (True, False, {"groups": 2}, 60),
        (True, False, {"groups": 1}, 60),
        (False, True, {"groups": 2, **steps}, 20),
        (False, True, {"groups": 1}, 60),
        (False, False, {"groups": 2, **steps}, 20),
    ]
    for number, (*found, options, samples) in enumerate(cases):
        torch.distributed.barrier()
        layout = {"rank": rank, "world_size": 2, "seed": number, **options}
        taken_keys: list[str] = []
        with make(urls, place / f"cache-{rank}-{number}", **layout) as loader:
            if rank:
                torch.distributed.barrier()
            write_sizes(paths) if found[rank] else sizes_beside(paths).unlink(missing_ok=True)
            is_refused = rank == 1 and found == [False, True]
            with (
                pytest.raises(streamload.errors.OrderDiverged, match=DIFFERENT)
                if is_refused
                else nullcontext()
            ):
                is_known = found[0] or "num_batches" in options
                assert loader.num_batches == (samples // 5 if is_known else None)
                taken_keys = keys(loader)
            if not rank:
                torch.distributed.barrier()
        assert len(taken_keys) == (0 if is_refused else samples)
        both = distributed.gather(taken_keys, 2)
        assert not set(both[0]) & set(both[1])
    torch.distributed.destroy_process_group()


def test_a_rank_that_gets_404_for_sizes_json_takes_another_ranks_or_they_are_told_that_they_differ(
    paths: list[str], tmp_path: Path
) -> None:
    with ShardServer(tmp_path / "data") as server:
        torch.multiprocessing.start_processes(
            of_two_ranks, (paths, server.url, tmp_path), nprocs=2, start_method="fork"
        )


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault(status=403), streamload.errors.OriginDenied),
        (Fault(body=EMPTY_PAGE), streamload.errors.DataError),
    ],
)
def test_what_may_hide_a_sizes_json_is_an_error_where_nodes_are_told_apart_by_it(
    fault: Fault, error: type[Exception], paths: list[str], tmp_path: Path
) -> None:
    write_sizes(paths)
    with ShardServer(tmp_path / "data") as server:
        server.misbehave("sizes.json", fault)
        urls = f"{server.url}/{{00000..00005}}.tar"
        two: dict[str, Any] = {"groups": 2, "rank": 0, "world_size": 2, "num_batches": 4}
        with (
            make(urls, tmp_path / "cache", **two) as loader,
            pytest.raises(error, match="no node may miss it"),
        ):
            iter(loader)
        with make(urls, tmp_path / "cache", **{**two, "groups": 1}) as loader:
            assert len(keys(loader)) == 20


def state_of_two_groups(paths: list[str], cache: Path, before: int) -> dict[str, Any]:
    with make(paths, cache, groups=2, endless=True) as loader:
        taken(loader, before)
        return loader.state_dict()


def test_a_sizes_json_that_comes_or_goes_in_the_middle_of_a_pass_is_refused(
    paths: list[str], tmp_path: Path
) -> None:
    without = state_of_two_groups(paths, tmp_path / "cache", 5)
    write_sizes(paths)
    by_sizes = state_of_two_groups(paths, tmp_path / "cache", 5)
    with make(paths, tmp_path / "cache", endless=True) as loader:
        with pytest.raises(
            streamload.errors.StateMismatch, match=r"sizes\.json .* was changed, added or removed"
        ):
            loader.load_state_dict(without)
        loader.load_state_dict(by_sizes)
        rest = taken(loader, 3)
    sizes_beside(paths).unlink()
    with make(paths, tmp_path / "cache", endless=True) as loader:
        with pytest.raises(streamload.errors.StateMismatch, match=r"sizes\.json"):
            loader.load_state_dict(by_sizes)
        with pytest.raises(streamload.errors.StateMismatch, match=r"differ in .*sizes"):
            loader.load_state_dict([without, by_sizes])
        loader.load_state_dict(without)
        assert taken(loader, 3) != rest


def test_a_sizes_json_may_change_between_two_sequences(paths: list[str], tmp_path: Path) -> None:
    state = state_of_two_groups(paths, tmp_path / "cache", 0)
    write_sizes(paths)
    with make(paths, tmp_path / "cache", groups=2, endless=True) as loader:
        loader.load_state_dict(state)
        assert taken(loader, 5)


@pytest.mark.parametrize("options", [{}, {"num_batches": 6}, {"train": False}])
@pytest.mark.sampled(1)
def test_shards_may_be_appended_at_an_epochs_border(
    options: dict[str, Any], paths: list[str], tmp_path: Path
) -> None:
    """The next epoch is one over all shards, as if it had never been another list."""
    with make(paths[:4], tmp_path / "cache", **options) as loader:
        epochs = [keys(loader), keys(loader)]
        state = json.loads(json.dumps(loader.state_dict()))
    everything = {key for path in paths for key, _ in read_oracle(path)}
    with make(
        paths, tmp_path / "c2", **{**options, "num_batches": 24} if "num_batches" in options else options
    ) as loader:
        loader.load_state_dict(state)
        found = keys(loader)
        later = loader.state_dict()
    assert len(epochs[0]) == len(epochs[1]) == (30 if "num_batches" in options else 80)
    assert sorted(found) == sorted(everything)
    with make(paths, tmp_path / "c3", **options) as loader:
        loader.set_epoch(2)
        assert keys(loader) == found[: len(found) if "num_batches" not in options else 30]
    with make(paths[:5], tmp_path / "c4", **options) as loader:
        with pytest.raises(streamload.errors.StateMismatch, match="another data set"):
            loader.load_state_dict(later)
        loader.load_state_dict(state)
        assert keys(loader)


def test_shards_appended_in_the_middle_of_an_epoch_are_refused_with_the_ways_to_go_on(
    paths: list[str], tmp_path: Path
) -> None:
    with make(paths[:4], tmp_path / "cache") as loader:
        keys(loader)
        taken(loader, 3)
        state = loader.state_dict()
    with make(paths, tmp_path / "cache") as loader:
        with pytest.raises(
            streamload.errors.StateMismatch,
            match=r"2 shards were appended to the 4 .* middle of epoch 1: .* set_epoch\(2\)",
        ):
            loader.load_state_dict(state)
        loader.set_epoch(2)
        assert len(keys(loader)) == sum(COUNTS)
    for other in (paths[1:], [paths[4], *paths[:4]]):
        mismatch = pytest.raises(streamload.errors.StateMismatch, match="another data set")
        with make(other, tmp_path / "cache") as loader, mismatch:
            loader.load_state_dict(state)


def test_shards_may_be_appended_to_each_of_several_sources(paths: list[str], tmp_path: Path) -> None:
    def mixed(first: int, second: int, **options: Any) -> streamload.Loader:
        sources = [streamload.Source(paths[:first], weight=2), streamload.Source(paths[3 : 3 + second])]
        return make(sources, tmp_path / "cache", num_batches=10, **options)

    with mixed(2, 2) as loader:
        loader.set_weights({"0": 5})
        keys(loader)
        state = loader.state_dict()
    with mixed(3, 3) as loader:
        loader.load_state_dict(state)
        assert len(keys(loader)) == 50
        assert loader.state_dict()["weights"] == [5, 1]
    with mixed(3, 1) as loader, pytest.raises(streamload.errors.StateMismatch, match="another data set"):
        loader.load_state_dict(state)
