"""What an origin counts, for tests that look at it."""

from __future__ import annotations

import collections


class Tally(collections.Counter[str]):
    """Counts by name, as `streamload.metrics.Counts` takes them."""

    def add(self, name: str, n: int = 1) -> None:
        self[name] += n
