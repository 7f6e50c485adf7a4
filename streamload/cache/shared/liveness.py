"""By what other processes of the same machine can tell that one has gone (or stands still), whatever it held.

An address means something only where it was made: in the same boot of the same kernel, and among processes
that see each other. Everywhere else nothing is known of it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from pathlib import Path

_PROC = Path("/proc")
_STANDING = frozenset("TtZXx")
"""Stopped, traced, or dead and not yet reaped."""


def own_address() -> str:
    """The address of this process; "" where the system has none to give."""
    with contextlib.suppress(OSError, IndexError):
        _, began = _look(os.getpid())
        return f"{_place()}.{os.getpid()}.{began}"
    return ""


def stands_still(address: str) -> bool:
    """Whether the process at an address has gone, or is stopped; False where that can't be known."""
    place, _, rest = address.partition(".")
    number, _, began = rest.partition(".")
    if not number.isdecimal() or not began.isdecimal() or not address.isascii():
        return False
    try:
        if place != _place():
            return False
        state, found = _look(int(number))
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, IndexError):
        return False
    return state in _STANDING or found != began


@functools.lru_cache(maxsize=1)
def _place() -> str:
    """This boot of this machine, and the processes among which a number means the same one."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text()
    seen = (_PROC / "self/ns/pid").readlink()
    return hashlib.blake2b(repr([boot, str(seen)]).encode(), digest_size=16).hexdigest()


def _look(number: int) -> tuple[str, str]:
    """The state of a process and when it began, in ticks since the boot (proc(5))."""
    fields = (_PROC / str(number) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]
