"""Claims without a reservation: parts of live fillers that don't know yet how large their shards are.

A shard needed later could take the last room meanwhile, be published, be evicted as soon as the size is
known, and be fetched again. So a newcomer leaves room for the claims that are needed sooner (budget.py), a
second for each at most: an origin that doesn't answer holds up nobody else.
"""

from __future__ import annotations

import time
from pathlib import Path

from streamload.cache import demand
from streamload.cache.directory import Directory
from streamload.cache.locks import is_locked

PATIENCE_SECONDS = 1.0
"""How long a process leaves room for a claim, from the moment when it sees it first."""


class Claims:
    """The claims of a tier, as one process sees them; call its methods under the tier's lock."""

    def __init__(self, directory: Directory):
        self._directory = directory
        self._seen_at: dict[Path, float] = {}

    def unsized(self, part: Path | None) -> list[Path]:
        """The live claims without a reservation beside `part`; none if that has one: it isn't a newcomer."""
        if part is None or (part / "reserved").exists():
            return []
        others = [path for path in self._directory.own("parts") if path != part]
        claims = [path for path in others if not (path / "reserved").exists() and is_locked(path / "index")]
        now = time.monotonic()
        self._seen_at = {path: self._seen_at.get(path, now) for path in claims}
        return [path for path in claims if now - self._seen_at[path] < PATIENCE_SECONDS]

    def sooner(self, claims: list[Path], part: Path, next_use: float) -> int:
        """How many of the claims are needed before a part, by the plans of the live runs and its own."""
        digests = {path: path.name[:32] for path in [part, *claims]}
        next_uses = demand.next_uses(self._directory.root / "runs", sorted(set(digests.values())))
        own_use = min(next_use, next_uses.get(digests[part], next_use))
        return sum(next_uses.get(digests[path], own_use) < own_use for path in claims)
