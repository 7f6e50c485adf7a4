"""HTTP connections whose waits end within a tenth of a second when the loader stops (step F).

The sockets wake up ten times a second, look at the stop event and count towards the stall deadline; a read
that gets bytes costs nothing more. Also refuses link-local addresses: metadata services of clouds are there.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import os
import select
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from streamload.errors import OriginDenied, OriginStopped, OriginTimeout, OriginUnavailable
from streamload.origins.protocol import Session

WAKE_SECONDS = 0.1
_METADATA_ADDRESSES = frozenset(
    map(ipaddress.ip_address, ("fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "100.100.100.200"))
)


class _Ours(threading.local):
    under_way = False


_ours = _Ours()


def _is_not_ours(record: logging.LogRecord) -> bool:
    return not _ours.under_way


logging.getLogger("urllib3.connectionpool").addFilter(_is_not_ours)


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Keep a request of this thread out of urllib3's debug log, which shows URLs with their signatures."""
    _ours.under_way = True
    try:
        yield
    finally:
        _ours.under_way = False


class _Patient:
    """A socket's reads: wait up to `stall_seconds` for the first byte, but not after `stop`."""

    stop: threading.Event
    stall_seconds: float

    def recv_into(self, *args: Any) -> int:
        deadline = None
        while True:
            try:
                return super().recv_into(*args)  # type: ignore[misc,no-any-return]
            except TimeoutError:
                now = time.monotonic()
                deadline = deadline or now - WAKE_SECONDS + self.stall_seconds
                if self.stop.is_set() or now >= deadline:
                    raise


class _PatientSocket(_Patient, socket.socket):
    pass


class _PatientTLSSocket(_Patient, ssl.SSLSocket):
    pass


def open_pools(session: Session, url: str, connections: int = 1) -> urllib3.PoolManager:
    """Return pools of connections to be kept, through the proxy that the environment names for the URL."""
    plain = type("_Plain", (_Connecting, HTTPConnection), {"session": session})
    secure = type("_Secure", (_Connecting, HTTPSConnection), {"session": session})
    proxy = _proxy_for(url)
    facts: dict[str, Any] = {"maxsize": connections}
    pools = urllib3.ProxyManager(proxy, **facts) if proxy else urllib3.PoolManager(**facts)
    pools.pool_classes_by_scheme = {
        "http": type("_OwnPlainPool", (_PlainPool,), {"ConnectionCls": plain}),
        "https": type("_OwnSecurePool", (_SecurePool,), {"ConnectionCls": secure}),
    }
    return pools


def close_pools(pools: urllib3.PoolManager) -> None:
    """Close connections that wait for another request; clear() alone leaves that to the garbage collector."""
    for key in pools.pools.keys():  # noqa: SIM118  (no dict: it can't be iterated over)
        pool = pools.pools.get(key)
        if pool is not None:
            pool.close()
    pools.clear()


class _Discreet:
    """Pools of urllib3 whose log lines show no query of ours: a signature may be in it."""

    def urlopen(self, *args: Any, **options: Any) -> Any:
        _asking.is_ours = True
        try:
            return super().urlopen(*args, **options)  # type: ignore[misc]
        finally:
            _asking.is_ours = False


class _PlainPool(_Discreet, urllib3.HTTPConnectionPool):
    pass


class _SecurePool(_Discreet, urllib3.HTTPSConnectionPool):
    def __init__(self, *args: Any, **facts: Any) -> None:
        super().__init__(*args, **facts | {"ssl_context": _tls_context()})


class _WithoutQueries(logging.Filter):
    """Takes the queries out of what urllib3 logs while one of our pools asks."""

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(_asking, "is_ours", False) and isinstance(record.args, tuple):
            record.args = tuple(a.partition("?")[0] if isinstance(a, str) else a for a in record.args)
        return True


_asking = threading.local()
logging.getLogger("urllib3.connectionpool").addFilter(_WithoutQueries())


class _Connecting:
    """How both kinds of connections of urllib3 connect."""

    session: Session
    sock: Any
    port: int
    _dns_host: str

    def _new_conn(self) -> socket.socket:
        return _connect(self._dns_host, self.port, self.session)

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        self.sock.stop = self.session.stop  # a TLS socket is made by its context, which knows no session
        self.sock.stall_seconds = self.session.options.stall_seconds


def _connect(host: str, port: int, session: Session) -> socket.socket:
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        raise OriginUnavailable(f"no address for the host {host!r}: {exc}") from exc
    failure: Exception | None = None
    for family, kind, protocol, _, address in found:
        _refuse_metadata(host, str(address[0]))
        sock = _PatientSocket(family, kind, protocol)
        try:
            _finish_connecting(sock, address, session)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(session.options.connect_seconds)  # for a TLS handshake
        except OSError as exc:
            sock.close()
            if session.stop.is_set():
                raise
            failure = exc
        else:
            sock.stop, sock.stall_seconds = session.stop, session.options.stall_seconds
            return sock
    if isinstance(failure, TimeoutError):
        raise OriginTimeout(f"no connection to {host}:{port} in {session.options.connect_seconds:g} s")
    raise OriginUnavailable(f"no connection to {host}:{port}: {failure}") from failure


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


def refuse_metadata_host(host: str) -> None:
    """Raise OriginDenied for a host that is written as an address of a metadata service, in any notation."""
    try:
        address = socket.inet_ntoa(socket.inet_aton(host))  # "0xa9fea9fe" is one, too
    except (OSError, UnicodeError):
        address = host.strip("[]")
    with contextlib.suppress(ValueError):  # a name: what it means is looked at when connecting
        _refuse_metadata(host, address)


def _refuse_metadata(host: str, address: str) -> None:
    ip = ipaddress.ip_address(address.partition("%")[0])
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if ip.is_link_local or ip in _METADATA_ADDRESSES:
        raise OriginDenied(
            f"{host} is the link-local address {ip}: no shards there, but a cloud's credentials"
        )


def _proxy_for(url: str) -> str | None:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if urllib.request.proxy_bypass(f"{host}:{parts.port}" if parts.port else host):
        return None
    proxy = urllib.request.getproxies().get(parts.scheme.lower())
    if proxy and "://" not in proxy:
        proxy = f"http://{proxy}"
    return proxy


@functools.lru_cache(maxsize=1)
def _tls_context() -> ssl.SSLContext:
    """One for the process, and only where TLS is spoken: reading the certificates takes 40 ms and 1 MB."""
    context = ssl.create_default_context()
    context.sslsocket_class = _PatientTLSSocket
    return context
