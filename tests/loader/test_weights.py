"""Batches(sample_weight=…): what rows weigh, beside an oracle that reads the shards; layouts; failures."""

from __future__ import annotations

import io
import json
import math
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing
from PIL import Image

import streamload
from streamload import complexity
from streamload.errors import OptionError
from streamload.loader.state import sealed
from streamload.shards.samples import Entry
from streamload.testing.resume import Layout, assert_resumes_exactly
from streamload.testing.shards import read_oracle, write_shards
from tests.support import flat

COUNTS = [40, 30, 50]


def broken(path: Path, *keys: str) -> None:
    """Replace the images of samples by bytes that are none."""
    samples = read_oracle(path)
    with tarfile.open(path, "w") as tar:
        for key, members in samples:
            for extension, data in members.items():
                data = b"\xff\xd8 no image" if key in keys and extension == "jpg" else data
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("weighed")
    paths = write_shards(place / "shards", COUNTS, seed=3)
    broken(paths[1], "00001000003", "00001000004", "00001000017")
    return place / "shards"


def spelled(captions: list[str]) -> dict[str, torch.Tensor]:
    """As many ids as the last digit of a caption says, and a mask of them."""
    count = [1 + int(("0" + "".join(filter(str.isdigit, caption)))[-1]) for caption in captions]
    ids = torch.tensor([[7] * each + [0] * (20 - each) for each in count])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def small(image: Any) -> torch.Tensor:
    return torch.zeros(3)


def raw_by_key(data: Path, image: float, text: float) -> dict[str, float]:
    """The complexity of each sample, by tarfile, Pillow and the tokenizer; broken images have no size."""
    found = {}
    for path in sorted(data.glob("*.tar")):
        for key, members in read_oracle(path):
            try:
                width, height = Image.open(io.BytesIO(members["jpg"])).size
            except OSError:
                width = height = math.nan
            bits = 8 * len(members["jpg"]) / (width * height)
            tokens = int(spelled([members["txt"].decode()])["attention_mask"].sum())
            found[key] = (image * bits + text * tokens) / 100
    return found


def make(data: Path, cache: Path, **options: Any) -> streamload.Loader:
    defaults = {"batch_size": 10, "num_workers": 0, "preprocess": small, "output": "dict", "with_keys": True}
    weight = {"sample_weight": complexity(), "tokenizer": spelled, "cache_dir": cache, "cache_size": "1GB"}
    return flat.make_loader(data, **{**defaults, **weight, **options})


@pytest.mark.parametrize("workers", [0, 2])
def test_the_weight_is_the_complexity_over_the_mean_of_the_first_step(
    data: Path, tmp_path: Path, workers: int
):
    raw = raw_by_key(data, 0.3, 0.7)
    with make(data, tmp_path, num_workers=workers, max_bad_samples=None) as loader:
        mean, seen = None, 0
        for batch in loader:
            own = np.array([raw[key] for key in batch["__key__"]])
            mean = own.mean() if mean is None else mean
            expected = np.clip(own / mean, 0.2, 5)
            assert batch["weight"].dtype == torch.float32
            np.testing.assert_allclose(batch["weight"].numpy(), expected, rtol=1e-6)
            assert torch.equal(loader.info.weight, batch["weight"])
            seen += len(own)
    assert seen == 120  # replaced ones among them, weighed as what took their place


def test_a_tuple_has_it_last_and_parts_have_their_rows(data: Path, tmp_path: Path):
    with make(data, tmp_path, output="tuple", microbatch=4, with_keys=False) as loader:
        for batch in loader:
            _images, texts, weight = batch
            assert texts.shape == (10, 20)
            parts = [part[2] for part in loader.microbatches(batch)]
            assert [len(part) for part in parts] == [4, 4, 2]
            assert torch.equal(torch.cat(parts), weight)
    with make(data, tmp_path, output="hf") as loader:
        batch = next(iter(loader))
        assert batch["weight"].shape == (10,) == (len(batch["pixel_values"]),)


def test_it_changes_nothing_else(data: Path, tmp_path: Path):
    with make(data, tmp_path) as weighed, make(data, tmp_path, sample_weight=None) as plain:
        for one, other in zip(weighed, plain, strict=True):
            assert one["__key__"] == other["__key__"]
            assert torch.equal(one["text"], other["text"])
            assert one.keys() - other.keys() == {"weight"}


def test_a_given_mean_is_used(data: Path, tmp_path: Path):
    raw = raw_by_key(data, 1, 0)
    with make(data, tmp_path, sample_weight=complexity(1, 0, mean=0.02), tokenizer=None) as loader:
        for batch in loader:
            expected = [min(max(raw[key] / 0.02, 0.2), 5) for key in batch["__key__"]]
            np.testing.assert_allclose(batch["weight"].numpy(), expected, rtol=1e-6)


def test_it_resumes_exactly_on_other_ranks(data: Path, tmp_path: Path):
    def scaled(**layout: Any) -> streamload.Loader:
        return make(data, layout.pop("cache_dir"), sample_weight=complexity(mean=0.05), groups=1, **layout)

    layouts = [Layout(2, 0), Layout(5, 0)]
    assert assert_resumes_exactly(
        scaled, tmp_path, global_batch=10, first=Layout(1, 0), layouts=layouts, cuts=[0, 4]
    )


def test_the_mean_of_a_state_holds_for_other_batches_and_only_for_the_same_weights(
    data: Path, tmp_path: Path
):
    with make(data, tmp_path) as loader:
        first = next(iter(loader))
        state = json.loads(json.dumps(loader.state_dict()))
    raw = raw_by_key(data, 0.3, 0.7)
    mean = np.mean([raw[key] for key in first["__key__"]])
    assert state["mean_weight"][1] == pytest.approx(mean)
    with make(data, tmp_path, batch_size=4) as loader:
        loader.load_state_dict(state)
        batch = next(iter(loader))
        expected = np.clip([raw[key] / mean for key in batch["__key__"]], 0.2, 5)
        np.testing.assert_allclose(batch["weight"].numpy(), expected, rtol=1e-6)
    with make(data, tmp_path, sample_weight=complexity(1, 1)) as loader:
        loader.load_state_dict(state)
        assert next(iter(loader))["weight"].mean() == pytest.approx(1, abs=0.1)
    with make(data, tmp_path, sample_weight=None) as loader:
        loader.load_state_dict(state)
        assert "weight" not in next(iter(loader))
    for damaged in ([1, 2], ["complexity", 0], ["complexity", "much"], "x", ["complexity", math.inf]):
        with make(data, tmp_path) as loader, pytest.raises(streamload.errors.StateMismatch):
            loader.load_state_dict(sealed({**state, "mean_weight": damaged}))


def test_it_is_multiplied_by_the_weights_of_the_sources(data: Path, tmp_path: Path):
    shards = sorted(data.glob("*.tar"))
    sources = [streamload.Source(str(shards[0]), 3, "a"), streamload.Source(str(shards[2]), 1, "b")]
    options: dict[str, Any] = {
        "cache_dir": tmp_path,
        "output": "dict",
        "tokenizer": spelled,
        "num_workers": 0,
    }
    options |= {"num_batches": 4, "batch_size": 8, "with_keys": True, "preprocess": small, "num_workers": 0}
    raw, by_source = raw_by_key(data, 0.3, 0.7), {"00000": 0.5 / 0.75, "00002": 0.5 / 0.25}
    order = streamload.Order(objective={"a": 1, "b": 1})
    batches = streamload.Batches(sample_weight=complexity(mean=0.1))
    with flat.make_loader(sources, order=order, batches=batches, **options) as loader:
        for batch in loader:
            own = [min(max(raw[key] / 0.1, 0.2), 5) * by_source[key[:5]] for key in batch["__key__"]]
            np.testing.assert_allclose(batch["weight"].numpy(), own, rtol=1e-6)
            assert torch.equal(batch["weight"], loader.info.weight)


def by_entry(entry: Entry) -> float | None:
    return None if entry.number % 5 == 0 else entry.number / 10 + entry.facts["index"]


def by_unknown(entry: Entry) -> float:
    return entry.facts["absent"] * 2


@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_of_the_entry_weighs_as_it_says(data: Path, tmp_path: Path, workers: int):
    options = {"facts": {"index": "json:index"}, "num_workers": workers}
    with make(data, tmp_path, sample_weight=by_entry, **options) as loader:
        for batch in loader:
            numbers = [int(key[5:]) for key in batch["__key__"]]
            expected = [1.0 if number % 5 == 0 else number / 10 + number for number in numbers]
            np.testing.assert_allclose(batch["weight"].numpy(), expected, rtol=1e-6)
    with make(data, tmp_path, sample_weight=by_unknown, facts={"absent": "json:absent"}) as loader:
        assert next(iter(loader))["weight"].tolist() == [1.0] * 10


def of_two_ranks(rank: int, data: Path, place: Path) -> None:
    rendezvous = f"file://{place}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    with make(data, place / "cache", batch_size=5, groups=1) as loader:
        found = [[batch["__key__"], batch["weight"].tolist()] for batch in loader]
        state = loader.state_dict()["mean_weight"]
    (place / f"{rank}.json").write_text(json.dumps([state, found]))
    torch.distributed.destroy_process_group()


def test_ranks_agree_on_the_mean_of_their_first_step(data: Path, tmp_path: Path):
    torch.multiprocessing.start_processes(of_two_ranks, (data, tmp_path), nprocs=2, start_method="fork")
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    with make(data, tmp_path / "cache", groups=1) as loader:
        for step, batch in enumerate(loader):
            parts = [own[step] for _, own in found]
            assert batch["__key__"] == parts[0][0] + parts[1][0]
            assert batch["weight"].tolist() == parts[0][1] + parts[1][1]
        state = loader.state_dict()["mean_weight"]
    assert found[0][0] == found[1][0] == state


def ends_before_its_first_batch(rank: int, data: Path, place: Path) -> None:
    rendezvous = f"file://{place}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    with make(data, place / "cache", batch_size=5, groups=1) as loader:
        batches = iter(loader)
        if rank == 0:
            try:
                next(batches)
            except streamload.errors.RankFailed as exc:
                (place / "told").write_text(str(exc))
    os._exit(0)  # rank 1 without a batch


def test_a_rank_that_ends_before_the_mean_is_known_fails_the_other(data: Path, tmp_path: Path):
    of_ranks = ends_before_its_first_batch
    torch.multiprocessing.start_processes(of_ranks, (data, tmp_path), nprocs=2, start_method="fork")
    assert "one of 2 ranks ended while all agreed on the mean of" in (tmp_path / "told").read_text()


def test_ranks_that_nothing_joins_fail_with_what_to_do(data: Path, tmp_path: Path):
    with (
        make(data, tmp_path, rank=0, world_size=2) as loader,
        pytest.raises(OptionError, match=r"initialise torch.distributed first, or give .*mean="),
    ):
        next(iter(loader))


def test_weights_follow_the_rows_of_bucketing(data: Path, tmp_path: Path):
    raw = raw_by_key(data, 0.3, 0.7)
    options = {"text_padding": "longest", "bucketing": 40, "sample_weight": complexity(mean=0.05)}
    with make(data, tmp_path, **options) as loader:
        for batch in loader:
            expected = np.clip([raw[key] / 0.05 for key in batch["__key__"]], 0.2, 5)
            np.testing.assert_allclose(batch["weight"].numpy(), expected, rtol=1e-6)


def negative(entry: Entry) -> float:
    return -0.5 if entry.key == "00001000007" else 1.0


def nothing(entry: Entry) -> float:
    return math.nan


def text(entry: Entry) -> Any:
    return "heavy"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (negative, "returned -0.5 for sample '00001000007'; expected a number from 0, or None"),
        (nothing, "returned nan for sample '0000.*expected a number, or None"),
        (text, "returned 'heavy' for sample"),
    ],
)
def test_a_weight_that_is_no_number_from_0_names_its_sample_fails(
    data: Path, tmp_path: Path, function: Any, words: str
):
    for workers in (0, 1):
        with (
            make(data, tmp_path, sample_weight=function, num_workers=workers) as loader,
            pytest.raises(OptionError, match=words),
        ):
            list(loader)


def mapped(sample: dict[str, Any]) -> dict[str, Any]:
    return {"weight": 1, "n": 2}


def test_what_cannot_be_weighed_fails(data: Path, tmp_path: Path):
    for wrong in (0.5, "complexity", complexity, {"image": 0.3}):
        with pytest.raises(OptionError, match=r"expected streamload\.complexity"):
            streamload.Batches(sample_weight=wrong)  # type: ignore[arg-type]
    for given in ({"image": -1}, {"text": math.nan}, {"image": "0.3"}, {"image": 0, "text": 0}, {"mean": 0}):
        with pytest.raises(OptionError, match="complexity"):
            complexity(**given)
    with pytest.raises(OptionError, match="sample_weight= is for training"):
        make(data, tmp_path, train=False)
    with pytest.raises(OptionError, match="give a tokenizer, or complexity"):
        make(data, tmp_path, tokenizer=None)
    with pytest.raises(OptionError, match=r"it is batches=Batches\(sample_weight=…\)"):
        streamload.make_loader(data, sample_weight=complexity())  # type: ignore[arg-type]
    options = {"tokenizer": None, "preprocess": None, "sample_weight": complexity(1, 0)}
    with (
        make(data, tmp_path, map_sample=mapped, **options) as loader,
        pytest.raises(OptionError, match="needs another name"),
    ):
        next(iter(loader))
