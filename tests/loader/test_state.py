"""States: what is in them, what is refused, and what epochs mean around them."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

import streamload
from streamload import Cache, Order, Workers
from streamload.daemon.warm import warm
from streamload.loader import state as state_format
from streamload.testing.faults import Fault
from streamload.testing.resume import Layout, Resumed, assert_resumes_exactly
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, read_oracle, write_shards
from tests.support import flat
from tests.support.drawn import augmented

COUNTS = [30, 41, 8, 25, 33, 19, 27, 12]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_shards(tmp_path_factory.mktemp("shards"), COUNTS, seed=11)


def make(urls: Any, cache: Path, **options: Any) -> streamload.Loader:
    defaults = {"batch_size": 5, "num_workers": 0, "shuffle": 20, "lanes": 3, "cache_size": "1GB"}
    options = {**defaults, "map_sample": augmented, "with_keys": True, "cache_dir": cache, **options}
    return flat.make_loader([str(u) for u in urls] if isinstance(urls, list) else urls, **options)


def keys(batches: Any) -> list[list[str]]:
    return [list(batch["__key__"]) for batch in batches]


def taken(loader: streamload.Loader, batches: int) -> list[list[str]]:
    return [list(batch["__key__"]) for _, batch in zip(range(batches), loader, strict=False)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_is_that_of_the_last_batch_handed_out(
    workers: int, paths: list[Path], tmp_path: Path
) -> None:
    """Workers are ahead of the training loop; what they have prepared comes again."""
    with make(paths, tmp_path / "cache", num_workers=workers) as loader:
        whole = keys(loader)
        loader.set_epoch(0)
        iterator = iter(loader)
        states = [loader.state_dict()]
        for _ in range(7):
            next(iterator)
            states.append(loader.state_dict())
        del iterator
    for batches, state in enumerate(states):
        with make(paths, tmp_path / "cache", num_workers=workers) as loader:
            loader.load_state_dict(state)
            assert keys(loader) == whole[batches:]


def test_set_epoch_before_and_after_loading_does_what_it_says(paths: list[Path], tmp_path: Path) -> None:
    with make(paths, tmp_path / "cache") as loader:
        epochs = [keys(loader) for _ in range(3)]
        assert all(len(epoch) > 4 for epoch in epochs)
        loader.set_epoch(1)
        taken(loader, 4)
        state = loader.state_dict()

    def resumed(*calls: Callable[[streamload.Loader], None]) -> list[list[list[str]]]:
        with make(paths, tmp_path / "cache") as loader:
            for call in calls:
                call(loader)
            return [keys(loader), keys(loader)]

    def load(loader: streamload.Loader) -> None:
        loader.load_state_dict(state)

    def epoch(number: int) -> Callable[[streamload.Loader], None]:
        return lambda loader: loader.set_epoch(number)

    rest = [epochs[1][4:], epochs[2]]
    assert resumed(load) == rest
    assert resumed(load, epoch(1)) == rest
    assert resumed(epoch(1), load) == rest
    assert resumed(epoch(7), load) == rest
    assert resumed(load, epoch(0)) == epochs[:2]
    assert resumed(load, epoch(2))[0] == epochs[2]
    assert resumed(load, epoch(1), epoch(2))[0] == epochs[2]


def test_behind_an_epochs_end_the_next_one_begins(paths: list[Path], tmp_path: Path) -> None:
    """Before the end is seen it is the old epoch, of which nothing is left; a loop over epochs means that."""
    with make(paths, tmp_path / "cache") as loader:
        epochs = [keys(loader), keys(loader)]
        loader.set_epoch(0)
        iterator = iter(loader)
        for _ in epochs[0]:
            next(iterator)
        last = loader.state_dict()
        with pytest.raises(StopIteration):
            next(iterator)
        over = loader.state_dict()
    assert (last["epoch"], over["epoch"]) == (0, 1)
    for state, expected in ((last, [[], epochs[1]]), (over, [epochs[1]])):
        with make(paths, tmp_path / "cache") as loader:
            loader.load_state_dict(state)
            assert [keys(loader) for _ in expected] == expected


@pytest.mark.parametrize("length", [{}, {"num_samples": 50}, {"num_batches": 10}])
@pytest.mark.parametrize("end_is_seen", [False, True])
@pytest.mark.sampled(3)
def test_a_loop_from_the_saved_epoch_on_trains_no_epoch_twice(
    length: dict[str, int],
    end_is_seen: bool,
    paths: list[Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Saved after the last batch of epoch 1, before or after the iterator has said that it is the last."""
    with make(paths, tmp_path / "cache", **length) as loader:
        epochs = [keys(loader) for _ in range(3)]
    with make(paths, tmp_path / "cache", **length) as loader:
        keys(loader)
        iterator = iter(loader)
        for _ in epochs[1]:
            next(iterator)
        assert not end_is_seen or next(iterator, None) is None
        state = json.loads(json.dumps(loader.state_dict()))
    with make(paths, tmp_path / "cache", **length) as loader:
        loader.load_state_dict(state)
        loader.set_epoch(1)
        place = loader.state_dict()
        assert all(place[name] == state[name] for name in ("epoch", "sequence", "began", "position", "at"))
        batches = []
        for epoch in range(1, 3):
            loader.set_epoch(epoch)
            batches.append(keys(loader))
        assert batches == [[], epochs[2]]
        loader.set_epoch(0)
        assert "goes back before" not in caplog.text
        loader.load_state_dict(state)
        loader.set_epoch(0)
        assert "set_epoch(0) goes back before the loaded state" in caplog.text
        assert keys(loader) == epochs[0]


@pytest.mark.parametrize("length", ["num_samples", "num_batches"])
def test_virtual_epochs_go_on_in_the_same_pass(length: str, paths: list[Path], tmp_path: Path) -> None:
    """Nothing comes twice before all has been seen, wherever the run is cut and taken up."""
    size = {"num_samples": 50} if length == "num_samples" else {"num_batches": 10}
    seen: list[str] = []
    state = None
    passes = sum(COUNTS) // 50
    for epoch in range(passes):
        with make(paths, tmp_path / "cache", **size) as loader:
            if state is not None:
                loader.load_state_dict(state)
            loader.set_epoch(epoch)
            first = taken(loader, 3 + epoch)
            state = json.loads(json.dumps(loader.state_dict()))
        with make(paths, tmp_path / "cache", **size) as loader:
            loader.load_state_dict(state)
            rest = keys(loader)
            state = loader.state_dict()
        assert len(first) + len(rest) == 10
        seen += [key for batch in first + rest for key in batch]
    assert len(seen) == len(set(seen)) == 50 * passes


def test_an_endless_epoch_goes_round_and_round(paths: list[Path], tmp_path: Path) -> None:
    once = sum(COUNTS)
    with make(paths, tmp_path / "cache", endless=True, batch_size=1, num_workers=2) as loader:
        seen = [key for (key,) in taken(loader, 2 * once + 7)]
        state = loader.state_dict()
        with pytest.raises(TypeError, match="length is not known"):
            len(loader)
    assert sorted(seen[:once]) == sorted(seen[once : 2 * once])
    assert len(set(seen[:once])) == once
    assert seen[:once] != seen[once : 2 * once]
    assert len(set(seen[2 * once :])) == 7
    with make(paths, tmp_path / "cache", endless=True, batch_size=1) as loader:
        loader.load_state_dict(state)
        rest = [key for (key,) in taken(loader, once - 7)]
    assert sorted(seen[2 * once :] + rest) == sorted(seen[:once])


@pytest.mark.parametrize(("batch_size", "ranks"), [(3, 1), (8, 1), (5, 2), (2, 3)])
def test_another_global_batch_gives_the_rest_in_other_batches(
    batch_size: int, ranks: int, paths: list[Path], tmp_path: Path
) -> None:
    with make(paths, tmp_path / "cache", endless=True) as loader:
        whole = taken(loader, 30)
        loader.set_epoch(0)
        taken(loader, 6)
        state = loader.state_dict()
    loaders = [
        make(paths, tmp_path / "c2", endless=True, batch_size=batch_size, rank=rank, world_size=ranks)
        for rank in range(ranks)
    ]
    for loader in loaders:
        loader.load_state_dict(state)
    found: list[str] = []
    for _, parts in zip(range(60 // (batch_size * ranks)), zip(*loaders, strict=True), strict=False):
        found += [key for part in parts for key in part["__key__"]]
    assert found == [key for batch in whole[6:] for key in batch][: len(found)]
    assert len(found) > 50
    for loader in loaders:
        loader.close()


def test_other_groups_at_an_epochs_start_lose_and_double_nothing(paths: list[Path], tmp_path: Path) -> None:
    """A run on one node goes on as two groups, behind the end of a pass."""
    with make(paths, tmp_path / "cache", batch_size=1) as loader:
        first = keys(loader)
        state = loader.state_dict()
    once = sum(COUNTS)
    loaders = [
        make(paths, tmp_path / "c2", batch_size=1, groups=2, rank=rank, world_size=2, num_samples=once)
        for rank in range(2)
    ]
    found = []
    for loader in loaders:
        loader.load_state_dict(state)
    for parts in zip(*loaders, strict=True):
        found += [key for part in parts for key in part["__key__"]]
    # Groups of unequal size: the longer one's tail is dropped, and the shorter goes on into its next pass.
    assert len(found) == once // 2 * 2
    assert len(set(found)) >= 0.9 * once
    (tmp_path / "sized").mkdir()
    assert sorted(key for (key,) in first) == sorted(k for path in paths for k, _ in read_oracle(path))


def two_groups(paths: list[Path], cache: Path) -> list[streamload.Loader]:
    return [
        make(paths, cache, groups=2, rank=rank, world_size=2, num_samples=sum(COUNTS)) for rank in range(2)
    ]


def test_a_rank_knows_its_own_group_and_a_list_knows_all(paths: list[Path], tmp_path: Path) -> None:
    loaders = two_groups(paths, tmp_path / "cache")
    steps = [[list(part["__key__"]) for part in parts] for parts in zip(*loaders, strict=True)]
    for loader in loaders:
        loader.set_epoch(0)
    iterators = [iter(loader) for loader in loaders]
    for _ in range(5):
        for iterator in iterators:
            next(iterator)
    states = [loader.state_dict() for loader in loaders]
    del iterators
    for loader in loaders:
        loader.close()
    for rank, loader in enumerate(two_groups(paths, tmp_path / "c2")):
        with loader, pytest.raises(streamload.errors.StateMismatch, match=rf"lacks groups \[{rank}\] of 2"):
            loader.load_state_dict(states[1 - rank])
        with loader:
            loader.load_state_dict(states[rank])  # all that this layout needs
            assert keys(loader) == [parts[rank] for parts in steps[5:]]
    with make(paths, tmp_path / "c3", batch_size=10, num_samples=sum(COUNTS)) as alone:
        with pytest.raises(streamload.errors.StateMismatch, match="incomplete"):
            alone.load_state_dict(states[:1])
        alone.load_state_dict(states)
        assert keys(alone) == [[key for part in parts for key in part] for parts in steps[5:]]
        with pytest.raises(streamload.errors.StateMismatch, match="not of one moment"):
            alone.load_state_dict([states[0], state_format.sealed({**states[1], "position": 10})])


def gather(rank: int, paths: list[Path], place: Path) -> None:
    """One of two real ranks: it trains a little, and writes down what it gathered and what comes."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place}/rendezvous", rank=rank, world_size=2
    )
    with make(paths, place / "cache", groups=2, rank=rank, world_size=2, num_samples=sum(COUNTS)) as loader:
        iterator = iter(loader)
        for _ in range(4):
            next(iterator)
        state = streamload.gather_state(loader)
        rest = keys(iterator)
        if rank == 0:
            taken(loader, 1)  # one step more than the other
            with pytest.raises(streamload.errors.OrderDiverged, match="not at the same step"):
                streamload.gather_state(loader)
        else:
            iter(loader)
            with pytest.raises(streamload.errors.OrderDiverged, match="not at the same step"):
                streamload.gather_state(loader)
    (place / f"{rank}.json").write_text(json.dumps([state, rest]))
    torch.distributed.destroy_process_group()


def test_gather_state_is_the_same_and_whole_on_every_rank(paths: list[Path], tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(gather, (paths, tmp_path), nprocs=2, start_method="fork")
    (state, first), (other, second) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert state == other
    with make(paths, tmp_path / "c2", batch_size=10, num_samples=sum(COUNTS)) as loader:
        loader.load_state_dict(state)
        assert keys(loader) == [a + b for a, b in zip(first, second, strict=True)]


def test_every_rank_gives_as_many_full_batches_whatever_happens_to_its_part(tmp_path: Path) -> None:
    """Two nodes: uneven shards, fewer than workers; one node's link is slow, one of its shards is missing."""
    counts = [90, 4, 31]
    paths = write_shards(tmp_path / "data", counts, seed=9, options=ShardOptions(without_text_every=7))
    with (
        ShardServer(tmp_path / "data") as near,
        ShardServer(tmp_path / "data", bytes_per_second=200_000) as far,
    ):
        for server in (near, far):
            server.misbehave(paths[1].name, Fault(status=404))
        loaders = [
            streamload.make_loader(
                f"{server.url}/{{00000..00002}}.tar",
                preprocess=size_of,
                batches=streamload.Batches(with_keys=True),
                batch_size=4,
                num_workers=3,
                order=Order(num_batches=25, groups=2, rank=rank, world_size=2),
                cache_dir=tmp_path / f"node-{rank}",
                cache_size="1GB",
            )
            for rank, server in enumerate((near, far))
        ]
        given: list[list[int]] = [[], []]
        for parts in zip(*loaders, strict=True):
            for rank, (_, _, origin) in enumerate(parts):
                given[rank].append(len(origin["__key__"]))
        assert given == [[4] * 25] * 2
        assert sum(loader.stats().samples_skipped["missing"] for loader in loaders) > 0
        for loader in loaders:
            loader.close()


def size_of(image: Any) -> torch.Tensor:
    return torch.tensor(image.size)


def test_an_evaluation_can_be_taken_over(paths: list[Path], tmp_path: Path) -> None:
    with make(paths, tmp_path / "cache", train=False, num_workers=2) as loader:
        whole = keys(loader)
        loader.set_epoch(0)
        taken(loader, 9)
        state = loader.state_dict()
    with make(paths, tmp_path / "c2", train=False) as loader:
        loader.load_state_dict(state)
        assert keys(loader) == whole[9:]
    assert sorted(k for batch in whole for k in batch) == sorted(
        key for path in paths for key, _ in read_oracle(path)
    )


def test_a_state_is_small_whatever_the_data_set(tmp_path: Path) -> None:
    """64 lanes and a window of 20,000 over shards of 300: about 130 shards are open."""
    (path,) = write_shards(tmp_path / "data", [300], options=ShardOptions(image_side=(1, 1)))
    options = {"batch_size": 500, "lanes": 64, "shuffle": 20_000, "map_sample": only_key}
    with make([path] * 200, tmp_path / "cache", **options) as loader:
        for number, _ in enumerate(loader):
            size = len(json.dumps(loader.state_dict()))
            assert size < 64 * 1024
            if number == 45:
                break
        assert size > 5_000


def only_key(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"]}


@pytest.fixture
def state(paths: list[Path], tmp_path: Path) -> dict[str, Any]:
    with make(paths, tmp_path / "cache") as loader:
        taken(loader, 8)
        return loader.state_dict()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"seed": 1}, "another seed"),
        ({"train": False}, "another train"),
        ({"shuffle": 21}, "shuffle=20, and this is 21"),
        ({"lanes": 4}, "lanes=3, and this is 4"),
        ({"groups": 2, "num_samples": 90}, "groups=1, and this is 2"),
        (
            {"map_sample": None, "text_key": "json:caption"},
            "another choice of image_key, text_key, label_key, facts, repeat, listed uids and joined rows",
        ),
    ],
)
def test_a_state_of_other_options_is_refused(
    options: dict[str, Any], match: str, state: dict[str, Any], paths: list[Path], tmp_path: Path
) -> None:
    mismatch = pytest.raises(streamload.errors.StateMismatch, match=match)
    with make(paths, tmp_path / "cache", **options) as loader, mismatch:
        loader.load_state_dict(state)


def test_a_state_of_other_shards_is_refused(state: dict[str, Any], paths: list[Path], tmp_path: Path) -> None:
    for other in (paths[:-1], paths[::-1], [*paths[1:], paths[0]]):
        mismatch = pytest.raises(streamload.errors.StateMismatch, match="another data set")
        with make(other, tmp_path / "cache") as loader, mismatch:
            loader.load_state_dict(state)


def test_equal_shards_listed_in_another_way_are_the_same(
    state: dict[str, Any], paths: list[Path], tmp_path: Path
) -> None:
    pattern = f"{paths[0].parent}/{{00000..{len(paths) - 1:05d}}}.tar"
    with make(paths, tmp_path / "cache") as listed, make(pattern, tmp_path / "cache") as from_pattern:
        for loader in (listed, from_pattern):
            loader.load_state_dict(state)
        rest = keys(listed)
        assert rest
        assert keys(from_pattern) == rest


def without(state: dict[str, Any], *path: Any) -> dict[str, Any]:
    """The state with something left out."""
    cut: Any = copy.deepcopy(state)
    inner = cut
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    whole: dict[str, Any] = cut
    return whole


def test_what_is_no_state_is_refused(state: dict[str, Any], paths: list[Path], tmp_path: Path) -> None:
    with make(paths, tmp_path / "cache") as loader:
        for wrong, match in (
            (None, "not a state"),
            ({}, "not a state"),
            ([], "an empty list"),
            ("state", "not a state"),
            ({"epoch": 1}, "not a state"),
            ({**state, "streamload_state": 99}, "of format 99; this version of streamload reads 1"),
            ({**state, "position": "7"}, "not a valid state"),
            ({**state, "position": -1}, "not a valid state"),
            ({**state, "changes": []}, "not a valid state"),
            ({**state, "changes": [[0, [5]]]}, "not a valid state"),
            ({**state, "at": {"0": {}}}, "not a valid state"),
            (state_format.sealed(without(state, "at", "0")), "lacks groups"),
            (without(state, "at", "0", "sources", 0, "cursor", "skip"), "not a valid state"),
            (without(state, "seed"), "not a valid state"),
            (without(state, "sources"), "not a valid state"),
        ):
            with pytest.raises(streamload.errors.StateMismatch, match=match):
                loader.load_state_dict(wrong)  # type: ignore[arg-type]
        loader.load_state_dict(state)
        assert keys(loader)


def another(value: Any) -> Any:
    """A value of the same form that differs in one place."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "0"
    if isinstance(value, list):
        return [another(value[0]), *value[1:]] if value else [1]
    first = next(iter(value))
    return {**value, first: another(value[first])}


def test_each_part_of_a_state_is_under_its_checksum(state: dict[str, Any]) -> None:
    assert state_format.joined_state(state)["seed"] == state["seed"]
    assert state_format.joined_state(json.loads(json.dumps(state))) == state_format.joined_state(state)
    for name in state:
        for altered in ({**state, name: another(state[name])}, without(state, name)):
            with pytest.raises(streamload.errors.StateMismatch):
                state_format.joined_state(altered)
    with pytest.raises(streamload.errors.StateMismatch, match="altered or damaged"):
        state_format.joined_state({**without(state, "checksum"), "position": state["position"] + 5})


def test_states_of_ranks_are_joined_part_by_part(state: dict[str, Any]) -> None:
    def joined(name: str, first: Any, second: Any, train: bool = True) -> Any:
        states = [{**state, "train": train, name: value} for value in (first, second)]
        return state_format.joined_state([state_format.sealed(rank_state) for rank_state in states])[name]

    counted = {state_format.BAD_SAMPLES: 3, state_format.BAD_SHARDS: 2, state_format.BAD_IN_PASS: 3}
    for name in state.keys() - {"at", "checksum", "streamload_state", state_format.FINGERPRINT, *counted}:
        with pytest.raises(streamload.errors.StateMismatch, match=rf"they differ in {name}"):
            joined(name, state[name], another(state[name]))
    (group,) = state["at"].values()
    assert joined("at", {"0": group}, {"1": group}) == {"0": group, "1": group}
    # samples, bad ones, samples of lost shards: each rank saw bad ones of its own, in an evaluation the same
    assert joined(state_format.BAD_IN_PASS, [70, 3, 8], [65, 4, 0]) == [70, 7, 8]
    assert joined(state_format.BAD_IN_PASS, [65, 4, 0], [70, 3, 8]) == [70, 7, 8]
    assert joined(state_format.BAD_IN_PASS, [70, 3, 8], [65, 4, 0], train=False) == [70, 3, 8]
    assert joined(state_format.BAD_SAMPLES, [9, 2, 1], [8, 1, 1]) == [9, 2, 1]  # any rank's will do
    assert joined(state_format.BAD_SHARDS, [9, 2], [8, 1]) == [9, 2]


def test_a_state_that_is_loaded_ends_the_epoch_under_way(
    state: dict[str, Any], paths: list[Path], tmp_path: Path
) -> None:
    with make(paths, tmp_path / "cache") as loader:
        iterator = iter(loader)
        next(iterator)
        loader.load_state_dict(state)
        with pytest.raises(streamload.errors.LoaderClosed, match="load_state_dict"):
            next(iterator)
        assert loader.state_dict() == state


def test_a_loaded_place_is_kept_until_a_batch_was_taken(
    state: dict[str, Any], paths: list[Path], tmp_path: Path
) -> None:
    with make(paths, tmp_path / "cache") as loader:
        loader.load_state_dict(state)
        expected = keys(loader)
        loader.load_state_dict(state)
        iter(loader)
        loader.set_epoch(state["epoch"])
        assert keys(loader) == expected


def test_a_loader_goes_back_to_its_own_state(paths: list[Path], tmp_path: Path) -> None:
    with make(paths, tmp_path / "cache", num_workers=2) as loader:
        taken(loader, 3)
        state = loader.state_dict()
        expected = None
        for _ in range(3):
            loader.load_state_dict(state)
            rest = keys(loader)
            assert rest
            assert expected in (None, rest)
            expected = rest


def test_a_shard_that_changed_under_the_state_is_an_error(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "data", [40] * 4, seed=1)
    with ShardServer(tmp_path / "data") as server:
        url = f"{server.url}/{{00000..00003}}.tar"
        assert warm(url, cache_dir=tmp_path / "cache", cache_size="1GB").shards_complete == len(paths)
        with make(url, tmp_path / "cache") as loader:
            taken(loader, 6)
            state = loader.state_dict()
        write_shards(tmp_path / "data", [40] * 4, seed=2)
        with make(url, tmp_path / "cache") as loader:  # what the cache holds is what it was
            loader.load_state_dict(state)
            assert len(keys(loader)) == len(paths) * 40 // 5 - 6
        with make(url, tmp_path / "empty") as loader:
            loader.load_state_dict(state)
            with pytest.raises(streamload.errors.DatasetChanged, match="than when the state was saved"):
                keys(loader)


@pytest.mark.parametrize("is_local", [True, False])
def test_a_shard_that_is_gone_at_a_resume_is_named_with_the_cause(is_local: bool, tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "data", [40] * 4, seed=1)
    with ShardServer(tmp_path / "data") as server:
        urls: Any = paths if is_local else f"{server.url}/{{00000..00003}}.tar"
        with make(urls, tmp_path / "cache") as loader:
            taken(loader, 3)
            state = loader.state_dict()
        shard = int(next(iter(state["at"]["0"]["sources"][0]["begun"])))
        paths[shard].unlink()
        with make(urls, tmp_path / "empty") as loader:
            loader.load_state_dict(state)
            cause = "no such file" if is_local else "404 Not Found"
            with pytest.raises(
                streamload.errors.DatasetChanged, match=rf"{shard:05d}\.tar can't be read .*: .*{cause}"
            ):
                keys(loader)


def test_a_shard_with_other_samples_under_the_state_is_an_error(tmp_path: Path) -> None:
    """Nothing names the version of a pipe's shard: its number of samples tells."""
    write_shards(tmp_path / "data", [40] * 4, seed=1)
    url = f"pipe:cat {tmp_path}/data/{{00000..00003}}.tar"
    with make(url, tmp_path / "cache") as loader:
        taken(loader, 20)
        state = loader.state_dict()
    write_shards(tmp_path / "data", [31] * 4, seed=1)
    with make(url, tmp_path / "empty") as loader:
        loader.load_state_dict(state)
        with pytest.raises(streamload.errors.DatasetChanged, match="when the state was saved it had"):
            keys(loader)


def test_a_shard_that_was_given_up_stays_cut_where_it_was(tmp_path: Path) -> None:
    """Its origin has come back by the time the run goes on, in an empty cache: the order is as before."""
    paths = write_shards(tmp_path / "data", [30] * 4, seed=3)
    whole = paths[1].read_bytes()
    paths[1].write_bytes(whole[: len(whole) // 1024 * 512 + 100])
    url = f"pipe:cat {tmp_path}/data/{{00000..00003}}.tar"
    with make(url, tmp_path / "cache", shuffle=60, lanes=4) as loader:
        expected = keys(loader)
        assert loader.stats().shards_given_up == 1
        loader.set_epoch(0)
        states = [loader.state_dict() for _ in loader]
    begun = [state["at"]["0"]["sources"][0]["begun"] for state in states]
    assert any(given_up > 0 for shards in begun for _, _, given_up, *_ in shards.values())
    paths[1].write_bytes(whole)
    for cut in range(0, len(states), 2):
        with make(url, tmp_path / f"empty-{cut}", shuffle=60, lanes=4) as loader:
            loader.load_state_dict(states[cut])
            assert keys(loader) == expected[cut + 1 :]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_was_given_up_is_whole_in_the_next_pass(workers: int, tmp_path: Path) -> None:
    """Workers go over the end of the pass at different batches, and have to agree on what comes behind it."""
    paths = write_shards(tmp_path / "data", [30] * 4, seed=3)
    whole = paths[1].read_bytes()
    paths[1].write_bytes(whole[: len(whole) // 1024 * 512 + 100])
    url = f"pipe:cat {tmp_path}/data/{{00000..00003}}.tar"
    options = {"endless": True, "batch_size": 1, "shuffle": 60, "lanes": 4}
    with make(url, tmp_path / "cache", **options) as loader:
        first = taken(loader, 20)
        state = loader.state_dict()
    paths[1].write_bytes(whole)
    in_all = [key for path in paths for key, _ in read_oracle(path)]
    with make(url, tmp_path / "empty", num_workers=workers, **options) as loader:
        loader.load_state_dict(state)
        later, states = [], []
        for _, batch in zip(range(230), loader, strict=False):
            later += batch["__key__"]
            states.append(loader.state_dict())
    for step in (1, 20, 150):  # its lanes read the next pass at once, the window has rows of it, only those
        with make(url, tmp_path / f"after {step}", **options) as loader:
            loader.load_state_dict(states[step - 1])
            assert [key for (key,) in taken(loader, 60)] == later[step : step + 60]
    seen = [*(key for (key,) in first), *later]
    in_first = next(number for number, key in enumerate(seen) if key in seen[:number])
    assert 90 < in_first < 120
    assert sorted(seen[in_first : in_first + 120]) == sorted(in_all)


@pytest.mark.parametrize("is_damaged", [True, False], ids=["given up", "whole"])
def test_a_state_of_a_resumed_run_keeps_what_is_known_of_a_shard_that_comes_again(
    is_damaged: bool, tmp_path: Path
) -> None:
    """Less of it has come by then than when the first state was saved."""
    paths = write_shards(tmp_path / "data", [60] * 2, seed=3)
    whole = paths[0].read_bytes()
    half = len(whole) // 1024 * 512
    damaged = whole[:half] + bytes([7]) * (len(whole) - half)
    version = {"ETag": '"1"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
    options = {"batch_size": 1, "shuffle": 1, "lanes": 2, "max_bad_shards": None}

    def recorded(state: dict[str, Any]) -> list[Any]:
        return list(state["at"]["0"]["sources"][0]["begun"]["0"])

    with ShardServer(tmp_path / "data") as server:
        url = f"{server.url}/{{00000..00001}}.tar"
        first, last = (damaged, whole) if is_damaged else (whole, damaged)
        server.misbehave("00000.tar", Fault(body=first, headers=version))
        with make(url, tmp_path / "first", **options) as loader:
            batches = iter(loader)
            for _ in range(10):
                next(batches)
                state = loader.state_dict()
                if recorded(state)[1]:
                    break
            rest = [list(batch["__key__"]) for batch in batches]
        assert recorded(state)[1]
        server.misbehave("00000.tar", Fault(body=whole, headers=version, stall_after_bytes=half * 8 // 10))
        with make(url, tmp_path / "second", **options) as loader:
            loader.load_state_dict(state)
            assert taken(loader, 1) == rest[:1]
            later = loader.state_dict()
        assert recorded(later) == recorded(state)
        server.misbehave("00000.tar", Fault(body=last, headers=version))
        with make(url, tmp_path / "third", **options) as loader:
            loader.load_state_dict(later)
            if is_damaged:
                assert taken(loader, 100) == rest[1:]
            else:
                with pytest.raises(streamload.errors.DatasetChanged):
                    taken(loader, 100)


@pytest.mark.deep
def test_real_workers_and_ranks_fetch_only_what_is_still_to_come(tmp_path: Path) -> None:
    """20 cuts: the first step, the last, borders of epochs, positions that the workers don't divide."""
    counts = [40, 25, 33, 8, 50, 61, 17, 28, 36, 50]
    write_shards(tmp_path / "data", counts, seed=5)
    with ShardServer(tmp_path / "data") as server:
        names = [f"{number:05d}.tar" for number in range(len(counts))]
        before: dict[str, int] = {}
        resumed_at: list[int] = []

        def make_rank(**layout: Any) -> streamload.Loader:
            before.update({name: len(server.requests(name)) for name in names if layout["rank"] == 0})
            return flat.make_loader(
                f"{server.url}/{{00000..{len(counts) - 1:05d}}}.tar",
                workers=Workers(map_sample=augmented),
                with_keys=True,
                shuffle=30,
                order=Order(lanes=3),
                cache_size="1GB",
                cache=Cache(ahead=1),
                **layout,
            )

        def after(resumed: Resumed) -> None:
            """Up to one shard ahead, of the next epoch."""
            live = {url.rpartition("/")[2] for url in resumed.shards}
            asked = {name for name in names if len(server.requests(name)) > before[name]}
            assert len(asked - live) <= 1, f"{resumed}: {asked - live} were fetched for nothing"
            assert live <= asked
            resumed_at.append(resumed.cut)

        steps = sum(counts) // 12
        cuts = sorted({0, 1, 2, 3, steps - 1, steps, 2 * steps - 2, *range(5, 2 * steps - 2, 3)})[:20]
        made = assert_resumes_exactly(
            make_rank,
            tmp_path,
            global_batch=12,
            first=Layout(2, 2),
            layouts=[Layout(2, 3), Layout(1, 2), Layout(2, 1), Layout(3, 2)],
            epochs=2,
            cuts=cuts,
            after=after,
        )
        assert made == len(resumed_at) == 20


@pytest.fixture(scope="module")
def halfway(paths: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, list[list[str]]]:
    """Where shards were served, the state after five batches of them, and the batches that come after it."""
    cache = tmp_path_factory.mktemp("cache")
    with ShardServer(paths[0].parent) as server:
        urls = f"{server.url}/{{00000..00007}}.tar"
        with make(urls, cache) as loader:
            taken(loader, 5)
            state = json.loads(json.dumps(loader.state_dict()))
        with make(urls, cache) as loader:
            return server.url, state, keys(loader)[5:]


def test_a_state_goes_on_in_shards_that_were_moved_to_another_host_or_to_a_disk(
    paths: list[Path], halfway: tuple[str, Any, list[list[str]]], tmp_path: Path
) -> None:
    was, state, rest = halfway
    shutil.copytree(paths[0].parent, tmp_path / "below")
    with ShardServer(tmp_path) as server:
        for now in (f"{server.url}/below", f"pipe:curl -s {server.url}/below", str(paths[0].parent)):
            with make(f"{now}/{{00000..00007}}.tar", tmp_path / "cache") as loader:
                with pytest.raises(
                    streamload.errors.StateMismatch, match=r"another data set.*moved={old: new}"
                ):
                    loader.load_state_dict(state)
                loader.load_state_dict(state, moved={was: now.removeprefix("pipe:curl -s ")})
                assert taken(loader, 2) == rest[:2]
                again = loader.state_dict()  # which knows the shards where they are
            with make(f"{now}/{{00000..00007}}.tar", tmp_path / "cache") as loader:
                loader.load_state_dict(again)
                assert keys(loader) == rest[2:]


def test_other_shards_are_not_taken_for_moved_ones(
    halfway: tuple[str, Any, list[list[str]]], tmp_path: Path
) -> None:
    was, state, _ = halfway
    write_shards(tmp_path, COUNTS, seed=12)
    with make(f"{tmp_path}/{{00000..00007}}.tar", tmp_path / "cache") as loader:
        loader.load_state_dict(state, moved={was: str(tmp_path)})
        with pytest.raises(
            streamload.errors.DatasetChanged, match="has other samples than when the state was saved"
        ):
            keys(loader)
    with make(f"{tmp_path}/{{00000..00006}}.tar", tmp_path / "cache") as loader:
        with pytest.raises(streamload.errors.StateMismatch, match="another data set"):
            loader.load_state_dict(state, moved={was: str(tmp_path)})
        with pytest.raises(
            streamload.errors.OptionError, match=r"no shard has a URL that begins with .*elsewhere"
        ):
            loader.load_state_dict(state, moved={was: "/elsewhere"})


def test_a_state_without_the_digest_of_a_damaged_index_is_not_taken_for_moved_shards(
    paths: list[Path], halfway: tuple[str, Any, list[list[str]]], tmp_path: Path
) -> None:
    was, state, _ = halfway
    damaged = copy.deepcopy(state)
    for source in damaged["at"]["0"]["sources"]:
        source["begun"] = {shard: [*begun[:4], 0, 0] for shard, begun in source["begun"].items()}
    with (
        make(f"{paths[0].parent}/{{00000..00007}}.tar", tmp_path / "cache") as loader,
        pytest.raises(streamload.errors.StateMismatch, match="was damaged when the state was saved"),
    ):
        loader.load_state_dict(state_format.sealed(damaged), moved={was: str(paths[0].parent)})


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.deep)])
def test_a_group_whose_shards_cannot_be_had_takes_part_in_those_of_the_others(
    workers: int, paths: list[Path], tmp_path: Path
) -> None:
    """Eight groups, one shard of seven samples that is there; the global batch is smaller than the groups."""
    urls: list[Any] = [
        *write_shards(tmp_path / "data", [7], seed=1),
        *(tmp_path / f"{n}.tar" for n in range(3)),
    ]

    def rank(number: int, cache: str, **options: Any) -> streamload.Loader:
        layout = {"groups": 8, "rank": number, "world_size": 2, "batch_size": 3, "num_batches": 30}
        options |= {"num_workers": workers, "max_bad_shards": None}
        return make(urls, tmp_path / cache, **layout, **options)

    there = {key for key, _ in read_oracle(urls[0])}
    whole, states = [], []
    for number in range(2):
        with rank(number, f"c{number}") as loader:
            found = []
            for batch in loader:
                found.append(list(batch["__key__"]))
                states += [loader.state_dict()] if len(found) == 17 else []
            whole.append(found)
    assert [[len(batch) for batch in found] for found in whole] == [[3] * 30] * 2
    assert {key for found in whole for batch in found for key in batch} == there
    for number in range(2):
        with rank(number, f"d{number}") as loader:
            loader.load_state_dict(states)
            assert keys(loader) == whole[number][17:]


def test_a_run_of_fixed_length_without_any_sample_says_so_at_once(tmp_path: Path) -> None:
    with (
        make([tmp_path / "0.tar", tmp_path / "1.tar"], tmp_path / "cache", num_batches=5) as loader,
        pytest.raises(streamload.errors.NoValidSamples, match=r"none of 2 shards could be read: .*0\.tar"),
    ):
        next(iter(loader))


def test_a_generator_over_a_loader_can_be_closed(paths: list[Path], tmp_path: Path) -> None:
    def doubled(loader: streamload.Loader) -> Any:
        yield from iter(loader)

    with make(paths, tmp_path / "cache") as loader:
        batches = doubled(loader)
        next(batches)
        batches.close()
        assert keys(loader)
