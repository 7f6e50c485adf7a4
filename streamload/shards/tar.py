"""Incremental tar parser: bytes in as they arrive, regular members and links out (steps F and G).

Accepts what `tarfile` accepts in stream mode (V7, ustar, GNU, pax). One difference: `tarfile` takes a
damaged header within the file for the end, this parser raises. Payloads are passed on as views, never
copied. samples.py deals with names, samples and checksums, links.py with the targets of links.
"""

from __future__ import annotations

import codecs
import contextlib
import re
from typing import NamedTuple
from zlib import adler32

from streamload.errors import ShardCut, ShardError, ShardFormatError

BLOCK_BYTES = 512
EXTENDED_LIMIT_BYTES = 1 << 20
"""Limit for all extended headers (long names, pax records) of one member together."""
EXTENDED_LIMIT_HEADERS = 16
"""Limit for consecutive extended headers; writers use one to four."""
MEMBER_LIMIT_BYTES = 1 << 40
"""The largest size of a member that is accepted."""
MEMBERS_LIMIT = 1 << 19
"""Members whose places are remembered, 24 bytes each; later links of a longer tar are left out."""

NOTE = "STREAMLOAD.prepared"
"""Our only pax record; other readers ignore it as a vendor's."""

_NOTE = NOTE.encode()
_ZEROS = bytes(BLOCK_BYTES)
_NOTHING = memoryview(b"")
_REGULAR = frozenset(b"0\x007")
_WITHOUT_PAYLOAD = frozenset(b"123456")  # links, devices, directories, FIFOs: ignore their size field
HARD_LINK, SYMBOLIC_LINK, SPARSE = "hard link", "symbolic link", "sparse"
_LINKS = {ord("1"): HARD_LINK, ord("2"): SYMBOLIC_LINK}
_LONG_NAME, _LONG_LINK, _SPARSE, _GLOBAL = b"LKSg"
_LOCAL = frozenset(b"xX")
_OLD_GNU = b"ustar  \0"
"""Magic of GNU's own format, which has times where ustar has the prefix of a name."""
_SPARSE_MAPS = frozenset((b"GNU.sparse.map", b"GNU.sparse.size"))
_EXTENDED = frozenset((_LONG_NAME, _LONG_LINK, _GLOBAL)) | _LOCAL

_KNOWN_STARTS = (
    (b"\x1f\x8b", "gzip data", "unpack it (gzip -d), or read it through `pipe:… | gzip -dc`"),
    (b"\xfd7zXZ\0", "xz data", "unpack it (xz -d), or read it through `pipe:… | xz -dc`"),
    (b"\x28\xb5\x2f\xfd", "zstd data", "unpack it (zstd -d), or read it through `pipe:… | zstd -dc`"),
    (b"BZh", "bzip2 data", "unpack it (bzip2 -d), or read it through `pipe:… | bzip2 -dc`"),
    (b"\x04\x22\x4d\x18", "lz4 data", "unpack it (lz4 -d), or read it through `pipe:… | lz4 -dc`"),
    (b"PK\x03\x04", "a zip archive", "write the samples into tar shards"),
    (b"PAR1", "a parquet file", "write the samples into tar shards"),
    (b"version https://git-lfs", "a Git LFS pointer", "fetch the file itself (git lfs pull)"),
    (b"<?xml", "an XML document", "it is probably the server's error message: open the URL and check access"),
    (b"<!doctype", "a web page", "it is probably an error or login page: open the URL and check access"),
    (b"<html", "a web page", "it is probably an error or login page: open the URL and check access"),
    (b"<", "a page of markup", "it is probably the server's error message: open the URL and check access"),
    (b"{", "JSON text", "it is probably the server's error message: open the URL and check access"),
    (b"[", "JSON text", "it is probably the server's error message: open the URL and check access"),
)
_CONTROL = re.compile(rb"[\0-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Bytes that text doesn't have, and every header has."""


class Payload(NamedTuple):
    """A payload in the tar, and the NOTE of its member."""

    start: int
    size: int
    note: str = ""


class Member(NamedTuple):
    """A regular file in a tar; a link or a sparse file, which have no payload here."""

    name: str
    """As in `tarfile`: bytes that aren't UTF-8 are surrogate escapes."""
    start: int
    """Position of its payload in the tar."""
    size: int
    note: str = ""
    """The pax record NOTE, if it has one."""
    kind: str = ""
    """HARD_LINK, SYMBOLIC_LINK or SPARSE; empty: a regular file."""
    target: str = ""
    """The name in a link."""


Piece = tuple[Member, memoryview]
"""A member and a part of its payload. The first piece announces the member, even if it is empty."""


class TarParser:
    """Parses one tar that arrives in chunks of any size.

    Not thread-safe. Buffers no payload: at most one block, or the extended headers of one member. Costs
    about 5 µs a member.

    Args:
        position: of the first chunk in the tar; the border between two members.

    Attributes:
        position: bytes consumed, from the start of the tar.
        ended: whether the end marker was read; everything after it is ignored.
        trailing: whether the end marker was followed by anything other than zeros.
        notes_at: positions in the tar of the NOTE keywords in the latest chunk.
    """

    def __init__(self, position: int = 0):
        self.position = position
        self.ended = False
        self.trailing = False
        self.notes_at: list[int] = []
        self._origin = position
        self._header_start = position
        self._member: Member | None = None
        self._payload = 0  # bytes of the current payload still to come
        self._padding = 0  # zeros after it up to the next block
        self._partial = bytearray()  # an incomplete header, or body of an extended header
        self._body = 0  # size of the extended body that is being buffered; 0: none
        self._extended_kind = 0
        self._extended_headers = 0
        self._extended_bytes = 0
        self._long_name: str | None = None
        self._long_target: str | None = None
        self._sparse_bytes = -1  # stored bytes of a sparse member while blocks of its map come
        self._is_sparse = False  # by a pax record
        self._long_size: int | None = None
        self._note = ""

    @property
    def header_bytes(self) -> int:
        """Number of the latest bytes that belong to an incomplete header."""
        return len(self._partial)

    @property
    def stop(self) -> int:
        """Offset at which the end marker begins, or would begin."""
        return self._header_start if self.ended else self.position

    @property
    def skippable(self) -> int:
        """Number of the next bytes that are payload or padding, which the parser doesn't need."""
        return self._payload + self._padding

    def skip(self, count: int) -> None:
        """Skip `count` ≤ `skippable` unread bytes."""
        if not 0 <= count <= self.skippable:
            raise ValueError(f"skip({count}): {self.skippable} bytes may be skipped here")
        of_payload = min(count, self._payload)
        self._payload -= of_payload
        self._padding -= count - of_payload
        self.position += count

    def feed(self, chunk: bytes | memoryview) -> list[Piece]:
        """Parse the next bytes.

        Returns:
            The payload in them, by member; views into `chunk`.

        Raises:
            ShardFormatError: says what is wrong, and at which byte of the tar.
        """
        self.notes_at = []
        view = memoryview(chunk)
        base, stop = self.position, len(view)
        pieces: list[Piece] = []
        offset = 0
        while offset < stop and not self.ended:
            if self._payload or self._padding:
                payload = min(self._payload, stop - offset)
                if payload and self._member is not None:
                    pieces.append((self._member, view[offset : offset + payload]))
                padding = min(self._padding, stop - offset - payload)
                self._payload -= payload
                self._padding -= padding
                offset += payload + padding
            elif not self._partial and not self._body and stop - offset >= BLOCK_BYTES:
                offset += BLOCK_BYTES
                self.position = base + offset
                self._header(bytes(view[offset - BLOCK_BYTES : offset]), pieces)
            else:
                offset += self._collect(view[offset:], base + offset, pieces)
        if self._member is not None and 0 < self._payload == self._member.size:
            # Announce it now, since all of its payload may be skipped.
            pieces.append((self._member, _NOTHING))
        if self.ended and offset < stop:
            self.trailing = self.trailing or bytes(view[offset:]).count(0) != stop - offset
        self.position = base + stop
        return pieces

    def finish(self) -> None:
        """Declare the end of the bytes.

        Raises:
            ShardCut: the tar ends within a member or a header.
            ShardFormatError: it is empty, or too short for one header.
        """
        if self.ended:
            return
        if self.position == 0:
            raise ShardFormatError("the shard is empty (0 bytes); write it again, or remove it from the list")
        if self._partial and self.position < BLOCK_BYTES:
            raise self._damaged(bytes(self._partial), 0, "it is shorter than one block")
        if self._partial or self._body or self._extended_headers or self._sparse_bytes >= 0:
            raise ShardCut(f"the tar is cut within a header at byte {self.position}")
        if self._payload or self._padding:
            name = f"{self._member.name!a} " if self._member is not None else "a member "
            missing = self._payload + self._padding
            raise ShardCut(f"the tar is cut at byte {self.position}: {name[:200]}lacks {missing} bytes")

    def _collect(self, view: memoryview, position: int, pieces: list[Piece]) -> int:
        """Buffer the next bytes of an incomplete header or body. Return how many were taken."""
        size = self._body or BLOCK_BYTES
        take = min(size - len(self._partial), len(view))
        self._partial += view[:take]
        if len(self._partial) == size:
            whole = bytes(self._partial)
            self._partial.clear()
            self.position = position + take
            if self._body:
                self._body = 0
                self._extend(whole)
            else:
                self._header(whole, pieces)
        return take

    def _header(self, block: bytes, pieces: list[Piece]) -> None:
        """Parse one header block that ends at `position`."""
        if self._sparse_bytes >= 0:
            self._sparse_map(more=bool(block[504]))
            return
        self._header_start = self.position - BLOCK_BYTES
        if block == _ZEROS:
            if self._extended_headers:
                raise self._error("an extended header is followed by the end marker instead of its member")
            self.ended = True
            return
        if not _checksum_holds(block):
            raise self._damaged(block, self._header_start, "a header has a wrong checksum")
        kind = block[156]
        size = self._size(block[124:136])
        if kind in _EXTENDED:
            self._begin_extended(kind, size)
            return
        name = block[:100].partition(b"\0")[0]
        # A directory in V7 format. After an extended header, this may be the first 100 bytes of a long name.
        if kind == 0 and name.endswith(b"/") and not self._extended_headers:
            kind = ord("5")
        if block[345] and kind != _SPARSE and block[257:265] != _OLD_GNU:
            name = block[345:500].partition(b"\0")[0] + b"/" + name
        text = self._long_name if self._long_name is not None else name.decode("utf-8", "surrogateescape")
        note, target, is_sparse = self._note, self._long_target, self._is_sparse
        if self._extended_headers:
            size = self._long_size if self._long_size is not None else size
            self._extended_headers = self._extended_bytes = 0
            self._long_name = self._long_target = self._long_size = None
            self._note, self._is_sparse = "", False
        if kind in _WITHOUT_PAYLOAD:
            if kind in _LINKS:
                if target is None:
                    target = block[157:257].partition(b"\0")[0].decode("utf-8", "surrogateescape")
                pieces.append((Member(text, self.position, 0, "", _LINKS[kind], target), _NOTHING))
            return
        self._payload, self._padding = size, -size % BLOCK_BYTES
        if kind == _SPARSE or (is_sparse and kind in _REGULAR):
            self._member = None
            pieces.append((Member(text, self.position, 0, "", SPARSE), _NOTHING))
            if kind == _SPARSE and block[482]:
                self._sparse_bytes, self._payload, self._padding = size, 0, 0
            return
        self._member = Member(text, self.position, size, note) if kind in _REGULAR else None
        if not size and self._member is not None:
            pieces.append((self._member, _NOTHING))

    def _sparse_map(self, *, more: bool) -> None:
        """Skip a block of an old GNU sparse member's map; the payload follows the last one."""
        if not more:
            self._payload, self._padding = self._sparse_bytes, -self._sparse_bytes % BLOCK_BYTES
            self._sparse_bytes = -1

    def _begin_extended(self, kind: int, size: int) -> None:
        self._extended_headers += 1
        self._extended_bytes += size
        if self._extended_headers > EXTENDED_LIMIT_HEADERS:
            raise self._error(f"more than {EXTENDED_LIMIT_HEADERS} extended headers in a row")
        if self._extended_bytes > EXTENDED_LIMIT_BYTES:
            raise self._error(
                f"extended headers of {self._extended_bytes} bytes; {EXTENDED_LIMIT_BYTES} are allowed"
            )
        self._extended_kind = kind
        self._body = size + -size % BLOCK_BYTES
        if not self._body:
            self._extend(b"")

    def _extend(self, body: bytes) -> None:
        """Parse the body of an extended header. As in `tarfile`, the first name of a member wins."""
        kind = self._extended_kind
        if kind in (_LONG_LINK, _LONG_NAME):
            text = body.partition(b"\0")[0].decode("utf-8", "surrogateescape")
            if kind == _LONG_LINK:
                self._long_target = self._long_target if self._long_target is not None else text
            else:
                self._long_name = self._long_name if self._long_name is not None else text
            return
        records = self._pax_records(body)
        if any(keyword.startswith(b"GNU.sparse.") for keyword in records):
            version = records.get(b"GNU.sparse.major"), records.get(b"GNU.sparse.minor")
            if kind == _GLOBAL or not (_SPARSE_MAPS & records.keys() or version == (b"1", b"0")):
                raise self._error("a sparse member of unknown form; write the tar without --sparse")
            self._is_sparse = True
        path, size, target = (records.get(keyword) for keyword in (b"path", b"size", b"linkpath"))
        path = records.get(b"GNU.sparse.name", path)
        if kind == _GLOBAL:
            # A path or size for all members makes no sense. As it is refused, no global header needs to be
            # remembered, and a parser can start at any border.
            if path is not None or size is not None or target is not None:
                raise self._error("a global pax header states a path, size or link for all members")
            return
        if path is not None and self._long_name is None:
            self._long_name = path.decode("utf-8", "surrogateescape").rstrip("/")
        if target is not None and self._long_target is None:
            self._long_target = target.decode("utf-8", "surrogateescape")
        if size is not None:
            if not size.isdigit() or len(size) > 20:
                raise self._error(f"a pax size of {size[:40]!r}")
            stated = self._checked(int(size))  # in every header, although the first one wins
            if self._long_size is None:
                self._long_size = stated
        if not self._note:
            self._note = records.get(_NOTE, b"").decode("utf-8", "surrogateescape")

    def _pax_records(self, body: bytes) -> dict[bytes, bytes]:
        """Return the records `<length> <keyword>=<value>\\n` of a pax header; strict, in linear time."""
        records: dict[bytes, bytes] = {}
        offset = 0
        while offset < len(body) and body[offset]:
            digits, space, _ = body[offset : offset + 9].partition(b" ")
            length = int(digits) if space and digits.isdigit() else 0
            record = body[offset + len(digits) + 1 : offset + length]
            keyword, equals, value = record[:-1].partition(b"=")
            if keyword == _NOTE:
                self.notes_at.append(self.position - len(body) + offset + len(digits) + 1)
            if not keyword or not equals or record[-1:] != b"\n" or offset + length > len(body):
                raise self._error(f"an invalid pax record: {body[offset : offset + 40]!r}")
            records[keyword] = value
            offset += length
        return records

    def _size(self, field: bytes) -> int:
        """Return the number in a size field: octal, or base-256 if its first bit is set."""
        try:
            if field[0] not in (0o200, 0o377):
                size = int(field.partition(b"\0")[0].strip() or b"0", 8)
            else:
                size = int.from_bytes(field[1:], "big")
                size -= (field[0] == 0o377) << 88
        except ValueError:
            raise self._error(f"a size of {field!r}") from None
        return self._checked(size)

    def _checked(self, size: int) -> int:
        if not 0 <= size <= MEMBER_LIMIT_BYTES:
            raise self._error(f"a member of {size} bytes; 0 to {MEMBER_LIMIT_BYTES} are allowed")
        return size

    def _error(self, cause: str) -> ShardFormatError:
        return ShardFormatError(f"the tar can't be read at byte {self._header_start}: {cause}")

    def _damaged(self, block: bytes, offset: int, cause: str) -> ShardError:
        """Return why this isn't a header: at the start another file format, later damage."""
        if offset == 0 and self._origin == 0:
            start = block.lstrip(b"\xef\xbb\xbf \t\r\n")
            for magic, kind, advice in _KNOWN_STARTS:
                if start[: len(magic)].lower() == magic.lower():
                    return ShardFormatError(f"not a tar but {kind}: {advice}")
            if _is_text(block):  # isn't shown: a server may echo secrets
                return ShardFormatError(f"not a tar but text ({cause}): open the URL and check access")
            return ShardFormatError(f"not a tar ({cause}); it begins with {block[:24]!r}")
        return ShardFormatError(f"the tar is damaged at byte {offset}: {cause}; fetch or write it again")


def _is_text(block: bytes) -> bool:
    with contextlib.suppress(UnicodeDecodeError):
        codecs.getincrementaldecoder("utf-8")().decode(block)  # may end within a character
        return _CONTROL.search(block) is None
    return False


def _checksum_holds(block: bytes) -> bool:
    """Return whether a header's checksum is the sum of its bytes, unsigned or (Sun, NeXT) signed."""
    field = block[148:156]
    try:
        stated = int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        return False
    # The low half of Adler-32 is the sum of bytes modulo 65,521, which 256 bytes can't reach. Avoids a loop.
    total = (adler32(block[:256], 0) & 0xFFFF) + (adler32(block[256:], 0) & 0xFFFF)
    total += 8 * ord(" ") - sum(field)
    if stated == total:
        return True
    high = sum(byte >= 0x80 for byte in block) - sum(byte >= 0x80 for byte in field)
    return stated == total - 256 * high


def normal_path(name: str) -> str | None:
    """Return a name as a path from the top of the tar; None if it leaves the tar."""
    if "./" not in name and "//" not in name and name[:1] != "/" and name[-1:] != "/":
        return name
    parts: list[str] = []
    for part in name.split("/"):
        if part == ".." and not parts:
            return None
        if part == "..":
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)
