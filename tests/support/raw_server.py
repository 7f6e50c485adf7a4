"""A server whose answers are raw bytes, for what no HTTP library would send."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple


class Asked(NamedTuple):
    """A request: its target as sent, its headers by lower-case name, and how many came before it."""

    target: str
    headers: dict[str, str]
    before: int

    @property
    def span(self) -> tuple[int, int | None] | None:
        """The first byte and the last one (None: to the end) of the range that is asked for, if any."""
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        return None if match is None else (int(match[1]), int(match[2]) if match[2] else None)


class RawServer:
    """Sends what `answer` returns to each request, then closes the connection; a context manager.

    Args:
        answer: returns the bytes of an answer. With `keeps`, the connection stays open after it.
        address: of the loopback interface, IPv4 or IPv6.

    Attributes:
        log: the requests so far.
    """

    def __init__(
        self, answer: Callable[[Asked], bytes], *, keeps: bool = False, address: str = "127.0.0.1"
    ) -> None:
        self.log: list[Asked] = []
        self._answer, self._keeps = answer, keeps
        self._lock = threading.Lock()  # guards log and _open
        self._open: set[socket.socket] = set()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://{f'[{address}]' if ':' in address else address}:{self.port}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> RawServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            for connection in (self._listener, *self._open):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,))
            with self._lock:
                self._open.add(connection)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError), connection.makefile("rb") as lines:
            while (asked := self._request(lines.readline, connection)) is not None:
                connection.sendall(self._answer(asked))
                if not self._keeps:
                    connection.shutdown(socket.SHUT_WR)
                    lines.read()  # what the client still sends: closing before would reset the connection
                    break
            with self._lock:
                self._open.discard(connection)

    def _request(self, next_line: Callable[[], bytes], connection: socket.socket) -> Asked | None:
        line = next_line().decode("latin-1")
        if not line:
            return None
        headers: dict[str, str] = {}
        while text := next_line().decode("latin-1").strip():
            name, _, value = text.partition(":")
            headers[name.lower()] = value.strip()
        with self._lock:
            asked = Asked(line.split(" ")[1], headers, len(self.log))
            self.log.append(asked)
        return asked
