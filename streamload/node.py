"""This node and process, as other processes of a run name and watch them.

An address names a process among those of its machine: whether it is dead or stopped can be seen from there,
and isn't known anywhere else. Nothing here compares clocks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import socket
from pathlib import Path

_PROC = Path("/proc")
_DEAD_STATES = frozenset("ZXx")
"""Dead, and not yet reaped."""
_STOPPED_STATES = frozenset("Tt")
"""Stopped, or traced."""
_HOST = re.compile(r"[A-Za-z0-9._-]{1,64}")


def host_name() -> str:
    """The name of this host, for messages; "" if it has none that is safe to print."""
    name = socket.gethostname()
    return name if _HOST.fullmatch(name) else ""


def own_address() -> str:
    """The address of this process: others on the same machine can tell from it whether the process is dead.

    It is valid only in the same boot of the same kernel and the same PID namespace; "" if the system has
    none.
    """
    with contextlib.suppress(OSError, IndexError):
        _, start = _process_state(os.getpid())
        return f"{machine()}.{os.getpid()}.{start}"
    return ""


def is_dead(address: str) -> bool:
    """True if the process at an address is dead; False if that isn't known here."""
    return _state(address) in _DEAD_STATES


def is_dead_or_stopped(address: str) -> bool:
    """True if the process at an address is dead or stopped; False if that isn't known here."""
    return _state(address) in _DEAD_STATES | _STOPPED_STATES


@functools.lru_cache(maxsize=1)
def machine() -> str:
    """This boot of this machine, and the PID namespace.

    Raises:
        OSError: the system doesn't tell.
    """
    boot = (_PROC / "sys/kernel/random/boot_id").read_text()
    namespace = (_PROC / "self/ns/pid").readlink()
    return hashlib.blake2b(repr([boot, str(namespace)]).encode(), digest_size=16).hexdigest()


def _state(address: str) -> str:
    """The state of the process at an address, as in proc(5); "" if that isn't known here."""
    place, _, process = address.partition(".")
    number, _, start = process.partition(".")
    if not number.isdecimal() or not start.isdecimal() or not address.isascii():
        return ""
    try:
        if place != machine():
            return ""
        state, started = _process_state(int(number))
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    except (OSError, IndexError):
        return ""
    return state if started == start else "X"  # the number was given to another process


def _process_state(number: int) -> tuple[str, str]:
    """The state of a process and its start time, in ticks since the boot (proc(5))."""
    fields = (_PROC / str(number) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]
