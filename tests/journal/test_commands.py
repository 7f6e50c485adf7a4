"""`streamload replay` and `streamload runs`: a run is looked back at, and compared with what it was."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

import streamload
from streamload import Batches, Order, Source
from streamload.cli import main
from streamload.testing.shards import ShardOptions, write_shards

COUNTS, ROWS, STEPS, POISON = [60] * 8, 12, 90, "00006000041"
Command = Callable[..., tuple[int, str, str]]


class Trained(NamedTuple):
    """A run, and the keys of its steps."""

    folder: Path
    urls: list[str]
    keys: list[list[str]]
    losses: list[list[float]]
    batches: list[dict[str, Any]]

    @property
    def journal(self) -> str:
        return str(self.folder / "journal")

    def steps_of(self, key: str) -> list[int]:
        return [step for step, keys in enumerate(self.keys) if key in keys]


def made(folder: Path, urls: list[str], **more: Any) -> streamload.Loader:
    sources = [Source(urls[:4], name="good"), Source(urls[4:], name="web")]
    return streamload.make_loader(
        sources,
        batch_size=ROWS,
        num_workers=0,
        output="dict",
        seed=5,
        cache_dir=folder / "cache",
        order=Order(num_batches=STEPS // 2, journal=folder / "journal"),
        batches=Batches(with_keys=True),
        **more,
    )


def trained(folder: Path, **more: Any) -> Trained:
    """Two epochs, in which the loss of one sample is ten times that of others."""
    urls = [
        str(path) for path in write_shards(folder / "shards", COUNTS, options=ShardOptions(folder="<b>/"))
    ]
    noise = torch.Generator().manual_seed(3)
    run = Trained(folder, urls, [], [], [])
    with made(folder, urls, **more) as loader:
        for _ in range(2):
            for batch in loader:
                losses = 2 + 0.3 * torch.randn(ROWS, generator=noise)
                losses *= torch.tensor([10.0 if POISON in key else 1.0 for key in batch["__key__"]])
                for part in (slice(0, 5), slice(5, ROWS)):
                    loader.report(loss=losses[part], rows=part)
                run.keys.append(batch["__key__"])
                run.losses.append(losses.tolist())
                run.batches.append(batch)
                if len(run.keys) == 30:
                    loader.set_weights({"web": 3})
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(tmp_path_factory.mktemp("run"))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command in this process; its exit code, its output and its errors."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["streamload", *map(str, arguments)])
        code: Any = 0
        try:
            main()
        except SystemExit as exc:
            code = exc.code or 0
        return code, *capsys.readouterr()

    return call


def test_a_step_is_shown_with_its_rows_losses_and_images(
    run: Trained, command: Command, tmp_path: Path
) -> None:
    code, text, _ = command("replay", run.journal, "--step", 44, "--json")
    rows = json.loads(text)
    assert code == 0
    assert [row["key"] for row in rows] == run.keys[44]
    worst = sorted(range(ROWS), key=lambda row: -run.losses[44][row])[:8]
    for row in rows:
        number = row["row"]
        assert row["source"] == ("web" if row["url"] in run.urls[4:] else "good")
        assert f"index {int(row['key'][-6:])} " in row["caption"]
        assert (row["loss"] is not None) == (number in worst)
        if number in worst:
            assert row["loss"] == pytest.approx(run.losses[44][number], rel=1e-3)
    page, folder = tmp_path / "page.html", tmp_path / "images"
    code, text, _ = command(
        "replay", run.journal, "--step", 44, "--rows", "2,4-5", "--html", page, "--save", folder
    )
    assert code == 0
    assert "as recorded" in text
    shown = page.read_text()
    assert shown.count("data:image/png") == 3
    assert "<b>" not in shown
    assert f"&lt;b&gt;/{run.keys[44][4][4:]}" in shown
    saved = json.loads((folder / "rows.json").read_text())
    assert [row["row"] for row in saved] == [2, 4, 5]
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
    expected = (run.batches[44]["image"][4] * std + mean) * 255
    pixels = np.asarray(Image.open(folder / "00004.png"))
    assert np.abs(pixels.transpose(2, 0, 1) - expected.numpy()).max() <= 0.51


def test_verify_names_what_differs(run: Trained, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text, _ = command("replay", run.journal, "--step", 70, "--verify", "--json")
    assert json.loads(text)["verified"] is True
    monkeypatch.setattr("simplejpeg.__version__", "0.0.1")
    code, _, error = command("replay", run.journal, "--step", 70, "--verify")
    assert code == 2
    assert "simplejpeg was" in error


def test_a_rank_and_a_step_that_were_not_are_errors(run: Trained, command: Command) -> None:
    assert "there is no rank 1" in command("replay", run.journal, "--step", 3, "--rank", 1)[2]
    assert f"no step {STEPS}; it has 0 to {STEPS - 1}" in command("replay", run.journal, "--step", STEPS)[2]
    assert "has no journal" in command("replay", run.folder / "shards", "--step", 3)[2]
    assert "expected numbers below 12" in command("replay", run.journal, "--step", 3, "--rows", "12")[2]


def test_a_planted_sample_is_the_first_suspect_of_each_spike(run: Trained, command: Command) -> None:
    code, text, _ = command("runs", "spikes", run.journal, "--json")
    spikes = json.loads(text)
    assert code == 0
    poisoned = [step for step, keys in enumerate(run.keys) if any(POISON in key for key in keys)]
    assert sorted(spike["step"] for spike in spikes) == poisoned
    for spike in spikes:
        suspect = spike["suspects"][0]
        assert POISON in suspect["key"]
        assert suspect["loss"] == pytest.approx(max(run.losses[spike["step"]]), rel=1e-3)
        of_web = [
            loss
            for keys, losses in zip(run.keys[:45], run.losses[:45], strict=True)
            for key, loss in zip(keys, losses, strict=True)
            if key[4:9] >= "00004"
        ]
        if spike["step"] < STEPS // 2:
            assert suspect["usual"] == pytest.approx(np.mean(of_web), rel=1e-3)
    without = json.loads(command("runs", "spikes", run.journal, "--json", "--no-rows")[1])
    assert [spike["suspects"][0]["row"] for spike in without] == [
        spike["suspects"][0]["row"] for spike in spikes
    ]


@pytest.mark.deep
def test_twenty_planted_samples_are_among_the_first_suspects(tmp_path: Path, command: Command) -> None:
    urls = [str(path) for path in write_shards(tmp_path / "shards", [40] * 6)]
    for seed in range(20):
        noise, journal = random.Random(seed), tmp_path / f"run-{seed}"
        poison = f"{noise.randrange(6):05d}{noise.randrange(40):06d}"
        with streamload.make_loader(
            urls,
            batch_size=32,
            num_workers=0,
            output="dict",
            seed=seed,
            cache_dir=tmp_path / "cache",
            order=Order(num_batches=30, journal=journal),
            batches=Batches(with_keys=True),
        ) as loader:
            for batch in loader:
                usual = [noise.lognormvariate(0.7, 0.4) for _ in range(32)]  # a tail of up to four times
                losses = [
                    (10 if key == poison else 1) * loss
                    for key, loss in zip(batch["__key__"], usual, strict=True)
                ]
                loader.report(loss=losses)
        spikes = json.loads(command("runs", "spikes", journal, "--json", "--steps", 8)[1])
        suspects = sorted(
            (row for spike in spikes for row in spike["suspects"]), key=lambda row: -row["loss"]
        )
        assert poison in [row["key"] for row in suspects[:8]], seed


def test_the_page_of_spikes_is_escaped(run: Trained, command: Command, tmp_path: Path) -> None:
    page = tmp_path / "spikes.html"
    assert command("runs", "spikes", run.journal, "--html", page)[0] == 0
    assert "<b>" not in page.read_text()
    assert "Suspects, not culprits" in page.read_text()


@pytest.mark.parametrize("key", ["<b>/00006000041", "<b>/00001000007"])
def test_the_steps_that_used_a_sample_are_found(run: Trained, command: Command, key: str) -> None:
    code, text, _ = command("runs", "used", run.journal, key, "--json")
    found = json.loads(text)
    assert code == 0
    assert found["covers"] == [[0, STEPS - 1]]
    assert [use["step"] for use in found["used"][key]] == run.steps_of(key)
    assert run.steps_of(key)


def test_a_shard_and_a_file_of_keys_are_looked_up(run: Trained, command: Command, tmp_path: Path) -> None:
    names = tmp_path / "keys.txt"
    names.write_text("<b>/00002000001\n\n<b>/00002000002\n")
    code, text, _ = command("runs", "used", run.journal, run.urls[2], names, "--json")
    found = json.loads(text)["used"]
    assert code == 0
    for key in ("<b>/00002000001", "<b>/00002000002"):
        assert [use["step"] for use in found[key]] == run.steps_of(key)
    of_shard = [step for step, keys in enumerate(run.keys) for key in keys if key.startswith("<b>/00002")]
    assert sum(use["samples"] for use in found[run.urls[2]]) == len(of_shard)
    assert found[run.urls[2]][0]["step"] == min(of_shard)
    assert max(use["last"] for use in found[run.urls[2]]) == max(of_shard)
    code, _, error = command("runs", "used", run.journal, "missing", "--shard", run.urls[0])
    assert code == 2
    assert "has a usable sample 'missing'" in error


def test_runs_are_listed_and_shown(run: Trained, command: Command) -> None:
    assert run.journal in command("runs", "ls", run.folder)[1]
    (segment,) = json.loads(command("runs", "show", run.journal, "--json")[1])
    assert (segment["first"], segment["stop"], segment["used_until"]) == (0, STEPS, STEPS)
    assert [event["kind"] for event in segment["events"]] == ["weights"]
    assert "weights" in command("runs", "show", run.journal)[1]


def test_a_loader_that_cannot_be_pickled_is_named(tmp_path: Path, command: Command) -> None:
    run = trained(tmp_path, preprocess=lambda image: torch.zeros(3, 4, 4))
    code, _, error = command("replay", run.journal, "--step", 3)
    assert code == 2
    assert "preprocess= of the run's loader couldn't be pickled: give --loader" in error
