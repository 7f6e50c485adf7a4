"""Where the bytes of the tasks that a daemon brings come from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from streamload.cache.shard import Shard, shard_of
from streamload.daemon.throttle import Throttle
from streamload.derived.prepared import PreparedOrigin
from streamload.derived.recipes import Recipes
from streamload.metrics import Counters
from streamload.origins.access import Named
from streamload.origins.origin import Origin, OriginOptions, open_origin

Through = Callable[[Shard, Origin, threading.Event], Origin]
"""Puts something nearer in front of an origin."""


@dataclass(frozen=True, slots=True)
class TaskOrigins:
    """Opens origins: an Ahead's `open_origin`.

    Attributes:
        counts: of what arrives.
        storage_options: for origins.
        patience: of their transfers.
        throttle: caps what all of them take.
        recipes: by which tasks are prepared.
        through: puts something nearer in front of a task's origin.
        through_source: the same, for the shard that a task is prepared of.
        named: where a plan lists the tasks: the places that the user named; None: the user lists them.
    """

    counts: Counters
    storage_options: dict[str, Any] | None = field(repr=False)
    patience: OriginOptions
    throttle: Throttle
    recipes: Recipes
    through: Through | None = None
    through_source: Through | None = None
    named: Named | None = None

    def __call__(self, task: Shard, stop: threading.Event) -> Origin:
        """The origin of a task's bytes; the event ends its waits."""
        far = open_origin(task.url, self.storage_options, self.patience, self.counts, stop, self.named)
        found = self.throttle.watched(far, stop)
        if task.recipe:
            if self.through_source is not None:
                found = self.through_source(shard_of(task.url, self.storage_options), found, stop)
            found = PreparedOrigin(found, self.recipes[task.recipe])
        return found if self.through is None else self.through(task, found, stop)
