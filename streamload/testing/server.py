"""ShardServer: an HTTP server for shards with ranges, a limited link, a request log, and faults on demand.

It listens on loopback by default and runs in threads of this process; `ShardServer.spawn` (or
``python -m streamload.testing.server DIR``) runs it in its own process, without sharing the GIL.
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

from streamload import limits
from streamload.testing.connection import Connection, Request
from streamload.testing.faults import NO_FAULT, Fault
from streamload.testing.link import Link

_POLL_SECONDS = 0.05

__all__ = ["Fault", "Request", "ShardServer"]


class ShardServer:
    """Serves the files below a directory at `url`; a context manager.

    Args:
        root: the directory.
        bytes_per_second: of all connections together; None: unlimited.
        bytes_per_second_per_connection: of each connection.
        latency_seconds: before each response.
        host: the address to listen on.
        tls: PEM files of certificate and key, for https.

    Attributes:
        log: the requests, in order of arrival.
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
        self._faults: dict[str, list[list[Any]]] = {}  # path -> [[fault, requests left], …]
        self._gate: float | None = None
        self._changed = threading.Condition()  # guards _faults and _gate; also notified on close
        self._began = time.monotonic()
        self._server = _HttpServer((host, port), self)
        self.port: int = self._server.server_address[1]
        self.url = f"{'https' if tls else 'http'}://{host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="shard-server")
        limits.start(self._thread)

    def __enter__(self) -> ShardServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Break all connections and stop all threads; idempotent."""
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
        """Apply these faults in turn to requests of a path; ``"*"`` means every path.

        A fault with `first` is followed by the next after that many requests. Without faults, the path is
        served correctly again.
        """
        with self._changed:
            self._faults[path.lstrip("/")] = [[fault, fault.first] for fault in faults]

    def stop_after(self, fraction: float) -> None:
        """Send no more than this share of each file, in current and future responses, until `go_on`."""
        with self._changed:
            self._gate = fraction
            self._changed.notify_all()

    def go_on(self) -> None:
        """Send what `stop_after` held back."""
        with self._changed:
            self._gate = None
            self._changed.notify_all()

    def requests(self, path: str) -> list[Request]:
        """The requests of one path so far."""
        return [request for request in self.log if request.path == path.lstrip("/")]

    def ranges(self, path: str) -> list[tuple[int, int]]:
        """The half-open byte ranges of a file that were sent, in the order of their requests."""
        return [
            (request.first, request.first + request.sent)
            for request in self.requests(path)
            if request.method == "GET" and request.status in {200, 206} and request.sent
        ]

    def seconds(self) -> float:
        """Time since the server started."""
        return time.monotonic() - self._began

    def fault_for(self, path: str) -> Fault:
        """The fault of the next request of a path, which is counted."""
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
        """Number of bytes of a file of this size that may be sent now."""
        return size if self._gate is None else int(size * self._gate)

    def wait_while(self, holds: Callable[[], bool], is_connected: Callable[[], bool]) -> None:
        """Wait while `holds()`, the server is open and the client is connected."""
        with self._changed:
            while holds() and not self.closed.is_set() and is_connected():
                self._changed.wait(_POLL_SECONDS)

    @staticmethod
    def spawn(root: str | os.PathLike[str], **options: float | str | tuple[str, str] | None) -> SpawnedServer:
        """Start the server in its own process; see `SpawnedServer`."""
        return SpawnedServer(root, **options)


class _HttpServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = False
    block_on_close = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], shards: ShardServer) -> None:
        self.shards = shards
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()  # guards _open
        super().__init__(address, Connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        limits.note_thread()
        super().process_request_thread(request, client_address)

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
                    continue  # already closed by the client


class SpawnedServer:
    """A `ShardServer` in its own process, with the same methods.

    Args:
        root: the directory.
        options: `ShardServer`'s.
    """

    def __init__(self, root: str | os.PathLike[str], **options: float | str | tuple[str, str] | None) -> None:
        command = [sys.executable, "-m", "streamload.testing.server", str(root), "--control"]
        for name, value in options.items():
            if value is not None:
                values = value if isinstance(value, tuple) else (value,)
                command += [f"--{name.replace('_', '-')}", *map(str, values)]
        path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )
        self.url: str = self._receive()["url"]

    def __enter__(self) -> SpawnedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the process; idempotent."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()

    def stop_after(self, fraction: float) -> None:
        """As `ShardServer.stop_after`."""
        self._call("stop_after", fraction)

    def go_on(self) -> None:
        """As `ShardServer.go_on`."""
        self._call("go_on")

    def misbehave(self, path: str, *faults: Fault) -> None:
        """As `ShardServer.misbehave`, for faults without a body."""
        self._call("misbehave", path, *(dataclasses.asdict(fault) for fault in faults))

    @property
    def log(self) -> list[Request]:
        """The requests so far."""
        return [Request(**request) for request in self._call("log")]

    def ranges(self, path: str) -> list[tuple[int, int]]:
        """As `ShardServer.ranges`."""
        return [(start, stop) for start, stop in self._call("ranges", path)]

    def _call(self, method: str, *args: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, args]) + "\n")
        self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the shard server's process ended with status {self._process.wait()}")
        return json.loads(line)


def main() -> None:
    """Serve a directory until interrupted, or with --control until standard input ends."""
    parser = argparse.ArgumentParser(description=main.__doc__, prog="python -m streamload.testing.server")
    parser.add_argument("root")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--bytes-per-second", type=float)
    parser.add_argument("--bytes-per-second-per-connection", type=float)
    parser.add_argument("--latency-seconds", type=float, default=0.0)
    parser.add_argument("--tls", nargs=2, metavar=("CERTIFICATE", "KEY"), help="serve https; PEM files")
    parser.add_argument("--control", action="store_true", help="call methods read from standard input")
    options = vars(parser.parse_args())
    is_controlled = options.pop("control")
    if is_controlled:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and closes the input
    with ShardServer(options.pop("root"), **options) as server:
        print(json.dumps({"url": server.url}), flush=True)
        if not is_controlled:
            server.closed.wait()
        for line in sys.stdin:
            method, args = json.loads(line)
            print(json.dumps(_call(server, method, args)), flush=True)


def _call(server: ShardServer, method: str, args: list[Any]) -> Any:
    if method == "log":
        return [dataclasses.asdict(request) for request in server.log]
    if method == "misbehave":
        server.misbehave(args[0], *(Fault(**fault) for fault in args[1:]))
        return None
    return getattr(server, method)(*args)


if __name__ == "__main__":
    main()
