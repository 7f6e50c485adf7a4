"""`Batches(cost=…)` in a loader: ranks get as many rows as ever, of about the same cost, resumed anywhere."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import streamload
from streamload import Batches, Entry, Images, Order, Patches, Shards, Source, Workers
from streamload.errors import OptionError, StateMismatch
from streamload.loader.state import FINGERPRINT, sealed
from streamload.testing.shards import ShardOptions, write_shards
from tests.support.turns import third

STEP, COUNTS = 16, [90, 51, 123, 72, 60]
KEYS = {"with_keys": True}


def long(entry: Entry) -> float:
    """A cost with a heavy tail, by the key alone."""
    return math.floor(math.exp(1.2 * random.Random(entry.key).gauss(0, 1)) * 1000)


def wide(entry: Entry) -> float:
    return float(entry.width * entry.height)


def cost_of(key: str) -> float:
    return math.floor(math.exp(1.2 * random.Random(key).gauss(0, 1)) * 1000)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cost") / "data"
    write_shards(directory, COUNTS, options=ShardOptions(image_side=(8, 12)))
    return directory


class Step(NamedTuple):
    """The keys of each rank's rows, and the sources of all."""

    ranks: list[list[str]]
    sources: list[int]

    @property
    def keys(self) -> list[str]:
        return sorted(itertools.chain.from_iterable(self.ranks))

    @property
    def slowest(self) -> float:
        costs = [sum(map(cost_of, keys)) for keys in self.ranks]
        return max(costs) * len(costs) / sum(costs)


def loaders(data: Any, cache: Path, ranks: int = 1, **options: Any) -> list[streamload.Loader]:
    cost, step = options.pop("cost", long), options.pop("step", STEP)
    shared = {
        "batch_size": step // ranks,
        "batches": Batches(cost=cost, **KEYS, **options.pop("batches", {})),
        "num_workers": 0,
        "seed": 5,
        "cache_dir": cache,
        "cache_size": "1GB",
        "output": "dict",
    }
    order = {"groups": options.pop("groups", 1), **options.pop("order", {})}
    return [
        streamload.make_loader(
            data if isinstance(data, list) else str(data),
            order=Order(rank=rank, world_size=ranks, **order),
            **{**shared, **options},
        )
        for rank in range(ranks)
    ]


def steps_of(ranks: list[streamload.Loader], most: int | None = None) -> list[Step]:
    """The steps of an epoch, in lockstep."""
    return [
        Step([batch["__key__"] for batch in batches], [n for r in ranks for n in r.info.source.tolist()])
        for batches in itertools.islice(zip(*ranks, strict=True), most)
    ]


def run(data: Any, cache: Path, ranks: int = 1, state: Any = None, most: int | None = None, **options: Any):
    made = loaders(data, cache, ranks, **options)
    try:
        for loader in made:
            if state is not None:
                loader.load_state_dict(state)
        steps = steps_of(made, most)
        return steps, [loader.state_dict() for loader in made]
    finally:
        for loader in made:
            loader.close()


def keys_of(steps: list[Step]) -> list[list[str]]:
    return [step.keys for step in steps]


def test_blocks_have_the_samples_of_the_run_and_each_comes_once(data: Path, tmp_path: Path) -> None:
    plain, _ = run(data, tmp_path, cost=None)
    planned, _ = run(data, tmp_path)
    for begin, end in [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 24)]:  # in steps: blocks grow at first
        of_block = [sorted(itertools.chain(*keys_of(steps[begin:end]))) for steps in (plain, planned)]
        assert of_block[0] == of_block[1]
    assert len(plain) == len(planned) == sum(COUNTS) // STEP
    assert keys_of(plain) != keys_of(planned)


def test_ranks_cost_about_the_same_in_each_step(data: Path, tmp_path: Path) -> None:
    plain, _ = run(data, tmp_path, 4, cost=None, step=64)
    planned, _ = run(data, tmp_path, 4, step=64)
    slowest = [[step.slowest for step in steps[1:]] for steps in (plain, planned)]
    assert np.mean(slowest[0]) > 1.2
    assert np.mean(slowest[1]) < 1.06
    assert {len(keys) for step in planned for keys in step.ranks} == {16}


@pytest.mark.parametrize(
    ("ranks", "workers"),
    [(2, 0), (1, 2), pytest.param(4, 1, marks=pytest.mark.deep), pytest.param(16, 0, marks=pytest.mark.deep)],
)
def test_steps_do_not_depend_on_ranks_and_workers(
    data: Path, tmp_path: Path, ranks: int, workers: int
) -> None:
    expected, _ = run(data, tmp_path)
    assert keys_of(run(data, tmp_path, ranks, num_workers=workers)[0]) == keys_of(expected)


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_random_runs_resume_exactly_from_any_step_on_other_layouts(tmp_path: Path) -> None:
    """Costs, mixing, groups, sizes, ranks and workers at random, a third of 24 runs; two resumes each."""
    for name, counts in (("a", [40, 61]), ("b", [9]), ("c", [70])):
        options = ShardOptions(image_side=(8, 12), folder=name)
        write_shards(tmp_path / name, counts, seed=ord(name), options=options)
    for attempt in third(range(24)):
        numbers = random.Random(attempt)
        names = numbers.sample("abc", numbers.choice([1, 1, 2, 3]))
        sources = [Source(str(tmp_path / name), name=name, weight=numbers.randint(1, 3)) for name in names]
        groups, step = numbers.choice([1, 1, 2, 4]), numbers.choice([8, 12, 16, 24])
        options = {
            "cost": numbers.choice([long, wide, "width", (long, wide), ("width", "height"), zero]),
            "groups": groups,
            "step": step,
            "seed": attempt,
            "order": {"num_batches": numbers.randint(9, 30)},
            "images": Images(dtype=numbers.choice(["uint8", "float32"])),
        }
        layouts = [ranks for ranks in (1, 2, 4) if step % ranks == 0]
        whole, _ = run(sources, tmp_path / "cache", numbers.choice(layouts), **options)
        assert len(whole) == options["order"]["num_batches"]
        for one in whole[8:] if names in (["a"], ["c"]) else []:  # blocks have several passes of it
            assert len(set(one.keys)) == step
        for _ in range(2):
            stop = numbers.randint(1, len(whole) - 1)
            layout = {"num_workers": numbers.choice([0, 0, 0, 2]), **options}
            begun, state = run(sources, tmp_path / "cache", numbers.choice(layouts), most=stop, **options)
            rest, _ = run(sources, tmp_path / "cache", numbers.choice(layouts), state, **layout)
            assert keys_of(begun + rest) == keys_of(whole), (attempt, stop, options)


def long_by(lock: Any, entry: Entry) -> float:
    return long(entry)


SPAWNED = Workers(multiprocessing_context="spawn")


def zero(entry: Entry) -> float:
    return 0.0


def test_a_resume_within_a_block_goes_on_with_the_same_costs(data: Path, tmp_path: Path) -> None:
    whole, _ = run(data, tmp_path)
    begun, state = run(data, tmp_path, most=6)
    rest, _ = run(data, tmp_path, 2, state, num_workers=2)
    assert keys_of(begun + rest) == keys_of(whole)
    with pytest.raises(StateMismatch, match="within a block"):
        run(data, tmp_path, state=state, cost=wide)
    with pytest.raises(StateMismatch, match="within a block"):
        run(data, tmp_path, state=state, cost=None)
    begun, state = run(data, tmp_path, most=8)  # between two blocks
    rest, _ = run(data, tmp_path, state=state, cost=wide)
    keys = [key for step in begun + rest for key in step.keys]
    assert len(set(keys)) == len(keys) == sum(COUNTS) // STEP * STEP


@pytest.mark.parametrize(("groups", "ranks", "step"), [(4, 9, 108), (5, 12, 120), (5, 16, 160), (3, 2, 12)])
def test_ranks_that_get_unequal_parts_of_groups_have_each_sample_once(
    data: Path, tmp_path: Path, groups: int, ranks: int, step: int
) -> None:
    options = {"groups": groups, "step": step, "order": {"num_batches": 3}}
    steps, _ = run(data, tmp_path, ranks, **options)
    assert keys_of(steps) == keys_of(run(data, tmp_path, **options)[0])
    assert len(set(steps[0].keys)) == step  # later ones have a small group's next pass, too


@pytest.mark.parametrize("cost", ["image_bytes", ("caption_bytes", "image_bytes"), ["height"]])
def test_all_built_in_facts_are_costs(data: Path, tmp_path: Path, cost: Any) -> None:
    steps, _ = run(data, tmp_path, 2, cost=cost)
    assert len({key for step in steps for key in step.keys}) == sum(COUNTS) // STEP * STEP


def test_a_mid_block_resume_compares_facts_and_functions_but_no_other_python(
    data: Path, tmp_path: Path
) -> None:
    _, states = run(data, tmp_path, most=6)
    with pytest.raises(StateMismatch, match="within a block"):
        run(data, tmp_path, state=states, cost="height")
    (state,) = json.loads(json.dumps(states))
    parts = state[FINGERPRINT]
    (digest,) = (name for name in parts if name.startswith("plan 0") and name != "plan 0")
    parts[digest.replace("3.", "4.")] = parts.pop(digest)  # of another Python
    assert run(data, tmp_path, state=sealed(state))[0]


def test_another_batch_size_waits_for_the_next_block_and_resumes(data: Path, tmp_path: Path) -> None:
    (loader,) = loaders(data, tmp_path)
    keys, state = [], None
    with loader:
        for step, batch in enumerate(loader):
            keys.append(sorted(batch["__key__"]))
            if step == 4:
                loader.set_batch_size(12)
            if step == 18:
                state = loader.state_dict()
    sizes = list(map(len, keys))
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) == {16, 12}
    assert len({key for step in keys for key in step}) == sum(sizes) > sum(COUNTS) - 16
    rest, _ = run(data, tmp_path, 2, [state], num_workers=1)
    assert keys_of(rest) == keys[19:]


def test_no_step_has_two_rows_of_a_sample_of_a_small_source(data: Path, tmp_path: Path) -> None:
    write_shards(tmp_path / "few", [24], seed=9, options=ShardOptions(image_side=(8, 12), folder="few"))
    sources = [Source(str(data), name="many", weight=3), Source(str(tmp_path / "few"), name="few")]
    steps, _ = run(sources, tmp_path / "cache", 2, step=32, order={"num_batches": 40})
    whole = steps[8:]  # blocks as long as a pass of the small source
    assert all(len(set(step.keys)) == len(step.keys) for step in whole)
    assert {sum(step.sources) for step in steps} <= set(range(4, 13))  # 8 in the mean


def as_rows(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"], "words": sample["txt"].decode().split()}


def as_is(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"keys": [row["key"] for row in rows]}


def test_with_map_sample_and_collate_it_is_the_same(data: Path, tmp_path: Path) -> None:
    expected, _ = run(data, tmp_path)
    order, batches = Order(rank=0, world_size=1, groups=1), Batches(cost=long)
    made = streamload.make_loader(
        str(data), batch_size=STEP, num_workers=2, seed=5, cache_dir=tmp_path, order=order, batches=batches,
        shards=Shards(image_key=None, text_key=None), workers=Workers(map_sample=as_rows, collate=as_is),
    )  # fmt: skip
    with made as loader:
        assert [sorted(batch["keys"]) for batch in loader] == keys_of(expected)


def some(entry: Entry) -> float | None:
    return None if entry.key.endswith("7") else 1.0


def test_an_unknown_cost_is_an_error_that_names_the_sample(data: Path, tmp_path: Path) -> None:
    facts = Shards(facts={"score": lambda sample: None if sample["__key__"].endswith("7") else 2.0})
    for cost, shards in ((some, Shards()), ("score", facts)):
        with pytest.raises(OptionError, match=r"for sample '.*7'; expected a number from 0"):
            run(data, tmp_path / str(cost)[:5], cost=cost, shards=shards)
    keep = Shards(facts=facts.facts, keep=lambda entry: not math.isnan(entry.facts["score"]))
    steps, _ = run(data, tmp_path / "kept", cost="score", shards=keep)
    assert not [key for step in steps for key in step.keys if key.endswith("7")]


@pytest.mark.parametrize(
    ("says", "options"),
    [
        ("train", {"train": False}),
        ("bucketing=", {"batches": {"bucketing": 64}}),
        ("sources='step'", {"batches": {"sources": "step"}}),
        ("no fact of this run; expected one of caption_bytes, height", {"cost": "tokens"}),
        ("two of these", {"cost": (long, wide, long)}),
        ("two of these", {"cost": ()}),
        ("two of these", {"cost": 5}),
        ("3 groups", {"groups": 3}),
        ("holds what can't be compared", {"cost": functools.partial(long_by, threading.Lock())}),
        (
            "cost= can't be sent to the workers",
            {"cost": lambda entry: 1.0, "workers": SPAWNED, "num_workers": 1},
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_what_it_cannot_do_is_refused(data: Path, tmp_path: Path, says: str, options: Any) -> None:
    with pytest.raises(OptionError, match=says):
        run(data, tmp_path, **options)


def test_with_captions_of_several_lengths_and_patches_rows_are_as_wide_as_they_are(
    data: Path, tmp_path: Path
) -> None:
    def tokenize(texts: list[str]) -> dict[str, torch.Tensor]:
        ids = torch.zeros(len(texts), 40, dtype=torch.long)
        for row, text in zip(ids, texts, strict=True):
            row[: max(1, len(text) % 37)] = 1
        return {"input_ids": ids, "attention_mask": ids.clone()}

    patches = Images(patches=Patches(patch_size=4, seq_lens=(9,), max_ratio=1.0))
    options = {"tokenizer": tokenize, "images": patches, "batches": {"text_padding": "longest"}}
    expected, _ = run(data, tmp_path)
    for ranks in (1, 2):
        assert keys_of(run(data, tmp_path, ranks, **options)[0]) == keys_of(expected)


def test_a_block_has_the_share_of_each_source(data: Path, tmp_path: Path) -> None:
    sources = [Source(str(data), name="a", weight=3), Source(str(data), name="b")]
    steps, _ = run(sources, tmp_path, 2, step=64, order={"num_batches": 32})
    counted = Counter(itertools.chain.from_iterable(step.sources for step in steps))
    assert counted[0] == 3 * counted[1]
