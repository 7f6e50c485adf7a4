"""Bugs as they are really made, planted into the shipped modules: the simulation has to find each of them.

Each function plants one, for the rest of this process's life.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamload.cache import budget, fill, part, tier
from streamload.errors import ShardCut
from streamload.origins.origin import Origin, Stream, Version
from streamload.prefetch import scheduler
from streamload.shards.index import IndexWriter, Packed
from streamload.shards.record import write_at
from streamload.shards.samples import Entry, ShardScanner

BUGS: dict[str, Callable[[], None]] = {}


def _bug(plant: Callable[[], None]) -> Callable[[], None]:
    BUGS[plant.__name__.replace("_", "-")] = plant
    return plant


@_bug
def publish_without_end_marker() -> None:
    """A tar that ends within a member counts as one that has ended."""
    finish = ShardScanner.finish

    def lenient(self: ShardScanner) -> tuple[list[Entry], list[str]]:
        try:
            return finish(self)
        except ShardCut as cut:
            return [], [str(cut)]

    _set(ShardScanner, "finish", lenient)


@_bug
def entry_before_the_next_header() -> None:
    """A sample counts as whole once the payload of a member is there; another member may follow."""
    feed = ShardScanner.feed

    def hasty(self: ShardScanner, chunk: bytes | memoryview) -> list[Entry]:
        entries = feed(self, chunk)
        member = self._member
        if member is not None and self._is_ours and self.position >= member.start + member.size:
            self._give_out(entries)
        return entries

    _set(ShardScanner, "feed", hasty)


@_bug
def record_before_its_names() -> None:
    """The fixed part of an entry is written first, then what it points to."""

    def turned(self: IndexWriter, packed: Packed) -> None:
        write_at(self._index, packed.records, self._index_bytes)
        write(self, packed)

    write = IndexWriter.write
    _set(IndexWriter, "write", turned)


@_bug
def entry_before_its_data() -> None:
    """The data goes through a buffer that is written when the next chunk comes; the entries don't."""
    write, record = part.PartWriter.write, part.PartWriter.end

    def buffered(self: Any, chunk: bytes | memoryview) -> None:
        held, self.held = getattr(self, "held", b""), bytes(chunk)
        write(self, held)
        self.written_bytes += len(chunk) - len(held)

    def flushed(self: Any, *args: Any, **named: Any) -> None:
        held, self.held = getattr(self, "held", b""), b""
        write(self, held)
        self.written_bytes -= len(held)
        record(self, *args, **named)

    _set(part.PartWriter, "write", buffered)
    _set(part.PartWriter, "end", flushed)


@_bug
def claim_dropped_early() -> None:
    """The lock that says that a part has a filler is given back once the part is made."""
    claim = tier.Tier.claim

    def careless(self: tier.Tier, digest: str, stopped: Any = ()) -> part.Part | None:
        claimed = claim(self, digest, stopped)
        if claimed is not None:
            claimed._alive.close()
        return claimed

    _set(tier.Tier, "claim", careless)


@_bug
def reservation_not_given_back() -> None:
    """A fill that finds no room leaves its part as it is, with what is reserved for it."""
    _set(part.Part, "discard", lambda self: None)


@_bug
def open_shard_evicted() -> None:
    """Whether somebody reads a shard isn't asked before it goes; its bytes stay as long as it is open."""
    _set(budget, "_is_closed", lambda shard: True)


@_bug
def lost_wake_up() -> None:
    """What is wanted is looked at, and only then, after the lock was let go, is a change waited for."""
    take = scheduler.FillScheduler.take

    def late(self: scheduler.FillScheduler) -> Any:
        has_nothing = not self._requests
        if has_nothing and not self._stop.is_set():
            with self._change:
                self._change.wait()
        return take(self)

    _set(scheduler.FillScheduler, "take", late)


@_bug
def write_into_anothers_part() -> None:
    """A take-over goes on in the very file that the stopped filler has open."""
    begin = part.PartWriter.begin

    def shared(self: Any, facts: dict[str, object]) -> None:
        orphan = self.part.orphan
        mine: Path = self.part.path / "data"
        if orphan is not None and (orphan.path / "data").exists() and not mine.exists():
            os.link(orphan.path / "data", mine)
        begin(self, facts)

    _set(part.PartWriter, "begin", shared)


@_bug
def two_versions_mixed() -> None:
    """A take-over goes on at the byte without a condition on the version."""

    def trusting(self: Any, origin: Origin, start: int, expected: Version | None) -> Stream:
        return origin.open(start, None)

    _set(fill._Fill, "_open", trusting)


@_bug
def publish_in_two_steps() -> None:
    """A shard is published file by file into its new directory."""

    def stepwise(self: part.Part, kind: str) -> None:
        target = self.tier.root / kind / self.digest
        (self.path / "reserved").unlink(missing_ok=True)
        target.mkdir(mode=0o700, exist_ok=True)
        for file in sorted(self.path.iterdir()):
            file.rename(target / file.name)
        self.path.rmdir()
        self.leave()

    _set(part.Part, "_move", stepwise)


def _set(owner: Any, name: str, value: Any) -> None:
    assert hasattr(owner, name), f"{owner.__name__} has no {name} any more: nothing would be planted"
    setattr(owner, name, value)
