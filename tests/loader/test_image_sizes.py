"""`Images(sizes=…)` in a loader: cells of one size, each sample once, on any layout, resumed anywhere."""

from __future__ import annotations

import functools
import io
import itertools
import math
import random
import tarfile
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

import streamload
from streamload import Batches, Images, Order, Patches, Source, Workers
from streamload.aspects.rank import SizedImages
from streamload.errors import OptionError, StateMismatch
from streamload.testing.shards import ShardOptions, write_shards
from streamload.transforms import kernel

STEP, COUNTS = 16, [90, 51, 123, 72, 60]
SIZES = [(16, 16), (20, 12), (12, 20), (24, 10), (10, 24)]
SHAPES = ShardOptions(image_side=(8, 40))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sizes") / "data"
    write_shards(directory, COUNTS, options=SHAPES)
    return directory


@functools.cache
def pictures(folder: Path) -> dict[str, Image.Image]:
    """The images of all shards, by the key of their sample."""
    found = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith(".jpg"):
                    image = Image.open(io.BytesIO(tar.extractfile(member).read()))
                    found[member.name.removesuffix(".jpg")] = image.convert("RGB")
    return found


def best_of(image: Image.Image) -> tuple[int, int]:
    ratio = image.width / image.height
    return min(SIZES, key=lambda size: abs(math.log(ratio * size[1] / size[0])))


class Cell(NamedTuple):
    """A cell of a step: width and height of its images, and the keys of its rows."""

    size: tuple[int, int]
    keys: tuple[str, ...]


Steps = list[list[Cell]]


def loaders(data: Any, cache: Path, ranks: int = 1, **options: Any) -> list[streamload.Loader]:
    step = options.pop("step", STEP)
    batches = {"microbatch": 4, "with_keys": True, **options.pop("batches", {})}
    images = {"sizes": SIZES, **options.pop("images", {})}
    shared = {"num_workers": 0, "seed": 5, "cache_dir": cache, "cache_size": "1GB", "output": "dict"}
    order = {"groups": options.pop("groups", 1), **options.pop("order", {})}
    return [
        streamload.make_loader(
            data if isinstance(data, list) else str(data),
            batch_size=step // ranks,
            order=Order(rank=rank, world_size=ranks, **order),
            images=Images(**images),
            batches=Batches(**batches),
            **{**shared, **options},
        )
        for rank in range(ranks)
    ]


def cells_of(batch: dict[str, Any]) -> list[Cell]:
    image, keys = batch["image"], iter(batch["__key__"])
    tensors = [image] if isinstance(image, torch.Tensor) else image
    cells = [
        Cell((each.shape[3], each.shape[2]), tuple(itertools.islice(keys, len(each)))) for each in tensors
    ]
    assert not list(keys)
    rows = [[cell.size[1], cell.size[0]] for cell in cells for _ in cell.keys]
    assert batch["target_size"].tolist() == rows
    return cells


def run(data: Any, cache: Path, ranks: int = 1, state: Any = None, most: int | None = None, **options: Any):
    """The steps of an epoch, in lockstep, and the states after them."""
    made = loaders(data, cache, ranks, **options)
    try:
        for loader in made:
            if state is not None:
                loader.load_state_dict(state)
        steps = [
            sorted(itertools.chain(*map(cells_of, batches)))
            for batches in itertools.islice(zip(*made, strict=True), most)
        ]
        return steps, [loader.state_dict() for loader in made]
    finally:
        for loader in made:
            loader.close()


def keys_in(steps: Steps) -> list[str]:
    return [key for step in steps for cell in step for key in cell.keys]


def test_blocks_have_each_sample_once_in_whole_cells_by_the_shares_of_their_best_sizes(
    data: Path, tmp_path: Path
) -> None:
    (loader,) = loaders(data, tmp_path)
    with loader:
        steps = [cells_of(batch) for batch in loader]
        counted, numbers = loader.stats(), loader._run.parts.metrics()
    keys = keys_in(steps)
    assert len(set(keys)) == len(keys) == len(steps) * STEP
    assert len(steps) == sum(COUNTS) // STEP
    plain = streamload.make_loader(
        str(data), batch_size=STEP, num_workers=0, seed=5, cache_dir=tmp_path, output="dict",
        order=Order(rank=0, world_size=1, groups=1), batches=Batches(with_keys=True),
    )  # fmt: skip
    with plain:
        in_order = [sorted(batch["__key__"]) for batch in plain]
    off = 0
    for begin, end in [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 24)]:  # in steps: blocks grow at first
        block = [cell for step in steps[begin:end] for cell in step]
        assert sorted(keys_in([block])) == sorted(itertools.chain(*in_order[begin:end]))
        best = Counter(best_of(pictures(data)[key]) for cell in block for key in cell.keys)
        quotas = {size: Fraction(best[size], 4) for size in SIZES}
        expected = Counter({size: math.floor(quota) for size, quota in quotas.items()})
        by_remainder = sorted(SIZES, key=lambda size: math.floor(quotas[size]) - quotas[size])  # stable
        expected.update(by_remainder[: len(block) - sum(expected.values())])
        assert Counter(cell.size for cell in block) == +expected
        off += sum(max(0, best[size] - 4 * expected[size]) for size in SIZES)
    assert (
        sum(cell.size != best_of(pictures(data)[key]) for step in steps for cell in step for key in cell.keys)
        == off
    )
    assert (counted.samples_off_size, counted.samples_of_unknown_size) == (off, 0)
    assert numbers == {"sizes.samples_off_size": off, "sizes.samples_of_unknown_size": 0}


def test_rows_have_the_pixels_of_their_samples_at_the_corner_that_the_batch_says(
    data: Path, tmp_path: Path
) -> None:
    (loader,) = loaders(data, tmp_path, images={"dtype": "uint8"}, num_workers=1)
    with loader:
        for batch in itertools.islice(loader, 4):
            rows = [row for cell in batch["image"] for row in cell.numpy()]
            facts = (batch[name].tolist() for name in ("original_size", "crop_top_left", "target_size"))
            for key, row, original, (top, left), (down, across) in zip(
                batch["__key__"], rows, *facts, strict=True
            ):
                image = pictures(data)[key]
                assert original == [image.height, image.width]
                factor = min(image.width / across, image.height / down)
                sides = round(image.width / factor), round(image.height / factor)
                resized = np.asarray(image.resize(sides, Image.Resampling.BICUBIC)).astype(int)
                expected = resized[top : top + down, left : left + across].transpose(2, 0, 1)
                assert np.abs(row - expected).max() <= (2 if kernel.why_not() else 1)  # JPEG decoders differ


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (4, 0), (1, 2)])
@pytest.mark.parametrize("groups", [1, 2])
def test_steps_do_not_depend_on_ranks_and_workers(
    data: Path, tmp_path: Path, ranks: int, workers: int, groups: int
) -> None:
    options = {"groups": groups, "order": {"num_batches": 12}}
    expected, _ = run(data, tmp_path, **options)
    assert run(data, tmp_path, ranks, num_workers=workers, **options)[0] == expected


def test_a_cell_without_microbatches_is_a_ranks_batch_and_one_tensor(data: Path, tmp_path: Path) -> None:
    whole = {"batches": {"microbatch": None}}
    for ranks, options in [(2, {**whole, "step": 8}), (1, {"step": 4}), (1, {"step": 4, **whole})]:
        made = loaders(data, tmp_path, ranks, **options)
        sizes = set()
        for batches in itertools.islice(zip(*made, strict=True), 12):
            assert all(isinstance(batch["image"], torch.Tensor) for batch in batches)
            sizes.update(batch["image"].shape for batch in batches)
        assert len(sizes) > 2
        for loader in made:
            loader.close()


def test_by_the_step_all_images_of_a_step_have_one_size(data: Path, tmp_path: Path) -> None:
    by_step = {"images": {"sizes_by": "step"}, "step": 8}
    steps, _ = run(data, tmp_path, **by_step)
    assert all(len({cell.size for cell in step}) == 1 for step in steps)
    assert len({step[0].size for step in steps}) == len(SIZES)
    for ranks in (2, 4):
        others, _ = run(data, tmp_path, ranks, **by_step, batches={"microbatch": 3})
        assert [sorted(keys_in([step])) for step in others] == [sorted(keys_in([step])) for step in steps]


@pytest.mark.parametrize("output", ["dict", "tuple"])
def test_microbatches_are_the_cells_with_their_rows_of_all_else(
    data: Path, tmp_path: Path, output: str
) -> None:
    (loader,) = loaders(data, tmp_path, output=output, batches={"microbatch": 2})
    with loader:
        for batch in itertools.islice(loader, 3):
            named = batch if output == "dict" else dict(zip(("image", "text", "extra"), batch, strict=True))
            parts = list(loader.microbatches(batch))
            assert len(parts) == len(named["image"]) == 8
            for number, part in enumerate(parts):
                image, text = (part[0], part[1]) if output == "tuple" else (part["image"], part["text"])
                assert image is named["image"][number]
                assert text == named["text"][2 * number : 2 * number + 2]
                assert part.rows == slice(2 * number, 2 * number + 2)
                if output == "dict":
                    assert part["target_size"].tolist() == [[*image.shape[2:]]] * 2


def test_a_resume_at_each_step_goes_on_with_the_same_cells(data: Path, tmp_path: Path) -> None:
    whole, _ = run(data, tmp_path, most=12)
    for stop in (1, 3, 6, 8):
        begun, state = run(data, tmp_path, 2, most=stop)
        rest, _ = run(data, tmp_path, 4, state, 12 - stop, num_workers=1 if stop == 3 else 0)
        assert begun + rest == whole, stop


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_random_runs_resume_exactly_from_any_step_on_other_layouts(tmp_path: Path) -> None:
    """Mixing, groups, sizes of steps and cells, ranks and workers at random, 24 runs; two resumes each."""
    numbers = random.Random(3)
    for name, counts in (("a", [40, 61]), ("b", [9]), ("c", [70])):
        options = ShardOptions(image_side=(8, 40), folder=name)
        write_shards(tmp_path / name, counts, seed=ord(name), options=options)
    for attempt in range(24):
        names = numbers.sample("abc", numbers.choice([1, 1, 2, 3]))
        sources = [Source(str(tmp_path / name), name=name, weight=numbers.randint(1, 3)) for name in names]
        by_step = numbers.random() < 0.3
        groups, step = 1 if by_step else numbers.choice([1, 1, 2]), numbers.choice([8, 16, 24])
        rows = numbers.choice([1, 2, 4]) if step == 24 else numbers.choice([1, 2, step // 8])
        options = {
            "groups": groups,
            "step": step,
            "seed": attempt,
            "order": {"num_batches": numbers.randint(9, 30)},
            "batches": {"microbatch": rows},
            "images": {
                "dtype": numbers.choice(["uint8", "float32"]),
                "sizes_by": "step" if by_step else "cell",
            },
        }
        layouts = [ranks for ranks in (1, 2, 4) if step % (ranks * max(rows, groups)) == 0]

        def merged(steps: Steps, by_step: bool = by_step) -> list[Any]:
            """Ranks' batches are one tensor each by the step."""
            return [(step[0].size, sorted(keys_in([step]))) for step in steps] if by_step else steps

        whole, _ = run(sources, tmp_path / "cache", numbers.choice(layouts), **options)
        assert len(whole) == options["order"]["num_batches"]
        for _ in range(2):
            stop = numbers.randint(1, len(whole) - 1)
            layout = {"num_workers": numbers.choice([0, 0, 0, 2]), **options}
            begun, state = run(sources, tmp_path / "cache", numbers.choice(layouts), most=stop, **options)
            rest, _ = run(sources, tmp_path / "cache", numbers.choice(layouts), state, **layout)
            assert merged(begun + rest) == merged(whole), (attempt, stop, options)


def test_within_a_block_sizes_and_rows_of_a_cell_stay(data: Path, tmp_path: Path) -> None:
    _, state = run(data, tmp_path, most=6)
    for other in (
        {"images": {"sizes": SIZES[:3]}},
        {"images": {"sizes": None}},
        {"images": {"sizes_by": "step"}},
        {"batches": {"microbatch": 2}},
        {"batches": {"microbatch": None}},
    ):
        with pytest.raises(StateMismatch, match="within a block of bucketing=, cost= or sizes="):
            run(data, tmp_path, state=state, **other)
    whole = {"batches": {"microbatch": None}}
    _, state = run(data, tmp_path, most=6, **whole)
    with pytest.raises(StateMismatch, match="cells of as many rows"):
        run(data, tmp_path, 2, state, **whole)
    begun, state = run(data, tmp_path, most=8)  # between two blocks
    rest, _ = run(data, tmp_path, 2, state, **whole)
    keys = keys_in(begun + rest)
    assert len(set(keys)) == len(keys) == sum(COUNTS) // STEP * STEP


def damage(shards: Path, folder: Path) -> set[str]:
    """Copy shards; each ninth image is cut short, each seventh a BMP, whose size no index has: their keys."""
    folder.mkdir()
    bitmaps = set()
    for path in sorted(shards.glob("*.tar")):
        with tarfile.open(path) as tar, tarfile.open(folder / path.name, "w") as copy:
            images = 0
            for member in tar:
                payload = tar.extractfile(member).read()
                if member.name.endswith(".jpg"):
                    images += 1
                    if images % 9 == 0:
                        payload = payload[: len(payload) // 3]
                    elif images % 7 == 0:
                        bitmap = io.BytesIO()
                        Image.open(io.BytesIO(payload)).save(bitmap, "BMP")
                        payload = bitmap.getvalue()
                        bitmaps.add(member.name.removesuffix(".jpg"))
                member.size = len(payload)
                copy.addfile(member, io.BytesIO(payload))
    return bitmaps


def test_bad_images_are_replaced_in_the_size_of_their_cell_and_unknown_sizes_counted(
    data: Path, tmp_path: Path
) -> None:
    unknown = damage(data, tmp_path / "damaged")
    (loader,) = loaders(
        tmp_path / "damaged", tmp_path / "cache", shards=streamload.Shards(max_bad_samples=None)
    )
    with loader:
        steps = [cells_of(batch) for batch in loader]
        counted = loader.stats()
    assert all(len(cell.keys) == 4 for step in steps for cell in step)
    assert counted.samples_replaced["decode"] > 20
    keys = [(cell.size, key) for step in steps for cell in step for key in cell.keys]
    assert counted.samples_of_unknown_size == sum(key in unknown for _, key in keys) > 20
    off = sum(size != best_of(pictures(data)[key]) for size, key in keys if key not in unknown)
    assert counted.samples_off_size == off


def as_rows(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"]}


def first_letters(images: Any) -> Any:
    return images


@pytest.mark.parametrize(
    ("says", "options"),
    [
        ("train", {"train": False}),
        ("combined with bucketing=", {"batches": {"bucketing": 64}}),
        ("combined with cost=", {"batches": {"cost": "width"}}),
        ("combined with patches=", {"images": {"patches": Patches(4, (9,))}}),
        ("combined with sources='step'", {"batches": {"sources": "step"}}),
        ("combined with map_sample=", {"workers": Workers(map_sample=as_rows)}),
        ("combined with features=", {"batches": {"features": {"same": torch.nn.Identity().eval()}}}),
        ("combined with output='hf'", {"output": "hf"}),
        ("combined with decode='device'", {"images": {"decode": "device"}}),
        ("combined with prepare='raw-64'", {"images": {"prepare": "raw-64"}}),
        ("combined with compile=False", {"images": {"compile": False}}),
        ("give torchvision's Resize", {"preprocess": first_letters}),
        ("microbatch=3 doesn't divide the 16 rows", {"batches": {"microbatch": 3}}),
        ("3 groups", {"groups": 3}),
        ("cells of 16 rows, and ranks get \\[8\\]", {"groups": 2, "batches": {"microbatch": None}}),
        ("needs one plan for all ranks", {"groups": 2, "images": {"sizes_by": "step"}}),
        ("sizes_by='row'", {"images": {"sizes_by": "row"}}),
    ],
)
def test_what_it_cannot_do_is_refused(data: Path, tmp_path: Path, says: str, options: Any) -> None:
    with pytest.raises(OptionError, match=says):
        run(data, tmp_path, **options)


def test_another_batch_size_has_whole_cells_and_waits_for_the_next_block(data: Path, tmp_path: Path) -> None:
    (loader,) = loaders(data, tmp_path)
    steps = []
    with loader:
        for number, batch in enumerate(loader):
            steps.append(cells_of(batch))
            if number == 4:
                with pytest.raises(OptionError, match="doesn't divide the 10 rows"):
                    loader.set_batch_size(10)
                loader.set_batch_size(12)
    assert {len(step) for step in steps} == {4, 3}
    assert all(len(cell.keys) == 4 for step in steps for cell in step)
    assert len(set(keys_in(steps))) == len(keys_in(steps)) > sum(COUNTS) - STEP


@pytest.mark.parametrize(
    ("microbatch", "by_step", "batch", "steps"),
    [
        (8, False, 512, 16),
        (8, False, 1 << 14, 1),
        (None, False, 64, 128),
        (None, False, 8, 256),
        (8, True, 512, 128),
        (None, True, 8, 256),
        (1, False, 1 << 17, 1),
    ],
)
def test_a_block_has_a_thousand_cells_if_it_is_not_too_long(
    microbatch: int | None, by_step: bool, batch: int, steps: int
) -> None:
    assert SizedImages(tuple(SIZES), microbatch, 8, by_step).block_steps(batch) == steps


def test_limits_of_memory_count_the_largest_size(data: Path, tmp_path: Path) -> None:
    needed = STEP * 16 * 16 * 3 * 4
    (loader,) = loaders(data, tmp_path, workers=Workers(memory={"image": needed}), num_workers=1)
    with loader:
        assert cells_of(next(iter(loader)))
    with pytest.raises(OptionError, match=f"give at least {needed}"):
        run(data, tmp_path, workers=Workers(memory={"image": needed - 1}), num_workers=1)


def test_prepared_images_are_cut_as_others(data: Path, tmp_path: Path) -> None:
    expected, _ = run(data, tmp_path / "a", most=6)
    for _ in range(2):  # as they arrive, and prepared
        steps, _ = run(data, tmp_path / "b", most=6, images={"prepare": "raw"})
        assert steps == expected
