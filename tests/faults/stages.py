"""Which part of a shard's life a filling process is in, told from inside it without touching what is shipped.

`tell_stages` wraps the tier's public methods, and os.write, in a forked process.
"""

import os
import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from streamload.cache.budget import Budget
from streamload.cache.part import Part
from streamload.cache.tier import Tier
from tests.faults.data import Data
from tests.support.kills import Stage


def tell_stages(stage: Stage, data: Data) -> None:
    """From now on, this process says what it is doing. For a process that ends soon: it can't be undone."""
    sizes = {digest: len(content) for digest, content in data.content.items()}
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
            now.part, now.written = part, 0
            enter("taking over" if part.orphan is not None else "filling 0")
        return part

    def told_forget_orphan(part: Part) -> None:
        forget_orphan(part)
        if getattr(now, "stage", "") == "taking over":
            filling()

    def filling() -> None:
        quarter = min(3, 4 * now.written // sizes[now.part.digest])
        if now.stage != f"filling {quarter}":
            enter(f"filling {quarter}")

    write = os.write

    def told_write(descriptor: int, chunk: Any) -> int:
        written = write(descriptor, chunk)
        if hasattr(now, "part"):  # of a thread that fills: what it writes so is data
            now.written += written
            if now.stage.startswith("filling"):
                filling()
        return written

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "os.rename" and getattr(now, "stage", "") == "reserving":
            source, target = os.fspath(args[0]), os.fspath(args[1])
            if "/trash/" in str(target) and "/shards/" in str(source):
                enter("evicting")

    os.write = told_write
    Tier.claim = told_claim  # type: ignore[method-assign]
    Part.forget_orphan = told_forget_orphan  # type: ignore[method-assign]
    Part.publish = within("publishing")(Part.publish)  # type: ignore[method-assign]
    Budget.reserve = within("reserving")(Budget.reserve)  # type: ignore[method-assign]
    sys.addaudithook(hook)


def state_of(stage: str) -> str:
    """The state that a kill hit, in the words of the table; of a fill also how far it was."""
    name, _, quarter = stage.partition(" ")
    if name != "filling":
        return stage or "starting"
    return f"{25 * int(quarter)}–{25 * int(quarter) + 25} % filled"
