"""The floor: the minimum cost of reading tar shards on this machine, to compare loaders with.

One bare process per worker: it reads shards from the page cache with its own header parser, decodes, crops,
resizes and tokenizes with the libraries that streamload uses, and writes into one private batch, over and
over. No hand-over, order, verification or error handling. Where streamload has a resize kernel of its own
(transforms/_avx2.c), the floor uses it, too. docs/results/notebook.md has the
alternatives that were slower.
"""

from __future__ import annotations

import functools
import math
import mmap
import multiprocessing
import os
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Literal

import numpy as np
import simplejpeg
import torch

from streamload.torch_internals import upsample_bicubic
from streamload.transforms import kernel
from streamload.transforms.resize import packed

Form = Literal["uint8", "float32", "decode"]
"""uint8[N, 3, 224, 224], channels last; float32[N, 3, 224, 224], normalised; or decoded only."""
Tokenize = Callable[[list[str]], Any]
Piece = tuple[str, int, int]
"""A path, and a half-open byte range of it that starts at a header."""

SIZE = 224
LENGTH = 77
_SCALE = (0.9, 0.1)
_RATIO = (math.log(3 / 4), math.log(4 / 3) - math.log(3 / 4))
_TRIES = 10
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_PIXELS = 1 << 26  # of the largest image; untouched pages take no memory
_PATIENCE_SECONDS = 600.0
_header = struct.Struct("100s24x12s20xB188x155s").unpack_from
"""Name, size, kind and prefix."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of all workers through the shards; times are of the monotonic clock."""

    started: float
    ended: float
    images: int
    cpu_seconds: float


def run(
    paths: Sequence[str],
    *,
    workers: int,
    form: Form,
    batch_size: int = 64,
    tokenizer: Tokenize | None = None,
    samples: int | None = None,
    passes: int = 1,
    by_libraries: bool = False,
) -> list[Pass]:
    """Read all shards `passes` times; all workers start each pass at a barrier.

    Args:
        paths: uncompressed tars with JPEGs (`.jpg`, `.jpeg`) and captions (`.txt`).
        workers: processes; each gets an equal share of the samples.
        form: what is made of an image.
        batch_size: of each worker's batch.
        tokenizer: list of str → ids [N, 77], where a caption is a first id, its words' ids, a last id, and
            zeros; called once per word.
        samples: read only the first ones; None for all.
        passes: how often to read them.
        by_libraries: resize and normalise by torch's kernels, even where streamload has its own.

    Raises:
        RuntimeError: a worker failed, with its error.
    """
    shares = _deal(paths, workers, samples)
    batch = functools.partial(FloorBatch, batch_size, form, tokenizer, by_libraries)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(workers)
    pipes = [context.Pipe(duplex=False) for _ in shares]
    processes = [
        context.Process(target=_worker, args=(share, batch, batch_size, passes, barrier, writer))
        for share, (_, writer) in zip(shares, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    for _, writer in pipes:
        writer.close()
    try:
        answers = [_received(reader) for reader, _ in pipes]
    finally:
        barrier.abort()
        for process in processes:
            process.join()
            process.close()
        for reader, _ in pipes:
            reader.close()
    done = [passes for passes in answers if not isinstance(passes, str)]
    if len(done) < workers:
        error = max((error for error in answers if isinstance(error, str)), key=len)
        raise RuntimeError(f"a worker of the floor failed: {error or 'it was killed'}")
    return [_merged(parts) for parts in zip(*done, strict=True)]


def _received(reader: Connection) -> list[Pass] | str:
    """A worker's passes, or its error; "" if it sent neither."""
    try:
        return reader.recv()  # type: ignore[no-any-return]
    except EOFError:
        return ""


def _merged(parts: Sequence[Pass]) -> Pass:
    return Pass(
        started=min(part.started for part in parts),
        ended=max(part.ended for part in parts),
        images=sum(part.images for part in parts),
        cpu_seconds=sum(part.cpu_seconds for part in parts),
    )


def members(data: mmap.mmap | bytes, start: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
    """Name, start and size of each regular file with its header in [start, stop) of a tar; 1.5 µs each.

    Reads ustar with prefixes, GNU long names, pax paths and sizes, and sizes in base 256.
    """
    offset, long_name, pax_size = start, b"", -1
    while offset < stop:
        name, digits, kind, prefix = _header(data, offset)
        if digits[0] & 0x80:
            size = int.from_bytes(digits[1:], "big")
        else:
            try:
                size = int(digits.rstrip(b"\0"), 8)
            except ValueError:  # the block of zeros at the end
                return
        offset += 512
        if kind == 48 or kind == 0:  # "0" or NUL
            if long_name:
                name, long_name = long_name, b""
            else:
                name = name.rstrip(b"\0")
                if prefix[0]:
                    name = prefix.rstrip(b"\0") + b"/" + name
            if pax_size >= 0:
                size, pax_size = pax_size, -1
            yield name, offset, size
        elif kind == 76:  # "L"
            long_name = data[offset : offset + size].rstrip(b"\0")
        elif kind == 120:  # "x"
            records = data[offset : offset + size]
            while records:
                length, _, record = records.partition(b" ")
                record, records = records[len(length) + 1 : int(length) - 1], records[int(length) :]
                if record.startswith(b"path="):
                    long_name = record[5:]
                elif record.startswith(b"size="):
                    pax_size = int(record[5:])
        offset += (size + 511) & ~511


def pairs(
    data: mmap.mmap | bytes, start: int = 0, stop: int | None = None
) -> Iterator[tuple[int, int, int, int]]:
    """Image start and size, caption start and size, of each sample that has both."""
    last, image, image_size, text, text_size = b"", 0, 0, 0, 0
    for name, offset, size in members(data, start, len(data) if stop is None else stop):
        dot = name.find(b".", name.rfind(b"/") + 1)
        key, extension = name[:dot], name[dot + 1 :].lower()
        if key != last:
            last, image, text = key, 0, 0
        if extension == b"jpg" or extension == b"jpeg":
            image, image_size = offset, size
        elif extension == b"txt":
            text, text_size = offset, size
        else:
            continue
        if image and text:
            yield image, image_size, text, text_size
            image = text = 0


def box(height: int, width: int, draw: Callable[[], float]) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random crop, distributed like RandomResizedCrop's; 4 µs."""
    pixels = height * width
    for _ in range(_TRIES):
        area, ratio = pixels * (_SCALE[0] + _SCALE[1] * draw()), math.exp(_RATIO[0] + _RATIO[1] * draw())
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if box_width <= width and box_height <= height:
            return (
                int(draw() * (height - box_height + 1)),
                int(draw() * (width - box_width + 1)),
                box_height,
                box_width,
            )
    box_height, box_width = min(height, round(width * 4 / 3)), min(width, round(height * 4 / 3))
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


class FloorBatch:
    """A batch whose memory is reused.

    Attributes:
        images: uint8 or float32 [N, 3, 224, 224]; not written if images are only decoded.
        ids: int64[N, 77].
    """

    def __init__(self, size: int, form: Form, tokenizer: Tokenize | None, by_libraries: bool = False) -> None:
        levels = torch.empty((size if form == "uint8" else 1, SIZE, SIZE, 3), dtype=torch.uint8)
        self._places = [place[None] for place in levels.permute(0, 3, 1, 2)]
        self.images = levels.permute(0, 3, 1, 2)
        self._normalised: list[torch.Tensor] = []
        if form == "float32":
            self.images = torch.empty((size, 3, SIZE, SIZE))
            self._normalised = list(self.images)
            self._places *= size
        elif form == "decode":
            self._places *= size
        self._kernel = None if by_libraries else kernel.resize_into
        self._addresses = [place.data_ptr() for place in self._normalised or self._places]
        self._statistics = packed(_MEAN, _STD) if form == "float32" else None
        self.ids = np.zeros((size, LENGTH), np.int64)
        self._resizes, self._tokenizer = form != "decode", tokenizer
        self._pixels = np.empty(3 * _PIXELS, np.uint8)
        self._offset = torch.tensor(_MEAN).mul(255).view(3, 1, 1)
        self._factor = torch.tensor(_STD).mul(255).reciprocal().view(3, 1, 1)
        self._words: dict[str, list[int]] = {}
        self._first, self._last = [], 0
        if tokenizer is not None:
            empty = tokenizer([""])[0].tolist()
            self._first, self._last = [empty[0]], empty[1]

    def put(self, place: int, jpeg: Any, caption: str, draw: Callable[[], float]) -> None:
        """Decode, transform and tokenize a sample into row `place`."""
        pixels = simplejpeg.decode_jpeg(jpeg, "RGB", buffer=self._pixels)
        if not self._resizes:
            return
        top, left, height, width = box(pixels.shape[0], pixels.shape[1], draw)
        self.resize(place, pixels[None, top : top + height, left : left + width])
        if self._tokenizer is not None:
            self._tokenize(place, caption)

    def resize(self, place: int, crop: Any) -> None:
        """Resize uint8[1, H, W, 3] into its row; normalise it there while it is in the CPU's cache."""
        if self._kernel is not None:
            (_, height, width, _), row_bytes = crop.shape, crop.strides[1]
            pixels: int = crop.__array_interface__["data"][0]
            arguments = pixels, row_bytes, height, width, False, False, SIZE, SIZE
            self._kernel(*arguments, self._addresses[place], 0, 0, SIZE, SIZE, self._statistics)
            return
        image = torch.from_numpy(crop).permute(0, 3, 1, 2)
        upsample_bicubic(image, (SIZE, SIZE), False, None, None, out=self._places[place])
        if self._normalised:
            levels = self._places[place][0]
            self._normalised[place].copy_(levels).sub_(self._offset).mul_(self._factor)

    def _tokenize(self, place: int, caption: str) -> None:
        ids = self._first.copy()
        words = self._words
        for word in caption.lower().split():
            cached = words.get(word)
            ids += self._learn(word) if cached is None else cached
        ids.append(self._last)
        if len(ids) > LENGTH:
            ids[LENGTH - 1 :] = [self._last]
        row = self.ids[place]
        row[: len(ids)] = ids
        row[len(ids) :] = 0

    def _learn(self, word: str) -> list[int]:
        assert self._tokenizer is not None
        row = self._tokenizer([word])[0].tolist()
        ids: list[int] = row[1 : row.index(self._last)]
        self._words[word] = ids
        return ids


def _deal(paths: Sequence[str], workers: int, samples: int | None) -> list[list[Piece]]:
    """Divide the samples into equal shares of contiguous runs, before the clock starts."""
    runs: list[tuple[str, int, int]] = []
    for path in paths:
        with _mapped(path) as data:
            stops = [max(image + size, text + length) for image, size, text, length in pairs(data)]
        start = 0
        for stop in (-(-end // 512) * 512 for end in stops):
            runs.append((path, start, stop))
            start = stop
    runs = runs[:samples]
    shares = []
    for worker in range(workers):
        pieces: list[Piece] = []
        for path, start, stop in runs[len(runs) * worker // workers : len(runs) * (worker + 1) // workers]:
            if pieces and pieces[-1][0] == path:
                pieces[-1] = (path, pieces[-1][1], stop)
            else:
                pieces.append((path, start, stop))
        shares.append(pieces)
    return shares


def _worker(
    share: list[Piece],
    begin: Callable[[], FloorBatch],
    batch_size: int,
    passes: int,
    barrier: Barrier,
    results: Connection,
) -> None:
    torch.set_num_threads(1)
    batch, draw, done = begin(), random.Random(os.getpid()).random, []
    try:
        for _ in range(passes):
            barrier.wait(_PATIENCE_SECONDS)
            start_seconds, cpu_before = time.monotonic(), time.process_time()
            images = _go_through(share, batch, batch_size, draw)
            done.append(Pass(start_seconds, time.monotonic(), images, time.process_time() - cpu_before))
        results.send(done)
    except threading.BrokenBarrierError:
        pass  # another worker failed, and sent its error
    except Exception as exc:
        results.send(repr(exc))
        barrier.abort()
    finally:
        results.close()


def _go_through(share: list[Piece], batch: FloorBatch, batch_size: int, draw: Callable[[], float]) -> int:
    count = 0
    for path, start, stop in share:
        with _mapped(path) as data, memoryview(data) as view:
            for image, size, text, length in pairs(data, start, stop):
                with view[image : image + size] as jpeg:
                    batch.put(count % batch_size, jpeg, str(data[text : text + length], "utf-8"), draw)
                count += 1
    return count


def _mapped(path: str) -> mmap.mmap:
    with Path(path).open("rb") as shard:
        return mmap.mmap(shard.fileno(), 0, prot=mmap.PROT_READ)
