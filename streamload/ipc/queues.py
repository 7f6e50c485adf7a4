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

from streamload.errors import NotSendable
from streamload.torch_internals import ExceptionWrapper

_PACKET_BYTES = 2048
"""Longer messages are sent in a file. By default a Linux socket has room for 49 packets of this size."""
_ROOM_BYTES = 4 << 20
_RETRY_SECONDS = 0.01
_FULL = frozenset((errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS))
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


_spent_ns = 0


def spent_ns() -> int:
    """How long this process has spent in sending and receiving messages, without waiting for them."""
    return _spent_ns


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
        self._lock = threading.Lock()
        # Guarded by it:
        self._late: deque[memoryview] = deque()  # messages for which there was no room
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
            value: a worker's (number, batch) that can't be pickled is replaced by (number, NotSendable).
        """
        global _spent_ns
        began = time.monotonic_ns()
        try:
            message = ForkingPickler.dumps(value)
        except Exception as exc:
            number, _ = value
            message = ForkingPickler.dumps((number, _refusal(exc)))
        with self._lock:
            if self._late or not self._is_sent(message):
                self._late.append(message)
                if self._sender is None:
                    self._sender = threading.Thread(
                        target=self._send_late, name="streamload-late", daemon=True
                    )
                    self._sender.start()
        _spent_ns += time.monotonic_ns() - began

    def get(self, timeout: float | None = None) -> Any:
        """Return the next value.

        Args:
            timeout: in seconds; None: no timeout.

        Raises:
            queue.Empty: none has come.
            OSError: it is lost, because this process has too many open files.
        """
        global _spent_ns
        if not self._readable.poll(None if timeout is None else timeout * 1000):
            raise queue.Empty
        began = time.monotonic_ns()
        value = self._receive()
        _spent_ns += time.monotonic_ns() - began
        return value

    def _receive(self) -> Any:
        packet, files, flags, _ = self._reader.recvmsg(
            _PACKET_BYTES, _DESCRIPTOR_SPACE, socket.MSG_CMSG_CLOEXEC
        )
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, "too many open files to receive a batch")
        if not files:
            return ForkingPickler.loads(packet)
        [(_, _, descriptor)] = files
        with os.fdopen(int.from_bytes(descriptor, sys.byteorder), "rb") as file:
            file.seek(0)  # the sender left it at its end
            return ForkingPickler.loads(file.read())

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
            if exc.errno in _FULL:
                return False
            raise
        return True

    def _send_in_file(self, message: memoryview) -> None:
        with os.fdopen(os.memfd_create("streamload", os.MFD_CLOEXEC), "wb") as file:
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
                message = self._late[0]
            while not self._is_sent(message):
                time.sleep(_RETRY_SECONDS)
            self._late.popleft()


def _refusal(error: Exception) -> ExceptionWrapper:
    """Return a wrapped error that torch raises in the rank."""
    try:
        raise NotSendable(f"a batch can't be sent from a worker: {error}") from error
    except NotSendable:
        return ExceptionWrapper(where="in a DataLoader worker process")  # type: ignore[no-untyped-call]
