"""Rows 25 and 28: images that take more to decode than they look; notes of preparation in a source."""

import io
import math
import resource
import struct
import tarfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamload.daemon.warm import warm
from streamload.derived.prepare.preparation import Preparation
from streamload.shards.tar import NOTE
from streamload.testing.shards import ShardOptions, read_oracle, write_shards
from tests.faults.data import digest_of
from tests.faults.oracle import Attempt
from tests.faults.processes import differences, import_torch
from tests.faults.rows import Row
from tests.support import flat
from tests.support.kills import Child

LIMIT_PIXELS = 20_000_000
_MEMORY_BYTES = 256 << 20
_CPU_SECONDS = 2
_SAMPLES = 8
_RECIPE = "raw-32"
_NOTES = ("1 8 8 txt", "1 8 8 jpg", "1 8 8 png", "9 9 9 ppm", "no note", "", "1 8 8 json")


def png(width: int, height: int, bits: int, colour: int) -> bytes:
    """A PNG of zeros: some KB, whatever its size."""

    def chunk(kind: bytes, payload: bytes) -> bytes:
        return (
            struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))
        )

    packer = zlib.compressobj(1)
    row = bytes(1 + (width * bits * {0: 1, 2: 3, 4: 2, 6: 4}[colour] + 7) // 8)
    rows = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def progressive_jpeg(width: int, height: int, scans: int, colours: int = 3) -> bytes:
    """A progressive JPEG of one colour with so many legal scans, up to 14 × 7 for each of its components.

    Each scan behind the first says in some bytes that none of its blocks has anything new.
    """

    def segment(marker: int, payload: bytes) -> bytes:
        return bytes((0xFF, marker)) + struct.pack(">H", len(payload) + 2) + payload

    def packed(bits: str) -> bytes:
        bits += "1" * (-len(bits) % 8)
        return int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")

    numbers = range(1, colours + 1)
    blocks = -(-width // 8) * -(-height // 8)
    frame = struct.pack(">BHHB", 8, height, width, colours) + b"".join(bytes((n, 0x11, 0)) for n in numbers)
    zero, end_of_bands = (b"\x01" + bytes(15) + bytes((symbol,)) for symbol in (0, 0xE0))
    head = segment(0xDB, b"\0" + b"\x01" * 64) + segment(0xC2, frame)
    head += segment(0xC4, b"\0" + zero) + segment(0xC4, b"\x10" + end_of_bands)
    first = segment(0xDA, bytes((colours, *(byte for n in numbers for byte in (n, 0)), 0, 0, 0)))
    parts = [b"\xff\xd8", head, first, packed("0" * blocks * colours)]
    nothing = packed(("0" + "1" * 14) * -(-blocks // 0x7FFF))  # each ends 32,767 blocks
    bands = ((1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (7, 63))
    legal = ((n, *band, bit) for band in bands for bit in range(13, -1, -1) for n in numbers)
    for number, begin, end, bit in list(legal)[: scans - 1]:
        precision = (bit + 1 if bit < 13 else 0) << 4 | bit
        parts.append(segment(0xDA, bytes((1, number, 0, begin, end, precision))) + nothing)
    return b"".join(parts) + b"\xff\xd9"


def webp(width: int, height: int) -> bytes:
    """A lossless WebP of one colour: its five codes have one symbol each, so that pixels take no bits."""
    fields = [(0x2F, 8), (width - 1, 14), (height - 1, 14), (0, 1 + 3 + 3), *[(0b0001, 4)] * 5]
    value = place = 0
    for number, bits in fields:
        value |= number << place
        place += bits
    body = value.to_bytes(place // 8 + 1, "little")
    body += bytes(len(body) % 2)
    return b"RIFF" + struct.pack("<I", len(body) + 12) + b"WEBPVP8L" + struct.pack("<I", len(body)) + body


def run_lengths_bmp(width: int, height: int) -> bytes:
    """A BMP whose lines end at once; each is filled up pixel by pixel."""
    lines = b"\x01\0\0\0" * height
    sizes = (54 + 1024 + len(lines), 0, 0, 54 + 1024, 40, width, height, 1, 8, 1, 0, 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHIIiiHHIIiiII", *sizes) + bytes(1024) + lines


def tiled_tiff(side: int, tile_side: int) -> bytes:
    """A grey TIFF in one tile, of which it may be only a part."""
    packer = zlib.compressobj(1)
    row = bytes(tile_side)
    tile = b"".join(packer.compress(row) for _ in range(tile_side)) + packer.flush()
    tags = (
        (256, side),
        (257, side),
        (258, 8),
        (259, 8),
        (262, 1),
        (277, 1),
        (322, tile_side),
        (323, tile_side),
    )
    offset = 8 + 2 + 12 * (len(tags) + 2) + 4
    fields = [
        struct.pack("<HHII", tag, 4, 1, value) for tag, value in (*tags, (324, offset), (325, len(tile)))
    ]
    return b"II*\0" + struct.pack("<IH", 8, len(fields)) + b"".join(fields) + bytes(4) + tile


def many_segments() -> bytes:
    """A small JPEG of four colours, which Pillow has to read, behind two million empty segments."""
    small = progressive_jpeg(16, 16, 5, 4)
    return small[:2] + b"\xff\xe5\0\x02" * (2 << 20) + small[2:]


_SIDE = math.isqrt(LIMIT_PIXELS)
_CMYK_SIDE = math.isqrt(LIMIT_PIXELS * 12 // 14)
_TIFF_SIDE = math.isqrt(LIMIT_PIXELS * 12 // 20) // 16 * 16
_WEBP_SIDE = math.isqrt(LIMIT_PIXELS * 12 // 19)
BOMBS: dict[str, Callable[[], bytes]] = {
    "a PNG of 1 bit and 89 megapixels": lambda: png(9459, 9459, 1, 0),
    "a PNG of 20 megapixels and a row": lambda: png(_SIDE, _SIDE + 2, 8, 2),
    "a JPEG of 290 scans": lambda: progressive_jpeg(_SIDE, _SIDE, 290),
    "a JPEG of four colours and 380 scans": lambda: progressive_jpeg(_SIDE // 2, _SIDE // 2, 380, 4),
    "a WebP of 268 megapixels": lambda: webp(16_384, 16_384),
    "a WebP of 20 megapixels": lambda: webp(_SIDE, _SIDE),
    "a TIFF in a tile of 268 megapixels": lambda: tiled_tiff(16, 16_384),
    "a BMP of run lengths": lambda: run_lengths_bmp(_SIDE, _SIDE),
    "a JPEG of two million segments": many_segments,
}
"""What takes too much, which its header says."""
LARGE: dict[str, Callable[[], bytes]] = {
    "a PNG of 1 bit": lambda: png(_SIDE, _SIDE, 1, 0),
    "a PNG of 16 bits and alpha": lambda: png(_SIDE, _SIDE, 16, 6),
    "a JPEG of 30 scans": lambda: progressive_jpeg(_SIDE, _SIDE, 30),
    "a JPEG of four colours": lambda: progressive_jpeg(_CMYK_SIDE, _CMYK_SIDE, 10, 4),
    "a WebP": lambda: webp(_WEBP_SIDE, _WEBP_SIDE),
    "a TIFF in a tile": lambda: tiled_tiff(_TIFF_SIDE, _TIFF_SIDE),
}
"""The most that is decoded."""


def heavy(attempt: Attempt) -> None:
    """Among good samples an image at the limit is used, one beyond it is left out and counted."""
    import_torch()
    (path,) = write_shards(attempt.place / "data", [_SAMPLES], seed=attempt.seed)
    expected = [key for key, _ in read_oracle(path)]
    place = attempt.rng.randrange(1, _SAMPLES)
    is_used = attempt.variant in LARGE
    _insert(path, place, (LARGE if is_used else BOMBS)[attempt.variant]())
    if is_used:
        expected.insert(place, "image")
    with Child(lambda stage: _decode(path, attempt.root)) as child:
        ended = child.join(60.0) is not None
        child.kill()
    attempt.happened[attempt.variant] += 1
    attempt.check("L", ended and child.status == 0, f"status {child.status}: {child.error[-300:]}")
    if child.result is not None:
        attempt.check_all(differences(sorted(expected), sorted(child.result["keys"])))
        skipped = {} if is_used else {"too_large": 1}
        attempt.check("E", child.result["skipped"] == skipped, f"counted: {child.result['skipped']}")


def _insert(path: Path, place: int, image: bytes) -> None:
    """Put a sample with the key "image" in front of another one."""
    samples = list(read_oracle(path))
    samples.insert(place, ("image", {"jpg": image, "txt": b"large"}))
    with tarfile.open(path, "w") as tar:
        for key, members in samples:
            for extension, payload in members.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(payload)
                tar.addfile(info, io.BytesIO(payload))


def _decode(path: Path, root: Path) -> dict[str, Any]:
    """Read all of a shard by the default transform, in a process that may take little."""
    import torch

    torch.set_num_threads(1)
    options = {"train": False, "num_workers": 0, "batch_size": 4, "with_keys": True, "cache_size": "1GB"}
    with flat.make_loader(str(path), cache_dir=root, **options) as loader:
        held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (held + _MEMORY_BYTES, held + _MEMORY_BYTES))
        seconds = math.ceil(time.process_time() + _CPU_SECONDS)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        keys = [key for _, _, names in loader for key in names["__key__"]]
        skipped = {cause: count for cause, count in loader.stats().samples_skipped.items() if count}
    return {"keys": keys, "skipped": skipped}


def planted(attempt: Attempt) -> None:
    """A source whose members say that they are prepared gives the same samples, prepared or not."""
    import_torch()
    options = ShardOptions(image_side=(24, 90))
    (path,) = write_shards(attempt.place / "data", [_SAMPLES], seed=attempt.seed, options=options)
    _plant(path, attempt)
    with Child(lambda stage: _both(path, attempt)) as child:
        attempt.check_all(differences(*child.finish(60)))


def _plant(path: Path, attempt: Attempt) -> None:
    """Write a shard again with notes at some of its members."""
    made = io.BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as new:
        for info in old:
            note = attempt.rng.choice(_NOTES)
            if info.name.rpartition(".")[2] == attempt.variant or attempt.rng.random() < 0.2:
                info.pax_headers = {NOTE: note}
                attempt.happened["notes"] += 1
            new.addfile(info, old.extractfile(info))
    path.write_bytes(made.getvalue())


def _both(path: Path, attempt: Attempt) -> tuple[list[Any], list[Any]]:
    """The samples of the shard as it is, and of its prepared form."""
    warm(str(path), cache_dir=attempt.place / "prepared", prepare=Preparation.parse(_RECIPE))
    found = []
    for root in (attempt.root, attempt.place / "prepared"):
        options = {"num_workers": 0, "batch_size": 1, "with_keys": True, "train": False, "prepare": _RECIPE}
        with flat.make_loader(str(path), cache_dir=root, preprocess=_digest, **options) as loader:
            found.append([[names["__key__"], images, texts] for images, texts, names in loader])
    return found[0], found[1]


def _digest(image: Any) -> str:
    return digest_of({"image": image.tobytes(), "size": repr(image.size).encode()})


ROWS = [
    Row(
        25,
        "image bombs",
        "images at the limit and beyond it: 1 bit, 16 bits, hundreds of scans, run lengths, segments",
        "NDEL",
        "An image takes at most 256 MiB and 2 s: what needs more is left out by its header, and counted",
        heavy,
        count=150,
        short=4,
        variants=(*BOMBS, *LARGE),
    ),
    Row(
        28,
        "planted notes",
        "notes of preparation at captions, images and others in a source, true to form or not",
        "NDB",
        "A shard has the same samples prepared and as it is, whatever its source says of itself",
        planted,
        count=60,
        variants=("txt", "jpg", "json"),
    ),
]
