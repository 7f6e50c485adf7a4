"""An HTTP server for a few pages of text that a process makes about itself; on localhost by default.

It serves no files. A request has a deadline, connections are limited, and requests under a foreign host name
(DNS rebinding) are refused. What the pages say is status_server.py's and metrics_server.py's.
"""

from __future__ import annotations

import contextlib
import http.server
import ipaddress
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from streamload import limits
from streamload.errors import OptionError
from streamload.options import listen_at

_ANSWER_SECONDS = 10.0
"""The deadline of a request and its response, however slow the client is."""
_CONNECTIONS = 16
_OWN_ZONES = frozenset({"localhost", "local", "internal", "svc"})
"""Top-level names that can't be registered: a name with one was given by the local network."""
_PLAIN = "text/plain; charset=utf-8"


_Own = TypeVar("_Own", bound="PageServer")


class Page(NamedTuple):
    """The response."""

    text: str
    kind: str = _PLAIN
    code: int = 200


class PageServer:
    """Serves pages in threads of its own; a context manager.

    Args:
        pages: by path; called for each request, from any thread.
        listen: address and port; port 0: any.

    Attributes:
        url: its address.

    Raises:
        OptionError: `listen` isn't an address and port, or is in use.
    """

    def __init__(self, pages: Mapping[str, Callable[[], Page]], listen: str):
        host, port = listen_at(listen)

        class Handler(_PageHandler):
            pass

        Handler.pages = dict(pages)
        try:
            self._server = _Server((host, port), Handler)
        except (OSError, OverflowError) as exc:
            raise OptionError(f"can't listen on {listen}: {exc}; choose another address or port") from exc
        self.url = url_at(host, self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="streamload-pages", daemon=True
        )
        limits.start(self._thread)

    def __enter__(self: _Own) -> _Own:
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

    def __init__(self, address: tuple[str, int], handler: type[_PageHandler]):
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

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        limits.note_thread()
        super().process_request_thread(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections past their deadline; called several times a second."""
        now_seconds = time.monotonic()
        with self._guard:
            for request, deadline in self._deadlines.items():
                if deadline <= now_seconds:
                    with contextlib.suppress(OSError):  # its thread wakes up and closes it
                        request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _PageHandler(http.server.BaseHTTPRequestHandler):
    pages: Mapping[str, Callable[[], Page]]
    timeout = _ANSWER_SECONDS
    server_version = "streamload"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not is_own_name(self.headers.get("Host", "")):
            page = Page("ask by the address of this machine, or by its own name\n", code=421)
        elif path in self.pages:
            page = self.pages[path]()
        else:
            page = Page(f"there are {', '.join(self.pages)}\n", code=404)
        body = page.text.encode()
        self.send_response(page.code)
        self.send_header("Content-Type", page.kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (http.server's name)
        """Don't log requests."""


def is_own_name(host: str) -> bool:
    """True if a Host header names this machine; "": the client sent none.

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


def url_at(host: str, port: int) -> str:
    """The URL of a server at an address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
