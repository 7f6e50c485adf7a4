"""Random cases that take turns: `make deep` runs a third of them, and the commit says which."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

_Case = TypeVar("_Case")
TURNS = 3


def turn_of_commit() -> int:
    """Which third has its turn, from 0; the first where there is no commit."""
    command = ["git", "rev-parse", "HEAD"]
    answer = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return int(answer.stdout.strip() or "0", 16) % TURNS


TURN = turn_of_commit()


def third(cases: Sequence[_Case], turn: int = TURN) -> Sequence[_Case]:
    """The cases whose turn it is: each is in one of the turns."""
    return cases[turn % TURNS :: TURNS]
