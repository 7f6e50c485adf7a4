"""What would make a step otherwise than it was is an error that names it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from streamload.errors import DatasetChanged, JournalError, StateMismatch
from streamload.journal.files import RecordWriter, path_of, read_records
from streamload.testing.shards import ShardOptions, read_oracle, write_shards
from tests.journal.runs import Data, Kind, Recorded, damage, spelled


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Data]:
    data = Data(tmp_path_factory.mktemp("shards"))
    with data.servers:
        yield data


def other_transform(image: Image.Image) -> torch.Tensor:
    levels = np.array(image.resize((4, 4)), dtype=np.float32)
    return torch.from_numpy(levels / 128).permute(2, 0, 1) + torch.rand(3, 1, 1)


def other_tokenizer(captions: list[str]) -> torch.Tensor:
    return spelled(captions) + 1


def recorded(data: Data, directory: Path, seed: int) -> Recorded:
    """A run of two sources, whose weights change."""
    run = Recorded(
        Kind({"urls": data.sources(a=3.0, b=1.0), "num_batches": 20}, ("weights",), (1,)),
        directory,
        random.Random(seed),
    )
    run.go()
    return run


def again(run: Recorded, **options: object) -> None:
    """Make all steps of a run again."""
    with run.make(0, 1, run.directory / "cold", **options) as loader:
        for _ in loader.at(0):
            pass


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"preprocess": other_transform}, "preprocess"),
        ({"tokenizer": other_tokenizer}, "tokenizer"),
        ({"seed": 8}, "seed"),
        ({"text_key": "json:digest"}, "text_key"),
    ],
)
def test_other_options_are_named(options: dict[str, object], says: str, data: Data, tmp_path: Path) -> None:
    run = recorded(data, tmp_path, 1)
    again(run)
    with pytest.raises(StateMismatch, match=says):
        again(run, **options)


def test_a_sample_that_can_be_read_no_more_is_named_by_its_step(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    paths = write_shards(directory, [30, 25], seed=3, options=ShardOptions(image_side=(6, 12)))
    run = Recorded(Kind({"urls": [str(path) for path in paths]}, ranks=(1,)), tmp_path, random.Random(2))
    run.go()
    again(run)
    size = paths[0].stat().st_size
    damage(paths[0], every=9)
    assert len(read_oracle(paths[0])) == 30
    with pytest.raises((JournalError, DatasetChanged), match=r"step \d+ would have other|00000\.tar"):
        again(run)
    assert paths[0].stat().st_size <= size


def test_a_shard_with_other_samples_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    paths = write_shards(directory, [30, 25], seed=3, options=ShardOptions(image_side=(6, 12)))
    run = Recorded(Kind({"urls": [str(path) for path in paths]}, ranks=(1,)), tmp_path, random.Random(2))
    run.go()
    write_shards(directory, [30, 24], seed=4, options=ShardOptions(image_side=(6, 12)))
    with pytest.raises((JournalError, DatasetChanged), match=r"step \d+ would have other|0000\d\.tar"):
        again(run)


def test_a_decision_that_was_altered_is_an_error(data: Data, tmp_path: Path) -> None:
    """Even by who writes its checksums anew."""
    changed = 0
    for seed in range(4):
        run = recorded(data, tmp_path / str(seed), seed) if (tmp_path / str(seed)).mkdir() is None else None
        assert run is not None
        path = path_of(run.journal, 0)
        records = list(read_records(path))
        places = [place for place, record in enumerate(records) if record.kind == "event"]
        path.unlink()
        writer = RecordWriter(path)
        writer.open()
        for place, record in enumerate(records):
            if places and place == places[0]:
                position, kind, value = record.values["event"]
                event = [position, kind, {**value, "shares": value["shares"][::-1]}]
                is_same = value["shares"] == value["shares"][::-1]
                changed += not is_same
                record = record._replace(values={**record.values, "event": event})
            writer.add(record)
        if places and not is_same:
            begin = next(
                record for record in reversed(records[: places[0]]) if record.kind == "segment"
            ).values
            with run.make(0, 1, run.directory / "cold") as loader, pytest.raises(JournalError, match="step"):
                list(loader.at(begin["step"], segment=begin["segment"]))
    assert changed


@pytest.mark.parametrize("changes", [4, pytest.param(36, marks=pytest.mark.deep)])
def test_a_byte_that_was_changed_in_place_is_noticed(changes: int, tmp_path: Path) -> None:
    """The file keeps its size and its names: only what a sample has differs."""
    directory, chance = tmp_path / "data", random.Random(changes)
    paths = write_shards(directory, [30, 25], seed=3, options=ShardOptions(image_side=(6, 12)))
    run = Recorded(Kind({"urls": [str(path) for path in paths]}, ranks=(1,)), tmp_path, random.Random(4))
    run.go()
    again(run)
    used = {key for step in run.steps for rows in step for key, *_ in rows}
    for _ in range(changes):
        path = chance.choice(paths)
        samples = [members for key, members in read_oracle(path) if key in used]
        payload = chance.choice(samples)[chance.choice(["txt", "jpg"])]
        whole = path.read_bytes()
        data = bytearray(whole)
        assert data.count(payload) == 1
        data[data.index(payload) + chance.randrange(len(payload))] ^= chance.randrange(1, 8)
        path.write_bytes(data)
        with pytest.raises((DatasetChanged, JournalError), match=rf"other bytes.*{path.name}|other samples"):
            again(run)
        path.write_bytes(whole)
    again(run)
