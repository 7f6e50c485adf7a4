"""An HTTP server for shards: ranges, a limited link, a log of what was asked, and misbehaviour on request.

For tests, demos and benchmarks, on loopback unless told otherwise: `ShardServer` runs in threads of this
process, and `ShardServer.spawn` (or ``python -m streamload.testing.server DIR``) in one of its own, so that
it shares no interpreter with what is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamload.testing.answers import Answers, Request
from streamload.testing.faults import NO_FAULT, Fault
from streamload.testing.link import Link

_LOOK_SECONDS = 0.05

__all__ = ["Fault", "Request", "ShardServer"]


class ShardServer:
    """Serves the files below a directory at `url`; a context manager.

    Args:
        root: the directory.
        bytes_per_second: of the whole link, shared by all connections (None: as fast as it goes).
        bytes_per_second_per_connection: of each connection.
        latency_seconds: before each answer.
        host: the address that it listens at.
        tls: files of certificate and key, for https.

    Attributes:
        log: each request, in the order of arrival.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        bytes_per_second: float | None = None,
        bytes_per_second_per_connection: float | None = None,
        latency_seconds: float = 0.0,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: tuple[str, str] | None = None,
    ) -> None:
        self.root = Path(root).resolve()
        self.log: list[Request] = []
        self.closed = threading.Event()
        self.link = Link(bytes_per_second, self.closed)
        self.bytes_per_second_per_connection = bytes_per_second_per_connection
        self.latency_seconds = latency_seconds
        self.tls_context: ssl.SSLContext | None = None
        if tls is not None:
            self.tls_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.tls_context.load_cert_chain(*tls)
        self._faults: dict[str, list[list[Any]]] = {}  # path -> [[fault, requests it still holds for], …]
        self._gate: float | None = None
        self._changed = threading.Condition()  # guards _faults and _gate, and tells of closing
        self._began = time.monotonic()
        self._server = _Server((host, port), self)
        self.port: int = self._server.server_address[1]
        self.url = f"{'https' if tls else 'http'}://{host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="shard-server")
        self._thread.start()

    def __enter__(self) -> ShardServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Break all connections and end all threads; idempotent."""
        if self.closed.is_set():
            return
        self.closed.set()
        with self._changed:
            self._changed.notify_all()
        self._server.shutdown()
        self._server.break_connections()
        self._server.server_close()
        self._thread.join()

    def misbehave(self, path: str, *faults: Fault) -> None:
        """Answer requests of a path (``"*"``: of every path) with these faults, one after the other.

        A fault with `first` makes way for the next after so many requests; without faults, all is well again.
        """
        with self._changed:
            self._faults[path.lstrip("/")] = [[fault, fault.first] for fault in faults]

    def stop_after(self, fraction: float) -> None:
        """Send nothing beyond this share of any file, in present and future answers, until `go_on`."""
        with self._changed:
            self._gate = fraction
            self._changed.notify_all()

    def go_on(self) -> None:
        """Send what `stop_after` has held back."""
        with self._changed:
            self._gate = None
            self._changed.notify_all()

    def requests(self, path: str) -> list[Request]:
        """Return the requests of one path so far."""
        return [request for request in self.log if request.path == path.lstrip("/")]

    def ranges(self, path: str) -> list[tuple[int, int]]:
        """Return the half-open byte ranges of a file that were sent, in the order of their requests."""
        return [
            (request.first, request.first + request.sent)
            for request in self.requests(path)
            if request.method == "GET" and request.status in {200, 206} and request.sent
        ]

    def seconds(self) -> float:
        """Return the time since the server began."""
        return time.monotonic() - self._began

    def fault_for(self, path: str) -> Fault:
        """Return what the next request of a path gets, and count it."""
        with self._changed:
            for queue in (self._faults.get(path, []), self._faults.get("*", [])):
                while queue:
                    fault, left = queue[0]
                    if left is None:
                        return fault  # type: ignore[no-any-return]
                    if left > 0:
                        queue[0][1] -= 1
                        return fault  # type: ignore[no-any-return]
                    queue.pop(0)
        return NO_FAULT

    def gate(self, size: int) -> int:
        """Return up to which byte a file of this size may be sent now."""
        return size if self._gate is None else int(size * self._gate)

    def wait_while(self, holds: Callable[[], bool], client_is_there: Callable[[], bool]) -> None:
        """Wait as long as something holds, the server is open and its client there."""
        with self._changed:
            while holds() and not self.closed.is_set() and client_is_there():
                self._changed.wait(_LOOK_SECONDS)

    @staticmethod
    def spawn(root: str | os.PathLike[str], **options: float | str | tuple[str, str] | None) -> SpawnedServer:
        """Start the same server in a process of its own; see `SpawnedServer`."""
        return SpawnedServer(root, **options)


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = False
    block_on_close = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], shards: ShardServer) -> None:
        self.shards = shards
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()  # guards _open
        super().__init__(address, Answers)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def break_connections(self) -> None:
        with self._lock:
            for connection in self._open:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # the client was quicker


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


if __name__ == "__main__":
    main()
