"""A run with a journal leaves samples out, is restarted, and is looked back at: each step as it was then."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import streamload
from streamload import Batches, Order
from streamload.errors import JournalError, StateMismatch
from streamload.journal.history import RunHistory
from streamload.testing.shards import write_shards

ROWS, EPOCH = 8, 30


def made(
    folder: Path, urls: list[str], workers: int = 0, cache: str = "cache", **more: Any
) -> streamload.Loader:
    options: dict[str, Any] = {"batch_size": ROWS, **more}
    return streamload.make_loader(
        urls,
        num_workers=workers,
        output="dict",
        seed=2,
        cache_dir=folder / cache,
        order=Order(num_batches=EPOCH, journal=folder / "journal"),
        batches=Batches(with_keys=True),
        **options,
    )


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    return [str(path) for path in write_shards(tmp_path / "shards", [40] * 6)]


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (
        one["__key__"] == other["__key__"]
        and one["text"] == other["text"]
        and torch.equal(one["image"], other["image"])
    )


def test_steps_around_a_call_that_leaves_out_are_as_they_were(tmp_path: Path, urls: list[str]) -> None:
    steps: list[dict[str, Any]] = []
    left_out: dict[str, int] = {}
    with made(tmp_path, urls, workers=2) as loader:
        for epoch in range(2):
            for number, batch in enumerate(loader):
                steps.append(batch)
                if number in (6, 20):
                    first = loader.leave_out(batch["__key__"][:3], why="tried")
                    left_out |= dict.fromkeys(batch["__key__"][:3], epoch * EPOCH + first)
    for step, batch in enumerate(steps):
        for key in batch["__key__"]:
            assert step < left_out.get(key, len(steps)), key
    with made(tmp_path, urls, cache="other") as loader:
        for step in random.Random(1).sample(range(2 * EPOCH - 1), 20):
            again = loader.at(step)
            assert is_same(next(again), steps[step])
            assert is_same(next(again), steps[step + 1])
    lines = [json.loads(line) for line in (tmp_path / "journal" / "left_out.jsonl").read_text().splitlines()]
    assert {line["key"] for line in lines} == left_out.keys()


def test_a_run_that_goes_back_and_on_without_samples_is_a_tree(tmp_path: Path, urls: list[str]) -> None:
    first: list[dict[str, Any]] = []
    with made(tmp_path, urls) as loader:
        for number, batch in enumerate(loader):
            first.append(batch)
            if number == 11:
                state = loader.state_dict()
            if number == 20:
                break
    second: list[dict[str, Any]] = []
    with made(tmp_path, urls, workers=1) as loader:
        loader.load_state_dict(state)
        suspects = first[14]["__key__"][:2]
        assert loader.leave_out(suspects, why="spike") == 12
        for batch in loader:
            second.append(batch)
            assert loader.info.run_step == 11 + len(second)
    assert not set(suspects) & {key for batch in second for key in batch["__key__"]}
    history = RunHistory(tmp_path / "journal")
    old, new = history.segments
    assert new.parent == (old.name, 12)
    with made(tmp_path, urls) as loader:
        for step in range(EPOCH):
            expected = first[step] if step < 12 else second[step - 12]
            assert is_same(next(loader.at(step)), expected), step
        for step in range(21):
            assert is_same(next(loader.at(step, segment=old.name)), first[step]), step
        with pytest.raises(JournalError, match="has no step 21"):
            next(loader.at(21, segment=old.name))
    changed = [a == b for a, b in zip(first[14]["__key__"], second[2]["__key__"], strict=True)]
    assert changed.count(False) == 2


def test_another_transform_is_named(tmp_path: Path, urls: list[str]) -> None:
    with made(tmp_path, urls) as loader:
        next(iter(loader))
    with (
        made(tmp_path, urls, preprocess=small) as loader,
        pytest.raises(StateMismatch, match="preprocess was"),
    ):
        next(loader.at(0))


def small(image: Any) -> torch.Tensor:
    return torch.zeros(3, 2, 2)


def test_a_loader_without_a_journal_says_so(urls: list[str], tmp_path: Path) -> None:
    with streamload.make_loader(urls, cache_dir=tmp_path / "cache") as loader:
        with pytest.raises(streamload.errors.OptionError, match=r"Order\(journal=folder\)"):
            loader.at(0)
        with pytest.raises(streamload.errors.OptionError, match=r"needs a file"):
            loader.leave_out(["a"])
