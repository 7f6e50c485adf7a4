"""The loader's numbers in TensorBoard's own files, by the Trainer, Lightning and a plain loop.

W&B and MLflow aren't installed here: that names and values are such as they take is in
tests/observe/test_live.py.
"""

from __future__ import annotations

import csv
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboardX import SummaryWriter
from tensorboardX.proto.event_pb2 import Event
from torch.utils.data import DataLoader

from streamload.testing.shards import write_shards
from tests.integrations.test_lightning import make as make_for_lightning
from tests.integrations.test_lightning import noting_model
from tests.integrations.test_lightning import trainer as trainer_of_lightning
from tests.integrations.test_transformers import Notes, make

OURS = {"loader/samples_per_second", "loader/data_wait", "loader/ready_batches", "loader/stage/decode"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("trackers")
    write_shards(place / "data", [40, 40], seed=3)
    return place


@pytest.fixture(autouse=True)
def advice_of_libraries() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """The scalars in TensorBoard's files below a folder, by name and step."""
    found: dict[str, dict[int, float]] = {}
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            event = Event.FromString(content[at + 12 : at + 12 + length])
            at += 12 + length + 4
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def test_a_plain_loop_writes_one_flat_dict(place: Path, tmp_path: Path) -> None:
    with make(place, num_workers=0) as loader, SummaryWriter(str(tmp_path)) as writer:
        for step, _ in enumerate(loader):
            if step % 8 == 7:
                for name, value in loader.metrics().items():
                    writer.add_scalar(name, value, step)
    found = scalars(tmp_path)
    assert found.keys() >= OURS
    assert set(found["loader/data_wait"]) == {7, 15}
    assert all(0 <= value <= 1 for value in found["loader/data_wait"].values())


def test_the_trainer_logs_the_loaders_numbers_with_its_own_if_asked(place: Path, tmp_path: Path) -> None:
    from transformers import TrainingArguments

    from streamload.integrations.transformers import LoaderMetrics, Trainer

    for wanted in (True, False):
        folder = tmp_path / str(wanted)
        arguments = TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            max_steps=6,
            logging_steps=2,
            per_device_train_batch_size=5,
            save_strategy="no",
            report_to=["tensorboard"],
            disable_tqdm=True,
        )
        with make(place, num_workers=0) as loader:
            callbacks = [LoaderMetrics()] if wanted else []
            trainer = Trainer(Notes(), arguments, train_dataset=loader, callbacks=callbacks)
            trainer.train()
        found = {name.removeprefix("train/"): steps for name, steps in scalars(folder).items()}
        assert set(found["loss"]) == {2, 4, 6}
        ours = {name for name in found if name.startswith("loader/")}
        assert ours >= OURS if wanted else not ours
        if wanted:
            assert set(found["loader/data_wait"]) == {2, 4, 6}
            assert "loader/data_wait" in trainer.state.log_history[0]


def test_lightning_logs_the_loaders_numbers_to_each_of_its_loggers(place: Path, tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    from streamload.integrations.lightning import LoaderMetrics as LightningMetrics

    paths = [str(path) for path in sorted((place / "data").glob("*.tar"))]
    loggers = [CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "board")]
    trainer = trainer_of_lightning(
        tmp_path, max_steps=6, log_every_n_steps=2, logger=loggers, callbacks=[LightningMetrics()]
    )
    with make_for_lightning(paths, tmp_path, num_workers=0) as loader:
        trainer.fit(noting_model(), loader)
    found = scalars(tmp_path / "board")
    assert found.keys() >= OURS
    assert set(found["loader/data_wait"]) == {2, 4, 6}
    (table,) = (tmp_path / "csv").rglob("metrics.csv")
    with table.open() as lines:
        rows = list(csv.DictReader(lines))
    assert [row["step"] for row in rows if row["loader/data_wait"]] == ["2", "4", "6"]


def test_lightning_with_other_data_or_without_a_logger_logs_nothing(place: Path, tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    from streamload.integrations.lightning import LoaderMetrics as LightningMetrics

    paths = [str(path) for path in sorted((place / "data").glob("*.tar"))]
    with make_for_lightning(paths, tmp_path, num_workers=0) as loader:
        plain = DataLoader(list(loader), batch_size=None)
        for data, logger in ((loader, False), (plain, CSVLogger(tmp_path, "csv"))):
            trainer = trainer_of_lightning(
                tmp_path, max_steps=2, log_every_n_steps=1, logger=logger, callbacks=[LightningMetrics()]
            )
            trainer.fit(noting_model(), data)
    assert "loader/" not in "".join(path.read_text() for path in tmp_path.rglob("metrics.csv"))
