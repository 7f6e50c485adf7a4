"""The log of decisions: what changed the weights of a run's sources, or the size of its batches, and when.

One JSON object a line, each with a checksum over itself and the line before. The state of a run holds its
place in the log; replay.py gives the run's batches again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from streamload.errors import DecisionsError, OptionError
from streamload.steering.summary import Summary

logger = logging.getLogger("streamload")

VERSION = 1
RUN, SEQUENCE = "run", "sequence"
"""Kinds of lines: the first of a file, and a sequence of samples that begins. All others are those of its
events (order/events.py)."""
_SUM = ', "sum": "'
_SUM_BYTES = len(_SUM) + 16 + len('"}')


class LogPlace(NamedTuple):
    """A place in a log: after so many lines of decisions, the last of which has this checksum."""

    lines: int = 0
    sum: str = ""


class DecisionLog:
    """The lines of a run, of which all ranks know the place, and one writes the file.

    Args:
        path: of the file; None: another rank writes it.
        run: what identifies the run: JSON-able.

    Attributes:
        place: after the last line.
    """

    def __init__(self, path: Path | None, run: Mapping[str, Any]):
        self.place = LogPlace()
        self._path, self._run = path, dict(run)
        self._size_bytes = 0  # of the file as this process wrote it
        self._unwritten: list[bytes] = []
        self._is_failing = False

    def begin(self, place: LogPlace | None, since: Mapping[str, Any]) -> None:
        """Continue a log at the place of a state, or begin a new one.

        Lines after that place are dropped: the run that wrote them went on after its state was saved. A file
        of another run, or one that lacks lines, is kept beside the new one as `….old`.

        Args:
            place: of the state; None: the run has no log yet.
            since: the sequence, the position and the changes of weights from there on; JSON-able.

        Raises:
            OptionError: the file can't be read or written.
        """
        self.place = place or LogPlace()
        self._unwritten.clear()
        if self._path is None:
            return
        try:
            kept = None if place is None else _kept_bytes(self._path, self._run, place)
            if kept is not None:
                os.truncate(self._path, kept)
                self._size_bytes = kept
                return
            if self._path.is_file() and self._path.stat().st_size:
                old = self._path.with_name(self._path.name + ".old")
                self._path.replace(old)
                logger.warning("%s has decisions of another run; it is now %s", self._path, old)
            head = {"kind": RUN, "version": VERSION, **self._run, "lines": self.place.lines}
            line, _ = _line({**head, "after": self.place.sum, "since": dict(since)}, "")
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_bytes(line)
            self._size_bytes = len(line)
        except OSError as exc:
            raise OptionError(f"decisions={str(self._path)!r} can't be written: {exc}") from exc

    def add(self, kind: str, values: Mapping[str, Any]) -> None:
        """Append a line. If the file can't be written to, warn once, and try again with the next line."""
        line, total = _line({"kind": kind, **values}, self.place.sum)
        self.place = LogPlace(self.place.lines + 1, total)
        if self._path is not None:
            self._unwritten.append(line)
            self._write(self._path)

    def _write(self, path: Path) -> None:
        text = b"".join(self._unwritten)
        try:
            with path.open("r+b", buffering=0) as file:
                if (size := file.seek(0, os.SEEK_END)) != self._size_bytes:
                    raise OSError(f"another process changed it: {size} bytes, not {self._size_bytes}")
                try:
                    left = memoryview(text)
                    while left:
                        left = left[file.write(left) or 0 :]
                except OSError:
                    file.truncate(self._size_bytes)
                    raise
        except OSError as exc:
            if not self._is_failing:
                logger.warning(
                    "decisions can't be written to %s, and the training goes on without: %s. Until they can "
                    "be, only its states have them",
                    path,
                    exc,
                )
            self._is_failing = True
            return
        self._size_bytes += len(text)
        self._unwritten.clear()
        if self._is_failing:
            logger.warning("decisions are written to %s again", path)
        self._is_failing = False


def read_lines(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """The lines of a log from its first on, each with its checksum.

    Raises:
        DecisionsError: one was altered, the last one is cut, or it isn't a log.
    """
    try:
        text = path.read_bytes()
    except OSError as exc:
        raise DecisionsError(f"decisions can't be read: {exc}") from exc
    lines = text.split(b"\n")
    if lines.pop() or not lines:
        raise DecisionsError(
            f"{path}: its last line is cut: resume the run that wrote it, or delete that line"
            if lines
            else f"{path} isn't a log of decisions: it has no whole line"
        )
    before = ""
    for number, line in enumerate(lines, 1):
        values, total = _checked(line, before, f"{path}, line {number}")
        is_first = number == 1
        if is_first != (values.get("kind") == RUN) or (is_first and values.get("version") != VERSION):
            raise DecisionsError(f"{path}, line {number}: not a log of decisions of version {VERSION}")
        yield values, total
        before = values["after"] if is_first else total


def _checked(line: bytes, before: str, where: str) -> tuple[dict[str, Any], str]:
    """A line's values and checksum."""
    body, checksum = line[:-_SUM_BYTES], line[-_SUM_BYTES:]
    total = xxhash.xxh3_64_hexdigest(before.encode() + body)
    if checksum != f'{_SUM}{total}"}}'.encode():
        raise DecisionsError(
            f"{where}: altered or damaged after it was written (its checksum doesn't match, or a line before "
            f"it is missing)"
        )
    try:
        values = json.loads(body + b"}")
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise DecisionsError(f"{where}: not a line of a log of decisions")
    return values, total


def _line(values: Mapping[str, Any], before: str) -> tuple[bytes, str]:
    """A line with its checksum, and that."""
    body = json.dumps(values, allow_nan=False).encode()[:-1]
    total = xxhash.xxh3_64_hexdigest(before.encode() + body)
    return body + f'{_SUM}{total}"}}\n'.encode(), total


def _kept_bytes(path: Path, run: Mapping[str, Any], place: LogPlace) -> int | None:
    """The size of a log up to a place; None: the file lacks it, or is of another run."""
    kept, lines = 0, path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    try:
        for number, (values, total) in enumerate(_read_sound(lines)):
            kept += len(lines[number]) + 1
            if number == 0:
                if not place.lines and any(values.get(name) != ours for name, ours in run.items()):
                    return None
                base, total = values["lines"], values["after"]
            if (base + number, total) == place:
                return kept
    except (KeyError, TypeError):
        return None
    return None


def _read_sound(lines: Sequence[bytes]) -> Iterator[tuple[dict[str, Any], str]]:
    """The lines up to the first one that was altered."""
    before = ""
    for line in lines:
        try:
            values, total = _checked(line, before, "")
        except DecisionsError:
            return
        yield values, total
        before = values["after"] if values.get("kind") == RUN else total


def described(summary: Summary) -> list[dict[str, Any]]:
    """A summary for the log: what each source gave, and the means of what was reported of it."""
    return [
        {
            "name": source.name,
            "share": round(source.share, 6),
            "samples": source.samples,
            "passes": source.passes,
            "loss": source.loss.mean,
            "reported": int(source.loss.count),
            "alignment": source.alignment.mean,
            "tokens": source.tokens.mean,
            "evaluation": source.evaluation,
            "bad": source.bad,
            **({} if source.loss_weight == 1 else {"loss_weight": source.loss_weight}),
        }
        for source in summary.sources
    ]
