"""Which part of a shard's life a filling process is in, told from inside it without touching what is shipped.

`tell_stages` wraps the tier's public methods in a forked process; where the process is within a fill is read
from the disk once it is dead (`state_of`).
"""

import os
import sys
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from benchmarks.faults.data import Data
from streamload.cache.tier import Part, Tier
from streamload.testing.kills import Stage

STATES = ("claiming", "filling", "publishing", "evicting", "taking over")


def tell_stages(stage: Stage) -> None:
    """From now on, this process says what it is doing. For a process that ends soon: it can't be undone."""
    now = threading.local()  # of each thread: "evicting" is told by an event without arguments of ours

    def enter(name: str) -> str:
        before, now.stage = getattr(now, "stage", "reading"), name
        stage.enter(name)
        return before

    def within(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(method)
            def told(*args: Any, **options: Any) -> Any:
                before = enter(name)
                try:
                    return method(*args, **options)
                finally:
                    enter("reading" if name == "publishing" else before)

            return told

        return wrap

    claim, forget_orphan = Tier.claim, Part.forget_orphan

    def told_claim(tier: Tier, *args: Any, **options: Any) -> Part | None:
        enter("claiming")
        part = claim(tier, *args, **options)
        if part is None:
            enter("reading")
        else:
            enter(f"{'taking over' if part.orphan is not None else 'filling'} {part.path.name}")
        return part

    def told_forget_orphan(part: Part) -> None:
        forget_orphan(part)
        if getattr(now, "stage", "").startswith("taking over"):
            enter(f"filling {part.path.name}")

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "os.rename" and getattr(now, "stage", "") == "reserving":
            source, target = os.fspath(args[0]), os.fspath(args[1])
            if "/trash/" in str(target) and "/shards/" in str(source):
                enter("evicting")

    Tier.claim = told_claim  # type: ignore[method-assign]
    Part.forget_orphan = told_forget_orphan  # type: ignore[method-assign]
    Part.publish = within("publishing")(Part.publish)  # type: ignore[method-assign]
    Tier.reserve = within("reserving")(Tier.reserve)  # type: ignore[method-assign]
    sys.addaudithook(hook)


def state_of(stage: str, root: Path, data: Data) -> str:
    """The state that a kill hit, in the words of the table; of a fill also how far it was."""
    name, _, part = stage.partition(" ")
    if stage.startswith("taking over"):
        return "taking over"
    if name != "filling":
        return name or "starting"
    try:
        filled = (root / "parts" / part / "data").stat().st_size
    except OSError:
        filled = 0
    quarter = min(3, 4 * filled // len(data.content[part[:32]]))
    return f"{25 * quarter}–{25 * quarter + 25} % filled"
