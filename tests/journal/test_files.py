"""A rank's file: torn tails are dropped, what was altered is refused, and nothing stops the training."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from streamload.errors import JournalError
from streamload.journal.files import Record, RecordWriter, path_of, read_records
from tests.support.disks import limited_file_size


def records(count: int) -> list[Record]:
    return [
        Record("steps", {"step": number}, {"digest": np.arange(number, number + 3, dtype=np.uint64)})
        for number in range(count)
    ]


def written(path: Path, count: int) -> list[int]:
    """A file of records; and its size after each."""
    writer = RecordWriter(path)
    writer.open()
    sizes = [path.stat().st_size]
    for record in records(count):
        writer.add(record)
        sizes.append(path.stat().st_size)
    return sizes


def shown(path: Path) -> list[str]:
    return [
        repr((record.kind, record.values, {name: array.tolist() for name, array in record.arrays.items()}))
        for record in read_records(path)
    ]


def test_a_file_that_is_cut_anywhere_goes_on_after_its_last_whole_record(tmp_path: Path) -> None:
    path = path_of(tmp_path, 0)
    sizes = written(path, 5)
    whole, all_shown = path.read_bytes(), shown(path)
    for size in range(sizes[2], len(whole)):
        path.write_bytes(whole[:size])
        count = sum(size >= other for other in sizes) - 1
        assert shown(path) == all_shown[:count]
        writer = RecordWriter(path)
        writer.open()
        writer.add(records(6)[5])
        assert len(shown(path)) == count + 1
        assert shown(path)[:count] == all_shown[:count]


def test_zeros_that_a_crash_left_are_dropped(tmp_path: Path) -> None:
    path = path_of(tmp_path, 0)
    written(path, 3)
    expected = shown(path)
    path.write_bytes(path.read_bytes() + bytes(100))
    assert shown(path) == expected


def test_a_bit_that_was_flipped_is_never_another_record(tmp_path: Path) -> None:
    path = path_of(tmp_path, 0)
    written(path, 4)
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            with pytest.raises(JournalError):
                shown(path)


def test_of_two_writers_of_a_file_the_later_one_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = path_of(tmp_path, 0)
    earlier, later = RecordWriter(path), RecordWriter(path)
    first, second, third = records(3)
    earlier.open()
    earlier.add(first)
    later.open()
    later.add(second)
    for _ in range(2):
        earlier.add(third)
    later.add(third)
    assert [record.values["step"] for record in read_records(path)] == [0, 1, 2]
    assert [line for line in caplog.messages if "another loader writes" in line] == [caplog.messages[-1]]


def test_a_file_that_cannot_grow_is_warned_of_once_and_the_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "streamload")
    path = path_of(tmp_path, 0)
    writer = RecordWriter(path)
    writer.open()
    more = records(4)
    writer.add(more[0])
    before = shown(path)
    with limited_file_size(path.stat().st_size + 10):
        writer.add(more[1])
        writer.add(more[2])
    assert shown(path) == before
    assert len([line for line in caplog.messages if "can't be written" in line]) == 1
    writer.add(more[3])  # there is room again
    assert [record.values["step"] for record in read_records(path)] == [0, 1, 2, 3]
