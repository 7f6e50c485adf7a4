"""The requests for objects in S3, as botocore makes and signs them (step F).

botocore's client prepares each request, by its own rules for endpoints, regions and credentials; a handler
of before-send takes the request before it is sent. Has no signer and no endpoint rules, and sends nothing.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import importlib.util
import json
import logging
import os
import re
import shlex
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from zlib import crc32

import botocore.client  # here, not in each forked process
import botocore.session
from botocore import UNSIGNED
from botocore.awsrequest import AWSResponse
from botocore.config import Config
from botocore.exceptions import CredentialRetrievalError, NoCredentialsError

from streamload.errors import OptionError
from streamload.origins import renewal
from streamload.origins.access import OF_WEB
from streamload.origins.renewal import Lookup
from streamload.urls.identity import DEFAULT_PORTS

logger = logging.getLogger("streamload")

_KEYS = {
    "key": "aws_access_key_id",
    "username": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "password": "aws_secret_access_key",
    "token": "aws_session_token",
}
_OWN = {*_KEYS, "anon", "profile", "endpoint_url", "use_ssl", "requester_pays", "version_aware"}
_OWN |= {"client_kwargs", "config_kwargs"}
_OF_FILE_SYSTEM = {
    "cache_regions",
    "default_block_size",
    "default_cache_type",
    "default_fill_cache",
    "fixed_upload_size",
    "listings_expiry_time",
    "max_concurrency",
    "max_paths",
    "skip_instance_cache",
    "use_listings_cache",
}
"""Options of s3fs that no request shows."""
_OF_CLIENT = {*_KEYS.values(), "endpoint_url", "region_name", "use_ssl"}
_OF_REQUESTS = {
    "ignore_configured_endpoint_urls",
    "region_name",
    "request_checksum_calculation",
    "response_checksum_validation",
    "s3",
    "signature_version",
    "use_dualstack_endpoint",
    "use_fips_endpoint",
    "user_agent",
    "user_agent_appid",
    "user_agent_extra",
}
_OF_TRANSPORT = {"connect_timeout", "max_pool_connections", "read_timeout", "retries", "tcp_keepalive"}
"""Names of botocore's Config; here OriginOptions takes their place."""
_BUCKET = re.compile(r"[A-Za-z0-9._-]{1,255}")
_ACCESS_POINT = re.compile(r"(arn:aws[a-z-]*:s3:[a-z0-9-]+:[0-9]{12}:accesspoint[:/][A-Za-z0-9-]{1,63})/(.+)")


class S3Place(NamedTuple):
    """An object: bucket or ARN of an access point, key, and number of the version ("": the current one)."""

    bucket: str
    key: str
    number: str = ""


class SignedRequest(NamedTuple):
    """A request as botocore would send it.

    Attributes:
        method: GET, HEAD, PUT or DELETE.
        region: that it was signed for.
        keys: access key, secret and token; None if it is anonymous or storage_options have them.
        authorities: a file of certificates to trust instead of the default ones, or "".
    """

    url: str
    headers: Mapping[str, str]
    region: str
    keys: tuple[str | None, ...] | None
    authorities: str
    method: str
    body: bytes | None


def is_ours(url: str, storage_options: Mapping[str, Any]) -> bool:
    """Return whether an object is read by requests of ours; fsspec reads it otherwise."""
    options, place = configured(storage_options), place_of(url)
    client, config = (options.get(name) or {} for name in ("client_kwargs", "config_kwargs"))
    return (
        options.keys() <= _OWN | _OF_FILE_SYSTEM
        and not any(twice <= options.keys() for twice in ({"key", "username"}, {"secret", "password"}))
        and (isinstance(client, Mapping) and client.keys() <= _OF_CLIENT)
        and (isinstance(config, Mapping) and config.keys() <= _OF_REQUESTS | _OF_TRANSPORT)
        and (place is not None and place.key != "" and not {".", ".."} & set(place.key.split("/")))
    )


def check_s3fs(purpose: str) -> None:
    """Check that s3fs is installed, for what is done by other requests than ours.

    Raises:
        OptionError: it isn't.
    """
    if importlib.util.find_spec("s3fs") is None:
        raise OptionError(f"{purpose} needs s3fs, which isn't installed: pip install 'streamload[s3]'")


class S3Access:
    """Signer of the requests of one set of options. Thread-safe; belongs to one process.

    Mutable state: `_signer` (replaced as a whole when credentials are renewed), `regions` by bucket, and the
    last look for credentials that found none. `prepare` and `look_up` may ask metadata services and run
    commands.

    Attributes:
        regions: of the buckets whose store has named one.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.regions: dict[str, str] = {}
        self._options = options
        self._lock = threading.Lock()
        self._signer: _Signer | None = None
        self._looked: tuple[float, Lookup] = (-renewal.LOOK_SECONDS, Lookup(False, ""))

    @property
    def lacks_credentials(self) -> bool:
        """True if requests are anonymous because no credentials were found."""
        signer = self._signer
        return signer is not None and signer.lacks_credentials

    @property
    def may_block(self) -> bool:
        """True if `prepare` has to be called, in a thread that may hang."""
        signer = self._signer
        if signer is None:
            return not (_has_keys(self._options) or _is_anonymous(self._options))
        return signer.needs_refresh

    def prepare(self) -> None:
        """Look for credentials, or refresh those that end soon."""
        self._prepared().keys()

    def sign(self, place: S3Place, operation: str, parameters: Mapping[str, Any]) -> SignedRequest:
        """Return a request with these parameters.

        Args:
            operation: a method of botocore's client: "get_object", …

        Raises:
            Exception: botocore's: no credentials, no such profile, an invalid bucket.
        """
        signer = self._prepared()
        if signer.lacks_credentials:
            if not _may_be_anonymous(self._options):
                self.replace()
                raise NoCredentialsError
            _warn_anonymous(place.bucket)
        return signer.sign(place, operation, parameters, self.regions.get(place.bucket))

    def _prepared(self) -> _Signer:
        signer = self._signer
        if signer is None:
            with self._lock:  # not while another thread looks for credentials
                signer = self._signer = self._signer or _Signer(self._options)
        return signer

    def look_up(self, refused: tuple[str | None, ...] | None) -> Lookup:
        """Read the credentials anew; sign with them if they aren't those that were refused."""
        if _has_keys(self._options):
            return renewal.KEYS_IN_OPTIONS
        with self._lock:
            if self._signer is None or self._signer.keys() != refused:  # another transfer has renewed them
                return Lookup(True, "")
            looked, lookup = self._looked
            if time.monotonic() - looked < renewal.LOOK_SECONDS:
                return lookup
            try:
                signer = _Signer(self._options)
                lookup = renewal.compared(signer.session, signer.credentials, signer.keys() != refused)
            except Exception as exc:
                lookup = renewal.failed(exc)
            if lookup.has_others:
                self._signer = signer
            else:
                self._looked = (time.monotonic(), lookup)
            return lookup

    def replace(self) -> None:
        """Look for credentials anew with the next request of any transfer; this object may hang."""
        for key, access in list(_accesses.items()):
            if access is self:
                _accesses.pop(key, None)


class _Signer:
    """A session of botocore, the credentials that it found, and its clients by region."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self.session = botocore.session.Session(profile=options.get("profile"))
        # To list the services of AWS, only to find S3 among them, is a third of what a client costs.
        loader = self.session.get_component("data_loader")
        loader.list_available_services, loader.file_loader = _AllServices, _Models()
        self._is_anonymous = _is_anonymous(options)
        is_given = self._is_anonymous or _has_keys(options)
        with self._named_process():
            self.credentials = None if is_given else self.session.get_credentials()
        self.lacks_credentials = not is_given and self.credentials is None
        authorities = self.session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
        self._authorities = str(authorities or "")
        self._clients: dict[str | None, Any] = {}
        self._lock = threading.Lock()

    @property
    def needs_refresh(self) -> bool:
        refresh_needed = getattr(self.credentials, "refresh_needed", None)
        return refresh_needed is not None and bool(refresh_needed())

    def keys(self) -> tuple[str | None, ...] | None:
        if self.credentials is None:
            return None
        with self._named_process():
            return tuple(self.credentials.get_frozen_credentials())[:3]

    @contextlib.contextmanager
    def _named_process(self) -> Iterator[None]:
        """Say which credential_process failed, without its arguments and output, which may be secrets."""
        try:
            yield
        except (AttributeError, CredentialRetrievalError, OSError, TypeError, ValueError) as exc:
            command = str(self.session.get_scoped_config().get("credential_process") or "")
            facts = getattr(exc, "kwargs", {"provider": "custom-process"})
            if not command or facts["provider"] != "custom-process":
                raise
            problem = facts.get("error_msg") or "its output isn't a JSON object"
            if isinstance(exc, OSError):
                problem = exc.strerror
            program = Path(shlex.split(command)[0]).name
            raise CredentialRetrievalError(
                provider=f"the credential_process {program} of the AWS configuration",
                error_msg=f"{problem}; expected Version 1, AccessKeyId and SecretAccessKey as JSON",
            ) from None

    def sign(
        self, place: S3Place, operation: str, parameters: Mapping[str, Any], region: str | None
    ) -> SignedRequest:
        keys, client = self.keys(), self._client(region)
        number = {"VersionId": place.number} if place.number else {}
        payer = {"RequestPayer": "requester"} if self._options.get("requester_pays") else {}
        # In a header: botocore's own goes behind the body, in an encoding that not all stores know.
        checksum = {}
        if "Body" in parameters and client.meta.config.request_checksum_calculation != "when_required":
            checksum["ChecksumCRC32"] = b64encode(crc32(parameters["Body"]).to_bytes(4, "big")).decode()
        prepare = getattr(client, operation)
        prepare(Bucket=place.bucket, Key=place.key, **parameters, **number, **payer, **checksum)
        request = _taken.request
        return SignedRequest(
            request.url,
            {"Host": _host(request.url), **{name: _text(value) for name, value in request.headers.items()}},
            client.meta.region_name,
            keys,
            self._authorities,
            request.method,
            parameters.get("Body"),
        )

    def _client(self, region: str | None) -> Any:
        with self._lock:
            client = self._clients.get(region)
            if client is None:
                client = self._clients[region] = self._new_client(region)
            return client

    def _new_client(self, region: str | None) -> Any:
        config = self._options.get("config_kwargs") or {}
        config = {name: value for name, value in config.items() if name in _OF_REQUESTS}
        arguments = {
            "use_ssl": self._options.get("use_ssl", True),
            **(self._options.get("client_kwargs") or {}),
        }
        for name in ("endpoint_url", *_KEYS):
            if self._options.get(name) is not None:
                arguments[_KEYS.get(name, name)] = self._options[name]
        if region is not None:
            arguments["region_name"] = region
            config.pop("region_name", None)
        if self._is_anonymous or self.lacks_credentials:
            config["signature_version"] = UNSIGNED
            arguments = {name: value for name, value in arguments.items() if name not in _KEYS.values()}
        client = self.session.create_client("s3", config=Config(**config), **arguments)
        client.meta.events.register("before-send.s3", _take)
        return client


class _AllServices:
    """The services of AWS, unlisted: a description that is missing is an error of its own."""

    def __init__(self, type_name: str) -> None:
        self._type_name = type_name

    def __contains__(self, service: str) -> bool:
        return True


class _Models:
    """Loads botocore's descriptions of services as plain dicts, in half the time of its OrderedDicts."""

    def exists(self, path: str) -> bool:
        return any(file.is_file() for file in _files_of(path))

    def load_file(self, path: str) -> Any:
        file = next((file for file in _files_of(path) if file.is_file()), None)
        if file is None:
            return None
        content = file.read_bytes()
        return json.loads(gzip.decompress(content) if file.suffix == ".gz" else content)


class _NoBody:
    """The body of the answer that botocore gets in place of the store's."""

    def read(self, *_: object) -> bytes:
        return b""

    def stream(self, *_: object) -> Iterator[bytes]:
        return iter(())

    def close(self) -> None:
        return


_taken = threading.local()
_accesses: dict[tuple[int, str], S3Access] = {}  # by process, as a fork inherits locks, and options


def _take(request: Any, **_: object) -> AWSResponse:
    """Keep a request that is ready to be sent; botocore sends nothing if a handler answers."""
    _taken.request = request
    return AWSResponse(request.url, 200, {}, _NoBody())


def configured(storage_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return storage options with those of fsspec's configuration, as s3fs would get them."""
    options = {name: value for name, value in storage_options.items() if name not in OF_WEB}
    folder = os.path.expanduser("~/.config/fsspec")  # noqa: PTH111  (Path's fails without a home)
    has_variables = any(name.startswith("FSSPEC_") for name in os.environ)
    if "fsspec" not in sys.modules and not has_variables and not Path(folder).is_dir():
        return options  # no configuration: fsspec takes a tenth of a second to import
    from fsspec.config import conf

    return {**conf.get("s3", {}), **conf.get("s3a", {}), **options}


def access_for(options: Mapping[str, Any]) -> S3Access:
    """Return what signs the requests of these options in this process.

    Args:
        options: from `configured`.
    """
    key = (os.getpid(), json.dumps(options, sort_keys=True, default=repr))
    access = _accesses.get(key)
    return access or _accesses.setdefault(key, S3Access(options))


def place_of(url: str) -> S3Place | None:
    """Return the object of a URL; None if its bucket needs other requests than S3's own."""
    path = url.partition("://")[2]
    point = _ACCESS_POINT.fullmatch(path)
    bucket, _, key = path.partition("/") if point is None else (point[1], "/", point[2])
    if point is None and (not _BUCKET.fullmatch(bucket) or bucket.endswith("--x-s3")):
        return None
    key, _, number = key.partition("?versionId=")
    return S3Place(bucket, key, number)


def _files_of(path: str) -> tuple[Path, Path]:
    """Return the files in which botocore keeps a description, by its path without their endings."""
    return Path(f"{path}.json"), Path(f"{path}.json.gz")


def _has_keys(options: Mapping[str, Any]) -> bool:
    client = options.get("client_kwargs") or {}
    return bool(options.get("key") or options.get("username") or client.get("aws_access_key_id"))


def _is_anonymous(options: Mapping[str, Any]) -> bool:
    return (
        bool(options.get("anon")) or (options.get("config_kwargs") or {}).get("signature_version") is UNSIGNED
    )


def _may_be_anonymous(options: Mapping[str, Any]) -> bool:
    return not {"anon", "profile"} & options.keys()


def _host(url: str) -> str:
    """Return the header Host as botocore signs it: without the usual port, which urllib3 sends to proxies."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return host if parts.port in {None, DEFAULT_PORTS[parts.scheme]} else f"{host}:{parts.port}"


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


@functools.lru_cache(maxsize=256)
def _warn_anonymous(bucket: str) -> None:
    """Warn once per process, whatever the number of shards."""
    logger.warning("No AWS credentials found: reading s3://%s anonymously.", bucket)
