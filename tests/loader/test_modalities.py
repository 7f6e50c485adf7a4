"""Sources without images or without texts beside image-text ones: rows, ranks, resume; what is refused."""

from __future__ import annotations

import collections
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

import streamload
from streamload import Source
from streamload.errors import OptionError
from streamload.order.events import UNIT, shares_of
from streamload.order.steps import portion
from streamload.steering import Decided
from streamload.testing.resume import Layout, assert_resumes_exactly
from streamload.testing.shards import read_oracle, write_shards
from tests.support import flat

COUNTS = {"pairs": [40, 30], "texts": [50, 20], "images": [30]}


def without(path: Path, extension: str) -> None:
    samples = read_oracle(path)
    with tarfile.open(path, "w") as tar:
        for key, members in samples:
            for name, content in members.items():
                if name != extension:
                    info = tarfile.TarInfo(f"{key}.{name}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("modalities")
    for seed, (name, counts) in enumerate(COUNTS.items()):
        paths = write_shards(place / name, counts, seed=seed)
        if name == "texts":  # the other shard has images, which aren't used
            without(paths[0], "jpg")
        if name == "images":
            without(paths[0], "txt")
    return place


def sources_of(data: Path, **weights: float) -> list[Source]:
    modalities = {"pairs": "image-text", "texts": "text", "images": "image"}
    return [
        Source(str(data / name), weight, name, modality=modalities[name])  # type: ignore[arg-type]
        for name, weight in weights.items()
    ]


ALL = {"pairs": 4.0, "texts": 3.0, "images": 1.0}


def spelled(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[*map(ord, caption[:24].ljust(24, "\0"))] for caption in captions])


spelled.pad_token_id = 0  # type: ignore[attr-defined]


def small(image: Any) -> torch.Tensor:
    """The size of an image, which `write_shards` draws: a mark to know it by."""
    return torch.tensor([float(image.size[0]), float(image.size[1]), float(sum(image.getpixel((0, 0))))])


def make(data: Path, cache: Path, **options: Any) -> streamload.Loader:
    defaults = {"batch_size": 16, "num_workers": 0, "num_batches": 8, "output": "dict", "with_keys": True}
    weights = options.pop("weights", ALL)
    given = {"preprocess": small, "tokenizer": spelled, "cache_dir": cache, "cache_size": "1GB"}
    return flat.make_loader(sources_of(data, **weights), **{**defaults, **given, **options})


def alone(data: Path, cache: Path) -> dict[tuple[str, str], tuple[Any, Any]]:
    """The oracle: image and ids of each sample of each folder, read by loaders for one member each."""
    found: dict[tuple[str, str], list[Any]] = collections.defaultdict(lambda: [None, None])
    options: dict[str, Any] = {"train": False, "with_keys": True, "cache_dir": cache, "batch_size": 1}
    options |= {"num_workers": 0, "output": "dict", "preprocess": small}
    for name in COUNTS:
        if name != "texts":
            with flat.make_loader(data / name, text_key=None, **options) as loader:
                for batch in loader:
                    found[name, batch["__key__"][0]][0] = batch["image"][0]
        if name != "images":
            as_image = {"image_key": "txt", "preprocess": None, "map_sample": lambda s: {"t": s["txt"]}}
            with flat.make_loader(data / name, **{**options, **as_image}) as loader:
                for batch in loader:
                    ids = spelled([batch["t"][0].decode()])[0]
                    found[name, batch["__key__"][0]][1] = ids
    return {key: (image, ids) for key, (image, ids) in found.items()}


def check(batch: dict[str, Any], oracle: dict[tuple[str, str], tuple[Any, Any]]) -> None:
    """Each image and each text of a batch belongs to the row that the batch says."""
    rows = [(Path(url).parent.name, key) for url, key in zip(batch["__url__"], batch["__key__"], strict=True)]
    for name, place, values in (("image", 0, batch.get("image", [])), ("text", 1, batch.get("text", []))):
        own = [row for row, sample in enumerate(rows) if oracle[sample][place] is not None]
        assert batch[f"{name}_rows"].dtype == torch.int64
        assert batch[f"{name}_rows"].tolist() == own
        assert len(values) == len(own)
        for row, value in zip(own, values, strict=True):
            assert torch.equal(value, oracle[rows[row]][place]), rows[row]


@pytest.mark.parametrize("workers", [0, 2])
def test_images_and_texts_have_rows_of_their_own(data: Path, tmp_path: Path, workers: int):
    oracle = alone(data, tmp_path / "alone")
    with make(data, tmp_path / "cache", num_workers=workers) as loader:
        for batch in loader:
            check(batch, oracle)
            assert len(batch["text"]) == 14
            assert len(batch["image"]) == 10
            assert collections.Counter(loader.info.source.tolist()) == {0: 8, 1: 6, 2: 2}
        assert loader.stats().source_samples == {"pairs": 64, "texts": 48, "images": 16}


def test_a_batch_without_images_or_texts_lacks_them(data: Path, tmp_path: Path):
    for name, lacks in (("texts", "image"), ("images", "text")):
        with make(data, tmp_path, weights={name: 1.0}) as loader:
            batch = next(iter(loader))
        assert lacks not in batch
        assert batch[f"{lacks}_rows"].tolist() == []
        other = {"image": "text", "text": "image"}[lacks]
        assert batch[f"{other}_rows"].tolist() == list(range(16))
        assert len(batch[other]) == 16


def test_the_default_transform_writes_only_the_images_that_there_are(data: Path, tmp_path: Path):
    options = {"preprocess": None, "text_padding": "longest", "num_batches": 3}
    with make(data, tmp_path, **options) as loader:
        for batch in loader:
            assert batch["image"].shape == (10, 3, 224, 224)
            assert len(batch["text_valid"]) == 14
            assert batch["text_valid"].shape == batch["text"].shape
    patches = streamload.Patches(16, seq_lens=(16, 64))
    with make(data, tmp_path, patches=patches, weights={"texts": 3.0, "images": 1.0}, **options) as loader:
        for batch in loader:
            assert batch["image"]["patches"].shape[0] == len(batch["image_rows"]) == 4


@pytest.mark.parametrize(("ranks", "groups"), [(2, 1), (4, 1), (4, 2)])
def test_all_ranks_have_equally_many_rows_of_each_modality(
    data: Path, tmp_path: Path, ranks: int, groups: int
):
    weights = {"pairs": 5.0, "texts": 2.0, "images": 1.4}
    options = {"weights": weights, "groups": groups, "world_size": ranks, "batch_size": 8}
    loaders = [make(data, tmp_path, rank=rank, **options) for rank in range(ranks)]
    totals: collections.Counter[str] = collections.Counter()
    try:
        for step, parts in enumerate(zip(*loaders, strict=True), 1):
            rows = {(len(part["image_rows"]), len(part["text_rows"])) for part in parts}
            assert len(rows) == 1
            totals.update(Path(url).parent.name for part in parts for url in part["__url__"])
            for name, weight in weights.items():
                exact = step * 8 * ranks * weight / 8.4
                assert abs(totals[name] - exact) < 2 * ranks
    finally:
        for loader in loaders:
            loader.close()


def test_it_resumes_exactly_at_every_step_and_the_state_keeps_the_rows(data: Path, tmp_path: Path):
    def made(**layout: Any) -> streamload.Loader:
        weights = {"pairs": 5.0, "texts": 2.0, "images": 1.4}
        options = {"weights": weights, "groups": 1, "output": "dict", **layout}
        return make(data, options.pop("cache_dir"), **options)

    cuts = assert_resumes_exactly(
        made,
        tmp_path,
        global_batch=16,
        first=Layout(2, 0),
        layouts=[Layout(1, 0), Layout(2, 1), Layout(4, 0)],
    )
    assert cuts == 8


def test_a_bad_image_is_replaced_by_a_row_of_the_same_modality(data: Path, tmp_path: Path):
    def no_small(image: Any) -> torch.Tensor:
        if image.size[0] < 24:
            raise streamload.errors.DecodeError("too small")
        return small(image)

    oracle = alone(data, tmp_path / "alone")
    with make(data, tmp_path / "cache", preprocess=no_small, max_bad_samples=None) as loader:
        for batch in loader:
            check(batch, oracle)
            assert len(batch["image"]) == 10
        assert loader.skipped


def test_losses_of_images_and_of_texts_are_reported_by_source(data: Path, tmp_path: Path):
    seen = []

    def policy(summary: Any) -> None:
        seen.append({one.name: one.loss.mean for one in summary.sources})

    with make(data, tmp_path, mixing=Every(policy), num_batches=9) as loader:
        for batch in loader:
            texts = batch["text_rows"]
            only = texts[~torch.isin(texts, batch["image_rows"])]
            loader.report(loss=torch.full((len(only),), 2.0), rows=only)
            loader.report(loss=torch.full((len(batch["image"]),), 5.0), rows=batch["image_rows"])
    assert seen
    for name, loss in (("texts", 2.0), ("pairs", 5.0), ("images", 5.0)):
        assert seen[0][name] == pytest.approx(loss)


class Every:
    """A policy that is asked every fourth step, and changes nothing."""

    every = 4

    def __init__(self, see: Any):
        self._see = see

    def decide(self, summary: Any, memory: Any) -> Any:
        self._see(summary)
        return Decided(None)


def test_a_state_of_other_modalities_is_refused(data: Path, tmp_path: Path):
    with make(data, tmp_path) as loader:
        next(iter(loader))
        state = json.loads(json.dumps(loader.state_dict()))
    listed = [Source(str(data / name), weight, name) for name, weight in ALL.items()]
    options: dict[str, Any] = {"output": "dict", "tokenizer": spelled, "cache_dir": tmp_path}
    with (
        streamload.make_loader(listed, **options) as loader,
        pytest.raises(streamload.errors.StateMismatch, match="choice of image_key"),
    ):
        loader.load_state_dict(state)


def test_a_source_without_the_member_has_no_usable_sample_fails(data: Path, tmp_path: Path):
    source = Source(str(data / "images"), modality="text")
    options: dict[str, Any] = {"output": "dict", "tokenizer": spelled, "cache_dir": tmp_path}
    with (
        streamload.make_loader(source, num_workers=0, **options) as loader,
        pytest.raises(streamload.errors.NoValidSamples),
    ):
        next(iter(loader))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"output": "tuple"}, "output='tuple'"),
        ({"label_key": "json:index"}, "label_key="),
        ({"bucketing": "step", "text_padding": "longest"}, "bucketing="),
        ({"microbatch": 4}, "microbatch="),
        ({"prepare": "raw"}, "prepare="),
        ({"text_key": None, "tokenizer": None}, "text_key=None"),
    ],
)
def test_what_needs_a_row_for_each_sample_fails(data: Path, tmp_path: Path, options: Any, name: str):
    with pytest.raises(OptionError, match=f"rows of their own: leave out .*{name}"):
        make(data, tmp_path, **options)


def test_another_modality_fails(data: Path):
    with pytest.raises(OptionError, match="source '0': modality='audio'"):
        streamload.make_loader([Source(str(data / "pairs"), modality="audio")])  # type: ignore[arg-type]


def test_portions_are_multiples_and_stay_near_the_shares():
    shares = shares_of([5, 2, 1.4], [0, 0, 0.1])
    given, owed, totals = (0, 0, 0), (0, 0, 0), [0, 0, 0]
    for step in range(1, 400):
        size = 24 if step % 7 else 26  # 4 doesn't divide it: any numbers
        found = portion(given, owed, shares, size, 4)
        assert sum(found.take) == size
        assert size == 26 or all(many % 4 == 0 for many in found.take)
        assert sum(found.owed) == 0
        given, owed = found.stop, found.owed
        totals = [total + many for total, many in zip(totals, found.take, strict=True)]
        seen = sum(totals)
        assert all(abs(total - seen * share / UNIT) < 8 for total, share in zip(totals, shares, strict=True))
