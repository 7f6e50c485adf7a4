"""Objects in S3: shards are read as from a web server (step F), small objects by a request each.

signing.py makes the requests, and our sockets send them; shards have the ranges, versions and retries of
web.py. Objects that aren't ours (`signing.is_ours`) are read by fsspec, as those of any other store.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import urllib3
from urllib3.exceptions import HTTPError

from streamload.errors import OriginDenied, OriginError, OriginTimeout, StreamloadError
from streamload.origins import calls, renewal
from streamload.origins.access import WebCredentials
from streamload.origins.protocol import (
    ENDED,
    Session,
    Version,
    clock_hint,
    http_error,
    same_version,
    strong,
)
from streamload.origins.renewal import Lookup
from streamload.origins.signing import S3Access, S3Place, SignedRequest, access_for, configured, place_of
from streamload.origins.sockets import Pools
from streamload.origins.web import HttpOrigin
from streamload.origins.web_client import HttpClient, error_facts
from streamload.urls import redact

_Result = TypeVar("_Result")

_PARAMETERS = {"Range": "Range", "If-Match": "IfMatch", "If-Range": "IfMatch"}
"""S3 doesn't know If-Range."""
_FIRST_BYTE = "bytes=0-0"
_REGION = re.compile("(?![0-9]+$)(?!-)[A-Za-z0-9-]{1,63}(?<!-)")
"""A region as botocore takes one: any other value in an answer would end all requests for its bucket."""
_MOVED = {301, 307, 400}
_SILENT = {400, 401, 403}
"""A HEAD that is refused with these may say that the credentials have ended: there is no body to tell."""
_EXAMINED = {301, 302, 307, 400, 401, 403, 412, 416}


class S3Origin(HttpOrigin):
    """An object in S3.

    Args:
        storage_options: as for s3fs; `is_ours` has to hold for them.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any], session: Session) -> None:
        # The host is botocore's, made of the user's configuration: a plan names nothing but bucket and key.
        session = replace(session, named=None)
        super().__init__(_S3Client(url, storage_options, session))


class S3Requests:
    """Requests for the objects of one URL, sent to their region, and again with other credentials.

    Args:
        url: of an object, or of a folder of them.
        storage_options: as for s3fs; `is_ours` has to hold for them.

    Attributes:
        url: as it may be shown.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any], session: Session) -> None:
        self.url, self.session = redact(url), session
        self._listed, self._storage_options = url, storage_options
        self._options = configured(storage_options)
        self._hidden: tuple[str | None, ...] | None = None

    def send(
        self,
        pools: Pools,
        place: S3Place,
        parameters: Mapping[str, Any],
        operation: str = "get_object",
        refused: Collection[int] = _EXAMINED,
    ) -> tuple[urllib3.BaseHTTPResponse, dict[str, str]]:
        """Send a request; sign it again for another region, or once with other credentials.

        Args:
            parameters: of botocore's method for the operation.
            refused: the statuses of answers whose error is read.

        Returns:
            The answer, and the facts of its error if that was read: then it is closed.

        Raises:
            OriginDenied: the credentials have ended, and there are no others.
            HTTPError: there was no answer.
        """
        is_moved = is_renewed = False
        while True:
            access = access_for(self._options)
            request = self._signed(access, place, operation, parameters)
            self.session.check(self.url)
            self.session.count("origin_requests")
            headers = urllib3.HTTPHeaderDict({"Accept-Encoding": "identity"})
            headers.update(request.headers)
            try:
                response = pools.request(
                    request.url, headers, request.authorities, request.method, request.body
                )
            except HTTPError:
                access.regions.pop(place.bucket, None)  # perhaps it has no host for this bucket
                raise
            if response.status not in refused:
                return response, {}
            facts = error_facts(response, self.session)
            response.close()
            code = facts.get("Code", "")
            region = response.headers.get("x-amz-bucket-region") or facts.get("Region", "")
            is_other = _REGION.fullmatch(region) and region != request.region
            if response.status in _MOVED and is_other and not is_moved:
                access.regions[place.bucket] = region
                is_moved = True
            elif code in ENDED or (not code and request.method == "HEAD" and response.status in _SILENT):
                lookup = self._look_up(access, request)
                if is_renewed or not lookup.has_others:
                    if code not in ENDED:
                        return response, facts
                    raise renewal.denied(self.url, code, lookup)
                is_renewed = True
            else:
                if response.status in _MOVED:
                    access.regions.pop(place.bucket, None)
                return response, facts

    def refusal(
        self, response: urllib3.BaseHTTPResponse, facts: Mapping[str, str], *, is_write: bool = False
    ) -> StreamloadError:
        """The error that an answer means."""
        status, code = response.status, facts.get("Code", "")
        message = f"{self.url}: the store answers {status}" + (f" ({code})" if code else "")
        if location := response.headers.get("Location", ""):
            message += f" and names {redact(location)}, but no region"
        message += clock_hint(code, response.headers.get("Date"))
        if code == "NoSuchBucket":
            message += ": the bucket does not exist"
        if code == "AccessDenied" and not is_write:
            message += ": the object is denied, or it is missing and the credentials lack s3:ListBucket"
        error = http_error(message, calls.status_of_code(code, status), response.headers.get("Retry-After"))
        if isinstance(error, OriginError):
            error.may_pass = status == 403 and not code
        access = access_for(self._options)
        if isinstance(error, OriginDenied) and access.lacks_credentials:
            access.replace()
            error.may_be_renewed = True
        return error

    def _signed(
        self, access: S3Access, place: S3Place, operation: str, parameters: Mapping[str, Any]
    ) -> SignedRequest:
        try:
            if access.may_block:
                self._in_thread(access.prepare)
            request = access.sign(place, operation, parameters)
        except StreamloadError as exc:
            if isinstance(exc, OriginTimeout):
                access.replace()
            raise
        except Exception as exc:
            access.regions.pop(place.bucket, None)
            raise self._without_request(exc) from exc
        if request.keys != self._hidden:
            self._hidden = request.keys
            self.session.hide(request.keys or ())
        return request

    def _without_request(self, exc: Exception) -> Exception:
        """Return the error for a request that botocore couldn't make."""
        if isinstance(exc, RuntimeError):  # botocore's, for renewed credentials that have expired already
            error = OriginDenied(f"{self.url}: {exc}")
            error.may_be_renewed = True
            return error
        return calls.translate(self.url, exc)

    def _look_up(self, access: S3Access, request: SignedRequest) -> Lookup:
        storage_options, lookup = renewal.read_file(self._listed, self._storage_options)
        if lookup is not None:  # they are in a file of options
            if lookup.has_others:
                self._storage_options, self._options = storage_options, configured(storage_options)
            return lookup
        try:
            return self._in_thread(lambda: access.look_up(request.keys))
        except OriginTimeout as exc:
            access.replace()
            return renewal.failed(exc)

    def _in_thread(self, call: Callable[[], _Result]) -> _Result:
        """Return what a call returns that may ask a metadata service or run a command."""
        future, seconds = calls.in_thread(call), self.session.options.stall_seconds
        try:
            result: _Result = calls.result(future, None, seconds, lambda: self.session.check(self.url))
        except OriginTimeout:
            raise OriginTimeout(f"{self.url}: no credentials for {seconds:g} s") from None
        return result


class _S3Client(HttpClient):
    has_backends = False

    def __init__(self, url: str, storage_options: Mapping[str, Any], session: Session) -> None:
        super().__init__(url, session, WebCredentials(url, {}, session))  # botocore has its own
        place = place_of(url)
        assert place is not None
        self._place, self._requests = place, S3Requests(url, storage_options, session)

    def _request(
        self, pools: Pools, request_headers: Mapping[str, str], _: object = None
    ) -> urllib3.BaseHTTPResponse:
        """Send a GetObject."""
        parameters = {_PARAMETERS[name]: value for name, value in request_headers.items()}
        response, facts = self._requests.send(pools, self._place, parameters)
        if response.status not in _EXAMINED:
            self._check_condition(response, request_headers)
        elif response.status == 416:
            self._state_size(response, facts, pools, request_headers)
        else:
            raise self._requests.refusal(response, facts)
        return response

    def _check_condition(
        self, response: urllib3.BaseHTTPResponse, request_headers: Mapping[str, str]
    ) -> None:
        """Refuse the bytes of another version, from a store that ignores conditions."""
        expected, etag = (
            request_headers.get("If-Match") or request_headers.get("If-Range"),
            strong(response.headers.get("ETag")),
        )
        if expected and etag and response.status < 300 and etag != expected:
            response.close()
            same_version(self.url, Version(etag=expected), Version(etag=etag))

    def _state_size(
        self,
        response: urllib3.BaseHTTPResponse,
        facts: Mapping[str, str],
        pools: Pools,
        request_headers: Mapping[str, str],
    ) -> None:
        """Put the size into an answer 416 where HTTP has it: S3 has it in the body, other stores nowhere."""
        if "Content-Range" in response.headers or request_headers["Range"] == _FIRST_BYTE:
            return
        size = facts.get("ActualObjectSize") or self.version(pools).size
        response.headers["Content-Range"] = f"bytes */{size}"
