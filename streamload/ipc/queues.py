"""Queues without threads between a rank and its workers, for torch's DataLoader (step J).

A `multiprocessing.Queue` has a thread in every process that puts: in the rank one for each worker, which
takes the GIL from the training, and in a worker one that takes it from decoding. It also pickles there: a
value that can't be pickled is lost, and the training waits forever. Here `put` does everything itself.
"""

from __future__ import annotations

import array
import copy
import errno
import multiprocessing
import os
import queue
import select
import socket
import sys
import threading
import time
from collections import deque
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from typing import Any

from streamload import limits
from streamload.descriptors import opening
from streamload.errors import NotSendable, StreamloadError
from streamload.ipc import control
from streamload.ipc.shared_memory import memory_file
from streamload.torch_internals import ExceptionWrapper

_PACKET_BYTES = 2048
"""Longer messages are sent in a file. By default a Linux socket has room for 49 packets of this size."""
_ROOM_BYTES = 4 << 20
_RETRY_SECONDS = 0.01
_FULL = frozenset((errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS))
"""The receiver has no room, or has files on their way to it: it is waited for, however long that takes."""
_SHORT = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))
"""A limit of this process or machine is reached: that is waited for some seconds, then it is an error."""
_DESCRIPTOR_SPACE = socket.CMSG_SPACE(array.array("i").itemsize)


def context_with_queues(method: str | None) -> BaseContext | str | None:
    """Return a multiprocessing context with MessageQueues; the method itself if the system has no memfd.

    Args:
        method: the start method; None: Python's default.
    """
    if not hasattr(os, "memfd_create"):
        return method
    context = copy.copy(multiprocessing.get_context(method))
    context.Queue = MessageQueue  # type: ignore[method-assign, assignment]
    return context


class MessageQueue:
    """Messages from any number of processes to one: the part of `multiprocessing.Queue` that DataLoader uses.

    A message arrives whole or not at all, those of one process in order. There are no locks between
    processes, so none waits for another that was killed.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM_BYTES)  # as far as allowed
        self._prepare()

    def _prepare(self) -> None:
        self._readable = select.poll()
        self._readable.register(self._reader, select.POLLIN)
        self._shortage: OSError | None = None  # why the last message wasn't sent, if a limit is the reason
        self._lock = threading.Lock()
        # Guarded by it:
        self._late: deque[tuple[memoryview, Any]] = (
            deque()
        )  # messages without room, and their values' numbers
        self._sender: threading.Thread | None = None  # sends them

    def __getstate__(self) -> dict[str, Any]:
        return {"_reader": self._reader, "_writer": self._writer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._prepare()

    def __del__(self) -> None:
        if hasattr(self, "_writer"):
            self.close()

    def put(self, value: Any) -> None:
        """Send a value without waiting, however many are in the queue.

        Args:
            value: a worker's (number, batch) that can't be pickled is replaced by (number, NotSendable), one
                that a limit keeps from being sent for seconds by (number, LimitReached).

        Raises:
            LimitReached: there is no room now, and no thread can be started that waits for it.
        """
        start_ns = time.monotonic_ns()
        number = value[0] if isinstance(value, tuple) and value else None
        try:
            message = ForkingPickler.dumps(value)
        except Exception as exc:
            refused = NotSendable(f"a batch can't be sent from a worker: {exc}")
            refused.__cause__ = exc
            message = ForkingPickler.dumps((number, _refusal(refused)))
        with self._lock:
            if self._late or not self._is_sent(message):
                self._late.append((message, number))
                if self._sender is None:
                    sender = threading.Thread(target=self._send_late, name="streamload-late", daemon=True)
                    limits.start(sender)
                    self._sender = sender
        control.spend(time.monotonic_ns() - start_ns)

    def get(self, timeout: float | None = None) -> Any:
        """Return the next value.

        Args:
            timeout: in seconds; None: no timeout.

        Raises:
            queue.Empty: none has come.
            LimitReached: this process has too many open files to receive it, and has had for seconds.
        """
        if not self._readable.poll(None if timeout is None else timeout * 1000):
            raise queue.Empty
        start_ns = time.monotonic_ns()
        if self._brings_file():
            self._await_descriptor()
        value = self._receive()
        control.spend(time.monotonic_ns() - start_ns)
        return value

    def _brings_file(self) -> bool:
        """Return whether the next message has a file: without room for one it is said to be cut."""
        _, _, flags, _ = self._reader.recvmsg(1, 0, socket.MSG_PEEK)
        return bool(flags & socket.MSG_CTRUNC)

    def _await_descriptor(self) -> None:
        """Wait until a file can be received: one that comes while the table is full is lost.

        Raises:
            LimitReached: the table has been full for long.
        """
        deadline = time.monotonic() + limits.PATIENCE_SECONDS
        while True:
            try:
                os.close(opening(lambda: os.dup(self._reader.fileno())))
                return
            except OSError as exc:
                if exc.errno not in _SHORT:
                    raise
                if time.monotonic() > deadline:
                    raise limits.reached("a batch can't be received from a worker", exc) from exc
            time.sleep(_RETRY_SECONDS)

    def _receive(self) -> Any:
        packet, files, flags, _ = self._reader.recvmsg(
            _PACKET_BYTES, _DESCRIPTOR_SPACE, socket.MSG_CMSG_CLOEXEC
        )
        if flags & socket.MSG_CTRUNC:
            lost = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            raise limits.reached("a batch from a worker is lost", lost)
        if not files:
            return _loaded(packet)
        [(_, _, descriptor)] = files
        with os.fdopen(int.from_bytes(descriptor, sys.byteorder), "rb") as file:
            file.seek(0)  # the sender left it at its end
            return _loaded(file.read())

    def close(self) -> None:
        """Close both ends; idempotent."""
        self._reader.close()
        self._writer.close()

    def cancel_join_thread(self) -> None:
        """Do nothing: there is no thread to join."""

    def _is_sent(self, message: memoryview) -> bool:
        """Send a message if there is room. Return whether it was sent."""
        try:
            if len(message) <= _PACKET_BYTES:
                self._writer.send(message, socket.MSG_DONTWAIT)
            else:
                self._send_in_file(message)
        except OSError as exc:
            if exc.errno in _FULL or exc.errno in _SHORT:
                self._shortage = exc if exc.errno in _SHORT else None
                return False
            raise
        self._shortage = None
        return True

    def _send_in_file(self, message: memoryview) -> None:
        with os.fdopen(memory_file(), "wb") as file:
            file.write(message)
            file.flush()
            descriptors = array.array("i", [file.fileno()])
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)
            self._writer.sendmsg([b"\0"], [rights], socket.MSG_DONTWAIT)

    def _send_late(self) -> None:
        while True:
            with self._lock:
                if not self._late:
                    self._sender = None
                    return
                message, number = self._late[0]
            try:
                self._send_patiently(message)
            except OSError as exc:
                error = limits.reached("a batch can't be sent from a worker", exc)
                self._send_patiently(ForkingPickler.dumps((number, _refusal(error))))
            self._late.popleft()

    def _send_patiently(self, message: memoryview) -> None:
        """Send a message once there is room.

        Raises:
            OSError: a limit of this process or machine has kept it from being sent for long.
        """
        short_since = 0.0
        while not self._is_sent(message):
            now_seconds = time.monotonic()
            if self._shortage is None:
                short_since = now_seconds
            elif now_seconds - (short_since := short_since or now_seconds) > limits.PATIENCE_SECONDS:
                raise self._shortage
            time.sleep(_RETRY_SECONDS)


def _loaded(message: bytes) -> Any:
    """The value of a message; what a class of the user's raises isn't taken for an end, or for no message."""
    try:
        return ForkingPickler.loads(message)
    except (StopIteration, queue.Empty) as exc:
        raise NotSendable(f"a batch from a worker can't be unpickled: {exc!r}") from exc


def _refusal(error: StreamloadError) -> ExceptionWrapper:
    """Return a wrapped error that torch raises in the rank; small enough for a packet."""
    try:
        raise error from error.__cause__
    except StreamloadError:
        wrapped = ExceptionWrapper(where="in a DataLoader worker process")  # type: ignore[no-untyped-call]
    return wrapped
