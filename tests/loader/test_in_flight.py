"""Limits of what workers make ahead, by modality: never exceeded, filled if there is room, no deadlock."""

from __future__ import annotations

import itertools
import logging
import os
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest

import streamload
from streamload import Images, Patches, Workers
from streamload.batching.in_flight import Admission, InFlight
from streamload.errors import OptionError
from streamload.ipc import ControlBlock
from streamload.testing.shards import ShardOptions, write_shards
from streamload.worker.loop import WorkerLoop
from tests.loader.test_buckets import tokenize
from tests.support import flat

ROWS = 8
TEXT_BYTES = ROWS * 40 * 8
PATCH_BYTES = 3 * 8 * 8 * 4 + 2 * 8 + 1


def image_bytes(seq_len: int, rows: int = ROWS) -> int:
    return rows * seq_len * PATCH_BYTES


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("in-flight") / "data"
    write_shards(directory, [50, 62, 48], options=ShardOptions(image_side=(8, 12)))
    return directory


def make(data: Path, cache: Path, **options: Any) -> streamload.Loader:
    defaults: dict[str, Any] = {"batch_size": ROWS, "num_workers": 3, "output": "dict", "cache_dir": cache}
    defaults |= {"patches": Patches(8, seq_lens=(4, 9, 16)), "seed": 2, "cache_size": "1GB"}
    return flat.make_loader(str(data), tokenize, **{**defaults, **options})


@pytest.mark.parametrize("number", range(40))
def test_steps_are_begun_as_soon_as_they_fit_and_in_any_case_one_by_one(number: int) -> None:
    """Workers whose steps come in any order of time: in flight is what fits, and all steps are taken."""
    rng = random.Random(number)
    workers, steps = rng.randint(1, 5), rng.randint(5, 40)
    sizes = [{"image": rng.randint(1, 50), "text": rng.randint(1, 9)} for _ in range(steps)]
    limits = {name: rng.randint(most, 4 * most) for name, most in (("image", 50), ("text", 9))}
    in_flight = InFlight(limits, {})
    admissions = [Admission(in_flight, sizes.__getitem__, lambda _: 0) for _ in range(workers)]
    next_of, made, begun, taken = list(range(workers)), set(), set(), 0
    while taken < steps:
        worker = rng.randrange(workers)
        step = next_of[worker]
        if step < steps and step not in begun:
            before = [sizes[each] for each in range(taken, step)]
            room = all(
                sum(each[name] for each in before) + sizes[step][name] <= limit
                for name, limit in limits.items()
            )
            assert admissions[worker].fits(taken, step) == room
            if room:
                begun.add(step)
                held = [sizes[each] for each in begun if each >= taken]
                assert all(sum(each[name] for each in held) <= limit for name, limit in limits.items())
            assert room or step != taken  # the next one that the training needs always fits
        elif step in begun:
            made.add(step)
            next_of[worker] += workers
        if taken in made and rng.random() < 0.5:
            taken += 1


class Watched:
    """Which steps are begun and received, in the order in which that happens over all processes."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path = path
        log = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        make_batch, take = WorkerLoop._make, ControlBlock.take

        def begun(loop: WorkerLoop, *args: Any) -> Any:
            os.write(log, b"+")
            return make_batch(loop, *args)

        def taken(control: ControlBlock, count: int) -> None:
            os.write(log, b"-" if count else b"|")  # before workers can know it
            take(control, count)

        monkeypatch.setattr(WorkerLoop, "_make", begun)
        monkeypatch.setattr(ControlBlock, "take", taken)

    def most_held(self, sizes: list[int]) -> int:
        """The most bytes of steps that were begun and not received, of one epoch."""
        events = self._path.read_text().rpartition("|")[2]
        counts = itertools.accumulate(((e == "+", e == "-") for e in events), _plus, initial=(0, 0))
        return max(sum(sizes[taken:begun]) for begun, taken in counts)

    def wait_for(self, begun: int) -> None:
        """Wait until so many steps of the epoch were begun."""
        while self._path.read_text().rpartition("|")[2].count("+") < begun:
            time.sleep(0.002)


def _plus(before: tuple[int, int], event: tuple[bool, bool]) -> tuple[int, int]:
    return before[0] + event[0], before[1] + event[1]


def bytes_of(batch: dict[str, Any]) -> tuple[int, int]:
    names = ("patches", "patch_coord", "patch_valid")
    return sum(batch["image"][name].nbytes for name in names), batch["text"].nbytes


@pytest.mark.parametrize(
    ("memory", "least"),
    [
        ({"image": 3 * image_bytes(16)}, 3),
        ({"text": 4 * TEXT_BYTES}, 4),
        ({"image": image_bytes(16) + image_bytes(9), "text": "1MB"}, 1),
        ({"image": image_bytes(16)}, 1),
    ],
)
def test_batches_in_flight_keep_to_the_limits_and_fill_them(
    memory: dict[str, Any], least: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle adds up the tensors of the batches that were begun and not received, at each event."""
    with make(data, tmp_path, num_workers=0) as loader:
        expected = [(batch["text"].tolist(), bytes_of(batch)) for batch in loader]
    images, texts = zip(*(found for _, found in expected), strict=True)
    assert set(images) == {image_bytes(seq_len) for seq_len in (4, 9, 16)}
    assert set(texts) == {TEXT_BYTES}
    limits = {name: streamload.options.values.parse_size(value) for name, value in memory.items()}
    watched, found = Watched(tmp_path / "log", monkeypatch), []
    with make(data, tmp_path, memory=memory, prefetch_factor=4) as loader:
        assert len(loader) == 20  # one batch is looked ahead at the end
        for number, batch in enumerate(loader):
            found.append((batch["text"].tolist(), bytes_of(batch)))
            fitting = number + 1
            while fitting < min(20, number + 1 + 12) and all(
                sum(sizes[number + 1 : fitting + 1]) <= limits[name]
                for name, sizes in (("image", images), ("text", texts))
                if name in limits
            ):
                fitting += 1
            watched.wait_for(fitting)
    assert found == expected
    bounded = [(images, limits.get("image")), (texts, limits.get("text"))]
    held = [(watched.most_held(list(sizes)), max(sizes), limit) for sizes, limit in bounded if limit]
    assert all(most <= limit for most, _, limit in held)
    assert any(most > limit - step for most, step, limit in held)
    assert watched.most_held([1] * 20) >= least


def test_an_epoch_that_is_left_early_does_not_hold_back_the_next(data: Path, tmp_path: Path) -> None:
    with make(data, tmp_path, memory={"image": image_bytes(16)}, num_batches=9) as loader:
        for _ in range(3):
            for number, _ in enumerate(loader):
                if number == 2:
                    break
        assert len(list(loader)) == 9


def test_larger_steps_of_a_run_keep_to_the_limits(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, limit = Watched(tmp_path / "log", monkeypatch), 2 * image_bytes(16)
    with make(data, tmp_path, memory={"image": limit}, num_batches=20) as loader:
        sizes = []
        for number, batch in enumerate(loader):
            sizes.append(bytes_of(batch)[0])
            if number == 4:
                loader.set_batch_size(2 * ROWS)
            if number == 14:
                with pytest.raises(OptionError, match=r"image of a batch of 17 rows .* at most 16$"):
                    loader.set_batch_size(2 * ROWS + 1)
    assert sizes[-1] in [image_bytes(seq_len, 2 * ROWS) for seq_len in (4, 9, 16)]
    assert watched.most_held(sizes) <= limit


def test_the_most_in_flight_is_logged_at_the_start(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "streamload")
    one_size = Patches(8, seq_lens=(9,))
    memory = {"image": 4 * image_bytes(9) + 5, "text": "64MB"}
    with make(data, tmp_path, memory=memory, patches=one_size, num_batches=1) as loader:
        list(loader)
    (line,) = [record.message for record in caplog.records if record.message.startswith("memory:")]
    shown = re.fullmatch(
        r"memory: batches in flight have at most image (.*) of .*, text (.*) of .* \((.*)\)", line
    )
    assert shown
    assert shown.groups() == (
        f"{4 * image_bytes(9) / 1e3:.1f} KB",
        f"{4 * TEXT_BYTES / 1e3:.1f} KB",
        "4 of 6",
    )


@pytest.mark.parametrize("output", ["dict", "hf"])
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_images_of_one_size_count_by_what_they_are(
    output: str, dtype: str, data: Path, tmp_path: Path
) -> None:
    """The limit is exactly one batch, and one byte less is too little."""
    options: dict[str, Any] = {"patches": None, "output": output, "dtype": dtype, "text_padding": "longest"}
    item_bytes = 4 if dtype == "float32" else 1
    needed = {"image": ROWS * 3 * 224 * 224 * item_bytes}
    needed["text"] = ROWS * 40 * (16 if output == "hf" else 9)  # with attention_mask, or text_valid
    with make(data, tmp_path, memory=needed, num_batches=2, **options) as loader:
        for batch in loader:
            image = batch["image" if output == "dict" else "pixel_values"]
            assert image.nbytes == needed["image"]
    for name in needed:
        less = {**needed, name: needed[name] - 1}
        with (
            make(data, tmp_path, memory=less, **options) as loader,
            pytest.raises(
                OptionError, match=f"the {name} of a batch of 8 rows .* give at least {needed[name]}, or"
            ),
        ):
            iter(loader)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({}, "memory={}; expected sizes of image and text"),
        ({"video": "1GB"}, "expected sizes of image and text"),
        ("4GB", "memory='4GB'; expected sizes"),
        ({"image": "4 hats"}, r"memory\['image'\]='4 hats' is not a size"),
        ({"text": 0}, r"memory\['text'\]=0 is not a size"),
    ],
)
def test_limits_that_can_not_be_are_refused(memory: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Workers(memory=memory)


def unknown_size(image: Any) -> Any:
    raise AssertionError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preprocess": unknown_size, "images": Images()}, "size is known before they are made"),
        ({"map_sample": dict, "tokenizer": None, "images": Images()}, "for batches with images"),
    ],
)
def test_batches_of_unknown_sizes_are_refused(
    options: dict[str, Any], message: str, data: Path, tmp_path: Path
) -> None:
    tokenizer = options.pop("tokenizer", tokenize)
    common: dict[str, Any] = {"batch_size": 8, "cache_dir": tmp_path, "memory": {"image": "1GB"}}
    with (
        flat.make_loader(str(data), tokenizer, **common, **options) as loader,
        pytest.raises(OptionError, match=message),
    ):
        iter(loader)
    text = {**common, "memory": {"text": "1MB"}}
    with flat.make_loader(str(data), **text) as loader, pytest.raises(OptionError, match="is for ids"):
        iter(loader)
