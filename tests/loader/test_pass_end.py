"""An epoch that ends normally has had the data that it was given, but for the shares that the limits allow.

How it shows that it works: sets of known shares of bad images and missing shards are read to the end, in
training and evaluation, in one process and by two real ranks, cut and resumed.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from PIL import Image

import streamload
from streamload.errors import NoValidSamples, TooManyBadSamples, TooManyBadShards
from streamload.loader.checks import PassEnd, Totals, exceeds, merged
from streamload.ranks import distributed
from tests.support import flat


def write(folder: Path, *bad: Sequence[int], samples: int = 20, caption: bytes = b"caption") -> str:
    """A shard of so many samples for each list of the numbers of its bad images; returns their URL."""
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG")
    for shard, numbers in enumerate(bad):
        with tarfile.open(folder / f"{shard:02d}.tar", "w") as tar:
            for number in range(samples):
                image = b"broken" if number in numbers else buffer.getvalue()
                for extension, data in (("jpg", image), ("txt", caption)):
                    info = tarfile.TarInfo(f"{shard}-{number}.{extension}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return f"{folder}/{{00..{len(bad) - 1:02d}}}.tar"


def make(urls: Any, tmp_path: Path, **options: Any) -> streamload.Loader:
    defaults = {"batch_size": 4, "num_workers": 0, "with_keys": True, "cache_dir": tmp_path / "cache"}
    return flat.make_loader(urls, **{**defaults, "cache_size": "1GB", **options})


def keys_of(loader: streamload.Loader) -> list[str]:
    return [key for _, _, origin in loader for key in origin["__key__"]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("limit", [0.1, None])
def test_an_evaluation_without_a_usable_sample_is_an_error_whatever_is_allowed(
    limit: float | None, workers: int, tmp_path: Path
) -> None:
    urls = write(tmp_path / "data", range(20), range(20))
    with (
        make(urls, tmp_path, train=False, max_bad_samples=limit, num_workers=workers) as loader,
        pytest.raises(TooManyBadSamples, match=r"nothing could be used: .*40 of 40 \(100 %\) samples"),
    ):
        keys_of(loader)


def test_an_evaluation_in_which_all_captions_are_blank_is_an_error(tmp_path: Path) -> None:
    urls = write(tmp_path / "data", (), caption=b" ")
    with (
        make(urls, tmp_path, train=False, blank_captions=False) as loader,
        pytest.raises(NoValidSamples, match="nothing could be used"),
    ):
        keys_of(loader)


@pytest.mark.parametrize("train", [True, False])
def test_half_of_the_images_of_few_shards_end_the_run_with_the_pass_unless_that_is_allowed(
    train: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    urls = write(tmp_path / "data", *[range(10)] * 3)
    with (
        make(urls, tmp_path, train=train) as loader,
        pytest.raises(TooManyBadSamples, match=r"30 of 60 \(50 %\) samples .* max_bad_samples=0\.1 allows"),
    ):
        keys_of(loader)
    for limit in (0.5, None):
        caplog.clear()
        with make(urls, tmp_path, train=train, max_bad_samples=limit) as loader:
            assert len(keys_of(loader)) == (60 if train else 30)
        (line,) = [line for line in caplog.messages if "at the end of epoch 0" in line]
        assert "30 of 60 (50 %) samples could not be used, 0 of 3 shards were given up" in line


def test_a_bad_image_of_a_few_ends_no_run(tmp_path: Path) -> None:
    with make(write(tmp_path / "data", [3], samples=8), tmp_path, train=False) as loader:
        assert len(keys_of(loader)) == 7


@pytest.mark.parametrize("train", [True, False])
def test_one_of_two_shards_missing_ends_the_run_and_one_of_four_does_not(train: bool, tmp_path: Path) -> None:
    write(tmp_path / "data", *[()] * 4)
    (tmp_path / "data" / "01.tar").unlink()
    few, several = (f"{tmp_path}/data/{{00..0{last}}}.tar" for last in (1, 3))
    with (
        make(few, tmp_path, train=train) as loader,
        pytest.raises(TooManyBadShards, match=r"1 of 2 \(50 %\) shards .* max_bad_shards=0\.1 allows"),
    ):
        keys_of(loader)
    with make(few, tmp_path, train=train, max_bad_shards=None) as loader:
        assert len(keys_of(loader)) == 20
    with make(several, tmp_path, train=train) as loader:
        assert len(keys_of(loader)) == 60


def test_an_epoch_as_long_as_a_pass_is_compared_like_one_and_a_shorter_one_is_not(tmp_path: Path) -> None:
    urls = write(tmp_path / "data", *[range(0, 20, 2)] * 3)
    with make(urls, tmp_path, num_batches=15) as loader, pytest.raises(TooManyBadSamples, match="30 of 60"):
        keys_of(loader)
    with make(urls, tmp_path, num_batches=5) as loader:
        assert len(keys_of(loader)) == 20
        assert len(keys_of(loader)) == 20
        with pytest.raises(TooManyBadSamples, match="30 of 60"):  # the third makes a pass
            keys_of(loader)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("batches", [1, 8, 14])
def test_bad_samples_of_a_pass_are_counted_across_a_resume(batches: int, train: bool, tmp_path: Path) -> None:
    urls = write(tmp_path / "data", *[range(0, 20, 8)] * 3)  # 9 of 60
    with make(urls, tmp_path, train=train, max_bad_samples=0.15) as loader:
        for _ in itertools.islice(loader, batches):
            pass
        state = json.loads(json.dumps(loader.state_dict()))
    for limit in (0.15, 0.14):
        with make(urls, tmp_path, train=train, max_bad_samples=limit) as loader:
            loader.load_state_dict(state)
            if limit == 0.15:
                keys_of(loader)
            else:
                with pytest.raises(TooManyBadSamples, match=r"9 of 60 \(15 %\)"):
                    keys_of(loader)


def test_shares_are_of_each_pass_alone(tmp_path: Path) -> None:
    urls = write(tmp_path / "data", *[()] * 3)
    with make(urls, tmp_path, train=False, max_bad_samples=0.4) as loader:
        for _ in range(2):
            assert len(keys_of(loader)) == 60
        loader.close()
    write(tmp_path / "data", *[range(10)] * 3)
    with make(urls, tmp_path, train=False, max_bad_samples=0.4) as loader, pytest.raises(TooManyBadSamples):
        keys_of(loader)


def rank_of_two(rank: int, urls: Sequence[str], place: Path, options: dict[str, Any]) -> None:
    """One of two ranks: reads to the end, sums the samples with the other, and writes down how it ended."""
    distributed._AGREE_SECONDS = options.pop("agree_seconds", 30.0)
    logging.getLogger("streamload").setLevel(logging.ERROR)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place}/rendezvous", rank=rank, world_size=2
    )
    stops_at = options.pop("stops_at", None)
    mirror = urls[rank] if isinstance(urls, tuple) else urls
    loader = make(mirror, place, rank=rank, world_size=2, **options)
    ended = ""
    try:
        samples = 0
        for batch in itertools.islice(loader, stops_at if rank else None):
            samples += len(batch[1])
        count = torch.tensor([samples])
        torch.distributed.all_reduce(count)
        ended = f"{int(count)} samples"
    except streamload.StreamloadError as exc:
        ended = f"{type(exc).__name__}: {exc}"
    loader.close()
    (place / f"{rank}.json").write_text(json.dumps(ended))
    torch.distributed.barrier()
    os._exit(0)


def ends_of(tmp_path: Path, urls: Any, **options: Any) -> list[str]:
    torch.multiprocessing.spawn(rank_of_two, (urls, tmp_path, options), nprocs=2)
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_all_ranks_of_an_evaluation_end_by_the_share_of_all_of_them(tmp_path: Path) -> None:
    urls = write(tmp_path / "data", (), range(8))  # one shard for each rank
    ends = ends_of(tmp_path, urls, train=False)
    assert all("8 of 40 (20 %) samples could not be used" in end for end in ends), ends
    assert all(end.startswith("TooManyBadSamples: ") for end in ends), ends


def test_ranks_that_read_from_a_mirror_each_end_by_the_share_of_all_of_them(tmp_path: Path) -> None:
    mirrors = tuple(write(tmp_path / name, (), range(8)) for name in ("near", "far"))
    ends = ends_of(tmp_path, mirrors, train=False)
    assert all("8 of 40 (20 %) samples could not be used" in end for end in ends), ends


@pytest.mark.deep
def test_a_rank_with_many_bad_samples_of_few_in_all_ends_no_run(tmp_path: Path) -> None:
    urls = write(tmp_path / "data", (), range(4))
    assert ends_of(tmp_path, urls, train=False) == ["36 samples"] * 2


def without_most_shards_of_rank_0(tmp_path: Path) -> str:
    urls = write(tmp_path / "data", *[()] * 8, samples=4)
    for shard in (0, 1, 2):
        (tmp_path / "data" / f"{shard:02d}.tar").unlink()
    return urls


def test_a_rank_that_lost_most_of_its_shards_reads_on_where_few_of_all_are_lost(tmp_path: Path) -> None:
    urls = without_most_shards_of_rank_0(tmp_path)
    with make(urls, tmp_path, train=False, max_bad_shards=0.5, rank=0, world_size=2) as loader:
        assert len(keys_of(loader)) == 4


@pytest.mark.deep
def test_ranks_end_alike_where_one_has_lost_most_of_its_shards(tmp_path: Path) -> None:
    urls = without_most_shards_of_rank_0(tmp_path)
    assert ends_of(tmp_path, urls, train=False, max_bad_shards=0.5) == ["20 samples"] * 2


@pytest.mark.deep
def test_a_rank_at_its_end_is_told_that_another_has_failed(tmp_path: Path) -> None:
    urls = write(tmp_path / "data", (), range(4))
    failed, found = ends_of(tmp_path, urls, train=False, on_error="raise")
    assert failed.startswith("RankFailed: rank 1 of 2 has failed: ")
    assert "RankFailed" not in found


@pytest.mark.deep
def test_a_rank_that_stops_before_the_end_is_not_waited_for_without_end(tmp_path: Path) -> None:
    urls = write(tmp_path / "data", *[()] * 2)
    ends = ends_of(tmp_path, urls, train=False, stops_at=2, agree_seconds=0.5)
    assert ends == ["28 samples"] * 2


@pytest.mark.parametrize("missing", range(7))
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.sampled(5)
def test_a_lost_shard_counts_once_whichever_ranks_share_it(
    missing: int, world_size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    urls = write(tmp_path / "data", *[()] * 7, samples=6)
    (tmp_path / "data" / f"{missing:02d}.tar").unlink()
    taken = []
    for rank in range(world_size):
        options = {"train": False, "max_bad_shards": None, "rank": rank, "world_size": world_size}
        with caplog.at_level(logging.WARNING, "streamload"), make(urls, tmp_path, **options) as loader:
            taken += keys_of(loader)
    assert len(set(taken)) == len(taken) == 36
    lost = [int(lost) for lost in re.findall(r"(\d+) of \d+ \(\S+ %\) shards were given up", caplog.text)]
    assert sum(lost) == 1


def test_totals_of_ranks_have_what_came_before_a_resume_once() -> None:
    one = Totals(1, 10, 2, 10, 1, 4, 50, 5, 1)
    both = merged([one, one._replace(lost=0, shards=0)])
    assert (both.ranks, both.all_samples, both.all_bad, both.lost, both.shards) == (2, 70, 9, 1, 4)


def test_a_state_of_each_rank_adds_up_to_the_counts_of_all() -> None:
    def counts(rank: int) -> list[int]:
        checks = PassEnd(train=True, max_bad_samples=0.1, max_bad_shards=0.1)
        checks.restore([40, 6, 1], 0)
        return checks.counts(0, rank, 2)

    assert [counts(0), counts(1)] == [[40, 6, 1], [40, 0, 1]]


@pytest.mark.parametrize(
    ("bad", "count", "limit", "expected"),
    [
        (1, 8, 0.1, False),
        (2, 8, 0.1, False),
        (3, 8, 0.1, True),
        (1, 2, 0.1, True),
        (1, 2, 0.5, False),
        (3, 30, 0.1, False),
        (4, 30, 0.1, True),
        (0, 0, 0.0, False),
        (9, 9, None, False),
    ],
)
def test_an_exact_share_is_compared_from_three_on_or_from_a_half(
    bad: int, count: int, limit: float | None, expected: bool
) -> None:
    assert exceeds(bad, count, limit) == expected
