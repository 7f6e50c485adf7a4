"""Files on the Hugging Face Hub, resolved once and read as plain HTTP (step F)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from streamload.errors import OptionError, OriginDenied
from streamload.options.storage import FileOptions
from streamload.origins import calls
from streamload.origins.access import WebCredentials, read_again
from streamload.origins.protocol import Origin, Session, Stream, Version
from streamload.origins.web import HttpOrigin
from streamload.origins.web_client import HttpClient
from streamload.urls import redact
from streamload.urls.hub import OPTIONS, access_advice


class HubOrigin(Origin):
    """A file on the Hugging Face Hub or a compatible server, read as plain HTTP."""

    def __init__(self, url: str, storage_options: dict[str, Any], session: Session) -> None:
        self.url = redact(url)
        self._target, self._session = url, session
        self._options: Mapping[str, Any] = storage_options
        self._is_looked_up = storage_options.get("token") in {None, True}
        self._web: Origin | None = None
        self._endpoint = "https://huggingface.co"

    def open(self, start: int = 0, expected: Version | None = None) -> Stream:
        """Resolve the address once, and open it."""
        with self._advised():
            return self._resolved().open(start, expected)

    def version(self) -> Version:
        """Resolve the address once, and ask there."""
        with self._advised():
            return self._resolved().version()

    def read(self, start: int, stop: int, version: Version) -> bytes:
        """Resolve the address once, and read from it."""
        with self._advised():
            return self._resolved().read(start, stop, version)

    def close(self) -> None:
        """Close the resolved origin."""
        if self._web is not None:
            self._web.close()

    @contextlib.contextmanager
    def _advised(self) -> Iterator[None]:
        """Say what to do about a repository that is gated or private."""
        try:
            yield
        except OriginDenied as exc:
            denied = OriginDenied(f"{exc}; {access_advice(self.url, self._endpoint)}")
            vars(denied).update(vars(exc))
            raise denied from exc

    def _resolved(self) -> Origin:
        if self._web is None:
            self._web = self._resolve()
        return self._web

    def _resolve(self) -> Origin:
        from huggingface_hub import HfFileSystem, hf_hub_url

        files = HfFileSystem(**{name: value for name, value in self._options.items() if name in OPTIONS})
        self._endpoint = files.endpoint
        try:
            lookup = calls.begin(files, "resolve_path", self._target)
            session = self._session
            place: Any = calls.result(
                lookup, files, session.options.stall_seconds, lambda: session.check(self.url)
            )
        except Exception as exc:
            files.invalidate_cache()  # it takes a repository that was denied for missing, and remembers that
            error = calls.translate(self.url, exc)
            if isinstance(error, OriginDenied):
                error.may_be_renewed = self._is_looked_up or isinstance(self._options, FileOptions)
                with contextlib.suppress(OptionError):
                    self._options = read_again(self._target, self._options)
            raise error from exc
        if not hasattr(place, "repo_id"):  # a bucket
            address = files.url(self._target)
        else:
            address = hf_hub_url(
                place.repo_id,
                place.path_in_repo,
                repo_type=place.repo_type,
                revision=place.revision,
                endpoint=files.endpoint,
            )
        session = self._session
        if session.named is not None:  # the user configured the endpoint
            session = replace(session, named=session.named.and_also(files.endpoint))
        credentials = WebCredentials(
            self._target,
            self._options,
            session,
            address=address,
            authorize=_bearer,
            is_looked_up=self._is_looked_up,
        )
        return HttpOrigin(HttpClient(address, session, credentials))


def _bearer(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the header with the user's token: of the options, else of HF_TOKEN or the token file now."""
    from huggingface_hub import get_token

    token = options.get("token")
    if token is None or token is True:
        token = get_token()
    return {"Authorization": f"Bearer {token}"} if token else {}
