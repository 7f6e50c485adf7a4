"""The ways in which a `ShardServer` can misbehave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A faulty response; what isn't set stays correct.

    Args:
        first: apply to this many requests (None: to all).
        status: respond with it instead of 200 or 206, with `body` or a short text.
        requires: refuse requests that have this text neither in a header nor in the query, with `status` (401
            by default) and `body`; serve the others. A token that ends after twenty requests, with a
            successor: `Fault(first=20, requires="one"), Fault(requires="two")`.
        informational: respond with these statuses first, 1xx, and then as otherwise.
        headers: add or replace headers; an empty value removes one.
        body: send this instead of the file, as if the file held it: a page for a tar, another version.
        ignore_range: respond to every range with 200 and the whole file.
        ignore_conditions: ignore If-Match and If-Range.
        framing: end the body by Content-Length, by chunks, or by closing the connection.
        cut_after_bytes: end the body after this many bytes, whatever Content-Length said …
        reset: … by resetting the connection instead of closing it.
        stall_after_bytes: send nothing after this many bytes of the body, until the server closes.
        silent: don't respond at all.
        drip: send this part of a response endlessly, some bytes at a time: a header line, `100 Continue`, the
            size of a chunk, or trailers (the last two with framing="chunked").
        bytes_per_second: limit the speed of the body.
    """

    first: int | None = None
    status: int | None = None
    requires: str | None = None
    informational: tuple[int, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    ignore_range: bool = False
    ignore_conditions: bool = False
    framing: Literal["length", "chunked", "close"] = "length"
    cut_after_bytes: int | None = None
    reset: bool = False
    stall_after_bytes: int | None = None
    silent: bool = False
    drip: Literal["header", "continue", "chunk size", "trailers"] | None = None
    bytes_per_second: float | None = None


NO_FAULT = Fault()
EMPTY_PAGE = b"<!DOCTYPE html><html><body>Please sign in.</body></html>\n"
