"""Objects in S3: small ones by our own signed requests, where s3fs takes half a second of CPU and 36 MB.

s3fs lists, and uploads whole files.
"""

from __future__ import annotations

import email.utils
import os
import random
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from urllib3.exceptions import HTTPError

from streamload.cache.shared.store import Store
from streamload.errors import OriginUnavailable, SharedTierError
from streamload.origins.protocol import OriginOptions, Session
from streamload.origins.s3 import S3Requests
from streamload.origins.signing import place_of
from streamload.origins.sockets import Pools, receive, within
from streamload.origins.web_client import translated

_PIECE_BYTES = 1 << 20
_ATTEMPTS = 5
_PAUSE_SECONDS = 0.1
_MISSING, _IS_EMPTY, _NOT_IMPLEMENTED = 404, 416, 501
_TAKEN = {409, 412}
_REFUSED = frozenset(range(300, 600))
_WRITES = ("put_object", "delete_object")


class S3Store(Store):
    """A folder in a bucket.

    Args:
        url: of its root; `is_ours` has to hold for its objects.
        timeout_seconds: for one request, with all its attempts.
        stop: ends every wait.
    """

    def __init__(
        self,
        url: str,
        storage_options: dict[str, Any],
        timeout_seconds: float,
        stop: threading.Event | None,
    ) -> None:
        super().__init__(url, storage_options, timeout_seconds, stop)
        patience = OriginOptions(connect_seconds=timeout_seconds, stall_seconds=timeout_seconds)
        self._session = Session(patience, stop=self._stop)
        self._requests = S3Requests(self._url, storage_options, self._session)
        self._opened: tuple[int, Pools] | None = None

    def read(self, name: str, limit_bytes: int) -> bytes | None:
        """Read an object, by a range larger than any valid one."""
        answer = self._answer("get_object", name, {"Range": f"bytes=0-{limit_bytes}"}, {_MISSING, _IS_EMPTY})
        if answer.status == _MISSING:
            return None
        return answer.body if answer.status != _IS_EMPTY else b""

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Read one range."""
        return self._answer("get_object", name, {"Range": f"bytes={start}-{stop - 1}"}).body

    def write(self, name: str, data: bytes) -> None:
        """Write in one request."""
        self._answer("put_object", name, {"Body": data})

    def create(self, name: str, data: bytes) -> None:
        """Write on condition that there is no such object."""
        parameters = {"Body": data, "IfNoneMatch": "*"}
        answer = self._answer("put_object", name, parameters, {*_TAKEN, _NOT_IMPLEMENTED})
        if answer.status in _TAKEN:
            raise FileExistsError(f"{name} exists")
        if answer.status == _NOT_IMPLEMENTED:
            raise NotImplementedError("the store has no conditional writes")

    def delete(self, name: str) -> None:
        """Delete an object."""
        self._answer("delete_object", name, {}, {_MISSING})

    def modified(self, name: str) -> float | None:
        """The modification time that the store reports."""
        answer = self._answer("head_object", name, {}, {_MISSING})
        if answer.status == _MISSING:
            return None
        when = answer.headers.get("Last-Modified")
        if when is None:
            raise SharedTierError(f"the store reports no modification time of {name}")
        return email.utils.parsedate_to_datetime(when).timestamp()

    def _answer(
        self, operation: str, name: str, parameters: Mapping[str, Any], expected: Collection[int] = ()
    ) -> _Answer:
        """Send a request, and again where the store doesn't answer or says "later".

        Args:
            expected: the statuses of refusals that the caller knows what to do with.
        """
        attempt, deadline = 0, time.monotonic() + self._timeout_seconds
        with within(self._timeout_seconds):
            while True:
                try:
                    return self._sent(operation, name, parameters, expected)
                except OriginUnavailable as exc:
                    attempt += 1
                    pause = exc.retry_after_seconds or random.uniform(0, _PAUSE_SECONDS * 2**attempt)
                    if attempt == _ATTEMPTS or time.monotonic() + pause > deadline or self._stop.wait(pause):
                        raise

    def _sent(
        self, operation: str, name: str, parameters: Mapping[str, Any], expected: Collection[int]
    ) -> _Answer:
        self._check()
        place, session = place_of(self.target(name)), self._session
        assert place is not None
        try:
            response, facts = self._requests.send(self._pools(), place, parameters, operation, _REFUSED)
            if response.status in _REFUSED:
                if response.status in expected and facts.get("Code") != "NoSuchBucket":
                    return _Answer(response.status, response.headers, b"")
                is_write = operation in _WRITES
                raise self._requests.refusal(response, facts, is_write=is_write)
            try:
                pieces = list(iter(lambda: receive(response, _PIECE_BYTES, session), b""))
            finally:
                response.release_conn()
            return _Answer(response.status, response.headers, b"".join(pieces))
        except HTTPError as exc:
            self._check()
            raise translated(self._requests.url, session, exc, "no answer") from exc

    def _pools(self) -> Pools:
        """The connections of this process."""
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            opened = self._opened = (os.getpid(), Pools(self._session, connections=2))
        return opened[1]


class _Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes
