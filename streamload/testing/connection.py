"""One connection of a `ShardServer`: responds to its requests correctly, or as a `Fault` says."""

from __future__ import annotations

import dataclasses
import email.utils
import http.server
import io
import os
import re
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from urllib.parse import unquote, urlsplit

from streamload.testing.faults import Fault
from streamload.testing.link import Link

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


class Served(Protocol):
    """The part of a `ShardServer` that a request handler needs."""

    root: Path
    log: list[Request]
    closed: threading.Event
    link: Link
    bytes_per_second_per_connection: float | None
    latency_seconds: float
    tls_context: ssl.SSLContext | None

    def seconds(self) -> float:
        """Time since the server started."""

    def fault_for(self, path: str) -> Fault:
        """The fault of the next request of a path."""

    def gate(self, size: int) -> int:
        """Number of bytes of a file of this size that may be sent now."""

    def wait_while(self, holds: Callable[[], bool], is_connected: Callable[[], bool]) -> None:
        """Wait while `holds()`, the server is open and the client is connected."""


class Connection(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version = "streamload-testing"
    sys_version = ""
    disable_nagle_algorithm = True
    server: Any

    def setup(self) -> None:
        """Start TLS, if the server uses it."""
        self.shards: Served = self.server.shards
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
