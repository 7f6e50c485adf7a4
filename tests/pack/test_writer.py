"""`streamload.ShardWriter`: what is in a folder is whole, and a run continues where the last one stopped."""

import itertools
import json
import os
import random
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from webdataset.writer import ShardWriter as TarShards

import streamload
from streamload.errors import OptionError
from streamload.testing.shards import read_oracle


def samples(count):
    return [
        {"__key__": f"a/{n:04d}", "txt": f"text {n}", "bin": random.Random(n).randbytes(n % 7 * 100)}
        for n in range(count)
    ]


def written(folder):
    """The samples of the shards that are there, and the files' bytes."""
    paths = sorted(folder.glob("*.tar"))
    return [sample for path in paths for sample in read_oracle(path)], {
        p.name: p.read_bytes() for p in folder.iterdir()
    }


def expected(count):
    return [(s["__key__"], {"txt": s["txt"].encode(), "bin": s["bin"]}) for s in samples(count)]


def write(folder, count, stop=None, **limits):
    with streamload.ShardWriter(folder, **limits) as writer:
        for sample in itertools.islice(samples(count), writer.samples, stop):
            writer.write(sample)
    return writer


def test_shards_end_by_samples_or_bytes(tmp_path):
    writer = write(tmp_path / "a", 25, max_samples=10)
    assert writer.sizes == {"00000.tar": 10, "00001.tar": 10, "00002.tar": 5}
    assert writer.samples == 25
    every, files = written(tmp_path / "a")
    assert every == expected(25)
    assert json.loads(files["sizes.json"]) == writer.sizes
    assert files.keys() == {*writer.sizes, "sizes.json"}
    writer = write(tmp_path / "b", 25, max_bytes=1000)
    every, files = written(tmp_path / "b")
    assert every == expected(25)
    for name in [*writer.sizes][:-1]:
        payloads = [sum(map(len, members.values())) for _, members in read_oracle(tmp_path / "b" / name)]
        assert sum(payloads) >= 1000 > sum(payloads[:-1])


def test_it_writes_what_webdataset_writes(tmp_path):
    values = {
        "__key__": "é" * 200, "jpg": Image.new("RGB", (8, 8)), "cls": 7, "json": {"a": [1]}, "npy": np.ones(3)
    }  # fmt: skip
    with streamload.ShardWriter(tmp_path / "ours") as writer:
        writer.write(values)
    with TarShards(f"{tmp_path}/%05d.tar", verbose=0, format="GNU_FORMAT") as theirs:
        theirs.write(values)
    assert read_oracle(tmp_path / "ours" / "00000.tar") == read_oracle(tmp_path / "00000.tar")


def test_a_loader_reads_it(tmp_path):
    with streamload.ShardWriter(tmp_path / "50%", max_samples=3) as writer:
        for number in range(8):
            writer.write({"__key__": f"{number}", "png": Image.new("RGB", (9, 9)), "txt": f"text {number}"})
    batches = streamload.Batches(with_keys=True)
    with streamload.make_loader(
        str(tmp_path / "50%"), batch_size=4, batches=batches, train=False, num_workers=0
    ) as loader:
        assert loader.num_samples == 8
        found = {
            key: text for _, texts, names in loader for key, text in zip(names["__key__"], texts, strict=True)
        }
    assert found == {f"{number}": f"text {number}" for number in range(8)}


def test_an_error_drops_the_shard_that_was_begun_and_a_new_writer_continues(tmp_path):
    writer = streamload.ShardWriter(tmp_path / "a", max_samples=10)

    def stopped():
        with writer:
            for sample in samples(17):
                writer.write(sample)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stopped()
    assert writer.samples == 10
    every, files = written(tmp_path / "a")
    assert every == expected(10)
    assert files.keys() == {"00000.tar", "sizes.json"}
    write(tmp_path / "a", 25, max_samples=10)
    write(tmp_path / "b", 25, max_samples=10)
    assert written(tmp_path / "a") == written(tmp_path / "b")
    assert write(tmp_path / "a", 25, max_samples=10).samples == 25  # nothing is left to write
    assert written(tmp_path / "a") == written(tmp_path / "b")


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("number", range(8))
def test_a_kill_at_any_step_of_a_shard_loses_and_doubles_nothing(tmp_path, step, number):
    child = os.fork()
    if child == 0:
        owner = os if step == "fsync" else Path
        calls, function = itertools.count(), getattr(owner, step)

        def killing(*arguments):
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments)

        setattr(owner, step, killing)
        write(tmp_path / "a", 25, max_samples=10)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or number >= {"fsync": 12, "replace": 6}[step]
    every, _ = written(tmp_path / "a")
    assert every == expected(len(every))
    assert len(every) in {0, 10, 20, 25}
    write(tmp_path / "a", 25, max_samples=10)
    write(tmp_path / "b", 25, max_samples=10)
    assert written(tmp_path / "a") == written(tmp_path / "b")


@pytest.mark.parametrize(
    ("sample", "says"),
    [
        ({"txt": "a"}, "__key__=None"),
        ({"__key__": "a"}, "at least one member"),
        ({"__key__": "a.b", "txt": "a"}, "'a.b' with the members .'txt'"),
        ({"__key__": "a", "x/txt": "a"}, "with the members .'x/txt'"),
        ({"__key__": "first", "txt": "again"}, "twice in a row"),
        ({"__key__": "b", "txt": "a", "TXT": "b"}, "none of them twice"),
        ({"__key__": "a\0b", "txt": "a"}, "expected a path"),
        ({"__key__": "a" * 70_000, "txt": "a"}, "65,536 bytes"),
    ],
)
def test_what_a_loader_would_read_as_something_else_is_refused(tmp_path, sample, says):
    with streamload.ShardWriter(tmp_path) as writer:
        writer.write({"__key__": "first", "txt": "a"})
        with pytest.raises(OptionError, match=says):
            writer.write(sample)
        with pytest.raises(ValueError, match="no handler"):
            writer.write({"__key__": "b", "strange": 1})
        writer.write({"__key__": "c.d/e", "txt": "a"})
    assert [key for key, _ in read_oracle(tmp_path / "00000.tar")] == ["first", "c.d/e"]


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "train-00000.tar").write_bytes(b"")
    with pytest.raises(OptionError, match="other tars"):
        streamload.ShardWriter(tmp_path)
    with pytest.raises(OptionError, match="max_samples=0"):
        streamload.ShardWriter(tmp_path / "b", max_samples=0)


def test_a_closed_writer_takes_nothing(tmp_path):
    writer = write(tmp_path, 3)
    writer.close()
    with pytest.raises(ValueError, match="is closed"):
        writer.write({"__key__": "b", "txt": "a"})
    assert written(tmp_path)[1].keys() == {"00000.tar", "sizes.json"}


def test_a_folder_has_one_writer_at_a_time(tmp_path):
    first = streamload.ShardWriter(tmp_path)
    first.write(samples(1)[0])
    with pytest.raises(OptionError, match="is being written by another"):
        streamload.ShardWriter(tmp_path)
    child = os.fork()
    if child == 0:
        time.sleep(60)  # a worker that outlives the writer
        os._exit(0)
    try:
        first.close()
        assert write(tmp_path, 4).samples == 4
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert written(tmp_path)[0] == expected(4)
    dropped = streamload.ShardWriter(tmp_path)
    del dropped
    assert write(tmp_path, 4).samples == 4


@pytest.mark.parametrize("is_ended_by", ["write", "close"])
def test_a_full_disk_leaves_no_half_shard_whatever_is_called_then(tmp_path, is_ended_by):
    """A limit of the process on files' sizes stands for the disk's end; then there is room again."""
    writer = streamload.ShardWriter(tmp_path, max_samples=2)
    for sample in samples(3):
        writer.write(sample)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            writer.write(
                {"__key__": "b", "bin": bytes(1 << 20)}
            ) if is_ended_by == "write" else writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    writer.close()
    assert (writer.samples, writer.sizes) == (2, {"00000.tar": 2})
    assert written(tmp_path)[0] == expected(2)
    assert written(tmp_path)[1].keys() == {"00000.tar", "sizes.json"}
    write(tmp_path, 5, max_samples=2)
    assert written(tmp_path)[0] == expected(5)
