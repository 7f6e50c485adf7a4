"""What a review of the journal found: uses of samples, reports of losses, and a file with two loaders."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import streamload
from streamload import Batches, Order, Source
from streamload.cli.runs.options import make_loaders
from streamload.journal.history import RunHistory
from streamload.loader.groups import Shards
from streamload.loader.past import uses
from streamload.testing.shards import write_shards
from tests.journal.test_commands import Command, command

__all__ = ["command"]  # a fixture
ROWS = 7


def made(folder: Path, data: Any, num_batches: int | None, **more: Any) -> streamload.Loader:
    return streamload.make_loader(
        data,
        batch_size=ROWS,
        num_workers=0,
        output="dict",
        seed=3,
        cache_dir=folder / "cache",
        order=Order(num_batches=num_batches, journal=folder / "journal"),
        batches=Batches(with_keys=True),
        **more,
    )


def epochs(loader: streamload.Loader, count: int, then: Callable[[int], object] = int) -> list[list[str]]:
    """The keys of each step; `then` is called after it."""
    found = []
    for _ in range(count):
        for batch in loader:
            found.append(batch["__key__"])
            then(loader.info.run_step or 0)
    return found


def check_uses(command: Command, folder: Path, steps: list[list[str]], *arguments: str) -> None:
    keys = sorted({key for keys in steps for key in keys})[::7]
    code, text, error = command("runs", "used", folder / "journal", *keys, *arguments, "--json")
    assert code == 0, error
    used = json.loads(text)["used"]
    for key in keys:
        true = [step for step, keys in enumerate(steps) for one in keys if one == key]
        assert [use["step"] for use in used[key]] == true, key


def paths(folder: Path, counts: list[int]) -> list[str]:
    return [str(path) for path in write_shards(folder, counts)]


def test_samples_after_an_epochs_last_whole_batch_are_in_no_step(tmp_path: Path, command: Command) -> None:
    urls = paths(tmp_path / "shards", [13, 22, 9, 17])
    with made(tmp_path, urls, None) as loader:
        steps = epochs(loader, 3)
    assert sum(map(len, steps)) < 3 * 61
    check_uses(command, tmp_path, steps)


@pytest.mark.parametrize("mark_steps", [3, 512])
def test_uses_are_right_after_weights_that_were_set_just_before_a_mark(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, mark_steps: int
) -> None:
    monkeypatch.setattr("streamload.journal.recorder.MARK_STEPS", mark_steps)
    urls = paths(tmp_path / "shards", [13, 22, 9, 17, 11, 8])
    sources = [Source(urls[:2], name="a"), Source(urls[2:4], name="b"), Source(urls[4:], name="c")]
    with made(tmp_path, sources, 20) as loader:

        def weigh(step: int) -> None:
            if step in (5, 19, 26):
                loader.set_weights({"a": 1 + step, "b": 0 if step == 26 else 2})

        steps = epochs(loader, 2, weigh)
    check_uses(command, tmp_path, steps)


def test_a_key_that_two_shards_have_is_found_in_both(tmp_path: Path, command: Command) -> None:
    urls = paths(tmp_path / "a", [20, 20])
    with made(tmp_path, [*urls, *paths(tmp_path / "b", [20, 20])], 30) as loader:
        steps = epochs(loader, 1)
    check_uses(command, tmp_path, steps)


def test_a_shard_of_two_sources_is_found_in_both(tmp_path: Path, command: Command) -> None:
    urls = paths(tmp_path / "shards", [20, 20])
    with made(tmp_path, [Source(urls, name="a"), Source(urls[:1], name="b")], 30) as loader:
        steps = epochs(loader, 1)
    check_uses(command, tmp_path, steps)
    used = json.loads(command("runs", "used", tmp_path / "journal", urls[0], "--json")[1])["used"]
    total = sum(use["samples"] for use in used[urls[0]])
    assert total == sum(key.startswith("00000") for keys in steps for key in keys)


def usual(entry: Any) -> float:
    return 0.5


def test_keys_of_a_run_with_repeat_are_refused(tmp_path: Path, command: Command) -> None:
    with made(tmp_path, paths(tmp_path / "shards", [30]), 9, shards=Shards(repeat=usual)) as loader:
        steps = epochs(loader, 1)
    code, _, error = command("runs", "used", tmp_path / "journal", steps[0][0])
    assert code == 2
    assert "repeat=" in error


def test_uses_show_no_secrets_of_urls(tmp_path: Path, command: Command) -> None:
    with made(tmp_path, paths(tmp_path / "shards", [30]), 4) as loader:
        steps = epochs(loader, 1)
    url = "https://me:hidden@host/1.tar?X-Amz-Signature=hidden"
    for arguments in ([url], [steps[0][0], "--shard", url]):
        code, text, error = command("runs", "used", tmp_path / "journal", *arguments)
        assert code == 2
        assert "https://host/1.tar is no shard of the run" in error
        assert "hidden" not in text + error


def test_a_restart_that_made_no_step_hides_no_uses(tmp_path: Path, command: Command) -> None:
    urls = paths(tmp_path / "shards", [30])
    with made(tmp_path, urls, 8) as loader:
        steps = epochs(loader, 1)
        state = loader.state_dict()
    with made(tmp_path, urls, 8) as loader:
        loader.load_state_dict(state)
        iter(loader)
    check_uses(command, tmp_path, steps)


@pytest.mark.parametrize("rows", [slice(-3, None), [-3, -2, -1]], ids=["slice", "numbers"])
def test_losses_of_rows_from_the_end_are_those_of_these_rows(
    tmp_path: Path, command: Command, rows: Any
) -> None:
    with made(tmp_path, paths(tmp_path / "shards", [30]), 20) as loader:
        loader_steps = epochs(
            loader, 1, lambda step: loader.report(loss=[2.0, 1e6 if step == 9 else 2.0, 2.0], rows=rows)
        )
    code, text, error = command("runs", "spikes", tmp_path / "journal", "--json")
    assert code == 0, error
    (spike,) = json.loads(text)
    assert (spike["step"], spike["suspects"][0]["key"]) == (9, loader_steps[9][ROWS - 2])
    assert spike["suspects"][0]["loss"] == 65504  # the most that is kept of a row


def test_spikes_of_one_loss_for_all_rows_are_found(tmp_path: Path, command: Command) -> None:
    with made(tmp_path, paths(tmp_path / "shards", [30]), 20) as loader:
        epochs(loader, 1, lambda step: loader.report(loss=torch.tensor(9.0 if step == 9 else 2.0)))
    code, text, error = command("runs", "spikes", tmp_path / "journal", "--json")
    assert code == 0, error
    assert [spike["step"] for spike in json.loads(text)] == [9]


def test_a_loader_that_was_left_writes_nothing_over_the_one_that_went_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    urls = paths(tmp_path / "shards", [30] * 2)
    left = made(tmp_path, urls, 20)
    batches = iter(left)
    for _ in range(6):
        next(batches)
    state = left.state_dict()
    next(batches)  # it has something to write
    with made(tmp_path, urls, 20) as loader:
        loader.load_state_dict(state)
        steps = epochs(loader, 1)
    with caplog.at_level(logging.WARNING, "streamload"):
        left.close()
    assert "another loader writes to it" in caplog.text
    with made(tmp_path, urls, 20) as loader:
        assert [batch["__key__"] for batch in loader.at(6)] == steps


def test_uses_of_shards_whose_ends_the_run_had_not_come_to_are_right(tmp_path: Path) -> None:
    with made(tmp_path, paths(tmp_path / "shards", [400] * 3), 20, shuffle=16) as loader:
        steps = epochs(loader, 1)
    segment = RunHistory(tmp_path / "journal").segment()
    segment.ended.clear()  # as if all were still arriving
    for shard in range(3):
        expected = {
            int(key[-6:]): step
            for step, keys in enumerate(steps)
            for key in keys
            if key.startswith(f"{shard:05d}")
        }
        assert {
            use.ordinal: use.first for use in uses(segment, loader.options, make_loaders(), 0, shard)
        } == expected
