"""Facts beside the index: equal to what the tar holds, however they are stored, damaged, shared or lost."""

from __future__ import annotations

import contextlib
import io
import math
import multiprocessing
import os
import shutil
import signal
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamload.cache.fill import Filled as FillResult
from streamload.cache.fill import fill
from streamload.cache.garbage import clear, collect_garbage
from streamload.cache.inventory import take_inventory
from streamload.cache.selection import Selection
from streamload.cache.shard import ShardList, shard_of
from streamload.cache.shard_cache import ShardCache
from streamload.cache.tier import Tier
from streamload.cache.verify import verify
from streamload.errors import DatasetChanged
from streamload.facts.recipes import read_facts
from streamload.facts.shard_facts import ShardFacts
from streamload.metrics import Counters
from streamload.origins.origin import open_origin
from streamload.shards.columns import Column
from streamload.shards.facts import pack_values, unpack_values
from streamload.testing.shards import read_oracle, write_shards
from streamload.urls import expand_urls
from tests.support.conversations import sizes_by_pillow, write_conversations
from tests.support.tiers import SAMPLES, SHARDS, Filled, flip, until

NAMES = ("index", "letters", "image_bytes", "width")


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Filled]:
    filled = Filled(tmp_path)
    yield filled
    filled.close()


def letters(sample: dict[str, Any]) -> float | None:
    """The length of the caption; unknown for every seventh sample."""
    made = os.environ.get("FACTS_MADE")
    if made is not None:
        with Path(made).open("a") as log:
            log.write(f"{sample['__key__']}\n")
    return None if int(sample["__key__"]) % 7 == 0 else len(sample["txt"])


def columns(facts: Mapping[str, Any] | None = None) -> dict[str, Column]:
    return read_facts(facts or {"index": "json:index", "letters": (letters, "1")}, "jpg;png", "txt", None)


def read_range(shard: Any, version: Any, start: int, stop: int) -> bytes:
    return open_origin(shard.url).read(start, stop, version)


@contextlib.contextmanager
def opened(
    tier: Tier, urls: Any, made: Mapping[str, Column] | None = None, **options: Any
) -> Iterator[ShardCache]:
    shards = ShardList(expand_urls(urls), None)
    selection = Selection((), columns=columns() if made is None else made, open_companion=ShardFacts)
    cache = ShardCache(
        tier, shards, selection, skip=True, counts=Counters(), counted=lambda shard: True, **options
    )
    with contextlib.closing(cache):
        yield cache


def expected(path: Path) -> dict[str, list[float]]:
    """The facts of a shard's samples, as `tarfile` reads them."""
    samples = read_oracle(path)
    return {
        "index": [float(place) for place in range(len(samples))],
        "letters": [
            math.nan if int(key) % 7 == 0 else float(len(members["txt"])) for key, members in samples
        ],
        "image_bytes": [float(len(members["jpg"])) for _, members in samples],
    }


def assert_true(filled: Filled, number: int, cache: ShardCache) -> None:
    found = cache.facts(number, range(SAMPLES), NAMES)
    assert found is not None
    for name, values in expected(filled.paths[number]).items():
        np.testing.assert_array_equal(found[name], values)


def files_of(shard: Path) -> list[Path]:
    return sorted(shard.glob("facts.*"))


@pytest.fixture
def made_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The keys for which `letters` was computed."""
    path = tmp_path / "made"
    monkeypatch.setenv("FACTS_MADE", str(path))
    return lambda: path.read_text().split() if path.exists() else []


def test_facts_are_those_of_the_tar_and_are_made_once(filled: Filled, made_log: Callable[[], list[str]]):
    for _ in range(2):
        with opened(filled.tier, filled.urls) as cache:
            for number in range(SHARDS):
                assert_true(filled, number, cache)
    assert len(made_log()) == SHARDS * SAMPLES
    assert len(files_of(filled.shard(0))) == 3
    assert filled.asked_for() == set()


def test_facts_come_in_the_order_that_is_asked_for(filled: Filled):
    numbers = [7, 0, 3, 3]
    with opened(filled.tier, filled.urls) as cache:
        found = cache.facts(1, np.array(numbers), ["letters", "height", "caption_bytes"])
        assert found is not None
        assert list(found) == ["letters", "height", "caption_bytes"]
        entries = [cache.view(1).reader.entry(number) for number in numbers]
        np.testing.assert_array_equal(found["height"], [entry.height for entry in entries])
        np.testing.assert_array_equal(found["caption_bytes"], [entry.caption_bytes for entry in entries])
        np.testing.assert_array_equal(
            found["letters"], np.array(expected(filled.paths[1])["letters"])[numbers]
        )
        assert cache.facts(1, [], ["letters"])["letters"].shape == (0,)
        assert cache.facts(1, [3], []) == {}
        assert cache.facts(1, [SAMPLES], ["letters"]) is None


@pytest.mark.parametrize("place", [0, 9, 20, 30, -1])
def test_a_flipped_bit_makes_the_values_again(filled: Filled, made_log: Callable[[], list[str]], place: int):
    with opened(filled.tier, filled.urls) as cache:
        assert_true(filled, 0, cache)
    before = [file.read_bytes() for file in files_of(filled.shard(0))]
    for file, content in zip(files_of(filled.shard(0)), before, strict=True):
        flip(file, place % len(content))
    with opened(filled.tier, filled.urls) as cache:
        assert_true(filled, 0, cache)
    assert len(made_log()) == 2 * SAMPLES
    assert [file.read_bytes() for file in files_of(filled.shard(0))] == before


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_cut_file_is_completed(filled: Filled, share: float):
    with opened(filled.tier, filled.urls) as cache:
        assert_true(filled, 0, cache)
    before = [file.read_bytes() for file in files_of(filled.shard(0))]
    for file in files_of(filled.shard(0)):
        os.truncate(file, int(share * file.stat().st_size))
    with opened(filled.tier, filled.urls) as cache:
        assert_true(filled, 0, cache)
    assert [file.read_bytes() for file in files_of(filled.shard(0))] == before


def test_damaged_data_is_never_a_fact(filled: Filled):
    """The caption's length can't be told from damaged bytes: the shard is removed, to be fetched again."""
    data = (filled.shard(2) / "data").read_bytes()
    flip(filled.shard(2) / "data", data.index(b"noise from shard 2 index 4"))
    with opened(filled.tier, filled.urls) as cache:
        assert cache.facts(2, range(SAMPLES), ["letters"]) is None
        assert not filled.shard(2).exists()
        part = filled.tier.claim(filled.digest(2))
        shard = shard_of(filled.urls[2], None)
        fill(part, shard, lambda: open_origin(shard.url), next_use=lambda: 0.0, stop=threading.Event())
        until(lambda: cache.arrived(2)[1])
        assert_true(filled, 2, cache)


def test_values_of_another_version_of_a_shard_are_not_used(filled: Filled, tmp_path: Path):
    with opened(filled.tier, filled.urls) as cache:
        assert_true(filled, 0, cache)
    shutil.copytree(filled.shard(0), tmp_path / "old")
    filled.tier.trash(filled.shard(0))
    write_shards(filled.data, [SAMPLES] * SHARDS, seed=42)  # other bytes under the same names
    part, shard = filled.tier.claim(filled.digest(0)), shard_of(filled.urls[0], None)
    fill(part, shard, lambda: open_origin(shard.url), next_use=lambda: 0.0, stop=threading.Event())
    for file in files_of(tmp_path / "old"):
        shutil.copy(file, filled.shard(0))
    with opened(filled.tier, filled.urls) as cache:
        assert_true(filled, 0, cache)


def test_an_arriving_shard_has_the_facts_of_what_has_arrived(
    filled: Filled, made_log: Callable[[], list[str]]
):
    """They are made as samples arrive, each once, and survive the rename that publishes the shard."""
    filled.tier.trash(filled.shard(0))
    filled.server.stop_after(0.5)
    part, shard = filled.tier.claim(filled.digest(0)), shard_of(filled.urls[0], None)
    thread = threading.Thread(
        target=fill,
        args=(part, shard, lambda: open_origin(shard.url)),
        kwargs={"next_use": lambda: 0.0, "stop": threading.Event()},
    )
    thread.start()
    with opened(filled.tier, filled.urls) as cache, opened(filled.tier, filled.urls) as other:
        until(lambda: len(cache.arrived(0)[0]) >= SAMPLES // 4)
        count = len(cache.arrived(0)[0])
        assert count < SAMPLES
        found = cache.facts(0, range(count), ["letters"])
        np.testing.assert_array_equal(found["letters"], expected(filled.paths[0])["letters"][:count])
        assert len(made_log()) == count
        filled.server.go_on()
        thread.join()
        until(lambda: cache.arrived(0)[1])
        assert_true(filled, 0, cache)
        until(lambda: other.arrived(0)[1])
        assert_true(filled, 0, other)
    assert len(made_log()) == SAMPLES
    assert len(files_of(filled.shard(0))) == 3


def test_an_index_only_shard_is_requested_in_large_ranges_once(filled: Filled):
    index_only = filled.index_only(1)
    filled.asked = len(filled.server.log)
    for _ in range(2):
        with opened(filled.tier, filled.urls, fetch=read_range) as cache:
            assert_true(filled, 1, cache)
    assert len(files_of(index_only)) == 3
    assert len(filled.server.log) - filled.asked == 1


def test_of_an_index_only_shard_each_sample_has_the_members_that_it_needs(filled: Filled):
    samples = [{"jpg": b"x", "txt": b"one"}, {"jpg": b"x", "txt": b"two", "json": b'{"index": 7}'}]
    with tarfile.open(filled.paths[1], "w") as tar:
        for number, members in enumerate(samples, 1):
            for extension, payload in members.items():
                info = tarfile.TarInfo(f"{number}.{extension}")
                info.size = len(payload)
                tar.addfile(info, io.BytesIO(payload))
    filled.index_only(1)
    with opened(filled.tier, filled.urls, fetch=read_range) as cache:
        found = cache.facts(1, range(2), ["index", "letters"])
    assert found is not None
    np.testing.assert_array_equal(found["index"], [math.nan, 7])
    np.testing.assert_array_equal(found["letters"], [3, 3])


def test_an_index_only_shard_needs_no_bytes_for_a_table(filled: Filled, tmp_path: Path):
    filled.index_only(1)
    filled.asked = len(filled.server.log)
    (tmp_path / "t.csv").write_text("key,p\n00001000003,0.5\n")
    with opened(filled.tier, filled.urls, columns({"p": str(tmp_path / "t.csv")}), fetch=read_range) as cache:
        found = cache.facts(1, [2, 3], ["p", "image_bytes"])
    np.testing.assert_array_equal(found["p"], [math.nan, 0.5])
    assert filled.asked_for() == set()


def test_an_index_only_shard_whose_origin_has_changed_fails(filled: Filled):
    index_only = filled.index_only(1)
    write_shards(filled.data, [SAMPLES] * SHARDS, seed=42)
    with (
        opened(filled.tier, filled.urls, fetch=read_range) as cache,
        pytest.raises(DatasetChanged),
    ):
        cache.facts(1, range(SAMPLES), ["letters"])
    assert files_of(index_only) == []


def test_a_shard_that_was_given_up_has_the_facts_of_the_samples_before(filled: Filled):
    expected_letters = expected(filled.paths[0])["letters"]
    filled.tier.trash(filled.shard(0))
    content = bytearray(filled.paths[0].read_bytes())
    header = content.index(b"00000000007.jpg")
    content[header : header + 512] = bytes([7]) * 512
    filled.paths[0].write_bytes(content)
    part, shard = filled.tier.claim(filled.digest(0)), shard_of(filled.urls[0], None)
    outcome = fill(part, shard, lambda: open_origin(shard.url), next_use=lambda: 0.0, stop=threading.Event())
    assert outcome.result is FillResult.GAVE_UP
    for _ in range(2):
        with opened(filled.tier, filled.urls) as cache:
            numbers, ended = cache.arrived(0)
            assert ended
            found = cache.facts(0, numbers, ["letters"])
            np.testing.assert_array_equal(found["letters"], expected_letters[: len(numbers)])
            assert 0 < len(numbers) < SAMPLES
    assert len(files_of(filled.tier.tombstone(filled.digest(0)))) == 1
    assert not take_inventory(filled.tier).foreign
    outcome.tombstone.close()


def test_a_local_shard_is_read_where_it_is(filled: Filled, made_log: Callable[[], list[str]]):
    urls = [str(path) for path in filled.paths]
    shard = shard_of(urls[0], None)
    fill(filled.tier.claim(shard.digest), shard, None, next_use=lambda: 0.0, stop=threading.Event())
    for _ in range(2):
        with opened(filled.tier, urls) as cache:
            assert_true(filled, 0, cache)
    assert len(made_log()) == SAMPLES
    filled.paths[0].write_bytes(
        filled.paths[1].read_bytes()
    )  # edited: its index is made again, and its facts
    with opened(filled.tier, urls) as cache:
        assert cache.facts(0, [0], ["letters"]) is None
        fill(filled.tier.claim(shard.digest), shard, None, next_use=lambda: 0.0, stop=threading.Event())
        until(lambda: cache.arrived(0)[1])
        assert_true(filled, 0, cache)


def test_facts_are_evicted_with_their_shard_and_are_counted(filled: Filled):
    before = filled.tier.used_bytes
    with opened(filled.tier, filled.urls) as cache:
        for number in range(SHARDS):
            assert_true(filled, number, cache)
    assert filled.tier.used_bytes == before + 3 * SHARDS * 4096
    assert Tier(filled.root).budget.used_bytes >= filled.tier.used_bytes  # as recorded, before a scan
    assert not take_inventory(filled.tier).foreign
    collect_garbage(filled.tier, limit_bytes=filled.tier.used_bytes - 1)
    assert sum(filled.shard(number).exists() for number in range(SHARDS)) == SHARDS - 1
    clear(filled.tier)
    assert filled.tier.used_bytes == 0


def test_without_room_facts_are_made_and_not_stored(filled: Filled):
    with opened(filled.tier, filled.urls) as cache:
        for number in range(SHARDS):  # open, so that none of them is evicted
            cache.arrived(number)
        Tier(filled.root, filled.tier.used_bytes)
        for number in range(SHARDS):
            assert_true(filled, number, cache)
            assert files_of(filled.shard(number)) == []


def test_a_file_that_cannot_be_written_is_done_without(filled: Filled):
    with opened(filled.tier, filled.urls) as cache:
        for column in columns().values():
            (filled.shard(0) / f"facts.{column.digest}").mkdir()
        assert_true(filled, 0, cache)


def test_verify_removes_a_damaged_file_and_no_shard(filled: Filled):
    with opened(filled.tier, filled.urls) as cache:
        assert_true(filled, 0, cache)
    damaged, *others = files_of(filled.shard(0))
    flip(damaged, 30)
    for take_out in (False, True):
        assert all(found is not None and found.damage is None for found in verify(filled.tier))
        assert [found.bad_facts for found in verify(filled.tier, take_out=take_out)].count(1) == 1
    assert files_of(filled.shard(0)) == others
    with opened(filled.tier, filled.urls) as cache:
        assert_true(filled, 0, cache)


def read_all(root: Path, urls: list[str], at_once: Any, results: Any) -> None:
    with opened(Tier(root), urls) as cache:
        at_once.wait()
        found = [
            cache.facts(number, range(SAMPLES), ["letters"])["letters"].tolist() for number in range(SHARDS)
        ]
    results.put(found)


def test_processes_that_want_the_same_facts_at_once_make_them_once(
    filled: Filled, made_log: Callable[[], list[str]]
):
    context = multiprocessing.get_context("fork")
    at_once, results = context.Barrier(3), context.Queue()
    processes = [
        context.Process(target=read_all, args=(filled.root, filled.urls, at_once, results)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    for one in found:
        np.testing.assert_array_equal(one, [expected(path)["letters"] for path in filled.paths])
    assert len(made_log()) == SHARDS * SAMPLES


def make_and_die(root: Path, urls: list[str]) -> None:
    """Make facts until the third sample of a shard, then die with the file locked."""

    def third(sample: dict[str, Any]) -> float:
        if sample["__key__"].endswith("2"):
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    made = columns()
    object.__setattr__(made["letters"], "function", third)
    with opened(Tier(root), urls, made) as cache:
        cache.facts(0, range(SAMPLES), ["index", "letters"])


def test_a_process_killed_while_it_makes_facts_leaves_them_to_the_next(filled: Filled):
    process = multiprocessing.get_context("fork").Process(
        target=make_and_die, args=(filled.root, filled.urls)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with opened(filled.tier, filled.urls) as cache:
        assert_true(filled, 0, cache)


def both(sample: dict[str, Any]) -> tuple[float | None, int]:
    """The length of the caption, and the pixels of all images."""
    return letters(sample), sum(width * height for width, height in sample["__images__"].values())


def pixels_by_pillow(path: Path) -> list[int]:
    sizes = [sizes_by_pillow(members) for _, members in read_oracle(path)]
    return [sum(width * height for _, (width, height) in of_sample) for of_sample in sizes]


SEVERAL = {("letters", "pixels"): (both, "1")}


@pytest.mark.parametrize("kind", ["published", "index-only", "arriving", "local"])
def test_a_function_of_several_facts_is_called_once_and_has_one_file(
    filled: Filled, made_log: Callable[[], list[str]], kind: str
):
    write_conversations(filled.data, [SAMPLES] * SHARDS, seed=8)
    urls = [str(path) for path in filled.paths] if kind == "local" else filled.urls
    filled.tier.trash(filled.shard(1))
    shard, filling = shard_of(urls[1], None), list[threading.Thread]()
    place = filled.tier.published(shard.digest)
    if kind == "index-only":
        place = filled.index_only(1)
    else:
        filled.server.stop_after(0.5 if kind == "arriving" else 1)
        filling.append(
            threading.Thread(
                target=fill,
                args=(filled.tier.claim(shard.digest), shard, lambda: open_origin(shard.url)),
                kwargs={"next_use": lambda: 0.0, "stop": threading.Event()},
            )
        )
        filling[0].start()
    oracle = {
        "letters": [
            math.nan if int(key) % 7 == 0 else len(members["txt"])
            for key, members in read_oracle(filled.paths[1])
        ],
        "pixels": pixels_by_pillow(filled.paths[1]),
    }
    for _ in range(2):
        with opened(filled.tier, urls, columns(SEVERAL), fetch=read_range) as cache:
            for name in ("pixels", "letters"):
                until(lambda cache=cache: len(cache.arrived(1)[0]) >= SAMPLES // 4)
                count = len(cache.arrived(1)[0])
                found = cache.facts(1, range(count), [name])
                assert found is not None
                np.testing.assert_array_equal(found[name], oracle[name][:count])
                made = made_log()
                assert len(made) == len(set(made)) >= count
                if kind == "arriving" and name == "pixels":
                    filled.server.go_on()
            until(lambda cache=cache: cache.arrived(1)[1])
            found = cache.facts(1, range(SAMPLES), ["pixels", "letters"])
            for name, values in oracle.items():
                np.testing.assert_array_equal(found[name], values)
    for thread in filling:
        thread.join()
    assert len(made_log()) == SAMPLES
    assert len(files_of(place)) == 1
    assert [found.bad_facts for found in verify(filled.tier) if found is not None] == [0] * SHARDS


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_a_cut_file_of_several_facts_is_completed(filled: Filled, share: float):
    for _ in range(2):
        with opened(filled.tier, filled.urls, columns(SEVERAL)) as cache:
            found = cache.facts(0, range(SAMPLES), ["letters", "pixels"])
        np.testing.assert_array_equal(found["letters"], expected(filled.paths[0])["letters"])
        np.testing.assert_array_equal(found["pixels"], pixels_by_pillow(filled.paths[0]))
        (file,) = files_of(filled.shard(0))
        os.truncate(file, int(share * file.stat().st_size))


def test_a_column_of_other_code_has_another_file(filled: Filled):
    def other(sample: dict[str, Any]) -> float:
        return len(sample["txt"]) + 1.0

    with opened(filled.tier, filled.urls) as cache:
        assert_true(filled, 0, cache)
    with opened(filled.tier, filled.urls, columns({"letters": other})) as cache:
        found = cache.facts(0, [1], ["letters"])
    assert found["letters"][0] == expected(filled.paths[0])["letters"][1] + 1
    assert len(files_of(filled.shard(0))) == 4


def test_a_number_too_large_for_its_type_is_the_largest_and_not_unknown():
    given = np.array([0, 65_533, 65_534, 65_535, 1e9, math.nan])
    found = unpack_values(pack_values(given, "<u2"), "<u2")
    np.testing.assert_array_equal(found, [0, 65_533, 65_534, 65_534, 65_534, math.nan])
