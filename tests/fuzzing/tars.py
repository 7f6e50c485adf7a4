"""Tars that are nearly right, read by the parser and the scanner; `tarfile` is the oracle.

What must hold of any bytes:

1. The members and links are those that `tarfile` gives, in order; where the parser stops earlier, it says so
   by a typed error, and where it doesn't complain, it has all of them.
2. Any split of the bytes into chunks gives the same members, payloads and error.
3. Samples taken up behind any entry are those of a scan from the start, and so are those of a scan that goes
   over payloads without reading them.
4. A link gives the payload that its target's path has in an extraction so far, or is left out.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import posixpath
import random
import struct
import tarfile
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from streamload.errors import ShardError
from streamload.shards.samples import Entry, ShardScanner, split_name
from streamload.shards.tar import EXTENDED_LIMIT_HEADERS, HARD_LINK, SPARSE, SYMBOLIC_LINK, TarParser

from .blocks import BLOCK, FIELDS, TIME, header, seal

_EXTENDED = frozenset((b"L", b"K", b"x", b"X", b"g"))  # long names and links, pax, Solaris's, global pax
_MEMBERS_LIMIT = 64  # a negative size can send tarfile back for ever

Failure = tuple[type[ShardError], str]
Parsed = tuple[str, int, int, str, str, bytes]
"""Name, start, size, kind, target and payload of a member."""


_NOISE = random.Random(0).randbytes(4 * BLOCK)
_NAMES = (
    b"a.jpg", b"a.txt", b"b.jpg", b"b.txt", b"a.JPG", b"a.seg.png", b"f/a.jpg", b"f.d/a.txt", b"plain", b"",
    b"/abs.jpg", b"../up.jpg", b".hid", b"x/.jpg", b"a b\n.txt", b"\xc3\xbc.jpg", b"\xff\xfe.jpg", b"dir/",
    b"__meta__.json", b"__m__/a.jpg", b"n" * 96 + b".jpg", b"d/" * 48 + b"a.b",
)  # fmt: skip
_LONG_NAMES = (*_NAMES, b"l" * 200 + b".jpg", b"a.txt\0rest", b"trailing/", b"\0", b"a.jpg/", b"p" * 900)
_TARGETS = (*_NAMES, b"a.jpg", b"a.txt", b"b.jpg", b"./a.jpg", b"../f/a.jpg", b"f/../b.jpg", b"/a.jpg")
_KINDS = (
    *(b"0",) * 12,
    b"\0",
    b"\0",
    b"7",
    b"1",
    b"1",
    b"1",
    b"2",
    b"2",
    b"2",
    b"3",
    b"5",
    b"6",
    b"Z",
    b"S",
    b"V",
    b"D",
)
_SIZES = (0, 0, 1, 5, 5, 511, 512, 513, 1024)
_ODD_NUMBERS = (
    bytes(12), b" " * 12, b"777777777777", b"\xff" * 12, b"\xff" * 10 + b"\xfc\0", b"-0000000010\0",
    b"-0000002000\0", b"+0000000010\0", b"0_000000010\0", b"0o000000010\0", b"12345678zzz\0",
    b"00000000018\0",
    b"\x1c0000000010\0", b"\xa00000000010\0", b"00000000010 ", b"         10\0", b"\x80" + b"\xff" * 11,
    *(b"\x80" + size.to_bytes(11, "big") for size in (8 << 30, 1 << 62, 1 << 40, (1 << 40) + 1, 512)),
)  # fmt: skip
_KEYWORDS = (
    *((b"path", name) for name in _LONG_NAMES[:-1]),
    *((b"size", size) for size in (b"0", b"5", b"512", b"-1", b"+5", b"5.5", b"", b"1_0", b"9" * 25,
    b"0005")),
    (b"size", b"%d" % (1 << 62)), (b"mtime", b"1.5"), (b"comment", b"x" * 40), (b"linkpath", b"a.jpg"),
    (b"hdrcharset", b"BINARY"), (b"hdrcharset", b"ISO-IR 10646 2000 UTF-8"), (b"uid", b"abc"),
    (b"GNU.sparse.major", b"1"), (b"GNU.sparse.size", b"99"), (b"GNU.sparse.name", b"s.jpg"),
    (b"GNU.sparse.map", b"0,1"), (b"SCHILY.xattr.user.x", b"\xff\0\n="),
)  # fmt: skip
_BROKEN_RECORDS = (
    b"0 path=a\n", b"999 path=a\n", b"9 path=a\n", b"10 path=a", b"x path=a\n", b" 9 path=a\n",
    b"00011 path=a\n",
    b"11 path:a\n", b"6 =ab\n", b"99999999999999999999 path=a\n", b"5 a=b\n", b"\n", b"11\tpath=a\n",
)  # fmt: skip
_DAMAGE = b"\0\0 01237-+x/_\x80\xffgxXLKSZ57\n="
_FIELD_PLACES = (range(100), range(124, 136), range(124, 136), range(148, 157), range(156, 157),
                 range(257, 265), range(345, 500), range(512))  # fmt: skip


def make(rng: random.Random) -> bytes:
    """Headers that are right but for some fields, bodies that fit or lie; then, mostly, some damage."""
    out = bytearray()
    headers: list[int] = []
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        while rng.random() < 0.25:
            _add_extended(out, headers, rng)
        _add_member(out, headers, rng)
    if rng.random() < 0.01:
        for _ in range(rng.choice((EXTENDED_LIMIT_HEADERS - 1, EXTENDED_LIMIT_HEADERS + 1))):
            _add_extended(out, headers, rng)
        _add_member(out, headers, rng)
    out += bytes(rng.choice((0, BLOCK, 2 * BLOCK, 2 * BLOCK, 4 * BLOCK)))
    if rng.random() < 0.1:
        _add_member(out, headers, rng)
    if rng.random() < 0.55:
        _damage(out, headers, rng)
    return bytes(out)


def _number(rng: random.Random, value: int) -> bytes:
    draw = rng.random()
    if draw < 0.8:
        return b"%011o\0" % value
    if draw < 0.86:
        return b"%12o" % value
    if draw < 0.92:
        return b"\x80" + value.to_bytes(11, "big")
    return rng.choice(_ODD_NUMBERS)


def _add_member(out: bytearray, headers: list[int], rng: random.Random) -> None:
    size = rng.choice(_SIZES)
    kind = rng.choice(_KINDS)
    prefix = rng.choice(_NAMES) if rng.random() < 0.06 else b""
    headers.append(len(out))
    block = header(rng.choice(_NAMES), _number(rng, size), kind, prefix)
    if kind in b"12":
        block = seal(block[:157] + rng.choice(_TARGETS)[:100].ljust(100, b"\0") + block[257:])
    out += block
    if kind in b"0\x007ZVD":
        payload = _NOISE[:size] if rng.random() < 0.9 else bytes(out[-BLOCK:])[:size]
        out += payload.ljust(size + -size % BLOCK, b"\0")


def _add_extended(out: bytearray, headers: list[int], rng: random.Random) -> None:
    kind = rng.choice((b"L", b"L", b"K", b"x", b"x", b"x", b"x", b"X", b"g"))
    if kind in b"LK":
        body = rng.choice(_LONG_NAMES) + b"\0" * rng.choice((1, 1, 0, 3))
    else:
        body = b"".join(_record(rng) for _ in range(rng.choice((0, 1, 1, 2, 3))))
    size = len(body) if rng.random() < 0.95 else rng.choice((0, 1, len(body) + 7, 1 << 20, (1 << 20) + 1))
    headers.append(len(out))
    out += header(b"././@LongLink", _number(rng, size), kind)
    out += body + bytes(-len(body) % BLOCK)


def _record(rng: random.Random) -> bytes:
    if rng.random() < 0.1:
        return rng.choice(_BROKEN_RECORDS)
    keyword, value = rng.choice(_KEYWORDS)
    rest = b" " + keyword + b"=" + value + b"\n"
    length = len(rest) + len(str(len(rest) + len(str(len(rest)))))
    return b"%d" % length + rest


def _damage(data: bytearray, headers: list[int], rng: random.Random) -> None:
    """Change some bytes of headers, their checksums put right half of the time; cut, move or add bytes."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        kind = rng.random()
        if kind < 0.6:
            at = rng.choice(headers)
            block = data[at : at + BLOCK]
            if len(block) < BLOCK:
                continue
            places = rng.choice(_FIELD_PLACES)
            for _ in range(rng.choice((1, 1, 2, 8))):
                block[rng.choice(places)] = rng.choice(_DAMAGE)
            data[at : at + BLOCK] = seal(block) if rng.random() < 0.5 else block
        elif kind < 0.75:
            del data[rng.randrange(len(data) + 1) :]
        elif kind < 0.85:
            at = rng.randrange(len(data) + 1) // BLOCK * BLOCK
            del data[at : at + BLOCK]
        elif kind < 0.93:
            at = rng.randrange(len(data) + 1) // BLOCK * BLOCK
            data[at:at] = rng.choice((bytes(BLOCK), data[:BLOCK], _NOISE[:BLOCK], b"x"))
        elif data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def check(data: bytes, rng: random.Random) -> str:
    """Raise AssertionError where a property doesn't hold; else the name of the error, or "whole"."""
    ours, failure = members(data, range(BLOCK, len(data), BLOCK))
    _check_oracle(data, [member[:5] for member in ours if member[3] != SPARSE], failure)
    for name, start, size, *_, payload in ours[:-1] if failure is not None else ours:
        assert payload == data[start : start + size], f"the payload of {name!r} at byte {start}"
    again = read_back(data)
    samples = scan(data, ShardScanner(read_back=again), BLOCK)
    assert samples.failure == failure, f"scanning says {samples.failure}, parsing {failure}"
    expected = [sample for sample in grouped(ours, data) if sample[1]]
    given = [(entry.key, payloads(data, entry)) for entry in samples.entries]
    assert given == (expected if failure is None else expected[: len(given)]), (
        f"{given} instead of {expected}"
    )
    turn = rng.randrange(4)
    if turn == 0:
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((1, 2, 8))))
        others, other_failure = members(data, cuts)
        assert other_failure == failure, f"cut at {cuts} it says {other_failure} instead of {failure}"
        if failure is not None and others:  # the chunk with the error in it gives nothing
            others, last = others[:-1], others[-1]
            assert last[:5] == ours[len(others)][:5], f"cut at {cuts} it has the member {last}"
        assert _is_same(others, ours, failure), f"cut at {cuts} it has the members {others} instead of {ours}"
    elif turn == 1:
        chunk_bytes = rng.choice((100, 513, 700, 1 << 20)) if rng.random() < 0.97 else rng.choice((1, 7))
        _check_scan(data, ShardScanner(read_back=again), chunk_bytes, samples)
    elif turn == 2 and samples.entries:
        last = rng.choice(samples.entries)
        rest = samples._replace(entries=samples.entries[last.number + 1 :])
        _check_scan(data, ShardScanner.after(last, read_back=again), rng.choice((BLOCK, 700)), rest)
    elif turn == 3:
        unread = samples._replace(entries=[entry._replace(checksum=None) for entry in samples.entries])
        _check_scan(data, ShardScanner(checksums=False, read_back=again), 600, unread, skip=True)
    return "whole" if failure is None else failure[0].__name__


def read_back(data: bytes) -> Callable[[int, int], bytes]:
    """What gives a scanner earlier bytes."""
    return lambda start, count: data[start : start + count]


def payloads(data: bytes, entry: Entry) -> dict[str, bytes]:
    """The payloads of an entry; it has to give the same by its places and by its ranges."""
    by_place = {extension: data[start : start + size] for extension, start, size in entry.members}
    joined = memoryview(b"".join(data[start:stop] for start, stop in entry.ranges))
    assert by_place == entry.payloads(joined)
    return by_place


def grouped(members: list[Parsed], data: bytes) -> list[tuple[str, dict[str, bytes]]]:
    """The samples of members, with the payloads of links as an extraction so far would have them."""
    extracted: dict[str, bytes | None] = {}
    samples: list[tuple[str, dict[str, bytes]]] = []
    for name, start, size, kind, target, _ in members:
        content: bytes | None = data[start : start + size]
        if kind:
            folder = posixpath.dirname(name) if kind == SYMBOLIC_LINK else ""
            is_absolute = kind == SYMBOLIC_LINK and target.startswith("/")
            path = _path(posixpath.join(folder, target.lstrip("/")))
            content = None if kind == SPARSE or is_absolute else extracted.get(path)
        if (path := _path(name)) != "..":
            extracted[path] = content
        split = split_name(name)
        if split is None or content is None:
            continue
        if not samples or samples[-1][0] != split[0] or split[1] in samples[-1][1]:
            samples.append((split[0], {}))
        samples[-1][1][split[1]] = content
    return samples


def _path(name: str) -> str:
    """A name as a path from the top of a tar; `..`: it is outside."""
    path = posixpath.normpath("./" + name.lstrip("/"))
    return ".." if path.startswith("..") and path[2:3] in ("", "/") else path


def _check_oracle(data: bytes, ours: list[Any], failure: Failure | None) -> None:
    theirs, how = oracle(data)
    common = min(len(ours), len(theirs))
    assert ours[:common] == theirs[:common], f"the members {ours} are {theirs} to tarfile"
    if failure is None:
        assert how == "crash" or (how, len(ours)) == ("end", len(theirs)), (
            f"no error and {len(ours)} members; tarfile has {len(theirs)} and says {how}"
        )
    elif how == "end":
        assert len(ours) <= len(theirs), f"{ours} and then {failure}; tarfile ends with {theirs}"


def _check_scan(
    data: bytes, scanner: ShardScanner, chunk_bytes: int, expected: Scan, skip: bool = False
) -> None:
    start = scanner.position
    found = scan(data, scanner, chunk_bytes, skip)
    how = f"from byte {start} in chunks of {chunk_bytes}" + ", payloads gone over" * skip
    assert found.failure == expected.failure, f"{how}: {found.failure} instead of {expected.failure}"
    same = _is_same(found.entries, expected.entries, expected.failure)
    assert same, f"{how}: {found.entries} instead of {expected.entries}"


def _is_same(found: list[Any], expected: list[Any], failure: Failure | None) -> bool:
    """Whether all was found; a chunk with an error in it keeps back what is in front of that in it."""
    return found == (expected if failure is None else expected[: len(found)])


class Scan(NamedTuple):
    """What a scan gave: entries, then perhaps an error."""

    entries: list[Entry]
    failure: Failure | None


def scan(data: bytes, scanner: ShardScanner, chunk_bytes: int, skip: bool = False) -> Scan:
    """Scan from where the scanner stands; with `skip` payloads are gone over as index_local does."""
    entries: list[Entry] = []
    try:
        while scanner.position < len(data) and not (skip and scanner.ended):
            if skip:
                scanner.skip(min(scanner.skippable(), len(data) - scanner.position))
            entries += scanner.feed(data[scanner.position : scanner.position + chunk_bytes])
        entries += scanner.finish()[0]
    except ShardError as exc:
        return Scan(entries, (type(exc), str(exc)))
    return Scan(entries, None)


def members(data: bytes, cuts: Iterable[int]) -> tuple[list[Parsed], Failure | None]:
    """The members as the parser gives them for chunks that end at `cuts`."""
    parser = TarParser()
    found: list[Parsed] = []
    last = None
    try:
        for start, stop in itertools.pairwise((0, *cuts, len(data))):
            for member, payload in parser.feed(data[start:stop]):
                if member is last:
                    found[-1] = (*found[-1][:5], found[-1][5] + bytes(payload))
                else:
                    last = member
                    found.append((*member[:3], *member[4:], bytes(payload)))
        parser.finish()
    except ShardError as exc:
        return found, (type(exc), str(exc))
    return found, None


class LoudInfo(tarfile.TarInfo):
    """tarfile takes a header that it can't read for the end; the oracle has to say so.

    Fields that say nothing of names and sizes (mode, owner, time, device) are put right where tarfile can't
    read them: the parser doesn't look at them. Behind an extended header a slash at the end of a V7 member's
    own name means nothing, as in tarfile of 3.14: it may be in the middle of a long name.
    """

    _is_behind_extended = False

    @classmethod
    def for_one_tar(cls) -> type[LoudInfo]:
        """What one tar is to be read with: it remembers the kind of the last header."""
        return type("LoudInfo", (cls,), {})

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> LoudInfo:
        """What tarfile calls for each header, in Python's older releases."""
        return cls._read(super().frombuf, buf, encoding, errors)

    @classmethod
    def _frombuf(cls, buf: bytes, encoding: str, errors: str, *, dircheck: bool = True) -> LoudInfo:
        """What it calls in newer ones."""
        read = functools.partial(super()._frombuf, dircheck=dircheck)  # type: ignore[misc]
        return cls._read(read, buf, encoding, errors)

    @classmethod
    def _read(cls, read: Callable[..., Any], buf: bytes, encoding: str, errors: str) -> LoudInfo:
        if cls._is_behind_extended and buf[156:157] == tarfile.AREGTYPE and _is_sealed(buf):
            buf = seal(buf[:156] + tarfile.REGTYPE + buf[157:])
        cls._is_behind_extended = False
        try:
            found: LoudInfo = read(buf, encoding, errors)
        except tarfile.InvalidHeaderError as exc:
            last = bytes(137) + buf[482:483] + bytes(29) if buf[156:157] == b"S" else buf[345:]  # no map
            plain = buf[:100] + FIELDS + buf[124:136] + TIME + buf[148:329] + bytes(16) + last
            if plain != buf and _is_sealed(buf):
                return cls._read(read, seal(plain), encoding, errors)
            raise UnreadableHeader(str(exc)) from exc
        cls._is_behind_extended = found.type in _EXTENDED
        return found


def _unread_map(read: Callable[..., Any]) -> Callable[..., Any]:
    """Say that tarfile can't cope with the map of a sparse file; the parser doesn't read maps."""

    def with_any_map(*args: Any) -> Any:
        try:
            return read(*args)
        except tarfile.TarError as exc:
            raise ValueError from exc

    return with_any_map


for _name in ("_proc_sparse", "_proc_gnusparse_00", "_proc_gnusparse_01", "_proc_gnusparse_10"):
    setattr(LoudInfo, _name, _unread_map(getattr(LoudInfo, _name)))


def _is_sealed(block: bytes) -> bool:
    with contextlib.suppress(tarfile.InvalidHeaderError, struct.error):  # struct's: less than a block
        return tarfile.nti(block[148:156]) in tarfile.calc_chksums(block)
    return False


class UnreadableHeader(tarfile.TarError):
    """A header that tarfile can't read; not one of the errors that it takes for the end."""


def oracle(data: bytes) -> tuple[list[tuple[str, int, int, str, str]], str]:
    """Regular members and links, and "end", "error" (tarfile refuses what comes) or "crash" (can't cope)."""
    found: list[tuple[str, int, int, str, str]] = []
    try:
        with tarfile.TarFile(
            fileobj=io.BytesIO(data),
            tarinfo=LoudInfo.for_one_tar(),
            encoding="utf-8",
            errors="surrogateescape",
        ) as tar:
            while (info := tar.next()) is not None:
                if info.isreg() and not info.issparse():
                    found.append((info.name, info.offset_data, info.size, "", ""))
                elif info.islnk() or info.issym():
                    kind = HARD_LINK if info.islnk() else SYMBOLIC_LINK
                    found.append((info.name, info.offset_data, 0, kind, info.linkname))
                if info.issparse() and "size" in info.pax_headers:
                    return found, "crash"  # it takes the size of the file for that of its stored bytes
                has_payload = info.isreg() or info.type not in tarfile.SUPPORTED_TYPES
                end = info.offset_data + (info.size + -info.size % BLOCK if has_payload else 0)
                # 3.13 goes back where another header follows one with a pax size, at worst for ever
                if tar.offset < end or len(tar.members) > _MEMBERS_LIMIT:
                    return found, "crash"
    except tarfile.TarError:
        return found, "error"
    except (ValueError, RecursionError, IndexError, OverflowError, MemoryError, TypeError, AttributeError):
        return found, "crash"
    return found, "end"
