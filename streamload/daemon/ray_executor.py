"""A Ray cluster as a daemon's executor: Ray places the tasks, and retries them if a node is lost.

The daemon's process submits tasks and takes their results. No shard passes through it, nor through Ray's
object store: each node fetches shards from their origins and stores them in the shared tier by itself
(ray_task.py). Only `connect` imports Ray.
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

from streamload import limits
from streamload.cache.shard import Shard
from streamload.cache.shared.leases import Leases
from streamload.daemon.executor import Results, TaskResult
from streamload.daemon.ray_task import Job, bring, own_version
from streamload.daemon.recipes import Recipes
from streamload.errors import ClusterError, OptionError, SharedTierError, StreamloadError
from streamload.metrics import Counters
from streamload.prefetch.scheduler import FillRequest

logger = logging.getLogger("streamload")

_CONNECT_SECONDS = 5.0
_WAIT_SECONDS = 0.1
_SIZE_SECONDS = 1.0
"""Interval at which the size of the cluster is looked up."""
_AHEAD = 2
"""Tasks submitted for each that the cluster can run: no node waits for its next one, and an autoscaler sees
the backlog."""
_LEAST = 8
"""Tasks submitted even if the cluster has no free CPU: an autoscaler may add nodes."""
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""First bytes of a gRPC client: the HTTP/2 preface, and an empty SETTINGS frame."""
_SETTINGS = b"\x04"
"""The type of the first frame that a server sends: SETTINGS."""
_LEASES_SECONDS, _WATCHED = 1.0, 16
"""Interval at which leases of others are looked at, and how many of them, in turn, may have expired."""
_TRIES = 3
"""A task fails after this many nodes couldn't run it."""


def connect(address: str) -> Any:
    """Join a Ray cluster as a driver.

    Args:
        address: "host:port" of its head, from one of its nodes; "ray://host:port" from elsewhere; "auto".

    Returns:
        The module `ray`; `shutdown()` leaves the cluster.

    Raises:
        OptionError: Ray isn't installed, or the address is invalid.
        ClusterError: the cluster can't be reached, or has another Ray or Python.
    """
    _probe(address)
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
            f"the Ray cluster at {address} can't be joined: {first_line(exc)}; host:port is for its "
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
        ray: the module, from `connect`.
        job: what all tasks have in common.
        recipes: by which some are prepared.
        cpus: the CPUs of a node that a task takes, as Ray counts them.
        most: tasks that run at once; None: as many as the cluster has room for.
        leases: takes none, as the nodes do that; sees which of those that others hold are released or expire.
        counts: see Executor.
    """

    def __init__(
        self,
        ray: Any,
        job: Job,
        recipes: Recipes | None = None,
        *,
        cpus: float = 1.0,
        most: int | None = None,
        leases: Leases,
        counts: Counters,
    ):
        self.results = Results()
        self.counts = counts
        self._ray, self._cpus, self._most, self._leases = ray, cpus, most, leases
        self._job = pickle.dumps(job)
        self._recipes = recipes or Recipes()
        self._remote = ray.remote(num_cpus=cpus, max_retries=-1)(bring)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._submitted: dict[Any, _Task] = {}  # by Ray's reference to the result
        self._digests: set[str] = set()  # of their shards, and of those that are waited for
        self._waiting: dict[str, _Task] = {}  # whose leases others have, by digest
        self._error: StreamloadError | None = None
        self._room = _LEAST
        self._asked_at = self._leases_at = float("-inf")
        self._looks = 0  # at leases
        self._thread = threading.Thread(target=self._watch, name="streamload-ray", daemon=True)
        limits.start(self._thread)

    def __repr__(self) -> str:
        with self._lock:
            return f"<RayExecutor {len(self._digests)} of {self._room} tasks>"

    def want(self, tasks: Sequence[FillRequest]) -> None:
        """Submit new tasks. Submitted ones stay so; next uses don't matter, as nothing is evicted.

        A task that waits for another process's lease is dropped once it isn't wanted any more.
        """
        wanted = {task.shard.digest for task in tasks}
        with self._lock:
            for digest in self._waiting.keys() - wanted:
                del self._waiting[digest]
                self._digests.discard(digest)
            new = [task.shard for task in tasks if task.shard.digest not in self._digests]
            self._digests.update(shard.digest for shard in new)
        for shard in new:
            self._submit(_Task(shard, tries=1))

    def capacity(self, due: Shard | None) -> int:
        """The most tasks at once: somewhat more than the cluster can run now."""
        now_seconds = time.monotonic()
        if now_seconds - self._asked_at > _SIZE_SECONDS:
            slots = int(self._ray.cluster_resources().get("CPU", 0.0) / self._cpus)
            self._room = max(_LEAST, _AHEAD * slots)
            self._asked_at = now_seconds
        return self._room if self._most is None else min(self._room, self._most)

    def has_begun(self, task: Shard) -> bool:
        """True if the task was submitted, and isn't left to another process that has its lease."""
        with self._lock:
            return task.digest in self._digests and task.digest not in self._waiting

    def check(self) -> None:
        """Raise what ended the work, if anything has.

        Raises:
            ClusterError: its nodes can't do the work.
        """
        with self._lock:
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """Stop running tasks where they are. Submitted tasks are cancelled, running ones stopped."""
        self._stop.set()
        self._thread.join()
        with self._lock:
            left = list(self._submitted)
            self._submitted.clear()
            self._waiting.clear()
            self._digests.clear()
        for result in left:
            with contextlib.suppress(Exception):  # nobody waits for them any more
                self._ray.cancel(result, force=True)

    def _submit(self, task: _Task) -> None:
        remote = self._remote.options(
            name=f"streamload {task.shard.name}",
            scheduling_strategy="DEFAULT" if task.tries == 1 else "SPREAD",  # a retry, on another node
        )
        shard = task.shard
        recipe = self._recipes[shard.recipe] if shard.recipe else None
        result = remote.remote(own_version(), self._job, pickle.dumps((shard, recipe)))
        with self._lock:
            self._submitted[result] = task

    def _watch(self) -> None:
        """Run the thread: take the results of tasks."""
        try:
            while not self._stop.is_set():
                for result in self._ended():
                    with self._lock:
                        task = self._submitted.pop(result)
                    self._settle(task, result)
                self._resume()
        except Exception as exc:
            self._end(ClusterError(f"the Ray cluster gives no answers any more: {first_line(exc)}"))

    def _ended(self) -> Iterator[Any]:
        with self._lock:
            submitted = list(self._submitted)
        if not submitted:
            self._stop.wait(_WAIT_SECONDS)
            return
        ended, _ = self._ray.wait(submitted, num_returns=len(submitted), timeout=_WAIT_SECONDS)
        yield from ended

    def _settle(self, task: _Task, result: Any) -> None:
        try:
            how = self._ray.get(result)
        except self._ray.exceptions.RayTaskError as exc:  # streamload itself failed there
            self._end(
                ClusterError(
                    f"a node of the Ray cluster can't run streamload: {last_line(exc)}; all nodes need "
                    f"streamload[ray] {own_version()}"
                )
            )
            return
        except self._ray.exceptions.RayError as exc:
            how = {"node": "the Ray cluster", "trouble": first_line(exc)}
        shard = task.shard
        self.counts.add("origin_bytes", how.get("arrived", 0))
        if "unfit" in how:
            self._end(ClusterError(f"{how['node']} can't do what it is asked for: {how['unfit']}"))
        elif "busy" in how:
            with self._lock:
                self._waiting[shard.digest] = task
        elif "trouble" in how and task.tries < _TRIES:
            logger.info(
                "%s can't bring %s, another node is asked: %s", how["node"], shard.name, how["trouble"]
            )
            self._submit(_Task(shard, task.tries + 1))
        else:
            error = "" if "size" in how else f"{how['node']}: {how.get('why') or how['trouble']}"
            self.results.put(TaskResult(shard, how.get("size", 0), error))
            with self._lock:
                self._digests.discard(shard.digest)

    def _resume(self) -> None:
        """Submit tasks again whose leases have been released, or have expired."""
        now_seconds = time.monotonic()
        with self._lock:
            waiting = dict(self._waiting)
        if not waiting or now_seconds - self._leases_at < _LEASES_SECONDS:
            return
        self._leases_at = now_seconds
        try:
            busy = self._leases.busy()
            held = [digest for digest in waiting if digest in busy]
            first = self._looks * _WATCHED % max(len(held), 1)
            self._looks += 1
            self._leases.tidy([*held[first:], *held[:first]][:_WATCHED])
        except SharedTierError as exc:
            logger.debug("leases can't be read now: %s", exc)
            return
        for digest in waiting.keys() - busy:
            with self._lock:
                del self._waiting[digest]
            self._submit(waiting[digest])

    def _end(self, error: StreamloadError) -> None:
        with self._lock:
            self._error = self._error or error


def _probe(address: str) -> None:
    """Check within seconds that a gRPC server answers at an address: Ray itself would wait for ever.

    Raises:
        OptionError: the address is invalid.
        ClusterError: nothing answers there, or something else than gRPC.
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


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else repr(error)


def last_line(error: Exception) -> str:
    """The last line of an error's message: of a RayTaskError, what was raised there."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else repr(error)
