"""`streamload.show`: a batch as a grid of pictures with captions and keys, as the model gets it."""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamload.errors import OptionError
from streamload.observe.pictures import Row, Statistics, cells, page, pictures
from streamload.urls import redact_text

if TYPE_CHECKING:
    from streamload.transforms.plan import ImagePlan

_IMAGES = ("image", "pixel_values", "images")
_TEXTS = ("text", "input_ids", "texts", "caption", "captions")
_LABELS = ("label", "labels")
_KEYS = ("__key__", "key", "keys")
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

    What a transform does wrong is seen at once: pixels are only restored from their normalisation.

    Args:
        batch: as a loader yields it: a tuple, a dict, or its images alone, uint8 or float[N, 3, H, W].
        loader: that yielded it, for the statistics of its transform and its tokenizer; or the transform.
        tokenizer: decodes captions from their ids, by its `decode`. None: the loader's;
            ids are shown where it has none.
        mean, std: of float images, three numbers each. None: those of the loader's transform, or CLIP's
            where no loader is given; a transform that isn't known by its parts has each image spread over
            its own range. The note says which it was.
        rows: of the batch at most.

    Returns:
        What a notebook draws; `save("batch.html")` writes it as a page.

    Raises:
        OptionError: it isn't a batch of images.
    """
    if rows < 1 or (mean is None) != (std is None) or not all(len(s) == 3 for s in (mean, std) if s):
        raise OptionError(
            f"show(mean={mean}, std={std}, rows={rows}); expected three numbers each for mean and std, or "
            f"neither, and one row at least"
        )
    values = _named(batch)
    images = next((values.pop(name) for name in _IMAGES if name in values), None)
    restored, said = _statistics(loader, mean, std)
    is_bytes = "uint8" in str(getattr(images, "dtype", getattr(_first(images), "dtype", "")))
    shown = pictures(_rows_of(images, rows), restored)
    if images is None or not shown or any(picture is None for picture in shown):
        raise OptionError(f"show() was given {_described(batch)}; {_EXPECTED}")
    named = [_row(values, number, _decoder(tokenizer, loader)) for number in range(len(shown))]
    height, width = shown[0].shape[:2]  # type: ignore[union-attr]
    said = "uint8 as they are" if is_bytes else said
    note = f"{len(shown)} of {len(images)} rows, {width} × {height} pixels, {said}"
    return ShownBatch(list(zip(named, shown, strict=True)), note)


def statistics_of(preprocess: Callable[..., Any] | None) -> Statistics | None:
    """The mean and std by which a loader's transform normalises; None: it isn't known by its parts.

    Args:
        preprocess: as given to make_loader.
    """
    from streamload.transforms.compile import compile_transform
    from streamload.transforms.plan import NotRecognised, clip_plan

    try:
        plan: ImagePlan = clip_plan(True) if preprocess is None else compile_transform(preprocess)
    except NotRecognised:
        return None
    return plan.statistics


def _statistics(
    loader: Any, mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[Statistics | None, str]:
    """The statistics that restore pixels, and what is said of them."""
    if mean is not None and std is not None:
        return (mean, std), "restored by the given mean and std"
    if loader is None:
        return statistics_of(None), "restored by CLIP's mean and std, as no loader or mean= was given"
    options = getattr(loader, "options", None)
    found = statistics_of(loader if options is None else options.preprocess)
    if found is None:
        return None, "each spread over its own range, as the transform isn't known by its parts"
    return found, "restored by the mean and std of the transform"


def _named(batch: Any) -> dict[str, Any]:
    """A batch's values by the names of a dict, whatever its form."""
    if isinstance(batch, Mapping):
        return dict(batch)
    first = _first(batch)
    if not isinstance(batch, tuple | list) or first is None or getattr(first, "ndim", 0) == 3:
        return {"image": batch} if getattr(first, "ndim", 0) == 3 else {}
    images, *others = batch
    values = {"image": images}
    for value in others:
        if isinstance(value, Mapping):
            values |= value
        elif isinstance(_first(value), str) or (getattr(value, "ndim", 0) == 2 and "int" in str(value.dtype)):
            values.setdefault("text", value)
        elif getattr(value, "ndim", 0) == 1:
            values.setdefault("label", value)
    return values


def _first(values: Any) -> Any:
    """The first of a sequence or tensor of some; None: it is neither, or empty."""
    if isinstance(values, str | Mapping) or not hasattr(values, "__getitem__"):
        return None
    return values[0] if getattr(values, "ndim", 1) and len(values) else None


def _rows_of(values: Any, rows: int) -> Any:
    return values[:rows] if _first(values) is not None else None


def _row(values: Mapping[str, Any], number: int, decode: Callable[[Any], str] | None) -> dict[str, Any]:
    """What is said of a row: its caption, key, label, and other numbers and words by their names."""
    row: dict[str, Any] = {}
    for name, value in values.items():
        if _first(value) is None or len(value) <= number:
            continue
        cell = value[number]
        if name in _TEXTS:
            row["caption"] = cell if isinstance(cell, str) else _caption(cell, decode)
        elif name in _KEYS:
            row["key"] = str(cell)
        elif isinstance(cell, str | int | float) or getattr(cell, "ndim", 1) == 0:
            plain = cell.item() if hasattr(cell, "item") else cell
            row["label" if name in _LABELS else name.strip("_")] = plain
    return row


def _caption(ids: Any, decode: Callable[[Any], str] | None) -> str:
    numbers = [int(n) for n in ids] if getattr(ids, "ndim", 1) == 1 else []
    if len(numbers) > 1 and numbers[-1] == numbers[-2]:  # padding
        padding = numbers[-1]
        while numbers and numbers[-1] == padding:
            numbers.pop()
    if decode is not None:
        return decode(numbers)
    return f"ids {' '.join(map(str, numbers[:_MOST_IDS]))}{' …' if len(numbers) > _MOST_IDS else ''}"


def _decoder(tokenizer: Any, loader: Any) -> Callable[[Any], str] | None:
    """The function that makes text of a caption's ids; None: there is none."""
    candidate = tokenizer or getattr(getattr(loader, "options", None), "tokenizer", None)
    for part in (candidate, getattr(candidate, "tokenizer", None)):
        decode = getattr(part, "decode", None)
        if callable(decode):
            plain = {"skip_special_tokens": True} if hasattr(part, "all_special_ids") else {}
            return lambda ids: str(decode(ids, **plain))
    if tokenizer is not None:
        raise OptionError(f"tokenizer={tokenizer!r:.100} has no decode(); expected one with that method")
    return None


def _described(batch: Any) -> str:
    """What a batch holds, for a message."""

    if hasattr(batch, "shape"):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if not isinstance(batch, Mapping | tuple | list):
        return f"a {type(batch).__name__}"
    named = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    parts = [
        f"{name}: {_described(value) if hasattr(value, 'shape') else type(value).__name__}"
        for name, value in itertools.islice(named, _MOST_PARTS)
    ]
    return redact_text(f"a {type(batch).__name__} with {', '.join(parts) or 'nothing'}")
