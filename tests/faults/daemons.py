"""Row 21: daemons that fill a shared tier are told to end, killed, or stopped, beside a reader."""

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

from streamload.cache.shard import Shard
from streamload.cache.shared.objects import Objects
from streamload.cache.shared.sharing import SharedOptions, Sharing
from streamload.cache.shared.tier import SharedTier
from streamload.daemon.options import DaemonOptions, ServiceOptions
from streamload.daemon.service import Service
from streamload.errors import CacheCorrupt
from streamload.metrics import Counters
from streamload.origins.origin import Origin, open_origin
from tests.faults.data import Data
from tests.faults.oracle import Attempt
from tests.faults.readers import QUICK, Reading, read_in_child
from tests.faults.rows import Row
from tests.support.kills import Child, Hit, Moment, Stage, kill_loop
from tests.support.metadata import MetadataServer

_BYTES_PER_SECOND = 2e6
"""Of each connection: a shard takes some 50 ms, so that a daemon is met at work."""
_LEASE_SECONDS = 0.6
_LONGEST_SECONDS = 0.4
"""Behind the start of a daemon, within which it is killed."""
_KILLS = 3
_END_SECONDS = 60.0
_NOTICES = {
    "SIGTERM, 30 s": ("", 30.0),
    "SIGTERM, 120 s": ("", 120.0),
    "SIGTERM, no time": ("", 0.0),
    "aws, 120 s": ("aws", 120.0),
    "gcp, 30 s": ("gcp", 30.0),
    "azure, 30 s": ("azure", 30.0),
}


class Shared:
    """A shared tier, what writes it and what reads through it.

    Args:
        url, options: of the tier; without, it is in a folder.
    """

    def __init__(
        self, attempt: Attempt, data: Data, url: str = "", options: dict[str, Any] | None = None
    ) -> None:
        self.attempt, self.data = attempt, data
        self.url, self.options = url or str(attempt.place / "shared"), options or {}

    def objects(self) -> Objects:
        """What it is made of."""
        return Objects(self.url, self.options)

    def work(self, name: str, **more: Any) -> Callable[[Stage], Any]:
        """What a daemon does that has a tier of its own, in the process of a Child."""
        asked = ServiceOptions(
            urls=tuple(self.data.urls),
            shared_cache=self.url,
            shared_cache_options=self.options,
            cache_dir=self.attempt.place / f"node-{name}",
            cache_size="1GB",
            concurrency=2,
            once=True,
            notices="none",
            listen="none",
            daemon=DaemonOptions(look_seconds=0.05, retry_seconds=0.05, stopped_seconds=0.6, origin=QUICK),
            lease_seconds=_LEASE_SECONDS,
        )
        asked = dataclasses.replace(asked, **more)

        def work(stage: Stage) -> Any:
            stage.enter("starting")
            with Service(asked) as service:
                stage.enter("working")
                status = service.run()
            return [status.done, status.held, status.wanted, dict(status.failed)]

        return work

    def reading(self, **more: Any) -> Callable[[Stage], Any]:
        """A reader that asks the shared tier first, in the process of a Child; `more` is for Reading."""

        def reads(stage: Stage) -> Any:
            sharing = Sharing(SharedOptions(self.url, self.options), Counters())

            def opened(shard: Shard, stop: threading.Event, counts: Counters) -> Origin:
                origin = open_origin(shard.url, options=QUICK, counters=counts, stop=stop)
                return sharing.through(shard, origin, stop)

            with closing(sharing):
                shards = [*self.data.shards[3:], *self.data.shards[:3]]
                return read_in_child(Reading(self.attempt.root, shards, open_origin=opened, **more))

        return reads

    def check_reader(self, reader: Child) -> None:
        """N, D, B: it got all, once, and right."""
        result = reader.finish(_END_SECONDS)
        self.attempt.check_no_error(result["error"])
        self.attempt.check_all(self.data.differences(result["seen"]))

    def check_through(self, result: Sequence[Any]) -> None:
        """N: a daemon that came to its end held all that was wanted."""
        _, held, wanted, failed = result
        self.attempt.check("N", held == wanted == len(self.data.shards), f"{held} of {wanted}: {failed}")

    def check(self, *, all_held: bool) -> None:
        """B, C: what is there is the origin's, verified; N: all of it is; T: no lease is left."""
        objects = self.objects()
        tier = SharedTier(objects, Counters())
        for shard in self.data.shards:
            try:
                held = tier.look(shard)
                found = None if held is None else tier.read(shard, held, 0, held.size)
            except CacheCorrupt as exc:
                self.attempt.check("C", False, str(exc))
                continue
            self.attempt.check("N", found is not None or not all_held, f"{shard.name} isn't there")
            same = found is None or found == self.data.content[shard.digest]
            self.attempt.check("B", same, f"{shard.name} has other bytes than the origin's")
        left = objects.names("leases")
        self.attempt.check("T", not left, f"left: {left}")

    def finish(self, **more: Any) -> None:
        """The next daemon brings what is missing, and takes away what the dead have left."""
        objects = self.objects()
        deadline = time.monotonic() + _END_SECONDS
        with Child(self.work("next", once=False, **more)) as child:
            child.stage.wait_for("working", _END_SECONDS)
            while time.monotonic() < deadline and (objects.names("leases") or not self._has_all()):
                time.sleep(0.02)
            os.kill(child.pid, signal.SIGTERM)
            child.finish(_END_SECONDS)
        self.check(all_held=True)

    def _has_all(self) -> bool:
        names = self.objects().names("shards")
        return sum(name.endswith("/index") for name in names) == len(self.data.shards)


def told_to_end(attempt: Attempt) -> None:
    """A daemon hears that its machine goes: it finishes or hands back what it has, and ends well."""
    data = _data(attempt)
    shared = Shared(attempt, data)
    cloud, seconds = _NOTICES[attempt.variant]
    with ExitStack() as stack:
        more: dict[str, Any] = {"grace_seconds": seconds}
        server = stack.enter_context(MetadataServer(cloud)) if cloud else None  # type: ignore[arg-type]
        if server is not None:
            more |= {"notices": cloud, "metadata": server.bases, "poll_seconds": 0.02}
        child = stack.enter_context(Child(shared.work("told", **more)))
        reader = stack.enter_context(Child(shared.reading()))
        attempt.check("L", child.stage.wait_for("working", _END_SECONDS), "the daemon didn't start")
        time.sleep(attempt.rng.uniform(0, _LONGEST_SECONDS))
        began = time.monotonic()
        if server is not None:
            server.take_away(seconds)
        elif child.join(0) is None:
            os.kill(child.pid, signal.SIGTERM)
        status = child.join(_END_SECONDS)
        attempt.happened[attempt.variant] += 1
        attempt.check("L", status == 0, f"it ended with {status}: {child.error[-300:]}")
        attempt.check_seconds(time.monotonic() - began, max(5.0, seconds), "to its end it took")
        shared.check(all_held=False)  # nothing of it is left as a lease
        shared.check_reader(reader)
    shared.finish()


def killed(attempt: Attempt) -> None:
    """One of so many daemons is killed again and again; the others take over what it had."""
    data = _data(attempt)
    shared = Shared(attempt, data)
    others = int(attempt.variant[0]) - 1

    def look(hit: Hit) -> None:
        attempt.happened["killed"] += hit.stage is not None

    with ExitStack() as stack:
        children = [stack.enter_context(Child(shared.work(f"other-{n}"))) for n in range(others)]
        reader = stack.enter_context(Child(shared.reading()))
        moments = [Moment("working", attempt.rng.uniform(0, _LONGEST_SECONDS)) for _ in range(_KILLS)]
        _, result = kill_loop(shared.work("victim"), moments, after_kill=look)
        shared.check_through(result)
        for child in children:
            shared.check_through(child.finish(_END_SECONDS))
        shared.check_reader(reader)
    if not attempt.happened["killed"]:  # it was through before: with a tier of its own it begins anew
        with Child(shared.work("late"), kill_at=Moment("working")) as child:
            child.join(_END_SECONDS)
            attempt.happened["killed"] += child.killed_in is not None
    shared.finish()


def stopped(attempt: Attempt) -> None:
    """A daemon is stopped in mid-work until others have done it, and goes on: what comes late is right."""
    data = _data(attempt)
    shared = Shared(attempt, data)
    others = int(attempt.variant[0]) - 1
    with ExitStack() as stack:
        victim = stack.enter_context(Child(shared.work("victim")))
        attempt.check("L", victim.stage.wait_for("working", _END_SECONDS), "the daemon didn't start")
        time.sleep(attempt.rng.uniform(0, _LONGEST_SECONDS / 2))
        if victim.join(0) is None:
            victim.stop()
            attempt.happened["stopped"] += 1
        children = [stack.enter_context(Child(shared.work(f"other-{n}"))) for n in range(others)]
        reader = stack.enter_context(Child(shared.reading()))
        for child in children:
            shared.check_through(child.finish(_END_SECONDS))
        shared.check_reader(reader)
        if victim.status is None:
            victim.go_on()
        shared.check_through(victim.finish(_END_SECONDS))
    shared.finish()


def _data(attempt: Attempt) -> Data:
    return attempt.borrow(attempt.seed, spawn=True, bytes_per_second_per_connection=_BYTES_PER_SECOND)


ROWS = [
    Row(
        21,
        "daemon told to end",
        "SIGTERM, notices of AWS, GCP and Azure: 30 s, 120 s, none",
        "NDBTCL",
        "It finishes what fits, hands back the rest, and ends with 0 in its time",
        told_to_end,
        count=60,
        variants=tuple(_NOTICES),
    ),
    Row(
        21,
        "daemon killed",
        "SIGKILL of one of one, two or three daemons, again and again",
        "NDBTC",
        "Others take over what it had; a reader beside them doesn't notice",
        killed,
        count=140,
        variants=("1 daemon", "2 daemons", "3 daemons"),
    ),
    Row(
        21,
        "daemon stopped",
        "SIGSTOP of one of two or three daemons until others have done its work, then CONT",
        "NDBTC",
        "What comes late is right, and takes nothing from anybody",
        stopped,
        count=40,
        variants=("2 daemons", "3 daemons"),
    ),
]
