"""Tables of text → rows: CSV, TSV, JSON lines, and JSON files with a list of objects."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from streamload.errors import OptionError

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
TABLE_SUFFIXES = (*_DELIMITERS, ".jsonl", ".json")
_SURPLUS = "\0"  # the key of a row's fields after its last column; no column has this name


def read_table(table: Path, no_quotes: bool) -> Iterator[Mapping[str, Any]]:
    """Yield the rows.

    Raises:
        OptionError: the table isn't UTF-8, or a row is malformed.
    """
    if table.suffix in _DELIMITERS:
        yield from _csv_rows(table, no_quotes)
        return
    texts = ["".join(_lines(table))] if table.suffix == ".json" else _lines(table)
    for text in texts:
        if not text.strip():
            continue
        try:
            parsed = json.loads(
                text, parse_constant=lambda _: None
            )  # NaN and infinity, which JSON doesn't have
        except (ValueError, RecursionError) as exc:
            raise OptionError(f"{table} has a line that is not JSON: {text[:60]!r} ({exc})") from exc
        for row in parsed if table.suffix == ".json" and isinstance(parsed, list) else [parsed]:
            if not isinstance(row, dict):
                raise OptionError(f"{table} has a row that is not a JSON object: {row!r:.60}")
            yield row


def _lines(table: Path) -> Iterator[str]:
    with table.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as exc:
                raise OptionError(f"{table}, line {number}: not UTF-8 text ({exc.reason})") from exc


def _csv_rows(table: Path, no_quotes: bool) -> Iterator[Mapping[str, Any]]:
    """The rows of a table; a row broken by a stray quote or an unquoted delimiter is an error."""
    rows = csv.DictReader(
        _lines(table),
        restkey=_SURPLUS,
        delimiter=_DELIMITERS[table.suffix],
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
