"""Unsized claims: parts of live fillers that don't know yet how large their shards are.

They have no reservation, or one that grows: a shard that is prepared here, or comes from a command. A shard
needed later could take the last room meanwhile, be published, be evicted as soon as the size is known, and be
fetched again. So a newcomer leaves room for the claims that are needed sooner (budget.py), a second for each
at most: an origin that doesn't answer holds up nobody else.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from streamload.cache import demand
from streamload.cache.directory import Directory, reservation_of
from streamload.cache.locks import is_locked

PATIENCE_SECONDS = 1.0
"""Time for which a process leaves room for a claim, from the moment when it sees it first."""


class Claim(NamedTuple):
    """A live part whose size isn't known.

    Attributes:
        path: its directory.
        reserved_bytes: so far.
    """

    path: Path
    reserved_bytes: int


class Claims:
    """The claims of a tier, as one process sees them; call its methods under the tier's lock."""

    def __init__(self, directory: Directory):
        self._directory = directory
        self._seen_at: dict[Path, float] = {}

    def unsized(self, part: Path | None) -> list[Claim]:
        """The unsized claims beside `part`; none if that has a reservation: it isn't a newcomer."""
        if part is None or reservation_of(part) is not None:
            return []
        others = [(path, reservation_of(path)) for path in self._directory.own("parts") if path != part]
        claims = [
            Claim(path, reservation.size_bytes if reservation else 0)
            for path, reservation in others
            if (reservation is None or reservation.grows) and is_locked(path / "index")
        ]
        now = time.monotonic()
        self._seen_at = {claim.path: self._seen_at.get(claim.path, now) for claim in claims}
        return [claim for claim in claims if now - self._seen_at[claim.path] < PATIENCE_SECONDS]

    def sooner(self, claims: list[Claim], part: Path, next_use: float) -> list[Claim]:
        """The claims that are needed before a part, by the plans of the live runs and its own."""
        digests = {path: path.name[:32] for path in (part, *(claim.path for claim in claims))}
        next_uses = demand.next_uses(self._directory.root / "runs", sorted(set(digests.values())))
        own_use = min(next_use, next_uses.get(digests[part], next_use))
        return [claim for claim in claims if next_uses.get(digests[claim.path], own_use) < own_use]


def lacking_bytes(claims: list[Claim], size_bytes: int) -> int:
    """Bytes that claims will still reserve, if they take as much as another: shards are alike."""
    return sum(max(0, size_bytes - claim.reserved_bytes) for claim in claims)
