"""Small objects and whole files under one URL, of which a shared cache consists.

Names are relative paths of plain characters. An object is replaced as a whole: readers get the old or the new
one. Its backends, folder.py, store.py and s3_store.py, raise the exceptions of their libraries, which become
SharedTierError here, without secrets. The meaning of the objects is defined in tier.py.
"""

from __future__ import annotations

import contextlib
import functools
import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamload import urls
from streamload.cache.shared.folder import SharedFolder
from streamload.errors import OptionError, OriginDenied, SharedTierDenied, SharedTierError
from streamload.options.storage import copy_options
from streamload.origins import calls

if TYPE_CHECKING:
    from streamload.cache.shared.store import Store

OBJECT_LIMIT_BYTES = 24 << 20
"""The limit for objects that are read whole: the index of a shard of some hundred thousand samples."""
_NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9._=+-]*(/[A-Za-z0-9_][A-Za-z0-9._=+-]*)*")
_NOT_OURS = frozenset({"pipe", "data", "github", "git", "zip", "tar", "libarchive", "reference"})


class TooLarge(SharedTierError):
    """An object is larger than any valid one of its kind."""


class Objects:
    """Objects by name under one URL. Thread-safe, picklable, and usable in a forked child.

    Makes no request before the first operation, and caches nothing: what others wrote is seen as soon as the
    store shows it. Each request has a timeout, except in a mounted file system that hangs by itself. What the
    store refuses, doesn't have room for or doesn't answer raises SharedTierError.

    Args:
        url: of the root: "s3://bucket/folder", "gs://bucket", a path, or any other file system of fsspec.
        timeout_seconds: for one operation; a file that is put has another second for each 256 KB.
        stop: ends every wait, with a SharedTierError.

    Attributes:
        url: without secrets.

    Raises:
        OptionError: the URL can't be a folder of objects.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        timeout_seconds: float = 15.0,
        stop: threading.Event | None = None,
    ) -> None:
        refuse_url(url)
        self.url = urls.redact(url).rstrip("/") or "/"
        self._made_of = (url, copy_options(storage_options), timeout_seconds)
        self._backend: SharedFolder | Store
        if urls.is_local(url):
            self._backend = SharedFolder(urls.local_path(url), stop)
        else:
            self._backend = _store_for(*self._made_of[:2])(*self._made_of, stop)

    def __repr__(self) -> str:
        return f"Objects({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        url, options, timeout = self._made_of
        return functools.partial(Objects, timeout_seconds=timeout), (url, options)

    def until(self, stop: threading.Event) -> Objects:
        """The same objects, whose waits end once an event is set."""
        url, options, timeout = self._made_of
        return Objects(url, options, timeout_seconds=timeout, stop=stop)

    def target(self, name: str) -> str:
        """The URL of an object, secrets included, for another client."""
        return self._backend.target(_checked(name))

    @property
    def storage_options(self) -> dict[str, Any]:
        """The options that belong to `target`."""
        return copy_options(self._made_of[1])

    def read(self, name: str, limit_bytes: int = OBJECT_LIMIT_BYTES) -> bytes | None:
        """Read an object; None if there is none.

        Raises:
            SharedTierError: it can't be read.
            TooLarge: it has more than `limit_bytes`.
        """
        with self._translated("read", name):
            data = self._backend.read(_checked(name), limit_bytes)
        if data is not None and len(data) > limit_bytes:
            raise TooLarge(f"{self.url}: {name} has more than {limit_bytes:,} bytes: not one of ours")
        return data

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Read the bytes of an object from `start` up to `stop`, all of them."""
        if start >= stop:
            return b""
        with self._translated("read", name):
            data = self._backend.read_range(_checked(name), start, stop)
        if len(data) != stop - start:
            raise SharedTierError(f"{self.url}: {name} has {len(data):,} bytes in {start:,}–{stop:,}")
        return data

    def write(self, name: str, data: bytes) -> None:
        """Write an object, or replace it as a whole."""
        with self._translated("write", name):
            self._backend.write(_checked(name), data)

    def write_new(self, name: str, data: bytes) -> bool:
        """Write an object if there is none; returns whether this call wrote it.

        Of several calls at once exactly one returns True in a folder and on S3. Elsewhere each may, and the
        last one stands: stores without conditional writes, or that check the condition before the bytes
        arrive (OpenStack Swift). To be sure, read it again a moment later.
        """
        if not self.has_conditions:
            if self.read(name) is not None:
                return False
            self.write(name, data)
            return True
        with self._translated("write", name):
            return self._created(_checked(name), data)

    @functools.cached_property
    def has_conditions(self) -> bool:
        """True if the store supports conditional writes; tried once, with a temporary object."""
        name = f"probes/{secrets.token_hex(8)}"
        with self._translated("write", name):
            try:
                # Not even the first one: it was sent again, as its answer was lost.
                return not self._created(name, b"first") or not self._created(name, b"second")
            except (TypeError, NotImplementedError):  # a file system without conditional writes
                return False
            finally:
                with contextlib.suppress(Exception):
                    self._backend.delete(name)

    def put_file(self, name: str, path: Path) -> None:
        """Upload a file as an object, in parts if it is large."""
        with self._translated("write", name):
            self._backend.put_file(_checked(name), path)

    def names(self, folder: str = "") -> list[str]:
        """The names of all objects below a folder, sorted; foreign ones included."""
        with self._translated("list", folder or "/"):
            return sorted(self._backend.names(_checked(folder) if folder else ""))

    def times(self, folder: str = "") -> dict[str, float | None]:
        """The names of all objects below a folder, and when each was written; None: that is unknown."""
        with self._translated("list", folder or "/"):
            return self._backend.times(_checked(folder) if folder else "")

    def delete(self, name: str) -> None:
        """Delete an object, if it exists."""
        with self._translated("delete", name):
            self._backend.delete(_checked(name))

    def modified(self, name: str) -> float | None:
        """When an object was written, in seconds by the clock of the store; None if there is none."""
        with self._translated("look at", name):
            return self._backend.modified(_checked(name))

    def age(self, name: str) -> float | None:
        """Seconds since an object was written, by the clock of the store alone.

        A temporary object is written, so that no clock of a node is asked. None: there is no such object, or
        the store's times are those of its writers' clocks, as on some file systems.
        """
        modified = self.modified(name)
        if modified is None:
            return None
        with self._translated("write", "probes"):
            store_time = self._backend.now()
        return None if store_time is None else store_time - modified

    def _created(self, name: str, data: bytes) -> bool:
        try:
            self._backend.create(name, data)
        except FileExistsError:
            return False
        return True

    @contextlib.contextmanager
    def _translated(self, action: str, name: str) -> Iterator[None]:
        with urls.scrubbed_errors(lambda: urls.secrets_of(*self._made_of[:2])):
            try:
                yield
            except SharedTierError:
                raise
            except OptionError as exc:
                raise OptionError(f"shared_cache: {exc}") from exc
            except Exception as exc:
                meant = calls.translate("", exc)
                kind = SharedTierDenied if isinstance(meant, OriginDenied) else SharedTierError
                cause = str(meant).removeprefix(": ")
                raise kind(f"the shared cache {self.url} can't {action} {name}: {cause}") from exc


def _store_for(url: str, storage_options: Mapping[str, Any]) -> type[Store]:
    """The backend of a URL, imported on first use."""
    if urls.scheme(url) == "s3":
        from streamload.origins.signing import check_s3fs, is_ours

        check_s3fs(f"{urls.redact(url)}: a shared cache in S3")
        if is_ours(f"{url.rstrip('/')}/name", storage_options):
            from streamload.cache.shared.s3_store import S3Store

            return S3Store
    from streamload.cache.shared.store import Store

    return Store


def refuse_url(url: str, name: str = "shared_cache") -> None:
    """Raise OptionError if a URL can't be that of a shared cache. Makes no request."""
    allowed = 'expected a folder such as "s3://bucket/folder", "gs://bucket" or "/mnt/nfs/folder"'
    is_folder = bool(url.strip()) and not any(sign in url for sign in ("?", "::", "\0", "{", "|"))
    if not is_folder or urls.scheme(url) in _NOT_OURS:
        raise OptionError(f"{name}={urls.redact(url)!r}: {allowed}")


def _checked(name: str) -> str:
    """Validate a name: it means the same in every store, and nothing outside of the root."""
    if not _NAME.fullmatch(name) or len(name) > 512:
        raise OptionError(f"{name!r:.100} is not a valid name of an object")
    return name
