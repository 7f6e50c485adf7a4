"""The log of decisions as a run writes it: opened with the first epoch, continued by a resumed run (step K).

All ranks follow it, so that the place in it is part of every state; rank 0 writes the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamload.errors import OptionError
from streamload.mixing.state import LogState
from streamload.order.events import WEIGHTS, Event, sizes_to_json, weights_to_json
from streamload.ranks.distributed import gather
from streamload.steering.decisions import SEQUENCE, DecisionLog

if TYPE_CHECKING:
    from streamload.extension import Position, Run


class RunLog:
    """The log of one loader.

    Args:
        path: of its file.
        run: of the loader.
        by: the policy, for whoever reads the file; JSON-able.
        state: the place at which a resumed run continues; None: the log begins with this run.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        run: Run,
        by: Mapping[str, Any],
        state: LogState | None,
    ):
        self._path, self._run, self._by = Path(path), run, by
        self._state = state
        self._log: DecisionLog | None = None  # until the first epoch

    @property
    def state(self) -> LogState | None:
        """The place after the last line; None before the first epoch of a new log."""
        if self._log is None or self._state is None:
            return self._state
        return self._state._replace(place=self._log.place)

    def begin_epoch(self, position: Position, step: int, loss_weights: Sequence[float] | None = None) -> None:
        """Open the log at the first epoch; note that a sequence begins, if this isn't the last one's.

        Args:
            position: at which the epoch begins.
            step: of the run.
            loss_weights: of the sources, in effect; None: 1.

        Raises:
            OptionError: the file can't be written; on all ranks that torch.distributed joins.
        """
        since = {
            "step": step,
            "epoch": position.epoch,
            "sequence": position.sequence,
            "position": position.position,
            **weights_to_json(position.events),
            **({} if loss_weights is None else {"loss_weights": list(loss_weights)}),
            **({} if position.base_batch is None else {"batch_sizes": sizes_to_json(position.events)}),
        }
        if self._log is None:
            self._log = self._opened(since)
        if self._state is None:
            self._state = LogState(self._log.place, position.sequence)
        elif self._state.sequence != position.sequence:
            self._log.add(SEQUENCE, since)
            self._state = self._state._replace(sequence=position.sequence)

    def record(self, step: int, event: Event | None, reason: Mapping[str, Any]) -> None:
        """Append an event that was set or decided; None: it was decided to leave the weights as they are.

        Not before the first epoch, nor between two sequences: the line at which one begins has its weights.

        Args:
            step: of the run.
            event: of its weights or of its batch size.
            reason: JSON-able.
        """
        position = self._run.position
        if self._log is None or self._state is None or position.sequence != self._state.sequence:
            return
        if event is None:
            event = Event(position.position, WEIGHTS, {"weights": None, "shares": None})
        line = {"step": step, "epoch": position.epoch, "sequence": position.sequence}
        self._log.add(event.kind, {**line, "position": event.position, **event.value, **reason})

    def _opened(self, since: Mapping[str, Any]) -> DecisionLog:
        error = ""
        run = {"order": self._run.identity, **self._by}
        log = DecisionLog(self._path if self._run.rank == 0 else None, run)
        try:
            log.begin(None if self._state is None else self._state.place, since)
        except OptionError as exc:
            error = str(exc)
        for message in gather(error, self._run.world_size):
            if message:
                raise OptionError(message)
        return log
