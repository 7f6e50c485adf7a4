"""Retries from the byte where the last attempt failed, around any origin (step F).

If nothing proves that the next bytes are of the same version, the attempt starts at the first byte and
compares. Exponential backoff with full jitter; obeys Retry-After; gives up after a number of attempts
without progress, unless the whole endpoint is down (endpoints.py). Errors that a retry can't fix are raised
at once; so are unexpected exceptions, as an error of this shard.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import xxhash

from streamload import descriptors, limits
from streamload.errors import (
    DatasetChanged,
    LimitReached,
    OriginCut,
    OriginError,
    OriginOutage,
    StreamloadError,
)
from streamload.origins.endpoints import RETRYABLE, Endpoint
from streamload.origins.protocol import Origin, Session, Stream, Unproven, Version, no_crawl
from streamload.urls import scrubbed_errors

_Result = TypeVar("_Result")
_MOST_DOUBLINGS = 30
_MOST_REFUSALS = 3
"""A shard that is denied or missing so often is given up: one backend may not have it yet."""
_OUTAGE_BACKOFF_SECONDS = 5.0
"""The longest backoff during an outage: transfers resume at most this long after it ends."""
_REFUSAL_BACKOFF_SECONDS = 0.02
"""Another backend may answer otherwise at once, and a missing sizes.json must not delay the first batch."""
_FIRST_ANSWERS_SECONDS = 1.0
"""Time that a shard whose credentials have ended waits for others to be served: then it is denied alone."""
_SHORTAGE_SECONDS = 0.1
"""Between two attempts while a limit of this process is reached."""
_rng = random.SystemRandom()
"""Draws in the jitter of all origins: it has no state to make for each, nor one that forks would share."""
_UNEXPECTED = (ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, TypeError, ValueError)


class RetryingOrigin(Origin):
    """An origin whose streams resume after failures.

    Args:
        session: its options limit the retries.
        endpoint: of the origin; None: outages aren't detected.
    """

    def __init__(
        self,
        origin: Origin,
        session: Session,
        rng: random.Random | None = None,
        endpoint: Endpoint | None = None,
    ) -> None:
        self.url = origin.url
        self._origin = origin
        self._session = session
        self._rng = rng or _rng
        self._endpoint = endpoint

    def __repr__(self) -> str:
        return f"RetryingOrigin({self._origin!r})"

    def open(self, start: int = 0, expected: Version | None = None) -> Stream:
        """Open the origin, with retries."""
        if start and expected is not None and not expected.is_traceable:
            raise Unproven(f"{self.url}: nothing tells its versions apart")
        retries = self._retries()
        stream = retries.open(self._origin, start, expected)
        version = stream.version if expected is None else expected.completed(stream.version)
        return _RetryingStream(self._origin, retries, stream, start, version)

    def version(self) -> Version:
        """Ask the origin, with retries."""
        return self._retries().attempt(self._origin.version)

    def read(self, start: int, stop: int, version: Version) -> bytes:
        """Read from the origin, with retries."""
        retries = self._retries()
        data = retries.attempt(lambda: self._origin.read(start, stop, version))
        retries.served()
        return data

    def close(self) -> None:
        """Close the origin."""
        self._origin.close()

    def _retries(self) -> _Retries:
        return _Retries(self._session, self._rng, self.url, self._endpoint)


class _RetryingStream:
    """Resumes at its position, or at the first byte if nothing proves that the next bytes are of its version.

    Bytes that were already given are then compared by their hash, and dropped. A stream that didn't start
    at the first byte raises Unproven instead: only its caller has the bytes before it.
    """

    def __init__(
        self, origin: Origin, retries: _Retries, stream: Stream, start: int, version: Version
    ) -> None:
        self.version = version
        self._origin, self._retries = origin, retries
        self._stream = stream
        self._found = stream.version.completed(version)  # the next answer must agree with it
        self._start = self._position = start
        self._read = start  # end of the bytes that have come; less than _position while they are compared
        self._is_unproven = False
        self._given, self._again = xxhash.xxh3_64(), xxhash.xxh3_64()

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes across failures. However it ends, the stream is closed."""
        while True:
            try:
                for chunk in self._retries.watch(self._stream.chunks()):
                    if fresh := self._fresh(chunk):
                        yield fresh
                if self._read < self._position:
                    raise DatasetChanged(
                        f"{self._origin.url}: ended at byte {self._read}, and {self._position} had been read"
                    )
                return
            except (OriginError, Unproven) as error:
                self._stream.close()
                self._failed(error)
            finally:
                self._stream.close()
            self._reopen()

    def close(self) -> None:
        self._stream.close()

    def _fresh(self, chunk: bytes) -> bytes:
        """Return the part of a chunk that is new; compare the rest with what was given before."""
        old_bytes = min(len(chunk), self._position - self._read)
        self._read += len(chunk)
        if old_bytes:
            self._again.update(memoryview(chunk)[:old_bytes])
            if self._read >= self._position and self._again.digest() != self._given.digest():
                raise DatasetChanged(f"{self._origin.url}: gives other bytes than it did before")
            chunk = chunk[old_bytes:]
        self._given.update(chunk)
        self._position += len(chunk)
        self._retries.note(len(chunk))
        return chunk

    def _reopen(self) -> None:
        if self._read < self._position or not self._found.is_traceable:
            self._is_unproven = True
        while True:
            if self._is_unproven and self._start:
                raise Unproven("nothing tells its versions apart")
            start = 0 if self._is_unproven else self._position
            expected = self._found.only_size() if self._is_unproven else self._found
            try:
                self._stream = self._retries.open(self._origin, start, expected)
                break
            except Unproven as error:
                self._failed(error)
        self.version = self.version.completed(self._stream.version)
        self._found = self._stream.version.completed(self._found)
        self._read, self._is_unproven = start, False
        self._again = xxhash.xxh3_64()

    def _failed(self, error: OriginError | Unproven) -> None:
        """Wait before the next attempt, or raise."""
        if isinstance(error, Unproven):
            if self._start:
                raise error
            self._is_unproven = True
            error = OriginCut(f"{self._origin.url}: can't go on at byte {self._position}: {error}")
        self._retries.wait(error)


class _Retries:
    """The retry state of one stream: failures in a row, reset by progress."""

    def __init__(self, session: Session, rng: random.Random, url: str, endpoint: Endpoint | None) -> None:
        self._session, self._options = session, session.options
        self._rng, self._url, self._endpoint = rng, url, endpoint
        self._failures = 0
        self._failing_since = 0.0
        self._refusals = 0
        self._was_away = False
        self._short_since = 0.0  # since when something of this process has run out
        self._waiting_since = 0.0  # during an outage
        self._progress_bytes = 0

    def open(self, origin: Origin, start: int, expected: Version | None) -> Stream:
        return self.attempt(lambda: origin.open(start, expected))

    def attempt(self, act: Callable[[], _Result]) -> _Result:
        while True:
            self._session.check(self._url)
            try:
                with self._translated():
                    return act()
            except OriginError as error:
                self.wait(error)
            except OSError as error:
                if not self._wait_for_room(error):
                    raise

    def watch(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Pass chunks on, checked by `no_crawl`."""
        chunks, is_first = no_crawl(self._url, chunks, self._options), True
        while True:
            self._session.check(self._url)
            with self._translated():
                chunk = next(chunks, None)
            if chunk is None:
                return
            if is_first:
                self.served()
                is_first = False
            yield chunk

    def wait(self, error: OriginError) -> None:
        """Sleep before the next attempt, or raise if no retry can help or all are used up.

        Raises:
            LimitReached: see `_wait_for_room`.
        """
        if self._wait_for_room(error):
            return
        self._failing_since = self._failing_since if self._failures else time.monotonic()
        self._failures += 1
        self._refusals += error.may_pass
        is_retryable = isinstance(error, RETRYABLE) or (error.may_pass and self._refusals < _MOST_REFUSALS)
        has_attempts = is_retryable and self._failures < self._options.attempts
        if self._endpoint is not None and has_attempts:
            if self._failures > 1:
                self._endpoint.fails(error)
            has_attempts = not self._endpoint.is_nowhere(error)
        if not has_attempts and not self._has_time(error):
            if self._failures == 1:
                raise error
            raise type(error)(f"{error} (given up after {self._failures} attempts)") from error
        self._progress_bytes = 0
        self._session.count("origin_retries")
        doublings = min(self._failures - 1, _MOST_DOUBLINGS)
        limit = min(self._options.backoff_limit_seconds, self._options.backoff_seconds * 2**doublings)
        if self._was_away:
            limit = min(limit, _OUTAGE_BACKOFF_SECONDS)
        elif error.may_pass:
            limit = min(limit, _REFUSAL_BACKOFF_SECONDS)
        seconds = self._rng.uniform(0, limit)
        if error.retry_after_seconds is not None:
            seconds = max(seconds, min(error.retry_after_seconds, self._options.retry_after_limit_seconds))
        self._session.stop.wait(seconds)
        self._session.check(self._url)

    def _wait_for_room(self, error: OSError) -> bool:
        """Sleep before the next attempt if a limit of this process is the cause: the shard may be fine.

        Returns:
            False if it isn't.

        Raises:
            LimitReached: this process has had no file, process, thread or memory left for long.
        """
        shortage = limits.shortage_in(error)
        if shortage is None:
            return False
        descriptors.note_shortage()
        now_seconds = time.monotonic()
        self._short_since = self._short_since or now_seconds
        if now_seconds - self._short_since > limits.PATIENCE_SECONDS:
            if isinstance(shortage, LimitReached):
                raise shortage
            raise limits.reached(f"{self._url} can't be fetched", shortage) from error
        self._session.stop.wait(_SHORTAGE_SECONDS)
        self._session.check(self._url)
        return True

    def served(self) -> None:
        """Note that the endpoint serves bytes."""
        self._short_since = 0.0
        if self._endpoint is not None:
            self._endpoint.served()

    def _has_time(self, error: OriginError) -> bool:
        """Return whether to go on because of an outage. After its end all attempts are available again.

        Raises:
            OriginOutage: the endpoint has been down until its deadline, or the credentials had ended before
                it gave this process anything: that is true of all shards, so none of them may be given up.
        """
        if self._endpoint is None or not self._options.outage_seconds:
            return False
        if error.have_ended and not self._others_are_served():
            raise OriginOutage(f"{error} (its server or bucket hasn't given anything yet)") from error
        was_away, self._was_away = self._was_away, self._endpoint.is_away(error, self._session)
        if not self._was_away:
            # An outage that others saw, and that has just ended, is none of this shard's failures.
            was_away = was_away or self._endpoint.was_away_since(self._failing_since)
            if was_away:
                self._failures, self._refusals, self._failing_since = 1, 0, time.monotonic()
            # the probe may be the first request with credentials that have come in the meantime
            is_renewed = error.may_be_renewed and self._endpoint.has_served
            return was_away or (is_renewed and self._failures < self._options.attempts)
        now_seconds, outage = time.monotonic(), self._endpoint.outage
        if outage is not None and now_seconds >= outage.until:
            raise OriginOutage(
                f"{error} (nothing has come from its server or bucket for "
                f"{now_seconds - outage.since:.0f} s; the limit is {self._options.outage_seconds:g} s, "
                f"STREAMLOAD_ORIGIN_WAIT)"
            ) from error
        if not was_away:
            self._waiting_since = now_seconds
        return (
            now_seconds - self._waiting_since < self._options.outage_seconds
        )  # otherwise others got bytes since

    def _others_are_served(self) -> bool:
        """Return whether the endpoint serves other shards; their first bytes may be under way."""
        assert self._endpoint is not None
        deadline = time.monotonic() + _FIRST_ANSWERS_SECONDS
        while not self._endpoint.has_served and time.monotonic() < deadline:
            self._session.stop.wait(_FIRST_ANSWERS_SECONDS / 20)
            self._session.check(self._url)
        return self._endpoint.has_served

    def note(self, n: int) -> None:
        """Note bytes that are new."""
        if self._failures:
            self._progress_bytes += n
            if self._progress_bytes >= self._options.slow_bytes:
                self._failures, self._refusals, self._was_away = 0, 0, False

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn unexpected exceptions, as from an odd answer, into an error of this origin."""
        with scrubbed_errors(lambda: self._session.secrets):
            try:
                yield
            except (StreamloadError, OSError):
                raise
            except _UNEXPECTED as exc:
                raise OriginError(f"{self._url}: {type(exc).__name__}: {exc}") from exc
