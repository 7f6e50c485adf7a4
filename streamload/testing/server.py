"""ShardServer: an HTTP server for shards with ranges, a limited link, a request log, and faults on demand.

It listens on loopback by default and runs in threads of this process; `ShardServer.spawn` (or
``python -m streamload.testing.server DIR``) runs it in its own process, without sharing the GIL.
"""

from __future__ import annotations

import argparse
import dataclasses
import email.utils
import http.server
import io
import json
import os
import re
import select
import signal
import socket
import socketserver
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from streamload import limits
from streamload.testing.faults import NO_FAULT, Fault
from streamload.testing.link import Link

__all__ = ["Fault", "Request", "ShardServer"]

_POLL_SECONDS = 0.05
_DRIPS = {
    "header": (b"HTTP/1.1 200 OK\r\nX-Drip: ", b"."),
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "chunk size": (b"", b"0"),
    "trailers": (b"0\r\n", b"X-Drip: .\r\n"),
}
_DRIP_SECONDS = 0.02
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


@dataclasses.dataclass(slots=True)
class Request:
    """One request in the server's log; `sent` and `status` are final once the response is over.

    Attributes:
        start, stop: the requested half-open range; stop is None for "to the end", both for no range.
        seconds: when the request arrived, since the server started.
        status: of the response; 0 before it.
        sent: bytes of the body that were sent.
        first: the first byte of the file in the response.
        ended: when the response was over, since the server started; 0 before.
        peer: the port of the client's end of the connection.
    """

    method: str
    path: str
    start: int | None
    stop: int | None
    seconds: float
    headers: Mapping[str, str]
    status: int = 0
    sent: int = 0
    first: int = 0
    ended: float = 0.0
    peer: int = 0


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
        super().__init__(address, _Connection)

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


class _Connection(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version = "streamload-testing"
    sys_version = ""
    disable_nagle_algorithm = True
    server: _HttpServer

    def setup(self) -> None:
        """Start TLS, if the server uses it."""
        self.shards = self.server.shards
        if self.shards.tls_context is not None:
            self.request = self.shards.tls_context.wrap_socket(self.request, server_side=True)
        self.own_link = Link(self.shards.bytes_per_second_per_connection, self.shards.closed)
        super().setup()

    def handle(self) -> None:
        """Respond until the client disconnects or the server closes."""
        try:
            super().handle()
        except (ConnectionError, TimeoutError, ssl.SSLError):
            self.close_connection = True

    def finish(self) -> None:
        """Close the connection."""
        try:
            super().finish()
        except (ConnectionError, ssl.SSLError):
            return
        finally:
            if self.shards.tls_context is not None:
                self.request.close()  # the server only has the socket below it

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing: requests are in the server's log."""

    def do_HEAD(self) -> None:
        """Respond without a body."""
        self._respond()

    def do_GET(self) -> None:
        """Respond with a body."""
        self._respond()

    def _respond(self) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        start, stop = _asked_range(self.headers.get("Range"))
        request = Request(self.command, path, start, stop, self.shards.seconds(), dict(self.headers.items()))
        request.peer = self.client_address[1]
        self.shards.log.append(request)
        try:
            self._respond_to(request)
        finally:
            request.ended = self.shards.seconds()

    def _respond_to(self, request: Request) -> None:
        fault = self.shards.fault_for(request.path)
        self.shards.closed.wait(self.shards.latency_seconds)
        for status in fault.informational:
            self.wfile.write(f"HTTP/1.1 {status} Wait\r\nLink: </a>; rel=preload\r\n\r\n".encode())
        if fault.silent:
            self.shards.wait_while(lambda: True, self._is_connected)
            self.close_connection = True
        elif fault.drip in {"header", "continue"}:
            self._drip(fault)
        elif fault.requires is not None and not self._shows(fault.requires):
            self._send_text(
                request, fault.status or 401, fault, fault.body or b"these credentials are refused\n"
            )
        elif fault.requires is not None:
            self._send_file(request, dataclasses.replace(fault, body=None))
        elif fault.status is not None:
            self._send_text(request, fault.status, fault, fault.body or b"as you wish\n")
        else:
            self._send_file(request, fault)

    def _shows(self, credential: str) -> bool:
        """True if a header or the query has the text."""
        return credential in urlsplit(self.path).query or any(credential in v for v in self.headers.values())

    def _send_file(self, request: Request, fault: Fault) -> None:
        file = self._open_file(request.path, fault)
        if file is None:
            self._send_text(request, 404, fault, b"no such file\n")
            return
        with file:
            size, etag, modified = _facts(file)
            expected = fault.headers.get("ETag", etag)
            match, condition = self.headers.get("If-Match"), self.headers.get("If-Range")
            if fault.ignore_conditions:
                match = condition = None
            if match not in {None, "*", expected}:
                self._send_text(request, 412, fault, b"another version\n")
                return
            start, stop = 0, size
            ranged = request.start is not None and not fault.ignore_range
            if ranged and condition in {None, expected, modified}:
                start, stop = _resolve(request, size)
                if start >= stop:
                    self._send_text(request, 416, fault, b"", {"Content-Range": f"bytes */{size}"})
                    return
                request.status = 206
            else:
                request.status = 200
            headers = {"ETag": etag, "Last-Modified": modified, "Accept-Ranges": "bytes"}
            if request.status == 206:
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            request.first = start
            self._send_head(request.status, fault, stop - start, headers)
            if request.method == "GET":
                self._send_body(request, file, start, stop, size, fault)

    def _open_file(self, path: str, fault: Fault) -> BinaryIO | None:
        if fault.body is not None:
            return io.BytesIO(fault.body)
        place = (self.shards.root / path).resolve()
        if not place.is_relative_to(self.shards.root) or not place.is_file():
            return None
        return place.open("rb", buffering=0)

    def _send_text(
        self,
        request: Request,
        status: int,
        fault: Fault,
        body: bytes,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        request.status = status
        self._send_head(status, fault, len(body), dict(headers or {}))
        if request.method == "GET":
            self._send_body(request, io.BytesIO(body), 0, len(body), len(body), fault)

    def _send_head(self, status: int, fault: Fault, length: int, headers: dict[str, str]) -> None:
        if fault.framing == "length":
            headers["Content-Length"] = str(length)
        elif fault.framing == "chunked":
            headers["Transfer-Encoding"] = "chunked"
        else:
            headers["Connection"] = "close"
            self.close_connection = True
        self.send_response(status)
        for name, value in {**headers, **fault.headers}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()

    def _send_body(
        self, request: Request, file: BinaryIO, start: int, stop: int, size: int, fault: Fault
    ) -> None:
        slow = Link(fault.bytes_per_second, self.shards.closed)
        links = [self.shards.link, self.own_link, slow]
        cut = stop if fault.cut_after_bytes is None else min(stop, start + fault.cut_after_bytes)
        stall = None if fault.stall_after_bytes is None else start + fault.stall_after_bytes
        position = start
        if fault.drip == "chunk size":
            self._drip(fault)
            return
        while position < cut:
            stalled = stall is not None and position >= stall
            allowed = self._may_send(position, size, stalled)
            if allowed <= position:
                break
            until = min(cut, allowed, stall if stall is not None else cut)
            n = min(until - position, *(link.piece_bytes for link in links))
            for link in links:
                link.take(n)
            # Counted before sending, so that a client with the bytes finds them in the log; corrected after.
            request.sent += n
            sent = 0
            try:
                sent = self._send_piece(file, position, n, fault.framing == "chunked")
            finally:
                request.sent += sent - n
            position += sent
        if position < stop:
            self._break_off(fault)
        elif fault.drip is not None:
            self._drip(fault)
        elif fault.framing == "chunked":
            self.wfile.write(b"0\r\n\r\n")

    def _drip(self, fault: Fault) -> None:
        first, piece = _DRIPS[fault.drip or ""]
        self.close_connection = True
        self.wfile.write(first)
        while self._is_connected() and not self.shards.closed.wait(_DRIP_SECONDS):
            self.wfile.write(piece)

    def _may_send(self, position: int, size: int, stalled: bool) -> int:
        """Number of bytes of the file that may be sent; waits until it is more than `position`."""
        shards = self.shards
        shards.wait_while(lambda: stalled or shards.gate(size) <= position, self._is_connected)
        return position if stalled or shards.closed.is_set() else shards.gate(size)

    def _is_connected(self) -> bool:
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)
        return not poll.poll(0)

    def _send_piece(self, file: BinaryIO, position: int, n: int, chunked: bool) -> int:
        if not chunked and not isinstance(file, io.BytesIO) and self.shards.tls_context is None:
            return os.sendfile(self.connection.fileno(), file.fileno(), position, n)
        file.seek(position)
        piece = file.read(min(n, 256 * 1024))
        if chunked:
            self.wfile.write(b"%x\r\n" % len(piece) + piece + b"\r\n")
        else:
            self.wfile.write(piece)
        return len(piece)

    def _break_off(self, fault: Fault) -> None:
        self.close_connection = True
        if fault.reset:
            no_linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
            self.connection.close()


def _facts(file: BinaryIO) -> tuple[int, str, str]:
    """Size, ETag and Last-Modified."""
    if isinstance(file, io.BytesIO):
        body = file.getvalue()
        return len(body), f'"body-{hash(body) & 0xFFFFFFFF:x}"', email.utils.formatdate(0, usegmt=True)
    status = os.fstat(file.fileno())
    etag = f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
    return status.st_size, etag, email.utils.formatdate(status.st_mtime, usegmt=True)


def _asked_range(header: str | None) -> tuple[int | None, int | None]:
    """A Range header as a half-open range; the last n bytes are (-n, None)."""
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None or match.group(0) == "bytes=-":
        return None, None
    first, last = match.groups()
    if not first:
        return -int(last), None
    return int(first), int(last) + 1 if last else None


def _resolve(request: Request, size: int) -> tuple[int, int]:
    assert request.start is not None
    start = request.start if request.start >= 0 else max(0, size + request.start)
    return start, size if request.stop is None else min(request.stop, size)


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
