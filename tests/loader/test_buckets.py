"""Bucketing in a loader: the same steps on any ranks and workers, resumed anywhere, each sample once."""

from __future__ import annotations

import io
import itertools
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import streamload
from streamload import Batches, Images, Order, Patches, Shards, Source
from streamload.errors import OptionError, StateMismatch
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, write_shards
from tests.support import flat

STEP = 8


def tokenize(texts: Sequence[str]) -> dict[str, torch.Tensor]:
    """Ids of many lengths, up to 40."""
    ids = torch.zeros(len(texts), 40, dtype=torch.long)
    for row, text in zip(ids, texts, strict=True):
        row[: max(1, sum(map(ord, text)) % 37)] = 1
    return {"input_ids": ids, "attention_mask": ids.clone()}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("buckets") / "data"
    write_shards(directory, [30, 17, 41, 24, 20], options=ShardOptions(image_side=(8, 12)))
    return directory


class Step(NamedTuple):
    """One step over all ranks: keys in the order of its plan, the number of ids, and of each rank's rows."""

    keys: list[str]
    shape: int
    rows: list[int]


def loaders(data: Any, cache: Path, ranks: int = 1, **options: Any) -> list[streamload.Loader]:
    bucketing = options.pop("bucketing", 32)
    multiple = options.pop("multiple", 1)
    groups = options.pop("groups", 1)
    defaults = {"num_workers": 0, "seed": 5, "cache_dir": cache, "cache_size": "1GB"}
    return [
        flat.make_loader(
            data if isinstance(data, list) else str(data), tokenize, batch_size=STEP // ranks,
            batches=Batches(
                with_keys=True, text_padding="longest", text_pad_multiple=multiple, bucketing=bucketing
            ),
            order=Order(rank=rank, world_size=ranks, groups=groups), output="dict", **{**defaults, **options},
        )
        for rank in range(ranks)
    ]  # fmt: skip


def steps_of(ranks: list[streamload.Loader], most: int | None = None) -> list[Step]:
    """The steps of an epoch, in lockstep."""
    found = []
    for batches in itertools.islice(zip(*ranks, strict=True), most):
        shapes = {batch["text"].shape[1] for batch in batches}
        assert len(shapes) == 1, shapes
        keys = list(itertools.chain.from_iterable(zip(*(batch["__key__"] for batch in batches), strict=True)))
        found.append(Step(keys, shapes.pop(), [len(batch["__key__"]) for batch in batches]))
    return found


def run(data: Any, cache: Path, ranks: int = 1, **options: Any) -> list[Step]:
    made = loaders(data, cache, ranks, **options)
    try:
        return steps_of(made)
    finally:
        for loader in made:
            loader.close()


def keys_by_step(steps: list[Step]) -> list[list[str]]:
    return [sorted(step.keys) for step in steps]


def _all(steps: list[Step]) -> list[str]:
    return sorted(key for step in steps for key in step.keys)


def test_step_keeps_the_rows_of_each_step(data: Path, tmp_path: Path) -> None:
    plain = run(data, tmp_path, bucketing=None)
    stepwise = run(data, tmp_path, bucketing="step")
    assert keys_by_step(plain) == keys_by_step(stepwise)
    assert [step.shape for step in plain][1:] == [step.shape for step in stepwise][1:]
    assert stepwise[0].shape == 40  # a run's first step isn't planned: it has room for any caption


@pytest.mark.parametrize("bucketing", ["step", 32, 4096])
def test_each_sample_comes_once_a_pass(data: Path, tmp_path: Path, bucketing: Any) -> None:
    steps = run(data, tmp_path, bucketing=bucketing)
    keys = [key for step in steps for key in step.keys]
    assert len(keys) == len(set(keys)) == 132 // STEP * STEP


def test_blocks_are_those_of_the_run_and_have_less_padding(data: Path, tmp_path: Path) -> None:
    plain = run(data, tmp_path, bucketing=None)
    blocks = run(data, tmp_path, bucketing=32)
    for begin, end in [(0, 1), (1, 2), (2, 4), (4, 8), (8, 12), (12, 16)]:  # in steps: they grow at first
        assert _all(plain[begin:end]) == _all(blocks[begin:end])
    assert sum(step.shape for step in blocks) < 0.85 * sum(step.shape for step in plain)


@pytest.mark.parametrize("bucketing", ["step", 32])
@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 0), (4, 1), (8, 0)])
@pytest.mark.sampled(3)
def test_steps_do_not_depend_on_ranks_and_workers(
    data: Path, tmp_path: Path, bucketing: Any, ranks: int, workers: int
) -> None:
    expected = run(data, tmp_path / "one", bucketing=bucketing)
    found = run(data, tmp_path / "other", ranks, bucketing=bucketing, num_workers=workers)
    assert [step[:2] for step in found[1:]] == [step[:2] for step in expected[1:]]
    assert sorted(found[0].keys) == sorted(expected[0].keys)  # the first step of a run is split, not dealt
    assert found[0].shape == expected[0].shape
    assert all(step.rows == [STEP // ranks] * ranks for step in found)


@pytest.mark.parametrize(
    ("bucketing", "epoch"),
    [
        ("step", 0),
        *(
            pytest.param(*case, marks=pytest.mark.deep)
            for case in [("step", 1), (32, 0), (32, 1), (4096, 0), (4096, 1)]
        ),
    ],
)
def test_resumed_at_any_step_on_another_layout(
    data: Path, tmp_path: Path, bucketing: Any, epoch: int
) -> None:
    (whole,) = loaders(data, tmp_path / "whole", bucketing=bucketing)
    with whole:
        for _ in range(epoch):
            steps_of([whole])
        states, expected = [whole.state_dict()], []
        for batch in whole:
            expected.append((batch["__key__"], batch["text"].shape[1]))
            states.append(whole.state_dict())
    for cut, state in enumerate(states[:-1]):
        layout = [(1, 0), (2, 0), (4, 0)][cut % 3]
        resumed = loaders(data, tmp_path / f"cut {cut}", layout[0], bucketing=bucketing)
        for loader in resumed:
            loader.load_state_dict(state)
        found = steps_of(resumed)
        assert [(step.keys, step.shape) for step in found] == expected[cut:], cut
        for loader in resumed:
            loader.close()


def test_resumed_in_workers_with_epochs_of_a_length(data: Path, tmp_path: Path) -> None:
    options = {"num_batches": 11, "num_workers": 2}
    (whole,) = loaders(data, tmp_path, **options)
    with whole:
        states, expected = [], []
        for _ in range(3):
            for batch in whole:
                expected.append(batch["__key__"])
                states.append(whole.state_dict())
    for cut in (0, 4, 10, 11, 17, 21, 30):
        (resumed,) = loaders(data, tmp_path / f"{cut}", **{**options, "num_workers": 1 + cut % 3})
        with resumed:
            resumed.load_state_dict(states[cut])
            found = [batch["__key__"] for _ in range(3) for batch in resumed]
        rest = expected[cut + 1 :]
        assert found[: len(rest)] == rest, cut


@pytest.mark.parametrize("nodes", [2, 4])
def test_groups_of_several_nodes(data: Path, tmp_path: Path, nodes: int) -> None:
    options = {"groups": nodes, "num_batches": 14}
    expected = run(data, tmp_path / "a", **options)  # one rank reads all groups
    made = loaders(data, tmp_path / "b", nodes, **options)
    found = [
        sorted(key for batch in batches for key in batch["__key__"]) for batches in zip(*made, strict=True)
    ]
    assert found == keys_by_step(expected)
    state = [loader.state_dict() for loader in made]
    for loader in made:
        loader.close()
    assert len(state) == nodes


def sources(data: Path, other: Path) -> list[Source]:
    return [Source(str(data), weight=3, name="a"), Source(str(other), weight=1, name="b")]


@pytest.mark.deep
def test_mixed_sources_keep_their_shares_by_block(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_shards(other, [25, 25], seed=9, options=ShardOptions(image_side=(8, 12), folder="b/"))
    options = {"num_batches": 24, "bucketing": 32}
    (loader,) = loaders(sources(data, other), tmp_path / "cache", **options)
    with loader:
        batches, states, changed = [], [], 0
        for number, batch in enumerate(loader):
            batches.append(batch["__key__"])
            if number == 9:  # within the block of steps 8 to 11: from the next one on
                changed = loader.set_weights({"b": 3})
            states.append(loader.state_dict())
        batches += [batch["__key__"] for batch in loader]
    counts = [sum(key.startswith("b/") for key in keys) for keys in batches]
    assert changed == 12
    assert sum(counts[:8]) == 16
    assert sum(counts[8:12]) == 8
    assert {sum(counts[at : at + 4]) for at in range(12, 48, 4)} == {16}
    assert len(set(counts[8:12])) > 1  # the block has its share, not each step
    for cut in (9, 10, 11, 12, 14, 22):
        (resumed,) = loaders(sources(data, other), tmp_path / f"{cut}", **options)
        with resumed:
            resumed.load_state_dict(states[cut])
            assert [batch["__key__"] for _ in range(2) for batch in resumed] == batches[cut + 1 :], cut


def test_a_batch_has_a_sample_of_a_small_source_once(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_shards(other, [6, 5], seed=9, options=ShardOptions(image_side=(8, 12), folder="b/"))
    options = {"num_batches": 24, "bucketing": 64}
    (whole,) = loaders(sources(data, other), tmp_path / "cache", **options)
    with whole:
        expected, states = [], []
        for batch in whole:
            expected.append(batch["__key__"])
            states.append(whole.state_dict())
    assert all(len(set(keys)) == STEP for keys in expected)
    of_small = [sum(key.startswith("b/") for key in keys) for keys in expected]
    assert sum(of_small[8:]) == 2 * 16
    assert set(of_small[8:]) <= {1, 2, 3}
    for cut, ranks in [(7, 4), (11, 2), (13, 1), (18, 4)]:  # blocks begin at 8 and 16
        made = loaders(sources(data, other), tmp_path / f"{cut}", ranks, **options)
        for loader in made:
            loader.load_state_dict(states[cut])
        assert [step.keys for step in steps_of(made)] == expected[cut + 1 :], cut
        for loader in made:
            loader.close()


def write_damaged(path: Path, out: Path) -> None:
    """Copy a shard with every 15th image replaced by bytes that aren't one."""
    with tarfile.open(path) as shard, tarfile.open(out, "w") as copy:
        images = 0
        for member in shard:
            payload = shard.extractfile(member).read()  # type: ignore[union-attr]
            if member.name.endswith(".jpg"):
                images += 1
                payload = b"no image" if images % 15 == 0 else payload
            member.size = len(payload)
            copy.addfile(member, io.BytesIO(payload))


@pytest.mark.parametrize("bucketing", ["step", 64])
def test_bad_samples_are_replaced_without_another_shape(tmp_path: Path, bucketing: Any) -> None:
    shards = write_shards(tmp_path / "whole", [60, 60, 60], options=ShardOptions(image_side=(8, 12)))
    (tmp_path / "data").mkdir()
    for path in shards:
        write_damaged(path, tmp_path / "data" / path.name)
    expected = run(tmp_path / "whole", tmp_path / "cache", bucketing=bucketing, multiple=4)
    for ranks in (1, 2, 4):
        steps = run(tmp_path / "data", tmp_path / f"{ranks}", ranks, bucketing=bucketing, multiple=4)
        assert all(step.rows == [STEP // ranks] * ranks for step in steps)
        assert [step.shape for step in steps] == [step.shape for step in expected]
        differ = [set(one.keys) ^ set(other.keys) for one, other in zip(steps, expected, strict=True)]
        assert 8 <= sum(map(bool, differ)) <= 12


def test_patches_of_a_step_have_one_length_with_captions_of_like_ones(data: Path, tmp_path: Path) -> None:
    images = Images(patches=Patches(8, seq_lens=(4, 9)))
    for bucketing in ("step", 32):
        expected = run(data, tmp_path, images=images, bucketing=bucketing)
        (one, other) = loaders(data, tmp_path, 2, images=images, bucketing=bucketing)
        with one, other:
            found = [
                (first["text"].shape, first["image"]["patches"].shape, second["image"]["patches"].shape)
                for first, second in zip(one, other, strict=True)
            ]
        assert [text[1] for text, _, _ in found] == [step.shape for step in expected]
        assert all(first == second for _, first, second in found)
        assert {first[1] for _, first, _ in found} == {4, 9}


def test_images_that_are_not_enlarged_are_planned_by_their_patches(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", [60, 60], options=ShardOptions(image_side=(8, 60)))
    images = Images(patches=Patches(8, seq_lens=(16, 40), max_ratio=1.0))
    options: dict[str, Any] = {"images": images, "bucketing": 64, "multiple": 4}
    plain = loaders(tmp_path / "data", tmp_path / "cache", **{**options, "bucketing": None})[0]
    (one, other) = loaders(tmp_path / "data", tmp_path / "cache", 2, **options)
    sizes = {}
    with plain, one, other:
        spread_plain = [int(np.ptp(batch["image"]["patch_valid"].sum(1).numpy())) for batch in plain]
        spread, keys = [], []
        for batches in zip(one, other, strict=True):
            counts = [batch["image"]["patch_valid"].sum(1).numpy() for batch in batches]
            spread.append(int(np.ptp(np.concatenate(counts))))
            keys += [key for batch in batches for key in batch["__key__"]]
            assert batches[0]["image"]["patches"].shape == batches[1]["image"]["patches"].shape
            sizes |= {key: int(n) for batch, own in zip(batches, counts, strict=True)
                      for key, n in zip(batch["__key__"], own, strict=True)}  # fmt: skip
    assert len(keys) == len(set(keys)) == 120
    assert sum(spread) < 0.85 * sum(spread_plain)
    assert min(sizes.values()) < 6
    assert max(sizes.values()) > 16


def test_another_bucketing_only_between_blocks(data: Path, tmp_path: Path) -> None:
    (loader,) = loaders(data, tmp_path, bucketing=32)
    with loader:
        states = [loader.state_dict() for _ in loader]
    for steps, fits in [(4, True), (5, False), (7, False), (8, True)]:
        (other,) = loaders(data, tmp_path, bucketing=64)
        with other:
            if fits:
                other.load_state_dict(states[steps - 1])
                keys = [key for step in steps_of([other]) for key in step.keys]
                assert len(keys) == len(set(keys)) == 128 - steps * STEP
            else:
                with pytest.raises(StateMismatch, match=f"which ends in {8 - steps} steps"):
                    other.load_state_dict(states[steps - 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": Batches(bucketing=64)}, 'text_padding="longest"'),
        ({"batches": Batches(bucketing=64, text_padding="longest"), "train": False}, "for training"),
        ({"batches": Batches(bucketing=64, text_padding="longest"), "shards": Shards(text_key=None)}, "text"),
    ],
)
def test_what_bucketing_cannot_go_by_is_refused(data: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        list(streamload.make_loader(str(data), tokenize, batch_size=8, **options))


@pytest.mark.parametrize("value", [0, -3, 1 << 20, "block", True, 2.5])
def test_bad_values_are_refused(value: Any) -> None:
    with pytest.raises(OptionError, match="bucketing="):
        Batches(bucketing=value)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.deep)])
def test_a_cache_smaller_than_a_block(tmp_path: Path, workers: int) -> None:
    shards = write_shards(tmp_path / "data", [50] * 6, options=ShardOptions(padding_bytes=(20_000, 30_000)))
    total = sum(path.stat().st_size for path in shards)
    options = {"bucketing": 4096, "num_workers": workers, "shuffle": 50}
    with ShardServer.spawn(tmp_path / "data") as server:
        urls = f"{server.url}/{{00000..00005}}.tar"
        expected = run(urls, tmp_path / "large", cache_size="1GB", **options)
        (loader,) = loaders(urls, tmp_path / "small", cache_size=total * 6 // 10, **options)
        with loader:
            found = [(step.keys, step.shape) for _ in range(2) for step in steps_of([loader])]
    assert found[: len(expected)] == [step[:2] for step in expected]
    later = [key for keys, _ in found[len(expected) :] for key in keys]
    assert len(later) == len(set(later)) == 300 // STEP * STEP
