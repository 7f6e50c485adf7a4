"""Features in a loader: rows in place of images, aligned with the order, computed once, never stale."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import streamload
from streamload import Features
from streamload.columns import columns
from streamload.derived.calls import module_call
from streamload.derived.calls.feature_rows import shown
from streamload.derived.proof import row_check
from streamload.derived.store.keys import SampleKey
from streamload.derived.store.row_store import close_stores
from streamload.errors import FeatureMismatch, FeatureNotCacheable, OptionError, SampleError
from streamload.features import names
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, read_oracle, write_shards
from tests.support import flat

SAMPLES = 24


class Plain(nn.Module):
    """A module of any class."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.project = nn.Linear(3 * 16, width)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.project(nn.functional.adaptive_avg_pool2d(images, 4).flatten(1))


@streamload.cache_module
class Net(Plain):
    """The same, decorated."""


class Parts(nn.Module):
    """Returns tensors of several types, in a tree."""

    def forward(self, images: torch.Tensor) -> dict[str, Any]:
        small = nn.functional.adaptive_avg_pool2d(images, 2)
        return {
            "half": small.half(),
            "both": (small.mean((1, 2, 3)).bfloat16(), (small[:, 0] > 0)),
            "none": small[:, :0],
        }


@streamload.cache_module
class Scaled(nn.Module):
    """Depends on what nobody can see."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((2, 3)) * getattr(sys, "scale_of_the_test", 1.0)


class Texts(nn.Module):
    """Of ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(1000, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids)


class Both(nn.Module):
    """Of images and ids."""

    def forward(self, sample: dict[str, torch.Tensor]) -> torch.Tensor:
        return sample["image"].mean((1, 2, 3)) + sample["text"].float().sum(1)


def tokenize(texts: list[str]) -> torch.Tensor:
    return torch.tensor([[len(text), sum(map(ord, text)) % 1000] for text in texts])


def small(image: Image.Image, resample: Image.Resampling = Image.Resampling.BICUBIC) -> torch.Tensor:
    """A transform that runs as given."""
    levels = np.array(image.resize((8, 8), resample), dtype=np.float32)
    return torch.from_numpy(levels / 255).permute(2, 0, 1)


def noisy(image: Image.Image) -> torch.Tensor:
    """A random one."""
    return small(image) + torch.rand(3, 1, 1)


def seldom_noisy(image: Image.Image) -> torch.Tensor:
    """Random in one of five images."""
    return noisy(image) if torch.rand(()) < 0.2 else small(image)


def seldom_failing(image: Image.Image) -> torch.Tensor:
    """Refuses one of two images by chance."""
    if torch.rand(()) < 0.5:
        raise SampleError("refused by chance")
    return small(image)


def tokenize_with_types(texts: list[str]) -> dict[str, torch.Tensor]:
    ids = tokenize(texts)
    return {"input_ids": ids, "token_type_ids": torch.zeros_like(ids)}


calls: list[int] = []


def counted(image: Image.Image) -> torch.Tensor:
    """Counts, in this process."""
    calls.append(1)
    return small(image)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("STREAMLOAD_CACHE_SIZE", "1GB")
    close_stores()
    yield
    close_stores()


@pytest.fixture(params=["columns", "small shards"])
def data(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of shards with few samples rows lie among those of calls; here 4 samples are many for columns."""
    if request.param == "columns":
        monkeypatch.setattr(names, "FIRST", 4)
        monkeypatch.setattr(columns, "FIRST", 4)
    write_shards(tmp_path / "data", [8, 8, 8], options=ShardOptions(image_side=(24, 40)))
    return tmp_path / "data"


def make(data: Path | str, **options: Any) -> streamload.Loader:
    defaults: dict[str, Any] = {
        "preprocess": small, "output": "dict", "with_keys": True,
        "batch_size": 5, "num_workers": 0, "train": False,
    }  # fmt: skip
    return flat.make_loader(str(data), options.pop("tokenizer", None), **{**defaults, **options})


def rows_of(loader: streamload.Loader, feature: Any, name: str = "f") -> dict[str, Any]:
    """The feature of each sample of an epoch, by its key."""
    found: dict[str, Any] = {}
    for batch in loader:
        value = feature(batch)
        for at, key in enumerate(batch["__key__"]):
            found[key] = torch.utils._pytree.tree_map(lambda leaf, at=at: leaf[at].clone(), value)
    return found


def expected(data: Path, module: nn.Module, **options: Any) -> dict[str, Any]:
    """What the module returns for the images of a loader without features, one sample at a time."""
    found: dict[str, Any] = {}
    with make(data, batch_size=1, **options) as loader, torch.no_grad():
        for batch in loader:
            found[batch["__key__"][0]] = torch.utils._pytree.tree_map(
                lambda leaf: leaf[0], module(batch["image"])
            )
    return found


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        torch.testing.assert_close(value, other[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_are_computed_once_and_are_what_the_module_returns(data: Path, workers: int) -> None:
    net = Net().eval()
    with make(data, features={"f": net}, num_workers=workers) as loader:
        first, second = rows_of(loader, net), rows_of(loader, net)
        stats = loader.stats()
    assert (stats.feature_rows_computed, stats.feature_rows_read) == (SAMPLES, SAMPLES)
    assert (stats.feature_rows_stored, stats.feature_rows_refused) == (SAMPLES, 0)
    assert (stats.feature_builds, stats.feature_mismatches) == (1, 0)
    assert stats.feature_bytes_read == sum(row.nbytes for row in first.values())
    assert stats.feature_bytes_stored >= stats.feature_bytes_read  # in a column a row has no head
    assert stats.feature_saved_seconds > 0
    assert_same(first, expected(data, net))
    assert_same(first, second)
    assert streamload.cache_info(net).stored == SAMPLES


def test_order_and_batches_are_those_without_features(data: Path) -> None:
    net = Net().eval()
    options = {"train": True, "batch_size": 4, "num_workers": 2, "seed": 3, "num_batches": 9}

    def keys(features: Any) -> list[list[str]]:
        with make(data, features=features, **options) as loader:
            return [
                batch["__key__"]
                for _ in range(2)
                for batch in loader
                if not features or net(batch) is not None
            ]

    assert keys({"f": net}) == keys(None) == keys({"f": net})


def test_a_half_made_run_goes_on_with_what_is_missing(data: Path) -> None:
    net = Net().eval()
    with make(data, features={"f": net}) as loader:
        for batch, _ in zip(loader, range(2), strict=False):
            net(batch)
    with make(data, features={"f": net}, batch_size=7, train=True, num_batches=3, seed=1) as loader:
        batches = [(batch["f"].missing, batch["__key__"], net(batch)) for batch in loader]
        assert loader.stats().feature_rows_read == sum(7 - len(missing) for missing, _, _ in batches)
    assert any(0 < len(missing) < 7 for missing, _, _ in batches)
    known = expected(data, net)
    for _, keys, rows in batches:
        torch.testing.assert_close(rows, torch.stack([known[key] for key in keys]), rtol=1e-5, atol=1e-6)


def test_a_resume_reads_the_rows_of_the_samples_that_are_left(data: Path) -> None:
    net = Net().eval()
    options = {"train": True, "batch_size": 4, "num_batches": 6, "features": {"f": net}}
    with make(data, **options) as loader:
        whole = [(batch["__key__"], net(batch)) for batch in loader]
    with make(data, **options) as loader:
        iterator = iter(loader)
        for _ in range(2):
            net(next(iterator))
        state = loader.state_dict()
    with make(data, num_workers=2, **options) as loader:
        loader.load_state_dict(state)
        rest = [(batch["__key__"], net(batch)) for batch in loader]
    assert [keys for keys, _ in rest] == [keys for keys, _ in whole[2:]]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(rest, whole[2:], strict=True))


def test_an_image_whose_row_is_there_is_not_decoded(data: Path) -> None:
    net = Net().eval()
    with make(data, features={"f": net}, preprocess=counted) as loader:
        rows_of(loader, net)
        rows_of(loader, net)  # computes four rows again, the first time
        calls.clear()
        (batch, *_) = loader
        assert not calls
    assert "image" not in batch
    assert repr(batch["f"]) == "<FeatureRows 5 samples, 0 missing>"


def by_a_file(image: Image.Image) -> torch.Tensor:
    """Depends on a file and a variable that no code names as a whole."""
    name = os.environ.get("PLACE_OF_" + "SCALE", "")
    return small(image) * float(Path(name).read_text())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_preprocess_reads_is_part_of_what_rows_are_made_of(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    scale = tmp_path / "scale.txt"
    monkeypatch.setenv("PLACE_OF_SCALE", str(scale))
    computed = []
    for factor in ("1", "1", "2", "2", "1"):
        scale.write_text(factor)
        torch.manual_seed(0)
        feature = Features(net := Net().eval(), preprocess=by_a_file)
        with make(data, features={"f": feature}, num_workers=workers) as loader:
            rows = rows_of(loader, feature)
            if not computed:  # the first epoch finds out what is read
                rows = rows_of(loader, feature)
            computed.append(loader.stats().feature_rows_computed)
        close_stores()  # as in another run
        assert_same(rows, expected(data, net, preprocess=by_a_file))
    assert computed[1:] == [0, SAMPLES, 0, 0]


def test_images_come_as_well_where_they_are_asked_for(data: Path) -> None:
    net = Net().eval()
    feature = Features(net, images=True)
    with make(data, features={"f": feature}) as loader:
        for _ in range(2):
            for batch in loader:
                torch.testing.assert_close(net(batch), net(batch["image"]), rtol=1e-5, atol=1e-6)


def test_a_preprocess_of_its_own_stands_beside_a_random_one(data: Path) -> None:
    feature = Features(Net().eval(), preprocess=small, images=True)
    with make(data, preprocess=noisy, features={"f": feature}) as loader:
        first = rows_of(loader, feature)
        images = [batch["image"] for batch in loader]
    assert_same(first, expected(data, feature.module))
    assert images[0].shape == (5, 3, 8, 8)


def test_a_module_of_any_class_has_rows(data: Path) -> None:
    torch.manual_seed(5)
    feature = Features(Plain().eval())
    with make(data, features={"f": feature}) as loader:
        first = rows_of(loader, feature)
    assert_same(first, expected(data, feature.module.module))
    torch.manual_seed(5)
    again = Features(Plain().eval())
    with make(data, features={"f": again}) as loader:
        assert_same(rows_of(loader, again), first)
        assert loader.stats().feature_rows_read == SAMPLES


def test_results_may_be_trees_of_any_types(data: Path) -> None:
    feature = Features(Parts())
    with make(data, features={"f": feature}) as loader:
        first, second = rows_of(loader, feature), rows_of(loader, feature)
    known = expected(data, Parts())
    assert first.keys() == second.keys() == known.keys()
    for key, value in known.items():
        for made in (first[key], second[key]):
            flat, spec = torch.utils._pytree.tree_flatten(made)
            other, other_spec = torch.utils._pytree.tree_flatten(value)
            assert spec == other_spec
            assert [(leaf.dtype, leaf.shape) for leaf in flat] == [(leaf.dtype, leaf.shape) for leaf in other]
            assert all(torch.equal(one, two) for one, two in zip(flat, other, strict=True))


def test_features_of_texts_and_of_whole_samples(data: Path) -> None:
    texts, both = Features(Texts().eval(), inputs="text"), Features(Both(), inputs="sample", images=True)
    features = {"t": texts, "b": both}
    with make(data, tokenizer=tokenize, features=features, num_workers=1) as loader:
        for _ in range(2):
            for batch in loader:
                torch.testing.assert_close(texts(batch), texts.module.module(batch["text"]))
                torch.testing.assert_close(both(batch), both.module.module(batch), rtol=1e-5, atol=1e-5)
        assert loader.stats().feature_rows_read == 2 * SAMPLES


def test_rows_are_stored_in_another_dtype(data: Path) -> None:
    feature = Features(Net().eval(), dtype=torch.float16)
    with make(data, features={"f": feature}) as loader:
        first, second = rows_of(loader, feature), rows_of(loader, feature)
    known = expected(data, feature.module)
    assert_same(first, {key: row.half() for key, row in known.items()})
    assert_same(first, second)


def test_variants_change_from_pass_to_pass_and_are_computed_once(data: Path) -> None:
    feature = Features(Net().eval(), variants=3)
    passes: list[dict[str, Any]] = []
    with make(data, preprocess=noisy, features={"f": feature}) as loader:
        for epoch in range(12):
            loader.set_epoch(epoch)
            passes.append(rows_of(loader, feature))
        computed = loader.stats().feature_rows_computed
    draws = {key: {tuple(one[key].tolist()) for one in passes} for key in passes[0]}
    assert all(1 <= len(found) <= 3 for found in draws.values())
    assert sum(map(len, draws.values())) == computed > 2 * SAMPLES
    with make(data, preprocess=noisy, features={"f": feature}) as loader:
        loader.set_epoch(4)
        assert_same(rows_of(loader, feature), passes[4])


@pytest.mark.parametrize("transform", [noisy, seldom_noisy, seldom_failing])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_random_images_are_refused(data: Path, transform: Any, batch_size: int) -> None:
    net = Net().eval()
    with (
        make(data, preprocess=transform, batch_size=batch_size, features={"f": net}) as loader,
        pytest.raises(FeatureNotCacheable, match=r"'f' are random.*variants=K"),
    ):
        rows_of(loader, net)


def test_beside_the_default_of_training_features_are_of_the_default_of_evaluation(data: Path) -> None:
    net = Net().eval()
    with make(data, preprocess=None, train=True, features={"f": Features(net, images=True)}) as loader:
        rows = rows_of(loader, net)
    known = expected(data, net, preprocess=None)
    assert_same(rows, {key: known[key] for key in rows})


def test_other_weights_have_other_rows(data: Path) -> None:
    net = Net().eval()
    with make(data, features={"f": net}) as loader:
        first = rows_of(loader, net)
        with torch.no_grad():
            net.project.weight.mul_(2)
        second = rows_of(loader, net)
        assert_same(second, expected(data, net))
        assert not torch.equal(first["00000000000"], second["00000000000"])
        batches = iter(loader)
        net(next(batches))
        with torch.no_grad():
            net.project.weight.mul_(2)
        with pytest.raises(FeatureMismatch, match="iterate the loader again"):
            net(next(batches))


def test_autocast_around_the_call_alone_finds_its_rows_before_images_are_decoded(data: Path) -> None:
    def missing_of_passes(dtype: torch.dtype | None, passes: int) -> list[int]:
        net, missing = Plain().eval(), []
        net.load_state_dict(weights)
        feature = Features(net)  # as a run of its own makes it
        with make(data, features={"f": feature}, num_workers=2) as loader:
            for _ in range(passes):
                missing.append(0)
                for batch in loader:
                    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                        assert feature(batch).dtype == (dtype or torch.float32)
                    missing[-1] += len(batch["f"].missing)
        return missing

    weights = Plain().state_dict()
    assert missing_of_passes(torch.bfloat16, 3) == [SAMPLES, 0, 0]
    assert missing_of_passes(torch.bfloat16, 1) == [0]
    with pytest.raises(FeatureMismatch, match="the autocast under which they are asked for"):
        missing_of_passes(None, 1)  # the first of another precision
    assert missing_of_passes(None, 2) == [SAMPLES, 0]  # from now on no pass begins with a guess
    assert missing_of_passes(torch.bfloat16, 2) == [SAMPLES, 0]
    assert missing_of_passes(None, 2) == [SAMPLES, 0]


def test_another_resize_filter_has_other_rows(data: Path) -> None:
    net = Net().eval()
    found = []
    for resample in (Image.Resampling.BICUBIC, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC):
        transform = functools.partial(small, resample=resample)
        with make(data, preprocess=transform, features={"f": net}) as loader:
            found.append(rows_of(loader, net))
            computed = loader.stats().feature_rows_computed
        assert computed == (SAMPLES if len(found) < 3 else 0)
        assert_same(found[-1], expected(data, net, preprocess=transform))
    assert not torch.equal(found[0]["00000000000"], found[1]["00000000000"])


def test_an_edited_sample_is_computed_anew_and_moved_ones_are_found(data: Path, tmp_path: Path) -> None:
    net = Net().eval()
    with make(data, features={"f": net}) as loader:
        rows_of(loader, net)
    shutil.move(str(data), str(tmp_path / "moved"))
    with make(tmp_path / "moved", features={"f": net}) as loader:
        rows_of(loader, net)
        assert loader.stats().feature_rows_computed == 0
    write_shards(tmp_path / "other", [8], seed=7, options=ShardOptions(image_side=(24, 40)))
    shutil.copy(tmp_path / "other" / "00000.tar", tmp_path / "moved" / "00000.tar")
    with make(tmp_path / "moved", features={"f": net}) as loader:
        rows = rows_of(loader, net)
        assert loader.stats().feature_rows_computed == 8
    assert_same(rows, expected(tmp_path / "moved", net))


def test_a_replacement_brings_its_own_row(tmp_path: Path) -> None:
    """Of each shard one image can't be decoded: another sample takes its place, with its feature."""
    write_shards(tmp_path / "whole", [12, 12], options=ShardOptions(image_side=(24, 40)))
    (tmp_path / "data").mkdir()
    for path in sorted((tmp_path / "whole").iterdir()):
        with tarfile.open(tmp_path / "data" / path.name, "w") as tar:
            for number, (key, members) in enumerate(read_oracle(path)):
                for extension, payload in members.items():
                    is_broken = extension == "jpg" and number % 6 == 5
                    info = tarfile.TarInfo(f"{key}.{extension}")
                    content = payload[: len(payload) // 3] if is_broken else payload
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    net = Net().eval()
    options = {
        "train": True,
        "num_batches": 4,
        "batch_size": 6,
        "shards": streamload.Shards(max_bad_samples=None),
    }
    known: dict[str, Any] = {}
    with make(tmp_path / "data", **options) as loader:
        plain = [(batch["__key__"], net(batch["image"])) for batch in loader]
    for _ in range(2):
        with make(tmp_path / "data", features={"f": net}, **options) as loader:
            found = [(batch["__key__"], net(batch)) for batch in loader]
        assert [keys for keys, _ in found] == [keys for keys, _ in plain]
        for (keys, rows), (_, own) in zip(found, plain, strict=True):
            torch.testing.assert_close(rows, own.detach(), rtol=1e-5, atol=1e-6)
            known.update(zip(keys, rows, strict=True))
    assert known


def test_ranks_of_a_node_compute_each_row_once(data: Path) -> None:
    net = Net().eval()
    found: dict[str, Any] = {}
    for rank in range(2):
        order = streamload.Order(rank=rank, world_size=2)
        with make(data, features={"f": net}, order=order) as loader:
            found |= rows_of(loader, net)
    assert_same(found, expected(data, net))
    assert streamload.cache_info(net).stored == SAMPLES


@pytest.mark.parametrize("inputs", ["image", "sample"])
def test_rows_of_a_batch_that_is_complete_before_its_columns_have_a_name_are_read_later(
    data: Path, inputs: Any
) -> None:
    """In all later passes, which look for them under that name, and together with later rows of the shard."""
    net = Net().eval() if inputs == "image" else Both().eval()
    feature = Features(net, inputs=inputs)
    options: dict[str, Any] = {"features": {"f": feature}, "batch_size": 2, "tokenizer": tokenize}
    with ShardServer(data) as server:
        server.stop_after(0.4)  # of the first shard 3 samples, or nearly
        found: dict[str, Any] = {}
        with make(f"{server.url}/00000.tar", **options) as loader:
            for batch in loader:
                server.go_on()
                for key, row in zip(batch["__key__"], feature(batch), strict=True):
                    found[key] = row.clone()
            again = rows_of(loader, feature)
            stats = loader.stats()
        assert (stats.feature_rows_computed, stats.feature_rows_read) == (8, 8)
        with make(f"{server.url}/00000.tar", **options) as loader:
            assert_same(rows_of(loader, feature), again)
            assert loader.stats().feature_rows_computed == 0
    assert_same(found, again)


def test_an_error_of_the_module_is_its_own_and_stores_nothing(data: Path) -> None:
    class Fails(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("out of memory")

    feature = Features(Fails())
    with make(data, features={"f": feature}) as loader, pytest.raises(RuntimeError, match="out of memory"):
        rows_of(loader, feature)
    assert streamload.cache_info(feature.module).stored == 0


def test_what_cannot_be_cached_is_refused(data: Path) -> None:
    for module, why in ((nn.LazyLinear(3), "first call"), (nn.Dropout(0.5), "train mode")):
        feature = Features(nn.Sequential(nn.Flatten(), module))
        with make(data, features={"f": feature}) as loader, pytest.raises(FeatureNotCacheable, match=why):
            rows_of(loader, feature)


def test_without_a_cache_features_are_computed_each_time(data: Path) -> None:
    net = streamload.cache_module(None)(Plain)().eval()
    with make(data, features={"f": net}) as loader:
        first, second = rows_of(loader, net), rows_of(loader, net)
        assert loader.stats().feature_rows_computed == 2 * SAMPLES
    assert_same(first, second)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": {"image": Plain()}}, "the name 'image'"),
        ({"features": [Plain()]}, "expected a dict"),
        ({"features": {"f": Plain()}, "output": "tuple"}, "output="),
        (
            {
                "features": {"f": Plain()},
                "preprocess": None,
                "workers": streamload.Workers(map_sample=dict),
            },
            "map_sample=",
        ),
    ],
)
def test_features_that_cannot_be_are_refused(data: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make(data, **options)


def test_a_feature_may_not_have_the_name_of_a_value_of_the_tokenizer(data: Path) -> None:
    net = Net().eval()
    named: dict[str, Any] = {"features": {"token_type_ids": net}, "output": "hf", "with_keys": False}
    with (
        make(data, tokenizer=tokenize_with_types, **named) as loader,
        pytest.raises(OptionError, match=r"token_type_ids.* already"),
    ):
        next(iter(loader))


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_of_others_are_checked_before_one_is_used(
    data: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    def epoch() -> dict[str, Any]:
        monkeypatch.setattr(row_check, "_checks", {})  # as in a process that has stored nothing
        net = Scaled().eval()
        assert not net.training
        assert list(net.parameters()) == []  # it is built
        with make(data, features={"f": net}, num_workers=workers) as loader:
            return rows_of(loader, net)

    rows = epoch()
    assert_same(epoch(), rows)
    monkeypatch.setattr(sys, "scale_of_the_test", 2.0, raising=False)  # nothing that a fingerprint covers
    monkeypatch.setattr(module_call, "run_began", time.time)  # as in a later run
    with pytest.raises(FeatureMismatch) as raised:
        epoch()
    words = r"the row of key ('.*') of Scaled isn't what it computes now .*\(a distance of .* check=False"
    named = re.fullmatch(words, str(raised.value))
    assert named is not None
    assert named[1] in map(repr, rows)
    assert_same(epoch(), {key: 2 * row for key, row in rows.items()})


def test_a_mismatch_names_a_sample_by_its_key_and_a_text_by_itself() -> None:
    assert shown(SampleKey("a/7", 12, b"", 0)) == "a/7"
    assert shown(SampleKey("text", 12, b"", 0)) == "text"
    assert shown(SampleKey(("text", "a dog"), 1, b"", 0, 2)) == "a dog"
    ids = ("ids", "torch.int64", 5)
    assert shown(SampleKey(ids, 1, b"", 0, 2)) == ids


def test_a_module_twice_is_refused(data: Path) -> None:
    net = Net()
    with pytest.raises(OptionError, match="a module twice"):
        make(data, features={"a": net, "b": net})


@pytest.mark.parametrize(
    "bad", [{"inputs": "sound"}, {"dtype": torch.int8}, {"variants": 0}, {"images": "never"}]
)
def test_bad_options_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(bad))):
        Features(Plain(), **bad)


_PROGRAM = """
import sys
import torch
from torch import nn
import streamload
from tests.loader.test_features import make, small

@streamload.cache_module
class Seeded(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(192, 4)

    def forward(self, images):
        return self.project(images.flatten(1))

if __name__ == "__main__":
    net = Seeded().eval()
    workers = streamload.Workers(multiprocessing_context=sys.argv[2])
    with make(sys.argv[1], features={"f": net}, num_workers=1, workers=workers) as loader:
        total = sum(net(batch).sum().item() for batch in loader)
        stats = loader.stats()
    print(streamload.cache_info(net).builds, stats.feature_rows_read, f"{total:.4f}")
"""


@pytest.mark.deep
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.deep)])
def test_a_run_of_stored_rows_alone_builds_no_model(data: Path, tmp_path: Path, method: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    said = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, str(program), str(data), method],
            capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.split())
    assert [(builds, read) for builds, read, _ in said] == [("1", "0"), ("1", "24"), ("0", "24")]
    assert len({total for _, _, total in said}) == 1


def test_a_relative_directory_of_rows_is_that_of_the_decoration(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one").mkdir()
    monkeypatch.chdir(tmp_path / "one")
    net = streamload.cache_module("rows-here")(Plain)().eval()
    monkeypatch.chdir(tmp_path)
    with make(data, features={"f": net}, num_workers=1) as loader:
        rows_of(loader, net)
        monkeypatch.chdir(data)
        rows_of(loader, net)
        assert loader.stats().feature_rows_read == SAMPLES
    assert (tmp_path / "one" / "rows-here").is_dir()
    assert not list(tmp_path.glob("rows-here")) + list(data.glob("rows-here"))


def seeded(rows: Path) -> Any:
    torch.manual_seed(0)
    return streamload.cache_module(str(rows))(Plain)().eval()


def train(rank: int, data: Path, place: Path, first: int) -> None:
    """One of two ranks, each with rows of its own."""
    names.FIRST = columns.FIRST = first  # as in the process that asks
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place}/rendezvous", rank=rank, world_size=2
    )
    net = seeded(place / f"rows-{rank}")
    options = {
        "train": True,
        "num_batches": 3,
        "batch_size": 4,
        "num_workers": 1,
        "multiprocessing_context": "fork",
    }
    with make(data, features={"f": net}, cache_dir=place / f"cache-{rank}", **options) as loader:
        for batch in loader:
            torch.distributed.all_reduce(net(batch).sum())
        counted = [loader.stats().feature_rows_read, loader.stats().feature_rows_computed]
    (place / f"{rank}.json").write_text(json.dumps(counted))
    torch.distributed.destroy_process_group()


@pytest.mark.deep
def test_a_rank_that_computes_and_one_that_only_reads_stay_in_step(data: Path, tmp_path: Path) -> None:
    net = seeded(tmp_path / "rows-1")
    with make(data, features={"f": net}, cache_dir=tmp_path / "cache-1") as loader:
        rows_of(loader, net)
    close_stores()
    torch.multiprocessing.spawn(train, (data, tmp_path, names.FIRST), nprocs=2)
    assert json.loads((tmp_path / "0.json").read_text()) == [0, 12]
    assert json.loads((tmp_path / "1.json").read_text()) == [12, 0]


@pytest.mark.parametrize("prepare", ["raw", "raw-20", "auto"])
def test_features_of_prepared_images_are_of_the_images_that_a_batch_would_have(
    data: Path, prepare: str
) -> None:
    net = Net().eval()
    images = streamload.Images(prepare=prepare)
    with make(data, features={"f": net}, images=images) as loader:
        rows = rows_of(loader, net)
    assert_same(rows, expected(data, net, images=images))
    if prepare != "raw-20":
        assert_same(rows, expected(data, net))
