"""The numbers of samples by sizes.json: of any list and any file, once a node, and of a million shards."""

import json
import multiprocessing
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamload import urls
from streamload.errors import OrderDiverged
from streamload.loader import sizes as sizes_
from streamload.loader.sizes import read_sizes
from streamload.testing.server import ShardServer
from streamload.topology import Topology
from streamload.urls import expand_urls, listing
from tests.support import flat

RANKS = 4


def looked_up(shards: list[str], folder: Path) -> list[int] | None:
    """What read_sizes has to find, shard by shard."""
    counts = []
    for shard in shards:
        beside = folder / shard.partition("://host/")[2].rpartition("/")[0] / "sizes.json"
        listed = json.loads(beside.read_bytes()) if beside.is_file() else {}
        samples = listed.get(urls.basename(shard))
        if type(samples) is not int or not 0 <= samples < 1 << 40:
            return None
        counts.append(samples)
    return counts


A = {f"{number:04d}.tar": number for number in range(40)}
WITH_SIGNS = {f"50%-{number}.tar": number + 1 for number in range(8, 12)}
FILES: dict[str, dict[str, Any]] = {
    "a/sizes.json": A,
    "b/sizes.json": dict(reversed(A.items())),
    "c/sizes.json": {"README": 3, **A},
    "d/sizes.json": {**A, "0039.tar": 3.5},
    "e/sizes.json": {**A, "0020.tar": True},
    "f/sizes.json": {**A, "0001.tar": -1},
    "g/sizes.json": {"0000.tar": [1, 2], **A},
    "h/sizes.json": {'x,  "y.tar': 4, **A},
    "i/sizes.json": WITH_SIGNS,
    "j/sizes.json": {**A, **{f"x{name}": 7 * count for name, count in A.items()}},
    "k/sizes.json": {f"{number},x, .tar": number for number in range(40)},
    "l/sizes.json": {**A, "more": {"n": 1, "m": [2, {"o": 3}]}},
}


@pytest.mark.parametrize("piece_bytes", [1, 100, 1 << 16])
@pytest.mark.parametrize(
    "patterns",
    [
        *[[f"{folder}/{{0000..0039}}.tar"] for folder in "abcdefghl"],
        ["a/{0039..0000}.tar"],
        ["a/{0000..0020}.tar"],
        ["a/{0000..0040}.tar"],
        ["a/{0000..0039}.tar", "b/{0000..0039..3}.tar", "a/{0005..0007}.tar"],
        ["{a,b,c}/{0000..0039}.tar"],
        [f"{folder}/{number:04d}.tar" for number in range(40) for folder in "ab"],
        [f"a/{number:04d}.tar" for number in range(40)],
        ["i/50%-{8..11}.tar"],
        ["k/{0..39},x, .tar"],
        ["a/{0000..0020}.tar", "b/0000.tar", "a/{0000..0039}.tar", "a/{0000..0020}.tar"],
        ["j/{,x}{0000..0039}.tar"],
        ["a/00{00..39}.tar?versionId={1..2}"],
        ["missing/{0..3}.tar"],
        ["a/0000.tar", "pipe:cat b/0000.tar"],
    ],
)
def test_the_samples_of_each_shard_are_those_that_its_folder_lists(
    patterns: list[str], piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamload.loader.sizes._PIECE_BYTES", piece_bytes)
    for name, listed in FILES.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps(listed, indent=1 if name < "c" else None))
    shards = expand_urls([p if p.startswith("pipe:") else f"http://host/{p}" for p in patterns])
    expected = None if any(shard.startswith("pipe:") for shard in shards) else looked_up([*shards], tmp_path)
    with ShardServer(tmp_path) as server:
        served = expand_urls([p if p.startswith("pipe:") else f"{server.url}/{p}" for p in patterns])
        sizes = read_sizes(served, None)
        requests = [request.path for request in server.log]
    assert (None if sizes is None else sizes.tolist()) == expected
    answered = [path for path in requests if (tmp_path / path).is_file()]
    assert len(answered) == len(set(answered))


@pytest.mark.parametrize("piece_bytes", [1, 1 << 16])
@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b"[1]", b"\xff"),
        *(
            b'{"0000.tar": 1, "0001.tar": 1' + end
            for end in (b"", b"}, 2", b",}", b", }", b"}}", b', {"a": 2}}')
        ),
    ],
)
def test_what_is_no_json_object_says_nothing_of_any_shard(
    text: bytes, piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamload.loader.sizes._PIECE_BYTES", piece_bytes)
    (tmp_path / "sizes.json").write_bytes(text)
    with ShardServer(tmp_path) as server:
        assert read_sizes(expand_urls(f"{server.url}/{{0000..0001}}.tar"), None) is None


def test_of_a_name_that_is_listed_twice_the_last_count_holds(tmp_path: Path) -> None:
    (tmp_path / "sizes.json").write_text('{"0000.tar": 1, "0001.tar": 2, "0000.tar": 3}')
    with ShardServer(tmp_path) as server:
        sizes = read_sizes(expand_urls(f"{server.url}/{{0000..0001}}.tar"), None)
    assert sizes is not None
    assert sizes.tolist() == [3, 2]


def as_rank(rank: int, act: Callable[[], Any], turns: Any, results: Any) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    for turn in range(RANKS):
        if turn == rank:
            result = act()
        turns.wait()
    results.put((rank, result))


def of_ranks(act: Callable[[], Any]) -> list[Any]:
    """Run `act` on each rank of a node in turn, in forks of this process; all live until the last has."""
    context = multiprocessing.get_context("fork")
    turns, results = context.Barrier(RANKS), context.Queue()
    ranks = [context.Process(target=as_rank, args=(rank, act, turns, results)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    by_rank = dict(results.get(timeout=150) for _ in ranks)
    for process in ranks:
        process.join(60)
    return [by_rank[rank] for rank in range(RANKS)]


def test_the_ranks_of_a_node_read_a_file_once_for_each_of_its_runs(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "sizes.json").write_text(json.dumps({"0.tar": 30, "1.tar": 50}))
    with ShardServer.spawn(tmp_path / "data") as server:
        loaders: list[Any] = []

        def lengths() -> list[int]:
            url, cache = f"{server.url}/{{0..1}}.tar", tmp_path / "cache"
            loaders.extend(flat.make_loader(url, batch_size=5, cache_dir=cache) for _ in range(2))
            return [len(loader) for loader in loaders]

        assert of_ranks(lengths) == [[4, 4]] * RANKS
        assert [request.path for request in server.log] == ["sizes.json"] * 2


@pytest.mark.deep
def test_the_sizes_of_a_million_shards_cost_one_rank_of_a_node_a_request_and_the_others_a_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = 1_000_000
    (tmp_path / "data").mkdir()
    counts = {f"{shard:06d}.tar": 1000 + shard % 7 for shard in range(shards)}
    (tmp_path / "data" / "sizes.json").write_text(json.dumps(counts, indent=1))
    samples = sum(counts.values())
    del counts
    made: list[int] = []
    put_together = listing.Product.__getitem__

    def noted(node: listing.Product, place: int) -> str:
        made.append(place)
        return put_together(node, place)

    monkeypatch.setattr(listing.Product, "__getitem__", noted)
    with ShardServer.spawn(tmp_path / "data") as server:
        loaders = []

        def cost() -> tuple[int, int, int]:
            pattern = f"{server.url}/{{000000..{shards - 1:06d}}}.tar"
            tracemalloc.start()
            loaders.append(flat.make_loader(pattern, batch_size=8, cache_dir=tmp_path / "cache"))
            length = len(loaders[0])
            _, peak_bytes = tracemalloc.get_traced_memory()
            return length, len(made), peak_bytes

        (length, _, first_bytes), *others = of_ranks(cost)
        requests = [request.path for request in server.log]
    assert requests == ["sizes.json"]
    assert length == samples // (8 * RANKS)
    assert first_bytes < 16 << 20  # the counts, and a piece of the text
    for its_length, urls_made, peak_bytes in others:
        assert its_length == length
        assert urls_made < 10_000
        assert peak_bytes < 10 << 20


@pytest.mark.parametrize("theirs", [[3, 4], [3, 5], None])
def test_a_rank_that_lacks_the_sizes_of_one_source_compares_those_of_the_other(
    theirs: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own: list[Any] = [None, np.array([3, 4])]
    first = [np.array([1, 2]), theirs and np.array(theirs)]
    said = "rank 0 found others (of them)", lambda: sizes_._as_json(first)
    monkeypatch.setattr(sizes_, "first_with_details", lambda *_: said)
    if theirs == [3, 4]:
        agreed = sizes_.agree_on_sizes(own, "sizes", Topology(1, 2))
        assert [found.tolist() for found in agreed] == [[1, 2], [3, 4]]
    else:
        with pytest.raises(OrderDiverged):
            sizes_.agree_on_sizes(own, "sizes", Topology(1, 2))
