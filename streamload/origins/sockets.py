"""HTTP connections that stop waiting within a tenth of a second once the loader stops (step F).

The sockets wake up ten times a second, check the stop event and count towards the stall deadline. A head, a
chunk's size line and trailers may arrive a byte at a time and never stall, so an absolute deadline applies to
all receives of the thread while one of these is read (`within`). Each address is checked before connecting
(access.py).
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import http
import http.client
import io
import ipaddress
import logging
import math
import os
import re
import select
import socket
import ssl
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO
from urllib.parse import unquote_to_bytes, urlsplit

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import LocationParseError
from urllib3.util import parse_url

from streamload.errors import OriginError, OriginStopped, OriginTimeout, OriginUnavailable
from streamload.origins.access import refuse_address, refuse_behind_proxy
from streamload.origins.protocol import OriginOptions, Session, is_unreachable
from streamload.urls import redact
from streamload.urls.identity import DEFAULT_PORTS

WAKE_SECONDS = 0.1
_KEPT_SECONDS = 5.0
"""The longest time that a connection is idle before another shard is asked for over it."""
_INFORMATIONAL = 100
"""Answers before the final one, at most."""
_HEAD_BYTES = 300 << 10
"""The size of a head, at most; as curl's."""
_SEND_BYTES = 64 << 10
_VERSION = re.compile(rb"\Ahttp/(?:1\.1|2)(?=[ \t])", re.IGNORECASE)
_INFORMS = re.compile(rb"HTTP/1\.[0-9]\s+1(?!01)[0-9]{2}(?![0-9])")
_FRAMING = frozenset(("connection", "content-length", "keep-alive", "proxy-connection", "transfer-encoding"))


class _ThreadState(threading.local):
    is_requesting = False
    deadline = math.inf
    waited_seconds = 0.0


_thread = _ThreadState()
logging.getLogger("urllib3.connectionpool").addFilter(lambda record: not _thread.is_requesting)


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Keep a request of this thread out of urllib3's debug log, which shows URLs with their signatures."""
    _thread.is_requesting = True
    try:
        yield
    finally:
        _thread.is_requesting = False


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError from what this thread sends and receives after a deadline, even while bytes move.

    A deadline within another one never comes after it.
    """
    before = _thread.deadline
    _thread.deadline = min(before, time.monotonic() + seconds)
    try:
        yield
    finally:
        _thread.deadline = before


def waited_seconds() -> float:
    """Return how long the receives of this thread have waited for the network.

    Bytes that have come already aren't waited for, however long a busy processor takes to read them.
    """
    return _thread.waited_seconds


class _Patient:
    """Reads that wait up to `stall_seconds` for a byte, unless `stop` or the thread's deadline ends them."""

    stop = threading.Event()  # never set; for sockets without a session
    stall_seconds = OriginOptions().stall_seconds

    def recv_into(self, *args: Any) -> int:
        return self._patiently(super().recv_into, *args)  # type: ignore[misc,no-any-return]

    def recv(self, *args: Any) -> bytes:  # used by TLS within TLS
        return self._patiently(super().recv, *args)  # type: ignore[misc,no-any-return]

    def _patiently(self, act: Callable[..., Any], *args: Any) -> Any:
        left_seconds = self.stall_seconds
        poll = select.poll()
        poll.register(self, select.POLLIN)  # type: ignore[arg-type]
        while True:
            if self.stop.is_set() or time.monotonic() >= _thread.deadline:
                raise TimeoutError("timed out")
            has_come, start_seconds = poll.poll(0), time.monotonic()
            try:
                return act(*args)
            except TimeoutError:
                left_seconds -= WAKE_SECONDS  # however long a busy processor or a stopped process made it
                if left_seconds <= 0:
                    raise
            finally:
                if not has_come:
                    _thread.waited_seconds += time.monotonic() - start_seconds

    def send(self, data: Any, *args: Any) -> int:
        """Send some of the data; waits for room as reads do for a byte."""
        left_seconds, data = self.stall_seconds, memoryview(data).cast("B")[:_SEND_BYTES]
        while True:
            if self.stop.is_set() or time.monotonic() >= _thread.deadline:
                raise TimeoutError("timed out")
            try:
                return super().send(data, *args)  # type: ignore[misc,no-any-return]
            except TimeoutError:
                left_seconds -= WAKE_SECONDS
                if left_seconds <= 0:
                    raise


class _PatientSocket(_Patient, socket.socket):
    def sendall(self, data: Any, *args: Any) -> None:
        """Send all of the data, in pieces: socket's own allows WAKE_SECONDS for all of it."""
        view, sent = memoryview(data).cast("B"), 0
        while sent < len(view):
            sent += self.send(view[sent:], *args)


class _PatientTLSSocket(_Patient, ssl.SSLSocket):
    def recv_into(self, *args: Any) -> int:
        """Read all records that have arrived: one has at most 16 KB, and costs as much as a whole chunk."""
        got = super().recv_into(*args)
        if not got or len(args) > 1:
            return got
        view = memoryview(args[0]).cast("B")
        patience = self.gettimeout()
        self.settimeout(0.0)
        try:
            while got < len(view) and (more := ssl.SSLSocket.recv_into(self, view[got:])):
                got += more
        except OSError:  # no further whole record, or a broken connection, which the next read reports
            pass
        finally:
            self.settimeout(patience)
        return got

    def do_handshake(self, block: bool = False) -> None:
        self._patiently(super().do_handshake, block)


class _PatientContext(ssl.SSLContext):
    """Wraps sockets with their stop event and patience, from the handshake on."""

    def wrap_socket(self, sock: Any, *args: Any, **facts: Any) -> ssl.SSLSocket:
        tls: Any = super().wrap_socket(sock, *args, **facts | {"do_handshake_on_connect": False})
        tls.stop, tls.stall_seconds = sock.stop, sock.stall_seconds
        try:
            tls.do_handshake()
        except BaseException:
            tls.close()
            raise
        return tls  # type: ignore[no-any-return]


def receive(response: urllib3.BaseHTTPResponse, most_bytes: int, session: Session) -> bytes:
    """Return some bytes of a body, b"" at its end. Their framing may take no longer than a stall."""
    with within(session.options.stall_seconds):
        return response.read1(most_bytes, decode_content=False) or b""


def pools_for(session: Session) -> Pools:
    """Return the connections for a shard: those that this thread has kept, or new ones.

    Kept ones that were idle for long are closed first: a router may have dropped them silently.
    """
    if session.kept is None:
        return Pools(session)
    thread, by_thread = threading.get_ident(), session.kept.by_thread
    pools: Pools | None = by_thread.get(thread)
    if pools is not None and time.monotonic() - pools.ended_at > _KEPT_SECONDS:
        pools.close()
    if pools is None or not pools.serve(session):
        if pools is not None:
            pools.close()
        pools = by_thread[thread] = Pools(session)
    return pools


class Pools:
    """Keep-alive connections, through the proxies of the environment. Thread-safe.

    Args:
        connections: kept for each host or proxy.
    """

    def __init__(self, session: Session, connections: int = 1) -> None:
        self.session = session
        self._connections = connections
        self._timeout = urllib3.Timeout(connect=session.options.connect_seconds, read=WAKE_SECONDS)
        self.ended_at = math.inf
        self._lock = threading.Lock()  # guards _managers
        self._managers: dict[tuple[str | None, str], urllib3.PoolManager] = {}
        self._proxies: dict[str, str | None] = {}

    def request(
        self,
        url: str,
        headers: Mapping[str, str],
        authorities: str = "",
        method: str = "GET",
        body: bytes | None = None,
    ) -> urllib3.BaseHTTPResponse:
        """Send a request through the proxy for this URL, if any. Follows no redirects.

        Args:
            authorities: a file of certificates to trust instead of the default ones.
        """
        host = "/".join(url.split("/", 3)[:3])
        if host not in self._proxies:  # all of the environment is read for it
            self._proxies[host] = _proxy_for(url)
        proxy = self._proxies[host]
        if proxy is not None:
            parts = urlsplit(url)
            port = parts.port or DEFAULT_PORTS.get(parts.scheme.lower())
            refuse_behind_proxy(parts.hostname or "", port, self.session.named)
        with self._lock:
            pools = self._managers.get((proxy, authorities))
            if pools is None:
                pools = self._managers[proxy, authorities] = self._opened(proxy, authorities)
        facts: dict[str, Any] = {"preload_content": False, "redirect": False, "retries": False}
        with unlogged():
            return pools.request(method, url, body=body, headers=headers, timeout=self._timeout, **facts)

    def serve(self, session: Session) -> bool:
        """True if the connections of this session may be used for another one."""
        mine = self.session
        has_same_reach = mine.named is session.named and mine.options is session.options
        return has_same_reach and mine.stop is session.stop

    def end(self) -> None:
        """A shard has come: close the idle connections, unless they are kept for the next one."""
        if self.session.kept is None:
            self.close()
        self.ended_at = time.monotonic()

    def close(self) -> None:
        """Close idle connections. Further requests are allowed."""
        with self._lock:
            managers = list(self._managers.values())
        self._proxies.clear()
        for manager in managers:
            for key in manager.pools.keys():  # noqa: SIM118  (not iterable)
                pool = manager.pools.get(key)
                if pool is not None:
                    pool.close()  # clear() alone leaves it to the garbage collector
            manager.clear()

    def _opened(self, proxy: str | None, authorities: str) -> urllib3.PoolManager:
        facts: dict[str, Any] = {"maxsize": self._connections}
        if proxy is None:
            pools = urllib3.PoolManager(**facts)
        else:
            place = parse_url(proxy)
            if place.auth:
                facts["proxy_headers"] = {"Proxy-Authorization": basic(place.auth)}
            if place.scheme == "https":
                facts["proxy_ssl_context"] = _tls_context("")
            pools = urllib3.ProxyManager(place._replace(auth=None).url, **facts)
        # A proxy comes from the environment, so it may have any address.
        session = self.session if proxy is None else dataclasses.replace(self.session, named=None)
        plain = type("_Plain", (_Connecting, HTTPConnection), {"session": session})
        secure = type("_Secure", (_Connecting, HTTPSConnection), {"session": session})
        pools.pool_classes_by_scheme = {
            "http": type("_PlainPool", (urllib3.HTTPConnectionPool,), {"ConnectionCls": plain}),
            "https": type(
                "_OwnSecurePool", (_SecurePool,), {"ConnectionCls": secure, "authorities": authorities}
            ),
        }
        return pools


def basic(user: str) -> str:
    """Return the Authorization header for a URL's user and password, given percent-encoded."""
    name, _, password = user.partition(":")
    return "Basic " + base64.b64encode(b":".join(map(unquote_to_bytes, (name, password)))).decode()


class _SecurePool(urllib3.HTTPSConnectionPool):
    authorities: str

    def __init__(self, *args: Any, **facts: Any) -> None:
        super().__init__(*args, **facts | {"ssl_context": _tls_context(self.authorities)})


class _FinalAnswer(http.client.HTTPResponse):
    """An answer that comes behind any informational ones (1xx). curl's limits and leniency apply to its head.

    http.client takes 100 headers, loses those after a line without a colon, and ends lines at any character
    that Unicode counts as a line's end. It gets the headers that frame the body, and no others.
    """

    def begin(self) -> None:
        """Read the head."""
        if getattr(self, "headers", None) is not None:
            return
        stream = self.fp
        for _ in range(_INFORMATIONAL):
            status_line, headers = _head(stream)
            if not _INFORMS.match(status_line):
                break
        else:
            raise http.client.HTTPException(f"more than {_INFORMATIONAL} informational answers")
        framing = (f"{k}: {v}\r\n".encode("latin-1") for k, v in headers.items() if k.lower() in _FRAMING)
        self.fp = io.BufferedReader(io.BytesIO(b"".join([status_line, *framing, b"\r\n"])))
        try:
            super().begin()
        finally:
            self.fp = stream
        self.headers = self.msg = headers

    def _get_chunk_left(self) -> int | None:
        if self.chunk_left == 0:
            self.fp.readline(3)  # the end of a chunk: some servers send a line feed alone
            self.chunk_left = None
        return super()._get_chunk_left()  # type: ignore[misc,no-any-return]


def _head(stream: BinaryIO) -> tuple[bytes, http.client.HTTPMessage]:
    """Return the status line and the headers; chunks take precedence over a length (RFC 9112, 6.3)."""
    lines: list[bytes] = []
    left = _HEAD_BYTES
    while (line := stream.readline(left + 1)).strip(b"\r\n"):
        left -= len(line)
        if left < 0:
            raise http.client.HTTPException(f"more than {_HEAD_BYTES >> 10} KB of headers")
        if line[:1] in {b" ", b"\t"} and len(lines) > 1:  # folded
            lines[-1] = lines[-1].rstrip() + b" " + line.strip()
        else:
            lines.append(line)
    if not line and not lines:
        raise http.client.RemoteDisconnected("the server closed the connection without an answer")
    headers = http.client.HTTPMessage()
    for line in lines[1:]:
        name, colon, value = line.decode("latin-1").partition(":")
        if colon and not (name.lower() == "location" and name in headers):
            headers[name.strip()] = value.strip()
    lengths = {
        length.strip() for value in headers.get_all("Content-Length", ()) for length in value.split(",")
    }
    del headers["Content-Length"]
    codings = ",".join(headers.get_all("Transfer-Encoding", ())).lower().replace(" ", "").split(",")
    if "chunked" in codings:
        del headers["Transfer-Encoding"]
        headers["Transfer-Encoding"] = "chunked"
    elif len(lengths) > 1:
        raise OriginError(f"contradictory lengths in its answer: {', '.join(sorted(lengths))[:80]}")
    elif lengths:
        headers["Content-Length"] = lengths.pop()
    for coding in set(codings) - {"chunked", "identity", ""}:
        headers["Content-Encoding"] = coding
    return _VERSION.sub(b"HTTP/1.1", lines[0] if lines else line), headers


class _Connecting:
    """Connects for both kinds of urllib3's connections."""

    response_class = _FinalAnswer

    session: Session
    sock: Any
    port: int
    _dns_host: str

    def _new_conn(self) -> socket.socket:
        sock = _connect(self._dns_host, self.port, self.session)
        # For a proxy and the TLS handshake.
        seconds = 2 * self.session.options.connect_seconds
        _thread.deadline = min(_thread.deadline, time.monotonic() + seconds)
        return sock

    def getresponse(self) -> Any:
        """Read the head of an answer, and any `100 Continue` before it, within `stall_seconds`."""
        with within(self.session.options.stall_seconds):
            return super().getresponse()  # type: ignore[misc]

    def connect(self) -> None:
        options = self.session.options
        try:
            with within(math.inf):
                super().connect()  # type: ignore[misc]
        except TimeoutError as exc:
            if isinstance(exc, OriginError):
                raise
            problem = f"{self._dns_host}:{self.port} accepts the connection, but sends nothing"
            raise OriginTimeout(f"{problem} for {options.connect_seconds:g} s") from exc
        sock = getattr(self.sock, "socket", self.sock)  # TLS within TLS wraps its socket
        sock.stall_seconds = options.stall_seconds


def _connect(host: str, port: int, session: Session) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        error = OriginUnavailable(f"no address for the host {host!r}: {exc}")
        error.is_unreachable = is_unreachable(exc)
        raise error from exc
    failure: Exception | None = None
    for family, kind, protocol, _, address in addresses:
        refuse_address(host, port, str(address[0]), session.named)
        sock = _PatientSocket(family, kind, protocol)
        try:
            _finish_connecting(sock, address, session)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(WAKE_SECONDS)
        except OSError as exc:
            sock.close()
            if session.stop.is_set():
                raise
            failure = exc
        else:
            sock.stop, sock.stall_seconds = session.stop, session.options.connect_seconds  # until connected
            return sock
    if isinstance(failure, TimeoutError):
        raise OriginTimeout(f"no connection to {host}:{port} in {session.options.connect_seconds:g} s")
    error = OriginUnavailable(f"no connection to {host}:{port}: {failure}")
    error.is_unreachable = failure is not None and is_unreachable(failure)
    raise error from failure


def _finish_connecting(sock: socket.socket, address: Any, session: Session) -> None:
    sock.setblocking(False)
    deadline = time.monotonic() + session.options.connect_seconds
    try:
        sock.connect(address)
    except BlockingIOError:
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        while not poll.poll(WAKE_SECONDS * 1000):
            if session.stop.is_set():
                raise OriginStopped("stopped while connecting") from None
            if time.monotonic() >= deadline:
                raise TimeoutError from None
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, f"{address[0]}: {os.strerror(error)}") from None


def _proxy_for(url: str) -> str | None:
    """Return the URL of the proxy that the environment names for a URL, if any."""
    if not any(name[-6:].lower() == "_proxy" for name in os.environ):  # as urllib names them
        return None
    parts = urlsplit(url)
    named = urllib.request.getproxies()
    if _is_exempt(parts.hostname or "", named.get("no", "")):
        return None
    name = parts.scheme.lower() if named.get(parts.scheme.lower()) else "all"
    proxy = named.get(name)
    if not proxy:
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    with contextlib.suppress(LocationParseError):
        place = parse_url(proxy)
        is_cut_short = "@" in f"{place.path}{place.query}{place.fragment}"  # e.g. a slash in a password
        if place.scheme in {"http", "https"} and place.host and not is_cut_short:
            return proxy
    kind, _, address = proxy.partition("://")
    shown = redact(f"http://{address.rpartition('@')[2]}").removeprefix("http")
    raise OriginError(
        f"{redact(url)}: {name}_proxy is {kind if kind.isalnum() else '***'}{shown} and can't be used: "
        "expected an http:// or https:// URL of host and port, with user and password percent-encoded"
    )


def _is_exempt(host: str, no_proxy: str) -> bool:
    """Return whether `no_proxy` names a host, read as by curl: domains, addresses, networks, or "*" alone."""
    if no_proxy.strip() == "*":
        return True
    address = None
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
    for entry in re.split(r"[\s,]+", no_proxy.lower()):
        if address is None:
            name = entry.removeprefix(".").removesuffix(".")
            if name and f".{host.lower().removesuffix('.')}".endswith(f".{name}"):
                return True
        elif re.fullmatch(r"[^/]+(/0*[1-9][0-9]*)?", entry):
            with contextlib.suppress(ValueError):
                if address in ipaddress.ip_network(re.sub(r"[\[\]]", "", entry), strict=False):
                    return True
    return False


@functools.lru_cache(maxsize=4)
def _tls_context(authorities: str) -> ssl.SSLContext:
    """Return the TLS context of the process, created on first use: the certificates take 40 ms and 1 MB.

    Args:
        authorities: a file of certificates to trust; "": the default ones.

    Raises:
        OriginError: the file can't be read, or has no certificate.
    """
    context = _PatientContext(ssl.PROTOCOL_TLS_CLIENT)
    if sys.version_info >= (3, 13):  # as ssl.create_default_context, which can't create our class
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VERIFY_X509_STRICT
    if not authorities:
        context.load_default_certs()
    else:
        try:
            context.load_verify_locations(authorities)
        except OSError as exc:  # ssl.SSLError is one
            raise OriginError(f"the certificates in {authorities} can't be loaded: {exc}") from exc
    context.sslsocket_class = _PatientTLSSocket
    return context
