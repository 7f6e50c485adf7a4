"""A row of a table → a sample: images, caption, label, conversation. Nothing is decoded or encoded anew."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from streamload.errors import OptionError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
NO_CAPTION = "without a caption"
NOT_THERE = "whose image is not there"
_OTHER_FORMAT = f"whose image is not one of {', '.join(IMAGE_SUFFIXES)}"
CONVERSATIONS = ("conversations", "messages")
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")
_FORMATS = {"jpg": rb"\xff\xd8\xff", "png": rb"\x89PNG\r\n\x1a\n", "webp": rb"RIFF....WEBP"}


@dataclass(frozen=True)
class PackColumns:
    """The columns of a table, and the folder of its images' paths.

    Attributes:
        label: None: "label", if there is neither caption nor conversation.
        key: None: the image's path, or the row's number.
        kept: stored as JSON; ("*",): all.
        folder: None: that of the table.
    """

    image: str = "image"
    caption: str = "caption"
    label: str | None = None
    key: str | None = None
    kept: tuple[str, ...] = ()
    folder: Path | None = None


class FileSpan(NamedTuple):
    """Bytes of a file."""

    path: str
    start: int
    size: int

    def read_bytes(self) -> bytes:
        """Read them."""
        with Path(self.path).open("rb") as file:
            return os.pread(file.fileno(), self.size, self.start)


Member = bytes | Path | FileSpan


class PackSample(NamedTuple):
    """A sample to pack: its members by extension."""

    key: str
    members: Mapping[str, Member]


def without_dots(key: str) -> str:
    """A key whose last part has no dot, at which it would end."""
    folder, slash, name = key.rpartition("/")
    return f"{folder}{slash}{name.replace('.', '_')}"


def unlike(key: str, uses: Counter[str]) -> str:
    """A key, or key~2, …: unlike all before, whose uses are counted."""
    uses[key] += 1
    return key if uses[key] == 1 else unlike(f"{key}~{uses[key]}", uses)


def sample_of(row: Mapping[str, Any], columns: PackColumns, key: str, name: str) -> PackSample | str:
    """The sample of a row, or why it is left out.

    Args:
        row: cells by column; an image is a path, bytes, `{"bytes": …, "path": …}`, or a list of these.
        columns: to read.
        key: where no column has it.
        name: of the row, for errors.

    Raises:
        OptionError: a column is missing, a value has another type, or an image is a URL.
    """

    def text(column: str) -> str:
        return text_of(row[column], f"{name}: the column {column!r}").strip()

    is_conversation = any(isinstance(row.get(column), list) for column in CONVERSATIONS)
    image = "images" if is_conversation and columns.image not in row else columns.image
    kept = tuple(row) if is_conversation or columns.kept == ("*",) else columns.kept
    has_caption = not is_conversation and (columns.caption in row or not (columns.label or "label" in row))
    label = columns.label or (None if is_conversation or has_caption else "label")
    needed = (not is_conversation and image, has_caption and columns.caption, label, columns.key, *kept)
    if missing := [column for column in needed if column and column not in row]:
        raise OptionError(
            f"{name} has no {missing[0]!r}, only {', '.join(map(repr, row))}; name the columns with "
            f"--image-column, --caption-column, --label-column and --keep-columns"
        )
    images = images_of(row.get(image), columns.folder or Path(), f"{name}: the column {image!r}")
    if isinstance(images, str):
        return images
    if not images and not is_conversation:
        return NOT_THERE
    members: dict[str, Member] = dict(images)
    fields = {column: row[column] for column in kept}
    if is_conversation and len(images) > 1:  # which of the members each is
        fields[image] = [*images]
    elif not isinstance(row.get(image), str):
        fields.pop(image, None)
    if has_caption and isinstance(row[columns.caption], list):
        fields[columns.caption] = captions = row[columns.caption]
        where = f"{name}: an entry of the list {columns.caption!r}"
        texts = [text_of(caption, where).strip() for caption in captions]
        if not any(texts):
            return NO_CAPTION
    elif has_caption:
        members["txt"] = text(columns.caption).encode()
        if not members["txt"]:
            return NO_CAPTION
    if label:
        number = str(int(row[label])) if isinstance(row[label], bool) else text(label)
        if not _NUMBER.fullmatch(number):
            if not number:
                return "without a label"
            raise OptionError(f"{name}: the column {label!r} is {number[:60]!r}; expected a number")
        members["cls"] = number.encode()
    if fields:
        members["json"] = json.dumps(_plain(fields, name)).encode()
    return PackSample(key if columns.key is None else text(columns.key), members)


def images_of(cell: Any, folder: Path, name: str) -> dict[str, Member] | str:
    """The images of a cell, by extension (`jpg`; of several `0.jpg`, `1.png`, …), or why it is left out."""
    values = cell if isinstance(cell, list) else [] if cell is None else [cell]
    members: dict[str, Member] = {}
    for number, value in enumerate(values):
        data = (value.get("bytes") or value.get("path")) if isinstance(value, dict) else value
        if data is None:
            return NOT_THERE
        if isinstance(data, str):
            if re.match("https?://", data, re.IGNORECASE):
                raise OptionError(
                    f"{name} has the URL {data[:100]}; expected images: download them with img2dataset "
                    f"(pip install img2dataset), which writes shards (--output_format webdataset)"
                )
            data, extension = folder / data, Path(data).suffix[1:].lower()
            if f".{extension}" not in IMAGE_SUFFIXES:
                return _OTHER_FORMAT
            if not data.is_file():
                return NOT_THERE
        elif isinstance(data, bytes):
            extension = next(
                (item for item, start in _FORMATS.items() if re.match(start, data, re.DOTALL)), ""
            )
            if not extension:
                return _OTHER_FORMAT
        else:
            raise OptionError(f"{name} is a {type(data).__name__}; expected a path or the bytes of an image")
        place = f"{number:0{len(str(len(values) - 1))}d}."  # members are sorted by name
        members[f"{place if len(values) > 1 else ''}{extension}"] = data
    return members


def text_of(value: Any, name: str) -> str:
    """A cell as text: a number in decimal, nothing for null and NaN.

    Raises:
        OptionError: it is a list, a dict or true or false, or half of a surrogate pair.
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise OptionError(
            f"{name} is a {type(value).__name__}, {value!r:.60}; expected a string: --keep-columns stores "
            f"such values in a .json beside the image"
        )
    text = value if isinstance(value, str) else json.dumps(value)
    if not text.isascii() and text.encode("utf-8", "replace").decode() != text:
        raise OptionError(
            f"{name} is {text[:60]!a}, which has half of a surrogate pair; expected Unicode text"
        )
    return text


def _plain(value: Any, name: str) -> Any:
    """A value for JSON: NaN is null, and dates, decimals and their like are text."""
    if isinstance(value, dict):
        return {str(key): _plain(item, name) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, name) for item in value]
    if isinstance(value, bytes):
        raise OptionError(f"{name}: a kept column has bytes; expected what JSON has: name others to keep")
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float) else str(value)
