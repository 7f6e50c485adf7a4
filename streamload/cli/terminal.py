"""Output of commands. Names, labels and messages that they quote are untrusted: they move no cursor."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TextIO

from streamload.errors import OptionError, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_MOST_COLUMNS = 1 << 16
"""Width of a line that is written to a pipe or file."""
_LINES = re.compile("([\n\t])")
_LINES_AND_STYLES = re.compile("([\n\t]|\x1b\\[[0-9;]*m)")


class PrintableOutput:
    """A text stream whose control and bidirectional characters are written as ``\\x1b``, ``\\u202e``.

    Lines stay, and on a terminal colours.

    Attributes:
        stream: where it writes to.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._kept = _LINES_AND_STYLES if stream.isatty() else _LINES

    def write(self, text: str) -> int:
        """Write text; return its length."""
        parts = self._kept.split(text)
        parts[::2] = map(printable, parts[::2])  # what was kept stands between them
        self.stream.write("".join(parts))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def printable_stdout() -> Iterator[None]:
    """Make all that is printed meanwhile printable."""
    before = sys.stdout
    sys.stdout = PrintableOutput(before)
    try:
        yield
    finally:
        sys.stdout = before


def cursor_stream() -> TextIO:
    """Standard output for what has to move the cursor, and makes its own texts printable."""
    return sys.stdout.stream if isinstance(sys.stdout, PrintableOutput) else sys.stdout


def console() -> Console:
    """Standard output: lines are as wide as the terminal or COLUMNS, and in a pipe or file as need be."""
    from rich.console import Console

    is_any_width = not sys.stdout.isatty() and not os.environ.get("COLUMNS")
    return Console(highlight=False, width=_MOST_COLUMNS if is_any_width else None)


def say(text: str) -> None:
    """Print one line that has names in it: nothing in it is markup, and it isn't cut."""
    console().print(printable(text), markup=False, soft_wrap=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, head: bool = True) -> Table:
    """Make a table; a cell's text is on one line, without markup, except in a `rich.text.Text`.

    Args:
        columns: their names; those that begin with ">" are to the right.
        rows: their cells.
        head: show the names.
    """
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, show_header=head)
    for name in columns:
        justify: Literal["left", "right"] = "right" if name.startswith(">") else "left"
        grid.add_column(Text(name.removeprefix(">")), overflow="fold", justify=justify)
    for row in rows:
        grid.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in row))
    return grid


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, head: bool = True) -> None:
    """Print a table, as `table` makes it."""
    console().print(table(columns, rows, head=head))


def confirm(action: str) -> None:
    """Ask on a terminal whether to do something, "remove 3 items".

    Raises:
        OptionError: standard input is no terminal.
        typer.Abort: the answer is no.
    """
    import typer

    if not sys.stdin.isatty():
        raise OptionError(f"this would {action}: say --yes, or --dry-run to see them")
    typer.confirm(printable(f"{action[0].upper()}{action[1:]}?"), abort=True, err=True)


def format_bytes(number: float) -> str:
    """Bytes in readable units; numpy is imported when they are printed."""
    from streamload.metrics import format_bytes as formatted

    return formatted(number)


def print_json(values: Any) -> None:
    """Print values for programs, as --json does."""
    print(json.dumps(values, indent=2))
