"""webdataset's own pipelines on the cache, with the newest webdataset and with 0.2.86 (pytest-openclip)."""

import gc
import gzip
import io
import itertools
import json
import pickle
import tarfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds

import streamload.integrations.webdataset as cached
from streamload.cache.shard import shard_of
from streamload.cache.tier import Tier
from streamload.errors import CacheError, CacheFull, OptionError, OriginNotFound, ShardError, StateMismatch
from streamload.prefetch import fallback
from streamload.testing.server import Fault, ShardServer
from streamload.testing.shards import write_shards

COUNTS = [30, 50, 7, 20, 41, 12]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_shards(tmp_path_factory.mktemp("shards"), COUNTS, seed=9)


@pytest.fixture
def server(shards: list[Path]) -> Iterator[ShardServer]:
    with ShardServer(shards[0].parent) as running:
        yield running


@pytest.fixture
def urls(server: ShardServer, shards: list[Path]) -> list[str]:
    return [f"{server.url}/{path.name}" for path in shards]


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    place(monkeypatch, 0, 1)


def place(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))


def theirs(urls: list[str], **options: Any) -> list[dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves files and pipes open
        samples = list(wds.DataPipeline(wds.SimpleShardList(urls), wds.tarfile_to_samples(**options)))
        gc.collect()
    return samples


def ours(urls: list[str], cache: Path, **options: Any) -> list[dict[str, Any]]:
    stage = cached.tarfile_to_samples(cache_dir=cache, **options)
    return list(wds.DataPipeline(wds.SimpleShardList(urls), stage))


def keys(samples: list[dict[str, Any]]) -> list[str]:
    return [sample["__key__"] for sample in samples]


def odd_tar(path: Path) -> Path:
    """Names in folders, extensions with dots and capitals, empty members, metadata, one key in two places."""
    members = {
        "__meta__": b"m",
        "__of__/a.txt": b"n",
        "a.jpg": b"1",
        "a.Seg.PNG": b"2",
        "a.txt": b"",
        "no-extension": b"3",
        "folder/a.txt": b"4",
        "folder.d/b.c.txt": b"5" * 5000,
        "folder.d/b.TXT": b"6",
        "z.txt": "ä".encode(),
    }
    with tarfile.open(path, "w") as tar:
        for name, payload in [*members.items(), ("a.cls", b"7")]:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))
    return path


@pytest.mark.parametrize("remote", [True, False])
def test_samples_are_those_of_webdataset(
    tmp_path: Path, shards: list[Path], urls: list[str], remote: bool
) -> None:
    listed = urls if remote else [*map(str, shards), str(odd_tar(tmp_path / "odd.tar"))]
    expected = theirs(listed)
    for _ in range(2):  # while they arrive, and from the cache
        samples = ours(listed, tmp_path / "cache")
        assert samples == expected
        assert list(map(list, samples)) == list(map(list, expected))  # members in the order of the tar
    assert {type(value) for sample in samples for value in sample.values()} == {str, bytes}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("options", [{}, {"select_files": lambda name: not name.endswith(".json")}])
def test_a_web_dataset_is_changed_by_one_word(
    tmp_path: Path, urls: list[str], options: dict[str, Any]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = list(wds.WebDataset(urls, shardshuffle=False, **options))
        gc.collect()
        dataset = cached.WebDataset(urls, shardshuffle=False, cache_dir=tmp_path, cache_size="1GB", **options)
        assert list(dataset) == expected
        shuffled = cached.WebDataset(urls, shardshuffle=6, cache_dir=tmp_path).shuffle(20).to_tuple("__key__")
        assert Counter(key for (key,) in shuffled) == Counter(keys(expected))
        with pytest.raises(OptionError, match="rename_keys"):
            cached.WebDataset(urls, shardshuffle=False, cache_dir=tmp_path, rename_files=str.lower)


def test_ranks_and_workers_share_one_copy_and_yield_every_sample_once(
    tmp_path: Path, server: ShardServer, urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = pickle.loads(pickle.dumps(cached.tarfile_to_samples(cache_dir=tmp_path)))
    pipeline = wds.DataPipeline(
        wds.SimpleShardList(urls),
        wds.split_by_node,
        wds.split_by_worker,
        stage,
        wds.map(lambda sample: sample["__key__"]),
    )
    expected = Counter(keys(theirs(urls)))
    before = len(server.log)
    for _ in range(2):
        counts: Counter[str] = Counter()
        for rank in range(2):
            place(monkeypatch, rank, 2)
            counts.update(torch.utils.data.DataLoader(pipeline, batch_size=None, num_workers=2))
        assert counts == expected
    sent: Counter[str] = Counter()
    for request in server.log[before:]:
        sent[request.path] += request.sent
    assert sent == {path.name: path.stat().st_size for path in server.root.iterdir()}


def test_samples_come_while_their_shard_arrives(tmp_path: Path, server: ShardServer, urls: list[str]) -> None:
    server.stop_after(0.5)
    samples = iter(
        wds.DataPipeline(wds.SimpleShardList(urls[1:2]), cached.tarfile_to_samples(cache_dir=tmp_path))
    )
    first = [next(samples) for _ in range(10)]
    assert not any(Tier(tmp_path).own("shards"))  # it isn't whole
    server.go_on()
    assert [*first, *samples] == theirs(urls[1:2])


def test_a_shard_that_was_left_half_way_is_continued(
    tmp_path: Path, server: ShardServer, urls: list[str]
) -> None:
    server.stop_after(0.5)
    stage = cached.tarfile_to_samples(cache_dir=tmp_path)
    samples = iter(wds.DataPipeline(wds.SimpleShardList(urls[1:2]), stage))
    for _ in range(10):
        next(samples)
    samples.close()  # type: ignore[attr-defined]
    server.go_on()
    before = len(server.log)
    samples = ours(urls[1:2], tmp_path)
    assert min(request.start or 0 for request in server.log[before:]) > 0
    assert samples == theirs(urls[1:2])


def test_errors_of_a_shard_go_to_the_handler(tmp_path: Path, server: ShardServer, urls: list[str]) -> None:
    server.misbehave("00002.tar", Fault(status=404))
    tar = (server.root / "00003.tar").read_bytes()
    damaged = bytearray(tar)
    header = tar.index(b"00003000011.txt")
    damaged[header + 148 : header + 156] = b"damaged!"  # the checksum of a header
    server.misbehave("00003.tar", Fault(body=bytes(damaged)))
    with pytest.raises(OriginNotFound, match="00002"):
        ours(urls, tmp_path)
    errors: list[Exception] = []

    def go_on(error: Exception) -> bool:
        errors.append(error)
        return True

    samples = ours(urls, tmp_path, handler=go_on)
    assert [type(error).__mro__[1] for error in errors][1:] == [ShardError]
    assert isinstance(errors[0], OriginNotFound)
    whole = theirs(urls[:2]) + theirs([str(server.root / "00003.tar")])[:11]
    assert keys(samples) == keys(whole) + keys(theirs(urls[4:]))
    assert all(len(sample) == 5 for sample in samples)  # none that is cut off
    marked = ours(urls[3:4], tmp_path, handler=go_on, done=cached.SamplesDone())
    assert marked[-1]["__sample__"].endswith(" 10 11")  # the shard isn't done, and a resume tells that again
    assert ours(urls, tmp_path, handler=wds.ignore_and_stop) == theirs(urls[:2])
    assert ours(["htp://x/a.tar", urls[0]], tmp_path, handler=wds.ignore_and_continue) == theirs(urls[:1])


def test_errors_of_the_cache_are_raised_whatever_the_handler_says(
    tmp_path: Path, server: ShardServer, urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError):
        ours(urls, tmp_path / "file", handler=wds.ignore_and_continue)
    packed = tmp_path / "packed.tar.gz"
    packed.write_bytes(gzip.compress((server.root / "00001.tar").read_bytes()))  # has no ranges
    monkeypatch.setattr(fallback, "_MEMORY", tmp_path / "no memory")
    with pytest.raises(CacheFull):
        ours([str(packed)], tmp_path / "cache", cache_size="64KB", handler=wds.ignore_and_continue)
    with pytest.raises(OptionError, match="cache_size"):
        cached.tarfile_to_samples(cache_size="much")


def test_a_cache_smaller_than_a_shard_loses_no_sample(tmp_path: Path, urls: list[str]) -> None:
    assert ours(urls[:2], tmp_path, cache_size="64KB") == theirs(urls[:2])


def test_a_cache_whose_room_is_in_use_loses_no_sample(tmp_path: Path, urls: list[str]) -> None:
    stage = cached.tarfile_to_samples(cache_dir=tmp_path, cache_size="440KB")
    first, second = (iter(wds.DataPipeline(wds.SimpleShardList([url]), stage)) for url in (urls[1], urls[4]))
    begun = [next(first)]
    assert list(second) == theirs(urls[4:5])
    assert [*begun, *first] == theirs(urls[1:2])


def test_a_damaged_copy_is_fetched_again(tmp_path: Path, server: ShardServer, urls: list[str]) -> None:
    expected = ours(urls[:1], tmp_path)
    data = Tier(tmp_path).published(shard_of(urls[0], None).digest) / "data"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.chmod(0o644)
    data.write_bytes(content)
    before = len(server.log)
    assert ours(urls[:1], tmp_path) == expected
    assert server.log[before:]


class Training:
    """A pipeline with a shuffle and batches, whose state is saved as JSON."""

    is_persistent = False
    loader: Any = None

    def __init__(self, urls: list[str], cache: Path, *states: str):
        self.done = cached.SamplesDone()
        if states:
            self.done.load_state_dict(*map(json.loads, states))
        self.pipeline = wds.DataPipeline(
            wds.SimpleShardList(urls),
            wds.split_by_node,
            wds.split_by_worker,
            cached.tarfile_to_samples(cache_dir=cache, done=self.done),
            wds.shuffle(25),
            wds.to_tuple("__key__", "__sample__"),
            wds.batched(8),
        )

    def steps(self, workers: int, most: int | None = None) -> list[str]:
        """Train for some steps; returns the keys of their samples."""
        used: list[str] = []
        if not (self.is_persistent and self.loader):
            self.loader = wds.WebLoader(
                self.pipeline, batch_size=None, num_workers=workers, persistent_workers=self.is_persistent
            )
        for names, samples in itertools.islice(self.loader, most):
            used += names
            self.done.add(samples)
        return used

    def state(self) -> str:
        return json.dumps(self.done.state_dict())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("before", "after", "steps"), [(2, 1, 0), (2, 3, 3), (0, 2, 9), (2, 0, 15), (0, 0, 30)]
)
def test_a_stopped_pipeline_goes_on_with_the_rest_on_other_workers(
    tmp_path: Path, urls: list[str], before: int, after: int, steps: int
) -> None:
    stopped = Training(urls, tmp_path / "cache")
    used = stopped.steps(before, steps)
    resumed = Training(urls, tmp_path / "other", stopped.state())
    rest = resumed.steps(after)
    assert Counter(used + rest) == Counter(keys(theirs(urls)))
    assert Training(urls, tmp_path / "cache", resumed.state()).steps(0) == []


def test_ranks_go_on_with_the_rest_on_another_number_of_ranks(
    tmp_path: Path, urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    used, rest, states = [], [], []
    for rank in range(2):
        place(monkeypatch, rank, 2)
        training = Training(urls, tmp_path)
        used += training.steps(0, 4 + rank)
        states.append(training.state())
    for rank in range(3):
        place(monkeypatch, rank, 3)
        rest += Training(urls, tmp_path, *states).steps(0)
    assert len(used) == 72
    assert Counter(used + rest) == Counter(keys(theirs(urls)))


@pytest.mark.usefixtures("one_rank")
def test_finished_shards_are_not_fetched_again(tmp_path: Path, server: ShardServer, urls: list[str]) -> None:
    first = Training(urls[:3], tmp_path / "cache")
    first.steps(0)
    before = len(server.log)
    rest = Training(urls[:5], tmp_path / "other", first.state()).steps(0)
    assert {request.path for request in server.log[before:]} == {"00003.tar", "00004.tar"}
    assert Counter(rest) == Counter(keys(theirs(urls[3:5])))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_each_epoch_has_every_sample(tmp_path: Path, urls: list[str], workers: int, persistent: bool) -> None:
    training = Training(urls, tmp_path)
    training.is_persistent = persistent
    expected = Counter(keys(theirs(urls)))
    for epoch in range(2):
        training.done.set_epoch(epoch)
        assert Counter(training.steps(workers)) == expected
    training.done.set_epoch(2)
    used = training.steps(workers, 5)
    resumed = Training(urls, tmp_path, training.state())
    assert resumed.done.epoch == 2
    assert Counter(used + resumed.steps(workers)) == expected


@pytest.mark.parametrize(
    "states",
    [
        ({},),
        ({"epoch": 0, "done": []},),
        ({"epoch": 0, "done": {"0": {"a": [1]}}},),
        ({"epoch": 0, "done": {}}, {"epoch": 1, "done": {}}),
        (),
    ],
)
def test_other_states_are_refused(states: tuple[dict[str, Any], ...]) -> None:
    with pytest.raises(StateMismatch, match="state_dict"):
        cached.SamplesDone().load_state_dict(*states)


@pytest.mark.usefixtures("one_rank")
def test_a_second_pass_of_workers_without_set_epoch_is_an_error(tmp_path: Path, urls: list[str]) -> None:
    training = Training(urls[:2], tmp_path)
    training.steps(1, 3)
    with pytest.raises(StateMismatch, match=r"set_epoch\(1\)"):
        training.steps(1)
    training.done.set_epoch(0)
    assert len(training.steps(1)) == 80 - 3 * 8


def test_one_sample_is_noted_as_a_batch_is(tmp_path: Path, urls: list[str]) -> None:
    done = cached.SamplesDone()
    for sample in ours(urls[:1], tmp_path, done=done):
        done.add(sample["__sample__"])
    assert done.of(0, shard_of(urls[0], None).digest)[0] == 0
    assert ours(urls[:1], tmp_path, done=cached.SamplesDone())


def test_noted_samples_are_ranges_in_any_order_of_arrival() -> None:
    for order in itertools.permutations(range(5)):
        done = cached.SamplesDone()
        for count, number in enumerate(order, 1):
            done.add([f"0 shard {number} {number + 1}"])
            ranges = done.of(0, "shard")
            covered = [
                n for start, stop in zip(ranges[::2], ranges[1::2], strict=True) for n in range(start, stop)
            ]
            assert covered == sorted(order[:count])
        assert done.of(0, "shard") == [0, 5]
