"""The room that a process measures for shards that find none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamload.cache.tier import Tier
from streamload.worker import shortage as shortage_
from streamload.worker.shortage import Shortage

MIB = 1 << 20


def test_a_part_that_is_published_while_it_is_looked_at_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Tier(tmp_path / "tier", 64 * MIB)
    part = tier.claim("a" * 32)
    assert part is not None
    assert part.reserve(4 * MIB, 0.0)
    (part.path / "names").touch()
    (part.path / "data").write_bytes(bytes(4 * MIB))
    granted_bytes = shortage_.granted_bytes

    def then_publish(path: Path) -> int:
        granted = granted_bytes(path)
        part.publish()
        return granted

    monkeypatch.setattr(shortage_, "granted_bytes", then_publish)
    shortage: Any = Shortage.__new__(Shortage)
    shortage._tier = tier
    room = shortage._room({"a" * 32})
    assert 4 * MIB <= tier.budget.allowed_bytes - room.free_bytes < 8 * MIB
