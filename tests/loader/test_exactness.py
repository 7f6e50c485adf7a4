"""Which samples, in which order: against `tarfile`, over origins, workers, ranks, and the cache's state."""

from __future__ import annotations

import collections
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import streamload
from streamload.cache.tier import Tier
from streamload.testing.server import ShardServer
from streamload.testing.shards import read_oracle, write_shards
from tests.support import flat

UNEVEN = [1, 300, 17, 64, 0, 2, 129, 33, 5, 80, 12]
Seen = tuple[str, str, str]


def fingerprint(sample: dict[str, Any]) -> dict[str, Any]:
    members = [(name, data) for name, data in sample.items() if not name.startswith("__")]
    return {"digest": digest(members)}


def digest(members: Iterable[tuple[str, bytes]]) -> str:
    return hashlib.sha256(repr(sorted(members)).encode()).hexdigest()


def make(urls: Any, cache: Path, **options: Any) -> streamload.Loader:
    defaults = {"batch_size": 1, "num_workers": 0, "cache_size": "1TB", "shuffle": 100}
    options = {**defaults, "map_sample": fingerprint, "with_keys": True, "cache_dir": cache, **options}
    return flat.make_loader(urls, **options)


def seen(batches: Iterable[Any]) -> Iterator[Seen]:
    for batch in batches:
        yield from zip(batch["__key__"], batch["__url__"], batch["digest"], strict=True)


def expected(paths: list[Path], url: str, between: str = "/") -> collections.Counter[Seen]:
    return collections.Counter(
        (key, f"{url}{between}{path.name}", digest(members.items()))
        for path in paths
        for key, members in read_oracle(path)
    )


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_shards(tmp_path_factory.mktemp("uneven"), UNEVEN, seed=3)


@pytest.fixture
def server(shards: list[Path]) -> Iterator[ShardServer]:
    with ShardServer(shards[0].parent, bytes_per_second=2e6) as server:
        yield server


def urls_of(server: ShardServer, shards: list[Path]) -> str:
    return f"{server.url}/{{00000..{len(shards) - 1:05d}}}.tar"


@pytest.mark.parametrize(
    "workers",
    [2, *(pytest.param(workers, marks=pytest.mark.deep) for workers in (0, 1, 4))],
)
def test_a_pass_is_every_sample_once_whatever_the_workers(
    workers: int, shards: list[Path], server: ShardServer, tmp_path: Path
) -> None:
    """Cold over a slow link, so that filling and reading overlap; then warm; then with half of it gone."""
    oracle = expected(shards, server.url)
    with make(urls_of(server, shards), tmp_path / "cache", num_workers=workers) as loader:
        passes = [list(seen(loader)) for _ in range(2)]
    for one in passes:
        assert collections.Counter(one) == oracle
    assert passes[0] != passes[1]
    for shard in sorted((tmp_path / "cache" / "shards").iterdir())[::2]:
        shutil.rmtree(shard)
    with make(urls_of(server, shards), tmp_path / "cache", num_workers=workers) as loader:
        assert list(seen(loader)) == passes[0]
    with make(urls_of(server, shards), tmp_path / "cache", num_workers=workers, seed=1) as loader:
        assert list(seen(loader)) != passes[0]


@pytest.mark.parametrize("origin", ["http", "pipe", "curl", "path"])
@pytest.mark.sampled(2)
def test_the_origin_makes_no_difference(
    origin: str, shards: list[Path], server: ShardServer, tmp_path: Path
) -> None:
    names = f"{{00000..{len(shards) - 1:05d}}}.tar"
    urls = {
        "http": f"{server.url}/{names}",
        "pipe": f"pipe:curl --compressed -fsSL {server.url}/{names}",
        "curl": f"pipe:curl -fsSL {server.url}/{names}",  # understood, so opened without curl
        "path": f"{shards[0].parent}/{names}",
    }[origin]
    shown = (f"pipe:curl {server.url}", " ") if "pipe:" in urls else (urls.removesuffix(f"/{names}"), "/")
    with make(urls, tmp_path / "cache", num_workers=2, batch_size=7) as loader:
        batches = list(loader)
    full, rest = divmod(sum(UNEVEN), 7)
    assert [len(batch["__key__"]) for batch in batches] == [7] * full
    assert sum((expected(shards, *shown) - collections.Counter(seen(batches))).values()) == rest


def test_the_same_seed_gives_the_same_batches_for_every_number_of_workers(
    shards: list[Path], tmp_path: Path
) -> None:
    def batches(workers: int) -> list[list[Seen]]:
        with make(
            [str(p) for p in shards], tmp_path / f"cache{workers}", num_workers=workers, batch_size=8
        ) as loader:
            return [list(seen([batch])) for _ in range(2) for batch in loader]

    alone = batches(0)
    assert len(alone) == 2 * (sum(UNEVEN) // 8)
    assert batches(2) == alone
    assert batches(3) == alone


@pytest.mark.parametrize("world", [2, 3, 6])
@pytest.mark.sampled(1)
def test_the_same_seed_gives_the_same_global_batches_for_every_number_of_ranks(
    world: int, shards: list[Path], tmp_path: Path
) -> None:
    def steps(ranks: int) -> list[list[Seen]]:
        loaders = [
            make(
                [str(p) for p in shards],
                tmp_path / "cache",
                batch_size=12 // ranks,
                rank=rank,
                world_size=ranks,
            )
            for rank in range(ranks)
        ]
        try:
            return [
                [sample for part in parts for sample in seen([part])] for parts in zip(*loaders, strict=True)
            ]
        finally:
            for loader in loaders:
                loader.close()

    alone = steps(1)
    assert len(alone) == sum(UNEVEN) // 12
    assert steps(world) == alone


def test_two_ranks_with_workers_share_a_cold_node(
    shards: list[Path], server: ShardServer, tmp_path: Path
) -> None:
    """Each rank's DataLoader workers fill for both; every byte is asked for once."""
    loaders = [
        make(
            urls_of(server, shards), tmp_path / "cache", num_workers=4, batch_size=4, rank=rank, world_size=2
        )
        for rank in range(2)
    ]
    per_rank: list[list[Seen]] = [[], []]
    for parts in zip(*loaders, strict=True):
        for rank, part in enumerate(parts):
            per_rank[rank] += seen([part])
    for loader in loaders:
        loader.close()
    assert len(per_rank[0]) == len(per_rank[1]) == sum(UNEVEN) // 8 * 4
    assert not set(per_rank[0]) & set(per_rank[1])
    for path in shards:
        ranges = sorted(server.ranges(path.name))
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
        assert ranges[-1][1] == path.stat().st_size


@pytest.mark.deep
def test_a_large_shard_among_small_ones_and_more_workers_than_shards(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "data", [3000, 2], seed=4)
    with make([str(p) for p in paths], tmp_path / "cache", num_workers=3, batch_size=2) as loader:
        assert collections.Counter(seen(loader)) == expected(paths, str(tmp_path / "data"))


def test_a_url_that_is_listed_twice_is_read_twice(
    shards: list[Path], server: ShardServer, tmp_path: Path
) -> None:
    url = f"{server.url}/{shards[3].name}"
    with make([url, url], tmp_path / "cache") as loader:
        once = expected([shards[3]], server.url)
        assert collections.Counter(seen(loader)) == once + once
    assert len(server.requests(shards[3].name)) == 1


def test_a_shard_without_a_usable_sample_is_passed_over_and_counted(tmp_path: Path) -> None:
    good = write_shards(tmp_path / "good", [20, 20], seed=5)
    from streamload.testing.shards import ShardOptions

    bad = write_shards(tmp_path / "bad", [30], seed=6, options=ShardOptions(without_text_every=1))
    urls = [str(path) for path in (good[0], *bad, good[1])]
    with streamload.make_loader(
        urls,
        batch_size=5,
        num_workers=2,
        cache_dir=tmp_path / "cache",
        cache_size="1GB",
        batches=streamload.Batches(with_keys=True),
    ) as loader:
        keys = [key for _, _, origin in loader for key in origin["__key__"]]
        assert sorted(keys) == sorted(key for path in good for key, _ in read_oracle(path))
        assert loader.stats().samples_skipped["missing"] == 30


@pytest.mark.deep
def test_shuffle_0_is_as_listed(shards: list[Path], tmp_path: Path) -> None:
    with make([str(p) for p in shards], tmp_path / "cache", shuffle=0, num_workers=2) as loader:
        for _ in range(2):
            assert [key for key, _, _ in seen(loader)] == [k for path in shards for k, _ in read_oracle(path)]


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_gives_each_sample_once_with_a_partial_last_batch(
    workers: int, shards: list[Path], server: ShardServer, tmp_path: Path
) -> None:
    with make(
        urls_of(server, shards), tmp_path / "cache", train=False, batch_size=50, num_workers=workers
    ) as loader:
        for _ in range(2):
            batches = list(loader)
            assert [len(batch["__key__"]) for batch in batches] == [50] * 12 + [sum(UNEVEN) - 600]
            assert [key for key, _, _ in seen(batches)] == [
                k for path in shards for k, _ in read_oracle(path)
            ]
        stats = loader.stats()
    assert stats.samples_yielded == stats.source_samples["0"] == 2 * sum(UNEVEN)


@pytest.mark.parametrize("world", [2, 5, 16])
@pytest.mark.sampled(1)
def test_evaluation_is_shared_out_only_when_asked(world: int, shards: list[Path], tmp_path: Path) -> None:
    total: collections.Counter[Seen] = collections.Counter()
    for rank in range(world):
        with make(
            [str(p) for p in shards],
            tmp_path / "cache",
            train=False,
            batch_size=9,
            rank=rank,
            world_size=world,
        ) as loader:
            total += collections.Counter(seen(loader))
    assert total == expected(shards, str(shards[0].parent))


@pytest.mark.parametrize("world", [2, 3, 5])
def test_listed_sizes_share_an_evaluation_out_evenly(world: int, tmp_path: Path) -> None:
    """Shares were cut by shards, and their `len()` as if by samples."""
    counts = [3, 40, 1, 0, 11, 25]
    paths = write_shards(tmp_path / "data", counts, seed=5)
    sizes = {path.name: count for path, count in zip(paths, counts, strict=True)}
    (tmp_path / "data" / "sizes.json").write_text(json.dumps(sizes))
    options = {"train": False, "batch_size": 4, "world_size": world}
    total: collections.Counter[Seen] = collections.Counter()
    for rank in range(world):
        with make([str(p) for p in paths], tmp_path / "cache", rank=rank, **options) as loader:
            batches = list(loader)
            assert len(loader) == loader.num_batches == len(batches)
        share = list(seen(batches))
        assert len(share) in (sum(counts) // world, -(-sum(counts) // world))
        total += collections.Counter(share)
    assert total == expected(paths, str(paths[0].parent))


@pytest.mark.deep
def test_a_limit_of_half_of_the_data_evicts_and_loses_nothing(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "data", [40] * 24, seed=7)
    data_bytes = sum(path.stat().st_size for path in paths)
    with ShardServer(tmp_path / "data") as server:
        options = {
            "shuffle": 30,
            "lanes": 2,
            "num_workers": 2,
            "batch_size": 4,
            "cache_size": data_bytes // 2,
        }
        with make(urls_of(server, paths), tmp_path / "cache", **options) as loader:
            for _ in range(3):
                assert collections.Counter(seen(loader)) == expected(paths, server.url)
            stats = loader.stats()
        tier = Tier.open(tmp_path / "cache")
        assert tier.used_bytes <= tier.limit_bytes == data_bytes // 2
        assert stats.shards_evicted > 0
        assert stats.origin_bytes < 2.6 * data_bytes


def test_two_data_sets_with_equal_names_are_never_mixed(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_shards(tmp_path / "data" / name, [15], seed=len(name) + ord(name[0]))
    with ShardServer(tmp_path / "data") as server:
        for name in ("one", "two"):
            paths = [tmp_path / "data" / name / "00000.tar"]
            with make(f"{server.url}/{name}/00000.tar", tmp_path / "cache") as loader:
                assert collections.Counter(seen(loader)) == expected(paths, f"{server.url}/{name}")


def test_an_epoch_of_a_given_length_goes_on_where_the_last_one_stopped(
    shards: list[Path], tmp_path: Path
) -> None:
    urls, total = [str(p) for p in shards], sum(UNEVEN)
    with make(urls, tmp_path / "cache", num_samples=total // 4, num_workers=2) as loader:
        assert len(loader) == loader.num_batches == loader.num_samples == total // 4
        epochs = [list(seen(loader)) for _ in range(5)]
    assert {len(epoch) for epoch in epochs} == {total // 4}
    first_pass = [sample for epoch in epochs for sample in epoch][:total]
    assert collections.Counter(first_pass) == expected(shards, str(shards[0].parent))


def test_a_break_goes_on_with_the_sample_behind_the_last_batch(shards: list[Path], tmp_path: Path) -> None:
    urls, total = [str(p) for p in shards], sum(UNEVEN)
    with make(urls, tmp_path / "cache", num_batches=total, num_workers=2) as loader:
        got = []
        for stop in (5, 40, 100):
            for at, batch in enumerate(loader, 1):
                got += seen([batch])
                if at == stop:
                    break
        while len(got) < total:
            got += list(seen(loader))
    assert collections.Counter(got[:total]) == expected(shards, str(shards[0].parent))


def test_set_epoch_repeats_an_epoch(shards: list[Path], tmp_path: Path) -> None:
    with make([str(p) for p in shards], tmp_path / "cache", num_workers=2, batch_size=16) as loader:
        epochs = []
        for epoch in (0, 1, 0):
            loader.set_epoch(epoch)
            epochs.append(list(seen(loader)))
        follows = list(seen(loader))
    assert epochs[0] == epochs[2] != epochs[1]
    assert follows == epochs[1]


def test_sizes_json_beside_the_shards_tells_the_length(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "data", [10, 11], seed=8)
    (tmp_path / "data" / "sizes.json").write_text(json.dumps({"00000.tar": 10, "00001.tar": 11}))
    with ShardServer(tmp_path / "data") as server:
        for urls in ([str(path) for path in paths], urls_of(server, paths)):
            with make(urls, tmp_path / "cache", batch_size=4) as loader:
                assert (len(loader), loader.num_samples) == (5, 20)
                assert sum(1 for _ in loader) == 5
    with make(
        urls_of(server, paths), tmp_path / "cache", train=False, batch_size=4, num_samples=21
    ) as loader:
        assert len(loader) == 6
    with make("pipe:cat {0..3}.tar", tmp_path / "cache") as loader:
        assert loader.num_batches is loader.num_samples is None
        with pytest.raises(TypeError, match="num_samples"):
            len(loader)


@pytest.mark.parametrize("options", [{}, {"train": False}, {"map_sample": dict}])
def test_a_pass_is_counted_once_the_cache_has_the_index_of_every_shard(
    options: dict[str, Any], tmp_path: Path
) -> None:
    paths = write_shards(tmp_path / "data", [10, 11], seed=8)
    count, samples = (6, 21) if "train" in options else (5, 20)
    with ShardServer(tmp_path / "data") as server:
        urls = urls_of(server, paths)
        with make(urls, tmp_path / "cache", batch_size=4, **options) as loader:
            with pytest.raises(TypeError, match="streamload warm"):
                len(loader)
            assert not (tmp_path / "cache").exists()
            assert sum(1 for _ in loader) == count
            assert len(loader) == count
        with make(urls, tmp_path / "cache", batch_size=4, **options) as loader:
            assert (len(loader), loader.num_samples) == (count, samples)
        (tmp_path / "data" / "00002.tar").write_bytes(paths[0].read_bytes())
        with make(urls_of(server, [*paths, paths[0]]), tmp_path / "cache", **options) as loader:
            assert loader.num_batches is loader.num_samples is None


def test_augmentation_is_the_same_on_every_layout_and_new_in_each_pass(tmp_path: Path) -> None:
    paths = [str(p) for p in write_shards(tmp_path / "data", [6, 7], seed=9)]

    def images(workers: int) -> list[dict[str, torch.Tensor]]:
        with streamload.make_loader(
            paths,
            batch_size=13,
            num_workers=workers,
            batches=streamload.Batches(with_keys=True),
            cache_dir=tmp_path / "cache",
            cache_size="1GB",
        ) as loader:
            return [
                dict(zip(origin["__key__"], batch, strict=True))
                for _ in range(2)
                for batch, _, origin in loader
            ]

    alone, shared = images(0), images(2)
    for one, other in zip(alone, shared, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert not all(torch.equal(alone[0][key], alone[1][key]) for key in alone[0])
