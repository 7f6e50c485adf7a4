"""Incremental tar parser: bytes in as they arrive, regular members out (steps F and G).

Reads what `tarfile` reads in stream mode (V7, ustar, GNU, pax) and stops where it stops, but says so: where
`tarfile` takes a damaged header in mid-file for the end, this raises. Payloads are handed on as views, never
copied; names, samples and checksums are the business of samples.py.
"""

from __future__ import annotations

from typing import NamedTuple
from zlib import adler32

from streamload.errors import ShardCut, ShardError, ShardFormatError

BLOCK_BYTES = 512
EXTENDED_LIMIT_BYTES = 1 << 20
"""The most that the extended headers (long names, pax records) of one member may take together."""
EXTENDED_LIMIT_HEADERS = 16
"""The most extended headers in a row; writers use one to four."""
MEMBER_LIMIT_BYTES = 1 << 40
"""The largest size that is believed of a member."""

NOTE = "STREAMLOAD.prepared"
"""The one pax record of our own that is read; to all others it is a vendor's, and says nothing."""

_NOTE = NOTE.encode()
_ZEROS = bytes(BLOCK_BYTES)
_NOTHING = memoryview(b"")
_REGULAR = frozenset(b"0\x007")
_WITHOUT_PAYLOAD = frozenset(b"123456")  # links, devices, directories, FIFOs: their size field means nothing
_LONG_NAME, _LONG_LINK, _SPARSE, _GLOBAL = b"LKSg"
_LOCAL = frozenset(b"xX")
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


class Member(NamedTuple):
    """A regular file in a tar."""

    name: str
    """As `tarfile` gives it: bytes that aren't UTF-8 are surrogate escapes."""
    start: int
    """Where its payload begins in the tar."""
    size: int
    note: str = ""
    """The pax record NOTE, if it has one."""


Piece = tuple[Member, memoryview]
"""Some of a member's payload; the first piece of a member announces it, even when it is empty."""


class TarParser:
    """Parses one tar that arrives in chunks of any size.

    Not thread-safe. Holds no payload: at most one block, or the extended headers of one member. Costs about
    5 µs a member.

    Args:
        position: where the first chunk lies in the tar; the border between two members.
    """

    def __init__(self, position: int = 0):
        self.position = position
        """Bytes consumed, counted from the start of the tar."""
        self.ended = False
        """Whether the end marker was read; all that follows it is ignored."""
        self.trailing = False
        """Whether something else than zeros followed the end marker."""
        self.notes_at: list[int] = []
        """Where in the tar the keywords NOTE stand that came with the last `feed`."""
        self._origin = position
        self._header_start = position
        self._member: Member | None = None
        self._payload = 0  # bytes of the current payload that are still to come
        self._padding = 0  # zeros behind it up to the next block
        self._partial = bytearray()  # a header, or an extended header's body, that has come in part
        self._body = 0  # size of the extended body that is being collected; 0: none
        self._extended_kind = 0
        self._extended_headers = 0
        self._extended_bytes = 0
        self._long_name: str | None = None
        self._long_size: int | None = None
        self._note = ""

    @property
    def header_bytes(self) -> int:
        """How many of the bytes that came last are of a header of which more is to come."""
        return len(self._partial)

    @property
    def stop(self) -> int:
        """Where the end marker begins, or would have to."""
        return self._header_start if self.ended else self.position

    @property
    def skippable(self) -> int:
        """How many of the next bytes are payload or padding, whose content isn't needed to go on."""
        return self._payload + self._padding

    def skip(self, count: int) -> None:
        """Go over `count` ≤ `skippable` bytes without having read them."""
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
            ShardFormatError: what is wrong, and at which byte of the tar.
        """
        self.notes_at = []
        view = memoryview(chunk)
        base, stop = self.position, len(view)
        pieces: list[Piece] = []
        at = 0
        while at < stop and not self.ended:
            if self._payload or self._padding:
                payload = min(self._payload, stop - at)
                if payload and self._member is not None:
                    pieces.append((self._member, view[at : at + payload]))
                padding = min(self._padding, stop - at - payload)
                self._payload -= payload
                self._padding -= padding
                at += payload + padding
            elif not self._partial and not self._body and stop - at >= BLOCK_BYTES:
                at += BLOCK_BYTES
                self.position = base + at
                self._header(bytes(view[at - BLOCK_BYTES : at]), pieces)
            else:
                at += self._collect(view[at:], base + at, pieces)
        if self._member is not None and 0 < self._payload == self._member.size:
            # Announced now, since all of its payload may be skipped.
            pieces.append((self._member, _NOTHING))
        if self.ended and at < stop:
            self.trailing = self.trailing or bytes(view[at:]).count(0) != stop - at
        self.position = base + stop
        return pieces

    def finish(self) -> None:
        """Say that there are no more bytes.

        Raises:
            ShardCut: the tar ends within a member or a header.
            ShardFormatError: it is empty, or so short that no header fitted.
        """
        if self.ended:
            return
        if self.position == 0:
            raise ShardFormatError("the shard is empty (0 bytes); write it again, or take it off the list")
        if self._partial and self.position < BLOCK_BYTES:
            raise self._damaged(bytes(self._partial), 0, "it is shorter than one block")
        if self._partial or self._body or self._extended_headers:
            raise ShardCut(f"the tar is cut within a header at byte {self.position}")
        if self._payload or self._padding:
            name = f"{self._member.name!a} " if self._member is not None else "a member "
            missing = self._payload + self._padding
            raise ShardCut(f"the tar is cut at byte {self.position}: {name[:200]}lacks {missing} bytes")

    def _collect(self, view: memoryview, position: int, pieces: list[Piece]) -> int:
        """Take what belongs to a header or body that comes in parts; returns how much that was."""
        wanted = self._body or BLOCK_BYTES
        take = min(wanted - len(self._partial), len(view))
        self._partial += view[:take]
        if len(self._partial) == wanted:
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
        """Take in one header block that ends at `position`."""
        self._header_start = self.position - BLOCK_BYTES
        if block == _ZEROS:
            if self._extended_headers:
                raise self._error("an extended header is followed by the end marker instead of its member")
            self.ended = True
            return
        if not _checksum_holds(block):
            raise self._damaged(block, self._header_start, "a header's checksum does not hold")
        kind = block[156]
        size = self._size(block[124:136])
        if kind in _EXTENDED:
            self._begin_extended(kind, size)
            return
        if kind == _SPARSE:
            raise self._error("a sparse member; write the tar without --sparse")
        name = block[:100].partition(b"\0")[0]
        # V7 tar writes a directory so. Behind an extended header these may be a long name's first 100 bytes.
        if kind == 0 and name.endswith(b"/") and not self._extended_headers:
            kind = ord("5")
        if block[345]:
            name = block[345:500].partition(b"\0")[0] + b"/" + name
        text = self._long_name if self._long_name is not None else name.decode("utf-8", "surrogateescape")
        note = self._note
        if self._extended_headers:
            size = self._long_size if self._long_size is not None else size
            self._extended_headers = self._extended_bytes = 0
            self._long_name = self._long_size = None
            self._note = ""
        if kind in _WITHOUT_PAYLOAD:
            return
        self._payload, self._padding = size, -size % BLOCK_BYTES
        self._member = Member(text, self.position, size, note) if kind in _REGULAR else None
        if not size and self._member is not None:
            pieces.append((self._member, _NOTHING))

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
        """Take in the body of an extended header. As in `tarfile`, the first to name the member wins."""
        kind = self._extended_kind
        if kind == _LONG_LINK:
            return
        if kind == _LONG_NAME:
            if self._long_name is None:
                self._long_name = body.partition(b"\0")[0].decode("utf-8", "surrogateescape")
            return
        records = self._pax_records(body)
        if any(keyword.startswith(b"GNU.sparse.") for keyword in records):
            raise self._error("a sparse member; write the tar without --sparse")
        path, size = records.get(b"path"), records.get(b"size")
        if kind == _GLOBAL:
            # A path or size for every member makes no sense; refused, nothing of a global header has to be
            # remembered, and reading may begin at any border.
            if path is not None or size is not None:
                raise self._error("a global pax header states a path or size for all members")
            return
        if path is not None and self._long_name is None:
            self._long_name = path.decode("utf-8", "surrogateescape").rstrip("/")
        if size is not None:
            if not size.isdigit() or len(size) > 20:
                raise self._error(f"a pax size of {size[:40]!r}")
            stated = self._believed(int(size))  # of each header, though the first one's counts
            if self._long_size is None:
                self._long_size = stated
        if not self._note:
            self._note = records.get(_NOTE, b"").decode("utf-8", "surrogateescape")

    def _pax_records(self, body: bytes) -> dict[bytes, bytes]:
        """The records `<length> <keyword>=<value>\\n` of a pax header; read strictly, in linear time."""
        records: dict[bytes, bytes] = {}
        at = 0
        while at < len(body) and body[at]:
            digits, space, _ = body[at : at + 9].partition(b" ")
            length = int(digits) if space and digits.isdigit() else 0
            record = body[at + len(digits) + 1 : at + length]
            keyword, equals, value = record[:-1].partition(b"=")
            if keyword == _NOTE:
                self.notes_at.append(self.position - len(body) + at + len(digits) + 1)
            if not keyword or not equals or record[-1:] != b"\n" or at + length > len(body):
                raise self._error(f"a pax record that can't be read: {body[at : at + 40]!r}")
            records[keyword] = value
            at += length
        return records

    def _size(self, field: bytes) -> int:
        """The number in a size field: octal, or base-256 when its first bit is set."""
        try:
            if field[0] not in (0o200, 0o377):
                size = int(field.partition(b"\0")[0].strip() or b"0", 8)
            else:
                size = int.from_bytes(field[1:], "big")
                size -= (field[0] == 0o377) << 88
        except ValueError:
            raise self._error(f"a size of {field!r}") from None
        return self._believed(size)

    def _believed(self, size: int) -> int:
        if not 0 <= size <= MEMBER_LIMIT_BYTES:
            raise self._error(f"a member of {size} bytes; 0 to {MEMBER_LIMIT_BYTES} are allowed")
        return size

    def _error(self, what: str) -> ShardFormatError:
        return ShardFormatError(f"the tar can't be read at byte {self._header_start}: {what}")

    def _damaged(self, block: bytes, offset: int, what: str) -> ShardError:
        """Why this isn't a header: at the start another kind of file, later on damage."""
        if offset == 0 and self._origin == 0:
            start = block.lstrip(b"\xef\xbb\xbf \t\r\n")
            for known, kind, advice in _KNOWN_STARTS:
                if start[: len(known)].lower() == known.lower():
                    return ShardFormatError(f"not a tar but {kind}: {advice}")
            return ShardFormatError(f"not a tar ({what}); it begins with {block[:24]!r}")
        return ShardFormatError(f"the tar is damaged at byte {offset}: {what}; fetch or write it again")


def _checksum_holds(block: bytes) -> bool:
    """Whether a header's own checksum is that of its bytes, summed up unsigned or (Sun, NeXT) signed."""
    field = block[148:156]
    try:
        stated = int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        return False
    # The low half of Adler-32 is the sum of bytes modulo 65,521, which 256 bytes can't reach: no loop.
    total = (adler32(block[:256], 0) & 0xFFFF) + (adler32(block[256:], 0) & 0xFFFF)
    total += 8 * ord(" ") - sum(field)
    if stated == total:
        return True
    high = sum(byte >= 0x80 for byte in block) - sum(byte >= 0x80 for byte in field)
    return stated == total - 256 * high
