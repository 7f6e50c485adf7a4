"""An S3 front that checks Signature Version 4 and whose tokens end, for which moto has no means.

It answers as S3 does: an expired token is a 400, an unknown access key a 403, and a HEAD has no body that
could name the code.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/\d+/([^/]+)/s3/aws4_request, ?"
    r"SignedHeaders=([^,]+), ?Signature=(\w+)"
)
_LISTING = "<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>"


class Exchange(NamedTuple):
    """A request and the status and code of its response."""

    method: str
    path: str
    status: int
    code: str
    access_key: str


@dataclass(frozen=True)
class Keys:
    """One set of temporary credentials; the `number` tells it from others."""

    number: int

    @property
    def access_key(self) -> str:
        return f"AK{self.number}"

    @property
    def secret(self) -> str:
        return f"SK{self.number}"

    @property
    def token(self) -> str:
        return f"TOKEN{self.number}"

    def environ(self) -> dict[str, str]:
        """Return the variables that hold them."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_SESSION_TOKEN": self.token,
        }

    def write_file(self, path: Path) -> None:
        """Write them as a credentials file, in place, as scripts do."""
        names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
        values = zip(names, (self.access_key, self.secret, self.token), strict=True)
        path.write_text("[default]\n" + "".join(f"{name} = {value}\n" for name, value in values))

    def write_process_output(self, path: Path, seconds: float = 36_000) -> None:
        """Write them as a credential_process prints them."""
        until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))
        facts = {"AccessKeyId": self.access_key, "SecretAccessKey": self.secret, "SessionToken": self.token}
        path.write_text(json.dumps({"Version": 1, **facts, "Expiration": until}))


class SignedS3:
    """A server at `endpoint`; a context manager.

    Attributes:
        valid: the keys that it accepts.
        objects: the bodies by "bucket/key".
        log: the requests so far.
        refusal: status and code for a token that isn't valid.
        denied: "bucket/key" of objects that are denied to everybody.
        public: "bucket/key" of objects that everybody may read.
        region: where its buckets are; a request that is signed for another region is refused.
        elsewhere: the status of that refusal.
        payer: whether requests must name the requester as the one who pays.
        slow_downs: how many requests are still to be answered with SlowDown.
        ignores_conditions: whether If-Match is ignored.
        echoes_token: whether the reason phrases have the token of the request.
        states_size: whether the answer 416 has the size in its body, as that of AWS.

    Args:
        tls: files of a certificate and its key.
    """

    def __init__(self, tls: tuple[str, str] | None = None) -> None:
        self.valid: set[Keys] = {Keys(1)}
        self.objects: dict[str, bytes] = {}
        self.log: list[Exchange] = []
        self.refusal = (400, "ExpiredToken")
        self.denied: set[str] = set()
        self.public: set[str] = set()
        self.region = "us-east-1"
        self.elsewhere = 400
        self.payer = self.ignores_conditions = self.echoes_token = False
        self.states_size = True
        self.slow_downs = 0
        self._after: tuple[int, Callable[[], None]] | None = None
        self._lock = threading.Lock()
        front = self

        class Handler(_Handler):
            server_front = front

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self.endpoint = f"http{'s' if tls else ''}://127.0.0.1:{self.port}"
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def __enter__(self) -> SignedS3:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def environ(self) -> dict[str, str]:
        """Return the variables that lead to it, without keys."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def put(self, bucket: str, key: str, body: bytes) -> str:
        """Store an object; return its URL."""
        self.objects[f"{bucket}/{key}"] = body
        return f"s3://{bucket}/{key}"

    def call_after(self, requests: int, call: Callable[[], None]) -> None:
        """Call a function before the answer to a later request, the next one with 1; others wait for it."""
        self._after = (len(self.log) + requests, call)

    def codes(self) -> Counter[str]:
        """Return how often each error code was sent."""
        return Counter(exchange.code for exchange in list(self.log) if exchange.code)

    def _arrives(self) -> None:
        with self._lock:
            due = self._after
            if due is not None and len(self.log) + 1 >= due[0]:
                self._after = None
                due[1]()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Be silent about clients that close a connection in the middle, as for a version."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_front: SignedS3

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        front = self.server_front
        front._arrives()
        refusal = self._refusal()
        path = unquote(urlsplit(self.path).path).lstrip("/")
        if front.slow_downs:
            front.slow_downs -= 1
            self._fail(503, "SlowDown")
        elif refusal is not None and path not in front.public:
            self._fail(*refusal)
        elif path in front.denied:
            self._fail(403, "AccessDenied")
        elif "list-type=2" in self.path:
            self._send(200, _LISTING.encode(), {"Content-Type": "application/xml"})
        elif path not in front.objects:
            self._fail(404, "NoSuchKey")
        else:
            self._send_object(front.objects[path])

    def _send_object(self, body: bytes) -> None:
        headers = {
            "ETag": f'"{hashlib.md5(body).hexdigest()}"',
            "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
        }
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        expected = self.headers.get("If-Match", headers["ETag"])
        if expected != headers["ETag"] and not self.server_front.ignores_conditions:
            self._fail(412, "PreconditionFailed")
        elif asked is None:
            self._send(200, body, headers)
        elif int(asked[1]) >= len(body):
            size = f"<ActualObjectSize>{len(body)}</ActualObjectSize>"
            self._fail(416, "InvalidRange", size if self.server_front.states_size else "")
        else:
            start, stop = int(asked[1]), min(len(body), int(asked[2] or len(body)) + 1)
            span = {"Content-Range": f"bytes {start}-{stop - 1}/{len(body)}"}
            self._send(206, body[start:stop], headers | span)

    def _refusal(self) -> tuple[int, str] | None:
        """Return status and code if the request isn't signed with valid keys."""
        front = self.server_front
        match = _AUTHORIZATION.fullmatch(self.headers.get("Authorization", ""))
        if match is None:
            return 403, "AccessDenied"
        access_key, region, names, signature = match.groups()
        if region != front.region:
            return front.elsewhere, "AuthorizationHeaderMalformed"
        keys = next((keys for keys in front.valid if keys.access_key == access_key), None)
        if keys is None or self.headers.get("x-amz-security-token") != keys.token:
            return front.refusal
        if self._signature(keys, region, names) != signature:
            return 403, "SignatureDoesNotMatch"
        is_paid = not front.payer or self.headers.get("x-amz-request-payer") == "requester"
        return None if is_paid else (403, "AccessDenied")

    def _signature(self, keys: Keys, region: str, names: str) -> Any:
        url = urlsplit(self.path)
        headers = "".join(f"{name}:{' '.join(self.headers[name].split())}\n" for name in names.split(";"))
        query = "&".join(sorted(url.query.split("&")))
        hashed = self.headers.get("x-amz-content-sha256", "")
        signer = S3SigV4Auth(Credentials(keys.access_key, keys.secret), "s3", region)
        request = AWSRequest(self.command, f"http://{self.headers['Host']}{self.path}")
        request.context["timestamp"] = self.headers.get("x-amz-date")
        canonical = "\n".join((self.command, url.path, query, headers, names, hashed))
        return signer.signature(signer.string_to_sign(request, canonical), request)

    def _fail(self, status: int, code: str, facts: str = "") -> None:
        body = f"<Error><Code>{code}</Code><Message>The request is refused.</Message>{facts}</Error>"
        headers = {"Content-Type": "application/xml"}
        if code == "AuthorizationHeaderMalformed":
            headers["x-amz-bucket-region"] = self.server_front.region
        self._send(status, body.encode(), headers, code)

    def _send(self, status: int, body: bytes, headers: dict[str, str], code: str = "") -> None:
        match = _AUTHORIZATION.fullmatch(self.headers.get("Authorization", ""))
        access_key = match[1] if match else ""
        self.server_front.log.append(Exchange(self.command, self.path, status, code, access_key))
        self.send_response(
            status, self.headers["x-amz-security-token"] if self.server_front.echoes_token else None
        )
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
