"""Fork safety: a child must not shut down its parent's workers."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

from streamload.torch_internals import abandon_workers

_iterators: weakref.WeakSet[Any] = weakref.WeakSet()
"""Torch's, over the workers of all loaders."""


def watch_over(batches: Any) -> None:
    """Have a forked process leave the workers alone that torch's iterator has started."""
    _iterators.add(batches)


def here_only(act: Callable[..., object]) -> Callable[..., None]:
    """What does something in this process, and nothing in one that is forked from it."""
    pid = os.getpid()

    def act_here(*args: Any) -> None:
        if os.getpid() == pid:
            act(*args)

    return act_here


def _leave_workers_to_the_rank() -> None:
    """Keep torch and Python from ending the workers at the end of a process that didn't start them."""
    for batches in list(_iterators):
        abandon_workers(batches)


os.register_at_fork(after_in_child=_leave_workers_to_the_rank)
