"""A server with the Hugging Face Hub's API, as far as huggingface_hub uses it to list and read files."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from streamload import limits

_PAGE = 5
"""Entries in a page of a listing: the Hub has a thousand."""


class Hub:
    """Repositories by type and name (`datasets/org/name`, `models/…`, `buckets/…`), with their files' bytes.

    Attributes:
        gated: those that are read only with `token`, and whose files only are denied otherwise.
        private: those that nobody knows without it.
        asked: the requests, as method and path.
    """

    def __init__(self, files: Mapping[str, Mapping[str, bytes]]):
        self.files = files
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self.token = "hf_right"
        self.asked: list[str] = []
        self.url = ""

    def answer(self, target: str, token: str) -> tuple[int, dict[str, str], bytes]:
        """The status, headers and body of a GET."""
        parts = urlsplit(target)
        path, query = unquote(parts.path), parse_qs(parts.query)
        name = next((name for name in self.files if re.search(rf"/{name}(/|$)", path)), None)
        is_ours = token == f"Bearer {self.token}"
        if name is None or (name in self.private and not is_ours):
            error = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            return HTTPStatus.UNAUTHORIZED if not is_ours else HTTPStatus.NOT_FOUND, error, b""
        files, rest = self.files[name], path.split(f"/{name}", 1)[1].strip("/")
        what, _, rest = rest.partition("/")
        is_bucket = name.startswith("buckets/")
        if path.startswith("/api/") and what in {"", "revision"}:
            facts = {
                "id": name.split("/", 1)[1],
                "sha": "0" * 40,
                "private": False,
                "createdAt": "2026-01-01T00:00:00.000Z",
                "size": 1,
                "totalFiles": 1,
            }
            return 200, {}, json.dumps(facts).encode()
        if not is_bucket:
            _, _, rest = rest.partition("/")  # the revision
        if path.startswith("/api/") and what == "tree":
            return self._tree(files, rest, query, target, is_bucket)
        if what == "resolve" and name in self.gated and not is_ours:
            message = f"Access to dataset {name} is restricted."
            return HTTPStatus.FORBIDDEN, {"X-Error-Code": "GatedRepo", "X-Error-Message": message}, b""
        if what == "resolve" and rest in files:
            etag = hashlib.sha256(files[rest]).hexdigest()
            return 200, {"ETag": f'"{etag}"', "Accept-Ranges": "bytes"}, files[rest]
        return 404, {"X-Error-Code": "EntryNotFound"}, b""

    def _tree(
        self, files: Mapping[str, bytes], folder: str, query: Mapping[str, Any], target: str, is_bucket: bool
    ) -> tuple[int, dict[str, str], bytes]:
        entries: dict[str, dict[str, Any]] = {}
        recursive = query.get("recursive", ["false"])[0].lower() in {"true", "1"}
        for path, data in sorted(files.items()):
            if folder and not path.startswith(f"{folder}/"):
                continue
            below = path[len(folder) :].strip("/").split("/")
            for depth in range(1, len(below)) if recursive else range(1, min(2, len(below))):
                parent = "/".join(filter(None, [folder, *below[:depth]]))
                if not (is_bucket and recursive):
                    entries[parent] = {"type": "directory", "path": parent, "oid": "0" * 40}
            if recursive or len(below) == 1:
                oid = hashlib.sha1(data, usedforsecurity=False).hexdigest()
                entries[path] = {"type": "file", "path": path, "size": len(data), "oid": oid, "xetHash": oid}
        if not entries:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        first = int(query.get("cursor", ["0"])[0])
        page, headers = [*entries.values()][first : first + _PAGE], {}
        if first + _PAGE < len(entries):
            plain = re.sub(r"[?&]cursor=\d+", "", target)
            following = f"{self.url}{plain}{'&' if '?' in plain else '?'}cursor={first + _PAGE}"
            headers["Link"] = f'<{following}>; rel="next"'
        return 200, headers, json.dumps(page).encode()


@contextmanager
def serving(files: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    """Serve repositories on loopback."""
    hub = Hub(files)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._respond(with_body=False)

        def do_GET(self) -> None:
            self._respond(with_body=True)

        def do_POST(self) -> None:
            hub.asked.append(f"POST {self.path}")
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_error(HTTPStatus.NOT_IMPLEMENTED)

        def _respond(self, *, with_body: bool) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            status, headers, body = hub.answer(self.path, self.headers.get("Authorization", ""))
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if status == HTTPStatus.OK and asked and "ETag" in headers:
                start, stop = int(asked[1]), min(len(body), int(asked[2] or len(body)) + 1)
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(body)}"
                status, body = HTTPStatus.PARTIAL_CONTENT, body[start:stop]
            self.send_response(status)
            for header, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(header, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="hub")
    limits.start(thread)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
