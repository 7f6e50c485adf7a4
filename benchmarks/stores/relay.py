"""The wire in front of a store: it passes on what both sides say, and holds or breaks it when told to."""

from __future__ import annotations

import re
import select
import socket
import threading
from dataclasses import dataclass

_LOOK_SECONDS = 0.02
_PIECE_BYTES = 4096
_RANGE = re.compile(rb"^range: *bytes=(\d+)-", re.IGNORECASE | re.MULTILINE)
_STATUS = re.compile(rb"HTTP/1\.\d (\d{3})")


@dataclass
class Exchange:
    """A request that went by, and the status of its answer (0: none yet)."""

    method: str
    path: str
    start: int | None
    """Where the range begins that it asks for."""
    status: int = 0


class Relay:
    """Connections to `endpoint` go to a port on loopback; a context manager.

    Attributes:
        log: the requests, in order.
        held: set once an answer is being held back.
        cuts: how many connections were broken.
    """

    def __init__(self, port: int) -> None:
        self.log: list[Exchange] = []
        self.held = threading.Event()
        self.cuts = 0
        self._port = port
        self._closed = threading.Event()
        self._lock = threading.Lock()
        # Guarded by _lock: what to do once so many more bytes of answers to GETs have gone by.
        self._left: int | None = None
        self._every = self._cuts_left = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, name="relay")]
        self._threads[0].start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hold_after(self, count: int) -> None:
        """Pass on so many more bytes of what is got, then nothing until `go_on`, no request either."""
        with self._lock:
            self._left, self._cuts_left = count, 0

    def cut_after(self, count: int, times: int) -> None:
        """Break the connection after so many more bytes of what is got, and again after as many.

        What is held back goes on until then.
        """
        with self._lock:
            self._left, self._cuts_left, self._every = count, times, count
        self.held.clear()

    def go_on(self) -> None:
        """Pass on everything from now on."""
        with self._lock:
            self._left, self._cuts_left = None, 0
        self.held.clear()

    def close(self) -> None:
        """Break all connections, end all threads; idempotent."""
        self._closed.set()
        self._listening.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        self._listening.settimeout(_LOOK_SECONDS)
        while not self._closed.is_set():
            try:
                client, _ = self._listening.accept()
            except TimeoutError:
                continue
            except OSError:
                return  # closed
            thread = threading.Thread(target=self._pass_on, args=(client,), name="relay")
            self._threads.append(thread)
            thread.start()

    def _pass_on(self, client: socket.socket) -> None:
        """One connection, from both sides, until either closes it."""
        current = Exchange("", "", None)
        with client, socket.create_connection(("127.0.0.1", self._port)) as store:
            while not self._closed.is_set():
                room = self._room(current)
                readable = [] if self.held.is_set() else [client] if room == 0 else [client, store]
                for side in select.select(readable, [], [], _LOOK_SECONDS)[0]:
                    try:
                        data = side.recv(min(_PIECE_BYTES, room) if side is store and room else _PIECE_BYTES)
                        (client if side is store else store).sendall(data)
                    except OSError:
                        return
                    if not data:
                        return
                    if side is client:
                        current = self._noted(data, current)
                    elif self._is_cut(data, current):
                        client.shutdown(socket.SHUT_RDWR)
                        return

    def _noted(self, data: bytes, current: Exchange) -> Exchange:
        """The exchange that a piece of a request belongs to: a new one if it begins one."""
        line = data.partition(b"\r\n")[0].decode("latin-1").split(" ")
        if len(line) != 3 or not line[2].startswith("HTTP/"):
            return current
        found = _RANGE.search(data)
        self.log.append(Exchange(line[0], line[1], int(found[1]) if found else None))
        return self.log[-1]

    def _room(self, current: Exchange) -> int | None:
        """How many bytes of an answer may go by now; None for no limit."""
        with self._lock:
            if self._left is None or current.method != "GET":
                return None
            if self._left == 0:
                self.held.set()
            return self._left

    def _is_cut(self, data: bytes, current: Exchange) -> bool:
        """Count what was passed on of an answer; whether the connection is to break now."""
        if not current.status and (found := _STATUS.match(data)):
            current.status = int(found[1])
        with self._lock:
            if self._left is None or current.method != "GET":
                return False
            self._left = max(0, self._left - len(data))
            if self._left or not self._cuts_left:
                return False
            self.cuts += 1
            self._cuts_left -= 1
            self._left = self._every if self._cuts_left else None
            return True
