"""Crop, resize and normalise in one go: Pillow's levels, torch's floats, and nothing beside it touched."""

import io
import itertools
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import streamload
from streamload.cli.doctor import _resizing
from streamload.ipc import own_empty
from streamload.loader import worker_config
from streamload.shards.samples import Sample
from streamload.testing.shards import write_shards
from streamload.transforms import kernel, resize
from streamload.transforms.augment import Box
from streamload.transforms.plan import OPENAI, UNIT
from streamload.transforms.resize import Place, packed, resize_box, resizing
from tests.support.photographs import clip_examples

FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
needs_it = pytest.mark.skipif(bool(kernel.why_not()), reason=kernel.why_not())


def by_pillow(pixels, size, by, is_columns_first):
    """uint8[H, W, 3] resized by Pillow, one pass after the other, as uint8[1, 3, *size]."""
    height, width, _ = pixels.shape
    between = (width, size[0]) if is_columns_first else (size[1], height)
    image = Image.fromarray(pixels).resize(between, FILTERS[by])
    resized = np.array(image.resize((size[1], size[0]), FILTERS[by]))
    return torch.from_numpy(resized).permute(2, 0, 1)[None]


def whole(pixels):
    return Box(0, 0, *pixels.shape[:2])


def by_us(pixels, size, by, is_columns_first, part=None):
    out = resize.empty(*(size if part is None else part[2:]))
    resize.kernel_resizing(pixels, whole(pixels), size, by, is_columns_first, None, part)(out=Place.of(out))
    return out


def as_torchvision(levels, mean, std):
    """What ToTensor and Normalize give, by their own arithmetic."""
    mean, std = (torch.tensor(of, dtype=torch.float32).view(-1, 1, 1) for of in (mean, std))
    return levels.contiguous().to(torch.float32).div(255).sub_(mean).div_(std)


def noise(height, width, seed=0):
    """Black and white as often as what is between: the sums reach beyond both ends."""
    rng = np.random.default_rng(seed)
    levels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return np.where(rng.random(levels.shape) < 0.5, levels // 128 * 255, levels).astype(np.uint8)


side = st.one_of(st.integers(1, 40), st.integers(1, 700), st.sampled_from([8, 16, 224, 448]))


@needs_it
@settings(max_examples=200, deadline=None)
@given(
    height=side,
    width=side,
    size=st.tuples(side, side),
    by=st.sampled_from(list(FILTERS)),
    is_columns_first=st.booleans(),
    corners=st.tuples(*[st.floats(0, 1)] * 4),
    seed=st.integers(0, 9),
)
def test_every_bit_is_that_of_pillow_and_torchvision(
    height, width, size, by, is_columns_first, corners, seed
):
    pixels, box = noise(height + 3, width + 5, seed), Box(1, 2, height, width)
    image = pixels[1 : 1 + height, 2 : 2 + width]
    expected = by_pillow(image, size, by, is_columns_first)
    assert torch.equal(by_us(image, size, by, is_columns_first), expected)

    floats = torch.empty(3, *size)
    resize.kernel_resizing(pixels, box, size, by, is_columns_first, packed(*OPENAI))(out=Place.of(floats))
    assert torch.equal(floats, as_torchvision(expected[0], *OPENAI))

    (top, down), (left, across) = (
        (int(begin * (length - 1)), 1 + int(share * (length - 1 - int(begin * (length - 1)))))
        for begin, share, length in zip(corners[:2], corners[2:], size, strict=True)
    )
    part = by_us(image, size, by, is_columns_first, Box(top, left, down, across))
    assert torch.equal(part, expected[:, :, top : top + down, left : left + across])


@needs_it
@pytest.mark.parametrize("by", FILTERS)
@pytest.mark.parametrize("is_columns_first", [False, True])
def test_weights_are_pillows_for_every_length_of_the_usual_ones(by, is_columns_first):
    """A weight that is rounded otherwise shows in a line of white behind black."""
    line = np.repeat(np.arange(700) % 7 < 3, 3).astype(np.uint8).reshape(1, 700, 3) * 255
    column = np.repeat(line.reshape(700, 1, 3), 9, axis=1)
    for length in range(1, 700):
        for pixels, box, size in (
            (line, Box(0, 0, 1, length), (1, 224)),
            (column, Box(0, 0, length, 9), (224, 9)),
        ):
            image = pixels[: box.height, : box.width]
            expected = by_pillow(image, size, by, is_columns_first)
            assert torch.equal(by_us(image, size, by, is_columns_first), expected)


@needs_it
@pytest.mark.parametrize("size", [(1, 1), (3, 1000), (1000, 3), (4000, 2), (2, 65536), (65536, 1)])
def test_images_that_are_very_long_are_resized_alike(size):
    image = noise(*size)
    for by, is_columns_first in itertools.product(FILTERS, (False, True)):
        assert resize.fits_kernel(image, whole(image))
        assert torch.equal(
            by_us(image, (224, 224), by, is_columns_first),
            by_pillow(image, (224, 224), by, is_columns_first),
        )


@needs_it
def test_the_middle_of_what_would_be_far_too_long_is_had_without_the_rest():
    image = noise(3, 60_000)
    size = (224, 64 * 60_000)
    middle = by_us(image, size, "bicubic", False, Box(0, size[1] // 2 - 112, 224, 224))
    source = image[:, 29_960:30_040]  # 80 pixels, of the middle ones of which it is made
    around = by_pillow(source, (224, 64 * 80), "bicubic", False)
    begin = around.shape[3] // 2 - 112
    assert torch.equal(middle, around[:, :, :, begin : begin + 224])


def every_level(statistics):
    """An image of all 256 levels, by the kernel: as they are, or normalised."""
    levels = np.arange(256, dtype=np.uint8).repeat(3).reshape(8, 32, 3)
    out = resize.empty(8, 32) if statistics is None else torch.empty(3, 8, 32)
    resize.kernel_resizing(levels, whole(levels), (8, 32), "bicubic", False, statistics)(out=Place.of(out))
    return out


STATISTICS = [
    OPENAI,
    UNIT,
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ((0.1, -3.0, 1e-9), (1 / 3, 1e-38, 7e30)),
    ((123.0, 0.7, 0.2), (0.333333, 57.0, 2.0**-140)),
]


@needs_it
@pytest.mark.parametrize("statistics", STATISTICS)
def test_floats_are_those_of_true_divisions_whatever_they_are_normalised_by(statistics):
    """A product with 1 / std is quicker, and not always the same: then it isn't used."""
    assert torch.equal(every_level(packed(*statistics)), as_torchvision(every_level(None)[0], *statistics))


@needs_it
def test_floats_are_those_of_true_divisions_for_thousands_of_statistics():
    rng, (levels,) = np.random.default_rng(3), every_level(None)
    for _ in range(2000):
        statistics = tuple(map(tuple, rng.uniform(0.0, 1.0, (2, 3)) ** rng.integers(1, 4)))
        floats = every_level(packed.__wrapped__(*statistics))
        assert torch.equal(floats, as_torchvision(levels, *statistics)), statistics


@needs_it
def test_a_place_in_any_layout_gets_the_image():
    image = noise(300, 400)
    expected = by_us(image, (224, 224), "bicubic", False)
    planes = torch.empty(1, 3, 224, 224, dtype=torch.uint8)
    part = torch.zeros(1, 3, 230, 230, dtype=torch.uint8)
    for place in (planes, part[:, :, 3:-3, 3:-3]):
        resize.kernel_resizing(image, whole(image), (224, 224), "bicubic", False, None)(out=Place.of(place))
        assert torch.equal(place, expected)
    assert part.count_nonzero() == expected.count_nonzero()

    statistics = packed(*OPENAI)
    floats = torch.zeros(3, 230, 230)
    put = resize.kernel_resizing(image, whole(image), (224, 224), "bicubic", False, statistics)
    put(out=Place.of(floats[:, 3:-3, 3:-3]))
    assert torch.equal(floats[:, 3:-3, 3:-3], as_torchvision(expected[0], *OPENAI))
    assert not floats[:, :3].any()
    assert not floats[:, :, -3:].any()


@needs_it
def test_an_image_goes_on_living_until_it_is_resized():
    box = Box(0, 0, 2000, 2000)
    put = resize.kernel_resizing(noise(2000, 2000), box, (64, 64), "bicubic", False, None)
    out = resize.empty(64, 64)
    put(out=Place.of(out))
    assert torch.equal(out, by_us(noise(2000, 2000), (64, 64), "bicubic", False))


@needs_it
def test_threads_dont_disturb_each_other():
    images = [noise(200 + 40 * n, 420 - 30 * n, n) for n in range(6)]
    expected = [by_us(image, (224, 224), "bicubic", bool(n % 2)) for n, image in enumerate(images)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            found = pool.map(lambda n: by_us(images[n], (224, 224), "bicubic", bool(n % 2)), range(6))
            assert all(map(torch.equal, found, expected))


GUARDED = """
import ctypes, mmap, sys
import numpy as np
from streamload.transforms import kernel
from streamload.transforms.resize import packed
from streamload.transforms.plan import OPENAI

libc = ctypes.CDLL(None, use_errno=True)

def at_the_end(size):
    "Memory that ends where the next page can't be touched, and begins behind one."
    page = mmap.PAGESIZE
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 2) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (start, start + (pages + 1) * page):
        assert not libc.mprotect(ctypes.c_void_p(guard), page, 0), ctypes.get_errno()
    return memory, start + (pages + 1) * page - size, start + page

kept, tried = [], 0
for width in [*range(1, 45), 223, 300]:
    for height in (1, 2, 7, 8, 9, 16, 17, 40):
        for new in ((1, 1), (5, 3), (8, 10), (9, 11), (24, 7), (17, 43), (3, 224)):
            for columns_first in (False, True):
                for statistics in (None, packed(*OPENAI)):
                    bytes_ = new[0] * new[1] * 3 * (4 if statistics else 1)
                    for which in (1, 2):
                        memory, *source = at_the_end(height * width * 3)
                        other, *out = at_the_end(bytes_)
                        kernel.resize_into(source[which - 1], width * 3, height, width, False, columns_first,
                                           *new, out[which - 1], 0, 0, *new, statistics)
                        tried += 1
                        if tried % 500 == 0:
                            kept.clear()
                        kept.append((memory, other))
print(tried)
"""


@pytest.mark.deep
@needs_it
def test_nothing_beside_an_image_and_its_place_is_touched():
    done = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{46 * 8 * 7 * 2 * 2 * 2}\n"), done.stderr[-2000:]


@needs_it
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((0, 3, 0, 1, False, False, 1, 1, 0, 0, 0, 1, 1, None), ValueError, "a side of 0 pixels"),
        ((0, 3, 1, 65537, False, False, 1, 1, 0, 0, 0, 1, 1, None), ValueError, "a side of 65537 pixels"),
        ((0, 3, 1, 1, False, False, 1, 1, 0, 0, 0, 1, 0, None), ValueError, "a side of 0 pixels"),
        ((0, 3, 1, 1, False, False, 5, 9, 0, 3, 0, 3, 9, None), ValueError, "3 pixels from 3 on aren't"),
        ((0, 3, 1, 1, False, False, 5, 9, 0, 0, 9, 5, 1, None), ValueError, "1 pixels from 9 on aren't"),
        ((0, 3, 1, 1, False, False, 2**31, 9, 0, 0, 0, 5, 1, None), ValueError, "a part of 2147483648"),
        ((0, 3, 1, 1, False, False, 1, 1, 0, 0, 0, 1, 1, b"short"), ValueError, "six float32"),
        ((0, 3, 1, 1, False, False, 1, 1, 0, 0, 0, 1, 1, 7), TypeError, "bytes"),
        ((0, 3, -1, 1, False, False, 1, 1, 0, 0, 0, 1, 1, None), OverflowError, "negative"),
        ((0, 3), TypeError, "expected 14 arguments, got 2"),
    ],
)
def test_what_makes_no_sense_is_an_error(arguments, error, words):
    with pytest.raises(error, match=words):
        kernel.resize_into(*arguments)


@needs_it
def test_images_whose_channels_arent_neighbours_or_that_are_too_long_are_left_to_others():
    planes, long = np.zeros((3, 40, 50), np.uint8), np.zeros((65537, 1, 3), np.uint8)
    box = Box(0, 0, 20, 20)
    assert resize.fits_kernel(np.zeros((40, 50, 3), np.uint8), box)
    assert not resize.fits_kernel(planes.transpose(1, 2, 0), box)
    assert not resize.fits_kernel(np.zeros((40, 50, 3), np.uint8)[::2, ::2], box)
    assert not resize.fits_kernel(long, whole(long))
    assert resize.fits_kernel(long, Box(1, 0, 65536, 1))


@pytest.fixture
def without_vectors(monkeypatch):
    """A processor for which neither the kernel nor torch has vector code."""
    monkeypatch.setattr(kernel, "resize_into", None)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    resize.torch_has_vectors.cache_clear()
    yield
    resize.torch_has_vectors.cache_clear()


@pytest.mark.parametrize("by", FILTERS)
@pytest.mark.parametrize("box", [Box(0, 0, 480, 640), Box(10, 20, 400, 150), Box(3, 5, 100, 600)])
def test_where_torch_has_no_vector_code_either_pillow_resizes(by, box, without_vectors):
    pixels, part = noise(480, 640), Box(20, 30, 160, 170)
    image = Image.fromarray(pixels).crop((box.left, box.top, box.left + box.width, box.top + box.height))
    expected = torch.from_numpy(np.array(image.resize((200, 190), FILTERS[by]))).permute(2, 0, 1)[None]
    assert torch.equal(resize_box(pixels, box, 190, 200, by), expected)
    cut = resize.empty(160, 170)
    resizing(pixels, box, (190, 200), by, part)(out=Place.of(cut))
    assert torch.equal(cut, expected[:, :, 20:180, 30:200])


@pytest.mark.parametrize("capability", ["default", "avx2"])
@pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86's instructions")
def test_doctor_says_what_resizes_by_what_torch_says_of_the_processor(capability):
    if capability == "avx2" and kernel.why_not():
        pytest.skip(kernel.why_not())
    script = (
        "from streamload.cli.doctor import _resizing; from streamload.transforms import kernel; "
        "kernel._avx2 = None; print(_resizing().value)"
    )
    environ = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    path = "torch's kernel" if capability == "avx2" else "Pillow (torch has no vector code here)"
    assert done.stdout.startswith(f"by {path}, as streamload was installed without a C compiler")


@pytest.mark.parametrize("by", FILTERS)
def test_without_it_torchs_kernel_gives_nearly_the_same(by, monkeypatch):
    pixels = noise(480, 640)
    boxes = [Box(0, 0, 480, 640), Box(10, 20, 400, 150), Box(3, 5, 100, 600), Box(0, 0, 224, 500)]
    part = Box(20, 30, 224, 224)

    def resized():
        cut = resize.empty(224, 224)
        resizing(pixels, whole(pixels), (300, 400), by, part)(out=Place.of(cut))
        return torch.cat([*(resize_box(pixels, box, 224, 224, by) for box in boxes), cut])

    ours = resized()
    monkeypatch.setattr(kernel, "resize_into", None)
    apart = (ours.int() - resized().int()).abs()
    assert apart.max() <= 2
    assert (apart > 1).sum() <= 1e-5 * apart.numel()


def test_batches_are_nearly_the_same_without_it(monkeypatch):
    files = []
    for number, shape in enumerate([(375, 500), (500, 300), (224, 224), (40, 60), (3, 900)]):
        file = io.BytesIO()
        Image.fromarray(noise(*shape, number)).save(file, "JPEG")
        files.append(memoryview(bytearray(file.getvalue())))

    def batches():
        for as_bytes in (True, False):
            batch = clip_examples(as_bytes).batch_factory()(len(files), own_empty)
            for seed, file in enumerate(files):
                batch.add(batch.parse(Sample(str(seed), "", {"jpg": file, "txt": memoryview(b"a")}), seed))
            yield batch.finish()["image"]

    ours = list(batches())
    assert [batch.dtype for batch in ours] == [torch.uint8, torch.float32]
    monkeypatch.setattr(kernel, "resize_into", None)
    (levels, floats), (near, near_floats) = ours, batches()
    apart = (levels.int() - near.int()).abs()
    assert apart.max() <= 2
    assert (apart > 1).sum() <= 1e-5 * apart.numel()
    torch.testing.assert_close(near_floats, as_torchvision(near, *OPENAI), rtol=0, atol=0)
    torch.testing.assert_close(floats, as_torchvision(levels, *OPENAI), rtol=0, atol=0)


def test_it_is_built_where_there_is_a_compiler_and_says_why_not_elsewhere(monkeypatch):
    monkeypatch.setattr(kernel, "_avx2", None)
    assert kernel.why_not() == "streamload was installed without a C compiler for this processor"


@pytest.mark.parametrize("module", ["_avx2", "_before"])
def test_an_installation_without_a_compiler_is_said_by_the_first_loader_and_by_doctor(
    module, monkeypatch, caplog, tmp_path
):
    assert kernel.lost() == ""
    monkeypatch.setattr(kernel.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(kernel, module, None)
    monkeypatch.setattr(kernel, {"_avx2": "resize_into", "_before": "jpeg_size"}[module], None)
    monkeypatch.setattr(
        worker_config, "_warn_of_missing_kernel", worker_config._warn_of_missing_kernel.__wrapped__
    )
    (path,) = write_shards(tmp_path / "data", [4], seed=1)
    with streamload.make_loader(
        str(path), batch_size=2, num_workers=0, cache_dir=tmp_path / "cache", cache_size="1GB"
    ) as loader:
        next(iter(loader))
    assert [r.levelname for r in caplog.records if "apt-get install gcc" in r.message] == ["WARNING"]
    assert "apt-get install gcc" in _resizing().advice
    monkeypatch.setattr(kernel.platform, "machine", lambda: "riscv64")  # a compiler would be of no use
    assert _resizing().advice == ""
