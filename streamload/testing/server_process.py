"""`ShardServer` in a process of its own, steered through its standard input; it ends with its parent."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from streamload.testing.faults import Fault
from streamload.testing.server import Request, ShardServer


class SpawnedServer:
    """A `ShardServer` elsewhere, with the same methods for what a test or benchmark asks of it.

    Args:
        root: the directory.
        options: `ShardServer`'s.
    """

    def __init__(self, root: str | os.PathLike[str], **options: float | str | tuple[str, str] | None) -> None:
        command = [sys.executable, "-m", "streamload.testing.server", str(root), "--steered"]
        for name, value in options.items():
            if value is not None:
                values = value if isinstance(value, tuple) else (value,)
                command += [f"--{name.replace('_', '-')}", *map(str, values)]
        path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )
        self.url: str = self._answer()["url"]

    def __enter__(self) -> SpawnedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process; idempotent."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()

    def stop_after(self, fraction: float) -> None:
        """As `ShardServer.stop_after`."""
        self._ask("stop_after", fraction)

    def go_on(self) -> None:
        """As `ShardServer.go_on`."""
        self._ask("go_on")

    def misbehave(self, path: str, *faults: Fault) -> None:
        """As `ShardServer.misbehave`, for faults without a body."""
        self._ask("misbehave", path, *(dataclasses.asdict(fault) for fault in faults))

    @property
    def log(self) -> list[Request]:
        """The requests so far."""
        return [Request(**request) for request in self._ask("log")]

    def ranges(self, path: str) -> list[tuple[int, int]]:
        """As `ShardServer.ranges`."""
        return [(start, stop) for start, stop in self._ask("ranges", path)]

    def _ask(self, what: str, *args: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, args]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the shard server's process ended with status {self._process.wait()}")
        return json.loads(line)


def main() -> None:
    """Serve a directory until interrupted, or, steered, until the input ends."""
    parser = argparse.ArgumentParser(description=main.__doc__, prog="python -m streamload.testing.server")
    parser.add_argument("root")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--bytes-per-second", type=float)
    parser.add_argument("--bytes-per-second-per-connection", type=float)
    parser.add_argument("--latency-seconds", type=float, default=0.0)
    parser.add_argument("--tls", nargs=2, metavar=("CERTIFICATE", "KEY"), help="serve https; files in PEM")
    parser.add_argument("--steered", action="store_true", help="take requests from the standard input")
    options = vars(parser.parse_args())
    steered = options.pop("steered")
    if steered:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer: it closes the input
    with ShardServer(options.pop("root"), **options) as server:
        print(json.dumps({"url": server.url}), flush=True)
        if not steered:
            server.closed.wait()
        for line in sys.stdin:
            what, args = json.loads(line)
            print(json.dumps(_do(server, what, args)), flush=True)


def _do(server: ShardServer, what: str, args: list[Any]) -> Any:
    if what == "log":
        return [dataclasses.asdict(request) for request in server.log]
    if what == "misbehave":
        server.misbehave(args[0], *(Fault(**fault) for fault in args[1:]))
        return None
    return getattr(server, what)(*args)
