"""Batches of images as patches: formats and sizes of all kinds, resume, ranks, bad images, devices, options.

The oracle is Pillow. tests/transforms/test_openclip_patches.py holds the same to timm.
"""

import io
import itertools
import tarfile
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

import streamload
from streamload import Images, Patches
from streamload.device import feed_for
from streamload.errors import OptionError
from streamload.order.hashing import sample_seed
from streamload.order.steps import SeqLens
from streamload.patches.execute import PlannedPatches
from streamload.patches.grid import patch_grid
from streamload.patches.plan import clip_patch_plan
from streamload.shards import samples
from streamload.transforms import kernel
from streamload.transforms.normalise import OPENAI_MEAN, OPENAI_STD
from streamload.transforms.plan import OPENAI
from tests.support import flat
from tests.support.photographs import photograph

PATCH, SEQ_LENS = (16, 16), (9, 40, 64)
ROTATED = 0x0112
CONTROLLED = {"batch_size": 4, "seed": 35, "images": Images(patches=Patches(16, SEQ_LENS)), "output": "dict"}


def encoded(pixels, form, mode="RGB", **options):
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, form, **options)
    return buffer.getvalue()


def turned():
    exif = Image.Exif()
    exif[ROTATED] = 6
    return exif


def rgba(width, height):
    image = Image.fromarray(photograph(width, height)).convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize((width, height)))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


FILES = [
    ("jpg", encoded(photograph(120, 80), "JPEG")),
    ("png", encoded(photograph(50, 170, 1), "PNG")),
    ("webp", encoded(photograph(90, 91, 2), "WEBP")),
    ("jpg", encoded(photograph(140, 60, 3), "JPEG", exif=turned())),
    ("jpg", encoded(photograph(1, 1), "JPEG")),
    ("png", encoded(photograph(3, 300, 1), "PNG")),
    ("jpg", encoded(photograph(1000, 10, 2), "JPEG")),
    ("png", rgba(70, 40)),
    ("png", encoded(photograph(64, 48), "PNG", "L")),
    ("jpg", encoded(photograph(64, 100, 1), "JPEG", "L")),
    ("jpg", encoded(photograph(80, 60, 2), "JPEG", "CMYK")),
    ("png", encoded(photograph(33, 47, 3), "PNG", "P")),
    ("webp", encoded(photograph(200, 150, 4), "WEBP", lossless=True)),
    ("jpg", encoded(photograph(128, 128, 4), "JPEG", progressive=True)),
    ("png", encoded(photograph(16, 16), "PNG", "1")),
    ("jpg", encoded(photograph(300, 200, 1), "JPEG")),
]


def write(path, files):
    with tarfile.open(path, "w") as tar:
        for number, (extension, data) in enumerate(files):
            for name, payload in ((extension, data), ("txt", b"%d" % number)):
                member = tarfile.TarInfo(f"{number:03d}.{name}")
                member.size = len(payload)
                tar.addfile(member, io.BytesIO(payload))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    directory = tmp_path_factory.mktemp("of all kinds")
    for shard in range(3):
        write(directory / f"{shard}.tar", FILES[shard:] + FILES[:shard])
    return f"{directory}/{{0..2}}.tar"


def make(shards, tmp_path, **options):
    options = CONTROLLED | {"num_workers": 0, "cache_dir": tmp_path / "cache", "with_keys": True} | options
    return flat.make_loader(shards, **options)


def batches(shards, tmp_path, **options):
    with make(shards, tmp_path, **options) as loader:
        return [copied(batch) for batch in loader]


def copied(batch):
    """A batch whose memory isn't used again."""
    image = {name: value.clone() if name != "seq_len" else value for name, value in batch["image"].items()}
    return batch | {"image": image}


def rows(batch):
    """The images of a batch, each as its valid patches."""
    image = batch["image"]
    return [patches[valid] for patches, valid in zip(image["patches"], image["patch_valid"], strict=True)]


def assert_alike(ours, expected):
    if kernel.why_not():
        assert (ours - expected).abs().max() <= 2 / 255 / min(OPENAI_STD)
    else:
        assert torch.equal(ours, expected)


def assert_same(some, others):
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert one["__key__"] == other["__key__"]
        assert one["image"]["seq_len"] == other["image"]["seq_len"]
        for name in ("patches", "patch_coord", "patch_valid"):
            assert torch.equal(one["image"][name], other["image"][name])


def resized(data, seq_len):
    """By Pillow: float32[3, H, W], of whole patches."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    grid = patch_grid(image.height, image.width, seq_len, PATCH)
    size = grid.columns * 16, grid.rows * 16
    levels = torch.from_numpy(np.array(image.resize(size, Image.Resampling.BICUBIC))).permute(2, 0, 1)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (OPENAI_MEAN, OPENAI_STD))
    return levels.float().div(255).sub(mean).div(std)


def test_each_image_is_resized_to_the_patches_that_fit(shards, tmp_path):
    found = batches(shards.replace("{0..2}", "0"), tmp_path, train=False)
    assert [len(batch["text"]) for batch in found] == [4] * 4
    for batch in found:
        image = batch["image"]
        assert image["patches"].shape == (4, 64, 768)
        assert image["seq_len"] == 64
        assert (image["patches"].dtype, image["patch_coord"].dtype) == (torch.float32, torch.int64)
        assert (image["patches"][~image["patch_valid"]] == 0).all()
        assert (image["patch_coord"][~image["patch_valid"]] == 0).all()
        for row, text in enumerate(batch["text"]):
            expected = resized(FILES[int(text)][1], 64)
            rows, columns = expected.shape[1] // 16, expected.shape[2] // 16
            assert image["patch_valid"][row].tolist() == [True] * rows * columns + [False] * (
                64 - rows * columns
            )
            for place, (down, across) in enumerate(itertools.product(range(rows), range(columns))):
                part = expected[:, down * 16 : down * 16 + 16, across * 16 : across * 16 + 16]
                assert_alike(image["patches"][row, place], part.permute(1, 2, 0).reshape(-1))
                assert image["patch_coord"][row, place].tolist() == [down, across]


@pytest.mark.parametrize("train", [True, False])
def test_the_patches_of_an_image_are_known_from_its_index(train, shards, tmp_path):
    """By the width and height in the index, and the seed of the sample's random choices."""
    sizes = {}

    def note(entry):
        sizes[entry.key] = entry.height, entry.width
        return True

    shard = shards.replace("{0..2}", "0")
    found = batches(shard, tmp_path, keep=note, train=train, shuffle=0, lanes=1)
    assert sizes.keys() == {f"{number:03d}" for number in range(len(FILES))}
    for batch in found:
        seq_len = batch["image"]["seq_len"]
        planned = PlannedPatches(clip_patch_plan(train, PATCH), seq_len)
        for key, made in zip(batch["__key__"], rows(batch), strict=True):
            box = planned.draw(*sizes[key], sample_seed(35, 0, 0, 0, int(key))).box
            grid = patch_grid(box.height, box.width, seq_len, PATCH)
            assert len(made) == grid.rows * grid.columns


def test_an_index_that_lies_about_sizes_changes_nothing(shards, tmp_path, monkeypatch):
    expected = batches(shards, tmp_path / "honest", num_batches=6)

    class Lying(samples.ImageLook):
        def look(self, payload):
            done = super().look(payload)
            self.size = 1, 60_000
            return done

    monkeypatch.setattr(samples, "ImageLook", Lying)
    widths = set()
    found = batches(
        shards, tmp_path / "lying", num_batches=6, keep=lambda entry: widths.add(entry.width) is None
    )
    assert widths == {1}
    assert_same(found, expected)


def test_steps_draw_their_length_by_the_seed_and_all_lengths_come(shards, tmp_path):
    found = batches(shards, tmp_path, num_batches=30)
    lengths = SeqLens(SEQ_LENS, (1, 1, 1), 35)
    assert [batch["image"]["seq_len"] for batch in found] == [lengths.at(0, 4 * step) for step in range(30)]
    assert {batch["image"]["seq_len"] for batch in found} == set(SEQ_LENS)
    other = batches(shards, tmp_path, num_batches=30, seed=36)
    assert [batch["image"]["seq_len"] for batch in found] != [batch["image"]["seq_len"] for batch in other]


def test_lengths_come_as_often_as_they_should():
    lengths = SeqLens((8, 16, 32, 64), (1, 0, 2, 1), 7)
    counts = Counter(lengths.at(epoch, position) for epoch in range(4) for position in range(0, 100_000, 10))
    assert counts.keys() == {8, 32, 64}
    assert [counts[length] / 40_000 for length in (8, 32, 64)] == pytest.approx([0.25, 0.5, 0.25], abs=0.01)


@pytest.mark.parametrize("cut", [1, 4])
def test_a_resumed_run_goes_on_exactly_with_other_workers(cut, shards, tmp_path):
    whole = batches(shards, tmp_path, num_workers=2, num_batches=9)
    assert len({batch["image"]["seq_len"] for batch in whole}) > 1
    with make(shards, tmp_path, num_workers=2, num_batches=9) as loader:
        begun = [copied(batch) for batch in itertools.islice(loader, cut)]
        state = loader.state_dict()
    with make(shards, tmp_path / "elsewhere", num_workers=1, num_batches=9) as loader:
        loader.load_state_dict(state)
        rest = [copied(batch) for batch in loader]
    assert_same(begun + rest, whole)


def test_ranks_have_the_same_shapes_and_the_rows_of_one_rank(shards, tmp_path):
    alone = batches(shards, tmp_path / "alone", num_batches=6, groups=1)
    ranks = [
        batches(
            shards,
            tmp_path / "two",
            batch_size=2,
            num_batches=6,
            groups=1,
            rank=rank,
            world_size=2,
        )
        for rank in range(2)
    ]
    for whole, first, second in zip(alone, *ranks, strict=True):
        assert first["image"]["patches"].shape == second["image"]["patches"].shape
        assert whole["__key__"] == first["__key__"] + second["__key__"]
        for name in ("patches", "patch_coord", "patch_valid"):
            parts = [first["image"][name], second["image"][name]]
            assert torch.equal(whole["image"][name], torch.cat(parts))


def test_images_that_cannot_be_decoded_are_replaced_in_place(tmp_path):
    files = [
        ("jpg", data[: len(data) // 3] if number % 4 == 1 else data) for number, (_, data) in enumerate(FILES)
    ]
    write(tmp_path / "0.tar", files)
    shard = str(tmp_path / "0.tar")
    with make(shard, tmp_path, shuffle=0, max_bad_samples=None) as loader:
        found = [copied(batch) for batch in loader]
        replaced = loader.stats().samples_replaced["decode"]
    assert replaced == 4
    assert [len(rows(batch)) for batch in found] == [4] * 4
    assert all(len(row) for batch in found for row in rows(batch))


def test_a_small_batch_leaves_nothing_of_a_longer_one_in_its_memory(shards, tmp_path):
    with make(shards, tmp_path, num_workers=1, num_batches=60) as loader:
        for batch in loader:
            image = batch["image"]
            assert (image["patches"][~image["patch_valid"]] == 0).all()
            counts = image["patch_valid"].sum(1).tolist()
            places = [
                row[:count].unique(dim=0) for row, count in zip(image["patch_coord"], counts, strict=True)
            ]
            assert [len(place) for place in places] == counts
            del image, batch
        assert loader.stats().fresh_tensors == 0


def test_levels_that_are_normalised_on_a_device_are_what_a_worker_normalises(shards, tmp_path):
    levels = batches(shards, tmp_path, dtype="uint8", num_batches=5)
    floats = batches(shards, tmp_path, num_batches=5)
    for some, expected in zip(levels, floats, strict=True):
        image = {name: value for name, value in some["image"].items() if name != "seq_len"}
        assert image["patches"].dtype == torch.uint8
        moved = feed_for(torch.device("cpu"), OPENAI).send(image)()
        torch.testing.assert_close(moved["patches"], expected["image"]["patches"], rtol=0, atol=1e-5)
        assert (moved["patches"][~moved["patch_valid"]] == 0).all()


def test_a_loader_puts_patches_on_the_device(shards, tmp_path):
    """The meta device takes any tensor and needs no hardware."""
    with make(shards, tmp_path, device="meta", num_batches=2, output="tuple", with_keys=False) as loader:
        for image, texts in loader:
            assert len(texts) == 4
            assert image["patches"].dtype == torch.float32
            assert image["patches"].shape == (4, image["seq_len"], 768)
            assert {image[name].device.type for name in image if name != "seq_len"} == {"meta"}


class Resized:
    """A transform of a factory, as given."""

    def __init__(self, max_seq_len, patch_size):
        assert patch_size == PATCH
        self.seq_len = max_seq_len

    def __call__(self, image):
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        return resized(buffer.getvalue(), self.seq_len)


class Patchified(Resized):
    """The same with what timm's Patchify makes of it."""

    def __call__(self, image):
        floats = super().__call__(image)
        _, height, width = floats.shape
        rows, columns = height // 16, width // 16
        parts = floats.view(3, rows, 16, columns, 16).permute(1, 3, 2, 4, 0)
        coord = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        return {
            "patches": parts.reshape(rows * columns, 768),
            "patch_coord": coord,
            "patch_valid": torch.ones(rows * columns, dtype=torch.bool),
        }


@pytest.mark.parametrize("factory", [Resized, Patchified])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_functions_as_given_make_the_same_batches(factory, num_workers, shards, tmp_path):
    expected = batches(shards, tmp_path, train=False)
    given = batches(shards, tmp_path, train=False, preprocess=factory, num_workers=num_workers)
    for some, others in zip(given, expected, strict=True):
        assert some["__key__"] == others["__key__"]
        assert some["image"]["seq_len"] == others["image"]["seq_len"]
        assert torch.equal(some["image"]["patch_coord"], others["image"]["patch_coord"])
        assert torch.equal(some["image"]["patch_valid"], others["image"]["patch_valid"])
        assert_alike(some["image"]["patches"], others["image"]["patches"])


@pytest.mark.parametrize(
    ("returned", "error", "match"),
    [
        (torch.zeros(3, 16, 40), ValueError, r"an image \[3, 16, 40\]; expected at most 64 patches of 16×16"),
        (torch.zeros(1, 16, 16), ValueError, r"an image \[1, 16, 16\]"),
        (torch.zeros(3, 160, 160), ValueError, "at most 64 patches"),
        (
            {"patches": torch.zeros(3, 12), "patch_coord": 0, "patch_valid": 0},
            ValueError,
            r"patches \[3, 12\]",
        ),
        (torch.zeros(3, 16, 16, dtype=torch.uint8), TypeError, "returned a Tensor"),
        ("words", TypeError, r"returned a str for an image; expected float32\[3, H, W\]"),
    ],
)
def test_a_function_that_makes_no_patches_is_an_error(returned, error, match, shards, tmp_path):
    loader = make(
        shards, tmp_path, preprocess=lambda max_seq_len, patch_size: lambda image: returned, train=False
    )
    with loader, pytest.raises(error, match=match):
        next(iter(loader))


def test_patches_may_be_oblong(shards, tmp_path):
    patches = Images(patches=Patches((8, 32), (30,)))
    for batch in batches(shards, tmp_path, images=patches, num_batches=2):
        assert batch["image"]["patches"].shape == (4, 30, 768)
        assert batch["image"]["patch_valid"].any(1).all()


@pytest.mark.parametrize("prepare", ["raw", "raw-32"])
def test_prepared_images_become_patches(prepare, shards, tmp_path):
    def shapes(found):
        return [(batch["__key__"], batch["image"]["seq_len"]) for batch in found]

    plain = batches(shards, tmp_path, num_batches=4)
    found = batches(shards, tmp_path, prepare=prepare, num_batches=4)
    assert shapes(found) == shapes(plain)
    if prepare == "raw":
        assert_same(found, plain)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (lambda: Patches(0), "patch_size=0"),
        (lambda: Patches((16, 16, 16)), "one or two numbers"),
        (lambda: Patches(16, ()), "at least one number of patches"),
        (lambda: Patches(16, (64, 0)), "seq_lens=0"),
        (lambda: Patches(16, (8192,)), "8192 patches in a row have 131,072 pixels; at most 65,536"),
        (lambda: Patches(16, (64,), (0.5, 0.5)), "for each of the seq_lens"),
        (lambda: Patches(16, (64, 128), (0, 0)), "not only 0"),
        (lambda: Patches(16, (64, 128), (1, -1)), "at least 0"),
        (lambda: Images(patches=16), r"patches=16; expected a streamload.Patches"),
    ],
)
def test_patches_that_cannot_be_are_refused(given, match):
    with pytest.raises(OptionError, match=match):
        given()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"output": "hf", "tokenizer": len}, 'patches= is for output="dict" or "tuple"'),
        ({"map_sample": dict, "output": "tuple"}, "map_sample= is for images of one size"),
        ({"features": {"vit": torch.nn.Identity()}}, "features= is for images of one size"),
        ({"preprocess": lambda image: image}, r"preprocess\(max_seq_len=…, patch_size=…\)"),
        ({"preprocess": Resized, "dtype": "uint8"}, "can be compiled"),
    ],
)
def test_what_does_not_go_with_patches_is_refused(options, match, shards, tmp_path):
    with pytest.raises(OptionError, match=match):
        make(shards, tmp_path, **options)


def test_a_loader_without_patches_is_what_it_was(shards, tmp_path):
    with streamload.make_loader(shards, batch_size=4, num_workers=0, cache_dir=tmp_path) as loader:
        images, _ = next(iter(loader))
    assert images.shape == (4, 3, 224, 224)
