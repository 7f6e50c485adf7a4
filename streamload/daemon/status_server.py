"""The status server of a daemon: /metrics (for Prometheus), /healthz and /status; on localhost by default.

It serves no secrets, as shards are named without users and queries, and no files. A request has a deadline,
connections are limited, and requests under a foreign host name (DNS rebinding) are refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import ipaddress
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from streamload.daemon.status import Status
from streamload.errors import OptionError

DEFAULT_LISTEN = "127.0.0.1:9433"
_STALE_SECONDS = 300.0
"""A daemon that hasn't looked for so long is unhealthy."""
_ANSWER_SECONDS = 10.0
"""The deadline of a request and its response, however slow the client is."""
_CONNECTIONS = 16
_OWN_ZONES = frozenset({"localhost", "local", "internal", "svc"})
"""Top-level names that can't be registered: a name with one was given by the local network."""

METRICS: dict[str, tuple[str, str, Callable[[Status], float]]] = {
    "shards_wanted": ("gauge", "shards in the window", lambda s: s.wanted),
    "shards_held": (
        "gauge",
        "those that are held; near wanted: readers find all that they need",
        lambda s: s.held,
    ),
    "shards_working": ("gauge", "those that this daemon works on", lambda s: len(s.working)),
    "shards_elsewhere": ("gauge", "those that others have a lease of", lambda s: s.elsewhere),
    "shards_failing": ("gauge", "those that could not be had lately", lambda s: len(s.failed)),
    "shards_brought_total": ("counter", "tasks that this daemon has brought", lambda s: s.done),
    "origin_bytes_total": ("counter", "bytes received from origins", lambda s: s.bytes_arrived),
    "leases_taken_over_total": ("counter", "leases of daemons that had gone", lambda s: s.taken_over),
    "preempted": ("gauge", "1: this machine will be taken away", lambda s: int(bool(s.notice))),
    "seconds_since_look": ("gauge", "age of what is said here", lambda s: round(s.seconds_since_look, 3)),
}


def metrics_text(status: Status) -> str:
    """A status in Prometheus' text format."""
    lines = []
    for name, (kind, meaning, value) in METRICS.items():
        full = f"streamload_daemon_{name}"
        lines += [f"# HELP {full} {meaning}", f"# TYPE {full} {kind}", f"{full} {value(status)}"]
    return "\n".join(lines) + "\n"


def complaint(status: Status) -> str:
    """Why a daemon is unhealthy; "" if it is healthy."""
    if status.seconds_since_look > _STALE_SECONDS:
        return f"nothing was looked at for {status.seconds_since_look:.0f} s"
    return status.trouble


class StatusServer:
    """Serves a daemon's status; a context manager.

    Args:
        status: called for each request, from any thread.
        listen: address and port; port 0: any.

    Attributes:
        url: its address.

    Raises:
        OptionError: `listen` isn't an address and port, or is in use.
    """

    def __init__(self, status: Callable[[], Status], listen: str = DEFAULT_LISTEN):
        host, port = listen_at(listen)

        class Handler(_Handler):
            pass

        Handler.status = staticmethod(status)
        try:
            self._server = _Server((host, port), Handler)
        except (OSError, OverflowError) as exc:
            raise OptionError(f"can't listen on {listen}: {exc}; choose another with --listen") from exc
        self.url = url_at(host, self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="streamload-status", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> StatusServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[_Handler]):
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._guard = threading.Lock()
        self._deadlines: dict[socket.socket, float] = {}  # of open connections
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread; close it if there are too many."""
        with self._guard:
            is_one_too_many = len(self._deadlines) >= _CONNECTIONS
            if not is_one_too_many:
                self._deadlines[request] = time.monotonic() + _ANSWER_SECONDS
        if is_one_too_many:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._guard:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections past their deadline; called several times a second."""
        now = time.monotonic()
        with self._guard:
            for request, deadline in self._deadlines.items():
                if deadline <= now:
                    with contextlib.suppress(OSError):  # its thread wakes up and closes it
                        request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log nothing about clients that disconnect or time out."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(http.server.BaseHTTPRequestHandler):
    """Serves the three paths."""

    status: Callable[[], Status]
    timeout = _ANSWER_SECONDS
    server_version = "streamload"
    sys_version = ""

    def do_GET(self) -> None:
        """Serve a request."""
        if not is_own_name(self.headers.get("Host", "")):
            text = "ask by the address of this machine, or by its own name\n"
            self._answer(421, "text/plain; charset=utf-8", text)
            return
        status = type(self).status()
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, "text/plain; version=0.0.4; charset=utf-8", metrics_text(status))
        elif path == "/healthz":
            trouble = complaint(status)
            self._answer(503 if trouble else 200, "text/plain; charset=utf-8", (trouble or "ok") + "\n")
        elif path == "/status":
            self._answer(200, "application/json", json.dumps(dataclasses.asdict(status)))
        else:
            self._answer(404, "text/plain; charset=utf-8", "there are /metrics, /healthz and /status\n")

    def _answer(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (http.server's name)
        """Don't log requests."""


def is_own_name(host: str) -> bool:
    """Whether a Host header names this machine; "": the client sent none.

    Safe from DNS rebinding: IP addresses, names of the local network, and the machine's own name.
    """
    name = host.strip().lower()
    if not name.endswith("]"):  # [::1] without a port
        name = name.rpartition(":")[0] if name.rpartition(":")[2].isdecimal() else name
    name = name.strip("[]").rstrip(".")
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return "." not in name or name.rpartition(".")[2] in _OWN_ZONES or name == socket.getfqdn().lower()


def listen_at(listen: str) -> tuple[str, int]:
    """Address and port of "127.0.0.1:9433" or "[::1]:9433".

    Raises:
        OptionError: the value has another form.
    """
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise OptionError(f'listen={listen!r} is no address and port; expected "127.0.0.1:9433"')
    return host.strip("[]"), int(port)


def url_at(host: str, port: int) -> str:
    """The URL of the status server at an address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
