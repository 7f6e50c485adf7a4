"""Samples of several images: their sizes in index entries and functions of facts, on any layout and form."""

from __future__ import annotations

import io
import math
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import streamload
from streamload import Batches, Entry, Images, Order, Shards, Workers
from streamload.testing.resume import Layout, assert_resumes_exactly
from streamload.testing.server import ShardServer
from streamload.testing.shards import read_oracle
from tests.support.commands import run_forked
from tests.support.conversations import encoded, sizes_by_pillow, write_conversations

COUNTS = [30, 21, 43, 26]
NAMES = ("words", "patches")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("conversations") / "data"
    write_conversations(directory, COUNTS, seed=11)
    return directory


@pytest.fixture
def server(data: Path) -> Iterator[ShardServer]:
    with ShardServer(data) as server:
        yield server


def words_and_patches(sample: dict[str, Any]) -> tuple[int, int]:
    """The words of the text, and the patches of all images, each resized to a side of 64 at most."""
    patches = 0
    for width, height in sample["__images__"].values():
        scale = min(1, 64 / max(width, height, 1))
        patches += math.ceil(width * scale / 14) * math.ceil(height * scale / 14)
    return len(sample["txt"].split()), patches


FACTS = {NAMES: words_and_patches}


def oracle(directory: Path) -> dict[str, tuple[int, int]]:
    """By key, words and patches as a script computes them from the tars."""
    found = {}
    for path in sorted(directory.glob("*.tar")):
        for key, members in read_oracle(path):
            sample = {"__images__": dict(sizes_by_pillow(members)), "txt": members["txt"]}
            found[key] = words_and_patches(sample)
    return found


def only_turns(raw: dict[str, Any]) -> dict[str, Any]:
    return {"members": len(raw)}


def make(listed: Any, cache_dir: Path, **options: Any) -> streamload.Loader:
    layout = {name: options.pop(name) for name in ("rank", "world_size") if name in options}
    batches = {"with_keys": True, **options.pop("batches", {})}
    shards = {"image_key": None, "text_key": None, "facts": FACTS, **options.pop("shards", {})}
    order = {"rank": 0, "world_size": 1, "groups": None if options.get("train") is False else 1}
    order |= {**layout, **options.pop("order", {})}
    defaults = {"batch_size": 4, "num_workers": 0, "seed": 7, "output": "dict", "cache_size": "1GB"}
    return streamload.make_loader(
        listed,
        shards=Shards(**shards),
        order=Order(**order),
        batches=Batches(**batches),
        workers=Workers(map_sample=only_turns),
        cache_dir=cache_dir,
        **{**defaults, **options},
    )


def keys_of(loader: streamload.Loader) -> list[str]:
    with loader:
        return [key for batch in loader for key in batch["__key__"]]


def has_patches(entry: Entry) -> bool:
    return entry.facts["patches"] >= 40 and entry.facts["words"] < 30


def has_wide_images(entry: Entry) -> bool:
    return sum(width > height for width, height in entry.images.values()) >= 2


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["local", "whole", "in ranges"])
def test_keep_sees_all_images(
    data: Path, server: ShardServer, tmp_path: Path, workers: int, kind: str
) -> None:
    listed = str(data) if kind == "local" else f"{server.url}/{{00000..00003}}.tar"
    options = {"train": False, "num_workers": workers}
    if kind == "in ranges":
        options["cache_size"] = "200KB"
    facts = oracle(data)
    expected = [key for key, (words, patches) in facts.items() if patches >= 40 and words < 30]
    assert 20 < len(expected) < 100
    assert keys_of(make(listed, tmp_path, shards={"keep": has_patches}, **options)) == expected
    sizes = {
        key: [size for _, size in sizes_by_pillow(members)]
        for path in sorted(data.glob("*.tar"))
        for key, members in read_oracle(path)
    }
    expected = [key for key, images in sizes.items() if sum(width > height for width, height in images) >= 2]
    assert 20 < len(expected) < 100
    assert keys_of(make(listed, tmp_path, shards={"keep": has_wide_images}, **options)) == expected
    assert any((tmp_path / "bare").iterdir()) == (kind == "in ranges")


@pytest.mark.parametrize("cost", [NAMES, "patches"])
def test_ranks_cost_the_same_by_facts_of_one_function_on_any_layout(
    data: Path, tmp_path: Path, cost: Any
) -> None:
    facts, costs = oracle(data), {"batches": {"cost": cost}, "batch_size": 8}
    steps = []
    for ranks, workers in ((1, 0), (2, 2)):
        made = [
            make(
                str(data),
                tmp_path / str(ranks),
                rank=rank,
                world_size=ranks,
                num_workers=workers,
                **{**costs, "batch_size": 8 // ranks},
            )
            for rank in range(ranks)
        ]
        rows = [[batch["__key__"] for batch in batches] for batches in zip(*made, strict=True)]
        for loader in made:
            loader.close()
        steps.append([sorted(key for keys in step for key in keys) for step in rows])
    assert steps[0] == steps[1]
    plain = [batch["__key__"] for batch in make(str(data), tmp_path / "1", batch_size=8)]
    assert sorted(map(sorted, plain)) != sorted(steps[0])
    spread = [[sum(facts[key][1] for key in keys) for keys in made] for made in (plain, steps[0])]
    assert max(spread[1][1:]) < max(spread[0])


@pytest.mark.parametrize(
    ("cost", "layouts"),
    [(None, [Layout(1, 0), Layout(2, 1), Layout(4, 0)]), ("patches", [Layout(1, 0), Layout(1, 1)])],
)
def test_a_run_by_facts_of_one_function_resumes_exactly(
    server: ShardServer, tmp_path: Path, cost: str | None, layouts: list[Layout]
) -> None:
    """Each time in an empty cache, as the shards arrive."""

    def made(**layout: Any) -> streamload.Loader:
        shards = {"keep": has_patches, "repeat": "words"}
        options = {"shards": shards, "batches": {"cost": cost}, "order": {"num_batches": 12}}
        return make(f"{server.url}/{{00000..00003}}.tar", **options, **layout)

    cuts = assert_resumes_exactly(
        made, tmp_path, global_batch=8, first=Layout(1, 2), layouts=layouts, cuts=range(1, 12, 3)
    )
    assert cuts == 4


def test_a_state_tells_facts_of_one_function_apart(data: Path, tmp_path: Path) -> None:
    with make(str(data), tmp_path, shards={"repeat": "words"}, order={"num_batches": 5}) as loader:
        next(iter(loader))
        state = loader.state_dict()
    for other in ({"facts": {NAMES[::-1]: words_and_patches}, "repeat": "words"}, {"repeat": "patches"}):
        with (
            make(str(data), tmp_path, shards=other, order={"num_batches": 5}) as loader,
            pytest.raises(streamload.errors.StateMismatch, match="facts, repeat"),
        ):
            loader.load_state_dict(state)


def areas(sample: dict[str, Any]) -> tuple[int, int]:
    (first, second) = sample["__images__"].values()
    return first[0] * first[1], second[0] * second[1]


@pytest.mark.parametrize("recipe", ["raw", "jpeg-32-q90"])
def test_sizes_in_a_prepared_shard_are_those_of_the_original(tmp_path: Path, recipe: str) -> None:
    rng, shard = random.Random(2), str(tmp_path / "a.tar")
    with tarfile.open(shard, "w") as tar:
        for key in range(20):
            members = {"1.jpg": encoded(rng, "JPEG"), "0.jpg": encoded(rng, "JPEG"), "txt": b"two"}
            for extension, payload in members.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(payload)
                tar.addfile(info, io.BytesIO(payload))
    sizes = {key: [size for _, size in sizes_by_pillow(members)] for key, members in read_oracle(shard)}
    forms = set()

    def keep(entry: Entry) -> bool:
        forms.add(None if entry.prepared is None else entry.prepared[0])
        assert [*entry.images] == ["1.jpg", "0.jpg"]
        assert [*entry.images.values()] == sizes[entry.key]
        assert (entry.width, entry.height) == sizes[entry.key][0]
        assert [entry.facts["first"], entry.facts["second"]] == [w * h for w, h in sizes[entry.key]]
        return entry.facts["first"] > entry.facts["second"]

    cache = ["--cache-dir", str(tmp_path / "cache"), "--cache-size", "1GB"]
    run_forked(["warm", shard, "--prepare", recipe, *cache]).check_returncode()
    with streamload.make_loader(
        shard,
        shards=Shards(image_key="0.jpg", facts={("first", "second"): areas}, keep=keep),
        images=Images(prepare=recipe),
        batches=Batches(with_keys=True),
        preprocess=lambda image: image.width,
        output="dict",
        train=False,
        batch_size=1,
        num_workers=0,
        cache_dir=tmp_path / "cache",
        cache_size="1GB",
    ) as loader:
        keys = [batch["__key__"][0] for batch in loader]
    assert forms - {None} == {"1.jpg"}
    assert 0 < len(keys) < 20
    assert keys == [key for key, ((a, b), (c, d)) in sizes.items() if a * b > c * d]
