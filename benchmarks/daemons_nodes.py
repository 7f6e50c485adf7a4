"""The nodes of daemons.py: an origin, a shared cache, daemons, trainings, each behind a link of its own."""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import turns
from benchmarks.turns import Row
from streamload.testing.server import ShardServer

BATCH_SIZE = 8
IMAGES_PER_SECOND = 25
STEP_SECONDS = BATCH_SIZE / IMAGES_PER_SECOND
LOADER = {"batch_size": BATCH_SIZE, "num_workers": 1, "lanes": 4, "shuffle": 40, "ahead": "2MB"}
CONCURRENCY = 2
LIMIT_SECONDS = 400
_ORIGIN = "http://origin.example"
"""A name that nobody resolves: the nodes' proxies know what it means."""

Process = subprocess.Popen[str]


@dataclass(frozen=True)
class Variant:
    """Which nodes there are.

    Attributes:
        daemons, trainers: how many.
        share: of what a training consumes that a node's link carries.
        filled: a daemon has brought all before.
    """

    daemons: int = 0
    trainers: int = 1
    share: float = 0.5
    filled: bool = False

    @property
    def name(self) -> str:
        """What --contenders calls it."""
        if self.filled:
            return f"{self.trainers} trainers, filled before"
        if self.trainers > 1:
            return f"{self.trainers} trainers, {self.daemons} daemon"
        return f"{self.daemons or 'no'} daemon{'s' * (self.daemons > 1)}"

    @property
    def label(self) -> str:
        return f"{self.name} at {self.share:g}×"


@dataclass(frozen=True)
class Data:
    """The shards of the origin."""

    directory: Path
    shards: int
    samples: int
    total_bytes: int

    @property
    def urls(self) -> str:
        return turns.pattern(_ORIGIN, self.shards)

    @property
    def consumed_bytes_per_second(self) -> float:
        """By a training that waits for nothing."""
        return self.total_bytes / self.samples * IMAGES_PER_SECOND


class World:
    """An origin, a shared cache, and the nodes of a variant; a context manager, behind which all are gone.

    Args:
        data: what the origin has.
        place: for the caches.
        python: that runs the nodes.
        seed: of the order.
    """

    def __init__(self, data: Data, variant: Variant, place: Path, python: Path, seed: int) -> None:
        self._data, self._variant, self._place = data, variant, place
        self._python, self._seed = python, seed
        self._rate = variant.share * data.consumed_bytes_per_second
        self._links: list[Any] = []
        self._daemons: list[Process] = []
        self._trainers: list[Process] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "World":
        for n in range(self._variant.trainers):
            self._trainers.append(self._trainer(n))
        if self._variant.filled:
            self._daemons.append(self._daemon("filler", None, self._data.urls, "--once"))
        for n in range(self._variant.daemons):
            self._daemons.append(self._daemon(f"daemon-{n}", self._rate))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def prepare(self) -> None:
        """Wait until all is filled that is to be, the daemons look for work, and the trainings are ready.

        Raises:
            RuntimeError: a node failed, or isn't there in time.
        """
        if self._variant.filled:
            _said_by(self._daemons.pop())
        for n, daemon in enumerate(self._daemons):
            deadline = time.monotonic() + LIMIT_SECONDS
            while not any((self._place / f"daemon-{n}").glob("runs/*")):
                if daemon.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"a daemon didn't start: status {daemon.returncode}")
                time.sleep(0.02)
        for trainer in self._trainers:
            assert trainer.stdout is not None
            if not trainer.stdout.readline():
                raise RuntimeError(f"a trainer didn't start: status {trainer.wait()}")

    def begin(self) -> None:
        """Let the trainings begin."""
        for trainer in self._trainers:
            assert trainer.stdin is not None
            trainer.stdin.write("\n")
            trainer.stdin.flush()

    def finish(self) -> Row:
        """Wait for the trainings, then end the daemons; what came of it."""
        results = [json.loads(_said_by(trainer)) for trainer in self._trainers]
        for daemon in self._daemons:
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons:
            _said_by(daemon)
        variant, data = self._variant, self._data
        least = data.samples / IMAGES_PER_SECOND
        if not variant.filled:
            least = max(least, data.total_bytes / (len(self._links) * self._rate))
        origin_bytes = sum(map(_sent, self._links))
        means = ("waited_share", "first_batch_seconds", "shared_bytes", "shared_hits", "shared_stored")
        return {
            "label": variant.label,
            "contender": variant.name,
            "round": self._seed,
            "daemons": variant.daemons,
            "trainers": variant.trainers,
            "share": variant.share,
            "filled": variant.filled,
            "link_bytes_per_second": self._rate,
            "seconds": max(result["seconds"] for result in results),
            "least_seconds": least,
            "origin_bytes": origin_bytes,
            "from_origin": origin_bytes / data.total_bytes,
            **{name: statistics.mean(result[name] for result in results) for name in means},
            "digests": [result["digests"] for result in results],
            "versions": results[0]["versions"],
        }

    def _daemon(self, name: str, rate: float | None, *more: str) -> Process:
        """A node with a daemon."""
        command = ["-m", "streamload", "daemon", "--shared-cache", str(self._place / "shared")]
        command += ["--origin", _ORIGIN]
        command += ["--cache-dir", str(self._place / name), "--cache-size", "1GB"]
        command += ["--concurrency", str(CONCURRENCY), "--notices", "none", "--listen", "none"]
        return self._node([*command, *more], rate)

    def _trainer(self, number: int) -> Process:
        """A node with a training."""
        caches = {"cache_dir": self._place / f"trainer-{number}", "shared_cache": self._place / "shared"}
        job = {
            "urls": self._data.urls,
            "step_seconds": STEP_SECONDS,
            "loader": {
                **LOADER,
                **{name: str(path) for name, path in caches.items()},
                "cache_size": "1GB",
                "write_back": True,
                "seed": self._seed,
            },
        }
        return self._node(["-m", "benchmarks.daemons_trainer", json.dumps(job)], self._rate)

    def _node(self, arguments: Sequence[str], rate: float | None) -> Process:
        """A process behind a link of its own to the origin."""
        link = self._stack.enter_context(ShardServer.spawn(self._data.directory, bytes_per_second=rate))
        self._links.append(link)
        kept = {k: v for k, v in turns.environment().items() if not k.lower().endswith("_proxy")}
        process = subprocess.Popen(
            [str(self._python), *arguments],
            cwd=turns.ROOT,
            env={**kept, "http_proxy": link.url},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if "daemon" in arguments else None,
            text=True,
            start_new_session=True,
        )
        self._stack.enter_context(_gone_afterwards(process))
        return process


def _said_by(process: Process) -> str:
    """What a node said last, once it has ended well.

    Raises:
        RuntimeError: it failed.
    """
    output, errors = process.communicate(timeout=LIMIT_SECONDS)
    if process.returncode:
        raise RuntimeError(f"{process.args} ended with {process.returncode}: {(errors or '')[-2000:]}")
    return output.splitlines()[-1]


@contextlib.contextmanager
def _gone_afterwards(process: Process) -> Iterator[None]:
    """Sees to it that neither a node nor what it started outlives the block."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _sent(link: Any) -> int:
    """The bytes of shards that went out on a link."""
    return sum(request.sent for request in link.log if request.path.endswith(".tar"))
