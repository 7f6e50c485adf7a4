"""Shards(repeat=…): how often samples come in a pass, on any layout, mixed, bucketed, resumed; failures."""

from __future__ import annotations

import collections
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import streamload
from streamload.facts.repeats import visit_key
from streamload.shards.samples import Entry
from streamload.testing.resume import Layout, assert_resumes_exactly
from streamload.testing.server import ShardServer
from streamload.testing.shards import read_oracle, write_shards
from tests.support import flat
from tests.support.order_oracle import draw

COUNTS = [40, 30, 50]
RATES = [0.25, 1.0, 2.5, math.nan, 0.0, 3.0, 0.9]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards, and a table with a rate for each of their samples."""
    place = tmp_path_factory.mktemp("data")
    lines = ["key,r"]
    for path in write_shards(place / "shards", COUNTS, seed=3):
        for number, (key, _) in enumerate(read_oracle(path)):
            if not math.isnan(rate := RATES[number % len(RATES)]):
                lines.append(f"{key},{rate}")
    (place / "rates.csv").write_text("\n".join(lines))
    return place


def drawn(sample: dict[str, Any]) -> dict[str, Any]:
    return {"drawn": torch.rand(1)}


def by_number(entry: Entry) -> float:
    return RATES[entry.number % len(RATES)]


def is_even(entry: Entry) -> bool:
    return entry.number % 2 == 0


def make(data: Path, cache: Path, **options: Any) -> streamload.Loader:
    defaults = {"batch_size": 1, "num_workers": 0, "shuffle": 60, "lanes": 2, "map_sample": drawn}
    repeats = {"facts": {"r": data / "rates.csv"}, "repeat": "r", "with_keys": True, "cache_dir": cache}
    urls = options.pop("urls", data / "shards")
    return flat.make_loader(urls, cache_size="1GB", **{**defaults, **repeats, **options})


def seen(loader: streamload.Loader) -> list[str]:
    return [key for batch in loader for key in batch["__key__"]]


def uses_of(epoch: int, seed: int = 0) -> collections.Counter[str]:
    """How often each sample comes in an epoch of one pass, one by one."""
    found: collections.Counter[str] = collections.Counter()
    for shard, count in enumerate(COUNTS):
        for number in range(count):
            rate = RATES[number % len(RATES)]
            rate = 1.0 if math.isnan(rate) else rate
            chance = (draw(visit_key(seed, epoch, 0, shard), number) >> 11) / 2**53
            found[f"{shard:05d}{number:06d}"] = int(rate) + (chance < rate % 1)
    return +found


@pytest.mark.parametrize("workers", [0, 2])
def test_each_epoch_has_each_sample_as_often_as_its_fact_says(data: Path, tmp_path: Path, workers: int):
    with make(data, tmp_path / "cache", num_workers=workers) as loader:
        epochs = [collections.Counter(seen(loader)) for _ in range(3)]
    assert epochs == [uses_of(0), uses_of(1), uses_of(2)]
    assert epochs[0] != epochs[1]


def test_a_function_of_the_entry_gives_the_same_as_a_fact(data: Path, tmp_path: Path):
    with make(data, tmp_path / "a") as by_fact, make(data, tmp_path / "b", repeat=by_number) as by_function:
        assert seen(by_fact) == seen(by_function)


def test_the_length_follows_what_each_epoch_has(data: Path, tmp_path: Path):
    (data / "shards" / "sizes.json").write_text('{"00000.tar": 40, "00001.tar": 30, "00002.tar": 50}')
    try:
        with make(data, tmp_path / "cache") as loader:
            assert loader.num_batches is None  # by the sizes alone it isn't known
            seen(loader)
            for epoch in (1, 2):
                assert len(loader) == loader.num_samples == uses_of(epoch).total()
                iterator = iter(loader)
                next(iterator)
                assert len(loader) == 1 + sum(1 for _ in iterator)
    finally:
        (data / "shards" / "sizes.json").unlink()


def test_further_uses_are_augmented_anew_and_thinned_samples_never_come(data: Path, tmp_path: Path):
    values = collections.defaultdict(list)
    with make(data, tmp_path / "cache") as loader:
        for batch in loader:
            values[batch["__key__"][0]].append(float(batch["drawn"]))
    assert all(len(set(own)) == len(own) for own in values.values())
    assert len(values["00000000005"]) == 3
    assert not [key for key in values if RATES[int(key[5:]) % len(RATES)] == 0]


def test_it_resumes_exactly_at_every_step_on_other_layouts(data: Path, tmp_path: Path):
    def made(**layout: Any) -> streamload.Loader:
        options = {"groups": 1, "num_batches": None, "num_samples": 90, **layout}
        return make(data, options.pop("cache_dir"), **options)

    layouts = [Layout(1, 0), Layout(2, 0), Layout(5, 0)]
    cuts = assert_resumes_exactly(
        made, tmp_path, global_batch=10, first=Layout(1, 0), layouts=layouts, epochs=2, most_steps=4
    )
    assert cuts == 18


def test_groups_of_several_nodes_have_each_sample_as_often_in_a_pass(data: Path, tmp_path: Path):
    def made(**layout: Any) -> streamload.Loader:
        options = {"groups": 2, "num_samples": 120, "keep": is_even, **layout}
        return make(data, options.pop("cache_dir"), **options)

    layouts = [Layout(2, 0), Layout(1, 2)]
    cuts = assert_resumes_exactly(
        made, tmp_path, global_batch=12, first=Layout(2, 0), layouts=layouts, cuts=range(0, 10, 3)
    )
    assert cuts == 4
    with pytest.raises(
        streamload.errors.OptionError, match="give num_samples or num_batches, or say endless"
    ):
        iter(make(data, tmp_path / "cache", groups=2))


def test_sources_are_repeated_each_by_its_own_samples(data: Path, tmp_path: Path):
    shards = sorted((data / "shards").glob("*.tar"))
    sources = [
        streamload.Source([str(one) for one in shards[:2]], 2, "a"),
        streamload.Source(str(shards[2]), 1, "b"),
    ]

    def made(**layout: Any) -> streamload.Loader:
        options = {"urls": sources, "groups": 1, "num_samples": 120, **layout}
        return make(data, options.pop("cache_dir"), **options)

    assert assert_resumes_exactly(
        made,
        tmp_path,
        global_batch=12,
        first=Layout(1, 0),
        layouts=[Layout(3, 0), Layout(2, 0)],
        cuts=range(0, 10, 3),
    )
    with made(batch_size=12, cache_dir=tmp_path / "cache") as loader:
        keys = collections.Counter(seen(loader))
    of_b = [key for key in keys.elements() if key.startswith("00002")]
    assert len(of_b) == 40
    assert not [key for key in keys if RATES[int(key[5:]) % len(RATES)] == 0]


def spelled(captions: list[str]) -> torch.Tensor:
    rows = [[*map(ord, caption[:24])] + [0] * (24 - len(caption)) for caption in captions]
    return torch.tensor(rows)


spelled.pad_token_id = 0  # type: ignore[attr-defined]


def test_bucketing_plans_repeated_samples_and_resumes_exactly(data: Path, tmp_path: Path):
    def made(**layout: Any) -> streamload.Loader:
        options = {
            "groups": 1,
            "bucketing": 40,
            "text_padding": "longest",
            "tokenizer": spelled,
            "map_sample": None,
            "output": "dict",
            "preprocess": small,
            **layout,
        }
        return make(data, options.pop("cache_dir"), **options)

    assert assert_resumes_exactly(
        made,
        tmp_path / "caches",
        global_batch=10,
        first=Layout(1, 0),
        layouts=[Layout(1, 0), Layout(1, 2)],  # with more ranks, captions are cut to others' longest
        cuts=range(1, 12, 4),
    )
    with made(batch_size=10, cache_dir=tmp_path / "cache") as loader:
        keys = collections.Counter(seen(loader))
    assert keys <= uses_of(0)
    assert keys.total() == uses_of(0).total() // 10 * 10


def small(image: Any) -> torch.Tensor:
    return torch.zeros(3)


def test_shards_that_arrive_over_the_network_give_the_same(data: Path, tmp_path: Path):
    with make(data, tmp_path / "a") as local, ShardServer(data / "shards") as server:
        urls = f"{server.url}/{{00000..00002}}.tar"
        with make(data, tmp_path / "b", urls=urls, num_workers=2) as remote:
            assert collections.Counter(seen(local)) == collections.Counter(seen(remote)) == uses_of(0)


def test_a_state_of_another_repeat_is_refused(data: Path, tmp_path: Path):
    with make(data, tmp_path / "cache") as loader:
        next(iter(loader))
        state = loader.state_dict()
    for repeat in (None, by_number, (by_number, "1")):
        with (
            make(data, tmp_path / "cache", repeat=repeat) as loader,
            pytest.raises(streamload.errors.StateMismatch, match="facts, repeat"),
        ):
            loader.load_state_dict(state)


def negative(entry: Entry) -> float:
    return -1.0 if entry.key == "00001000007" else 1.0


def infinite(entry: Entry) -> float:
    return math.inf


def text(entry: Entry) -> Any:
    return "often"


def broken(entry: Entry) -> float:
    return entry.facts["missing"]


def test_unknown_rates_of_a_function_count_as_one(data: Path, tmp_path: Path):
    def none(entry: Entry) -> None:
        return None

    def unknown(entry: Entry) -> float:
        return entry.facts["r"] * 0 + (2 if not math.isnan(entry.facts["r"]) else 5)

    with make(data, tmp_path / "cache", repeat=(none, "1")) as loader:
        assert set(collections.Counter(seen(loader)).values()) == {1}
    with make(data, tmp_path / "cache", repeat=(unknown, "1")) as loader:
        counts = collections.Counter(seen(loader))
    assert {counts[f"0000000000{n}"] for n in range(7)} == {1, 2}
    assert counts["00000000003"] == 1


@pytest.mark.parametrize(
    ("repeat", "error", "words"),
    [
        (
            negative,
            streamload.errors.OptionError,
            "is -1 for sample '00001000007'; expected a number from 0",
        ),
        (infinite, streamload.errors.OptionError, "returned inf for sample '0000"),
        (
            text,
            streamload.errors.OptionError,
            "returned 'often' for sample '0000.*expected a number, or None",
        ),
        (broken, KeyError, "missing"),
    ],
)
def test_a_rate_that_is_no_number_from_0_fails(
    data: Path, tmp_path: Path, repeat: Any, error: type[Exception], words: str
):
    with make(data, tmp_path / "cache", repeat=repeat) as loader, pytest.raises(error, match=words):
        seen(loader)


def test_only_facts_and_functions_repeat_and_only_in_training_fails(data: Path, tmp_path: Path):
    for wrong in ("scores", 2, 0.5, (by_number, 1), ["r"]):
        with pytest.raises(streamload.errors.OptionError, match=r"expected the name of a fact \(.*r, "):
            make(data, tmp_path / "cache", repeat=wrong)
    with pytest.raises(streamload.errors.OptionError, match="repeat= is for training"):
        make(data, tmp_path / "cache", train=False)


def test_rates_of_0_alone_are_no_samples_fails(data: Path, tmp_path: Path):
    def never(entry: Entry) -> float:
        return 0

    with (
        make(data, tmp_path / "cache", repeat=(never, "1")) as loader,
        pytest.raises(streamload.errors.NoValidSamples),
    ):
        seen(loader)
