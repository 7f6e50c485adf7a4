"""OpenCLIP's TensorBoard and wandb get the loader's numbers: by its own module, whose training step is short.

That its real training has them in its log is in openclip/test_training.py. wandb isn't installed: a recorder
with the one function that OpenCLIP calls stands in.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.torchvision_stub import define_torchvision_schemas
from streamload.integrations.openclip.data import EpochBatches
from streamload.integrations.openclip.logs import report_in
from streamload.loader import make_loader
from streamload.testing.shards import write_shards

define_torchvision_schemas()
from open_clip_train import main, train  # noqa: E402


class Recorder:
    """Notes scalars, as a writer and as the wandb module."""

    def __init__(self) -> None:
        self.scalars: dict[int, dict[str, float]] = {}
        self.flushed = False

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.setdefault(step, {})[name] = value

    def log(self, data: dict[str, float], step: int) -> None:
        self.scalars.setdefault(step, {}).update(data)

    def flush(self) -> None:
        self.flushed = True


def short_epoch(
    model: Any, data: Any, loss: Any, epoch: int, optimizer: Any, scaler: Any, scheduler: Any,
    dist_model: Any, args: Any, tb_writer: Any = None,
) -> None:  # fmt: skip
    """What OpenCLIP's train_one_epoch does with its loggers, in the same order."""
    for step, _ in enumerate(data["train"].dataloader):
        if step % 5 == 0:
            logging.getLogger().info(f"Train Epoch: {epoch} [{step}] Loss: 1.0 (1.0)")
            log_data = {"train/data_time": 0.1, "train/loss": 1.0}
            for name, value in log_data.items():
                tb_writer.add_scalar(name, value, step)
            train.wandb.log(log_data, step=step)
    tb_writer.flush()


def short_epoch_of_main(state: Any, data: Any, args: Any, tb_writer: Any = None) -> None:
    """What the development version's train_one_epoch does: its line comes last, in fewer steps."""
    for step, _ in enumerate(data["train"].dataloader):
        log_data = {"train/data_time": 0.1, "train/loss": 1.0}
        for name, value in log_data.items():
            tb_writer.add_scalar(name, value, step)
        train.trackio.log(log_data, step=step)
        if step % 5 == 0:
            logging.getLogger("open_clip_train.train").info(f"Train Epoch: 0 [{step}] Loss: 1.0 (1.0)")
    tb_writer.flush()


def test_each_of_openclips_loggers_gets_the_same_numbers_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    writer, wandb = Recorder(), Recorder()
    monkeypatch.setattr(main, "train_one_epoch", short_epoch)
    monkeypatch.setattr(train, "wandb", wandb)
    (path,) = write_shards(tmp_path, [40], seed=3)
    restore = report_in(main, train)
    with make_loader(
        str(path), batch_size=4, num_workers=0, cache_dir=tmp_path / "cache", cache_size="1GB"
    ) as loader:
        data = {"train": SimpleNamespace(dataloader=EpochBatches(loader, SimpleNamespace(), 10, 40))}
        main.train_one_epoch(None, data, None, 0, None, None, None, None, None, tb_writer=writer)
        other = {"train": SimpleNamespace(dataloader=[1, 2])}
        main.train_one_epoch(None, other, None, 1, None, None, None, None, None, tb_writer=writer)
    assert writer.flushed
    assert writer.scalars.keys() == {0, 5}
    assert writer.scalars[5] == wandb.scalars[5]
    assert {"train/loss", "loader/data_wait", "loader/stage/decode"} <= writer.scalars[5].keys()
    lines = [record.getMessage() for record in caplog.records if "Train Epoch" in record.getMessage()]
    assert ["Data wait:" in line for line in lines] == [True, True, False]
    assert train.wandb is wandb
    restore()
    assert main.train_one_epoch is short_epoch


def test_the_development_versions_own_logger_and_its_denser_metrics_have_the_numbers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    writer, trackio, factory = Recorder(), Recorder(), logging.getLogRecordFactory()
    monkeypatch.setattr(main, "train_one_epoch", short_epoch_of_main)
    monkeypatch.setattr(train, "trackio", trackio, raising=False)
    (path,) = write_shards(tmp_path, [40], seed=3)
    restore = report_in(main, train)
    with make_loader(
        str(path), batch_size=4, num_workers=0, cache_dir=tmp_path / "cache", cache_size="1GB"
    ) as loader:
        data = {"train": SimpleNamespace(dataloader=EpochBatches(loader, SimpleNamespace(), 10, 40))}
        main.train_one_epoch(None, data, None, tb_writer=writer)
    restore()
    assert writer.scalars.keys() == set(range(10))
    assert writer.scalars == trackio.scalars
    assert all("loader/data_wait" in scalars for scalars in writer.scalars.values())
    lines = [record.getMessage() for record in caplog.records if "Train Epoch" in record.getMessage()]
    waits = [f"Data wait: {writer.scalars[step]['loader/data_wait']:.1%}" for step in (0, 5)]
    assert [wait in line for line, wait in zip(lines, waits, strict=True)] == [True, True]
    assert logging.getLogRecordFactory() is factory
    assert train.trackio is trackio
