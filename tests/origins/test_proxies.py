"""Origins behind the proxies that the environment names."""

from __future__ import annotations

import base64
import contextlib
import random
import shutil
import socket
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamload.errors import OriginDenied, OriginError, OriginStopped
from streamload.origins.origin import OriginOptions, open_origin
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from tests.support.raw_server import RawServer

BODY = random.Random(1).randbytes(1_000_003)
QUICK = OriginOptions(attempts=2, backoff_seconds=0.01, stall_seconds=5.0, connect_seconds=5.0)


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http", "https", "all", "no"):
        monkeypatch.delenv(f"{name}_proxy", raising=False)
        monkeypatch.delenv(f"{name}_PROXY".upper(), raising=False)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    (tmp_path / "a.tar").write_bytes(BODY)
    with ShardServer(tmp_path) as server:
        yield server


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[ShardServer]:
    """A server that answers for every host, as a proxy does."""
    with ShardServer(tmp_path) as proxy:
        yield proxy


class Tunnel(socketserver.ThreadingTCPServer):
    """A proxy that understands CONNECT, for one user or for all; a context manager."""

    daemon_threads = True

    def __init__(self, user: bytes | None = None, tls: tuple[str, str] | None = None) -> None:
        self.user, self.heads = user, list[str]()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if tls else None
        if self.context is not None and tls is not None:
            self.context.load_cert_chain(*tls)
        super().__init__(("127.0.0.1", 0), _Joined)
        self.address = f"127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Joined(socketserver.BaseRequestHandler):
    server: Tunnel

    def handle(self) -> None:
        client = self.request
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            if self.server.context is not None:
                client = opened.enter_context(self.server.context.wrap_socket(client, server_side=True))
            head = client.recv(65536).decode("latin-1")
            self.server.heads.append(head)
            wanted = self.server.user and f"Basic {base64.b64encode(self.server.user).decode()}"
            if wanted and f"Proxy-Authorization: {wanted}\r\n" not in head:
                client.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
                return
            host, _, port = head.split()[1].rpartition(":")
            far = opened.enter_context(socket.create_connection((host, int(port))))
            client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            there = threading.Thread(target=_pump, args=(client, far))
            there.start()
            _pump(far, client)
            there.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while some := source.recv(65536):
            sink.sendall(some)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)


def read(url: str, options: OriginOptions = QUICK, stop: threading.Event | None = None) -> bytes:
    with contextlib.closing(open_origin(url, options=options, stop=stop).open()) as stream:
        return b"".join(stream.chunks())


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
def test_a_proxy_of_the_environment_is_used(
    name: str, proxy: ShardServer, server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "HTTP_PROXY":
        monkeypatch.setenv("all_proxy", "http://127.0.0.1:1")  # for other schemes
    monkeypatch.setenv(name, proxy.url.removeprefix("http://"))
    assert read("http://far-away.invalid/a.tar") == BODY
    assert proxy.log[0].headers["Host"] == "far-away.invalid"


def test_a_proxys_user_and_password_are_sent_to_it_alone(
    proxy: ShardServer, server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", proxy.url.replace("http://", "http://me:p%40%C3%A9@"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    moved = Fault(first=1, status=302, headers={"Location": f"{server.url}/a.tar"})
    proxy.misbehave("a.tar", moved)
    assert read("http://far-away.invalid/a.tar") == BODY
    expected = base64.b64encode("me:p@é".encode()).decode()
    assert proxy.log[0].headers["Proxy-Authorization"] == f"Basic {expected}"
    assert "Proxy-Authorization" not in server.log[0].headers


def test_each_redirect_goes_through_the_proxy_that_is_meant_for_it(
    proxy: ShardServer, server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", proxy.url)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server.misbehave("a.tar", Fault(status=302, headers={"Location": "http://far-away.invalid/a.tar"}))
    assert read(f"{server.url}/a.tar") == BODY
    assert (len(server.log), len(proxy.log)) == (1, 1)


@pytest.mark.parametrize("way", ["http", "https"])
def test_https_goes_through_a_tunnel_however_slow_its_answers_are(
    way: str, trusted: tuple[str, str], tmp_path: Path, server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = trusted if way == "https" else None
    with Tunnel(b"me:pw", tls) as tunnel, ShardServer(tmp_path, tls=trusted, latency_seconds=0.5) as far:
        monkeypatch.setenv("https_proxy", f"{way}://me:pw@{tunnel.address}")
        assert read(f"{far.url}/a.tar", OriginOptions(attempts=1)) == BODY
        assert len(tunnel.heads) == len(far.log) == 1
        assert "Proxy-Authorization" not in far.log[0].headers


@pytest.mark.parametrize("way", ["http", "https"])
def test_a_stopped_loader_does_not_wait_for_an_answer_through_a_tunnel(
    way: str, trusted: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: Any
) -> None:
    stop = threading.Event()
    tls = trusted if way == "https" else None
    with no_leaks(), Tunnel(None, tls) as tunnel, ShardServer(tmp_path, tls=trusted) as far:
        far.misbehave("a.tar", Fault(silent=True))
        monkeypatch.setenv("https_proxy", f"{way}://{tunnel.address}")
        threading.Timer(0.5, stop.set).start()
        with pytest.raises(OriginStopped):
            read(f"{far.url}/a.tar", OriginOptions(stall_seconds=3600, connect_seconds=3600), stop)


def test_a_tunnel_that_wants_another_password_denies(
    trusted: tuple[str, str], server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Tunnel(b"me:pw") as tunnel:
        monkeypatch.setenv("https_proxy", f"http://me:hunter2@{tunnel.address}")
        with pytest.raises(OriginDenied, match="407") as caught:
            read("https://far-away.invalid/a.tar?sig=hunter2")
        assert len(tunnel.heads) == 1
    assert "hunter2" not in str(caught.value)


NO_PROXY = [
    # host, no_proxy, whether curl then connects directly
    ("127.0.0.1", "127.0.0.0/8", True),
    ("127.0.0.1", "127.0.0.1", True),
    ("127.0.0.1", "127.0.0.0/31", True),
    ("127.0.0.1", "10.0.0.0/8,127.0.0.0/8", True),
    ("127.0.0.1", "10.0.0.0/8 , 127.0.0.1/32", True),
    ("127.0.0.1", "*", True),
    ("127.0.0.1", "128.0.0.0/8", False),
    ("127.0.0.1", "0.0.0.0/0", False),
    ("127.0.0.1", "127.0.0.0/33", False),
    ("127.0.0.1", "127.0.0.0/255.0.0.0", False),
    ("127.0.0.1", "127/8", False),
    ("127.0.0.1", ".0.0.1", False),  # requests takes an address for a name
    ("127.0.0.1", "*,x", False),
    ("127.0.0.1", "localhost", False),
    ("127.0.0.1", "::ffff:127.0.0.1", False),
    ("127.0.0.1", "127.0.0.1:PORT", False),
    ("[::1]", "::1", True),
    ("localhost", "localhost", True),
    ("localhost", "LOCALHOST", True),
    ("localhost", ".localhost", True),
    ("localhost", "localhost.", True),
    ("localhost", "x localhost", True),
    ("localhost", "host", False),
    ("localhost", "*host", False),
    ("localhost", "127.0.0.0/8", False),
    ("localhost", "localhost:PORT", False),  # requests heeds ports
    ("localhost", "", False),
]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl isn't installed")
@pytest.mark.parametrize(("host", "no_proxy", "is_direct"), NO_PROXY)
def test_no_proxy_is_read_as_by_curl(
    host: str, no_proxy: str, is_direct: bool, proxy: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (proxy.root / "a.tar").write_bytes(BODY)
    page = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\ndirect"
    with RawServer(lambda _: page, address="::1" if ":" in host else "127.0.0.1") as server:
        url = f"http://{host}:{server.port}/a.tar"
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", no_proxy.replace("PORT", str(server.port)))
        curl = subprocess.run(["curl", "-q", "-sf", url], capture_output=True, check=True, timeout=60)
        assert curl.stdout == (b"direct" if is_direct else BODY)
        assert read(url) == curl.stdout


@pytest.mark.parametrize(
    ("no_proxy", "is_direct"),
    [
        ("::/64", True),
        ("[::1]", True),
        ("[::]/64", True),
        ("0:0::1", True),
        ("fe80::/10", False),
        ("::/0", False),
    ],
)
def test_no_proxy_has_networks_of_ipv6(
    no_proxy: str, is_direct: bool, proxy: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """curl 7.88 compares addresses of IPv6 as text, later ones as addresses."""
    (proxy.root / "a.tar").write_bytes(BODY)
    page = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\ndirect"
    monkeypatch.setenv("http_proxy", proxy.url)
    monkeypatch.setenv("no_proxy", no_proxy)
    with RawServer(lambda _: page, address="::1") as server:
        assert read(f"{server.url}/a.tar") == (b"direct" if is_direct else BODY)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("socks5://me:hunter2@127.0.0.1:1", r"http_proxy is socks5://127\.0\.0\.1:1 "),
        ("http://me:hunter2@127.0.0.1:x", r"http_proxy is http://\*\*\* "),
        ("http://me:hunter2/3@127.0.0.1:1", r"http_proxy is http://127\.0\.0\.1:1 "),
        ("http://me:12/hunter2@127.0.0.1:1", r"http_proxy is http://127\.0\.0\.1:1 "),
        ("hunter2:a://b@127.0.0.1:1", r"http_proxy is \*\*\*://127\.0\.0\.1:1 "),
        ("http://", r"http_proxy is http:// "),
    ],
)
def test_a_proxy_that_cannot_be_used_is_an_error_without_its_password(
    value: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", value)
    with pytest.raises(OriginError, match=shown) as caught:
        read("http://far-away.invalid/a.tar")
    assert type(caught.value) is OriginError
    assert "expected an http:// or https:// URL of host and port" in str(caught.value)
    assert "hunter2" not in str(caught.value)
