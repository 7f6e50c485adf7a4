"""The floor reads what tarfile reads, makes the default transform's pixels, and takes each sample once."""

import io
import math
import multiprocessing
import random
import tarfile
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.contenders.workload import WordTokenizer
from streamload.profile import floor
from streamload.testing.shards import ShardOptions, read_oracle, write_shards
from streamload.transforms.augment import Box, Draws, RandomBox
from streamload.transforms.normalise import normalise_into
from streamload.transforms.resize import goes_down_first, resize_box
from tests.support.photographs import SIZES, photograph

NAMES = ["a.jpg", "a.txt", "deep/" * 25 + "b.jpg", "d" * 90 + "/" + "e" * 80 + ".txt", "f" * 100, "ü/ß.jpg"]
FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def tar_of(members, format_=tarfile.GNU_FORMAT):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format_) as tar:
        for info, payload in members:
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))
    return buffer.getvalue()


def of_tarfile(data):
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [(member.name.encode(), member.offset_data, member.size) for member in tar if member.isreg()]


@pytest.mark.parametrize("format_", FORMATS)
def test_members_are_those_of_tarfile(format_):
    folder, link = tarfile.TarInfo("folder"), tarfile.TarInfo("link.jpg")
    folder.type, link.type, link.linkname = tarfile.DIRTYPE, tarfile.SYMTYPE, "a.jpg"
    files = [(tarfile.TarInfo(name), bytes(700 * number)) for number, name in enumerate(NAMES)]
    data = tar_of([(folder, b""), *files[:3], (link, b""), *files[3:]], format_)
    assert [name.decode() for name, _, _ in of_tarfile(data)] == NAMES
    assert list(floor.members(data, 0, len(data))) == of_tarfile(data)


def test_sizes_in_base_256_and_in_pax_records_are_read():
    info = tarfile.TarInfo("large.bin")
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\x80" + (700).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    said = tarfile.TarInfo("pax.bin")
    said.pax_headers = {"size": "600"}
    data = bytes(header) + bytes(1024) + said.tobuf(tarfile.PAX_FORMAT) + bytes(1024)
    data += tar_of([(tarfile.TarInfo("last.bin"), b"x")])
    assert [(name, size) for name, _, size in of_tarfile(data)] == [
        (b"large.bin", 700),
        (b"pax.bin", 600),
        (b"last.bin", 1),
    ]
    assert list(floor.members(data, 0, len(data))) == of_tarfile(data)


@pytest.mark.parametrize("format_", FORMATS)
def test_pairs_are_the_samples_that_have_an_image_and_a_caption(tmp_path, format_):
    options = ShardOptions(without_text_every=3, folder="some.d/" * 12, extra={"npy": b"123"}, format=format_)
    (path,) = write_shards(tmp_path, [10], seed=51, options=options)
    data = path.read_bytes()
    found = [(data[image : image + size], data[text : text + length])
             for image, size, text, length in floor.pairs(data)]  # fmt: skip
    samples = [members for _, members in read_oracle(path)]
    assert found == [(members["jpg"], members["txt"]) for members in samples if "txt" in members]
    assert len(found) < len(samples)


def test_neighbours_with_one_key_are_a_sample_split_at_the_first_dot_whatever_the_case():
    members = [("a.JPEG", b"1"), ("a.seg.txt", b"2"), ("a.txt", b"3"), ("b.jpg", b"4"), ("c.txt", b"5")]
    data = tar_of([(tarfile.TarInfo(name), payload) for name, payload in [*members, ("d.jpg", b"6")]])
    assert [(data[image], data[text]) for image, _, text, _ in floor.pairs(data)] == [(ord("1"), ord("3"))]


@pytest.mark.parametrize("size", SIZES)
def test_pixels_are_those_of_the_default_transform(size):
    """To the level; but for upright crops, whose columns Pillow 13 resizes first and the floor does not."""
    pixels = photograph(*size).copy()
    batch = floor.FloorBatch(4, "uint8", None)
    draw = random.Random(size[0]).random
    for place in range(4):
        top, left, height, width = floor.box(size[1], size[0], draw)
        batch.resize(place, pixels[None, top : top + height, left : left + width])
        (expected,) = resize_box(pixels, Box(top, left, height, width), 224, 224)
        difference = (batch.images[place].int() - expected.int()).abs().float()
        if goes_down_first(Box(top, left, height, width), (224, 224)):
            assert difference.mean() < 0.5
        else:
            assert difference.max() == 0


def test_float32_batches_are_the_uint8_ones_normalised():
    pixels = photograph(500, 375)
    levels, batch = floor.FloorBatch(3, "uint8", None), floor.FloorBatch(3, "float32", None)
    expected = torch.empty(3, 224, 224)
    for place in (1, 2):
        crop = pixels[None, 10 * place :, : -7 * place]
        levels.resize(place, crop)
        batch.resize(place, crop)
        normalise_into(levels.images[place], expected)
        torch.testing.assert_close(batch.images[place], expected, rtol=0, atol=1e-5)
    assert batch.images.is_contiguous()


@pytest.mark.parametrize("size", [(375, 500), (500, 400), (300, 451)])
def test_boxes_are_distributed_as_those_of_the_default_transform(size):
    draw, boxes, draws = random.Random(7).random, RandomBox(), Draws()
    draws.seed(7)
    ours = np.array([floor.box(*size, draw) for _ in range(4000)])
    theirs = np.array([boxes.draw(*size, draws) for _ in range(4000)])
    assert (ours[:, 0] + ours[:, 2] <= size[0]).all()
    assert (ours[:, 1] + ours[:, 3] <= size[1]).all()
    for of in (lambda box: box[:, 2] * box[:, 3] / math.prod(size), lambda box: box[:, 3] / box[:, 2]):
        assert of(ours).mean() == pytest.approx(of(theirs).mean(), rel=0.01)
        assert of(ours).std() == pytest.approx(of(theirs).std(), rel=0.06)
    assert ours[:, :2].mean(axis=0) == pytest.approx(theirs[:, :2].mean(axis=0), abs=1)


@pytest.mark.parametrize(("draw", "place"), [(0.0, 0), (0.999, 400 - 379)])
def test_boxes_reach_from_edge_to_edge(draw, place):
    draws = iter([0.0, 0.5, draw, draw])  # the least area, as wide as high
    assert floor.box(400, 400, lambda: next(draws)) == (place, place, 379, 379)


@pytest.mark.parametrize("size", [(100, 900), (900, 100)])
def test_an_image_for_which_no_box_fits_is_cut_in_the_middle(size):
    assert floor.box(*size, random.Random(1).random) == RandomBox().draw(*size, Draws())


def test_ids_are_those_of_the_tokenizer():
    captions = ["a cat", "A   dog and a Cat", "", "a", "dog"]
    batch = floor.FloorBatch(2, "uint8", WordTokenizer())
    jpeg = encoded(photograph(64, 48))
    for number, caption in enumerate(captions):  # into places that had other ids before
        batch.put(number % 2, jpeg, caption, random.Random(2).random)
        assert batch.ids[number % 2].tolist() == WordTokenizer()(caption)[0].tolist()


def test_each_sample_is_dealt_to_one_worker_in_shares_of_one_size(tmp_path):
    options = ShardOptions(without_text_every=4, extra={"json": b"{}"})
    paths = [str(path) for path in write_shards(tmp_path, [11, 3, 8], seed=52, options=options)]
    data = {path: Path(path).read_bytes() for path in paths}
    whole = [(path, pair) for path in paths for pair in floor.pairs(data[path])]

    def dealt(workers, samples=None):
        shares = floor._deal(paths, workers, samples)
        return [
            [(path, pair) for path, *part in share for pair in floor.pairs(data[path], *part)]
            for share in shares
        ]

    shares = dealt(3)
    assert list(chain(*shares)) == whole
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert list(chain(*dealt(2, samples=10))) == whole[:10]
    assert list(chain(*dealt(40))) == whole


@pytest.mark.parametrize("form", ["uint8", "float32", "decode"])
@pytest.mark.sampled(1)
def test_all_workers_go_through_all_samples_in_each_pass(tmp_path, form, no_leaks):
    paths = [str(path) for path in write_shards(tmp_path, [5, 4], seed=53)]
    multiprocessing.Barrier(1)  # the first in a process makes memory for all, which stays
    with no_leaks():
        passes = floor.run(paths, workers=2, form=form, batch_size=3, tokenizer=WordTokenizer(), passes=2)
    assert [once.images for once in passes] == [9, 9]
    assert all(once.ended > once.started and once.cpu_seconds > 0 for once in passes)
    assert passes[1].started >= passes[0].ended


def test_an_image_that_can_not_be_decoded_ends_the_floor(tmp_path, no_leaks):
    data = tar_of([(tarfile.TarInfo("a.jpg"), b"no image"), (tarfile.TarInfo("a.txt"), b"a")])
    (tmp_path / "bad.tar").write_bytes(data)
    (good,) = write_shards(tmp_path / "good", [3], seed=54)
    multiprocessing.Barrier(1)
    with no_leaks(), pytest.raises(RuntimeError, match="a worker of the floor failed: ValueError"):
        floor.run([str(tmp_path / "bad.tar"), str(good)], workers=2, form="uint8")


def encoded(pixels):
    import simplejpeg

    return simplejpeg.encode_jpeg(np.ascontiguousarray(pixels))
