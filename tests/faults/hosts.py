"""Row 21 on hosts of their own: two daemons and a reader on a network, and the link of one is cut in work."""

import importlib.util
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

from streamload.daemon.options import DaemonOptions
from tests.faults.daemons import Shared
from tests.faults.data import Data
from tests.faults.oracle import Attempt
from tests.faults.readers import QUICK
from tests.faults.rows import Row
from tests.support.kills import Child, Stage
from tests.support.networks import Switch, why_no_network
from tests.support.s3 import S3Server

_BYTES_PER_SECOND = 2e5
"""Of each connection: a shard takes half a second, so that a host is met at work."""
_LATEST_SECONDS = 0.8
"""Behind the start of all, within which a link is cut."""
_LONGEST_SECONDS = 2.0
"""For which it is cut."""
_END_SECONDS = 120.0
_LIMIT_SECONDS = 400.0
_CALM: dict[str, Any] = {
    "daemon": DaemonOptions(look_seconds=1.0, retry_seconds=0.05, stopped_seconds=0.6, origin=QUICK),
    "lease_seconds": 2.0,
}
"""The store answers some ten requests a second: daemons look and beat less often than at a folder."""
_VICTIM, _OTHER, _READER = 2, 3, 4
"""The hosts, by their numbers on the switch."""


def link_cut(attempt: Attempt) -> None:
    """Hosts reach the origin and an S3 store over a switch; the link of one is cut in work, and mended."""

    def alone(stage: Stage) -> Any:
        _hosts(attempt, Switch())
        return [attempt.wrong, attempt.happened]

    with Child(alone, limit_seconds=_LIMIT_SECONDS) as child:
        wrong, happened = child.finish(_LIMIT_SECONDS)
    attempt.check_all(tuple(found) for found in wrong)
    attempt.happened.update(happened)


def _hosts(attempt: Attempt, switch: Switch) -> None:
    server = {"host": switch.address, "bytes_per_second_per_connection": _BYTES_PER_SECOND}
    with ExitStack() as stack:
        data = stack.enter_context(closing(Data(attempt.place / "data", attempt.seed, spawn=True, **server)))
        store = stack.enter_context(S3Server(switch.address))
        store.create_bucket("near")
        shared = Shared(attempt, data, "s3://near/tier", store.storage_options)
        work = {
            _VICTIM: shared.work("victim", **_CALM),
            _OTHER: shared.work("other", **_CALM),
            _READER: shared.reading(deadline_seconds=_END_SECONDS),
        }
        hosts = {
            n: stack.enter_context(Child(_on(switch, n, work[n]), limit_seconds=_LIMIT_SECONDS)) for n in work
        }
        for host in hosts.values():
            attempt.check("L", host.stage.wait_for("working", _END_SECONDS), "a host didn't start")
        time.sleep(attempt.rng.uniform(0, _LATEST_SECONDS))
        number = _READER if attempt.variant == "the reader's" else _VICTIM
        switch.cut(number)
        attempt.happened["links cut in work"] += hosts[number].join(0) is None
        if attempt.variant == "a daemon's, until the other is through":
            shared.check_through(hosts[_OTHER].finish(_END_SECONDS))
        else:
            time.sleep(attempt.rng.uniform(0, _LONGEST_SECONDS))
        switch.mend(number)
        shared.check_reader(hosts[_READER])
        for daemon in (hosts[_VICTIM], hosts[_OTHER]):
            shared.check_through(daemon.finish(_END_SECONDS))
        shared.finish(**_CALM)


def _on(switch: Switch, number: int, work: Callable[[Stage], Any]) -> Callable[[Stage], Any]:
    """The work, on a host of its own."""

    def joined(stage: Stage) -> Any:
        switch.join(number)
        stage.enter("working")
        return work(stage)

    return joined


def _why_not() -> str:
    if importlib.util.find_spec("moto") is None:
        return "moto isn't installed: pip install 'moto[server]'"
    return why_no_network()


ROWS = [
    Row(
        21,
        "link cut",
        "two daemons and a reader, each in a network namespace; the link of one is cut in work, and mended",
        "NDBTC",
        "The other daemon does the work meanwhile; a host goes on where it was when its link is back",
        link_cut,
        count=30,
        short=1,
        variants=("a daemon's", "a daemon's, until the other is through", "the reader's"),
        needs=_why_not,
    ),
]
