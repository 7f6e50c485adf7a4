"""Objects in an object store, or any other file system of fsspec: one request each, with a deadline."""

from __future__ import annotations

import contextlib
import datetime
import functools
import secrets
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamload.errors import OriginTimeout, SharedTierError
from streamload.origins import calls
from streamload.urls import scheme

if TYPE_CHECKING:
    from streamload.origins.stores import StoreFiles

_SLOWEST_BYTES_PER_SECOND = 256_000
_PIECE_BYTES = 8 << 20
_TAKEN = {409, 412}


class Store:
    """A folder of a file system of fsspec.

    Args:
        url: of its root, secrets included.
        timeout_seconds: for one request.
        stop: ends every wait.
    """

    def __init__(
        self,
        url: str,
        storage_options: dict[str, Any],
        timeout_seconds: float,
        stop: threading.Event | None,
    ) -> None:
        self._url = url.rstrip("/")
        self._storage_options = storage_options
        self._timeout_seconds = timeout_seconds
        self._stop = stop or threading.Event()

    @functools.cached_property
    def _files(self) -> StoreFiles:
        from streamload.origins.stores import StoreFiles  # fsspec comes with it

        client_options: dict[str, Any] = {"use_listings_cache": False}
        if self._is_s3:
            client_options["max_concurrency"] = 2
        return StoreFiles(self._url, self._storage_options, client_options)

    @property
    def _is_s3(self) -> bool:
        """True if large uploads are in parts that are held in memory: few and small ones."""
        return scheme(self._url) == "s3"

    def target(self, name: str) -> str:
        """The URL of an object."""
        return f"{self._url}/{name}"

    def read(self, name: str, limit_bytes: int) -> bytes | None:
        """Read an object, by a range larger than any valid one."""
        try:
            return self._range(name, 0, limit_bytes + 1)
        except FileNotFoundError as exc:
            if _lacks_bucket(exc):
                raise
            return None
        except OriginTimeout:
            raise
        except OSError:
            if self._size(name) != 0:  # an empty object has no range
                raise
            return b""

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Read one range."""
        return self._range(name, start, stop)

    def write(self, name: str, data: bytes) -> None:
        """Write in one request, or in several if it is large."""
        files, path = self._at(name)
        self._make_folder(files, path)
        self._do(files, "pipe_file", path, data)

    def create(self, name: str, data: bytes) -> None:
        """Write on condition that there is no such object."""
        files, path = self._at(name)
        self._make_folder(files, path)
        try:
            self._do(files, "pipe_file", path, data, mode="create")
        except OSError as exc:
            if calls.status_of(exc) in _TAKEN:
                raise FileExistsError(f"{name} exists") from exc
            raise

    def put_file(self, name: str, path: Path) -> None:
        """Upload in parts, some at once; others see the object when it is complete."""
        files, target = self._at(name)
        self._make_folder(files, target)
        parts = {"chunksize": _PIECE_BYTES} if self._is_s3 else {}
        seconds = self._timeout_seconds + path.stat().st_size / _SLOWEST_BYTES_PER_SECOND
        self._do(files, "put_file", str(path), target, seconds=seconds, **parts)

    def names(self, folder: str) -> list[str]:
        """List all objects below a folder."""
        return [*self.times(folder)]

    def times(self, folder: str) -> dict[str, float | None]:
        """List all objects below a folder, with the modification times that the store reports."""
        files, path = self._at(folder)
        root = self._at("")[1].rstrip("/") + "/"
        try:
            infos = self._do(files, "find", path, detail=True)
        except FileNotFoundError:
            return {}
        within = ((files._strip_protocol(name), info) for name, info in infos.items())
        return {name.removeprefix(root): _time_in(info) for name, info in within if name.startswith(root)}

    def delete(self, name: str) -> None:
        """Delete an object."""
        files, path = self._at(name)
        try:
            self._do(files, "rm_file", path)
        except FileNotFoundError:
            return

    def modified(self, name: str) -> float | None:
        """The modification time that the store reports."""
        try:
            info = self._info(name)
        except FileNotFoundError:
            return None
        when = _time_in(info)
        if when is None:
            raise SharedTierError(f"the store reports no modification time of {name}")
        return when

    def now(self) -> float | None:
        """The modification time of a temporary object."""
        name = f"probes/{secrets.token_hex(8)}"
        self.write(name, b"now")
        try:
            return self.modified(name)
        finally:
            with contextlib.suppress(Exception):
                self.delete(name)

    def _range(self, name: str, start: int, stop: int) -> bytes:
        files, path = self._at(name)
        data: bytes = self._do(files, "cat_file", path, start=start, end=stop)
        return data

    def _size(self, name: str) -> int | None:
        try:
            size: int | None = self._info(name).get("size")
        except OSError:
            return None
        return size

    def _info(self, name: str) -> dict[str, Any]:
        files, path = self._at(name)
        files.invalidate_cache(path)
        info: dict[str, Any] = self._do(files, "info", path)
        if info.get("type") == "directory":
            raise FileNotFoundError(f"{name} is a folder")
        return info

    def _at(self, name: str) -> tuple[Any, str]:
        """The file system, and the path of an object in it."""
        files = self._files.open()
        path: str = files._strip_protocol(f"{self._url}/{name}" if name else self._url)
        return files, path

    def _make_folder(self, files: Any, path: str) -> None:
        """Make a folder, except in object stores: those have none, and would take it for a bucket."""
        if not files.async_impl:
            self._do(files, "makedirs", path.rpartition("/")[0], exist_ok=True)

    def _do(
        self, files: Any, operation: str, *arguments: Any, seconds: float | None = None, **more: Any
    ) -> Any:
        """Call the file system, with a deadline; again if its credentials have been renewed."""
        limit = self._timeout_seconds if seconds is None else seconds
        try:
            return calls.result(calls.begin(files, operation, *arguments, **more), files, limit, self._check)
        except OriginTimeout:
            self._files.close()
            raise
        except Exception as exc:
            if not self._files.renews(files, exc):
                raise
        files = self._files.open()
        return calls.result(calls.begin(files, operation, *arguments, **more), files, limit, self._check)

    def _check(self) -> None:
        if self._stop.is_set():
            raise SharedTierError("the shared cache was closed during a request")


def _time_in(info: dict[str, Any]) -> float | None:
    """The modification time that a store reports; None: it reports none."""
    from streamload.origins.stores import DATES

    when = next((info[fact] for fact in DATES if info.get(fact)), None)
    if isinstance(when, str):
        when = datetime.datetime.fromisoformat(when.replace("Z", "+00:00"))
    if isinstance(when, datetime.datetime):
        return when.timestamp()
    return float(when) if isinstance(when, int | float) else None


def _lacks_bucket(exc: FileNotFoundError) -> bool:
    """True if the bucket is missing rather than the object: probably a wrong URL."""
    answer = getattr(exc.__cause__, "response", None)
    return isinstance(answer, dict) and answer.get("Error", {}).get("Code") == "NoSuchBucket"
