"""A file system of fsspec whose library refreshes its own token, as those of gs:// and az:// do.

It asks a token server on loopback for a token, keeps it until its expiry, and reads objects with it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import fsspec
import urllib3


class RefreshError(Exception):
    """The token server gives no token; named as google-auth's."""


class Refused(OSError):
    """The store refuses a request; has a status as aiohttp's exceptions have."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the store answers {status}")
        self.status = status


class CloudStore(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Objects at `store`, a web server.

    Args:
        store: its URL.
        tokens: URL of the token, on the token server.
        token: a fixed one instead.
        seconds: after which a token is refreshed.
    """

    protocol = "cloudstore"

    def __init__(
        self, store: str, tokens: str = "", token: str = "", seconds: float = 3600.0, **more: Any
    ) -> None:
        super().__init__(**more)
        self._store, self._tokens, self._seconds = store, tokens, seconds
        self._token, self._until = token, float("inf") if token else 0.0

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        _, headers = self._request("HEAD", path)
        size, etag = int(headers["Content-Length"]), headers["ETag"]
        return {"name": path, "size": size, "type": "file", "etag": etag}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return self._request("GET", path, {"Range": f"bytes={start or 0}-{(end or 1) - 1}"})[0]

    def _request(
        self, method: str, path: str, headers: dict[str, str] | None = None
    ) -> tuple[bytes, Mapping[str, str]]:
        url = f"{self._store}/{self._strip_protocol(path).rpartition('/')[2]}"
        sent = {**(headers or {}), "Authorization": f"Bearer {self._current()}"}
        with urllib3.PoolManager() as pool:
            answer = pool.request(method, url, headers=sent, retries=False)
        if answer.status >= 400:
            raise Refused(answer.status)
        return answer.data, answer.headers

    def _current(self) -> str:
        if time.monotonic() >= self._until:
            with urllib3.PoolManager() as pool:
                answer = pool.request("GET", self._tokens, retries=False)
            if answer.status != 200:
                raise RefreshError(f"the token server answers {answer.status}")
            self._token, self._until = answer.data.decode(), time.monotonic() + self._seconds
        return self._token


fsspec.register_implementation("cloudstore", CloudStore, clobber=True)
