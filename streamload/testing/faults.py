"""How an origin misbehaves: one value for each way, for `ShardServer.misbehave`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One answer that is not as it should be; what isn't set stays right.

    Args:
        first: hold for so many requests, then be over (None: for ever).
        status: answered instead of 200 or 206, with `body` or a short text.
        headers: added to the answer, or put in place of its own; an empty value takes a header away.
        body: sent instead of the file, as if the file held it (a page for a tar, another version).
        ignore_range: answer every range with 200 and the whole.
        ignore_conditions: heed neither If-Match nor If-Range.
        framing: how the body's end is told: by Content-Length, by chunks, or by closing the connection.
        cut_after_bytes: end the body after so many bytes, whatever was promised …
        reset: … by resetting the connection instead of closing it.
        stall_after_bytes: be silent after so many bytes of the body, until the server closes.
        silent: don't even answer.
        drip: send this part of an answer for ever, some bytes at a time: a header line, `100 Continue`, the
            size of a chunk, or trailers (these two where the framing is "chunked").
        bytes_per_second: send this slowly.
    """

    first: int | None = None
    status: int | None = None
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
