"""Samples that are left out of a training from a step on: others take their places (steps H and K).

`Shards(leave_out=FILE)` lists them, and `Loader.leave_out` appends to that file. Each change is an event that
has its samples, so workers read no file. A state has the digests of the changes, and finds their samples in
the file again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from streamload.errors import OptionError, StateMismatch
from streamload.extension import Event, Extension, RankPart, WorkerPart
from streamload.urls import redact

if TYPE_CHECKING:
    from streamload.extension import Batch, LoaderOptions, Run, WorkerProcess
    from streamload.shards.samples import Sample

logger = logging.getLogger("streamload")

NAME = "leave_out"
"""The name of the extension, and its key of a state."""


class ListedSample(NamedTuple):
    """A sample that a file lists.

    Attributes:
        key: as a batch has it.
        url: of its shard, without secrets; None: of any.
        call: the digest of the samples of the call that wrote it; "": people did.
    """

    key: str
    url: str | None
    call: str = ""


class LeftOutChange(NamedTuple):
    """Samples that are left out from a position on.

    Attributes:
        position: of the first step without them.
        source: "file": listed there when the run began or resumed; "call": by Loader.leave_out.
        number: of "file" the samples that the file listed, with those before; of "call" its samples.
        digest: of its samples.
        samples: the same.
    """

    position: int
    source: str
    number: int
    digest: str
    samples: Sequence[ListedSample]


@dataclass(frozen=True, slots=True)
class LeftOutSamples(Extension):
    """The extension of a loader that can leave samples out.

    Attributes:
        file: lists them; it may be missing.
        is_followed: whether only what a state has is left out, as it was then.
    """

    file: Path
    is_followed: bool = False

    name = NAME

    def refuse_unusable(self, options: LoaderOptions) -> None:
        """Refuse an evaluation, and a file that can't be read."""
        if not options.train:
            raise OptionError(
                "leave_out= is for training, where others take the samples' places: in an evaluation give "
                "Shards(keep=…), a function that returns False for them"
            )
        read_samples(self.file)

    def in_worker(self, process: WorkerProcess) -> ExcludedSamples:
        """Its part in a worker process."""
        return ExcludedSamples()

    def in_rank(self, run: Run) -> LeftOutChanges:
        """Its part in the rank."""
        return LeftOutChanges(run, self.file, self.is_followed)


class ExcludedSamples(WorkerPart):
    """The worker's part: the samples that are left out of the current step."""

    def __init__(self) -> None:
        self._urls: dict[str, set[str | None]] = {}  # by key

    def start_epoch(self) -> None:
        """Forget them: events of the new epoch have them all."""
        self._urls = {}

    def apply(self, event: Event) -> None:
        """Leave out the samples of an event, too."""
        for key, url, _ in event.value:
            self._urls.setdefault(key, set()).add(url)

    def excludes(self, sample: Sample) -> bool:
        """True if a sample is left out."""
        urls = self._urls.get(sample.key, ())
        return sample.url in urls or None in urls


class LeftOutChanges(RankPart):
    """The rank's part.

    Args:
        run: of the loader.
        file, is_followed: see LeftOutSamples.
    """

    def __init__(self, run: Run, file: Path, is_followed: bool):
        self._run, self._file, self._is_followed = run, file, is_followed
        self._changes: list[LeftOutChange] = []
        self._listed: int | None = None  # samples of the file up to the last that is left out; None: unread
        self._is_read = False  # since the loader was made, or a state loaded
        self._has_steps = False  # the current sequence

    def start_epoch(self, start: int) -> Sequence[Event]:
        """All changes so far; first those that the file has at the start of a run, or of its rest.

        Raises:
            OptionError: the file can't be read.
        """
        self._changes, self._has_steps = self._changes_at(start), start > 0
        if not self._is_read and not self._is_followed:
            self._read(start)
            self._is_read = True
        changes = sorted(self._changes, key=itemgetter(0))
        return [Event(change.position, NAME, change.samples) for change in changes]

    def taken(self, batch: Batch) -> None:
        """The sequence has a step."""
        self._has_steps = True

    def leave_out(self, keys: Iterable[str | tuple[str, str]], why: str) -> int:
        """Leave samples out, and return the step of the epoch from which they are; see Loader.leave_out."""
        samples = self._agreed(lambda: self._written(keys, why))
        event = self._run.send(samples)
        step = self._run.step_of(event)
        if samples:
            change = LeftOutChange(event.position, "call", len(samples), digest_of(samples), samples)
            self._add(change, f"step {step} of the epoch", why or "loader.leave_out()")
        return step

    def state(self, position: int) -> Mapping[str, object]:
        """Its key of a loader's state, once the file was read."""
        if self._listed is None:
            return {}
        return {NAME: [list(change[:4]) for change in self._changes_at(position)]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue after a state of the loader, which may be of one without this extension.

        Raises:
            StateMismatch: its part is damaged, or the file lacks a sample.
            OptionError: the file can't be read.
        """
        self._changes, self._listed, self._is_read = [], None, False
        self._has_steps = state.get("position", 0) > 0
        if NAME not in state:
            return
        self._changes = changes_of(state, self._file)
        self._listed = max((change.number for change in self._changes if change.source == "file"), default=0)

    def _changes_at(self, position: int) -> list[LeftOutChange]:
        """The changes as they are from a position on: all hold where a sequence begins anew."""
        if position > 0 or not self._has_steps:
            return self._changes
        return [change._replace(position=0) for change in self._changes]

    def _read(self, start: int) -> None:
        """Leave out what the file lists, and the run hasn't read.

        A run that resumes skips the samples of calls: those that are in its state it has, others came later.
        """
        listed = self._agreed(lambda: read_samples(self._file))
        before, self._listed = self._listed, self._listed or 0
        later = [sample for sample in listed[self._listed :] if before is None or not sample.call]
        if later:
            self._listed = len(listed)
            change = LeftOutChange(start, "file", len(listed), digest_of(later), later)
            self._add(change, "this epoch's next step" if start else "the start", self._file)

    def _add(self, change: LeftOutChange, since: str, why: object) -> None:
        self._changes.append(change)
        if self._run.rank == 0:
            logger.info("%d samples are left out from %s on: %s", len(change.samples), since, why)

    def _agreed(self, samples: Callable[[], list[ListedSample]]) -> list[ListedSample]:
        """The samples of rank 0; this rank's if nothing joins the ranks.

        Raises:
            OptionError: rank 0 has none, on all ranks.
        """
        if not self._run.can_agree:
            return samples()
        answer: dict[str, Any] = {}
        if self._run.rank == 0:
            try:
                answer = {"samples": samples()}
            except (OptionError, OSError, TypeError) as exc:
                answer = {"error": str(exc)}
        answer = self._run.agree("samples to leave out", answer, itemgetter(0))
        if "error" in answer:
            raise OptionError(answer["error"])
        return [ListedSample(*sample) for sample in answer["samples"]]

    def _written(self, keys: Iterable[str | tuple[str, str]], why: str) -> list[ListedSample]:
        """The samples of a call that aren't left out yet; rank 0 writes them into the file."""
        named = dict.fromkeys(map(_sample_of, [keys] if isinstance(keys, str) else keys))
        for change in self._changes:
            for sample in change.samples if change.position <= self._run.position.position else ():
                named.pop(sample._replace(call=""), None)
        samples, digest = [*named], digest_of(named)
        is_there = sum(sample.call == digest for sample in read_samples(self._file)) >= len(samples)
        if self._run.rank == 0 and not is_there:
            values = [{"key": key, "url": url, "why": why, "call": digest} for key, url, _ in samples]
            rows = [{name: value for name, value in row.items() if value} for row in values]
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("ab+") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
                end = b"" if file.read() in (b"", b"\n") else b"\n"  # of a line that somebody wrote
                file.write(end + "".join(f"{json.dumps(row)}\n" for row in rows).encode())
                file.flush()
                os.fsync(file.fileno())
        return samples


def changes_of(state: Mapping[str, Any], file: Path) -> list[LeftOutChange]:
    """The changes of a loader's state, with their samples as a file lists them.

    Raises:
        StateMismatch: the state's part is damaged, or the file lacks a sample.
        OptionError: the file can't be read.
    """
    listed, read = read_samples(file), 0
    try:
        rows = [
            (int(position), str(source), int(number), str(digest))
            for position, source, number, digest in state.get(NAME, ())
        ]
    except (OverflowError, TypeError, ValueError) as exc:
        raise StateMismatch(f"not a valid state of a loader: {exc} as {NAME}") from None
    changes = []
    for position, source, number, digest in rows:
        samples = [sample for sample in listed if sample.call == digest][:number]
        if source == "file":
            samples, read = listed[read:number], number
        by_people = [sample for sample in samples if not sample.call]
        listed_then = next((part for part in (samples, by_people) if digest_of(part) == digest), [])
        if not listed_then or position < 0:
            which = f"the first {number}" if source == "file" else f"{number} of loader.leave_out()"
            raise StateMismatch(
                f"leave_out={str(file)!r} lacks samples that the state's run has left out, which would come "
                f"again: {which} are changed or gone. Restore the file; lines may be added at its end"
            )
        changes.append(LeftOutChange(position, source, number, digest, listed_then))
    return changes


def read_samples(file: Path) -> list[ListedSample]:
    """The samples that a file lists; none if it is missing.

    Raises:
        OptionError: it can't be read; it names the line.
    """
    try:
        lines = file.read_text("utf-8-sig").split("\n")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, UnicodeError) as exc:
        raise OptionError(f"leave_out={str(file)!r} can't be read: {exc}") from exc
    return [_parsed(text, f"line {number} of {file}") for number, text in enumerate(lines, 1) if text.strip()]


def digest_of(samples: Iterable[ListedSample]) -> str:
    """The digest of samples in their order, whoever listed them."""
    content = json.dumps([sample[:2] for sample in samples])
    return xxhash.xxh3_64_hexdigest(content.encode())


def _parsed(text: str, place: str) -> ListedSample:
    text = text.strip()
    if not text.startswith("{"):
        return ListedSample(text, None)
    try:
        row = json.loads(text)
        key, url, call = row["key"], row.get("url"), row.get("call", "")
    except (ValueError, KeyError, RecursionError):
        key = url = call = None
    if not (isinstance(key, str) and isinstance(url, str | None) and isinstance(call, str)):
        raise OptionError(f'{place} is {text!r:.200}; expected a key, or {{"key": …, "url": …, "why": …}}')
    return ListedSample(key, None if url is None else redact(url), call)


def _sample_of(key: object) -> ListedSample:
    """A sample as `Loader.leave_out` gets it.

    Raises:
        OptionError: it is neither a key nor a pair.
    """
    url = None
    if isinstance(key, tuple | list) and len(key) == 2:
        url, key = key
    if not (isinstance(key, str) and isinstance(url, str | None)):
        raise OptionError(f"leave_out() got {key!r:.100}; expected a list of keys, or of pairs (url, key)")
    return ListedSample(key, None if url is None else redact(url))
