"""A Ray cluster as a daemon's executor: Ray places the tasks, and retries them if a node is lost.

The daemon's process submits tasks and hears how they ended. No shard passes through it, nor through Ray's
object store: each node fetches shards from their origins and stores them in the shared tier by itself
(ray_task.py). Ray is imported by `connect`, and nowhere else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from streamload.cache.shard import Shard
from streamload.daemon.executor import Completed, Failed, NextUseOf
from streamload.daemon.ray_task import Job, bring, own_version
from streamload.derived.recipes import Recipes
from streamload.errors import ClusterError, OptionError, StreamloadError
from streamload.metrics import Counters

logger = logging.getLogger("streamload")

_CONNECT_SECONDS = 5.0
_WAIT_SECONDS = 0.1
_SIZE_SECONDS = 1.0
"""How often the size of the cluster is asked for."""
_AHEAD = 2
"""So many tasks are submitted for each that the cluster can work on: no node waits for the next, and an
autoscaler sees that more are wanted."""
_LEAST = 8
"""So many are submitted even if the cluster has no room: an autoscaler may make some."""
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How a client of gRPC begins: with the preface of HTTP/2, and a frame of settings that has none."""
_SETTINGS = b"\x04"
"""The kind of the first frame that a server sends."""
_TRIES = 3
"""After so many nodes that couldn't do a task it has failed."""


def connect(address: str) -> Any:
    """Join a Ray cluster as a driver.

    Args:
        address: "host:port" of its head, from one of its nodes; "ray://host:port" from elsewhere; "auto".

    Returns:
        The module `ray`; `shutdown()` leaves the cluster.

    Raises:
        OptionError: Ray isn't installed, or the address is none.
        ClusterError: the cluster can't be reached, or has another Ray or Python.
    """
    _knock(address)
    try:
        import ray
    except ImportError as exc:
        raise OptionError('--ray needs Ray, on this machine, too: pip install "streamload[ray]"') from exc
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ImportError as exc:
        raise OptionError(f'--ray {address} needs Ray\'s client: pip install "ray[client]"') from exc
    except (ConnectionError, RuntimeError, ValueError, AssertionError, OSError) as exc:
        raise ClusterError(
            f"the Ray cluster at {address} can't be joined: {_first_line(exc)}; host:port is for its "
            f"nodes (ray start --address=… --num-cpus=0 makes this machine one), ray://host:10001 for the "
            f"others"
        ) from exc
    return ray


@dataclass(slots=True)
class _Task:
    shard: Shard
    tries: int


class RayExecutor:
    """The nodes of a Ray cluster; see Executor.

    Args:
        completed, failed: see there.
        next_use_of: of no use here: nothing goes for what is brought.
        ray: of `connect`.
        job: what all tasks have in common.
        recipes: by which some are prepared.
        cpus: what a task takes of a node's CPUs, as Ray counts them.
        most: tasks that are worked on at once; None: as many as the cluster has room for.
        counts: of what arrives at the nodes.
    """

    def __init__(
        self,
        completed: Completed,
        failed: Failed,
        next_use_of: NextUseOf,
        *,
        ray: Any,
        job: Job,
        recipes: Recipes | None = None,
        cpus: float = 1.0,
        most: int | None = None,
        counts: Counters,
    ):
        self._completed, self._failed = completed, failed
        self._ray, self._cpus, self._most, self._counts = ray, cpus, most, counts
        self._job = pickle.dumps(job)
        self._recipes = recipes or Recipes()
        self._remote = ray.remote(num_cpus=cpus, max_retries=-1)(bring)
        self._stop = threading.Event()
        self._change = threading.Condition()
        # Guarded by _change:
        self._submitted: dict[Any, _Task] = {}  # by what Ray calls the result
        self._digests: set[str] = set()  # of those
        self._error: StreamloadError | None = None
        self._room = _LEAST
        self._asked_at = float("-inf")
        self._thread = threading.Thread(target=self._hear, name="streamload-ray", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        with self._change:
            return f"<RayExecutor {len(self._digests)} of {self._room} tasks>"

    def want(self, tasks: Sequence[Shard]) -> None:
        """See Executor. What was submitted stays so."""
        with self._change:
            new = [shard for shard in tasks if shard.digest not in self._digests]
            self._digests.update(shard.digest for shard in new)
        for shard in new:
            self._submit(_Task(shard, tries=1))

    def capacity(self, due: Sequence[Shard]) -> int:
        """See Executor: somewhat more than the cluster can work on now."""
        now = time.monotonic()
        if now - self._asked_at > _SIZE_SECONDS:
            slots = int(self._ray.cluster_resources().get("CPU", 0.0) / self._cpus)
            self._room = max(_LEAST, _AHEAD * slots)
            self._asked_at = now
        return self._room if self._most is None else min(self._room, self._most)

    def has_begun(self, task: Shard) -> bool:
        """See Executor: whether it was submitted."""
        with self._change:
            return task.digest in self._digests

    def check(self) -> None:
        """See Executor.

        Raises:
            ClusterError: its nodes can't do the work.
        """
        with self._change:
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """See Executor. What has been submitted is taken back, or stopped where it is."""
        self._stop.set()
        self._thread.join()
        with self._change:
            left = list(self._submitted)
            self._submitted.clear()
            self._digests.clear()
        for result in left:
            with contextlib.suppress(Exception):  # whatever it is: nobody waits for it any more
                self._ray.cancel(result, force=True)

    def _submit(self, task: _Task) -> None:
        remote = self._remote.options(
            name=f"streamload {task.shard.name}",
            scheduling_strategy="DEFAULT" if task.tries == 1 else "SPREAD",  # on another node than before
        )
        shard = task.shard
        recipe = self._recipes[shard.recipe] if shard.recipe else None
        result = remote.remote(own_version(), self._job, pickle.dumps((shard, recipe)))
        with self._change:
            self._submitted[result] = task

    def _hear(self) -> None:
        """The thread that hears how tasks end."""
        try:
            while not self._stop.is_set():
                for result in self._ended():
                    with self._change:
                        task = self._submitted.pop(result)
                    self._settle(task, result)
        except Exception as exc:
            self._end(ClusterError(f"the Ray cluster gives no answers any more: {_first_line(exc)}"))

    def _ended(self) -> Iterator[Any]:
        with self._change:
            submitted = list(self._submitted)
        if not submitted:
            self._stop.wait(_WAIT_SECONDS)
            return
        ended, _ = self._ray.wait(submitted, num_returns=len(submitted), timeout=_WAIT_SECONDS)
        yield from ended

    def _settle(self, task: _Task, result: Any) -> None:
        try:
            how = self._ray.get(result)
        except self._ray.exceptions.RayTaskError as exc:  # it hasn't even come to its own errors
            self._end(
                ClusterError(
                    f"a node of the Ray cluster can't run streamload: {_last_line(exc)}; all nodes need "
                    f"streamload[ray] {own_version()}"
                )
            )
            return
        except self._ray.exceptions.RayError as exc:
            how = {"node": "the Ray cluster", "trouble": _first_line(exc)}
        shard = task.shard
        self._counts.add("origin_bytes", how.get("arrived", 0))
        if "unfit" in how:
            self._end(ClusterError(f"{how['node']} can't do what it is asked for: {how['unfit']}"))
        elif "trouble" in how and task.tries < _TRIES:
            logger.info(
                "%s can't bring %s, another node is asked: %s", how["node"], shard.name, how["trouble"]
            )
            self._submit(_Task(shard, task.tries + 1))
        else:
            with self._change:
                self._digests.discard(shard.digest)
            if "size" in how:
                self._completed(shard, how["size"])
            else:
                self._failed(shard, f"{how['node']}: {how.get('why') or how['trouble']}")

    def _end(self, error: StreamloadError) -> None:
        with self._change:
            self._error = self._error or error


def _knock(address: str) -> None:
    """Find out in seconds whether something that speaks gRPC is there: Ray would wait without an end.

    Raises:
        OptionError: the address can't be one.
        ClusterError: nobody is there, or somebody else.
    """
    if address == "auto":
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise OptionError(
            f'--ray {address!r} is no address: expected "host:6379", "ray://host:10001" or "auto"'
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS) as there:
            if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
                return
            there.sendall(_HTTP2)
            answer = there.recv(9, socket.MSG_WAITALL)
    except OSError as exc:
        raise ClusterError(f"nobody answers at {address}, where a Ray cluster should be: {exc}") from exc
    if answer[3:4] != _SETTINGS:
        raise ClusterError(f"what answers at {address} is no Ray cluster")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else repr(error)


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else repr(error)
