"""A recording: a rank's numbers over the whole run, one file, from which `streamload report` draws.

Each line is JSON: a head, then what the rank's page said at one moment. When there are MOST moments every
second one goes, and later ones come half as often, so the file stays below a megabyte however long the run.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from streamload.errors import OptionError
from streamload.metrics.registry import BUCKETS, BY_NAME, COUNTERS
from streamload.observe.page import Instant, RunPage
from streamload.urls import redact_text

logger = logging.getLogger("streamload")

Skipped = tuple[str, str, str, str]
"""The cause, the URL of the shard without secrets, the key and the message of a sample."""

FORMAT = 1
MOST = 512
"""Moments in a file."""
MOST_SKIPPED = 200
"""Samples that could not be used, in a file; the counters have their number."""
_LONGEST_TEXT = 400
_FIRST_SECONDS = 1.0
_SUFFIX = ".recording.jsonl"


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recording that was read.

    Attributes:
        about: of the rank: run, rank, world_size, host, began (seconds since 1970), workers, sources,
            settings.
        moments: its pages, in their order.
        skipped: samples that could not be used, the first ones.
    """

    about: Mapping[str, Any]
    moments: tuple[RunPage, ...]
    skipped: tuple[Skipped, ...] = ()


class Recording:
    """Records a rank's pages, and the first samples that it could not use. Not thread-safe.

    A disk that doesn't take it is logged once, and ends the recording; that harms nothing else.

    Args:
        folder: is made if it is missing.
        settings: JSON-able, for the report; without secrets.
        skipped: those samples so far.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], skipped: Sequence[Skipped] = ()):
        self._folder = folder
        self._skipped = skipped
        self._settings = settings
        self._path: Path | None = None
        self._lines: list[str] = []
        self._recorded = 0
        self._every_seconds = _FIRST_SECONDS
        self._next_seconds = 0.0
        self._left_out: RunPage | None = None
        self._has_failed = False

    def finish(self) -> None:
        """Record the last page, if it wasn't time for it. Idempotent."""
        if self._left_out is not None:
            self._next_seconds = 0.0
            self.add(self._left_out)

    def add(self, page: RunPage) -> None:
        """Record a page of this rank, if it is time for one."""
        if self._has_failed:
            return
        self._left_out = page if page.run_seconds < self._next_seconds else None
        if self._left_out is not None:
            return
        self._next_seconds = page.run_seconds + self._every_seconds
        try:
            self._append(_line(page), page)
        except OSError as exc:
            self._has_failed = True
            logger.warning(
                "this run isn't recorded any further, as %s can't be written: %s; the training goes on",
                *(self._path or self._folder, exc.strerror or exc),
            )

    def _append(self, line: str, page: RunPage) -> None:
        if self._path is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._path = self._folder / f"{_plain(page.run)}-{page.rank}-{page.pid}{_SUFFIX}"
            self._lines = [self._head(page)]
            self._rewrite()
        self._lines.append(line)
        samples = self._skipped[self._recorded : MOST_SKIPPED]
        self._recorded += len(samples)
        if len(self._lines) > MOST:
            head, *moments = self._lines
            self._lines = [head, *moments[1::2]]
            self._every_seconds *= 2
            self._rewrite()
            return
        with self._path.open("a") as file:
            file.write("".join(f"{text}\n" for text in [line, *map(_skipped_line, samples)]))

    def _head(self, page: RunPage) -> str:
        about = {
            "run": page.run,
            "rank": page.rank,
            "world_size": page.world_size,
            "host": page.host,
            "began": page.began.unix,
            "workers": page.workers,
            "sources": list(page.sources),
            "settings": dict(self._settings),
        }
        return json.dumps({"format": FORMAT, **about})

    def _rewrite(self) -> None:
        """Put all lines in place of the file's."""
        assert self._path is not None
        half = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            skipped = map(_skipped_line, self._skipped[: self._recorded])
            half.write_text("\n".join([*self._lines, *skipped, ""]))
            half.replace(self._path)
        except OSError:
            half.unlink(missing_ok=True)
            raise


def read_recording(path: Path) -> Recorded:
    """Read a recording; lines that a full disk or a kill has cut are left out.

    Raises:
        OptionError: it is none.
    """
    try:
        first, *lines = path.read_text().splitlines()
        about = json.loads(first)
        if about.pop("format") != FORMAT:
            raise ValueError("it has another format")
        began = Instant("", 0, float(about["began"]))
        head = RunPage(
            **{name: about[name] for name in ("run", "rank", "world_size", "host", "workers")},
            pid=0,
            began=began,
            written=began,
            sources=tuple(about["sources"]),
        )
        moments = [moment for line in lines if (moment := _moment(line, head)) is not None]
        skipped = [sample for line in lines if (sample := _skipped_in(line)) is not None]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise OptionError(
            f"{path} is no recording of a run ({exc!r}): give a file or folder that STREAMLOAD_RECORD wrote"
        ) from exc
    return Recorded(about, tuple(sorted(moments, key=lambda moment: moment.run_seconds)), tuple(skipped))


def recordings(place: Path) -> list[Path]:
    """The recordings at a path: a file, or all in a folder."""
    return sorted(place.glob(f"*{_SUFFIX}")) if place.is_dir() else [place]


def _line(page: RunPage) -> str:
    """Values of a page as JSON, as short as it can be; labels are joined by commas."""
    gauges = {
        name: {",".join(labels): float(f"{value:.5g}") for labels, value in by_label.items()}
        for name, by_label in page.gauges.items()
    }
    counters = {name: n for name, n in page.counters.items() if n}
    values: dict[str, Any] = {"t": round(page.run_seconds, 2), "c": counters, "g": gauges}
    values |= {"w": list(page.wait_buckets)} if any(page.wait_buckets) else {}
    values |= {"v": page.verdict} if page.verdict else {}
    values |= {"r": page.run_verdict} if page.run_verdict else {}
    values |= {"a": dict(page.alerts)} if page.alerts else {}
    return json.dumps(values, separators=(",", ":"))


def _moment(line: str, head: RunPage) -> RunPage | None:
    """A line's page, without names that this version doesn't know; None: it was cut."""
    try:
        values = json.loads(line)
        seconds = float(values["t"])
        buckets = tuple(int(n) for n in values.get("w", ()))
        return replace(
            head,
            written=Instant("", round(seconds * 1e9), head.began.unix + seconds),
            counters={name: int(n) for name, n in values["c"].items() if name in COUNTERS},
            wait_buckets=buckets if len(buckets) == BUCKETS else head.wait_buckets,
            gauges={
                name: {(label,) if BY_NAME[name].labels else (): float(n) for label, n in by_label.items()}
                for name, by_label in values["g"].items()
                if name in BY_NAME
            },
            verdict=str(values.get("v", "")),
            run_verdict=str(values.get("r", "")),
            alerts={str(name): str(message) for name, message in values.get("a", {}).items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _skipped_line(sample: Skipped) -> str:
    return json.dumps({"s": [redact_text(text)[:_LONGEST_TEXT] for text in sample]})


def _skipped_in(line: str) -> Skipped | None:
    """A line's sample; None: it is about something else, or was cut."""
    try:
        cause, url, key, message = json.loads(line)["s"]
        return str(cause), str(url), str(key), str(message)
    except (ValueError, KeyError, TypeError):
        return None


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:64] or "run"
