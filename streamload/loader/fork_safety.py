"""Fork safety: a child must not shut down its parent's workers."""

from __future__ import annotations

import multiprocessing.process
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch

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
        batches._shutdown = True
        # else the next iterator at its address is taken for it
        if getattr(batches, "_worker_pids_set", False):
            torch._C._remove_worker_pids(id(batches))
            batches._worker_pids_set = False
        for worker in getattr(batches, "_workers", ()):
            multiprocessing.process._children.discard(worker)  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_leave_workers_to_the_rank)
