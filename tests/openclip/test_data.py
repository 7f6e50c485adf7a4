"""The stand-in for open_clip_train.data.get_wds_dataset, beside the original."""

import argparse
import gc
import io
import itertools
import json
import tarfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import open_clip_train.data
import pytest
import torch
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip_train.params import parse_args

from streamload.errors import OptionError, StreamloadError
from streamload.integrations import openclip
from streamload.testing.server import ShardServer
from streamload.testing.shards import write_shards
from tests.openclip.tiny import TINY, write_colour_shards

stock = open_clip_train.data.get_wds_dataset


@pytest.fixture(autouse=True)
def installed(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(scratch / "cache"))
    uninstall = openclip.install()
    yield
    uninstall()


def arguments(*given: str, world_size: int = 1, rank: int = 0) -> argparse.Namespace:
    """Arguments as open_clip's own main has them when it asks for data."""
    args = parse_args(["--dataset-type", "webdataset", *given])
    args.world_size, args.rank = world_size, rank
    return args


def ours(args: argparse.Namespace, **options: Any) -> Any:
    """Data for training by the function that open_clip looks up."""
    options = {"preprocess_img": lambda image: image, "is_train": True, "tokenizer": None, **options}
    return open_clip_train.data.get_dataset_fn(args.train_data, args.dataset_type)(args, **options)


@settings(max_examples=60)
@given(
    samples=st.integers(200, 100_000),
    batch_size=st.integers(1, 64),
    workers=st.integers(0, 5),
    world_size=st.integers(1, 4),
)
def test_sizes_are_rounded_as_by_the_original(
    samples: int, batch_size: int, workers: int, world_size: int
) -> None:
    sizes = f"--train-num-samples {samples} --batch-size {batch_size} --workers {workers}"
    args = arguments("--train-data", "{000..999}.tar", *sizes.split(), world_size=world_size)
    theirs = stock(args, None, is_train=True, tokenizer=None).dataloader
    data = ours(args).dataloader
    assert (data.num_batches, data.num_samples) == (theirs.num_batches, theirs.num_samples)


def test_800_samples_by_32_in_2_workers_are_26_batches_of_832_samples() -> None:
    args = arguments(
        *("--train-data", "{0..3}.tar", "--train-num-samples", "800", "--batch-size", "32", "--workers", "2")
    )
    data = ours(args).dataloader
    assert (data.num_batches, data.num_samples) == (26, 832)


def test_validation_gives_the_batches_of_the_original_to_the_bit(validation_shards: list[Path]) -> None:
    folder = validation_shards[0].parent
    sizes = "--val-num-samples 70 --batch-size 32 --workers 0"
    args = arguments("--val-data", f"{folder}/{{00000..00001}}.tar", *sizes.split())
    preprocess = open_clip.image_transform(TINY["vision_cfg"]["image_size"], is_train=False)
    tokenizer = open_clip.SimpleTokenizer(context_length=16)
    theirs = stock(args, preprocess, is_train=False, tokenizer=tokenizer).dataloader
    data = open_clip_train.data.get_data(args, (None, preprocess), tokenizer=tokenizer)["val"].dataloader
    assert (data.num_batches, data.num_samples) == (theirs.num_batches, theirs.num_samples) == (3, 70)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # webdataset 0.2.86 leaves its shards open
        their_batches = list(theirs)
        gc.collect()
    for (images, texts), (their_images, their_texts) in zip(data, their_batches, strict=True):
        assert torch.equal(images, their_images)
        assert torch.equal(texts, their_texts)
        assert (images.dtype, texts.dtype) == (torch.float32, torch.int64)


def write_broken(path: Path, is_broken: Callable[[int], bool]) -> str:
    """Write a shard of 40 samples, of which some have no valid image, by their numbers."""
    (sound,) = write_colour_shards(path.with_suffix(""), [40], seed=5)
    with tarfile.open(sound) as members, tarfile.open(path, "w") as shard:
        images = 0
        for member in members:
            content = members.extractfile(member).read()  # type: ignore[union-attr]
            if member.name.endswith(".jpg"):
                content = b"no image" if is_broken(images) else content
                images += 1
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))
    assert images == 40
    return str(path)


@pytest.mark.parametrize("is_train", [True, False])
def test_any_share_of_bad_images_is_allowed_as_by_the_original_and_logged_but_not_all(
    is_train: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def batches_of(url: str) -> list[Any]:
        sizes = "--train-num-samples 40 --val-num-samples 40 --batch-size 10 --workers 0"
        args = arguments("--train-data", url, "--val-data", url, *sizes.split())
        return list(ours(args, is_train=is_train, preprocess_img=lambda image: image.size).dataloader)

    assert batches_of(write_broken(tmp_path / "half.tar", lambda number: number % 2 == 0))
    assert "20 of 40 (50 %) samples could not be used" in caplog.text
    assert batches_of(write_broken(tmp_path / "most.tar", lambda number: number != 39))
    with pytest.raises(StreamloadError, match=r"nothing could be used|nor can any of"):
        batches_of(write_broken(tmp_path / "all.tar", lambda _: True))


def test_nothing_is_asked_of_an_origin_before_iteration(validation_shards: list[Path]) -> None:
    with ShardServer(validation_shards[0].parent) as server:
        urls = f"{server.url}/{{00000..00001}}.tar"
        args = arguments("--train-data", urls, "--val-data", urls, "--train-num-samples", "70")
        data = open_clip_train.data.get_data(args, (None, None))
        assert set(data) == {"train", "val"}
        assert server.log == []


def test_an_epoch_is_taken_up_where_open_clip_says(shards: list[Path]) -> None:
    """As after --resume: get_data gets the epoch, and train_one_epoch sets it again."""
    sizes = "--train-num-samples 64 --batch-size 32 --workers 0 --seed 3"
    args = arguments("--train-data", str(shards[0]), *sizes.split())

    def captions(epoch: int, begun: int) -> list[str]:
        data = ours(args, preprocess_img=lambda image: image.size, epoch=begun)
        data.set_epoch(epoch)
        return list(itertools.chain(*(texts for _, texts in data.dataloader)))

    assert captions(2, begun=2) == captions(2, begun=0) != captions(0, begun=0)


def test_flags_that_are_not_understood_are_errors() -> None:
    urls = ("--train-data", "a.tar", "--train-num-samples", "9")
    with pytest.raises(OptionError, match="--train-data-upsampling-factors has 2 factors for 1 sources"):
        ours(arguments(*urls, "--train-data-upsampling-factors", "2::1"))
    with pytest.raises(OptionError, match="doesn't support OpenCLIP's --dataset-mixture"):
        ours(argparse.Namespace(**vars(arguments(*urls)), dataset_mixture="a,b"))


@pytest.mark.parametrize("resampled", [(), ("--dataset-resampled",)])
def test_upsampling_factors_give_the_shares_that_the_originals_draws_have_on_average(
    tmp_path: Path, resampled: tuple[str, ...]
) -> None:
    """100 samples in two shards, and 20 in a third that is drawn three times as often: 100 to 60."""
    counts = {"00000.tar": 50, "00001.tar": 50, "00002.tar": 20}
    write_shards(tmp_path, [*counts.values()])
    (tmp_path / "sizes.json").write_text(json.dumps(counts))
    urls, factors = f"{tmp_path}/{{00000..00001}}.tar::{tmp_path}/00002.tar", "1::3"
    sizes = ("--train-num-samples", "1600", "--batch-size", "32", "--workers", "0")
    args = arguments("--train-data", urls, "--train-data-upsampling-factors", factors, *sizes, *resampled)

    taken: Counter[str] = Counter()
    for _, captions in ours(args, preprocess_img=lambda image: image.size).dataloader:
        taken.update(f"{int(caption.split()[3]):05d}.tar" for caption in captions)
    assert taken.total() == 1600
    assert abs(taken["00002.tar"] - 600) <= 1

    draws = open_clip_train.data.ResampledShards2(urls, factors, 40_000, lambda: 1, deterministic=True)
    drawn: Counter[str] = Counter()
    for shard in draws:
        drawn[Path(shard["url"]).name] += counts[Path(shard["url"]).name]
    assert drawn["00002.tar"] / drawn.total() == pytest.approx(taken["00002.tar"] / 1600, abs=0.01)


def test_the_number_of_samples_comes_from_the_argument_or_from_files_beside_the_shards(
    tmp_path: Path,
) -> None:
    args = arguments("--train-data", f"{tmp_path}/{{0..1}}.tar::{tmp_path}/5.tar", "--batch-size", "10")
    args.workers = 0
    with pytest.raises(OptionError, match=r"give --train-num-samples, or put a sizes.json"):
        ours(args)
    (tmp_path / "__len__").write_text("51")
    assert ours(args).dataloader.num_samples == 60
    (tmp_path / "sizes.json").write_text('{"0.tar": 10, "1.tar": 20, "5.tar": 5, "6.tar": 99}')
    assert ours(args).dataloader.num_samples == 40
    args.train_num_samples = 11
    assert ours(args).dataloader.num_samples == 20
    (tmp_path / "sizes.json").write_text('{"0.tar": 10}')
    (tmp_path / "__len__").unlink()
    args.train_num_samples = None
    with pytest.raises(OptionError, match=r"sizes.json"):
        ours(args)


def test_a_sizes_json_is_found_behind_http_too(tmp_path: Path) -> None:
    (tmp_path / "sizes.json").write_text('{"0.tar": 10, "1.tar": 20}')
    with ShardServer(tmp_path) as server:
        args = arguments("--train-data", f"{server.url}/{{0..1}}.tar", "--batch-size", "10", "--workers", "0")
        assert ours(args).dataloader.num_samples == 30


def test_resampling_is_accepted_with_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    urls = ("--train-data", "a.tar", "--train-num-samples", "9", "--dataset-resampled")
    with caplog.at_level("INFO", logger="streamload"):
        ours(arguments(*urls, world_size=2, rank=1))
        assert caplog.messages == []
        ours(arguments(*urls, world_size=2, rank=0))
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("--dataset-resampled: shards are not drawn")


def test_no_shards_are_an_error() -> None:
    args = arguments("--train-num-samples", "9")
    args.train_data = None
    with pytest.raises(OptionError, match="no --train-data"):
        ours(args)
    with pytest.raises(OptionError, match="no --val-data"):
        ours(args, is_train=False)


def test_shards_of_the_webdataset_that_open_clip_pins_are_read(tmp_path: Path) -> None:
    assert webdataset.__version__.startswith("0.2.")
    with webdataset.ShardWriter(f"{tmp_path}/%d.tar", maxcount=4, verbose=0) as writer:
        for number in range(1, 7):
            picture = np.zeros((2, number, 3), np.uint8)
            writer.write({"__key__": f"{number}", "png": picture, "txt": f"number {number}"})
    args = arguments("--val-data", f"{tmp_path}/{{0..1}}.tar", "--workers", "0", "--batch-size", "6")
    ((widths, captions),) = ours(args, is_train=False, preprocess_img=lambda image: image.width).dataloader
    assert widths.tolist() == [1, 2, 3, 4, 5, 6]
    assert captions == [f"number {number}" for number in range(1, 7)]
