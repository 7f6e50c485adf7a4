"""An HTTP server for shards: ranges, a limited link, a log of what was asked, and misbehaviour on request.

For tests, demos and benchmarks, on loopback unless told otherwise: `ShardServer` runs in threads of this
process, and `ShardServer.spawn` (or ``python -m streamload.testing.server DIR``) in one of its own, so that
it shares no interpreter with what is measured.
"""

from __future__ import annotations

import os
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamload.testing.answers import Answers, Request
from streamload.testing.faults import NO_FAULT, Fault
from streamload.testing.link import Link

if TYPE_CHECKING:
    from streamload.testing.server_process import SpawnedServer

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
        from streamload.testing.server_process import SpawnedServer

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


if __name__ == "__main__":
    from streamload.testing.server_process import main

    main()
