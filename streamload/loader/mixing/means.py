"""Means of a rank's reports by source where no policy reads them: for its page, `top` and trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamload.extension import RankPart, YieldedInfo
from streamload.loader.mixing.reports import ALIGNMENT, LOSS, Reports, Rows, signal_of

_EVERY = 200
"""So many steps apart the sums are read, for which their device is waited for."""


class ReportedMeans(RankPart):
    """The means of what was reported of each source over the last steps, on this rank.

    Args:
        names: of the sources.
    """

    def __init__(self, names: Sequence[str]):
        self.takes_reports = True
        self.reported: list[dict[str, Any]] = []
        self._names = names
        self._forget()

    def _forget(self) -> None:
        self._reports = Reports(len(self._names))
        self._steps, self._is_empty = 1, True

    def report(self, values: Mapping[str, Any], info: YieldedInfo, rows: Rows | None) -> None:
        """Take a report; see Loader.report."""
        for line, name in ((LOSS, "loss"), (ALIGNMENT, "alignment")):
            if values[name] is not None:
                self._reports.add(line, values[name], info, rows)
                self._is_empty = False

    def load(self, state: Mapping[str, Any]) -> None:
        """Forget what was reported in another run."""
        self._forget()

    def before_batch(self) -> None:
        """Every 200 steps read the loss and alignment of each source since the last time."""
        self._steps += 1
        if self._steps % _EVERY or self._is_empty:
            return
        sums = self._reports.read()
        self.reported = [
            {
                "name": name,
                "loss": signal_of(sums, LOSS, place).mean,
                "alignment": signal_of(sums, ALIGNMENT, place).mean,
            }
            for place, name in enumerate(self._names)
        ]
        self._reports.clear()
        self._is_empty = True
