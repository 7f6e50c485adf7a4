"""The status server of a daemon: /metrics (for Prometheus), /healthz and /status; on localhost by default.

Its /metrics has the daemon's own numbers and those of the runs of its node. It serves no secrets, as shards
are named without users and queries.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from streamload.daemon.status import Status
from streamload.observe.exposition import CONTENT_TYPE, exposition
from streamload.observe.page import read_runs
from streamload.observe.page_server import Page, PageServer

DEFAULT_LISTEN = "127.0.0.1:9433"
_STALE_SECONDS = 300.0
"""A daemon is unhealthy after this long without a look."""

METRICS: dict[str, tuple[str, str, Callable[[Status], float]]] = {
    "shards_wanted": ("gauge", "shards in the window", lambda s: s.wanted),
    "shards_held": (
        "gauge",
        "those that are held; near wanted: readers find all that they need",
        lambda s: s.held,
    ),
    "shards_working": ("gauge", "those that this daemon works on", lambda s: len(s.working)),
    "shards_elsewhere": ("gauge", "those that others have a lease of", lambda s: s.elsewhere),
    "origins_away": (
        "gauge",
        "servers and buckets that are down, or refuse credentials, and are waited for",
        lambda s: len(s.waiting_for),
    ),
    "shards_failing": ("gauge", "those that could not be had lately", lambda s: len(s.failed)),
    "shards_brought_total": ("counter", "tasks that this daemon has brought", lambda s: s.done),
    "origin_bytes_total": ("counter", "bytes received from origins", lambda s: s.bytes_arrived),
    "leases_taken_over_total": ("counter", "leases of daemons that had gone", lambda s: s.taken_over),
    "preempted": ("gauge", "1: this machine will be taken away", lambda s: int(bool(s.notice))),
    "seconds_since_look": ("gauge", "age of what is said here", lambda s: round(s.seconds_since_look, 3)),
}


def metrics_text(status: Status) -> str:
    """A status in Prometheus' text format."""
    lines = []
    for name, (kind, meaning, value) in METRICS.items():
        full = f"streamload_daemon_{name}"
        lines += [f"# HELP {full} {meaning}", f"# TYPE {full} {kind}", f"{full} {value(status)}"]
    return "\n".join(lines) + "\n"


def complaint(status: Status) -> str:
    """Why a daemon is unhealthy; "" if it is healthy."""
    if status.seconds_since_look > _STALE_SECONDS:
        return f"nothing was looked at for {status.seconds_since_look:.0f} s"
    return status.trouble


class StatusServer(PageServer):
    """Serves a daemon's status; a context manager.

    Args:
        status: called for each request, from any thread.
        listen: address and port; port 0: any.
        roots: of the node's tiers, whose runs are on /metrics, too.

    Raises:
        OptionError: `listen` isn't an address and port, or is in use.
    """

    def __init__(
        self, status: Callable[[], Status], listen: str = DEFAULT_LISTEN, roots: Sequence[Path] = ()
    ):
        def metrics() -> Page:
            return Page(metrics_text(status()) + exposition(read_runs(roots)), CONTENT_TYPE)

        def health() -> Page:
            trouble = complaint(status())
            return Page((trouble or "ok") + "\n", code=503 if trouble else 200)

        def everything() -> Page:
            return Page(json.dumps(dataclasses.asdict(status())), "application/json")

        super().__init__({"/metrics": metrics, "/healthz": health, "/status": everything}, listen)
