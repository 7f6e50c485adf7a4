"""Shards(keep="uids.npy"): the samples that a file lists, on any layout, after a resume; one copy a node."""

from __future__ import annotations

import io
import itertools
import json
import multiprocessing
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamload
from streamload.cache.directory import bytes_below
from streamload.cache.inventory import foreign
from streamload.cache.tier import Tier
from streamload.errors import CacheError, OptionError, StateMismatch
from streamload.facts.uids import UidList
from streamload.options import read_settings
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, read_oracle, write_shards
from tests.support import flat

COUNTS = [30, 17, 24]
PAIRS = np.dtype("u8,u8")


def uid_of(number: int) -> str:
    """32 hex digits; some have equal first halves."""
    generator = np.random.default_rng(number)
    first, second = generator.integers(0, 1 << 64, 2, np.uint64).tolist()
    return f"{first if number % 3 else number % 2:016x}{second:016x}"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards whose JSON has a uid, but for every ninth sample."""
    folder = tmp_path_factory.mktemp("uids") / "data"
    number = 0
    for path in write_shards(folder, COUNTS, options=ShardOptions(image_side=(8, 9))):
        samples = read_oracle(path)
        with tarfile.open(path, "w") as tar:
            for key, members in samples:
                uid: Any = (
                    uid_of(number)
                    if number % 9
                    else [None, 7, "zz" * 16, uid_of(number)[:-1], " " * 32][number // 9 % 5]
                )
                meta = {"uid": uid, "meta": {"id": uid}} if number % 18 else {}
                members["json"] = json.dumps(meta).encode()
                for extension, payload in members.items():
                    entry = tarfile.TarInfo(f"{key}.{extension}")
                    entry.size = len(payload)
                    tar.addfile(entry, io.BytesIO(payload))
                number += 1
    return folder


def pairs(uids: list[str]) -> np.ndarray[Any, Any]:
    return np.array([(int(uid[:16], 16), int(uid[16:], 16)) for uid in uids], PAIRS)


def listed() -> list[str]:
    """The uids of two in five samples, and those of other data."""
    return sorted(
        [*(uid_of(number) for number in range(sum(COUNTS)) if number % 5 < 2), *map(uid_of, range(900, 999))]
    )


@pytest.fixture
def subset(tmp_path: Path) -> str:
    np.save(tmp_path / "subset.npy", pairs(listed()))
    return str(tmp_path / "subset.npy")


def expected() -> list[str]:
    numbers = itertools.count()
    keys = [
        (f"{shard:05d}{index:06d}", next(numbers))
        for shard, count in enumerate(COUNTS)
        for index in range(count)
    ]
    return [key for key, number in keys if number % 9 and number % 5 < 2]


def make(urls: Any, cache: Path, **options: Any) -> streamload.Loader:
    defaults: dict[str, Any] = {"batch_size": 4, "num_workers": 0, "seed": 5, "cache_size": "100MB"}
    defaults |= {"with_keys": True, "output": "dict", "cache_dir": cache}
    return flat.make_loader(urls, **{**defaults, **options})


def keys_of(loader: streamload.Loader) -> list[str]:
    return [key for batch in loader for key in batch["__key__"]]


@pytest.mark.parametrize("form", ["u8,u8", ">u8,>u8", "S32", "U32", "upper"])
def test_samples_are_those_that_the_file_lists_whatever_its_form(
    form: str, data: Path, tmp_path: Path
) -> None:
    path, uids = tmp_path / "uids.npy", listed()
    if form == "upper":
        np.save(path, np.array([uid.upper() for uid in uids]))
    else:
        np.save(path, np.array(uids, form) if form[1:] == "32" else pairs(uids).astype(form))
    with make(str(data), tmp_path / "c", train=False, keep=path) as loader:
        assert keys_of(loader) == expected()
        assert loader.stats().samples_left_out == {"keep": sum(COUNTS) - len(expected())}
    (copy,) = (tmp_path / "c" / "columns").glob("*/uids")
    assert copy.stat().st_size == 16 * len(uids)


def test_the_field_with_the_uid_is_named(data: Path, subset: str, tmp_path: Path) -> None:
    with make(str(data), tmp_path / "c", train=False, keep=subset, keep_key="json:meta.id") as loader:
        assert keys_of(loader) == expected()


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.deep)])
def test_batches_and_counts_are_the_same_on_each_layout_and_after_a_resume(
    start: str, data: Path, subset: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"keep": subset, "multiprocessing_context": start}
    with ShardServer(data) as server:
        urls = f"{server.url}/{{00000..00002}}.tar"
        with make(urls, tmp_path / "c", num_workers=2, **options) as loader:
            steps, left_out, states = [], [], []
            for batch in loader:
                steps.append(sorted(batch["__key__"]))
                states.append(loader.state_dict())
            left_out = loader.stats().samples_left_out
        assert {*itertools.chain(*steps)} <= {*expected()}
        ranks = [
            make(urls, tmp_path / "d", batch_size=2, rank=rank, world_size=2, groups=1, **options)
            for rank in range(2)
        ]
        rows = [sorted([*one["__key__"], *other["__key__"]]) for one, other in zip(*ranks, strict=True)]
        assert rows == steps
        counts = [rank.stats().samples_left_out["keep"] for rank in ranks]
        assert sum(counts) == left_out["keep"] == sum(COUNTS) - len(expected())
        for rank in ranks:
            rank.close()
        for cut in (0, 2, len(steps) - 2):
            with make(urls, tmp_path / f"e{cut}", num_workers=cut % 3, **options) as loader:
                loader.load_state_dict(states[cut])
                assert [sorted(batch["__key__"]) for batch in loader] == steps[cut + 1 :]
                assert loader.stats().samples_left_out == left_out


def test_a_resume_with_another_list_is_refused_and_one_with_the_same_uids_is_not(
    data: Path, subset: str, tmp_path: Path
) -> None:
    with make(str(data), tmp_path / "c", keep=subset) as loader:
        next(iter(loader))
        state = loader.state_dict()
    np.save(tmp_path / "same.npy", np.array(listed()))
    with make(str(data), tmp_path / "c", keep=tmp_path / "same.npy") as loader:
        loader.load_state_dict(state)
    np.save(tmp_path / "other.npy", pairs(listed()[1:]))
    others: list[dict[str, Any]] = [{"keep": tmp_path / "other.npy"}, {}, {"keep": bool}]
    for options in (*others, {"keep": subset, "keep_key": "json:meta.id"}):
        with (
            make(str(data), tmp_path / "c", **options) as loader,
            pytest.raises(StateMismatch, match="listed uids"),
        ):
            loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "can't be read as a .npy file"),
        (b"", "can't be read as a .npy file"),
        (b"\x93NUMPY\x01", "can't be read as a .npy file"),
        (np.array([None, "a"]), "can't be read as a .npy file"),
        (pairs([]), "can't be read as a .npy file|there are no uids in it"),
        (pairs(listed()[::-1]), "aren't sorted, from number 1 on"),
        (pairs([*listed(), listed()[3]]), f"aren't sorted, from number {len(listed())} on"),
        (np.array([*listed()[5:9], *listed()[:2]]), "aren't sorted, from number 4 on"),
        (np.arange(9, dtype=np.uint64), "expected one uid a row"),
        (np.zeros((4, 2), np.uint64), "expected one uid a row"),
        (np.zeros(4, "i8,i8"), "expected one uid a row"),
        (np.zeros(4, "u8,u8,u8"), "expected one uid a row"),
        (np.zeros(4, "u4,u4"), "expected one uid a row"),
        (np.array(["a" * 31]), "expected one uid a row"),
        (np.array(["g" * 32]), "isn't 32 hex digits"),
        (np.array(["é" * 32]), "isn't 32 hex digits"),
        (np.array(["ab " * 10 + "cd", "a" * 32]), "isn't 32 hex digits"),
        (np.array(["a" * 30, "a" * 32]), "isn't 32 hex digits"),
    ],
)
def test_a_file_that_lists_no_uids_is_an_error(
    content: Any, message: str, data: Path, tmp_path: Path
) -> None:
    path = tmp_path / "uids.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content, allow_pickle=True)
    with pytest.raises(OptionError, match=message):
        make(str(data), tmp_path / "c", keep=path)


@pytest.mark.parametrize("key", ["uid", "json", "json:", "txt:a"])
def test_a_key_that_is_no_field_is_an_error(key: str, data: Path, subset: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"is not a key|expected a field of a JSON member"):
        make(str(data), tmp_path / "c", keep=subset, keep_key=key)


def _looked_up(subset: str, cache: str, connection: Any) -> None:
    uids = UidList.read(Path(subset), read_settings(cache_dir=cache, cache_size="100MB"))
    found = uids.has(np.array([[0, 0], [int(listed()[3][:16], 16), int(listed()[3][16:], 16)]], np.uint64))
    connection.send((found.tolist(), (Path(cache) / "columns" / uids.digest / "uids").stat().st_ino))


def test_processes_that_begin_together_share_one_copy(subset: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(6)]
    processes = [
        context.Process(target=_looked_up, args=(subset, str(tmp_path / "c"), theirs)) for _, theirs in pipes
    ]
    for process in processes:
        process.start()
    answers = [ours.recv() for ours, _ in pipes]
    for process in processes:
        process.join()
    assert [found for found, _ in answers] == [[False, True]] * 6
    assert len({inode for _, inode in answers}) == 1


def test_a_damaged_cut_or_deleted_copy_is_made_again(data: Path, subset: str, tmp_path: Path) -> None:
    settings = read_settings(cache_dir=str(tmp_path / "c"), cache_size="100MB")
    uids = UidList.read(Path(subset), settings)
    first, _ = uids.map()
    path = tmp_path / "c" / "columns" / uids.digest / "uids"
    whole = path.read_bytes()
    for damaged in (whole[:-8], b"", whole[:40] + b"\0" + whole[41:], None):
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        uids.map()
        assert path.read_bytes() == whole
    assert Counter(first.tolist()) == Counter(pairs(listed())["f0"].tolist())  # the mapped one is as it was
    path.with_name("uids.new").write_bytes(b"of a killed process")
    tier = Tier.open(tmp_path / "c")
    assert not list(foreign(tier))
    assert tier.used_bytes >= bytes_below(path.parent) >= len(whole)
    np.save(subset, pairs(listed()[1:]))
    path.unlink()
    with pytest.raises(OptionError, match="has changed since the loader was made"):
        uids.map()


def test_a_list_without_room_is_an_error(data: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "many.npy", np.zeros(200_000, PAIRS))
    with (
        make(str(data), tmp_path / "c", keep=tmp_path / "many.npy", cache_size="2MB", train=False) as loader,
        pytest.raises(CacheError, match=r"3,200,000 bytes have no room .*raise cache_size"),
    ):
        keys_of(loader)
