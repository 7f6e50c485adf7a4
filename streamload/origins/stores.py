"""Shards in object stores, by fsspec: parallel ranges, each of them checked (step F).

The store is asked for the version again at the end. Retries nothing.
"""

from __future__ import annotations

import contextlib
import os
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
    UrlError,
)
from streamload.origins import calls, renewal
from streamload.origins.access import OF_WEB
from streamload.origins.parallel import OrderedParts
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
from streamload.urls import redact, scheme

_ETAGS = ("ETag", "etag", "md5Hash", "md5", "generation", "sha256")
DATES = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")


def import_store(name: str) -> None:
    """Import the file system of a scheme, if it is installed."""
    with contextlib.suppress(ImportError, ValueError):
        fsspec.get_filesystem_class(name)


class StoreFiles:
    """The file system of a store: opened when needed, and again after it hung or for other credentials.

    Thread-safe, and usable in a forked child, which opens its own: event loops aren't inherited.

    Args:
        url: of something in the store, secrets included.
        storage_options: the user's; functions for web servers are left out.
        client_options: further ones of the file system.
    """

    def __init__(
        self, url: str, storage_options: Mapping[str, Any], client_options: Mapping[str, Any] = {}
    ) -> None:
        self._url, self._storage_options = url, storage_options
        self._client_options = client_options
        self._opened: tuple[int, Any] | None = None

    def close(self) -> None:
        """Open another file system for the next call."""
        self._opened = None

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
            opened = self._opened = (os.getpid(), files)
        return opened[1]

    def renews(self, files: Any, exc: BaseException) -> bool:
        """Replace a file system whose credentials may have ended; False if there can't be others.

        Args:
            files: that made the request; other threads may have replaced it since.
        """
        if not renewal.is_refused(exc):
            return False
        opened = self._opened
        if opened is None or opened[1] is not files:
            return True
        storage_options, lookup = renewal.read_file(self._url, self._storage_options)
        if lookup is None:  # the credentials aren't in a file of options
            self._opened = None
            if self.open() is not files:
                return True
        elif not lookup.has_others:
            return False
        type(files).clear_instance_cache()  # a new file system looks for credentials itself
        self._storage_options, self._opened = storage_options, None
        return True

    def _options(self) -> dict[str, Any]:
        options = {
            name: value
            for name, value in self._storage_options.items()
            if name not in OF_WEB or not callable(value)
        }
        return {**options, **self._client_options}


class StoreOrigin(Origin):
    """An object in an fsspec file system.

    Args:
        storage_options: of the file system.
    """

    def __init__(self, url: str, storage_options: dict[str, Any], session: Session) -> None:
        self.url = redact(url)
        self._target, self.session = url, session
        self._files = StoreFiles(url, storage_options)

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
                if is_repeated or not self.renews(files, exc):
                    raise self.translate(exc) from exc
                is_repeated = True

    def renews(self, files: Any, exc: BaseException) -> bool:
        """Return whether a request may be repeated with other credentials."""
        return self._files.renews(files, exc)

    def translate(self, exc: BaseException) -> Exception:
        """Return our error for an exception of the file system."""
        error = calls.translate(self.url, exc)
        if isinstance(error, OriginDenied) and calls.status_of(exc) == 401:
            error.may_be_renewed = True
        return error

    def read(self, start: int, stop: int, version: Version) -> bytes:
        """Request a range, and then the version."""
        chunks = _StorePart(self, start, stop).chunks()
        data = b"".join(no_crawl(self.url, chunks, self.session.options))
        same_version(self.url, version, self.version())
        return data

    def ask(self, start: int, stop: int) -> calls.Future:
        """Request one range."""
        self.session.count("origin_requests")
        return calls.begin(self.files, "cat_file", self._path, start=start, end=stop)

    def answer(self, future: calls.Future) -> Any:
        """Return what a call returns.

        Raises:
            OriginTimeout: after `stall_seconds`; the file system, which may hang, is replaced.
        """
        try:
            return calls.result(future, self.files, self.session.options.stall_seconds, self._check)
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
        info: dict[str, Any] = self.answer(calls.begin(files, "info", path))
        if info.get("type") == "directory":
            raise OriginNotFound(f"{self.url} is a folder, not an object")
        return info


class _StorePart:
    """One range, requested at once; by a file system without an event loop, when its turn comes."""

    def __init__(self, origin: StoreOrigin, start: int, stop: int) -> None:
        self.size_bytes = stop - start
        self.seconds: float | None = None
        self._origin, self._start, self._stop = origin, start, stop
        self._asked = self._ask() if origin.files.async_impl else None

    def chunks(self) -> Iterator[bytes]:
        origin = self._origin
        try:
            data: bytes = origin.answer(self._asked or self._ask())
        except Exception as exc:
            if not origin.renews(self._files, exc):
                raise origin.translate(exc) from exc
            data = self._repeated()
        if self.seconds is None:  # the future's callback may come later
            self._note_seconds()
        origin.session.count("origin_bytes", len(data))
        if len(data) != self.size_bytes:
            raise OriginCut(f"{origin.url}: {len(data)} bytes came for {self._start}–{self._stop}")
        yield data

    def cancel(self) -> None:
        if self._asked is not None:
            self._asked.cancel()

    def _repeated(self) -> bytes:
        self._asked = self._ask()
        try:
            data: bytes = self._origin.answer(self._asked)
        except Exception as exc:
            raise self._origin.translate(exc) from exc
        return data

    def _ask(self) -> calls.Future:
        self._began, self._files = time.monotonic(), self._origin.files
        future = self._origin.ask(self._start, self._stop)
        future.add_done_callback(self._note_seconds)
        return future

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
            lambda start, stop: _StorePart(origin, start, stop),
            start,
            version.size or 0,
            at_once,
            options,
        )

    def chunks(self) -> Iterator[bytes]:
        for chunk in self._parts.chunks():
            self._position += len(chunk)
            if self._position == self.version.size:
                same_version(self._origin.url, self.version, self._origin.version())
            yield chunk

    def close(self) -> None:
        self._parts.close()


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
