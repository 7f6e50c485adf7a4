"""Tars made block by block, right or wrong: what `tarfile` would not write."""

from __future__ import annotations

import struct

BLOCK = 512
END = bytes(2 * BLOCK)

FIELDS = b"0000644\0" * 3
TIME = b"00000000000\0"
_MIDDLE = struct.pack("100s8s32s32s8s8s", b"", b"ustar\00000", b"", b"", b"", b"")


def header(
    name: bytes = b"a.jpg", size: bytes = b"00000000000\0", kind: bytes = b"0", prefix: bytes = b""
) -> bytes:
    """A header whose checksum holds."""
    head = name[:100].ljust(100, b"\0") + FIELDS + size + TIME
    return seal(head + b" " * 8 + kind + _MIDDLE + prefix.ljust(167, b"\0"))


def seal(block: bytes | bytearray) -> bytes:
    """The block with a checksum that holds."""
    total = sum(block) - sum(block[148:156]) + 256
    return block[:148] + b"%06o\0 " % total + block[156:]


def octal(size: int) -> bytes:
    """A size as most tars have it."""
    return b"%011o\0" % size


def base_256(size: int) -> bytes:
    """A size as large ones are written; negative ones as well."""
    return (b"\xff" if size < 0 else b"\x80") + (size % (1 << 88)).to_bytes(11, "big")


def padded(body: bytes) -> bytes:
    """Filled up to whole blocks."""
    return body + bytes(-len(body) % BLOCK)


def member(name: str | bytes, payload: bytes) -> bytes:
    """A regular file."""
    raw = name if isinstance(name, bytes) else name.encode("utf-8", "surrogateescape")
    long = long_name(raw) if len(raw) > 100 else b""
    return long + header(raw, octal(len(payload))) + padded(payload)


def long_name(name: bytes) -> bytes:
    """GNU's header for a name of more than 100 bytes."""
    return header(b"././@LongLink", octal(len(name) + 1), b"L") + padded(name + b"\0")


def pax(*records: tuple[bytes, bytes], kind: bytes = b"x") -> bytes:
    """An extended header of pax."""
    body = b""
    for keyword, value in records:
        record = b" " + keyword + b"=" + value + b"\n"
        length = len(record) + len(str(len(record) + len(str(len(record)))))
        body += b"%d" % length + record
    return header(b"pax", octal(len(body)), kind) + padded(body)
