"""What a line of the table is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.faults.oracle import Attempt

Function = Callable[[Attempt], None]


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        number: of the table in docs/results/faults.md; `name` tells rows of one number apart.
        fault: what goes wrong, in words.
        holds: letters of oracle.py that are checked.
        proves: what a reader of the table learns if it passes.
        attempt: makes one attempt.
        variants: the forms of the fault; attempt i takes them in turn.
        count: attempts at full count.
        short: attempts in the tests (each variant once by default).
        needs: says why the row can't be run here; empty if it can.
    """

    number: int
    name: str
    fault: str
    holds: str
    proves: str
    attempt: Function
    count: int
    variants: Sequence[str] = ("",)
    short: int = 0
    needs: Callable[[], str] = lambda: ""
