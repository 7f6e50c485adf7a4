"""Shards in object stores, by fsspec: parallel ranges, each of them checked (step F).

S3 ranges are requested with If-Match; other stores are asked for the version again at the end. Retries
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import fsspec

from streamload.errors import (
    DatasetChanged,
    OptionError,
    OriginCut,
    OriginDenied,
    OriginError,
    OriginNotFound,
    OriginTimeout,
    UrlError,
)
from streamload.origins import calls, renewal
from streamload.origins.access import OF_WEB
from streamload.origins.protocol import (
    Origin,
    Session,
    Stream,
    Unproven,
    Version,
    no_crawl,
    same_version,
    strong,
)
from streamload.origins.web import OrderedParts
from streamload.urls import redact, scheme

_LATEST_SECONDS = 0.5
"""Bytes of a slow range are passed on after this long, however few."""
_EMPTY_OBJECT = {"InvalidRange", "416"}
_ETAGS = ("ETag", "etag", "md5Hash", "md5", "generation", "sha256")
DATES = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")

_logger = logging.getLogger("streamload")


def import_store(name: str) -> None:
    """Import the file system of a scheme, if it is installed."""
    with contextlib.suppress(ImportError, ValueError):
        fsspec.get_filesystem_class(name)


class StoreFiles:
    """The file system of a store: opened when needed, and again after it hung or for other credentials.

    Thread-safe, and usable in a forked child, which opens its own: event loops aren't inherited.

    Args:
        url: of something in the store, secrets included.
        storage_options: the user's; those for web servers are left out.
        connect_seconds, read_seconds: timeouts of S3, unless the user set others.
        attempts: how often S3 is asked by the library itself.
        check: called while other credentials are looked up; may raise to end that.
        client_options: further ones of the file system.

    Attributes:
        is_s3: whether it is S3, or a store like it.
        lookup: the outcome of the last look for other credentials.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any],
        connect_seconds: float,
        read_seconds: float,
        attempts: int,
        check: Callable[[], None],
        client_options: Mapping[str, Any] = {},
    ) -> None:
        self.is_s3 = scheme(url) == "s3"
        self.lookup: renewal.Lookup | None = None
        self._url, self._storage_options = url, storage_options
        self._patience = {
            "connect_timeout": connect_seconds,
            "read_timeout": read_seconds,
            "retries": {"total_max_attempts": attempts, "mode": "standard"},
        }
        self._seconds, self._attempts, self._check = read_seconds, attempts, check
        self._client_options = client_options
        self._is_anonymous = False
        self._opened: tuple[int, Any] | None = None

    @property
    def may_be_anonymous(self) -> bool:
        """True if S3 may be read without credentials where none are found."""
        return self.is_s3 and not {"anon", "key", "profile", "session"} & self._options().keys()

    def be_anonymous(self, is_anonymous: bool) -> None:
        """Read S3 without credentials, or with those of the environment again."""
        self._is_anonymous, self._opened = is_anonymous, None

    def close(self) -> None:
        """Open another file system for the next call."""
        self._opened = None

    @property
    def is_open(self) -> bool:
        """True if the next call needs no new file system."""
        return self._opened is not None

    def open(self) -> Any:
        """The file system; fsspec caches one per process and options.

        Raises:
            OptionError: it can't be opened with these options.
        """
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            try:
                kind = fsspec.get_filesystem_class(self._url.partition("://")[0].lower())
                _refuse_lost_parts(self._url, kind._strip_protocol(self._url))
                files = kind(**{**kind._get_kwargs_from_urls(self._url), **self._options()})
            except UrlError:
                raise
            except (ImportError, TypeError, ValueError, KeyError) as exc:
                raise OptionError(f"{redact(self._url)}: its file system can't be opened: {exc}") from exc
            if self.is_s3 and hasattr(files, "retries"):
                files.retries = self._attempts
            opened = self._opened = (os.getpid(), files)
        return opened[1]

    def renews(self, files: Any, exc: BaseException, *, may_be_silent: bool = False) -> bool:
        """Replace a file system whose credentials have ended, if others are found; return whether they are.

        Args:
            files: that made the request; other threads may have replaced it since.
            may_be_silent: whether a refusal of S3 without an error code may mean this.
        """
        has_ended = renewal.have_ended(exc) or (may_be_silent and renewal.is_silent(exc))
        if not (has_ended if self.is_s3 else renewal.is_refused(exc)):
            return False
        opened = self._opened
        if opened is None or opened[1] is not files:
            return True
        storage_options, lookup = renewal.read_file(self._url, self._storage_options)
        if lookup is None:  # the credentials aren't in a file of options
            self._opened = None
            if self.open() is not files:
                return True
            if self.is_s3:
                lookup = renewal.look_up(files, self._seconds, self._check)
        self.lookup = lookup
        if lookup is not None and not lookup.has_others:
            return False
        type(files).clear_instance_cache()  # a new file system of another store looks for credentials itself
        self._storage_options = storage_options
        self.be_anonymous(False)
        return True

    def _options(self) -> dict[str, Any]:
        options = {
            name: value
            for name, value in self._storage_options.items()
            if name not in OF_WEB or not (self.is_s3 or callable(value))
        }
        options |= self._client_options
        if self._is_anonymous:
            options["anon"] = True
        if self.is_s3:
            options["config_kwargs"] = {**self._patience, **options.get("config_kwargs", {})}
        return options


class StoreOrigin(Origin):
    """An object in an fsspec file system.

    Args:
        storage_options: of the file system. If there are no credentials at all, S3 is read anonymously.
    """

    def __init__(self, url: str, storage_options: dict[str, Any], session: Session) -> None:
        self.url = redact(url)
        self._target, self.session = url, session
        options = session.options
        self._files = StoreFiles(
            url,
            storage_options,
            options.connect_seconds,
            options.stall_seconds,
            attempts=1,  # retrying.py retries, and obeys Retry-After
            check=self._check,
        )

    def __repr__(self) -> str:
        return f"StoreOrigin({self.url!r})"

    def open(self, start: int = 0, expected: Version | None = None) -> Stream:
        """Ask the store for the object's version; the stream's chunks() request the bytes."""
        self.session.check(self.url)
        current = self.version()
        same_version(self.url, expected, current)
        if start and expected is not None and not expected.proves(current):
            raise Unproven("its store has no version of it")
        if current.size is None:
            raise OriginError(f"{self.url}: the store doesn't tell its size")
        if start > current.size:
            raise DatasetChanged(f"{self.url} has {current.size} bytes, none at {start}")
        return _StoreStream(self, current, start)

    def version(self) -> Version:
        """Return the object's current size, ETag and date; ask again if the credentials have been renewed."""
        is_repeated = False
        while True:
            files = self.files
            try:
                return _version(self._info())
            except Exception as exc:
                if type(exc).__name__ == "NoCredentialsError" and self._files.may_be_anonymous:
                    warn_anonymous(self.url.partition("://")[2].partition("/")[0])
                    return self._anonymous_version()
                cause = self._cause(files, exc)
                if is_repeated or not (cause is None or self.renews(files, cause)):
                    raise self.translate(cause or exc) from exc
                is_repeated = True

    def renews(self, files: Any, exc: BaseException) -> bool:
        """Return whether a request may be repeated with other credentials."""
        return self._files.renews(files, exc)

    def translate(self, exc: BaseException) -> Exception:
        """Return our error for an exception of the file system."""
        if renewal.have_ended(exc):
            return renewal.denied(self.url, str(calls.code_of(exc)), self._files.lookup)
        error = calls.translate(self.url, exc)
        if isinstance(error, OriginDenied) and calls.status_of(exc) == 401:
            error.may_be_renewed = True
        return error

    def _anonymous_version(self) -> Version:
        """Ask without credentials; if that is denied, look for credentials again at the next attempt."""
        self._files.be_anonymous(True)
        try:
            return self.version()
        except OriginDenied as exc:
            self._files.be_anonymous(False)
            exc.may_be_renewed = True
            raise

    def _cause(self, files: Any, exc: Exception) -> Exception | None:
        """Return what S3 says of a refusal without a code, by a GET; None if it refuses no more."""
        if not self._files.is_s3 or not renewal.is_silent(exc):
            return exc
        self.session.count("origin_requests")
        try:
            self._answer(calls.begin_in_loop(files, _first_byte(files, files._strip_protocol(self._target))))
        except Exception as told:
            return None if calls.code_of(told) in _EMPTY_OBJECT else told
        return None

    def read(self, start: int, stop: int, version: Version) -> bytes:
        """Request a range; and the version, unless the answer contains it."""
        if not self._files.is_open:  # also finds out whether S3 must be read anonymously
            same_version(self.url, version, self.version())
        chunks = _StorePart(self, start, stop, version).chunks()
        data = b"".join(no_crawl(self.url, chunks, self.session.options))
        if not self.is_checked_by_part(version):
            same_version(self.url, version, self.version())
        return data

    def is_checked_by_part(self, version: Version) -> bool:
        """Return whether each range is requested on the condition that the version is still this one."""
        return self._files.is_s3 and version.etag is not None

    def ask(self, start: int, stop: int, version: Version) -> tuple[calls.Future, calls.Pieces | None]:
        """Request one range. Return its future, and the queue of its pieces if it is streamed."""
        self.session.count("origin_requests")
        files, path = self.files, self._path
        if self._files.is_s3 and hasattr(files, "_call_s3"):
            came: calls.Pieces = queue.SimpleQueue()
            request = self._s3_range(files, path, start, stop, version, came)
            return asyncio.run_coroutine_threadsafe(request, files.loop), came
        return calls.begin(files, "cat_file", path, start=start, end=stop), None

    def bytes_of(self, future: calls.Future, came: calls.Pieces | None) -> Iterator[bytes]:
        """Yield the bytes of a request. Raises after `stall_seconds` or when the loader stops."""
        if came is None:
            yield self._answer(future)
            return
        with self._timed() as seconds:
            yield from calls.pieces(future, came, seconds, self._check)

    def _answer(self, future: calls.Future) -> Any:
        with self._timed() as seconds:
            return calls.result(future, self.files, seconds, self._check)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[float]:
        """Give the timeout of a call; after a timeout replace the file system, which may hang."""
        try:
            yield self.session.options.stall_seconds
        except OriginTimeout as exc:
            self._files.close()
            raise OriginTimeout(f"{self.url}: {exc}") from None

    def _check(self) -> None:
        self.session.check(self.url)

    @property
    def files(self) -> Any:
        """The file system."""
        return self._files.open()

    @property
    def _path(self) -> str:
        path: str = self.files._strip_protocol(self._target)
        return path

    def _info(self) -> dict[str, Any]:
        self.session.count("origin_requests")
        files, path = self.files, self._path
        files.invalidate_cache(path)
        info: dict[str, Any] = self._answer(calls.begin(files, "info", path))
        if info.get("type") == "directory":
            raise OriginNotFound(f"{self.url} is a folder, not an object")
        return info

    async def _s3_range(
        self, files: Any, path: str, start: int, stop: int, version: Version, came: calls.Pieces
    ) -> None:
        """Request one range and put its bytes into the queue, in pieces of about `chunk_bytes`."""
        bucket, key, number = files.split_path(path)
        conditions = {"IfMatch": version.etag} if version.etag else {}
        if number:
            conditions["VersionId"] = number
        answer = await files._call_s3(
            "get_object",
            Bucket=bucket,
            Key=key,
            Range=f"bytes={start}-{stop - 1}",
            **conditions,
            **files.req_kw,
        )
        body, enough = answer["Body"], self.session.options.chunk_bytes
        async with body:
            content_range = answer.get("ContentRange", "")
            if content_range != f"bytes {start}-{stop - 1}/{version.size}":
                raise OriginError(
                    f"{self.url} was asked for bytes {start}–{stop} and answers {content_range!r}"
                )
            same_version(self.url, version, Version(version.size, strong(answer.get("ETag"))))
            pieces: list[bytes] = []
            lacking, last = enough, time.monotonic()
            while piece := await body.read(enough):
                pieces.append(piece)
                lacking -= len(piece)
                now_seconds = time.monotonic()
                if lacking <= 0 or now_seconds - last >= _LATEST_SECONDS:
                    came.put(b"".join(pieces))
                    pieces.clear()
                    lacking, last = enough, now_seconds
            if pieces:
                came.put(b"".join(pieces))


class _StorePart:
    """One range, requested at once; by a file system without an event loop, when its turn comes."""

    def __init__(self, origin: StoreOrigin, start: int, stop: int, version: Version) -> None:
        self.size_bytes = stop - start
        self.seconds: float | None = None
        self._origin, self._start, self._stop, self._version = origin, start, stop, version
        self._asked = self._ask() if origin.files.async_impl else None

    def chunks(self) -> Iterator[bytes]:
        origin, size, is_repeated = self._origin, 0, False
        pieces = origin.bytes_of(*(self._asked or self._ask()))
        while True:
            try:
                piece = next(pieces, None)
            except Exception as exc:
                if is_repeated or not origin.renews(self._files, exc):
                    raise origin.translate(exc) from exc
                is_repeated, self._asked = True, self._ask()
                pieces = origin.bytes_of(*self._asked)
                continue
            if piece is None:
                break
            size += len(piece)
            origin.session.count("origin_bytes", len(piece))
            yield piece
        if self.seconds is None:  # the future's callback may come later
            self._note_seconds()
        if size != self.size_bytes:
            raise OriginCut(f"{origin.url}: {size} bytes came for {self._start}–{self._stop}")

    def cancel(self) -> None:
        if self._asked is not None:
            self._asked[0].cancel()

    def _ask(self) -> tuple[calls.Future, calls.Pieces | None]:
        self._began, self._files = time.monotonic(), self._origin.files
        future, came = self._origin.ask(self._start, self._stop, self._version)
        future.add_done_callback(self._note_seconds)
        return future, came

    def _note_seconds(self, _: object = None) -> None:
        self.seconds = time.monotonic() - self._began


class _StoreStream:
    """Parts in order, requested in parallel if the file system is asynchronous."""

    def __init__(self, origin: StoreOrigin, version: Version, start: int) -> None:
        self.version = version
        self._origin, self._position = origin, start
        options = origin.session.options
        at_once = options.parts if origin.files.async_impl else 1
        self._parts = OrderedParts(
            lambda start, stop: _StorePart(origin, start, stop, version),
            start,
            version.size or 0,
            at_once,
            options,
        )

    def chunks(self) -> Iterator[bytes]:
        for chunk in self._parts.chunks():
            self._position += len(chunk)
            if self._position == self.version.size:
                self._check_version()
            yield chunk

    def close(self) -> None:
        self._parts.close()

    def _check_version(self) -> None:
        """Check at the end that the version hasn't changed. S3 checks it with each part."""
        if self._origin.is_checked_by_part(self.version):
            return
        same_version(self._origin.url, self.version, self._origin.version())


async def _first_byte(files: Any, path: str) -> None:
    bucket, key, number = files.split_path(path)
    version = {"VersionId": number} if number else {}
    answer = await files._call_s3(
        "get_object", Bucket=bucket, Key=key, Range="bytes=0-0", **version, **files.req_kw
    )
    async with answer["Body"] as body:
        await body.read()


def _refuse_lost_parts(url: str, path: str) -> None:
    """Raise UrlError if a file system would drop the query or the fragment of a URL."""
    parts = {"query": url.partition("?")[2].partition("#")[0], "fragment": url.partition("#")[2]}
    for part, text in parts.items():
        if text not in path:
            raise UrlError(
                f"the {part} of {redact(url)!r} would be lost: {scheme(url)}:// has none; leave it out, and "
                "give options in storage_options"
            )


def _version(info: dict[str, Any]) -> Version:
    etag = next((str(info[name]) for name in _ETAGS if info.get(name)), None)
    date = next((str(info[name]) for name in DATES if info.get(name)), None)
    size = info.get("size")
    return Version(None if size is None else int(size), strong(etag), date)


@functools.lru_cache(maxsize=256)
def warn_anonymous(bucket: str) -> None:
    """Warn once per process, whatever the number of shards."""
    _logger.warning("No AWS credentials found: reading s3://%s anonymously.", bucket)
