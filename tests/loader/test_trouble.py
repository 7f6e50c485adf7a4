"""Bad input and bad luck: a clear error or an exact count, within seconds, and nothing left behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import gzip
import io
import itertools
import json
import logging
import multiprocessing
import os
import random
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

import streamload
from streamload.cache.tier import Tier
from streamload.loader import worker_config
from streamload.loader.checks import BatchChecks, ShardChecks
from streamload.loader.state import sealed
from streamload.metrics import Counters
from streamload.origins.origin import OriginOptions
from streamload.prefetch import fallback
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, read_oracle, write_shards
from streamload.worker import loop
from streamload.worker.messages import Batch, OrderStep, RowSources
from streamload.worker.states import SealedStates
from tests.support import flat
from tests.support.tiers import flip, until

COUNTS = [20, 30, 25, 15]
NoLeaks = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    write_shards(tmp_path / "data", COUNTS, seed=11)
    with ShardServer(tmp_path / "data") as server:
        yield server


def make(urls: Any, tmp_path: Path, **options: Any) -> streamload.Loader:
    defaults = {"batch_size": 5, "num_workers": 2, "with_keys": True, "cache_dir": tmp_path / "cache"}
    return flat.make_loader(urls, **{**defaults, "cache_size": "1GB", **options})


def keys_of(loader: streamload.Loader) -> list[str]:
    return [key for _, _, origin in loader for key in origin["__key__"]]


def oracle(tmp_path: Path, *shards: int) -> list[str]:
    return sorted(k for shard in shards for k, _ in read_oracle(tmp_path / "data" / f"{shard:05d}.tar"))


def urls(server: ShardServer) -> str:
    return f"{server.url}/{{00000..00003}}.tar"


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        (Fault(status=404), streamload.errors.OriginNotFound, "404"),
        (Fault(status=403), streamload.errors.OriginDenied, "403"),
        (
            Fault(body=b"<!DOCTYPE html><html>Sign in</html>" * 50),
            streamload.errors.ShardFormatError,
            "a web page",
        ),
        (Fault(body=gzip.compress(bytes(5000))), streamload.errors.ShardFormatError, "gzip"),
        (Fault(body=b""), streamload.errors.ShardFormatError, "empty"),
        (
            Fault(body=bytes(random.Random(1).randbytes(9000))),
            streamload.errors.ShardFormatError,
            "not a tar",
        ),
    ],
)
@pytest.mark.sampled(3)
def test_a_shard_that_cannot_be_used_is_an_error_or_is_left_out(
    fault: Fault, error: type[Exception], says: str, server: ShardServer, tmp_path: Path
) -> None:
    server.misbehave("00001.tar", fault)
    with make(urls(server), tmp_path, on_error="raise") as loader, pytest.raises(error, match=says):
        keys_of(loader)
    with make(urls(server), tmp_path) as loader:
        for _ in range(2):
            assert sorted(keys_of(loader)) == oracle(tmp_path, 0, 2, 3)
        assert loader.stats().shards_given_up == 1
    server.misbehave("00001.tar")
    with make(urls(server), tmp_path) as loader:  # a new run asks again
        assert sorted(keys_of(loader)) == oracle(tmp_path, 0, 1, 2, 3)


@pytest.mark.parametrize("workers", [0, 3])
def test_a_cut_shard_gives_what_came_before_the_cut_and_says_so(
    workers: int, server: ShardServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = (tmp_path / "data" / "00001.tar").read_bytes()
    server.misbehave("00001.tar", Fault(body=whole[: len(whole) // 2 + 100]))
    with make(urls(server), tmp_path, num_workers=workers, batch_size=1) as loader:
        keys = keys_of(loader)
        before = [key for key in oracle(tmp_path, 1) if key in keys]
        assert 10 <= len(before) <= 16
        assert before == oracle(tmp_path, 1)[: len(before)]
        assert sorted(keys) == sorted(before + oracle(tmp_path, 0, 2, 3))
        assert keys_of(loader) != keys
    if not workers:
        assert "00001.tar is skipped after" in caplog.text
        assert "cut" in caplog.text


def test_all_shards_missing_is_an_error_and_no_endless_loop(server: ShardServer, tmp_path: Path) -> None:
    with (
        make(f"{server.url}/nowhere/{{0..9}}.tar", tmp_path) as loader,
        pytest.raises(streamload.errors.NoValidSamples, match=r"none of \d+ shards could be read: .*404"),
    ):
        keys_of(loader)


def test_missing_shards_say_nothing_of_keys(server: ShardServer, tmp_path: Path) -> None:
    """An evaluation reads as listed: three that are missing, then one without captions, then good ones."""
    index_only = write_shards(tmp_path / "bare", [4], options=ShardOptions(without_text_every=1))
    missing = [f"{server.url}/nowhere/{n}.tar" for n in range(3)]
    mixed = [*missing, str(index_only[0]), *(f"{server.url}/0000{n}.tar" for n in range(4))]
    with make(mixed, tmp_path, train=False, max_bad_shards=None) as loader:
        assert sorted(keys_of(loader)) == oracle(tmp_path, 0, 1, 2, 3)
        assert loader.stats().shards_given_up == 3


@pytest.fixture
def many(tmp_path: Path) -> Iterator[ShardServer]:
    write_shards(tmp_path / "data", [8] * 20, seed=12)
    with ShardServer(tmp_path / "data") as server:
        yield server


def test_a_run_that_gives_up_more_than_a_few_shards_says_so_and_ends(
    many: ShardServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{many.url}/{{00000..00019}}.tar"
    for place in range(3):
        many.misbehave(f"{place:05d}.tar", Fault(status=404))
    said = "training continues without their samples"
    with (
        make(url, tmp_path, max_bad_shards=0.1) as loader,
        pytest.raises(streamload.errors.TooManyBadShards, match=r"3 of \d+ shards.*max_bad_shards=0\.1"),
    ):
        keys_of(loader)
    assert caplog.text.count(said) == 1
    for limit in (0.15, None):
        with make(url, tmp_path, batch_size=8, max_bad_shards=limit) as loader:
            assert len(keys_of(loader)) == 17 * 8
            assert loader.stats().shards_given_up == 3
    assert caplog.text.count(said) == 3
    many.misbehave("00000.tar")
    with make(url, tmp_path, batch_size=8, max_bad_shards=0.0, cache_dir=tmp_path / "another") as loader:
        assert len(keys_of(loader)) == 18 * 8  # one or two may be any accident


def test_shards_that_an_earlier_run_had_and_that_are_gone_say_nothing_about_their_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another data set of the same server, in the cache but for a shard that is missing."""
    write_shards(tmp_path / "removed", [5] * 8)
    write_shards(tmp_path / "data", [5] * 5)
    with (
        ShardServer(tmp_path / "removed") as server,
        make(f"{server.url}/{{00006..00007}}.tar", tmp_path, num_workers=0) as loader,
    ):
        assert len(keys_of(loader)) == 10
    with ShardServer(tmp_path / "data", port=int(server.url.rpartition(":")[2])) as server:
        server.misbehave("00000.tar", Fault(status=404))
        for _ in range(2):
            with make(f"{server.url}/{{00000..00004}}.tar", tmp_path, origin_wait=1.0) as loader:
                assert len(keys_of(loader)) == 20
    assert "is down" not in caplog.text


def test_a_share_of_shards_that_were_given_up_is_judged_across_states() -> None:
    def judged(given_up: int, whole: int, before: list[int], most: float | None = 0.1) -> bool:
        checks = ShardChecks(most)
        checks.restore(before)
        assert checks.counts() == before
        try:
            checks.check(given_up, whole, 100_000)
        except streamload.errors.TooManyBadShards:
            return True
        return False

    assert not judged(9, 0, [0, 0])  # of the first shards of many all may be on one bad disk
    assert judged(12, 0, [0, 0])
    assert not judged(12, 0, [0, 0], None)
    assert not judged(120, 880, [0, 0])
    assert judged(300, 1_700, [0, 0])
    assert judged(120, 880, [1_200, 10_000])
    assert not judged(20, 80, [0, 10_000])
    assert judged(10_001, 10**6, [0, 0])


def test_no_caption_anywhere_is_an_error_that_shows_what_is_there(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "data", [4, 4], options=ShardOptions(without_text_every=1))
    with (
        make([str(p) for p in paths], tmp_path) as loader,
        pytest.raises(streamload.errors.NoValidSamples, match=r"00000000000 \(jpg, json\).*text_key"),
    ):
        keys_of(loader)


def test_keep_that_refuses_all_is_an_error(server: ShardServer, tmp_path: Path) -> None:
    with (
        make(urls(server), tmp_path, keep=refuse) as loader,
        pytest.raises(streamload.errors.NoValidSamples, match="keep"),
    ):
        keys_of(loader)


def refuse(entry: streamload.Entry) -> bool:
    return False


def test_keep_selects_by_what_the_index_holds(server: ShardServer, tmp_path: Path) -> None:
    with make(urls(server), tmp_path, keep=is_wide, batch_size=1) as loader:
        kept = sorted(keys_of(loader))
    wide = []
    for path in sorted((tmp_path / "data").glob("*.tar")):
        for key, members in read_oracle(path):
            width, height = Image.open(io.BytesIO(members["jpg"])).size
            wide += [key] if width > height and len(members["txt"]) > 10 else []
    assert kept == sorted(wide)
    assert 0 < len(wide) < sum(COUNTS)


def is_wide(entry: streamload.Entry) -> bool:
    return entry.width > entry.height and entry.caption_bytes > 10 and entry.sizes["jpg"] > 100


def shard_with_bad_images(path: Path, count: int, bad: set[int]) -> None:
    (good,) = write_shards(path.parent / "good", [count], seed=12)
    with tarfile.open(path, "w") as tar:
        for index, (key, members) in enumerate(read_oracle(good)):
            members["jpg"] = b"\xff\xd8 no image" if index in bad else members["jpg"]
            for extension in ("jpg", "txt"):
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(members[extension])
                tar.addfile(info, io.BytesIO(members[extension]))


def test_images_that_do_not_decode_are_replaced_the_same_way_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard_with_bad_images(tmp_path / "bad.tar", 60, {0, 1, 17, 59})

    def images(workers: int) -> tuple[list[str], torch.Tensor]:
        with make(str(tmp_path / "bad.tar"), tmp_path, num_workers=workers, batch_size=6) as loader:
            batches = list(loader)
            causes = {cause: count for cause, count in loader.stats().samples_replaced.items() if count}
            assert causes == {"decode": 4}
            assert [sample.cause for sample in loader.skipped] == ["decode"] * 4
            return [k for _, _, o in batches for k in o["__key__"]], torch.cat([b[0] for b in batches])

    keys, pixels = images(0)
    assert len(keys) == 60
    assert len(set(keys)) == 56
    for workers in (1, 2):
        again, same = images(workers)
        assert again == keys
        assert torch.equal(same, pixels)
    for size_bytes in (2 << 20, 10_000, 1):  # looked at in advance: all of them, some, each alone
        monkeypatch.setattr(loop, "_READ_AHEAD_BYTES", size_bytes)
        again, same = images(0)
        assert again == keys
        assert torch.equal(same, pixels)


def test_images_that_do_not_decode_are_left_out_of_evaluation_and_raise_if_asked(tmp_path: Path) -> None:
    shard_with_bad_images(tmp_path / "bad.tar", 30, {0, 29})
    with make(str(tmp_path / "bad.tar"), tmp_path, train=False) as loader:
        assert len(keys_of(loader)) == 28
        assert loader.stats().samples_skipped["decode"] == 2
    with (
        make(str(tmp_path / "bad.tar"), tmp_path, on_error="raise") as loader,
        pytest.raises(streamload.errors.DecodeError, match=r", in sample '\w+' of .*/bad.tar"),
    ):
        keys_of(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_evaluation_batch_of_nothing_usable_is_passed_over_and_counted(
    workers: int, tmp_path: Path
) -> None:
    shard_with_bad_images(tmp_path / "bad.tar", 30, {*range(10, 15), 29})
    options: dict[str, Any] = {"train": False, "output": "hf", "tokenizer": lengths, "num_workers": workers}
    with make(str(tmp_path / "bad.tar"), tmp_path, max_bad_samples=0.2, **options) as loader:
        epoch = iter(loader)
        sizes, positions = [], []
        for batch in epoch:
            sizes.append([len(batch[name]) for name in ("pixel_values", "input_ids")])
            positions.append(loader.state_dict()["position"])
        assert sizes == [[5] * 2] * 4 + [[4] * 2]
        assert positions == [5, 10, 20, 25, 30]
        stats = loader.stats()
        assert (stats.samples_skipped["decode"], stats.samples_yielded, stats.batches_yielded) == (6, 24, 5)


def lengths(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[len(caption)] for caption in captions])


def shards_with_bad_images(folder: Path, bad: list[set[int]]) -> str:
    """Shards of eight samples."""
    for number, own in enumerate(bad):
        shard_with_bad_images(folder / f"{number:02d}.tar", 8, own)
    return f"{folder}/{{00..{len(bad) - 1:02d}}}.tar"


@pytest.mark.parametrize("train", [True, pytest.param(False, marks=pytest.mark.deep)])
def test_bad_images_in_many_shards_are_no_accident_unless_any_share_is_allowed(
    train: bool, tmp_path: Path
) -> None:
    urls = shards_with_bad_images(tmp_path, [{0, 2, 4, 6}] * 24)
    with make(urls, tmp_path, train=train) as loader:
        with pytest.raises(streamload.errors.TooManyBadSamples, match=r"max_bad_samples=0\.1 allows"):
            keys_of(loader)
        assert loader.stats().samples_yielded >= 10
    for share in (None, 0.55):
        with make(urls, tmp_path, train=train, max_bad_samples=share) as loader:
            assert len(keys_of(loader)) == (190 if train else 96)


@pytest.mark.parametrize("on_error", ["skip", "raise"])
def test_samples_with_blank_captions_are_left_out_like_those_without_one_where_that_is_asked_for(
    on_error: str, tmp_path: Path
) -> None:
    def write(name: str, captions: list[str]) -> None:
        with tarfile.open(tmp_path / name, "w") as tar:
            for number, caption in enumerate(captions):
                said = json.dumps({"caption": caption}).encode()
                for extension, data in (("jpg", picture()), ("json", said)):
                    info = tarfile.TarInfo(f"{number}.{extension}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))

    write("a.tar", ["one", "", "two", " \t\n", "three", "four"])
    options: dict[str, Any] = {"text_key": "json:caption", "num_workers": 0, "on_error": on_error}
    with make(str(tmp_path / "a.tar"), tmp_path, train=False, batch_size=6, **options) as loader:
        assert [texts for _, texts, _ in loader] == [["one", "", "two", " \t\n", "three", "four"]]
    options["blank_captions"] = False
    for train, expected in ((False, 4), (True, 6)):
        with make(str(tmp_path / "a.tar"), tmp_path, train=train, batch_size=6, **options) as loader:
            ((_, texts, _),) = list(loader)
            assert len(texts) == expected
            assert set(texts) == {"one", "two", "three", "four"}
            stats = loader.stats()
            assert (stats.samples_replaced if train else stats.samples_skipped)["missing"] == 2
            assert loader.skipped == []


def picture() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG")
    return buffer.getvalue()


def test_a_few_bad_shards_that_come_first_end_no_run(tmp_path: Path) -> None:
    """A tenth of all samples is bad, and most of what is read first."""
    urls = shards_with_bad_images(tmp_path, [set(range(8))] * 2 + [set()] * 18)
    with make(urls, tmp_path, shuffle=0, num_workers=0) as loader:
        keys = keys_of(loader)
        assert len(keys) == 160
        assert loader.stats().samples_replaced["decode"] == 16
    assert len(set(keys[:15])) > 4  # not one sample for all of a shard


def test_any_share_of_bad_images_is_gone_over_where_there_is_no_limit(tmp_path: Path) -> None:
    urls = shards_with_bad_images(tmp_path, [set(range(8))] * 15 + [set()])
    with make(urls, tmp_path, num_workers=0) as loader, pytest.raises(streamload.errors.TooManyBadSamples):
        keys_of(loader)
    with make(urls, tmp_path, num_workers=0, max_bad_samples=None) as loader:
        assert len(keys_of(loader)) == 125


@pytest.mark.parametrize("share", [-0.1, 1.5, True, "10%"])
def test_a_limit_on_bad_samples_is_a_share_or_none(share: Any, tmp_path: Path) -> None:
    with pytest.raises(
        streamload.errors.OptionError, match=r"max_bad_samples=.*a share from 0 to 1, or None"
    ):
        make("a.tar", tmp_path, max_bad_samples=share)


def test_bad_samples_are_counted_across_a_resume(tmp_path: Path) -> None:
    urls = shards_with_bad_images(tmp_path, [{1, 5}] * 6)
    with make(urls, tmp_path, max_bad_samples=0.5) as loader:
        keys_of(loader)
        whole = loader._run.process.checks.counts()
    with make(urls, tmp_path, max_bad_samples=0.5) as loader:
        for _ in zip(range(4), loader, strict=False):
            pass
        state = json.loads(json.dumps(loader.state_dict()))
    assert state["bad_samples"][:1] == [20]
    with make(urls, tmp_path, num_workers=0, max_bad_samples=0.5) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict()["bad_samples"] == state["bad_samples"]
        keys_of(loader)
        assert loader._run.process.checks.counts()[:2] == whole[:2]
        with pytest.raises(streamload.errors.StateMismatch, match="not a valid state"):
            loader.load_state_dict(sealed({**state, "bad_samples": [1]}))


def fail(image: object) -> None:
    raise LookupError("the user's own")


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_the_users_functions_are_raised(workers: int, server: ShardServer, tmp_path: Path) -> None:
    for option in ("preprocess", "map_sample", "keep"):
        with (
            make(urls(server), tmp_path, num_workers=workers, **{option: fail}) as loader,
            pytest.raises(LookupError, match="the user's own"),
        ):
            keys_of(loader)
    with (
        make(urls(server), tmp_path, num_workers=workers, tokenizer=fail) as loader,
        pytest.raises(LookupError),
    ):
        keys_of(loader)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"urls": []}, "empty"),
        ({"urls": "http://host/{0000..0003.tar"}, "0000"),
        ({"urls": "gopher://host/a.tar"}, "gopher"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"num_samples": 0}, "num_samples=0"),
        ({"shuffle": -5}, "shuffle=-5"),
        ({"output": "list"}, "'tuple', 'dict', 'hf'"),
        ({"max_bad_shards": 1.5}, r"max_bad_shards=1\.5; expected a share"),
        ({"on_error": "ignore"}, "'skip', 'raise'"),
        ({"rank": 1}, "world_size"),
        ({"map_sample": fail, "tokenizer": fail}, "map_sample"),
        ({"cache_size": "lots"}, "lots"),
        ({"text_key": "txt;"}, "txt;"),
        ({"rank": 3, "world_size": 2}, "rank=3"),
    ],
)
def test_options_that_cannot_be_used_say_which(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    options = {"urls": str(tmp_path / "a.tar"), **options}
    with (
        pytest.raises(streamload.errors.OptionError, match=says),
        make(options.pop("urls"), tmp_path, **options) as loader,
    ):
        next(iter(loader))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"shuffle": True}, "shuffle=True: give the number of positions"),
        ({"batch_size": True}, "batch_size=True"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": "1"}, "seed='1'"),
        ({"seed": False}, "seed=False"),
        ({"device": "gpu"}, "device='gpu'.*'cuda'"),
        ({"device": 1.5}, "device=1.5"),
        ({"multiprocessing_context": "foo"}, "multiprocessing_context='foo'.*'spawn'"),
        ({"tokenizer": "gpt2"}, "tokenizer is a str"),
        ({"train": "yes"}, "train='yes'; expected True or False"),
        ({"train": None}, "train=None; expected True or False"),
        ({"with_keys": 2}, "with_keys=2; expected True or False"),
        ({"preprocess": "resize"}, "preprocess='resize'; expected a function"),
        ({"keep": 3}, "keep=3; expected a function"),
        ({"map_sample": {}}, "map_sample={}; expected a function"),
    ],
)
def test_what_make_loader_can_tell_is_refused_by_it(
    options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(streamload.errors.OptionError, match=says):
        make(str(tmp_path / "a.tar"), tmp_path, **options)


def test_a_seed_may_be_any_kind_of_whole_number(tmp_path: Path) -> None:
    assert make("a.tar", tmp_path, seed=np.uint64(2**63)).options.seed == 2**63


@pytest.fixture
def other_default_device() -> Iterator[None]:
    """Of tensors for which no device is said, as some set "cuda"."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def captioned(sample: dict[str, Any]) -> dict[str, Any]:
    return {"length": len(sample["txt"])}


@pytest.mark.usefixtures("other_default_device")
@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_default_device_changes_nothing(workers: int, server: ShardServer, tmp_path: Path) -> None:
    for options in ({}, {"train": False}, {"dtype": "uint8"}, {"map_sample": captioned}):
        with make(urls(server), tmp_path, num_workers=workers, output="dict", **options) as loader:
            for batch in loader:
                values = [value for value in batch.values() if isinstance(value, torch.Tensor)]
                assert values
                assert all(value.device.type == "cpu" for value in values)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_new_iterator_ends_the_one_before_it(workers: int, server: ShardServer, tmp_path: Path) -> None:
    with make(urls(server), tmp_path, num_workers=workers) as loader:
        first = iter(loader)
        next(first)
        assert len(keys_of(loader)) == sum(COUNTS)
        with pytest.raises(streamload.errors.LoaderClosed, match="a new iteration of the loader began"):
            next(first)


@pytest.mark.parametrize("options", [{}, {"num_samples": 32}])
def test_an_epoch_of_which_nothing_was_taken_begins_again(
    options: dict[str, Any], server: ShardServer, tmp_path: Path
) -> None:
    """Frameworks ask for an iterator to see whether they can have one, and drop or keep it."""
    with make(urls(server), tmp_path, **options) as loader, make(urls(server), tmp_path, **options) as other:
        for _ in range(2):
            expected = keys_of(loader)
            iter(other)
            kept = iter(other)
            assert keys_of(other) == expected
            del kept


def test_an_epoch_of_known_length_is_over_with_its_last_batch(server: ShardServer, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_samples": 40, "with_keys": True}
    with make(urls(server), tmp_path, **options) as loader, make(urls(server), tmp_path, **options) as other:
        expected = [keys_of(loader), keys_of(loader)]
        batches = iter(other)
        found = [key for _ in range(len(other)) for key in next(batches)[2]["__key__"]]
        assert other.state_dict()["epoch"] == 1
        assert [found, keys_of(other)] == expected
        with pytest.raises(StopIteration):
            next(batches)


def waits_for_a_gate(gate: Path, sample: dict[str, Any]) -> dict[str, Any]:
    while "00000.tar" not in sample["__url__"] and gate.exists():
        gate.with_suffix(f".{os.getpid()}").touch()
        time.sleep(0.01)
    return {"size": len(sample["jpg"])}


class Interrupted(BaseException):
    """As KeyboardInterrupt is none of the errors that code may catch."""


def test_an_interrupted_beginning_of_an_epoch_begins_none(server: ShardServer, tmp_path: Path) -> None:
    """Batches of the epoch before are waited for there; the rest of them was taken for the next one's."""
    gate = tmp_path / "gate"
    gate.touch()

    def interrupt(*_: object) -> None:
        gate.unlink()
        raise Interrupted

    map_sample = functools.partial(waits_for_a_gate, gate)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with make(urls(server), tmp_path, map_sample=map_sample, shuffle=0, prefetch_factor=4) as loader:
            next(iter(loader))
            state = loader.state_dict()
            until(lambda: len(list(tmp_path.glob("gate.*"))) == 2)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(Interrupted):
                iter(loader)
            assert loader.state_dict() == state
            assert sorted(key for batch in loader for key in batch["__key__"]) == oracle(tmp_path, 0, 1, 2, 3)
            assert loader.state_dict()["epoch"] == 2
    finally:
        signal.signal(signal.SIGALRM, before)


def logs_and_waits(gate: Path, log: Path, sample: dict[str, Any]) -> dict[str, Any]:
    with log.open("a") as file:
        file.write(sample["__key__"] + "\n")
    return waits_for_a_gate(gate, sample)


def test_batches_of_an_epoch_that_was_left_are_not_computed(server: ShardServer, tmp_path: Path) -> None:
    gate, log = tmp_path / "gate", tmp_path / "log"
    gate.touch()
    map_sample = functools.partial(logs_and_waits, gate, log)
    options: dict[str, Any] = {"batch_size": 10, "num_workers": 1, "shuffle": 0, "prefetch_factor": 8}
    with make(urls(server), tmp_path, map_sample=map_sample, **options) as loader:
        next(iter(loader))
        until(lambda: list(tmp_path.glob("gate.*")))  # in the third batch
        left = loader._run.process.control.order.generation

        def open_gate() -> None:
            until(lambda: loader._run.process.control.order.generation != left)
            gate.unlink()

        opener = threading.Thread(target=open_gate)
        opener.start()
        assert len([key for batch in loader for key in batch["__key__"]]) == 90
        opener.join()
    assert len(log.read_text().splitlines()) == 30 + 90


@pytest.mark.parametrize(
    ("names", "cause"),
    [
        (["a.jpg", "b.jpg", "a.txt", "b.txt"], r"a comes again in .*0\.tar: .* adjacent .*--sort=name"),
        (
            ["img/0.jpg", "img/1.jpg", "txt/0.txt", "txt/1.txt"],
            r"Needed: jpg;png;jpeg;webp and txt\. .*img/0 \(jpg\) and txt/0 \(txt\) are two samples of ",
        ),
        ([], r"no samples in 1 tars \(first: .*0\.tar\)"),
        (["t 1.05 x.jpg", "t 1.05 x.txt"], r"a key ends at the first dot .* of t 1 leaves .* '05 x\.jpg'"),
    ],
)
def test_names_of_which_nothing_can_be_used_are_named_as_a_likely_cause(
    names: list[str], cause: str, tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))
    with (
        make([str(tmp_path / "0.tar")], tmp_path, num_workers=0) as loader,
        pytest.raises(streamload.errors.NoValidSamples, match=cause),
    ):
        list(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_relative_paths_are_those_of_the_folder_where_the_loader_was_made(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path / "data", [5, 5])
    monkeypatch.chdir(tmp_path)
    with make("data/{00000..00001}.tar", tmp_path, num_workers=workers, train=False) as loader:
        monkeypatch.chdir("/")
        assert len(keys_of(loader)) == 10


@pytest.mark.parametrize("workers", [0, 2])
def test_inference_mode_is_nothing_to_a_loader(workers: int, server: ShardServer, tmp_path: Path) -> None:
    with torch.inference_mode():
        loader = make(urls(server), tmp_path, num_workers=workers)
        assert len(keys_of(loader)) == 90
    with loader:
        assert len(keys_of(loader)) == 90


def test_a_batch_of_another_epoch_is_not_taken() -> None:
    checks = BatchChecks(Counters(), train=True, max_bad=None)
    checks.start_epoch(generation=6)
    batch = Batch({}, 0, 6, OrderStep(0, 0, SealedStates({}), {}), RowSources(0, [0]), [])
    checks.check_order(batch)
    with pytest.raises(streamload.errors.OrderDiverged, match="order 4, but this epoch has order 6"):
        checks.check_order(batch._replace(generation=4))


def test_a_cache_directory_that_cannot_be_used_is_an_error(server: ShardServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/streamload")):
        with (
            make(urls(server), tmp_path, cache_dir=place) as loader,
            pytest.raises(streamload.errors.CacheError, match="can't be used"),
        ):
            keys_of(loader)


def test_workers_that_disagree_on_the_order_are_an_error(server: ShardServer, tmp_path: Path) -> None:
    def seeded_apart(entry: Any) -> bool:
        return random.Random(f"{os.getpid()}{entry.key}").random() < 0.8

    with (
        make(urls(server), tmp_path, keep=seeded_apart, multiprocessing_context="fork") as loader,
        pytest.raises(streamload.errors.OrderDiverged, match="keep="),
    ):
        keys_of(loader)


def spares(cache: Path) -> list[Path]:
    found = fallback.place(cache)
    assert found is not None
    return [found] if found.exists() else []


def disk_bytes(directory: Path) -> int:
    """What the files below take, each once: in a cache that is in use they move and go meanwhile."""
    taken: dict[int, int] = {}
    for place, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                status = Path(place, name).stat()
                taken[status.st_ino] = status.st_blocks * 512
    return sum(taken.values())


def test_a_limit_of_files_that_shared_memory_does_not_fit_in_is_named(
    server: ShardServer, tmp_path: Path
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000_000, before[1]))
    try:
        with pytest.raises(streamload.errors.CacheError, match=r"10,000,000 bytes here; raise .*ulimit -f"):
            make(urls(server), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shards_that_fit", [0.8, 2])
@pytest.mark.sampled(2)
def test_what_has_no_room_in_the_cache_is_read_by_range(
    workers: int,
    shards_that_fit: float,
    server: ShardServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Four indexes fit, and one more while it is made: who waits for his must not take it for refused.
    seconds = 0.2 if shards_that_fit > 1 else 5.0
    monkeypatch.setattr("streamload.worker.shortage._NO_ROOM_SECONDS", seconds)
    largest = max(path.stat().st_size for path in (tmp_path / "data").iterdir())
    limit = int(shards_that_fit * largest)
    with make(urls(server), tmp_path, cache_size=limit, num_workers=workers) as loader:
        for _ in range(2):
            assert sorted(keys_of(loader)) == oracle(tmp_path, 0, 1, 2, 3)
            assert disk_bytes(tmp_path / "cache") <= limit
        stats = loader.stats()
    assert stats.range_reads > 0
    if shards_that_fit < 1:
        assert stats.range_reads == 2 * sum(COUNTS)
        assert stats.shards_published == stats.shards_complete == stats.tier_hits == 0
    if not workers and shards_that_fit >= 1:
        assert caplog.text.count("no room for") == 1


@pytest.mark.parametrize(
    ("shards_that_fit", "says"), [(0.5, "a shard needs|none would fit"), (2.2, "lanes=8")]
)
def test_what_has_no_room_and_cannot_be_read_by_range_is_kept_in_memory_or_is_an_error(
    shards_that_fit: float, says: str, tmp_path: Path, server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamload.worker.shortage._NO_ROOM_SECONDS", 0.2)
    largest = max(path.stat().st_size for path in (tmp_path / "data").iterdir())
    limit = int(shards_that_fit * largest)
    commands = f"pipe:cat {tmp_path}/data/{{00000..00003}}.tar"
    with make(commands, tmp_path, cache_size=limit) as loader:
        for _ in range(2):
            assert sorted(keys_of(loader)) == oracle(tmp_path, 0, 1, 2, 3)
            assert disk_bytes(tmp_path / "cache") <= limit
    assert not spares(tmp_path / "cache")
    monkeypatch.setattr("streamload.prefetch.fallback._MEMORY", tmp_path / "nowhere")
    with (
        make(commands, tmp_path, cache_size=limit, multiprocessing_context="fork") as loader,
        pytest.raises(streamload.errors.CacheFull, match=says),
    ):
        keys_of(loader)


def test_a_shard_that_changes_while_it_is_read_by_range_is_an_error(
    server: ShardServer, tmp_path: Path
) -> None:
    options = {"cache_size": 100_000, "num_workers": 0, "batch_size": 1, "max_bad_shards": None}
    with make(urls(server), tmp_path, **options) as loader:
        batches = iter(loader)
        next(batches)  # of the other shards no sample may have been read: those are given up
        for path in (tmp_path / "data").iterdir():
            content = path.read_bytes()
            other = tmp_path / "other"
            other.write_bytes(content[:1000] + b"x" + content[1001:])
            other.replace(path)  # at no time is it missing
        with pytest.raises(streamload.errors.DatasetChanged):
            list(batches)


@pytest.mark.parametrize("dated", [False, True])
def test_backends_that_each_have_an_etag_or_a_date_too_of_their_own_cost_no_shard(
    dated: bool, server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that goes on with an empty cache needs the dates, as it has none of the bytes."""
    quick = functools.partial(OriginOptions, first_get_bytes=20_000, backoff_seconds=0.01)
    monkeypatch.setattr(worker_config, "OriginOptions", quick)
    tags = [{"ETag": f'"backend-{number % 2}"'} for number in range(999)]
    dates = [{"Last-Modified": f"Mon, 05 Jan 2026 00:00:0{number % 2} GMT"} for number in range(999)]
    backends = [tag | date if dated else tag for tag, date in zip(tags, dates, strict=True)]
    server.misbehave("*", *(Fault(first=1, headers=headers) for headers in backends))
    with make(urls(server), tmp_path) as loader:
        batches = iter(loader)
        keys = [key for _ in range(6) for key in next(batches)[2]["__key__"]]
        state = loader.state_dict()
        rest = [key for *_, origin in batches for key in origin["__key__"]]
        assert sorted(keys + rest) == oracle(tmp_path, 0, 1, 2, 3)
        assert not loader.stats().shards_given_up
    if not dated:
        with make(urls(server), tmp_path, cache_dir=tmp_path / "another") as loader:
            loader.load_state_dict(state)
            assert sorted(keys + keys_of(loader)) == oracle(tmp_path, 0, 1, 2, 3)
            assert not loader.stats().shards_given_up


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k,mode=700", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small file system can't be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_with_a_full_disk_the_training_goes_on(server: ShardServer, tmp_path: Path, small_disk: Path) -> None:
    with make(urls(server), tmp_path, cache_dir=small_disk / "cache") as loader:
        for _ in range(2):
            assert sorted(keys_of(loader)) == oracle(tmp_path, 0, 1, 2, 3)
        # by range where there was room for an index, from memory where there wasn't
        assert loader.stats().range_reads > 0 or spares(small_disk / "cache")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards that have no room are done without soon."""
    monkeypatch.setattr("streamload.worker.shortage._NO_ROOM_SECONDS", 0.5)
    monkeypatch.setattr("streamload.worker.shortage._NO_ROOM_AGAIN_SECONDS", 0.1)


@pytest.mark.usefixtures("impatient")
def test_a_full_disk_is_an_error_only_where_there_is_no_other_place(
    server: ShardServer, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = f"pipe:cat {tmp_path}/data/{{00000..00003}}.tar"
    with make(commands, tmp_path, cache_dir=small_disk / "cache") as loader:
        assert sorted(keys_of(loader)) == oracle(tmp_path, 0, 1, 2, 3)
    assert not spares(small_disk / "cache")
    monkeypatch.setattr("streamload.prefetch.fallback._MEMORY", tmp_path / "nowhere")
    forked: Any = {"free_disk": 0, "multiprocessing_context": "fork"}
    with (
        make(commands, tmp_path, cache_dir=small_disk / "cache", **forked) as loader,
        pytest.raises(streamload.errors.CacheFull, match=r"no space left|the free space of its disk"),
    ):
        keys_of(loader)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, whose state a test may change."""
    place = tmp_path / "mounted"
    place.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "tmpfs", place]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a file system can't be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def keys_with_the_cache_open(batches: Iterator[Any], workers: int) -> list[str]:
    """Take a batch of each worker, so that none is still to open the cache; their samples' keys."""
    taken = itertools.islice(batches, max(1, workers))
    return [key for batch in taken for key in batch[2]["__key__"]]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("scheme", ["http", pytest.param("pipe", marks=pytest.mark.deep)])
def test_a_disk_that_becomes_full_in_a_run_does_not_stop_it(
    scheme: str, workers: int, server: ShardServer, tmp_path: Path, disk: Path
) -> None:
    given = urls(server) if scheme == "http" else f"pipe:curl -sf {urls(server)}"
    options = {"cache_dir": disk / "cache", "num_workers": workers, "batch_size": 1}
    with make(given, tmp_path, **options) as loader:
        server.stop_after(0.5)
        batches = iter(loader)
        keys = keys_with_the_cache_open(batches, workers)
        for _ in range(100):  # it may grow just now
            full = shutil.disk_usage(disk).used + (16 << 10)
            command = ["mount", "-o", f"remount,size={full}", disk]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                break
        else:
            pytest.fail("the disk can't be made small")
        server.go_on()
        keys += [key for batch in batches for key in batch[2]["__key__"]]
        assert sorted(keys) == oracle(tmp_path, 0, 1, 2, 3)
        assert sorted(keys_of(loader)) == oracle(tmp_path, 0, 1, 2, 3)
    assert not spares(disk / "cache")


def remove(cache: Path) -> None:
    while cache.exists():  # whoever fills may make a directory behind the back of rmtree
        with contextlib.suppress(OSError):
            shutil.rmtree(cache)


def spoil(cache: Path) -> None:
    remove(cache / "parts")
    (cache / "parts").write_text("no directory")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", [remove, spoil])
@pytest.mark.sampled(2)
def test_a_cache_that_is_removed_or_broken_in_a_run_does_not_stop_it(
    damage: Callable[[Path], None], workers: int, server: ShardServer, tmp_path: Path
) -> None:
    with make(urls(server), tmp_path, num_workers=workers, batch_size=1) as loader:
        server.stop_after(0.5)
        batches = iter(loader)
        keys = keys_with_the_cache_open(batches, workers)
        damage(tmp_path / "cache")
        server.go_on()
        keys += [key for batch in batches for key in batch[2]["__key__"]]
        assert sorted(keys) == oracle(tmp_path, 0, 1, 2, 3)
        assert sorted(keys_of(loader)) == oracle(tmp_path, 0, 1, 2, 3)
    assert not spares(tmp_path / "cache")


def is_a_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
        return "resource_tracker" not in " ".join(process.cmdline())
    return False


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.deep)])
def test_a_killed_worker_is_an_error_and_loses_nothing(
    method: str, server: ShardServer, tmp_path: Path, no_leaks: NoLeaks
) -> None:
    with make(urls(server), tmp_path, multiprocessing_context=method) as loader:
        keys_of(loader)
    with no_leaks():
        loader = make(
            urls(server), tmp_path, cache_dir=tmp_path / "other", multiprocessing_context=method, batch_size=1
        )
        server.stop_after(0.5)
        before = {process.pid for process in psutil.Process().children()}
        batches = iter(loader)
        next(batches)
        begun = [process for process in psutil.Process().children() if process.pid not in before]
        workers = [process for process in begun if is_a_worker(process)]
        killer = threading.Timer(1.0, workers[0].kill)  # while the loop waits for a batch
        killer.start()
        with pytest.raises(streamload.errors.WorkerDied, match="DataLoader worker"):
            list(batches)
        killer.join()
        server.go_on()
        del batches
        assert sorted(keys_of(loader)) == oracle(tmp_path, 0, 1, 2, 3)
        loader.close()
        del loader


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(name, marks=pytest.mark.deep) for name in ("spawn", "forkserver"))]
)
def test_a_worker_that_is_killed_between_epochs_is_replaced(
    method: str, server: ShardServer, tmp_path: Path
) -> None:
    with make(urls(server), tmp_path, num_workers=2, multiprocessing_context=method) as loader:
        assert sorted(keys_of(loader)) == oracle(tmp_path, 0, 1, 2, 3)
        assert loader._pool is not None
        workers: Any = loader._pool.batches._iterator
        with contextlib.suppress(RuntimeError):  # torch's word, wherever the process is when a worker dies
            os.kill(workers._workers[0].pid, signal.SIGKILL)
            time.sleep(1)
        assert sorted(keys_of(loader)) == oracle(tmp_path, 0, 1, 2, 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_break_close_and_drop_leave_nothing_behind(
    workers: int, server: ShardServer, tmp_path: Path, no_leaks: NoLeaks
) -> None:
    with make(urls(server), tmp_path, num_workers=workers) as loader:
        keys_of(loader)
    with no_leaks():
        with make(urls(server), tmp_path, cache_dir=tmp_path / "a", num_workers=workers) as loader:
            for batch in loader:
                del batch
                break
        loader = make(urls(server), tmp_path, cache_dir=tmp_path / "b", num_workers=workers)
        server.stop_after(0.5)
        next(iter(loader))
        del loader
        server.go_on()
    for name in ("a", "b"):
        tier = Tier.open(tmp_path / name)
        assert not list((tier.root / "runs").iterdir())
        assert not list((tier.root / "trash").iterdir())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_closed_loader_lets_go_of_its_workers_memory(
    workers: int, server: ShardServer, tmp_path: Path
) -> None:
    with make(urls(server), tmp_path, num_workers=workers) as loader:
        keys_of(loader)
        assert loader._pool is not None
        pool = weakref.ref(loader._pool)
    gc.collect()
    assert pool() is None


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_a_signals_handler_closes_while_a_batch_is_waited_for_says_so(
    workers: int, server: ShardServer, tmp_path: Path
) -> None:
    """Neither the epoch's end nor a worker's death: the state is that of the last batch taken."""
    server.stop_after(0.5)
    before = signal.signal(signal.SIGUSR1, lambda *_: loader.close())
    try:
        with make(urls(server), tmp_path, num_workers=workers) as loader:
            batches = iter(loader)
            next(batches)
            timer = threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            with pytest.raises(streamload.errors.LoaderClosed):
                for _ in batches:
                    pass
            timer.join()
            assert loader.state_dict()["position"] == 5 * loader.stats().batches_yielded
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_is_closed_in_the_middle_of_an_epoch_loses_nothing(
    workers: int, server: ShardServer, tmp_path: Path
) -> None:
    """The epoch seemed to be over, and its state to be that of the next one."""
    with make(urls(server), tmp_path, num_workers=workers, shuffle=0) as loader:
        epoch = iter(loader)
        for _ in range(3):
            next(epoch)
        loader.close()
        for _ in range(2):
            with pytest.raises(streamload.errors.LoaderClosed, match="in the middle of the epoch"):
                next(epoch)
        state = loader.state_dict()
        assert (state["epoch"], state["position"]) == (0, 15)
        assert not list((Tier.open(tmp_path / "cache").root / "runs").iterdir())
        loader.load_state_dict(state)
        rest = iter(loader)
        keys = [key for _ in range(2) for key in next(rest)[2]["__key__"]]
        with pytest.raises(streamload.errors.LoaderClosed):
            next(epoch)
        keys += [key for _, _, origin in rest for key in origin["__key__"]]
    assert keys == oracle(tmp_path, 0, 1, 2, 3)[15:]


FORKING = """
import gc, os, sys, streamload
urls, cache, workers, *hows = sys.argv[1:]
samples = 0
with streamload.make_loader(
    urls, cache_dir=cache, cache_size="1GB", batch_size=5, num_workers=int(workers)
) as loader:
    for images, _ in loader:
        samples += len(images)
        if hows:
            how = hows.pop(0)
            child = os.fork()
            if child == 0:
                if how == "closes":
                    loader.close()
                elif how == "drops":
                    del loader, images
                    gc.collect()
                sys.exit()
            assert os.waitpid(child, 0) == (child, 0)
print(samples)
"""


@pytest.mark.deep
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.deep), 2])
def test_processes_forked_from_the_rank_end_nothing_but_themselves(
    workers: int, server: ShardServer, tmp_path: Path
) -> None:
    """The epoch of its parent ended then, as if it were complete, or in an error of torch's."""
    arguments = [urls(server), str(tmp_path / "cache"), str(workers), "ends", "closes", "drops"]
    command = [sys.executable, "-W", "ignore", "-c", FORKING, *arguments]  # Python warns of threads
    done = subprocess.run(command, check=False, timeout=100, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == f"{sum(COUNTS)}\n"


def test_torch_forgets_in_a_forked_process_whose_workers_it_was_to_watch(
    server: ShardServer, tmp_path: Path
) -> None:
    """It knows iterators by their addresses, where others can come to lie, and refuses to know one twice."""

    def is_forgotten(address: int) -> None:
        torch._C._set_worker_pids(address, (os.getpid(),))

    with make(urls(server), tmp_path, num_workers=1) as loader:
        keys_of(loader)
        assert loader._pool is not None
        address = id(loader._pool.batches._iterator)
        with pytest.raises(ValueError, match="only once"):
            is_forgotten(address)
        child = multiprocessing.get_context("fork").Process(target=is_forgotten, args=(address,))
        child.start()
        child.join()
        assert child.exitcode == 0


@pytest.mark.deep
def test_a_loader_serves_each_process_that_is_forked_with_it(server: ShardServer, tmp_path: Path) -> None:
    with make(urls(server), tmp_path, num_workers=1, batch_size=1, seed=4) as loader:
        expected = keys_of(loader)
        loader.set_epoch(0)

        def iterate(number: int) -> None:
            (tmp_path / str(number)).write_text("\n".join(keys_of(loader)))

        children = [multiprocessing.get_context("fork").Process(target=iterate, args=(n,)) for n in range(3)]
        for child in children:
            child.start()
        assert keys_of(loader) == expected
        for child in children:
            child.join()
    for number in range(3):
        assert (tmp_path / str(number)).read_text().splitlines() == expected


def arrived_bytes(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.glob("parts/*/data"))


TRAINING = """
import faulthandler, signal, sys, streamload
faulthandler.register(signal.SIGUSR1)  # tells what a process is doing that should be gone
urls, cache, method = sys.argv[1:]
loader = streamload.make_loader(
    urls, cache_dir=cache, cache_size="1GB", batch_size=2, num_workers=2,
    workers=streamload.Workers(multiprocessing_context=method),
)
for _ in loader:
    print("batch", flush=True)
"""


class Lines:
    """The lines that a process writes to a pipe, each with a limit to the wait for it."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._read = pipe, b""

    def next(self, seconds: float) -> str | None:
        """The next line, "" at the end, or None if there is none within seconds."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._read:
            if not select.select([self._pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            if not (more := os.read(self._pipe, 1 << 16)):
                return ""
            self._read += more
        line, self._read = self._read.split(b"\n", 1)
        return line.decode()


def what_they_do(alive: list[psutil.Process], said: Path) -> str:
    which = str(alive)
    for process in alive:
        process.send_signal(signal.SIGUSR1)
    time.sleep(2)
    return f"{which}\n{said.read_text()}"


@pytest.mark.parametrize(
    ("how", "method"),
    [
        (signal.SIGINT, "fork"),
        pytest.param(signal.SIGTERM, "fork", marks=pytest.mark.deep),
        pytest.param(signal.SIGKILL, "fork", marks=pytest.mark.deep),
        # The forkserver lives as long as a worker does, so that none loses its parent.
        pytest.param(signal.SIGKILL, "forkserver", marks=pytest.mark.deep),
    ],
)
def test_a_training_that_is_stopped_leaves_no_process_and_what_it_fetched(
    how: signal.Signals, method: str, server: ShardServer, tmp_path: Path
) -> None:
    server.stop_after(0.6)
    command = [sys.executable, "-c", TRAINING, urls(server), str(tmp_path / "cache"), method]
    said = tmp_path / "said"
    with said.open("wb") as stderr:
        training = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True)
    assert training.stdout is not None
    assert training.stdout.readline() == b"batch\n"
    total = sum(path.stat().st_size for path in (tmp_path / "data").iterdir())
    until(lambda: arrived_bytes(tmp_path / "cache") > 0.55 * total)
    family = [training, *psutil.Process(training.pid).children(recursive=True)]
    if how is signal.SIGINT:
        os.killpg(training.pid, how)
    else:
        training.send_signal(how)
    training.wait(30)
    training.stdout.close()
    _, alive = psutil.wait_procs(
        [psutil.Process(p.pid) for p in family if psutil.pid_exists(p.pid)], timeout=30
    )
    assert not alive, what_they_do(alive, said)
    sent = sum(request.sent for request in server.log)
    server.go_on()
    with make(urls(server), tmp_path) as loader:
        assert sorted(keys_of(loader)) == oracle(tmp_path, 0, 1, 2, 3)
    again = sum(request.sent for request in server.log) - total
    assert again < sent / 4  # what was verified was taken up, not fetched again
    assert not Tier.open(tmp_path / "cache").parts("*")


NOTEBOOK = """
import faulthandler, multiprocessing, signal, sys, streamload
faulthandler.register(signal.SIGUSR1)
urls, cache, method = sys.argv[1:]
loader = streamload.make_loader(
    urls, cache_dir=cache, cache_size="1GB", batch_size=5, num_workers=2,
    workers=streamload.Workers(multiprocessing_context=method),
)
try:
    for _ in loader:
        print("batch", flush=True)
except KeyboardInterrupt:
    pids = sorted(child.pid for child in multiprocessing.active_children())
print("interrupted", flush=True)
sys.stdin.readline()
batches = sum(1 for _ in loader)
print(batches, pids == sorted(child.pid for child in multiprocessing.active_children()), flush=True)
"""


@pytest.mark.deep
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.deep)])
def test_the_workers_outlive_an_interrupt_that_the_training_outlives(
    method: str, server: ShardServer, tmp_path: Path
) -> None:
    """A notebook's kernel goes on after Ctrl-C, which is sent to all of its processes."""
    server.stop_after(0.6)
    command = [sys.executable, "-c", NOTEBOOK, urls(server), str(tmp_path / "cache"), method]
    pipe, said = subprocess.PIPE, tmp_path / "said"
    with (
        said.open("wb") as stderr,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, start_new_session=True) as notebook,
    ):
        assert notebook.stdin is not None
        assert notebook.stdout is not None
        lines = Lines(notebook.stdout.fileno())
        try:
            assert lines.next(60) == "batch"
            while lines.next(1.0) == "batch":
                pass
            # It waits: Python drops an interrupt that meets a weakref's callback.
            os.killpg(notebook.pid, signal.SIGINT)
            while (line := lines.next(60)) == "batch":
                pass
            assert line == "interrupted"
            server.go_on()
            notebook.stdin.write(b"go on\n")
            notebook.stdin.flush()
            assert lines.next(60) == f"{sum(COUNTS) // 5} True"
            assert lines.next(60) == ""  # all its processes have ended
        except AssertionError as exc:
            family = [psutil.Process(notebook.pid), *psutil.Process(notebook.pid).children(recursive=True)]
            exc.args = (f"{exc}\n{what_they_do(family, said)}",)
            raise
        finally:
            os.killpg(notebook.pid, signal.SIGKILL)


def test_a_batch_that_waits_says_for_what(
    server: ShardServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamload.worker.blocked.WARN_SECONDS", 0.3)
    server.stop_after(0.2)
    loader = make(urls(server), tmp_path, num_workers=0, batch_size=50)

    class Enough(Exception):
        pass

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            server.go_on()

    logging.getLogger("streamload").addHandler(watch := Watch(logging.WARNING))
    try:
        next(iter(loader))
    finally:
        logging.getLogger("streamload").removeHandler(watch)
        loader.close()
    assert "a batch has waited 0 s for <ShardView http://127.0.0.1" in caplog.text
    assert "filled by this process" in caplog.text


def three_ids(texts: list[str]) -> torch.Tensor:
    return torch.tensor([[len(text), 1, 0] for text in texts])


def with_types(texts: list[str]) -> dict[str, torch.Tensor]:
    return {"input_ids": three_ids(texts), "token_type_ids": torch.full((len(texts), 1), 9)}


def test_what_a_batch_looks_like(server: ShardServer, tmp_path: Path) -> None:
    with make(urls(server), tmp_path, tokenizer=three_ids, with_keys=False, num_workers=0) as loader:
        images, texts = next(iter(loader))
        assert (images.shape, images.dtype) == ((5, 3, 224, 224), torch.float32)
        assert (texts.shape, texts.dtype) == ((5, 3), torch.int64)
    with make(urls(server), tmp_path, tokenizer=three_ids, output="dict", num_workers=1) as loader:
        assert sorted(next(iter(loader))) == ["__key__", "__url__", "image", "text"]
    with make(urls(server), tmp_path, tokenizer=three_ids, output="hf", with_keys=False) as loader:
        batch = next(iter(loader))
        assert sorted(batch) == ["input_ids", "pixel_values"]
    with make(urls(server), tmp_path, tokenizer=with_types, output="hf", with_keys=False) as loader:
        batch = next(iter(loader))
        assert sorted(batch) == ["input_ids", "pixel_values", "token_type_ids"]
        assert batch["token_type_ids"].tolist() == [[9]] * 5
    with make(urls(server), tmp_path, text_key="missing;json:digest") as loader:
        _, texts, origin = next(iter(loader))
        digests = {k: json.loads(m["json"])["digest"] for n in range(4) for k, m in members_of(tmp_path, n)}
        assert texts == [digests[key] for key in origin["__key__"]]
    with make(urls(server), tmp_path, map_sample=describe, with_keys=False) as loader:
        batch = next(iter(loader))
        assert batch["size"].dtype == torch.int64
        assert batch["audio"].shape == (5, 2)
        assert isinstance(batch["name"], list)
    with make(urls(server), tmp_path, device="cpu") as loader:
        assert next(iter(loader))[0].device.type == "cpu"


def members_of(tmp_path: Path, shard: int) -> list[tuple[str, dict[str, bytes]]]:
    return read_oracle(tmp_path / "data" / f"{shard:05d}.tar")


def describe(sample: dict[str, Any]) -> dict[str, Any]:
    return {"name": sample["__key__"], "size": len(sample["jpg"]), "audio": torch.zeros(2)}


def test_hf_output_without_a_tokenizer_is_refused(server: ShardServer, tmp_path: Path) -> None:
    with pytest.raises(streamload.errors.OptionError, match="tokenizer"):
        make(urls(server), tmp_path, output="hf")


def test_an_epoch_smaller_than_a_batch_is_an_error_and_not_an_empty_epoch(
    server: ShardServer, tmp_path: Path
) -> None:
    with (
        make(urls(server), tmp_path, batch_size=500) as loader,
        pytest.raises(streamload.errors.DataError, match="500"),
    ):
        keys_of(loader)


@pytest.mark.parametrize("file", ["data", "names", "index"])
@pytest.mark.parametrize(
    "place", [pytest.param(0.0, marks=pytest.mark.deep), 0.4, pytest.param(1.0, marks=pytest.mark.deep)]
)
@pytest.mark.sampled(1)
def test_bytes_that_rot_in_the_cache_are_fetched_again(
    file: str, place: float, server: ShardServer, tmp_path: Path
) -> None:
    with make(urls(server), tmp_path) as loader:
        first = keys_of(loader)
    for path in (tmp_path / "cache" / "shards").glob(f"*/{file}"):
        content = bytearray(path.read_bytes())
        content[min(int(place * len(content)), len(content) - 1)] ^= 0x10
        path.write_bytes(content)
    with make(urls(server), tmp_path) as loader:
        assert keys_of(loader) == first
        in_no_sample = file == "data" and place in {0.0, 1.0}  # a tar's first byte and its last
        assert loader.stats().checksum_failures >= (0 if in_no_sample else 1)


def test_files_of_the_cache_that_are_cut_or_gone_are_fetched_again(
    server: ShardServer, tmp_path: Path
) -> None:
    with make(urls(server), tmp_path) as loader:
        first = keys_of(loader)
    one, two, three, four = sorted((tmp_path / "cache" / "shards").iterdir())
    (one / "data").unlink()
    (four / "names").unlink()
    os.truncate(two / "data", 3000)
    os.truncate(three / "index", 200)
    with make(urls(server), tmp_path) as loader:
        assert keys_of(loader) == first


@pytest.mark.deep
def test_more_shards_may_be_gone_than_a_shell_lets_a_process_open_files(
    server: ShardServer, tmp_path: Path
) -> None:
    """What a worker has to keep open for a shard that was given up isn't held against 1,024 files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    missing = [f"{server.url}/missing-{number}.tar" for number in range(150)]
    listed = [f"{server.url}/{number:05d}.tar" for number in range(len(COUNTS))]
    urls = [*listed[:3], *missing, listed[3]]
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, limits[1]))
    try:
        with make(urls, tmp_path, num_workers=1, shuffle=0, lanes=1, max_bad_shards=None) as loader:
            assert sorted(keys_of(loader)) == oracle(tmp_path, 0, 1, 2, 3)
            assert loader.stats().shards_given_up == len(missing)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 64 * 5)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("revalidate", ["never", pytest.param("start", marks=pytest.mark.deep)])
@pytest.mark.parametrize("harm", [cut_short, emptied, lambda path: flip(path, path.stat().st_size // 2)])
@pytest.mark.sampled(1)
def test_an_index_without_data_that_is_damaged_is_made_again(
    harm: Callable[[Path], None], revalidate: str, server: ShardServer, tmp_path: Path
) -> None:
    """It was taken for one that is still arriving, in each run anew."""
    largest = max(path.stat().st_size for path in (tmp_path / "data").iterdir())
    options = {"cache_size": largest * 4 // 5, "num_workers": 0, "revalidate": revalidate}
    with make(urls(server), tmp_path, **options) as loader:
        assert sorted(keys_of(loader)) == oracle(tmp_path, 0, 1, 2, 3)
    indexes = list((tmp_path / "cache" / "bare").glob("*/index"))
    assert len(indexes) == len(COUNTS)
    for path in indexes:
        harm(path)
    with make(urls(server), tmp_path, **options) as loader:
        assert sorted(keys_of(loader)) == oracle(tmp_path, 0, 1, 2, 3)
        assert loader.stats().checksum_failures == len(COUNTS)


def local_urls(tmp_path: Path) -> str:
    write_shards(tmp_path / "data", COUNTS, seed=11)
    return f"{tmp_path}/data/{{00000..00003}}.tar"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("content", [lambda whole: whole[: len(whole) // 2 + 700], lambda whole: b"1" * 9000])
@pytest.mark.sampled(2)
def test_a_local_shard_that_was_left_out_may_be_removed(
    content: Callable[[bytes], bytes], workers: int, tmp_path: Path
) -> None:
    """The next epoch never began, or was an error of the cache."""
    every = local_urls(tmp_path)
    damaged = tmp_path / "data" / "00001.tar"
    damaged.write_bytes(content(damaged.read_bytes()))
    with make(every, tmp_path, num_workers=workers) as loader:
        assert set(oracle(tmp_path, 0, 2, 3)) <= set(keys_of(loader))
        damaged.unlink()
        assert sorted(keys_of(loader)) == oracle(tmp_path, 0, 2, 3)


def removed(path: Path) -> None:
    path.unlink()


def unreadable(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)  # ELOOP, as any error but "not found" would do


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("harm", "error"),
    [
        (removed, streamload.errors.OriginNotFound),
        pytest.param(unreadable, streamload.errors.OriginError, marks=pytest.mark.deep),
    ],
)
def test_a_local_shard_that_cannot_be_opened_any_more_is_an_error_or_is_left_out(
    harm: Callable[[Path], None], error: type[Exception], tmp_path: Path
) -> None:
    """Its index was of an earlier run: that is no trouble of the cache."""
    every = local_urls(tmp_path)
    for policy in ("skip", "raise"):
        with make(every, tmp_path, cache_dir=tmp_path / policy) as loader:
            assert sorted(keys_of(loader)) == oracle(tmp_path, 0, 1, 2, 3)
    harm(tmp_path / "data" / "00001.tar")
    with make(every, tmp_path, cache_dir=tmp_path / "skip") as loader:
        assert sorted(keys_of(loader)) == oracle(tmp_path, 0, 2, 3)
        assert loader.stats().shards_given_up == 1
    with (
        make(every, tmp_path, cache_dir=tmp_path / "raise", on_error="raise") as loader,
        pytest.raises(error, match=r"00001\.tar") as raised,
    ):
        keys_of(loader)
    assert raised.type is error


def test_a_slow_start_is_not_a_stall(tmp_path: Path) -> None:
    """A server that answers late, and one after the other, delays and loses nothing."""
    write_shards(tmp_path / "data", COUNTS, seed=11)
    with (
        ShardServer(tmp_path / "data", latency_seconds=0.3) as server,
        make(urls(server), tmp_path) as loader,
    ):
        assert len(keys_of(loader)) == sum(COUNTS)
        assert loader.stats().origin_retries == 0


def fails_for(key: str, sample: dict[str, Any]) -> dict[str, Any]:
    if sample["__key__"] == key:
        raise ZeroDivisionError("division by zero")
    return {"size": len(sample["jpg"])}


def has_other_keys(key: str, sample: dict[str, Any]) -> dict[str, Any]:
    return {f"size{sample['__key__'] == key}": 1}


def fails(image: Any) -> Any:
    raise ZeroDivisionError("division by zero")


def refuses(captions: list[str]) -> Any:
    raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"map_sample": fails_for}, ZeroDivisionError),
        ({"map_sample": has_other_keys}, ValueError),
        ({"preprocess": fails}, ZeroDivisionError),
        ({"tokenizer": refuses}, ZeroDivisionError),
    ],
)
def test_an_error_of_the_users_function_names_the_sample(
    options: dict[str, Any], error: type[Exception], workers: int, server: ShardServer, tmp_path: Path
) -> None:
    first = oracle(tmp_path, 0)[0]
    given = {
        name: functools.partial(function, first) if name == "map_sample" else function
        for name, function in options.items()
    }
    loader = make(urls(server), tmp_path, num_workers=workers, shuffle=0, **given)
    with loader, pytest.raises(error) as caught:
        next(iter(loader))
    said = "".join(traceback.format_exception(caught.value))
    assert f"'{first}'" in said
    assert "in sample" in said or "in the batch of samples" in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"drop_last": True}, "only full batches"),
        ({"collate_fn": list}, "map_sample="),
        ({"pin_memory": True}, "device="),
        ({"shuffel": 3}, "is shuffle= meant"),
        ({"quux": 3}, "help"),
        ({"batch_size": None}, "give 1, and index the single sample"),
        ({"image_key": None}, "map_sample="),
        ({"text_key": 7}, "text_key=7"),
        ({"device": "cuda:9"}, "finds 0 such devices"),
    ],
)
def test_an_argument_of_another_loader_says_what_takes_its_place(
    options: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(streamload.errors.OptionError, match=re.escape(says)):
        flat.make_loader("a.tar", **options)
