"""Fork safety: a child must not shut down its parent's workers."""

from __future__ import annotations

import os
import weakref
from typing import Any

from streamload.torch_internals import abandon_workers

_iterators: weakref.WeakSet[Any] = weakref.WeakSet()
"""torch's iterators over the workers of all loaders."""


def protect_workers(batches: Any) -> None:
    """Keep forked processes from shutting down the workers that torch's iterator has started."""
    _iterators.add(batches)


def _leave_workers_to_parent() -> None:
    """Keep torch and Python from ending the workers at the end of a process that didn't start them."""
    for batches in list(_iterators):
        abandon_workers(batches)


os.register_at_fork(after_in_child=_leave_workers_to_parent)
