"""Sources mixed by weight: shares, passes of their own, weights that change in a run."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing

import streamload
from streamload.loader.sizes import estimate_samples
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, write_shards
from tests.support import flat

COUNTS = {"large": [40, 52, 61, 33, 47, 58], "small": [12, 9], "middle": [30, 35, 41]}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Each source in a folder of its own name: the folder tells where a sample is from."""
    place = tmp_path_factory.mktemp("sources")
    return {
        name: [str(path) for path in write_shards(place / name, counts, seed=seed)]
        for seed, (name, counts) in enumerate(COUNTS.items())
    }


def drawn(sample: dict[str, Any]) -> dict[str, Any]:
    return {"drawn": torch.rand(1)}


def make(sources: Any, cache: Path, **options: Any) -> streamload.Loader:
    defaults = {"batch_size": 20, "num_workers": 0, "shuffle": 40, "lanes": 4, "num_batches": 30}
    options = {**defaults, "map_sample": drawn, "with_keys": True, "cache_dir": cache, **options}
    return flat.make_loader(sources, cache_size="1GB", **options)


def sources_of(paths: dict[str, list[str]], **weights: float) -> list[streamload.Source]:
    return [streamload.Source(paths[name], weight, name) for name, weight in weights.items()]


def origin(url: str) -> str:
    return Path(url).parent.name


def shares(batches: list[Any]) -> collections.Counter[str]:
    return collections.Counter(origin(url) for batch in batches for url in batch["__url__"])


@pytest.mark.parametrize("workers", [0, 3])
def test_each_batch_has_each_source_by_its_weight(
    workers: int, paths: dict[str, list[str]], tmp_path: Path
) -> None:
    with make(
        sources_of(paths, large=5, small=1, middle=2.5), tmp_path / "cache", num_workers=workers
    ) as loader:
        batches = list(loader)
        stats = loader.stats()
    assert len(batches) == 30
    weights = {"large": 5, "small": 1, "middle": 2.5}
    for number in range(1, 31):
        given = shares(batches[:number])
        for name, weight in weights.items():
            assert abs(given[name] - 20 * number * weight / 8.5) < 2
    assert stats.source_samples == shares(batches)
    assert stats.source_wait_seconds.keys() == weights.keys()


def test_small_sources_repeat_with_new_crops_and_large_ones_go_on(
    paths: dict[str, list[str]], tmp_path: Path
) -> None:
    with make(sources_of(paths, large=1, small=1), tmp_path / "cache", num_batches=21) as loader:
        batches = [*loader, *loader]
    seen = collections.defaultdict(list)
    for batch in batches:
        for key, url, value in zip(batch["__key__"], batch["__url__"], batch["drawn"], strict=True):
            seen[origin(url)].append(((key, url), float(value)))
    assert seen.keys() == {"large", "small"}
    once = sum(COUNTS["small"])
    for name, samples in seen.items():
        size = sum(COUNTS[name])
        assert len(samples) == 420
        for begin in range(0, 420 - size + 1, size):  # pass after pass, each whole
            assert len({sample for sample, _ in samples[begin : begin + size]}) == size
    first, second = dict(seen["small"][:once]), dict(seen["small"][once : 2 * once])
    assert first.keys() == second.keys()
    assert all(first[sample] != second[sample] for sample in first)


@pytest.mark.deep
def test_mixing_is_the_same_on_every_layout(paths: dict[str, list[str]], tmp_path: Path) -> None:
    mixed = sources_of(paths, large=3, small=1, middle=1)

    def steps(ranks: int, workers: int) -> list[list[tuple[str, str, float]]]:
        loaders = [
            make(
                mixed,
                tmp_path / "cache",
                batch_size=12 // ranks,
                num_workers=workers,
                rank=rank,
                world_size=ranks,
            )
            for rank in range(ranks)
        ]
        try:
            return [
                [
                    (key, url, float(value))
                    for part in parts
                    for key, url, value in zip(part["__key__"], part["__url__"], part["drawn"], strict=True)
                ]
                for parts in zip(*loaders, strict=True)
            ]
        finally:
            for loader in loaders:
                loader.close()

    alone = steps(1, 0)
    assert alone
    assert steps(1, 2) == alone
    assert steps(2, 0) == alone
    assert steps(4, 1) == alone
    ranks = [batch[:6] for batch in alone]
    assert all(1 <= sum(origin(url) == "large" for _, url, _ in part) <= 5 for part in ranks)


@pytest.mark.parametrize("workers", [0, 2])
def test_weights_change_at_the_step_that_is_returned(
    workers: int, paths: dict[str, list[str]], tmp_path: Path
) -> None:
    with make(sources_of(paths, large=1, small=0), tmp_path / "cache", num_workers=workers) as loader:
        batches, changed = [], -1
        for number, batch in enumerate(loader):
            batches.append(batch)
            if number == 7:
                changed = loader.set_weights({"large": 0, "small": 1})
    assert changed == 8 + 2 * workers  # prefetch_factor batches of each worker are in flight
    assert shares(batches[:changed]) == {"large": 20 * changed}
    assert shares(batches[changed:]) == {"small": 20 * (30 - changed)}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_source_without_weight_is_not_fetched_until_it_has_one(workers: int, tmp_path: Path) -> None:
    for name in ("used", "idle"):
        write_shards(tmp_path / "data" / name, [20] * 6, seed=len(name))
    with ShardServer(tmp_path / "data") as server:
        sources = [
            streamload.Source(f"{server.url}/{name}/{{00000..00005}}.tar", weight, name)
            for name, weight in (("used", 1), ("idle", 0))
        ]
        with make(sources, tmp_path / "cache", num_workers=workers, batch_size=10, num_batches=18) as loader:
            assert shares(list(loader)) == {"used": 180}
            assert not [request.path for request in server.log if "idle" in request.path]
            loader.set_weights({"idle": 1})
            assert shares(list(loader)) == {"used": 90, "idle": 90}


def test_weights_that_are_set_between_epochs_count_from_the_next_step(
    paths: dict[str, list[str]], tmp_path: Path
) -> None:
    with make(
        sources_of(paths, large=1, small=0), tmp_path / "cache", num_workers=2, num_batches=3
    ) as loader:
        assert loader.set_weights({"large": 0, "small": 1}) == 0
        assert shares(list(loader)) == {"small": 60}
        assert loader.set_weights({"large": 1}) == 0
        assert shares(list(loader)) == {"small": 30, "large": 30}
        loader.set_epoch(0)  # anew, with the weights of now
        assert shares(list(loader)) == {"small": 30, "large": 30}


def test_a_change_is_in_the_state_and_replays(paths: dict[str, list[str]], tmp_path: Path) -> None:
    """The state lies between the call and the step at which the change counts, before it, and behind."""
    mixed = sources_of(paths, large=3, small=1, middle=0)
    with make(mixed, tmp_path / "cache", num_workers=2) as loader:
        batches, states, changed = [], [], -1
        for number, batch in enumerate(loader):
            batches.append(list(zip(batch["__key__"], batch["__url__"], strict=True)))
            if number == 5:
                changed = loader.set_weights({"large": 1, "middle": 2})
            states.append(json.loads(json.dumps(loader.state_dict())))
    assert changed == 10
    assert [state["weights"] for state in states[4:6]] == [[3, 1, 0], [1, 1, 2]]
    for cut in (5, 6, 8, 9, 10, 17):
        with make(mixed, tmp_path / f"cut-{cut}", num_workers=cut % 3) as loader:
            loader.load_state_dict(states[cut])
            rest = [list(zip(batch["__key__"], batch["__url__"], strict=True)) for batch in loader]
            assert rest == batches[cut + 1 :]
    assert [len(state["changes"]) for state in states[4:12]] == [1, 2, 2, 2, 2, 1, 1, 1]


def test_a_floor_is_kept_whatever_the_weights(paths: dict[str, list[str]], tmp_path: Path) -> None:
    mixed = [
        streamload.Source(paths["large"], 1, "large"),
        streamload.Source(paths["small"], 1, "small", floor=0.25),
    ]
    with make(mixed, tmp_path / "cache", num_batches=8) as loader:
        loader.set_weights({"large": 1000})
        assert shares(list(loader)) == {"large": 120, "small": 40}


@pytest.mark.parametrize("factors", ["1::3", [1, 3.0]])
def test_upsampling_factors_weigh_samples_with_or_without_their_counts(
    factors: Any, paths: dict[str, list[str]], tmp_path: Path
) -> None:
    """As OpenCLIP draws them: a sample of the second part comes three times as often as one of the first."""
    folders = [str(Path(paths[name][0]).parent) for name in ("large", "middle")]
    urls = f"{folders[0]}/{{00000..00005}}.tar::{folders[1]}/{{00000..00002}}.tar"
    large, middle = sum(COUNTS["large"]), 3 * sum(COUNTS["middle"])
    expected = pytest.approx(600 * middle / (large + middle), abs=2)
    with make(urls, tmp_path / "cache", upsampling_factors=factors) as loader:
        assert shares(list(loader))["middle"] == expected
    for name, folder in zip(("large", "middle"), folders, strict=True):
        sizes = {f"{number:05d}.tar": count for number, count in enumerate(COUNTS[name])}
        (Path(folder) / "sizes.json").write_text(json.dumps(sizes))
    try:
        with make(urls, tmp_path / "cache", upsampling_factors=factors) as loader:
            assert shares(list(loader))["middle"] == expected
    finally:
        for folder in folders:
            (Path(folder) / "sizes.json").unlink()


def test_upsampling_factors_weigh_shards_and_say_so_where_nothing_tells_the_samples(
    paths: dict[str, list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    urls = f"pipe:cat {paths['large'][0]}::pipe:cat {paths['small'][0]}"
    with make(urls, tmp_path / "cache", upsampling_factors="1::1", num_batches=6) as loader:
        assert shares(list(loader)).total() == 120
        assert loader.stats().source_samples == {"0": 60, "1": 60}
    assert "as the number of samples of source 0, 1 is unknown" in caplog.text


def test_ranks_that_nothing_joins_do_not_estimate_as_each_may_see_other_failures(
    paths: dict[str, list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    urls, options = f"{paths['large'][0]}::{paths['small'][0]}", {"upsampling_factors": "1::1"}
    for rank in range(2):
        order = {**options, "num_batches": 6, "rank": rank, "world_size": 2}
        with make(urls, tmp_path / "cache", **order) as loader:
            assert shares(list(loader)).total() == 120
            assert loader.stats().source_samples == {"0": 60, "1": 60}
    assert "as the number of samples of source 0, 1 is unknown" in caplog.text


def test_samples_are_counted_in_small_shards_and_estimated_in_large_ones(
    paths: dict[str, list[str]], tmp_path: Path
) -> None:
    with ShardServer(Path(paths["large"][0]).parent) as server:
        remote = [f"{server.url}/{number:05d}.tar" for number in range(6)]
        assert estimate_samples(remote, None) == estimate_samples(paths["large"], None) == 291
        assert estimate_samples([*remote, f"{server.url}/missing.tar"], None) == round(291 / 6 * 7)
    options = ShardOptions(padding_bytes=(15_000, 25_000))
    large = write_shards(tmp_path, [400], options=options)
    assert large[0].stat().st_size > 8 << 20
    assert estimate_samples([str(large[0])], None) == pytest.approx(400, rel=0.05)
    assert estimate_samples([f"pipe:cat {large[0]}"], None) is None
    assert estimate_samples([str(tmp_path / "missing.tar")], None) is None


def of_two_ranks(rank: int, paths: dict[str, list[str]], place: Path) -> None:
    """The ranks are asked for different weights, with different numbers of workers."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place}/rendezvous", rank=rank, world_size=2
    )
    mixed = sources_of(paths, large=1, small=0, middle=0)
    with make(mixed, place / "cache", rank=rank, world_size=2, num_workers=1 + rank) as loader:
        batches, changed = [], -1
        for number, batch in enumerate(loader):
            batches.append(batch)
            if number == 3:
                wanted = {"small": 1.0} if rank == 0 else {"middle": 1.0}
                changed = loader.set_weights({"large": 0, **wanted})
    before, behind = shares(batches[:changed]), shares(batches[changed:])
    (place / f"{rank}.json").write_text(json.dumps([changed, before, behind]))
    torch.distributed.destroy_process_group()


def test_all_ranks_change_at_one_step_to_the_weights_of_rank_0(
    paths: dict[str, list[str]], tmp_path: Path
) -> None:
    torch.multiprocessing.start_processes(of_two_ranks, (paths, tmp_path), nprocs=2, start_method="fork")
    for rank in range(2):
        changed, before, behind = json.loads((tmp_path / f"{rank}.json").read_text())
        assert changed == 4 + 2 * 2
        assert before == {"large": 20 * changed}
        assert behind == {"small": 20 * (30 - changed)}


@pytest.mark.parametrize(
    ("sources", "options", "match"),
    [
        ([("a", 1.0, 0.0), ("a", 1.0, 0.0)], {}, "two sources are named 'a'"),
        ([("a", -1.0, 0.0), ("b", 1.0, 0.0)], {}, "weight=-1.0; expected a number from 0"),
        ([("a", float("nan"), 0.0)], {}, "weight=nan; expected"),
        ([("a", 1.0, 1.5)], {}, "floor=1.5; expected a number from 0 to 1"),
        ([("a", 1.0, 0.0)], {"upsampling_factors": "1"}, "a Source has a weight of its own"),
        ([("a", 1.0, 0.0), ("b", 1.0, 0.0)], {"train": False, "num_batches": None}, "mixed in training"),
    ],
)
def test_sources_that_make_no_sense_are_refused(
    sources: list[tuple[str, float, float]],
    options: dict[str, Any],
    match: str,
    paths: dict[str, list[str]],
    tmp_path: Path,
) -> None:
    mixed = [streamload.Source(paths["small"], weight, name, floor) for name, weight, floor in sources]
    with pytest.raises(streamload.errors.OptionError, match=match):
        make(mixed, tmp_path / "cache", **options)


@pytest.mark.parametrize(
    ("factors", "match"),
    [("1", "has 1 factors for 2 sources"), ("1::x", "numbers with '::'"), ([1, -1], "numbers from 0")],
)
def test_factors_that_do_not_fit_are_refused(
    factors: Any, match: str, paths: dict[str, list[str]], tmp_path: Path
) -> None:
    with pytest.raises(streamload.errors.OptionError, match=match):
        make(f"{paths['small'][0]}::{paths['large'][0]}", tmp_path / "cache", upsampling_factors=factors)


def test_weights_that_can_not_be_are_refused_and_change_nothing(
    paths: dict[str, list[str]], tmp_path: Path
) -> None:
    with make(sources_of(paths, large=1, small=1), tmp_path / "cache", num_batches=2) as loader:
        for weights, match in (
            ({"large": 0, "small": 0}, "must not all be 0"),
            ({"large": -1}, "must be numbers from 0"),
            ({"other": 1}, "no source is named other; they are large, small"),
        ):
            with pytest.raises(streamload.errors.OptionError, match=match):
                loader.set_weights(weights)
        assert shares(list(loader)) == {"large": 20, "small": 20}


def test_a_mixture_without_a_length_says_what_is_missing(paths: dict[str, list[str]], tmp_path: Path) -> None:
    mixed = sources_of(paths, large=1, small=1)
    unknown = pytest.raises(streamload.errors.OptionError, match="mixes several sources has to know how long")
    with make(mixed, tmp_path / "cache", num_batches=None) as loader, unknown:
        iter(loader)
    with make(mixed, tmp_path / "cache", num_batches=None, endless=True) as loader:
        batches = [batch for _, batch in zip(range(40), loader, strict=False)]
    assert shares(batches) == {"large": 400, "small": 400}


def test_a_state_of_other_sources_is_refused(paths: dict[str, list[str]], tmp_path: Path) -> None:
    with make(sources_of(paths, large=1, small=1), tmp_path / "cache") as loader:
        next(iter(loader))
        state = loader.state_dict()
    renamed = [streamload.Source(paths["large"], 1, "large"), streamload.Source(paths["small"], 1, "other")]
    for mixed, match in (
        (renamed, "another the names of the sources"),
        (sources_of(paths, small=1, large=1), "names of the sources"),
        (sources_of(paths, large=1), "names of the sources"),
    ):
        mismatch = pytest.raises(streamload.errors.StateMismatch, match=match)
        with make(mixed, tmp_path / "cache") as loader, mismatch:
            loader.load_state_dict(state)


def test_a_source_of_nothing_usable_is_an_error_and_no_hang(
    paths: dict[str, list[str]], tmp_path: Path
) -> None:
    empty = [str(path) for path in write_shards(tmp_path / "empty", [0, 0], seed=1)]
    mixed = [streamload.Source(paths["large"], 1, "large"), streamload.Source(empty, 1, "empty")]
    barren = pytest.raises(streamload.errors.NoValidSamples, match="no usable sample in source 'empty'")
    with make(mixed, tmp_path / "cache", num_workers=1) as loader, barren:
        list(loader)


def test_a_source_draws_the_same_however_many_shards_come_before_its_own(
    paths: dict[str, list[str]], tmp_path: Path
) -> None:
    def draws(first: str) -> dict[str, float]:
        sources = sources_of(paths, **{first: 1, "middle": 1})
        with make(sources, tmp_path / "cache", num_batches=10) as loader:
            return {
                key: float(value)
                for batch in loader
                for key, url, value in zip(batch["__key__"], batch["__url__"], batch["drawn"], strict=True)
                if origin(url) == "middle"
            }

    behind_few = draws("small")
    assert len(behind_few) == 100
    assert draws("large") == behind_few
