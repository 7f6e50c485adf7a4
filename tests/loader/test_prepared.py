"""`prepare=`: the same batches whether the cache has prepared shards or not; nobody else sees them."""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import streamload
from streamload.cache.shard import prepared_form, shard_of
from streamload.cache.tier import Tier
from streamload.cli import main
from streamload.daemon.warm import warm
from streamload.derived.prepare.preparation import Preparation
from streamload.errors import OptionError
from streamload.shards.tar import NOTE
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, write_shards
from tests.support import flat
from tests.support.tiers import flip, payload_start

COUNTS = [14, 9, 20]
NAMES = [f"{number:05d}.tar" for number in range(len(COUNTS))]
RECIPES = ["raw-32", "jpeg-32-q90"]
OPTIONS = ShardOptions(image_side=(24, 90))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_shards(tmp_path / "data", COUNTS, seed=5, options=OPTIONS)
    return tmp_path / "data"


@pytest.fixture
def server(data: Path) -> Iterator[ShardServer]:
    with ShardServer(data) as server:
        yield server


def prepare(server: ShardServer, cache: Path, recipe: str, names: list[str] = NAMES) -> None:
    urls = [f"{server.url}/{name}" for name in names]
    report = warm(urls, cache_dir=cache, cache_size="1GB", prepare=Preparation.parse(recipe))
    assert report.shards_complete == len(names)


def make(place: str | Path, cache: Path, **options: Any) -> streamload.Loader:
    urls = [f"{place}/{name}" for name in NAMES]
    chosen = {"batch_size": 5, "num_workers": 0, "output": "dict", "with_keys": True, **options}
    return flat.make_loader(urls, cache_dir=cache, cache_size="1TB", **chosen)


def batches(place: str | Path, cache: Path, **options: Any) -> tuple[list[dict[str, Any]], Any]:
    with make(place, cache, **options) as loader:
        found = list(loader)
    return found, loader.stats()  # closed: a fill may count just after its shard can be read


def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    assert len(one) == len(other) > 0
    return all(
        (a["__key__"], a["__url__"], a["text"]) == (b["__key__"], b["__url__"], b["text"])
        and torch.equal(a["image"], b["image"])
        for a, b in zip(one, other, strict=True)
    )


def to_numbers(image: Image.Image) -> torch.Tensor:
    """A transform that isn't known, with a random part."""
    row = int(torch.randint(image.height, (1,)))
    return torch.tensor([row, *image.size, *np.asarray(image)[row].sum(axis=0).tolist()])


def large_and_wide(entry: streamload.Entry) -> bool:
    return entry.width > entry.height and entry.sizes["jpg"] > 2500 and entry.caption_bytes > 10


@pytest.mark.parametrize("recipe", [RECIPES[0], pytest.param(RECIPES[1], marks=pytest.mark.deep)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2},
        {"preprocess": to_numbers},
        {"keep": large_and_wide},
        {"train": False, "dtype": "uint8"},
    ],
    ids=lambda options: "-".join(options) or "training",
)
@pytest.mark.sampled(2)
def test_batches_are_the_same_with_and_without_prepared_shards(
    server: ShardServer, tmp_path: Path, recipe: str, options: dict[str, Any]
) -> None:
    prepare(server, tmp_path / "all", recipe)
    prepare(server, tmp_path / "some", recipe, NAMES[1:2])
    asked = len(server.log)
    found, stats = batches(server.url, tmp_path / "all", prepare=recipe, **options)
    assert {request.path for request in server.log[asked:]} <= {"sizes.json"}
    assert (stats.origin_bytes, stats.tier_hits, stats.shards_published) == (0, 3, 0)
    partly, stats = batches(server.url, tmp_path / "some", prepare=recipe, **options)
    assert stats.shards_published == 2
    plain, _ = batches(server.url, tmp_path / "none", **options)
    made, stats = batches(server.url, tmp_path / "none", prepare=recipe, **options)  # as they are used
    assert stats.origin_bytes == 0
    assert same(found, made)
    assert same(partly, made)
    filled, stats = batches(server.url, tmp_path / "fresh", prepare=recipe, **options)  # as they arrive
    assert stats.shards_published == 3
    assert same(filled, made)
    assert [batch["__key__"] for batch in plain] == [batch["__key__"] for batch in made]
    assert not same(plain, made)


def as_stored(image: Image.Image) -> torch.Tensor:
    """A transform that isn't known, and sees all: orientation, size, pixels; with a random part."""
    upright = ImageOps.exif_transpose(image)
    row = int(torch.randint(upright.height, (1,)))
    profile = len(image.info.get("icc_profile", b""))
    return torch.tensor([row, profile, *upright.size, *np.asarray(upright)[row].sum(axis=0).tolist()])


def write_images_of_many_kinds(directory: Path) -> None:
    """Shards whose images are of all kinds that a training decodes, and some that it can't."""
    rng, exif = np.random.default_rng(4), Image.Exif()
    exif[0x0112] = 6
    kinds: list[tuple[str, str, str, dict[str, Any]]] = [
        ("jpg", "JPEG", "RGB", {"exif": exif}),
        ("jpg", "JPEG", "L", {}),
        ("jpg", "JPEG", "CMYK", {}),
        ("jpg", "JPEG", "RGB", {"progressive": True, "icc_profile": b"profile"}),
        ("png", "PNG", "RGBA", {"exif": exif}),
        ("png", "PNG", "P", {}),
        ("png", "PNG", "I;16", {}),
        ("webp", "WEBP", "RGBA", {"lossless": True}),
        ("jpg", "PPM", "RGB", {}),
        ("jpeg", "JPEG", "RGB", {"quality": 100, "subsampling": 0}),
    ]
    directory.mkdir()
    for shard, name in enumerate(NAMES):
        with tarfile.open(directory / name, "w") as tar:
            for number, (extension, format_, mode, options) in enumerate(kinds):
                height, width = rng.integers(8, 300, 2)
                levels = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
                image = Image.fromarray(levels).resize((width, height), Image.Resampling.BICUBIC)
                if mode == "I;16":
                    image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 201)
                out = io.BytesIO()
                (image if mode == "I;16" else image.convert(mode)).save(out, format_, **options)
                cut = len(out.getvalue()) // 2 if shard == number == 1 else None
                for ext, payload in ((extension, out.getvalue()[:cut]), ("txt", b"words")):
                    info = tarfile.TarInfo(f"{shard}-{number}.{ext}")
                    info.size = len(payload)
                    tar.addfile(info, io.BytesIO(payload))


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"num_workers": 2, "dtype": "uint8"}, marks=pytest.mark.deep),
        {"train": False},
        {"preprocess": as_stored},
        {"preprocess": as_stored, "train": False},
    ],
    ids=lambda options: "-".join(options) or "training",
)
@pytest.mark.sampled(2)
def test_raw_shards_give_the_batches_of_the_original_images(tmp_path: Path, options: dict[str, Any]) -> None:
    write_images_of_many_kinds(tmp_path / "data")
    with ShardServer(tmp_path / "data") as server:
        prepare(server, tmp_path / "all", "raw")
        prepare(server, tmp_path / "some", "raw", NAMES[1:2])
        plain, _ = batches(server.url, tmp_path / "plain", **options)
        for cache in ("all", "some", "none"):
            found, stats = batches(server.url, tmp_path / cache, prepare="raw", **options)
            assert same(found, plain), cache
            assert stats.samples_replaced["decode"] + stats.samples_skipped["decode"] >= 1
            assert (stats.origin_bytes == 0) == (cache == "all")
        later, _ = batches(server.url, tmp_path / "all", prepare="raw", **options | {"seed": 1})
    assert options.get("train") is False or not same(later, plain)


def test_others_never_see_prepared_shards(server: ShardServer, tmp_path: Path) -> None:
    prepare(server, tmp_path / "prepared", "raw-32")
    for recipe in (None, "raw-33", "jpeg-32-q90"):
        reference, _ = batches(server.url, tmp_path / f"plain-{recipe}", prepare=recipe)
        cache = shutil.copytree(tmp_path / "prepared", tmp_path / f"prepared-{recipe}")
        found, stats = batches(server.url, cache, prepare=recipe)
        assert same(found, reference)
        assert stats.shards_published == 3


def test_the_image_that_a_run_chooses_may_be_another_than_the_prepared_one(tmp_path: Path) -> None:
    """Of a sample with several one is prepared; who asks for the other has it prepared when it is read."""
    rng = np.random.default_rng(3)
    (tmp_path / "data").mkdir()
    for name in NAMES:
        with tarfile.open(tmp_path / "data" / name, "w") as tar:
            for number in range(6):
                for extension, kind in (("png", "PNG"), ("jpg", "JPEG"), ("txt", "")):
                    out = io.BytesIO(b"words")
                    if kind:
                        pixels = rng.integers(0, 256, (50, 60, 3), np.uint8)
                        Image.fromarray(pixels).save(out, kind)
                    info = tarfile.TarInfo(f"{name[:5]}{number}.{extension}")
                    info.size = len(out.getvalue())
                    tar.addfile(info, io.BytesIO(out.getvalue()))
    with ShardServer(tmp_path / "data") as server:
        prepare(server, tmp_path / "cache", "jpeg-32-q90")
        for image_key in ("jpg;png", "png;jpg"):
            options = {"prepare": "jpeg-32-q90", "image_key": image_key, "batch_size": 3}
            found, stats = batches(server.url, tmp_path / "cache", **options)
            made, _ = batches(server.url, tmp_path / f"none-{image_key}", **options)
            assert same(found, made)
            assert stats.tier_hits == 3


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_image_that_cannot_be_decoded_is_replaced_alike(
    data: Path, server: ShardServer, tmp_path: Path, recipe: str
) -> None:
    for name in NAMES[:2]:
        content = bytearray((data / name).read_bytes())
        at = content.find(b"\xff\xd8\xff")
        content[at : at + 4] = b"none"
        (data / name).write_bytes(content)
    prepare(server, tmp_path / "all", recipe)
    found, stats = batches(server.url, tmp_path / "all", prepare=recipe)
    made, _ = batches(server.url, tmp_path / "none", prepare=recipe)
    assert stats.samples_replaced["decode"] == 2
    assert same(found, made)


def test_notes_of_preparation_in_a_source_change_nothing(
    data: Path, server: ShardServer, tmp_path: Path
) -> None:
    """They say that captions are images, images prepared, samples others, or what can't be read."""
    planted = itertools.cycle(["1 8 8 txt", "1 8 8 jpg", "no note", None, "1 8 8 png", "", None])
    for name in NAMES:
        with tarfile.open(data / name) as old, tarfile.open(tmp_path / name, "w") as new:
            for info in old:
                info.pax_headers = {} if (note := next(planted)) is None else {NOTE: note}
                new.addfile(info, old.extractfile(info))
        (tmp_path / name).replace(data / name)
    prepare(server, tmp_path / "all", "raw-32")
    found, stats = batches(server.url, tmp_path / "all", prepare="raw-32")
    made, _ = batches(server.url, tmp_path / "none", prepare="raw-32")
    assert stats.shards_published == 0
    assert same(found, made)


def test_shards_prepared_under_another_limit_are_not_used(server: ShardServer, tmp_path: Path) -> None:
    """What is prepared there may be too large here."""
    prepare(server, tmp_path / "all", "raw-32")
    options = {"prepare": "raw-32", "max_image_pixels": 80 * 82, "train": False}
    found, stats = batches(server.url, tmp_path / "all", **options)
    made, _ = batches(server.url, tmp_path / "none", **options)
    assert stats.shards_published == 3
    assert stats.samples_skipped["too_large"] > 0
    assert same(found, made)


def form_of(url: str, recipe: str) -> str:
    return prepared_form(shard_of(url, None), Preparation.parse(recipe).name).digest


@pytest.mark.parametrize("workers", [0, 2])
def test_damage_in_a_prepared_shard_is_found_and_made_good(
    server: ShardServer, tmp_path: Path, workers: int
) -> None:
    cache = tmp_path / "cache"
    prepare(server, cache, "raw-32")
    places = [Tier(cache).published(form_of(f"{server.url}/{name}", "raw-32")) for name in NAMES]
    flip(places[0] / "data", payload_start(places[0], 7) + 100)
    os.truncate(places[1] / "data", 20_000)
    flip(places[2] / "index", places[2].joinpath("index").stat().st_size - 100)
    found, stats = batches(server.url, cache, prepare="raw-32", num_workers=workers)
    made, _ = batches(server.url, tmp_path / "none", prepare="raw-32")
    assert same(found, made)
    assert stats.checksum_failures >= 3
    assert stats.shards_published == 3
    again, stats = batches(server.url, cache, prepare="raw-32", num_workers=workers)
    assert same(again, made)
    assert (stats.checksum_failures, stats.shards_published) == (0, 0)


def test_a_prepared_shard_of_another_version_is_not_used(
    data: Path, server: ShardServer, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    prepare(server, cache, "raw-32")
    write_shards(tmp_path / "fresh", COUNTS, seed=6, options=OPTIONS)
    (tmp_path / "fresh" / NAMES[1]).replace(data / NAMES[1])
    found, stats = batches(server.url, cache, prepare="raw-32", revalidate="start")
    assert (stats.shards_revalidated, stats.shards_changed, stats.shards_published) == (3, 1, 1)
    made, _ = batches(server.url, tmp_path / "none", prepare="raw-32")
    assert same(found, made)


def test_prepared_shards_of_files_are_used_until_the_file_changes(data: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    urls = [str(data / name) for name in NAMES]
    warm(urls, cache_dir=cache, cache_size="1GB", prepare=Preparation.parse("raw-32"))
    made, _ = batches(data, tmp_path / "none", prepare="raw-32")
    found, stats = batches(data, cache, prepare="raw-32")
    assert stats.shards_published == 0
    assert same(found, made)
    shutil.copy(data / NAMES[0], tmp_path / "copy")
    (tmp_path / "copy").replace(data / NAMES[0])
    os.utime(data / NAMES[0], (1, 1))
    found, stats = batches(data, cache, prepare="raw-32")
    assert stats.shards_published == 1
    assert same(found, made)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("first", ["found", "made"])
@pytest.mark.sampled(2)
def test_a_state_goes_on_where_the_other_form_is_found(
    data: Path, server: ShardServer, tmp_path: Path, first: str, local: bool
) -> None:
    place = str(data) if local else server.url
    urls = [f"{place}/{name}" for name in NAMES]
    warm(urls, cache_dir=tmp_path / "found", cache_size="1GB", prepare=Preparation.parse("raw-32"))
    reference, _ = batches(place, tmp_path / "made", prepare="raw-32")
    other = {"found": "made", "made": "found"}[first]
    with make(place, tmp_path / first, prepare="raw-32") as loader:
        part = list(itertools.islice(loader, 3))
        state = loader.state_dict()
    with make(place, tmp_path / other, prepare="raw-32") as loader:
        loader.load_state_dict(state)
        rest = list(loader)
    assert same(part + rest, reference)


def test_a_prepared_shard_is_read_by_its_own_names_as_well(data: Path, tmp_path: Path) -> None:
    """What the cache holds is a plain tar: taken out of it, it is data like any other."""
    urls = [str(data / name) for name in NAMES]
    warm(urls, cache_dir=tmp_path / "cache", cache_size="1GB", prepare=Preparation.parse("raw-32"))
    (tmp_path / "taken").mkdir()
    for url, name in zip(urls, NAMES, strict=True):
        shutil.copy(
            Tier(tmp_path / "cache").published(form_of(url, "raw-32")) / "data", tmp_path / "taken" / name
        )
    found, _ = batches(tmp_path / "taken", tmp_path / "other", image_key="ppm")
    made, _ = batches(data, tmp_path / "none", prepare="raw-32")
    assert same(
        found,
        [
            {**batch, "__url__": [str(tmp_path / "taken" / Path(url).name) for url in batch["__url__"]]}
            for batch in made
        ],
    )


def test_prepared_shards_count_as_needed(server: ShardServer, tmp_path: Path) -> None:
    """Room for something else is made of what no run needs, not of what this one will read next."""
    cache = tmp_path / "cache"
    prepare(server, cache, "raw-32")
    write_shards(tmp_path / "data" / "other", [30], seed=9, options=OPTIONS)
    other = f"{server.url}/other/00000.tar"
    warm(other, cache_dir=cache, cache_size="1GB")
    tier = Tier(cache)
    with make(server.url, cache, prepare="raw-32", lanes=1, shuffle=0) as loader:
        rest = iter(loader)
        next(rest)
        tier.budget.limit.set(tier.used_bytes - 1)
        assert (
            tier.budget.excess(tier.limit_bytes, lambda held: True, ())[0].digest
            == shard_of(other, None).digest
        )
        assert len(list(rest)) == sum(COUNTS) // 5 - 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prepare": "raw-"}, "raw-256 or jpeg-256-q90"),
        ({"prepare": "raw-32", "map_sample": dict}, "map_sample= gets their bytes"),
    ],
    ids=["recipe", "map_sample"],
)
def test_what_cannot_be_prepared_fails(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        flat.make_loader("x.tar", **options)


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["streamload", *map(str, arguments)])
        try:
            main()
        except SystemExit as exc:
            return int(exc.code or 0), "".join(capsys.readouterr())
        return 0, "".join(capsys.readouterr())

    return run


def test_the_commands_know_prepared_shards(
    command: Callable[..., tuple[int, str]], server: ShardServer, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    urls = f"{server.url}/{{00000..00002}}.tar"
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        code, out = command("warm", urls, "--cache-dir", cache, "--cache-size", "1GB", "--prepare", "raw-32")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert code == 0
    assert "3 of 3 shards are in" in out
    code, out = command("cache", "verify", "--cache-dir", cache)
    assert code == 0, out
    code, out = command("cache", "ls", "--cache-dir", cache, "--json")
    listed = json.loads(out)["shards"]
    assert {row["url"] for row in listed} == {f"{server.url}/{name}#{Preparation(32).name}" for name in NAMES}
    assert all(row["state"] == "complete" and row["size_bytes"] == row["arrived_bytes"] for row in listed)
    code, out = command("warm", urls, "--prepare", "auto")
    assert code == 2
    assert "is not a recipe" in out


def test_damaged_prepared_shards_are_taken_out(
    command: Callable[..., tuple[int, str]], server: ShardServer, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    prepare(server, cache, "raw-32")
    place = Tier(cache).published(form_of(f"{server.url}/{NAMES[0]}", "raw-32"))
    flip(place / "data", payload_start(place, 3))
    code, _ = command("cache", "verify", "--repair", "--cache-dir", cache)
    assert code == 1
    assert not place.exists()
    code, out = command("cache", "verify", "--cache-dir", cache)
    assert code == 0, out
