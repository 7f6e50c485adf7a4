"""`streamload.show`: a batch as a grid of pictures with captions and keys, as the model gets it."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from streamload.errors import OptionError
from streamload.observe.pictures import Row, Statistics, as_numbers, cells, page, pictures
from streamload.options.values import at_least

_IMAGES = ("image", "pixel_values", "images")
_TEXTS = ("text", "input_ids", "texts", "captions")
_NAMES = {"__key__": "key", "__url__": "shard", "labels": "label"}
_MOST_IDS, _MOST_PARTS = 24, 8
_EXPECTED = (
    "expected a batch as a loader yields it: (images, texts, …), a dict with image or pixel_values, or "
    "images alone, uint8 or float[N, 3, H, W] each"
)


class ShownBatch:
    """Pictures of a batch: a notebook draws them, `save` writes them as a page.

    Attributes:
        rows: of each row that is shown its caption, key and label by name, and its picture as uint8[H, W, 3].
        note: which rows these are, and by which statistics their pixels were restored.
    """

    def __init__(self, rows: Sequence[Row], note: str):
        self.rows, self.note = rows, note

    def __repr__(self) -> str:
        return f"<{self.note}; a notebook draws them, save('batch.html') writes a page>"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.note)}</p>{cells(self.rows)}"

    def save(self, path: str | Path) -> None:
        """Write a page with the pictures as PNG; it needs no network.

        Args:
            path: of the HTML file.

        Raises:
            OptionError: it has another ending than .html.
        """
        if Path(path).suffix != ".html":
            raise OptionError(f"save({str(path)!r}): a batch is saved as a page; expected a name with .html")
        Path(path).write_text(page("A batch", self.note, [("Rows", self.rows)]), encoding="utf-8")


def show(
    batch: Any,
    loader: Any = None,
    *,
    tokenizer: Any = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    rows: int = 16,
) -> ShownBatch:
    """Show the images of a batch with captions, labels and keys, as the model gets them.

    Nothing but the normalisation is undone, so a transform that crops, flips or recolours wrongly shows.

    Args:
        batch: as a loader yields it: a tuple, a dict, or its images alone, uint8 or float[N, 3, H, W].
            Patches are put together into their images.
        loader: that yielded it, for the statistics of its transform and its tokenizer; or the transform.
        tokenizer: decodes captions from their ids, by its `decode`. None: the loader's; ids are shown where
            it has none.
        mean, std: of float images, three numbers each. None: those of the loader's transform, or CLIP's
            where no loader is given. The note says which; where a transform isn't known by its parts, each
            image is spread over its own range.
        rows: of the batch at most.

    Returns:
        What a notebook draws; `save("batch.html")` writes it as a page.

    Raises:
        OptionError: it isn't a batch of images.
    """
    at_least(1, rows=rows)
    given: Any = [statistic for statistic in (mean, std) if statistic is not None]
    if given and list(map(np.shape, given)) != [(3,), (3,)]:
        raise OptionError(f"show(mean={mean}, std={std}); expected three numbers each, or neither")
    values = _named(batch)
    images: Any = next((values.pop(name) for name in _IMAGES if name in values), None)
    count = 0 if _first(images) is None else len(images)
    if isinstance(images, Mapping) and "patch_coord" in images:
        count, images = len(images["patches"]), _assembled(images, rows)
    first = _first(images)
    statistics, restored = _statistics(loader, mean, std)
    shown: list[Any] = [] if first is None else pictures(images[:rows], statistics)
    if not shown or any(picture is None for picture in shown):
        raise OptionError(f"show() was given {_described(batch)}; {_EXPECTED}")
    decode = _decoder(tokenizer, loader)
    named = [_row(values, number, decode) for number in range(len(shown))]
    for row, image in zip(named, images, strict=False):
        if hasattr(image, "ndim") and (broken := np.count_nonzero(~np.isfinite(as_numbers(image)))):
            row["NaN or infinite"] = f"{broken:,} values, drawn black or white"
    sizes = sorted({f"{picture.shape[1]} × {picture.shape[0]}" for picture in shown})
    size = f"{sizes[0]} pixels" if len(sizes) == 1 else f"{len(sizes)} sizes"
    restored = "bytes as they are" if "float" not in str(getattr(first, "dtype", "")) else restored
    note = f"{len(shown)} of {count} rows, {size}, {restored}"
    return ShownBatch(list(zip(named, shown, strict=True)), note)


def statistics_of(preprocess: Callable[..., Any] | None) -> Statistics | None:
    """The mean and std by which a loader's transform normalises; None: it isn't known by its parts.

    Args:
        preprocess: as given to make_loader.
    """
    from streamload.transforms.compile import compile_transform
    from streamload.transforms.plan import NotRecognised, clip_plan

    try:
        return (clip_plan(True) if preprocess is None else compile_transform(preprocess)).statistics
    except NotRecognised:
        return None


def _statistics(
    loader: Any, mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[Statistics | None, str]:
    """The statistics that restore pixels, and what is said of them."""
    if mean is not None and std is not None:
        return (mean, std), "restored by the given mean and std"
    if loader is None:
        return statistics_of(None), "restored by CLIP's mean and std, as no loader or mean= was given"
    statistics = statistics_of(loader.options.preprocess if hasattr(loader, "options") else loader)
    if statistics is None:
        return None, "each spread over its own range, as the transform isn't known by its parts"
    return statistics, "restored by the mean and std of the transform"


def _named(batch: Any) -> dict[str, Any]:
    """A batch's values by the names of a dict, whatever its form."""
    if isinstance(batch, Mapping):
        return dict(batch)
    first = _first(batch)
    if not isinstance(batch, tuple | list) or first is None or getattr(first, "ndim", 0) == 3:
        return {"image": batch} if getattr(first, "ndim", 0) == 3 else {}
    values = {"image": first}
    for value in batch[1:]:
        if isinstance(value, Mapping):
            values |= value
        elif isinstance(_first(value), str) or (getattr(value, "ndim", 0) == 2 and "int" in str(value.dtype)):
            values.setdefault("text", value)
        elif getattr(value, "ndim", 0) == 1:
            values.setdefault("label", value)
    return values


def _assembled(batch: Mapping[str, Any], rows: int) -> list[Any]:
    """The first images of a batch of patches (docs/guides/variable-resolution.md), float32[3, H, W] each."""
    images = []
    columns = (batch[name][:rows] for name in ("patches", "patch_coord", "patch_valid"))
    for patches, coord, valid in zip(*columns, strict=True):
        side, places = math.isqrt(patches.shape[-1] // 3), coord[valid]
        height, width = (places.amax(0) + 1).tolist()
        grid = patches.new_zeros(height, width, side, side, 3)
        grid[places[:, 0], places[:, 1]] = patches[valid].view(-1, side, side, 3)
        images.append(grid.permute(4, 0, 2, 1, 3).reshape(3, height * side, width * side))
    return images


def _first(values: Any) -> Any:
    """The first of a list, tuple or tensor; None: it is something else, or empty."""
    if not isinstance(values, list | tuple) and not getattr(values, "ndim", 0):
        return None
    return values[0] if len(values) else None


def _row(values: Mapping[str, Any], number: int, decode: Callable[[Any], str] | None) -> dict[str, Any]:
    """What is said of a row: its caption, and its other words and numbers by their names."""
    row: dict[str, Any] = {}
    for name, value in values.items():
        if _first(value) is None or len(value) <= number:
            continue
        cell = value[number]
        if name in _TEXTS:
            row["caption"] = _caption(cell, decode)
        elif isinstance(cell, str | int | float) or getattr(cell, "ndim", 1) == 0:
            row[_NAMES.get(name, name)] = cell.item() if hasattr(cell, "item") else cell
    return row


def _caption(ids: Any, decode: Callable[[Any], str] | None) -> str:
    """A caption, or several, as text; ids without the padding at their end."""
    if _first(ids) is None:
        return str(ids)
    if isinstance(ids[0], str) or getattr(ids, "ndim", 1) > 1:
        return " | ".join(_caption(one, decode) for one in ids)
    numbers = [int(n) for n in ids]
    if numbers[-1:] == numbers[-2:-1]:
        padding = numbers[-1:]
        while numbers and numbers[-1:] == padding:
            numbers.pop()
    if decode is not None:
        return decode(numbers)
    return f"ids {' '.join(map(str, numbers[:_MOST_IDS]))}{' …' if len(numbers) > _MOST_IDS else ''}"


def _decoder(tokenizer: Any, loader: Any) -> Callable[[Any], str] | None:
    """The function that makes text of a caption's ids; None: there is none."""
    tried = tokenizer or getattr(getattr(loader, "options", None), "tokenizer", None)
    inner = next((t for t in (tried, getattr(tried, "tokenizer", None)) if hasattr(t, "decode")), None)
    if inner is not None:
        plain = {"skip_special_tokens": True} if hasattr(inner, "all_special_ids") else {}
        return lambda ids: str(inner.decode(ids, **plain))
    if tokenizer is not None:
        raise OptionError(f"tokenizer={tokenizer!r:.100} has no decode(); expected one with that method")
    return None


def _described(batch: Any) -> str:
    """What a batch holds, for a message."""
    if hasattr(batch, "shape"):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if not isinstance(batch, Mapping | tuple | list):
        return f"a {type(batch).__name__}"
    if isinstance(_first(batch), str):
        return f"{len(batch)} strings"
    named = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    parts = [f"{name}: {_described(value)}" for name, value in itertools.islice(named, _MOST_PARTS)]
    return f"a {type(batch).__name__} with {', '.join(parts) or 'nothing'}"[:400]
