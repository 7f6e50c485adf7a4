"""Which files a worker decodes itself, and which decoder a device has."""

import io
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from streamload.errors import DecodeError, OptionError
from streamload.pixels import engine
from streamload.pixels.decoders import HostDecoder, decoder_for
from streamload.pixels.segments import refusal
from streamload.transforms.decode import decode_jpeg_or_image
from tests.pixels.plans import jpeg
from tests.support.photographs import photograph

PIXELS = photograph(90, 60)


def saved(image, form, **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    return jpeg(PIXELS, exif=exif)


IMAGE = Image.fromarray(PIXELS)
TAKEN = {
    "4:2:0": jpeg(PIXELS, subsampling=2),
    "4:2:2": jpeg(PIXELS, subsampling=1),
    "4:4:4": jpeg(PIXELS, subsampling=0),
    "progressive": jpeg(PIXELS, progressive=True),
    "gray": saved(IMAGE.convert("L"), "JPEG"),
    "with an orientation": turned(),
    "with restart marks": jpeg(PIXELS, restart_marker_blocks=2),
    "with bytes behind its end": jpeg(PIXELS) + bytes(50),
    "with a comment": jpeg(PIXELS, comment=b"\xff\xd9" * 20),
}


def patched(old, new):
    file = jpeg(PIXELS)
    assert old in file
    return file.replace(old, new, 1)


REFUSED = {
    "CMYK": (saved(IMAGE.convert("CMYK"), "JPEG"), "4 components"),
    "PNG": (saved(IMAGE, "PNG"), "not a JPEG"),
    "WebP": (saved(IMAGE, "WEBP"), "not a JPEG"),
    "RGB": (jpeg(PIXELS, keep_rgb=True), "other colours"),
    "12 bits": (patched(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c"), "12 bits"),
    "arithmetic": (patched(b"\xff\xc0", b"\xff\xc9"), "marker 0xC9"),
    "lossless": (patched(b"\xff\xc0", b"\xff\xc3"), "marker 0xC3"),
    "4:1:1": (patched(b"\x01\x22\x00\x02\x11", b"\x01\x41\x00\x02\x11"), "sampling 411111"),
    "cut": (jpeg(PIXELS)[:-2], "end mark"),
    "half": (jpeg(PIXELS)[:1200], "end mark"),
    "cut with a comment that has an end mark": (jpeg(PIXELS, comment=b"\xff\xd9" * 20)[:-2], "end mark"),
    "cut in its header": (jpeg(PIXELS)[:300], "segment that is cut"),
    "a scan first": (b"\xff\xd8\xff\xda\x00\x04ab\xff\xd9", "damaged scan"),
    "a short frame": (b"\xff\xd8\xff\xc0\x00\x04ab\xff\xd9", "damaged frame"),
    "nothing": (b"", "not a JPEG"),
    "too large": (patched(b"\x00\x3c\x00\x5a", b"\xff\xdc\xff\xdc"), "an image of"),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_usual_jpegs_are_for_the_engine(kind):
    assert refusal(memoryview(TAKEN[kind])) is None


@pytest.mark.parametrize("kind", REFUSED)
def test_what_an_engine_cannot_decode_is_for_the_worker(kind):
    file, reason = REFUSED[kind]
    assert reason in refusal(memoryview(file))


def test_no_beginning_of_a_file_is_for_the_engine():
    file = jpeg(PIXELS)
    assert all(refusal(file[:length]) for length in range(len(file)))


def test_the_host_decodes_as_workers_do_and_returns_errors():
    files = [*TAKEN.values(), b"no image", jpeg(PIXELS)[:700]]
    *decoded, no_image, cut = HostDecoder().decode(files)
    for pixels, file in zip(decoded, files, strict=False):
        assert np.array_equal(pixels.numpy(), decode_jpeg_or_image(file))
    assert isinstance(no_image, DecodeError)
    assert isinstance(cut, DecodeError)


def test_the_cpu_has_the_hosts_decoder():
    assert isinstance(decoder_for(torch.device("cpu")), HostDecoder)


def test_a_device_without_an_engine_is_refused():
    with pytest.raises(OptionError, match=r"the device is mps.*decode='host'"):
        decoder_for(torch.device("mps"))


def test_a_missing_library_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia", None)
    engine._library.cache_clear()
    with pytest.raises(OptionError, match=r"pip install 'streamload\[gpu\]'"):
        decoder_for(torch.device("cuda", 0))
