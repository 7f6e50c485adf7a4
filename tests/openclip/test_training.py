"""open_clip's own training on our loader, over real origins: what it trains on, what an origin is asked."""

import itertools
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from streamload.loader import Batches, Order, make_loader
from streamload.testing.server import ShardServer
from streamload.testing.shards import read_oracle
from tests.openclip.tiny import Run
from tests.support.s3 import S3Server

STEPS = 26  # ceil(ceil(800 / 32) / 2 workers) × 2 workers, open_clip's rounding
SIZES = ("--train-num-samples", "800", "--workers", "2")


def keys_of(shards: list[Path]) -> set[str]:
    return {key for shard in shards for key, _ in read_oracle(shard)}


def assert_is_trained(run: Run) -> None:
    """All steps were made, and what could be learnt was."""
    losses = run.losses
    assert len(losses) == 2 * STEPS
    assert sum(losses[-5:]) / 5 < 0.7 * sum(losses[:3]) / 3


def assert_epochs_are_whole(run: Run, shards: list[Path]) -> None:
    """One rank's epochs: full batches, as many as open_clip plans; no sample comes again before all came."""
    for epoch in (0, 1):
        assert [len(keys) for keys in run.keys(0, epoch)] == [32] * STEPS
    taken = list(itertools.chain(*run.keys(0, 0), *run.keys(0, 1)))
    samples = keys_of(shards)
    assert Counter(taken[: len(samples)]) == Counter(samples)
    assert Counter(taken[len(samples) : 2 * len(samples)]) == Counter(samples)


def test_over_a_pipe_two_epochs_take_the_planned_batches_and_the_second_asks_nothing(
    shards: list[Path], validation_shards: list[Path], train: Callable[..., Run], tmp_path: Path
) -> None:
    with ShardServer(shards[0].parent) as server, ShardServer(validation_shards[0].parent) as held_out:
        urls = f"pipe:curl -f -s -L {server.url}/{{00000..00003}}.tar"
        validation = f"{held_out.url}/{{00000..00001}}.tar"
        run = train("--train-data", urls, "--val-data", validation, *SIZES, "--seed", "7")
    assert_is_trained(run)
    numbers = re.findall(r"Train Epoch: .* Data wait: ([\d.]+)% Ready: \d+ Origin: [\d.]+ \w?B/s", run.log)
    assert len(numbers) == 2 * STEPS
    assert all(0 <= float(share) <= 100 for share in numbers)
    assert_epochs_are_whole(run, shards)
    assert sorted(request.path for request in server.log) == [shard.name for shard in shards]

    with make_loader(
        urls,
        num_workers=0,
        batch_size=32,
        preprocess=lambda image: image.width,
        order=Order(num_batches=STEPS),
        seed=7,
        batches=Batches(with_keys=True),
        cache_dir=tmp_path / "cache",
        cache_size="50GB",
    ) as planned:
        for epoch in (0, 1):
            assert [keys["__key__"] for _, _, keys in planned] == run.keys(0, epoch)

    ranges = [held_out.ranges(shard.name) for shard in validation_shards]
    assert ranges == [[(0, shard.stat().st_size)] for shard in validation_shards]
    for epoch in (0, 1):
        validated = run.keys(0, epoch, train=False)
        assert [len(keys) for keys in validated] == [32, 32, 6]
        assert sorted(itertools.chain(*validated)) == sorted(keys_of(validation_shards))
    assert [result["num_samples"] for result in run.results] == [70, 70]


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_decoded_by_the_rank_it_is_the_training_that_workers_decode_for(
    shards: list[Path], validation_shards: list[Path], train: Callable[..., Run], tmp_path: Path
) -> None:
    runs = []
    with ShardServer(shards[0].parent) as server, ShardServer(validation_shards[0].parent) as held_out:
        data = f"{server.url}/{{00000..00003}}.tar", f"{held_out.url}/{{00000..00001}}.tar"
        for decode in ("host", "device"):
            chosen = "--train-data", data[0], "--val-data", data[1], "--streamload-decode", decode
            runs.append(train(*chosen, *SIZES, "--seed", "7"))
            (tmp_path / "run").rename(tmp_path / decode)
    host, device = runs
    assert_is_trained(device)
    for epoch in (0, 1):
        assert device.keys(0, epoch) == host.keys(0, epoch)
        assert device.keys(0, epoch, train=False) == host.keys(0, epoch, train=False)
    assert device.losses == host.losses
    assert "images are decoded on cpu by libjpeg-turbo" in device.log
    assert "images are decoded on" not in host.log


@pytest.mark.deep
def test_over_s3_and_a_pipe_from_s3_the_second_epoch_asks_nothing(
    shards: list[Path], train: Callable[..., Run]
) -> None:
    with S3Server() as s3:
        s3.create_bucket("bucket")
        s3.put_files("bucket", *shards)
        pipe = "pipe:aws s3 cp s3://bucket/{00002..00003}.tar -"
        run = train(
            *("--train-data", f"s3://bucket/{{00000..00001}}.tar::{pipe}"), *SIZES, environ=s3.environ
        )
    assert_is_trained(run)
    assert_epochs_are_whole(run, shards)
    assert 4 <= run.origin_requests(0, 0) == run.origin_requests(0, 1)


@pytest.mark.deep
def test_two_ranks_take_equal_steps_of_disjoint_samples_and_rank_0_alone_validates(
    shards: list[Path], validation_shards: list[Path], train: Callable[..., Run]
) -> None:
    with ShardServer(shards[0].parent) as server, ShardServer(validation_shards[0].parent) as held_out:
        run = train(
            *("--train-data", f"{server.url}/{{00000..00003}}.tar", *SIZES),
            *("--val-data", f"{held_out.url}/{{00000..00001}}.tar", "--workers", "1"),
            ranks=2,
        )
    steps = 13  # ceil(800 / 64)
    for epoch in (0, 1):
        assert [len(run.keys(rank, epoch)) for rank in (0, 1)] == [steps, steps]
        both = [a + b for a, b in zip(run.keys(0, epoch), run.keys(1, epoch), strict=True)]
        assert all(len(set(keys)) == 64 for keys in both)
        validated = itertools.chain(*run.keys(0, epoch, train=False))
        assert sorted(validated) == sorted(keys_of(validation_shards))
        assert run.keys(1, epoch, train=False) == []
    taken = Counter(
        itertools.chain(*(keys for rank in (0, 1) for epoch in (0, 1) for keys in run.keys(rank, epoch)))
    )
    assert set(taken) == keys_of(shards)
    assert set(taken.values()) <= {2, 3}
    assert [result["num_samples"] for result in run.results] == [70, 70]
    for site, files in ((server, shards), (held_out, validation_shards)):
        assert [site.ranges(file.name) for file in files] == [[(0, file.stat().st_size)] for file in files]
