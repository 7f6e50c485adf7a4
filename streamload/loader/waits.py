"""For what a training loop has waited: for which shards, added up over batches, and in an epoch (step K).

One slow shard holds up its lane, and so every batch, each for a moment. A batch brings along for which shards
its worker stood still while the training loop waited; the time that the loop waited for the batch is theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from streamload.metrics import Snapshot, format_bytes
from streamload.urls import redact

logger = logging.getLogger("streamload")

_SHORT_SECONDS = 10.0
_MUCH, _LITTLE = 0.5, 0.1
"""An epoch is reported that takes longer, and waits for so large a share of it; a cause is no little part."""
_SAID_SECONDS = 30.0
_SAID_SHARE = 0.5
"""A shard is logged once it has cost so much, and such a share of all waiting; then at twice as much."""
_KEPT = 64
"""Of so many shards the time is kept: of those that cost the most."""
_SHOWN = 4


class ShardWaits:
    """The time that one rank's training loop waited for each shard.

    Args:
        url: gives the URL of a shard by its place in the run.
    """

    def __init__(self, url: Callable[[int], str]) -> None:
        self._url = url
        self._by_shard_ns: dict[int, int] = {}
        self._said_ns = _SAID_SECONDS * 1e9

    def add(self, blocked: Sequence[tuple[int, int]], waited_ns: int, total_ns: int) -> None:
        """Count what one batch waited for.

        Args:
            blocked: shards, and for how many nanoseconds the worker of the batch stood still for each.
            waited_ns: how long the training loop waited for the batch.
            total_ns: how long it has waited altogether.
        """
        most_ns = sum(ns for _, ns in blocked)
        for shard, ns in blocked:
            own_ns = ns if most_ns <= waited_ns else ns * waited_ns // most_ns
            self._by_shard_ns[shard] = self._by_shard_ns.get(shard, 0) + own_ns
        worst = max(self._by_shard_ns, key=self._by_shard_ns.__getitem__)
        worst_ns = self._by_shard_ns[worst]
        if worst_ns >= self._said_ns and worst_ns >= _SAID_SHARE * total_ns:
            self._said_ns = 2 * worst_ns
            logger.warning(
                "one shard is slow: %.0f of the %.0f s in which training waited for data were for %s",
                *(worst_ns / 1e9, total_ns / 1e9, redact(self._url(worst))),
            )
        if len(self._by_shard_ns) > _KEPT:
            kept = sorted(self._by_shard_ns.items(), key=lambda item: item[1])[-_KEPT // 2 :]
            self._by_shard_ns = dict(kept)

    def worst(self) -> dict[str, int]:
        """The nanoseconds of the shards that cost the most, by their URLs without secrets, most first."""
        most = sorted(self._by_shard_ns.items(), key=lambda item: -item[1])[:_SHOWN]
        return {redact(self._url(shard)): ns for shard, ns in most}


def report_waiting(epoch: int, seconds: float, done: Snapshot, workers: int) -> None:
    """Log at the end of an epoch that most of it was waiting for data, and for what.

    Args:
        epoch: its number.
        seconds: how long it took.
        done: what happened in it.
        workers: processes that decode; 0: the training's own.
    """
    waited = done.data_wait_seconds
    if seconds < _SHORT_SECONDS or waited < _MUCH * seconds:
        return
    busy = max(1, workers) * seconds
    for_bytes, at_work = done.bytes_wait_seconds / busy, done.transform_seconds / busy
    came = (done.origin_bytes + done.shared_bytes) / seconds
    if max(for_bytes, at_work) < _LITTLE:
        why = "neither bytes nor decoding: for workers to start, or for a machine that is busy otherwise"
    elif for_bytes >= at_work:
        why = (
            f"bytes: workers waited for them {min(1.0, for_bytes):.0%} of the time, while "
            f"{format_bytes(came)}/s came"
        )
    else:
        why = (
            f"decoding: the {max(1, workers)} workers were busy {min(1.0, at_work):.0%} of the time; give "
            f"more num_workers, a lighter preprocess, or prepared shards"
        )
    logger.warning(
        "epoch %d: training waited for data %.0f of %.0f s, mostly for %s", epoch, waited, seconds, why
    )
