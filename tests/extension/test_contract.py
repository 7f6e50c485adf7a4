"""The contract of extensions: weights of rows, and one whose workers go by events in mid-epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from streamload import complexity
from streamload.batching import Measured, SizeDecided
from streamload.errors import StateMismatch
from streamload.extension import BatchRows, Event, Extension, RankPart, Run, WorkerPart, WorkerProcess
from streamload.loader.mixing.batch_size import BatchSizes
from streamload.loader.mixing.decisions import Mixing
from streamload.mixing import Summary
from streamload.steering import as_policy
from streamload.testing.resume import Layout
from streamload.testing.shards import read_oracle
from streamload.weights import RowWeights
from tests.support.extension_contract import ExtensionContract


class TestRowWeights(ExtensionContract):
    extension = RowWeights(complexity(1, 0))
    adds = ("weight",)
    state_keys = ("mean_weight",)
    damaged = ([1, 2], ["complexity", 0], ["complexity", "much"], "x", ["complexity", math.inf])
    options = MappingProxyType({"num_samples": 50})


def equal_weights(summary: Summary) -> dict[str, float] | None:
    """Decides twice, and remembers nothing."""
    return {source.name: 1.0 for source in summary.sources} if summary.step < 8 else None


class TestMixing(ExtensionContract):
    extension = Mixing(as_policy(equal_weights, ["0"]).every)
    adds = ()
    state_keys = ("steering", "reports")
    damaged = (3, {"steps": -1}, "x", {"0.0": {"sums": "x"}})
    options = MappingProxyType({"mixing": equal_weights})


class SameSize:
    """Is asked every other step, and leaves the size as it is."""

    every = 2

    def decide(self, measured: Measured, memory: Any) -> SizeDecided:
        return SizeDecided(None, (memory or 0) + 1, "as it is")


class TestBatchSizes(ExtensionContract):
    extension = BatchSizes()
    adds = ()
    state_keys = ("batch_policy", "step_times")
    damaged = (3, {"steps": 1, "decided": 2, "memory": None}, {"0": [1]}, {"0": [1, 1, 1, "x"]})
    options = MappingProxyType({"batch_policy": SameSize()})


LIMITS = (1984, 2500, 3000, 3200, 3300, 3400)
"""Of bytes; the images have 981 to 3332."""


class LargeInWorker(WorkerPart):
    """Tells which images have more bytes than a limit, which events set."""

    def start_epoch(self) -> None:
        self._limit = 0

    def apply(self, event: Event) -> None:
        self._limit = event.value

    def finish(self, values: dict[str, Any], rows: BatchRows) -> bytes:
        are_large = np.empty(len(rows), np.bool_)
        for shard in rows.by_shard():
            are_large[shard.places] = shard.facts(["image_bytes"])["image_bytes"] > self._limit
        return are_large.tobytes()


class LargeInRank(RankPart):
    """Sets limits: from the first batch on, and a higher one after the second."""

    adds = ("is_large",)

    def __init__(self, run: Run):
        self._run = run
        self._count = 0
        self._events: list[Event] = []

    def start_epoch(self, start: int) -> Sequence[Event]:
        if not start:
            self._events = [event._replace(position=0) for event in self._events[-1:]]
        return self._events

    def yielded(self, part: bytes, values: Mapping[str, Any]) -> dict[str, Any]:
        self._are_large = np.frombuffer(part, np.bool_)
        self._count += int(self._are_large.sum())
        if self._count >= 10 * (1 + len(self._events)):
            self._events.append(self._run.send(LIMITS[len(self._events)]))
        return {}

    def values(self, info: Any) -> dict[str, Any]:
        return {"is_large": torch.from_numpy(self._are_large.copy())}

    def state(self, position: int) -> dict[str, Any]:
        return {"large": {"count": self._count, "events": [list(event) for event in self._events]}}

    def load(self, state: Mapping[str, Any]) -> None:
        try:
            saved = state.get("large", {"count": 0, "events": []})
            count, events = int(saved["count"]), [Event(*event) for event in saved["events"]]
        except (TypeError, ValueError, KeyError):
            raise StateMismatch("not the state of large images") from None
        self._count, self._events = count, events


@dataclass(frozen=True)
class Large(Extension):
    name = "large"

    def in_worker(self, process: WorkerProcess) -> LargeInWorker:
        return LargeInWorker()

    def in_rank(self, run: Run) -> LargeInRank:
        return LargeInRank(run)


class TestEventsInMidEpoch(ExtensionContract):
    extension = Large()
    adds = ("is_large",)
    state_keys = ("large",)
    damaged = (3, {"count": 1}, {"count": 1, "events": [1]})
    layout = Layout(1, 1)  # its worker is ahead of the batches that were yielded
    layouts = (Layout(1, 1),)

    def test_an_event_holds_from_its_step_on_in_a_worker_that_is_ahead(self, shards, tmp_path):
        sizes = {
            key: len(members["jpg"]) for path in shards.glob("*.tar") for key, members in read_oracle(path)
        }
        with self.make(shards, cache_dir=tmp_path, num_workers=1) as loader:
            batches = list(loader)
            events = [Event(*event) for event in loader.state_dict()["large"]["events"]]
        positions = [event.position for event in events]
        assert len(set(positions)) > 1
        assert positions == sorted(positions)
        assert 10 < positions[0] < 50  # not at once: the worker was ahead
        for step, batch in enumerate(batches):
            limit = max([event.value for event in events if event.position <= 10 * step], default=0)
            assert batch["is_large"].tolist() == [sizes[key] > limit for key in batch["__key__"]]
