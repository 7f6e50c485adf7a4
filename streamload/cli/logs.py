"""Logs of the command line on stderr: text or JSON lines, with times in UTC and levels.

Results are printed on stdout by the commands themselves. A training's logs are its own: nothing here is
imported by it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import sys
from datetime import datetime, timezone
from enum import Enum
from typing import TYPE_CHECKING, Any

from streamload.errors import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

logger = logging.getLogger("streamload")

_FLAGS = ("--log-format", "--log-level")


class LogFormat(str, Enum):
    """The values of --log-format."""

    text = "text"
    json = "json"


class LogLevel(str, Enum):
    """The values of --log-level."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[Any]
else:
    _StreamHandler = logging.StreamHandler  # Python 3.10 has no subscripts of it


class _StderrHandler(_StreamHandler):
    """Writes to the sys.stderr of the moment: a progress bar on a terminal replaces it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


class _TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z WARNING the message`."""

    def format(self, record: logging.LogRecord) -> str:
        lines = [f"{_time_of(record)} {record.levelname} {printable(record.getMessage())}"]
        return "\n".join([*lines, *filter(None, [_traceback_of(record)])])


class _JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, pid and message, and traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": _time_of(record),
            "level": record.levelname,
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        traceback = _traceback_of(record)
        return json.dumps(fields | ({"traceback": traceback} if traceback else {}))


_HANDLER = _StderrHandler()


def log_to_stderr(form: LogFormat, level: LogLevel) -> None:
    """Write logs to stderr from now on; those of other libraries from warnings on. Idempotent.

    Args:
        level: of streamload's own.
    """
    _HANDLER.setFormatter(_JsonFormatter() if form is LogFormat.json else _TextFormatter())
    logging.getLogger().addHandler(_HANDLER)
    logger.setLevel(level.value.upper())
    logging.captureWarnings(form is LogFormat.json)


def stop_logging() -> None:
    """Undo log_to_stderr: the caller of main() may go on. Idempotent."""
    logging.getLogger().removeHandler(_HANDLER)
    logger.setLevel(logging.NOTSET)
    logging.captureWarnings(False)


def report_failure(message: str) -> None:
    """Say in one line on stderr why a command failed."""
    if writes_json():
        logger.error("%s", message)
    else:
        print(f"streamload: {message}", file=sys.stderr)


def writes_json() -> bool:
    """True if stderr gets JSON lines, and nothing else."""
    return isinstance(_HANDLER.formatter, _JsonFormatter)


def progress_console() -> Console:
    """Stream that progress is shown on: stderr, or none if that gets JSON lines."""
    from rich.console import Console

    return Console(stderr=True, quiet=writes_json())


@contextlib.contextmanager
def progress(
    text: str, description: str = "", *, is_counted: bool = True, always: bool = False
) -> Iterator[Callable[..., None]]:
    """Show a bar with a text and the time on a terminal; yield a function that updates it.

    Args:
        text: with fields of the task, as rich.progress.TextColumn takes it.
        description: of the task at the beginning.
        is_counted: the number of steps is known.
        always: without a terminal it is printed once, when it ends.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    console = progress_console()
    head = (BarColumn(), MofNCompleteColumn()) if is_counted else (SpinnerColumn(),)
    columns = (*head, TextColumn(text), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (always or console.is_terminal)) as bar:
        yield functools.partial(bar.update, bar.add_task(description, total=None))


def flags_first(arguments: list[str]) -> list[str]:
    """The arguments with --log-format and --log-level before the command: they may stand anywhere."""
    first: list[str] = []
    remaining: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--":
            remaining += [word, *words]
        elif word in _FLAGS:
            first += [word, *([value] if (value := next(words, None)) is not None else [])]
        else:
            (first if word.startswith(tuple(f"{flag}=" for flag in _FLAGS)) else remaining).append(word)
    return [*first, *remaining]


def _time_of(record: logging.LogRecord) -> str:
    time = datetime.fromtimestamp(record.created, timezone.utc)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _traceback_of(record: logging.LogRecord) -> str:
    return logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
