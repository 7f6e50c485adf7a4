"""JPEGs damaged at random: bits and bytes of scans, markers, segments, and ends."""

import functools

import numpy as np

from tests.pixels.plans import jpeg
from tests.support.photographs import photograph

END = b"\xff\xd9"
_SCAN = b"\xff\xda"
_WRITTEN = (
    {}, {"subsampling": 0}, {"subsampling": 1}, {"progressive": True}, {"optimize": True}, {"quality": 4},
    {"restart_marker_blocks": 2}, {"restart_marker_rows": 1},
    {"progressive": True, "restart_marker_blocks": 1}, {"comment": _SCAN + END * 9},
    {"icc_profile": bytes(300)},
)  # fmt: skip
_SIZES = ((90, 60), (257, 130), (8, 8), (17, 90))


@functools.cache
def sound():
    """Files of many kinds of encoders."""
    photographs = [photograph(*size, which) for which, size in enumerate(_SIZES)]
    files = [jpeg(pixels, **options) for pixels in photographs for options in _WRITTEN]
    return [*files, *(jpeg(np.ascontiguousarray(pixels[..., 0])) for pixels in photographs)]


def damaged(rng, most=3):
    """A file with up to so many damages."""
    data = bytearray(rng.choice(sound()))
    for _ in range(rng.randint(1, most)):
        _DAMAGES[rng.randrange(len(_DAMAGES))](rng, data, _in_scan(rng, data))
    if rng.random() < 0.2:
        data += rng.choice((END, END + bytes(5), b"\0" + END, b"\xff" + END))
    return bytes(data)


def _in_scan(rng, data):
    start = data.find(_SCAN) + 14
    return rng.randrange(start, len(data)) if len(data) > start else rng.randrange(len(data) + 1)


def _flip_bits(rng, data, place):
    for _ in range(rng.choice((1, 1, 2, 30))):
        if data:
            data[_in_scan(rng, data) % len(data)] ^= 1 << rng.randrange(8)


def _overwrite(rng, data, place):
    count = rng.choice((1, 5, 60, 600))
    piece = rng.choice((bytes(count), b"\xff" * count, rng.randbytes(count)))
    data[place : place + count] = piece[: len(data) - place]


def _remove(rng, data, place):
    del data[place : place + rng.choice((1, 5, 60, 600))]


def _insert(rng, data, place):
    source = rng.choice((rng.randbytes(600), bytes(data), rng.choice(sound())))
    start = rng.randrange(len(source) + 1)
    data[place:place] = source[start : start + rng.choice((1, 5, 60, 600))]


def _cut(rng, data, place):
    del data[place:]


def _cut_and_end(rng, data, place):
    data[place:] = END


def _put_marker(rng, data, place):
    marker = rng.choice((rng.randrange(256), 0xD0 + rng.randrange(8)))
    data[place : place + rng.randrange(3)] = bytes((0xFF, marker))


def _go_on_with_another(rng, data, place):
    other = rng.choice(sound())
    data[place:] = other[rng.randrange(len(other)) :]


def _change_header(rng, data, place):
    end = max(1, data.find(_SCAN) + 14)
    place = rng.randrange(end)
    data[place : place + 1] = bytes((rng.choice((0, 1, 2, 8, 0x11, 0x22, 0xFF, rng.randrange(256))),))


def _repeat_or_remove_segment(rng, data, place):
    starts = [start for start in range(2, max(2, data.find(_SCAN)) + 1) if data[start : start + 1] == b"\xff"]
    if starts:
        start = rng.choice(starts)
        stop = start + 2 + int.from_bytes(data[start + 2 : start + 4], "big")
        segment = data[start:stop]
        data[start:stop] = segment * rng.choice((0, 2))


_DAMAGES = (
    _flip_bits, _flip_bits, _overwrite, _remove, _insert, _cut, _cut_and_end, _cut_and_end, _put_marker,
    _go_on_with_another, _change_header, _repeat_or_remove_segment,
)  # fmt: skip
