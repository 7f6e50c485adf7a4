"""Directories of another form than today's: a copy with such an index is fetched again, and never misread."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

import streamload
from streamload.cache.shard import shard_of
from streamload.cache.tier import Tier
from streamload.shards import index as index_module
from streamload.shards import record
from streamload.shards.index import IndexReader
from streamload.testing.server import ShardServer
from streamload.testing.shards import read_oracle, write_shards
from tests.support import flat
from tests.support.indexes import WrittenIndex


def with_link(path: Path) -> None:
    """Append a sample whose caption is a hard link to that of the first one."""
    (first, members), *_ = read_oracle(path)
    with tarfile.open(path, "a") as tar:
        image = tarfile.TarInfo("zz.jpg")
        image.size = len(members["jpg"])
        tar.addfile(image, io.BytesIO(members["jpg"]))
        caption = tarfile.TarInfo("zz.txt")
        caption.type, caption.linkname = tarfile.LNKTYPE, f"{first}.txt"
        tar.addfile(caption)


def another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_FORMAT", 2)


def another_magic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_MAGIC", b"SLINDEX2")


def marked_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A null before what else is said of a sample with links."""
    pack_frame = index_module.pack_frame

    def marked(value: Any) -> bytes:
        is_linked = isinstance(value, list) and value[0] == "zz"
        return pack_frame([*value, None] if is_linked else value)

    monkeypatch.setattr(index_module, "pack_frame", marked)


def nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that doesn't say of which shard it is."""
    pack_header = index_module.pack_header
    monkeypatch.setattr(
        index_module,
        "pack_header",
        lambda meta: pack_header({name: value for name, value in meta.items() if name != "digest"}),
    )


@pytest.mark.parametrize("another_form", [another_number, another_magic, marked_links, nameless])
def test_a_copy_whose_index_has_another_form_is_fetched_again(
    another_form: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = write_shards(tmp_path / "data", [5])
    with_link(path)

    def batches(server: ShardServer) -> list[Any]:
        with flat.make_loader(
            f"{server.url}/00000.tar", train=False, num_workers=0, with_keys=True, output="dict",
            cache_dir=tmp_path / "cache", cache_size="50MB", max_bad_samples=None,
        ) as loader:  # fmt: skip
            return [(batch["__key__"], batch["text"], batch["image"].sum().item()) for batch in loader]

    with ShardServer(path.parent) as server:
        expected = batches(server)
        assert expected[-1][0][-1] == "zz"
        copy = Tier(tmp_path / "cache").root / "shards" / shard_of(f"{server.url}/00000.tar", None).digest
        with IndexReader(copy) as reader:
            entries, meta, size = reader.entries(range(reader.count)), reader.meta, reader.size
        (copy / "index").unlink()
        (copy / "names").unlink()
        with monkeypatch.context() as before:
            another_form(before)
            with WrittenIndex(copy, meta) as index:
                index.append(entries)
                index.finish(size=size or 0)
        fetched = len(server.ranges("00000.tar"))
        assert batches(server) == expected
        assert len(server.ranges("00000.tar")) == fetched + 1
        assert batches(server) == expected
        assert len(server.ranges("00000.tar")) == fetched + 1


def test_a_state_of_another_format_is_refused(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path / "data", [5])
    with flat.make_loader(str(path), cache_dir=tmp_path / "cache") as loader:
        state = loader.state_dict()
        assert state["streamload_state"] == 1
        for number in (0, 2, 3):
            with pytest.raises(streamload.errors.StateMismatch, match=f"format {number}; .* reads 1"):
                loader.load_state_dict({**state, "streamload_state": number})
