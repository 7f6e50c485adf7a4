"""Shards in object stores, by fsspec: parallel ranges, each of them checked (step F).

S3 ranges are requested with If-Match; other stores are asked for the version again at the end. Retries
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import time
from collections.abc import Iterator, Mapping
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
from streamload.origins.ranged import OrderedParts
from streamload.urls import redact, scheme

_LATEST_SECONDS = 0.5
"""Bytes of a slow range are passed on after this long, however few."""
_ETAGS = ("ETag", "etag", "md5Hash", "md5", "generation", "sha256")
_DATES = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")

_logger = logging.getLogger("streamload")


def import_store(name: str) -> None:
    """Import the file system of a scheme, if it is installed."""
    with contextlib.suppress(ImportError, ValueError):
        fsspec.get_filesystem_class(name)


class StoreOrigin(Origin):
    """An object in an fsspec file system.

    Args:
        storage_options: of the file system. If there are no credentials at all, S3 is read anonymously.
    """

    def __init__(self, url: str, storage_options: dict[str, Any], session: Session) -> None:
        self.url = redact(url)
        self._target, self.session = url, session
        self._storage_options: Mapping[str, Any] = storage_options
        self._options = _with_patience(url, storage_options, session)
        self._files: Any = None
        self._lookup: renewal.Lookup | None = None

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
                if _lacks_credentials(exc) and _may_be_anonymous(self._target, self._options):
                    warn_anonymous(self.url.partition("://")[2].partition("/")[0])
                    return self._anonymous_version()
                cause = self._cause(files, exc)
                if is_repeated or not (cause is None or self.renews(files, cause)):
                    raise self.translate(cause or exc) from exc
                is_repeated = True

    def renews(self, files: Any, exc: BaseException) -> bool:
        """Replace a file system whose credentials have ended, if others are found; return whether they are.

        Args:
            files: that made the request; other transfers may have replaced it since.
        """
        is_s3 = scheme(self._target) == "s3"
        if not (renewal.have_ended(exc) if is_s3 else renewal.is_refused(exc)):
            return False
        if self._files is not files:
            return True
        storage_options, lookup = renewal.read_file(self._target, self._storage_options)
        if lookup is None:  # the credentials aren't in a file of options
            self._files = None
            if self.files is not files:
                return True
            if is_s3:
                lookup = renewal.look_up(files, self.session.options.stall_seconds, self._check)
        self._lookup = lookup
        if lookup is not None and not lookup.has_others:
            return False
        type(files).clear_instance_cache()  # a new file system of another store looks for credentials itself
        self._storage_options = storage_options
        self._files, self._options = None, _with_patience(self._target, storage_options, self.session)
        return True

    def translate(self, exc: BaseException) -> Exception:
        """Return our error for an exception of the file system."""
        if renewal.have_ended(exc):
            return renewal.denied(self.url, exc, self._lookup)
        error = calls.translate(self.url, exc)
        if isinstance(error, OriginDenied) and calls.status_of(exc) == 401:
            error.may_be_renewed = True
        return error

    def _anonymous_version(self) -> Version:
        """Ask without credentials; if that is denied, look for credentials again at the next attempt."""
        options = self._options
        self._options, self._files = {**options, "anon": True}, None
        try:
            return self.version()
        except OriginDenied as exc:
            self._options, self._files = options, None
            exc.may_be_renewed = True
            raise

    def _cause(self, files: Any, exc: Exception) -> Exception | None:
        """Return what the store says of a refusal; None if it refuses no more."""
        if scheme(self._target) != "s3" or not renewal.is_silent(exc):
            return exc
        self.session.count("origin_requests")
        try:
            self._answer(renewal.ask_one_byte(files, files._strip_protocol(self._target)))
        except Exception as told:
            return None if renewal.is_empty_object(told) else told
        return None

    def read(self, start: int, stop: int, version: Version) -> bytes:
        """Request a range; and the version, unless the answer contains it."""
        if self._files is None:  # also finds out whether S3 must be read anonymously
            same_version(self.url, version, self.version())
        chunks = _StorePart(self, start, stop, version).chunks()
        data = b"".join(no_crawl(self.url, chunks, self.session.options))
        if not self.is_checked_by_part(version):
            same_version(self.url, version, self.version())
        return data

    def is_checked_by_part(self, version: Version) -> bool:
        """Return whether each range is requested on the condition that the version is still this one."""
        return scheme(self._target) == "s3" and version.etag is not None

    def ask(self, start: int, stop: int, version: Version) -> tuple[calls.Future, calls.Pieces | None]:
        """Request one range. Return its future, and the queue of its pieces if it is streamed."""
        self.session.count("origin_requests")
        files, path = self.files, self._path
        if scheme(self._target) == "s3" and hasattr(files, "_call_s3"):
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
            self._files = None
            raise OriginTimeout(f"{self.url}: {exc}") from None

    def _check(self) -> None:
        self.session.check(self.url)

    @property
    def files(self) -> Any:
        """The file system; fsspec caches one per process and options."""
        if self._files is None:
            protocol = self._target.partition("://")[0].lower()
            try:
                self._files = fsspec.filesystem(protocol, **self._options)
            except (ImportError, TypeError, ValueError, KeyError) as exc:
                raise OptionError(f"{self.url}: its file system can't be created: {exc}") from exc
            if protocol in {"s3", "s3a"} and hasattr(self._files, "retries"):
                self._files.retries = 1  # retrying.py retries, and obeys Retry-After
        return self._files

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


def _version(info: dict[str, Any]) -> Version:
    etag = next((str(info[name]) for name in _ETAGS if info.get(name)), None)
    date = next((str(info[name]) for name in _DATES if info.get(name)), None)
    size = info.get("size")
    return Version(None if size is None else int(size), strong(etag), date)


def _with_patience(url: str, storage_options: Mapping[str, Any], session: Session) -> dict[str, Any]:
    """Give S3 our timeouts and no retries, unless the user set them; leave out what is for web servers."""
    is_s3 = scheme(url) == "s3"
    options = {
        name: value
        for name, value in storage_options.items()
        if name not in OF_WEB or not (is_s3 or callable(value))
    }
    if not is_s3:
        return options
    patience = {
        "connect_timeout": session.options.connect_seconds,
        "read_timeout": session.options.stall_seconds,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
    }
    return {**options, "config_kwargs": {**patience, **options.get("config_kwargs", {})}}


def _lacks_credentials(exc: BaseException) -> bool:
    return type(exc).__name__ == "NoCredentialsError"


def _may_be_anonymous(url: str, options: dict[str, Any]) -> bool:
    return scheme(url) == "s3" and not {"anon", "key", "profile", "session"} & options.keys()


@functools.lru_cache(maxsize=256)
def warn_anonymous(bucket: str) -> None:
    """Warn once per process, whatever the number of shards."""
    _logger.warning("No AWS credentials found: reading s3://%s anonymously.", bucket)
