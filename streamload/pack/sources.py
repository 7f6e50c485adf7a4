"""A source of `streamload pack` → its samples, or groups of rows, in a fixed order."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from streamload.errors import OptionError
from streamload.pack.arrow import ArrowFile, Rows, rows_of
from streamload.pack.rows import (
    IMAGE_SUFFIXES,
    NO_CAPTION,
    NOT_THERE,
    FileSpan,
    Member,
    PackColumns,
    PackSample,
    sample_of,
    unlike,
    without_dots,
)
from streamload.pack.tables import TABLE_SUFFIXES, read_table

REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_PART = re.compile(r"\W*\d+(-of-\d+)?\.\w+$")
"""The end of a name that tells a split's files apart: `train-00000-of-00002.parquet`."""


@dataclass
class Listing:
    """What a source has.

    Attributes:
        left_out: samples that are in no piece, by reason.
        classes: names of the labels 0, 1, …; None: unknown.
    """

    pieces: list[PackSample | Rows] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    classes: list[str] | None = None
    _uses: Counter[str] = field(default_factory=Counter)

    def add(self, key: str, members: Mapping[str, Member]) -> None:
        """Add a sample, with a key unlike all before."""
        self.pieces.append(PackSample(unlike(without_dots(key), self._uses), members))


def list_source(
    source: str, columns: PackColumns, no_quotes: bool, storage_options: Mapping[str, Any] | None
) -> Listing:
    """List a source's samples.

    Args:
        source: a folder, a file, or the URL of Parquet files.
        columns: of tables.
        no_quotes: quotes in CSV and TSV are ordinary characters.
        storage_options: for a URL's file system.

    Raises:
        OptionError: there is nothing that can be packed, or a row is malformed.
    """
    listing, path = Listing(), Path(source)
    is_folder = path.is_dir()
    if not (path.exists() or REMOTE.match(source) or "*" in source):
        raise OptionError(f"{source}: No such file or folder")
    if (path / "dataset_dict.json").exists():
        splits = ", ".join(sorted(folder.name for folder in path.iterdir() if folder.is_dir()))
        raise OptionError(f"{source} has the splits {splits}: give the folder of one")
    if tables := _arrow_files(source, storage_options):
        columns = replace(columns, folder=columns.folder or Path(tables[0].path).parent)
        listing.pieces[:], listing.classes = rows_of(tables, columns)
    elif is_folder and (tars := sorted(path.glob("*.tar"))):
        _add_tars(listing, tars)
    elif is_folder and (columns.kept or columns.label or columns.key):
        raise OptionError(f"--keep-columns and the columns are for tables: {source} is a folder of images")
    elif is_folder:
        _add_images(listing, path)
    elif path.suffix in TABLE_SUFFIXES:
        _add_table(listing, path, replace(columns, folder=columns.folder or path.parent), no_quotes)
    elif path.suffix == ".tar":
        _add_tars(listing, [path])
    else:
        raise OptionError(
            f"{source} is neither a folder nor a .parquet, .csv, .tsv, .jsonl, .json, .arrow or .tar file, "
            f"nor a URL of Parquet files: copy others into a folder"
        )
    return listing


def _arrow_files(source: str, storage_options: Mapping[str, Any] | None) -> Sequence[ArrowFile]:
    """The Parquet files, or else Arrow files, of a URL, pattern, folder or file.

    Raises:
        OptionError: their names are those of several splits, and no pattern chose them.
    """
    from fsspec.core import url_to_fs

    files, path = url_to_fs(source, **(storage_options or {}))
    names = files.glob(path) if "*" in path else files.find(path)
    suffixes = (".parquet",) if REMOTE.match(source) else (".parquet", ".arrow")
    chosen = next(
        filter(None, ([name for name in names if name.endswith(suffix)] for suffix in suffixes)), []
    )
    splits = {_PART.sub("", name): name for name in chosen}
    if len(splits) > 1 and "*" not in source:
        raise OptionError(
            f"{source} has files of several splits, such as {', '.join([*splits.values()][:3])}: give "
            f"the folder of one, or a pattern in quotes ('…/train-*.parquet')"
        )
    return [ArrowFile(name, files.size(name), files) for name in sorted(chosen)]


def _add_tars(listing: Listing, tars: Sequence[Path]) -> None:
    from streamload.shards.local import index_local

    for tar in tars:
        for entry in (entry for entries in index_local(tar) for entry in entries):
            if entry.has_unsupported:
                listing.left_out["with links to what is not in the tar, or sparse files"] += 1
            else:
                spans = {extension: FileSpan(str(tar), *span) for extension, *span in entry.members}
                listing.add(entry.key, spans)


def _add_images(listing: Listing, folder: Path) -> None:
    """Images with a .txt beside each; without any, and in subfolders, their labels are these."""
    images = sorted(path for path in _files(folder) if path.suffix.lower() in IMAGE_SUFFIXES)
    has_texts = any(image.with_suffix(".txt").is_file() for image in images)
    if not has_texts and all(image.parent != folder for image in images):
        listing.classes = sorted({image.relative_to(folder).parts[0] for image in images})
    for image in images:
        text, member = image.with_suffix(".txt"), {image.suffix[1:].lower(): image}
        if not image.is_file():
            listing.left_out[NOT_THERE] += 1
            continue
        if listing.classes is not None:
            label = listing.classes.index(image.relative_to(folder).parts[0])
            listing.add(_key(image, folder), {**member, "cls": str(label).encode()})
            continue
        try:
            caption = text.read_bytes().decode().strip() if text.is_file() else ""
        except UnicodeDecodeError:
            listing.left_out["whose caption is not UTF-8 text"] += 1
            continue
        if caption:
            listing.add(_key(image, folder), {**member, "txt": caption.encode()})
        else:
            listing.left_out[NO_CAPTION] += 1


def _files(folder: Path) -> Iterator[Path]:
    """Files below a folder but hidden ones; links to folders are followed, unless to one that they are in."""
    for place, folders, names in os.walk(folder, followlinks=True):
        here = Path(place).resolve()
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and not here.is_relative_to((here / name).resolve())
        ]
        yield from (Path(place, name) for name in names if not name.startswith("."))


def _add_table(listing: Listing, table: Path, columns: PackColumns, no_quotes: bool) -> None:
    for number, row in enumerate(read_table(table, no_quotes), start=1):
        sample = sample_of(row, columns, "", f"{table}, row {number}")
        if isinstance(sample, str):
            listing.left_out[sample] += 1
            continue
        image = next((data for data in sample.members.values() if isinstance(data, Path)), None)
        key = f"{number - 1:09d}" if image is None else _key(image, columns.folder or Path())
        listing.add(sample.key or key, sample.members)


def _key(image: Path, folder: Path) -> str:
    """The image's path without its suffix, and without what leads out of the folder."""
    path = image.relative_to(folder) if image.is_relative_to(folder) else Path(*image.parts[1:])
    return re.sub(r"^(\.\./)+", "", os.path.normpath(path.with_suffix("")))
