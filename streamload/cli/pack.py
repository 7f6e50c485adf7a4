"""`streamload pack`: pack images and captions into shards, with webdataset's ShardWriter.

Images are copied byte for byte: nothing is decoded, resized or re-encoded.
"""

import csv
import itertools
import json
import math
import random
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import typer

from streamload.cli.logs import progress
from streamload.cli.options import AsJson
from streamload.errors import OptionError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
_TABLES = {".csv": ",", ".tsv": "\t"}
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_SURPLUS = "\0"  # the key of a row's fields after its last column; no column has this name


@dataclass
class PackCounts:
    """Counts of packed and left-out samples.

    Attributes:
        sizes: samples per shard, by its file name.
        left_out: samples by reason, which completes "left out: 3 …".
    """

    sizes: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)

    def leave_out(self, why: str) -> None:
        """Count a sample that isn't packed."""
        self.left_out[why] = self.left_out.get(why, 0) + 1


def pack(
    source: Annotated[
        Path,
        typer.Argument(help="A folder of images with a .txt beside each, or a .csv, .tsv or .jsonl file."),
    ],
    target: Annotated[Path, typer.Argument(help="The folder for the shards and sizes.json.")],
    samples_per_shard: Annotated[int, typer.Option(min=1, help="Maximum samples per shard.")] = 10_000,
    image_column: Annotated[str, typer.Option(help="The column of a table with the image's path.")] = "image",
    caption_column: Annotated[str, typer.Option(help="The column of a table with the caption.")] = "caption",
    prefix: Annotated[str, typer.Option(help="Prefix of the shards' names.")] = "",
    no_quotes: Annotated[
        bool, typer.Option("--no-quotes", help="Treat quotes in a .csv or .tsv as ordinary characters.")
    ] = False,
    shuffle: Annotated[
        bool, typer.Option(help="Pack in random order (the same each time), or in the source's order.")
    ] = True,
    keep_columns: Annotated[
        str,
        typer.Option(help='Columns to store as a .json beside each image: "width,source", or "*".'),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Pack images and captions into shards.

    Samples are shuffled, as a training mixes samples of one shard less well than those of different shards.

    Also writes a sizes.json with the number of samples per shard. Paths in a table are relative to its
    folder. A sample's key is the image's path without its suffix. The shards appear once all are written.
    """
    if _REMOTE.match(str(target)):
        raise OptionError(
            f"{target} is not a local folder: pack into one, and copy it (aws s3 cp --recursive, …)"
        )
    if keep_columns and source.is_dir():
        raise OptionError("--keep-columns is for tables: a folder of images has no columns")
    packed = PackCounts()
    columns = _Columns(image_column, caption_column, tuple(keep_columns.split(",")) if keep_columns else ())
    pairs = _pairs(source, columns, packed, no_quotes)
    if shuffle:
        pairs = _shuffled(pairs)
    pairs = _with_bar(pairs)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit removes the temporary folder
    try:
        write_shards(pairs, target, samples_per_shard, prefix, packed)
    finally:
        signal.signal(signal.SIGTERM, before)
    if as_json:
        print(json.dumps({"target": str(target), "shards": packed.sizes, "left_out": packed.left_out}))
        return
    total = sum(packed.sizes.values())
    print(f"{total:,} samples in {len(packed.sizes):,} shards: {target / next(iter(packed.sizes))} …")
    for why, count in packed.left_out.items():
        print(f"left out: {count:,} {why}")


class _Columns(NamedTuple):
    """The columns of a table to read: image path, caption, and those to store as JSON."""

    image: str
    caption: str
    kept: tuple[str, ...]


class Pair(NamedTuple):
    """A sample to pack.

    Attributes:
        kept: stored beside it as JSON, unless empty.
    """

    key: str
    image: Path
    caption: str
    kept: Mapping[str, Any] = MappingProxyType({})


def write_shards(
    pairs: Iterator[Pair], target: Path, samples_per_shard: int, prefix: str, packed: PackCounts
) -> None:
    """Write samples into shards in `target`, and count them in `packed` and sizes.json.

    Raises:
        OptionError: there is nothing to pack, or `target` already has shards.
    """
    from webdataset.writer import ShardWriter

    target.mkdir(parents=True, exist_ok=True)
    present = sorted(target.glob(f"{prefix}*.tar"))
    if present or (target / "sizes.json").exists():
        raise OptionError(
            f"{target} has {present[0].name if present else 'sizes.json'} already: give an empty folder"
        )
    with tempfile.TemporaryDirectory(prefix=".packing-", dir=target) as folder:
        writer = ShardWriter(
            f"{folder}/{prefix}%05d.tar", maxcount=samples_per_shard, maxsize=2**62, verbose=0
        )
        with writer:
            for number, (key, image, caption, kept) in enumerate(pairs):
                extension = image.suffix[1:].lower()
                sample = {"__key__": key, extension: image.read_bytes(), "txt": caption.encode()}
                writer.write({**sample, "json": json.dumps(kept).encode()} if kept else sample)
                name = f"{prefix}{number // samples_per_shard:05d}.tar"
                packed.sizes[name] = packed.sizes.get(name, 0) + 1
        if not packed.sizes:
            why = (
                ", ".join(f"{count:,} {why}" for why, count in packed.left_out.items()) or "there is no image"
            )
            raise OptionError(f"nothing to pack: {why}")
        for name in packed.sizes:
            (Path(folder) / name).rename(target / name)
        (target / "sizes.json").write_text(json.dumps(packed.sizes, indent=1))


def _shuffled(pairs: Iterator[Pair]) -> Iterator[Pair]:
    listed = list(pairs)
    random.Random(0).shuffle(listed)
    yield from listed


def _with_bar(pairs: Iterator[Pair]) -> Iterator[Pair]:
    with progress("{task.completed:,} samples packed", is_counted=False) as show:
        for pair in pairs:
            yield pair
            show(advance=1)


def _pairs(source: Path, columns: _Columns, packed: PackCounts, no_quotes: bool = False) -> Iterator[Pair]:
    """The samples in a fixed order; counts those that can't be packed."""
    if source.is_dir():
        pairs: Iterator[tuple[Path, str, Mapping[str, Any]]]
        pairs = ((image, caption, {}) for image, caption in _folder(source, packed))
    elif source.suffix in (*_TABLES, ".jsonl"):
        pairs = _table(source, columns, no_quotes)
    else:
        raise OptionError(f"{source} is neither a folder of images nor a .csv, .tsv or .jsonl file")
    folder = source if source.is_dir() else source.parent
    uses_by_key: dict[str, int] = {}
    for image, caption, kept in pairs:
        if image.suffix.lower() not in IMAGE_SUFFIXES:
            packed.leave_out(f"whose image is not one of {', '.join(IMAGE_SUFFIXES)}")
        elif not image.is_file():
            packed.leave_out("whose image is not there")
        elif not caption.strip():
            packed.leave_out("without a caption")
        else:
            yield Pair(_key(image, folder, uses_by_key), image, caption.strip(), kept)


def _folder(folder: Path, packed: PackCounts) -> Iterator[tuple[Path, str]]:
    for image in sorted(folder.rglob("*")):
        if image.suffix.lower() in IMAGE_SUFFIXES:
            text = image.with_suffix(".txt")
            try:
                yield image, text.read_bytes().decode() if text.is_file() else ""
            except UnicodeDecodeError:
                packed.leave_out("whose caption is not UTF-8 text")


def _table(table: Path, columns: _Columns, no_quotes: bool) -> Iterator[tuple[Path, str, Mapping[str, Any]]]:
    with table.open(encoding="utf-8-sig", newline="") as lines:
        text = _decoded(table, lines)
        rows: Iterator[Mapping[str, Any]]
        if table.suffix == ".jsonl":
            rows = (_json_row(table, line) for line in text if line.strip())
        else:
            rows = _csv_rows(table, text, no_quotes)
        for number, row in enumerate(rows, start=1):
            kept = tuple(row) if columns.kept == ("*",) else columns.kept
            for column in (columns.image, columns.caption, *kept):
                if column not in row:
                    raise OptionError(
                        f"{table} has no {column!r} in row {number}, only {', '.join(map(repr, row))}; "
                        f"name the columns with --image-column, --caption-column and --keep-columns"
                    )
            image, caption = (
                _text(row[column], f"{table}, row {number}: the column {column!r}")
                for column in (columns.image, columns.caption)
            )
            yield table.parent / image, caption, {column: row[column] for column in kept}


def _text(value: Any, name: str) -> str:
    """A cell as text: a number in decimal, nothing for null and NaN.

    Raises:
        OptionError: it is a list, a dict or true or false, or half of a surrogate pair.
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise OptionError(
            f"{name} is a {type(value).__name__}, {json.dumps(value)[:60]}; expected a string: write one "
            f"caption a row, or keep the value as it is in a .json beside the image with --keep-columns"
        )
    text = value if isinstance(value, str) else json.dumps(value)
    if not text.isascii() and text.encode("utf-8", "replace").decode() != text:
        raise OptionError(
            f"{name} is {text[:60]!a}, which has half of a surrogate pair; expected Unicode text"
        )
    return text


def _decoded(table: Path, lines: Iterator[str]) -> Iterator[str]:
    try:
        yield from lines
    except UnicodeDecodeError as exc:
        with table.open("rb") as raw:  # text is decoded in blocks: find the line
            line = sum(1 for _ in itertools.takewhile(_is_utf8, raw)) + 1
        raise OptionError(f"{table}, line {line}: not UTF-8 text ({exc.reason})") from exc


def _is_utf8(line: bytes) -> bool:
    try:
        return bool(line.decode())
    except UnicodeDecodeError:
        return False


def _csv_rows(table: Path, lines: Iterator[str], no_quotes: bool) -> Iterator[Mapping[str, Any]]:
    """The rows of a table; a row broken by a stray quote or an unquoted delimiter is an error."""
    rows = csv.DictReader(
        lines,
        restkey=_SURPLUS,
        delimiter=_TABLES[table.suffix],
        quoting=csv.QUOTE_NONE if no_quotes else csv.QUOTE_MINIMAL,
        strict=True,
    )
    while True:
        line = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as exc:
            advice = "" if no_quotes else "; if quotes are ordinary characters, give --no-quotes"
            raise OptionError(f"{table}, row at line {line}: {exc}{advice}") from exc
        if row is None:
            return
        if any(row.pop(_SURPLUS, ())):
            raise OptionError(f"{table}, row at line {line}: more fields than columns")
        yield row


def _json_row(table: Path, line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line, parse_constant=lambda _: None)  # NaN and infinity, which JSON doesn't have
    except ValueError as exc:
        raise OptionError(f"{table} has a line that is not JSON: {line[:60]!r} ({exc})") from exc
    if not isinstance(row, dict):
        raise OptionError(f"{table} has a line that is not a JSON object: {line[:60]!r}")
    return row


def _key(image: Path, folder: Path, uses_by_key: dict[str, int]) -> str:
    """The image's path without suffix and dots, which would end the key, made unique."""
    path = image.relative_to(folder) if image.is_relative_to(folder) else Path(*image.parts[1:])
    key = path.with_suffix("").as_posix().replace(".", "_")
    uses_by_key[key] = uses_by_key.get(key, 0) + 1
    return key if uses_by_key[key] == 1 else f"{key}~{uses_by_key[key]}"
