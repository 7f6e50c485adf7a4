"""`Batches(cost=…, max_tokens=…)` in a loader: cells of as many samples as fit, resumed anywhere."""

from __future__ import annotations

import functools
import itertools
import math
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import streamload
from streamload import Batches, Entry, Order, Patches, Shards, Source, Workers
from streamload.errors import DataError, NoValidSamples, OptionError, SampleError, StateMismatch
from streamload.testing.shards import ShardOptions, write_shards

CELLS, COUNTS, TEXT, IMAGE = 12, [190, 51, 223, 172, 160], 300, 500


def tokens_of(key: str) -> int:
    """A length with a heavy tail, by the key alone; a few are longer than a cell."""
    return max(1, min(310, math.floor(math.exp(0.9 * random.Random(key).gauss(0, 1)) * 30)))


def tokens(entry: Entry) -> float:
    return tokens_of(entry.key)


def patches(entry: Entry) -> float:
    return entry.width * entry.height / 2


def taking(entry: Entry) -> float:
    return tokens_of(entry.key) * (1 + tokens_of(entry.key) / 100)


def opposed(entry: Entry) -> float:
    return max(0, TEXT - tokens_of(entry.key))


def half(entry: Entry) -> float:
    """No two fit one cell."""
    return TEXT // 2 + 1


def huge(entry: Entry) -> float:
    """One in fifty fills a cell."""
    return TEXT if random.Random(entry.key).random() < 0.02 else 1


def nothing(entry: Entry) -> float:
    return 0.0


def random_tokens(entry: Entry) -> float:
    return 1 + random.Random(entry.key).randrange(TEXT)


HOSTILE = [tokens, opposed, half, huge, nothing, random_tokens, taking]


def as_rows(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"], "input_ids": torch.ones(tokens_of(sample["__key__"]))}


def as_cell(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The flat form."""
    lengths = torch.tensor([0, *(len(row["input_ids"]) for row in rows)])
    return {
        "input_ids": torch.cat([row["input_ids"] for row in rows])[None],
        "cu_seqlens": lengths.cumsum(0).int(),
        "keys": [row["key"] for row in rows],
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cells") / "data"
    write_shards(directory, COUNTS, options=ShardOptions(image_side=(6, 12)))
    return directory


@pytest.fixture(scope="module")
def every_key(data: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    with loaders(data, tmp_path_factory.mktemp("all"), batches={"cost": None}, train=False)[0] as loader:
        return {key for batch in loader for key in batch["keys"]}


Cells = list[list[list[str]]]
"""For each step the keys of each cell, of one rank after the other."""


class Entry_of(NamedTuple):  # noqa: N801
    """Stands for an entry, of which these costs need the key."""

    key: str


class Ran(NamedTuple):
    cells: Cells
    states: list[Any]
    left_out: int


def loaders(data: Any, cache: Path, ranks: int = 1, **options: Any) -> list[streamload.Loader]:
    cells, groups = options.pop("cells", CELLS), options.pop("groups", 1)
    batches = {"cost": (tokens, patches), "max_tokens": TEXT, "max_patches": IMAGE} | options.pop(
        "batches", {}
    )
    if batches["cost"] is None:
        batches = {}
    shared = {
        "batch_size": cells // ranks,
        "batches": Batches(**batches),
        "num_workers": 0,
        "seed": 5,
        "cache_dir": cache,
        "shuffle": 60,
        "shards": Shards(image_key=None, text_key=None),
        "workers": Workers(map_sample=as_rows, collate=as_cell),
    }
    order = {"groups": groups if options.get("train", True) else None, "lanes": 3, **options.pop("order", {})}
    return [
        streamload.make_loader(
            data if isinstance(data, list) else str(data),
            order=Order(rank=rank, world_size=ranks, **order),
            **{**shared, **options},
        )
        for rank in range(ranks)
    ]


def run(
    data: Any, cache: Path, ranks: int = 1, state: Any = None, most: int | None = None, **options: Any
) -> Ran:
    """An epoch of all ranks, in lockstep."""
    made = loaders(data, cache, ranks, **options)
    try:
        for loader in made:
            if state is not None:
                loader.load_state_dict(state)
        steps = [
            [cell["keys"] for batch in batches for cell in batch]
            for batches in itertools.islice(zip(*made, strict=True), most)
        ]
        left_out = sum(loader.stats().samples_left_out["costs"] for loader in made)
        return Ran(steps, [loader.state_dict() for loader in made], left_out)
    finally:
        for loader in made:
            loader.close()


def keys_in(steps: Cells) -> list[str]:
    return [key for step in steps for cell in step for key in cell]


def in_steps(steps: Cells, groups: int = 1) -> list[list[list[str]]]:
    """The cells of each step; with several groups those of other numbers of ranks lie in another order."""
    return steps if groups == 1 else [sorted(step) for step in steps]


def test_each_sample_comes_once_in_cells_within_their_budgets(
    data: Path, tmp_path: Path, every_key: set[str]
) -> None:
    (loader,) = loaders(data, tmp_path)
    keys = []
    with loader:
        for batch in loader:
            info = loader.info
            assert info.cells is not None
            assert info.planned is not None
            assert len(batch) == len(info.cells) == CELLS
            for cell, size in zip(batch, info.cells, strict=True):
                assert cell["input_ids"].shape == (1, sum(map(tokens_of, cell["keys"])))
                assert (len(cell["keys"]), cell["input_ids"].numel()) == (size.rows, size.text)
                assert 0 < size.text <= TEXT
                assert 0 < size.image <= IMAGE
                keys += cell["keys"]
            sums = [sum(column) for column in zip(*info.cells, strict=True)]
            assert sums == list(info.planned)  # one rank has all
            assert (info.rows, info.tokens) == (sums[0], {"text": sums[1], "image": sums[2]})
        too_long = {key for key in every_key if tokens_of(key) > TEXT}
        assert loader.stats().samples_left_out == {"costs": len(too_long)}
    assert len(too_long) > 0
    assert len(keys) == len(set(keys))
    assert set(keys) <= every_key - too_long
    assert len(every_key - too_long) - len(keys) < CELLS


def test_blocks_take_the_samples_of_the_run_in_order(data: Path, tmp_path: Path) -> None:
    """A block's samples are a stretch of the sequence: nothing is held back for the next."""
    with loaders(data, tmp_path, batches={"cost": None}, batch_size=1)[0] as loader:
        order = [key for batch in loader for key in batch["keys"] if tokens_of(key) <= TEXT]
    steps = run(data, tmp_path).cells
    place = 0
    for begin, end in [(0, 1), (1, 2), (2, 4), (4, 8)]:  # in steps: blocks grow at first
        keys = keys_in(steps[begin:end])
        assert sorted(keys) == sorted(order[place : place + len(keys)])
        place += len(keys)


@pytest.mark.parametrize(
    ("ranks", "workers"),
    [(2, 0), (1, 2), pytest.param(3, 1, marks=pytest.mark.deep), pytest.param(12, 0, marks=pytest.mark.deep)],
)
def test_cells_do_not_depend_on_ranks_and_workers(
    data: Path, tmp_path: Path, ranks: int, workers: int
) -> None:
    expected = run(data, tmp_path)
    found = run(data, tmp_path, ranks, num_workers=workers)
    assert found.cells == expected.cells
    assert found.left_out == expected.left_out


def test_cells_of_a_step_take_as_long_and_are_full(data: Path, tmp_path: Path) -> None:
    options = {"batches": {"cost": (tokens, patches, taking)}, "order": {"num_batches": 8}}
    steps = run(data, tmp_path, **options).cells
    taken = [[sum(taking(Entry_of(key)) for key in cell) for cell in step] for step in steps[4:]]
    assert np.median([max(cells) / np.mean(cells) for cells in taken]) < 1.05
    filled = [sum(map(tokens_of, cell)) for step in steps for cell in step]
    assert np.mean(filled) > 0.9 * TEXT


@pytest.mark.parametrize(
    "most", [pytest.param(1, marks=pytest.mark.deep), 5, 6, pytest.param(8, marks=pytest.mark.deep)]
)
def test_a_run_resumes_at_any_step_on_other_ranks_and_workers(data: Path, tmp_path: Path, most: int) -> None:
    whole = run(data, tmp_path)
    begun = run(data, tmp_path, 2, most=most)
    rest = run(data, tmp_path / "empty", 3, begun.states, num_workers=1)
    assert begun.cells + rest.cells == whole.cells
    assert rest.left_out == whole.left_out  # those before the state included


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_random_runs_resume_exactly_on_other_layouts(tmp_path: Path) -> None:
    """Costs, budgets, mixing, groups, cells, ranks and workers at random, 20 runs; two resumes each."""
    random_runs(tmp_path, range(20))


def random_runs(directory: Path, attempts: range) -> None:
    for name, counts in (("a", [140, 61]), ("b", [29]), ("c", [170])):
        options = ShardOptions(image_side=(6, 12), folder=name)
        write_shards(directory / name, counts, seed=ord(name), options=options)
    for attempt in attempts:
        numbers = random.Random(attempt)
        names = numbers.sample("abc", numbers.choice([1, 1, 2, 3]))
        sources = [Source(str(directory / name), name=name, weight=numbers.randint(1, 3)) for name in names]
        groups, cells = numbers.choice([1, 1, 2, 4]), numbers.choice([4, 8, 12, 24])
        one, other = numbers.choice(HOSTILE), numbers.choice([*HOSTILE, patches])
        budgets = {"cost": one, "max_tokens": numbers.choice([TEXT, 2 * TEXT]), "max_patches": None}
        if numbers.random() < 0.6:
            budgets |= {"cost": (one, other), "max_patches": numbers.choice([None, IMAGE, 2 * IMAGE])}
        steps = numbers.randint(5, 24)
        is_pass = len(names) == 1 and groups == 1 and numbers.random() < 0.5
        options = {
            "batches": budgets,
            "groups": groups,
            "cells": cells,
            "seed": attempt,
            "order": {} if is_pass else {"num_batches": steps},
            "workers": Workers(map_sample=as_rows, collate=as_keys),
        }
        layouts = [ranks for ranks in (1, 2, 4) if cells % ranks == 0]
        whole = run(sources, directory / "cache", numbers.choice(layouts), **options)
        assert is_pass or len(whole.cells) == steps
        assert all(len(step) == cells and all(step) for step in whole.cells)
        check_budgets(whole.cells, budgets)
        if is_pass:
            assert len(set(keys_in(whole.cells))) == len(keys_in(whole.cells))
        for _ in range(2 if len(whole.cells) > 1 else 0):
            stop = numbers.randint(1, len(whole.cells) - 1)
            layout = {"num_workers": numbers.choice([0, 0, 0, 2]), **options}
            begun = run(sources, directory / "cache", numbers.choice(layouts), most=stop, **options)
            rest = run(sources, directory / "cache", numbers.choice(layouts), begun.states, **layout)
            found = in_steps(begun.cells + rest.cells, groups)
            assert found == in_steps(whole.cells, groups), (attempt, stop, options)
            assert rest.left_out == whole.left_out, attempt
            if is_pass:  # and on other cells and budgets, from within a block or not
                budgets = {**budgets, "max_tokens": numbers.choice([TEXT, 450, 2 * TEXT])}
                other = {**options, "batches": budgets, "cells": numbers.choice([3, 4, 10])}
                rest = run(sources, directory / "cache", state=begun.states, **other)
                check_budgets(rest.cells, budgets)
                keys = keys_in(begun.cells + rest.cells)
                assert len(keys) == len(set(keys)), (attempt, stop, other)
                count = {"a": 201, "b": 29, "c": 170}[names[0]]
                assert 0 <= count - rest.left_out - len(keys) < max(cells, other["cells"]), (attempt, stop)


def as_keys(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"ones": torch.ones(len(rows)), "keys": [row["key"] for row in rows]}


KEYS_ALONE = Workers(map_sample=as_rows, collate=as_keys)


def check_budgets(steps: Cells, budgets: dict[str, Any]) -> None:
    """By the key alone, as the costs of texts are."""
    costs = budgets["cost"] if isinstance(budgets["cost"], tuple) else (budgets["cost"],)
    for cost, budget in zip(costs, (budgets["max_tokens"], budgets.get("max_patches")), strict=False):
        if budget is not None and cost is not patches:
            for step in steps:
                for cell in step:
                    assert sum(math.ceil(cost(Entry_of(key))) for key in cell) <= budget


def test_plain_batches_have_the_rows_of_all_cells_and_microbatches_are_cells(
    data: Path, tmp_path: Path
) -> None:
    expected = run(data, tmp_path).cells
    plain = {"workers": Workers(), "shards": Shards(), "output": "dict"}
    (loader,) = loaders(data, tmp_path, **plain, num_workers=1, batches={"with_keys": True})
    with loader:
        for step, batch in zip(expected, loader, strict=True):
            assert batch["__key__"] == list(itertools.chain(*step))
            parts = list(loader.microbatches(batch))
            assert [batch["__key__"][part.rows] for part in parts] == step
            assert [len(part["image"]) for part in parts] == [len(cell) for cell in step]
            assert sum(part.fraction for part in parts) == pytest.approx(1)
            assert [part.is_last for part in parts] == [False] * (CELLS - 1) + [True]


def test_collated_cells_are_microbatches_with_their_keys(data: Path, tmp_path: Path) -> None:
    (loader,) = loaders(data, tmp_path, cells=3, batches={"with_keys": True})
    with loader:
        batch = next(iter(loader))
        for part, cell in zip(loader.microbatches(batch), batch, strict=True):
            assert part["__key__"] == cell["keys"]
            assert torch.equal(part["input_ids"], cell["input_ids"])
            assert part.rows.stop - part.rows.start == len(cell["keys"])


def bad(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["__key__"].endswith(("3", "5")):
        raise SampleError("can't be used")
    return as_rows(sample)


def test_the_sizes_of_a_cell_are_those_of_its_stand_in(data: Path, tmp_path: Path) -> None:
    shards = Shards(image_key=None, text_key=None, max_bad_samples=None)
    workers = Workers(map_sample=bad, collate=as_cell)
    (loader,) = loaders(data, tmp_path, cells=6, shards=shards, workers=workers)
    with loader:
        for batch in loader:
            sizes = [(len(cell["keys"]), cell["input_ids"].numel()) for cell in batch]
            assert sizes == [(size.rows, size.text) for size in loader.info.cells or ()]


def test_a_bad_sample_leaves_its_cell_and_an_empty_cell_gets_a_stand_in(data: Path, tmp_path: Path) -> None:
    shards = Shards(image_key=None, text_key=None, max_bad_samples=None)
    options: dict[str, Any] = {"shards": shards, "cells": 6}
    good, found = (
        run(data, tmp_path, workers=Workers(map_sample=function, collate=as_keys), num_workers=2, **options)
        for function in (as_rows, bad)
    )
    stand_ins = 0
    for step, others in zip(good.cells, found.cells, strict=True):
        for cell, other in zip(step, others, strict=True):
            kept = [key for key in cell if not key.endswith(("3", "5"))]
            stand_ins += not kept
            assert other == kept if kept else len(other) == 1
            assert not other[0].endswith(("3", "5"))
    assert stand_ins > 0


def test_a_share_of_bad_samples_is_that_of_the_pass_after_a_resume(data: Path, tmp_path: Path) -> None:
    """The samples before the state count, although positions are cells: 12 of 796 are less than 2 %."""
    good = run(data, tmp_path)
    bad_keys = frozenset(keys_in(good.cells[8:])[::30][:12])
    begun = run(data, tmp_path, most=8)
    shards = Shards(image_key=None, text_key=None, max_bad_samples=0.02)
    workers = Workers(map_sample=functools.partial(bad_of, bad_keys), collate=as_keys)
    rest = run(data, tmp_path, state=begun.states, workers=workers, shards=shards)
    assert set(keys_in(good.cells[8:])) - set(keys_in(rest.cells)) == bad_keys
    assert len(bad_keys) > 0.02 * (8 * CELLS + len(keys_in(rest.cells)))


def bad_of(keys: frozenset[str], sample: dict[str, Any]) -> dict[str, Any]:
    if sample["__key__"] in keys:
        raise SampleError("can't be used")
    return as_rows(sample)


def test_another_number_of_cells_waits_for_the_next_block(data: Path, tmp_path: Path) -> None:
    (loader,) = loaders(data, tmp_path)
    steps = []
    with loader:
        for step, batch in enumerate(loader):
            steps.append([cell["keys"] for cell in batch])
            if step == 4:
                loader.set_batch_size(6)
    sizes = [len(step) for step in steps]
    assert sizes[:8] == [CELLS] * 8
    assert set(sizes[8:]) == {6}
    assert len(keys_in(steps)) == len(set(keys_in(steps)))


CHANGES: list[dict[str, Any]] = [
    {"cells": 4},
    {"batches": {"max_tokens": 2 * TEXT, "max_patches": None}},
    {"cells": 21, "batches": {"max_tokens": 200, "max_patches": 300}},
]


@pytest.mark.parametrize("options", CHANGES)
@pytest.mark.parametrize("most", [pytest.param(3, marks=pytest.mark.deep), 5])
def test_within_a_block_a_run_goes_on_with_other_cells_and_budgets(
    data: Path, tmp_path: Path, options: dict[str, Any], most: int, every_key: set[str]
) -> None:
    """Each sample comes once; and so after a second change within the block that has the first one's rest."""
    begun = run(data, tmp_path, most=most)
    text = options.get("batches", {}).get("max_tokens", TEXT)
    whole = run(data, tmp_path, state=begun.states, **options)
    part = run(data, tmp_path, state=begun.states, most=2, **options)
    assert part.cells + run(data, tmp_path / "empty", state=part.states, **options).cells == whole.cells
    again = run(data, tmp_path, state=part.states, cells=8, num_workers=1)
    for runs, largest in (((begun, whole), text), ((begun, part, again), TEXT)):
        keys = [key for ran in runs for key in keys_in(ran.cells)]
        assert len(keys) == len(set(keys))
        missing = {key for key in every_key - set(keys) if tokens_of(key) <= min(largest, text, TEXT)}
        if "max_patches" not in options.get("batches", {}):
            assert len(missing) < len(runs[-1].cells[0])
    assert all(sum(map(tokens_of, cell)) <= text for step in whole.cells for cell in step)


def test_what_is_left_of_a_block_may_take_several_blocks(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_key: set[str]
) -> None:
    """With blocks of two steps, or four of two cells."""
    monkeypatch.setattr("streamload.batching.packed_cells._STEPS", 2)
    monkeypatch.setattr("streamload.batching.packed_cells._CELLS", 8)
    begun = run(data, tmp_path, most=3)  # twelve cells are left
    whole = run(data, tmp_path, state=begun.states, cells=2)
    for most in (3, 6):
        part = run(data, tmp_path, state=begun.states, cells=2, most=most)
        assert part.cells + run(data, tmp_path, 2, part.states, cells=2).cells == whole.cells
        again = run(data, tmp_path, state=part.states, cells=5)
        for runs in ((begun, whole), (begun, part, again)):
            keys = [key for ran in runs for key in keys_in(ran.cells)]
            assert len(keys) == len(set(keys))
            missing = {key for key in every_key - set(keys) if tokens_of(key) <= TEXT}
            assert len(missing) < len(runs[-1].cells[0])
            assert runs[-1].left_out == len(every_key) - len(keys) - len(missing)


@pytest.mark.parametrize(("resized", "most"), [(0, 5), (3, 5)])
def test_within_a_block_sizes_that_were_set_hold_at_once_with_other_budgets(
    data: Path, tmp_path: Path, every_key: set[str], resized: int, most: int
) -> None:
    """Of one that is behind, and of one that waits for the block's end."""
    (loader,) = loaders(data, tmp_path)
    keys = []
    with loader:
        for step, batch in enumerate(itertools.islice(loader, most)):
            keys += [key for cell in batch for key in cell["keys"]]
            if step == resized:
                loader.set_batch_size(6)
        state = loader.state_dict()
    rest = run(data, tmp_path, state=state, batches={"max_tokens": 310})
    assert {len(step) for step in rest.cells} == {6}
    keys += keys_in(rest.cells)
    assert len(keys) == len(set(keys))
    assert len(every_key) - rest.left_out - len(keys) < 6


def test_weights_that_wait_for_a_blocks_end_hold_where_its_rest_is_packed_anew(tmp_path: Path) -> None:
    for name in "ab":
        options = ShardOptions(image_side=(6, 12), folder=name)
        write_shards(tmp_path / name, [90, 61], seed=ord(name), options=options)
    sources = [Source(str(tmp_path / name), name=name, weight=1) for name in "ab"]
    options: dict[str, Any] = {"cells": 4, "order": {"num_batches": 24}}
    (loader,) = loaders(sources, tmp_path / "cache", **options)
    with loader:
        for step, _ in enumerate(itertools.islice(loader, 7)):
            if step == 5:
                loader.set_weights({"a": 8})
        state = loader.state_dict()
    options["batches"] = {"max_tokens": 2 * TEXT}
    whole = run(sources, tmp_path / "cache", state=state, **options)
    for most in (2, 9):
        part = run(sources, tmp_path / "cache", state=state, most=most, **options)
        rest = run(sources, tmp_path / "cache", state=part.states, **options)
        assert part.cells + rest.cells == whole.cells


def test_what_a_passs_end_left_over_is_used_by_fewer_cells(data: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batches": {"cost": half, "max_patches": None}, "workers": KEYS_ALONE}
    begun = run(data, tmp_path, most=60, cells=12, **options)
    rest = run(data, tmp_path, state=begun.states, cells=1, **options)
    assert sum(COUNTS) % 12
    assert len(set(keys_in(begun.cells + rest.cells))) == sum(COUNTS)


def test_samples_that_are_all_too_long_are_an_error_in_an_endless_run(data: Path, tmp_path: Path) -> None:
    with pytest.raises(NoValidSamples, match="within max_tokens="):
        run(
            data,
            tmp_path,
            batches={"cost": half, "max_tokens": 9, "max_patches": None},
            order={"num_batches": 3},
        )


def test_within_a_block_costs_stay(data: Path, tmp_path: Path) -> None:
    within, between = (run(data, tmp_path, most=most) for most in (6, 8))
    others = {"batches": {"cost": (taking, patches)}}
    with pytest.raises(StateMismatch, match="within a block"):
        run(data, tmp_path, state=within.states, **others)
    rest = run(data, tmp_path, state=between.states, **others)
    keys = keys_in(between.cells + rest.cells)
    assert len(keys) == len(set(keys)) > 0.8 * sum(COUNTS)


def test_the_length_of_a_pass_is_not_known_before_and_num_batches_is_exact(
    data: Path, tmp_path: Path
) -> None:
    (loader,) = loaders(data, tmp_path)
    with loader:
        steps = sum(1 for _ in loader)
        with pytest.raises(TypeError, match="num_batches"):
            len(loader)
        assert loader.num_samples is None
    (loader,) = loaders(data, tmp_path, order={"num_batches": 5})
    with loader:
        assert len(loader) == sum(1 for _ in loader) == 5 < steps


def test_a_cell_that_is_longer_than_its_cost_said_is_an_error(data: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has \d+ of input_ids, and its budget is 40: cost=a function"):
        run(data, tmp_path, batches={"cost": nothing, "max_tokens": 40, "max_patches": None})


@pytest.mark.parametrize(
    ("says", "options"),
    [
        ("train", {"train": False, "batches": {"cost": tokens, "max_patches": None}}),
        ("num_batches=", {"num_samples": 100}),
        ("microbatch=", {"batches": {"microbatch": 4}}),
        ("needs two costs", {"batches": {"cost": tokens}}),
        ("bucketing=", {"batches": {"bucketing": 64}}),
        ("5 groups", {"groups": 5, "order": {"num_batches": 3}}),
        ("how long an epoch is: give num_batches", {"groups": 2}),
        ("at most 2.40", {"batches": {"max_tokens": 1 << 41}}),
        ("or three", {"batches": {"cost": (tokens, tokens, tokens, tokens)}}),
    ],
)
def test_what_it_cannot_do_is_refused(data: Path, tmp_path: Path, says: str, options: Any) -> None:
    with pytest.raises(OptionError, match=says):
        run(data, tmp_path, **options)


def test_a_budget_of_patches_needs_a_cost() -> None:
    for options in ({}, {"cost": (tokens, patches)}, {"max_tokens": 5}):
        with pytest.raises(
            OptionError, match="max_patches= needs cost=, of text and of images, and max_tokens="
        ):
            Batches(max_patches=5, **options)


def test_with_patches_the_batches_are_as_those_of_other_runs(data: Path, tmp_path: Path) -> None:
    images = streamload.Images(patches=Patches(patch_size=4, seq_lens=(9,), max_ratio=1.0))
    expected = run(data, tmp_path).cells
    options = {"workers": Workers(), "shards": Shards(), "images": images, "output": "dict"}
    (loader,) = loaders(data, tmp_path, **options, batches={"with_keys": True})
    with loader:
        assert [batch["__key__"] for batch in loader] == [list(itertools.chain(*step)) for step in expected]
