"""Files of a tier that one thread keeps open, within this process's limit of open files.

Those that were used least recently are closed first, and opened anew when they are needed. So a low limit
costs time, never samples. Half-way is enough at first: a shard whose data is closed stays pinned by its lock;
only if that doesn't do, shards are closed entirely, and may be evicted and fetched again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from streamload import descriptors, limits

_SPARE_FILES = 128
"""Left to everything else in this process: fills, connections, batches, the training itself."""
_SPARE_SHARE = 4
"""But at most a quarter of the limit."""


class Holder(Protocol):
    """Something that keeps files open, and opens them again by itself."""

    def release(self) -> int:
        """Close what can be opened again as long as the rest is open; returns how many files that were."""

    def rest(self) -> int:
        """Close everything; returns how many files that were."""


class OpenFiles:
    """The holders of open files, by their last use. For the thread that creates it."""

    def __init__(self) -> None:
        self._open: OrderedDict[Holder, None] = OrderedDict()
        self._releasable: OrderedDict[Holder, None] = OrderedDict()  # those of them that may have data open
        self._shortages = descriptors.shortages
        descriptors.give_up_when_short(self.give_up)

    def __repr__(self) -> str:
        return f"<OpenFiles of {len(self._open)} holders, {len(self._releasable)} whole>"

    def use(self, holder: Holder) -> None:
        """Note that a holder is used: it is closed last, and not before another one is used."""
        for holders in (self._open, self._releasable):
            holders[holder] = None
            holders.move_to_end(holder)
        if descriptors.shortages != self._shortages:  # another thread couldn't open a file
            self.give_up()

    def forget(self, holder: Holder) -> None:
        """Note that a holder is closed for good."""
        self._open.pop(holder, None)
        self._releasable.pop(holder, None)

    def trim(self) -> None:
        """Close files while this process has nearly as many open as it may; call it after opening some."""
        most = limits.most_files()
        ceiling = most - min(_SPARE_FILES, most // _SPARE_SHARE)
        registered = descriptors.count()
        if registered > ceiling // 2:
            self._close(limits.open_files(at_least=registered) - ceiling)

    def give_up(self) -> bool:
        """Close half of the files; False if there are none."""
        self._shortages = descriptors.shortages
        return self._close(max(1, descriptors.count() // 2)) > 0

    def _close(self, files: int) -> int:
        """Close so many files if possible; returns how many were closed."""
        closed = 0
        while closed < files and len(self._releasable) > 1:
            holder, _ = self._releasable.popitem(last=False)
            closed += holder.release()
        while closed < files and len(self._open) > 1:
            holder, _ = self._open.popitem(last=False)
            closed += holder.rest()
        return closed
