"""Pages that a process serves, asked for once."""

from __future__ import annotations

import urllib3


def get(url: str) -> tuple[int, str]:
    """The status and text of an answer."""
    with urllib3.PoolManager(retries=False, timeout=5.0) as pools:
        answer = pools.request("GET", url)
        return answer.status, answer.data.decode()
