"""Means of a rank's reports by source where no policy reads them: for its page, `top` and trackers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamload.loader.batch_info import BatchInfo
from streamload.loader.signals import ALIGNMENT, LOSS, Reports, Rows, signal_of

_EVERY = 200
"""So many calls of `look` apart the sums are read, for which their device is waited for."""


class ReportedMeans:
    """The means of what was reported of each source over the last steps, on this rank.

    Args:
        names: of the sources.
    """

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._reports = Reports(len(names))
        self._looks, self._is_empty = 0, True

    def add(self, loss: Any, alignment: Any, info: BatchInfo, rows: Rows | None) -> None:
        """Take a report; see Loader.report."""
        for line, values in ((LOSS, loss), (ALIGNMENT, alignment)):
            if values is not None:
                self._reports.add(line, values, info, rows)
                self._is_empty = False

    def look(self) -> list[dict[str, Any]] | None:
        """Once a step: every 200 steps the loss and alignment of each source since the last time, else None.

        None stands for a mean of nothing, too.
        """
        self._looks += 1
        if self._looks % _EVERY or self._is_empty:
            return None
        sums = self._reports.read()
        means = [
            {
                "name": name,
                "loss": signal_of(sums, LOSS, place).mean,
                "alignment": signal_of(sums, ALIGNMENT, place).mean,
            }
            for place, name in enumerate(self._names)
        ]
        self._reports.clear()
        self._is_empty = True
        return means
