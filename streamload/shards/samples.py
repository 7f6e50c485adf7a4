"""Tar members → samples by the WebDataset convention (steps F and G): bytes in, index entries out.

The key of a member is its path up to the first dot of its base name; the rest, in lower case, is its
extension; adjacent members with the same key are one sample. Nothing is decoded; keys.py decides which
samples a run can use.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from struct import unpack_from
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from streamload.errors import ShardCut, ShardFormatError
from streamload.shards.tar import BLOCK_BYTES, MEMBERS_LIMIT, Member, Payload, TarParser, normal_path

if TYPE_CHECKING:
    from streamload.shards.links import Links
    from streamload.shards.originals import Original

IMAGE_EXTENSIONS = frozenset(("jpg", "jpeg", "png", "webp", "gif"))
CAPTION_EXTENSION = "txt"
JOINED = "joined"
"""The extension of a sample's row in another file (streamload/join), an object in JSON."""
NAME_LIMIT_BYTES = 64 << 10
"""A member with a longer name is left out: the index keeps every name, in memory and on disk."""
NAMES_LIMIT_BYTES = 16 << 20
"""Limit for the names of one sample's members; some 100,000 members."""

_MEMBER_COST_BYTES = 128
_PIECE_BYTES = 1 << 20
_SEEN_LIMIT = 3 * MEMBERS_LIMIT

ReadBack = Callable[[int, int], bytes]
"""Reads earlier bytes of the tar: takes an offset and the most bytes to return."""

HEADER_BYTES = 64 << 10
"""Number of bytes of an image that are searched; if its size isn't in these, it is unknown."""

_FIRST_LOOK_BYTES = 1 << 10
_WITHOUT_LENGTH = frozenset((0x01, *range(0xD0, 0xD9)))  # TEM, RST0-7, SOI
_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # all start-of-frame markers


def image_size(header: bytes | memoryview) -> tuple[int, int] | None:
    """Return (width, height) of the image that begins with `header`, in pixels as stored.

    None if they aren't in these bytes, or the format is another one.
    """
    start = bytes(header[:30])
    if start[:2] == b"\xff\xd8":
        size = _jpeg_size(header)
    elif start[:8] == b"\x89PNG\r\n\x1a\n" and start[12:16] == b"IHDR" and len(start) >= 24:
        size = unpack_from(">II", start, 16)
    elif start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        size = _webp_size(start)
    elif start[:6] in (b"GIF87a", b"GIF89a") and len(start) >= 10:
        size = unpack_from("<HH", start, 6)
    else:
        size = None
    return size if size is not None and size[0] > 0 and size[1] > 0 else None


class ImageLook:
    """Collects the first bytes of one image until its size is known."""

    def __init__(self, member_bytes: int):
        self.size = (0, 0)
        self._wanted = min(member_bytes, HEADER_BYTES)
        self._next_look = _FIRST_LOOK_BYTES
        self._start = bytearray()

    def look(self, payload: memoryview) -> bool:
        """Take the next bytes. Return True once the size is known, or will never be."""
        if not self._start and (size := image_size(payload[:HEADER_BYTES])) is not None:
            self.size = size
            return True
        self._start += payload[: self._wanted - len(self._start)]
        at_end = len(self._start) == self._wanted
        if at_end or len(self._start) >= self._next_look:
            # Look again after twice as many bytes: linear time for chunks of any size.
            self._next_look = 2 * len(self._start)
            if (size := image_size(memoryview(self._start))) is not None:
                self.size = size
                return True
        return at_end


def _jpeg_size(header: bytes | memoryview) -> tuple[int, int] | None:
    """Skip the segments (EXIF, ICC profiles, …) up to the start of the frame."""
    offset, stop = 2, min(len(header), HEADER_BYTES)
    while offset + 9 <= stop:
        if header[offset] != 0xFF:
            return None
        marker = header[offset + 1]
        if marker == 0xFF:  # fill byte
            offset += 1
        elif marker in _WITHOUT_LENGTH:
            offset += 2
        elif marker in _FRAME:
            height, width = unpack_from(">HH", header, offset + 5)
            return width, height
        elif marker in (0xD9, 0xDA):  # the end, or a scan without a frame
            return None
        else:
            offset += 2 + max(2, header[offset + 2] << 8 | header[offset + 3])
    return None


def _webp_size(start: bytes) -> tuple[int, int] | None:
    """Read the first chunk: lossy, lossless or extended."""
    chunk = start[12:16]
    if chunk == b"VP8L" and len(start) >= 25 and start[20] == 0x2F:
        bits = unpack_from("<I", start, 21)[0]
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if len(start) < 30:
        return None
    if chunk == b"VP8 " and start[23:26] == b"\x9d\x01\x2a":
        width, height = unpack_from("<HH", start, 26)
        return width & 0x3FFF, height & 0x3FFF
    if chunk == b"VP8X":
        return int.from_bytes(start[24:27], "little") + 1, int.from_bytes(start[27:30], "little") + 1
    return None


def is_image(extension: str) -> bool:
    """Return whether a member with this extension is an image, such as `jpg` or `0.jpg`."""
    return extension.rpartition(".")[2] in IMAGE_EXTENSIONS


class Entry(NamedTuple):
    """The index entry of one sample: where its members are, and facts that are cheap to get early.

    Attributes:
        number: of the sample in the shard, from 0.
        members: (extension, start, size) of each member in order; `start` counts from the tar's first byte.
            The payload of a link is that of an earlier member of the tar.
        width, height: of the first image without a prefix (`jpg`), else of the first; 0: unknown.
        caption_bytes: size of the `txt` member; 0: none.
        checksum: xxh3_64 of the payloads in order; None if they were not read.
        prepared: in a prepared shard, extension and size of the original of the prepared image (`members` has
            it under the original's extension).
        facts: the values of the run's columns, by name, where `keep` gets the entry; NaN: unknown.
        span: of a sample with links: the range in the tar that has its headers and its own payloads.
        has_unsupported: whether members are left out: links without a payload in the tar, or sparse files.
        image_sizes: of all image members in order, where there are several; see `images`.
    """

    number: int
    key: str
    members: tuple[tuple[str, int, int], ...]
    width: int
    height: int
    caption_bytes: int
    checksum: int | None
    prepared: tuple[str, int] | None = None
    facts: Mapping[str, float] = {}
    span: tuple[int, int] | None = None
    has_unsupported: bool = False
    image_sizes: tuple[tuple[int, int], ...] = ()

    @property
    def extent(self) -> tuple[int, int]:
        """Start of the first payload in the tar and end of the last one, payloads of links aside."""
        if self.span is not None:
            return self.span
        _, last_start, last_size = self.members[-1]
        return self.members[0][1], last_start + last_size

    @property
    def start(self) -> int:
        """Offset of the first payload in the tar, payloads of links aside."""
        return self.extent[0]

    @property
    def stop(self) -> int:
        """End of the last payload in the tar, payloads of links aside."""
        return self.extent[1]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The parts of the tar to read, as (start, stop): its own, then the payloads of links."""
        return [self.extent, *self.linked]

    @property
    def linked(self) -> list[tuple[int, int]]:
        """The (start, stop) of links' payloads that lie before `start`."""
        if self.span is None:
            return []
        return [(start, start + size) for _, start, size in self.members if start < self.span[0] and size]

    def payloads(self, data: memoryview) -> dict[str, memoryview]:
        """Return the members' bytes by extension.

        Args:
            data: the bytes of `ranges`, one after the other.
        """
        begin, end = self.extent
        payloads, linked = {}, end - begin
        for extension, start, size in self.members:
            place = start - begin if start >= begin else linked
            linked += size if start < begin else 0
            payloads[extension] = data[place : place + size]
        return payloads

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each member, by extension, as in the original shard."""
        sizes = {extension: size for extension, _, size in self.members}
        if self.prepared is not None:
            extension, size = self.prepared
            sizes[extension] = size
        return sizes

    @property
    def images(self) -> dict[str, tuple[int, int]]:
        """(width, height) of each image in order, as stored in the original, not turned; (0, 0): unknown."""
        names = [extension for extension, _, _ in self.members if is_image(extension)]
        return dict(zip(names, self.image_sizes or [(self.width, self.height)], strict=False))


class Sample(NamedTuple):
    """The bytes of a sample's members by extension, as stored in the shard."""

    key: str
    url: str
    members: Mapping[str, memoryview]
    prepared: str = ""
    """The extension of the prepared image; empty: there is none."""
    checksum: int | None = None
    """xxh3_64 of the payloads in order; None: it isn't in the index."""
    shard: int = -1
    """Its shard's place in the list of the run; -1: it is in none."""
    number: int = -1
    """Its own in the shard, as in the index; -1: unknown."""


def split_name(name: str) -> tuple[str, str] | None:
    """Return key and extension of a member; None if it belongs to no sample.

    The rule is webdataset's `base_plus_ext` and `skip_meta`: the pattern `((?:.*/|)[^.]+)[.]([^/]*)`, and
    nothing in a top-level `__…__` folder. Extensions in double underscores are left out as well: they would
    replace a sample's own `__key__` or `__url__`. So are the `._name` files in which macOS keeps attributes:
    in a folder they would tear the sample beside them apart.
    """
    base = name.rfind("/") + 1
    dot = name.find(".", base)
    if dot <= 0 or name.startswith("._", base):
        return None
    if (dot == base or "\n" in name) and not _pattern_fits(name, dot):
        return None
    if name.startswith("__"):
        top = name.partition("/")[0]
        if len(top) >= 4 and top.endswith("__"):
            return None
    extension = name[dot + 1 :].lower()
    if extension.startswith("__") and extension.endswith("__"):
        return None
    return name[:dot], extension


def _pattern_fits(name: str, dot: int) -> bool:
    """Handle the corner cases of the pattern in linear time.

    Before the dot the pattern needs one or more characters without a dot, which may be slashes (so `a/.jpg`
    has the key `a/`), and before these a folder without a line break.
    """
    line = name.find("\n", 0, dot - 1)
    start = name.rfind("/", 0, line if line >= 0 else dot - 1) + 1
    return name.find(".", start, dot) < 0


class ShardScanner:
    """Turns the bytes of one shard, in chunks of any size, into entries of complete samples.

    A sample is complete once a header with another key, a header with an extension that it already has, or
    the end marker was read. If a key comes again later, it is a new sample.

    To resume a shard after verified entries, only position and number of the last one are needed: the
    border of a sample is the border of a member, and global pax headers that would matter are refused. Use
    `ShardScanner.after(entry)` and feed the bytes from `scanner.position` on.

    Not thread-safe. Costs about 25 µs for a sample of three members (webdataset: 225 on the same machine),
    and the checksum (7 to 20 µs for 100 KB); payloads are not copied.

    Args:
        position: of the first chunk in the tar: 0, or the `whole_stop` of an earlier scanner.
        number: of the first sample.
        checksums: False leaves them out, as for files whose payloads are skipped.
        prepared: use the records of original images in a prepared shard: the entries are then those of the
            original samples, except for the positions of their members.
        read_back: reads the payloads of links again; None: samples with links get no checksum, and no size of
            a linked image. From another position than 0 on, it is asked for the headers before, too.
    """

    def __init__(
        self,
        position: int = 0,
        number: int = 0,
        *,
        checksums: bool = True,
        prepared: bool = False,
        read_back: ReadBack | None = None,
    ):
        self.whole_stop = position
        """The border after the last entry returned; another scanner can start here."""
        self._parser = TarParser(position)
        self._next_number = number
        self._checksums = checksums
        self._parse_note: Callable[[str], Original] | None = None
        if prepared:
            from streamload.shards.originals import Original

            self._parse_note = Original.parse
        self._hash = xxhash.xxh3_64()
        self._update: Callable[[memoryview], None] = self._hash.update
        self._is_hashed = checksums
        self._key = ""
        self._members: dict[str, tuple[str, int, int]] = {}
        self._names_bytes = 0
        self._image_sizes: dict[str, tuple[int, int]] = {}
        self._image: ImageLook | None = None  # at the image member that began last
        self._prepared: tuple[str, int] | None = None
        self._member: Member | None = None
        self._is_ours = False  # whether the current member belongs to a sample
        self._long_names = 0
        self._seen = array("q")
        self._links: Links | None = None
        self._read_back = read_back
        self._start = self._stop = 0  # of the sample: its first payload or link, the end of its last
        self._has_links = self._has_unsupported = False
        self._left_out_key = ""  # of the latest member that is left out
        if position and read_back is not None:
            from streamload.shards.links import members_before

            for member in members_before(position, read_back):
                self._place(member)

    @classmethod
    def after(
        cls, entry: Entry | None, *, prepared: bool = False, read_back: ReadBack | None = None
    ) -> ShardScanner:
        """Return a scanner that resumes after `entry`, the last verified one (None: from the start)."""
        position, number = (0, 0) if entry is None else (border(entry), entry.number + 1)
        return cls(position, number, prepared=prepared, read_back=read_back)

    @property
    def position(self) -> int:
        """Bytes consumed from the start of the tar; the position of the next chunk."""
        return self._parser.position

    @property
    def ended(self) -> bool:
        """True if the end marker was read."""
        return self._parser.ended

    def feed(self, chunk: bytes | memoryview) -> list[Entry]:
        """Take the next bytes of the tar. Return the entries of the samples that they complete.

        Raises:
            ShardFormatError: not a tar, damaged, or over a limit; says where.
        """
        entries: list[Entry] = []
        for member, payload in self._parser.feed(chunk):
            if member is not self._member:
                self._begin(member, entries)
            if self._is_ours:
                if self._is_hashed:
                    self._update(payload)
                if self._image is not None and self._image.look(payload):
                    self._know_size(self._image.size)
        if self._parser.ended:
            self._give_out(entries)
        return entries

    @property
    def stop(self) -> int:
        """Offset at which the end marker begins, or would begin."""
        return self._parser.stop

    @property
    def notes_at(self) -> list[int]:
        """Positions of `NOTE` keywords in the latest chunk; see TarParser."""
        return self._parser.notes_at

    @property
    def header_bytes(self) -> int:
        """Number of the latest bytes that belong to an incomplete header."""
        return self._parser.header_bytes

    def skippable(self) -> int:
        """Return how many of the next bytes needn't be read if no checksum is wanted."""
        return 0 if self._image is not None else self._parser.skippable

    def skip(self, count: int) -> None:
        """Skip unread bytes. The current sample gets no checksum."""
        self._is_hashed = False
        self._parser.skip(count)

    def finish(self) -> tuple[list[Entry], list[str]]:
        """Declare the end of the bytes.

        A tar without end marker that ends between two members may be complete or cut; its bytes can't tell.
        So call this only if the length is confirmed by the origin, or its command succeeded.

        Returns:
            The entry of the last sample if it wasn't returned before, and warnings about the tar.

        Raises:
            ShardCut: the tar ends within a member or a header.
            ShardFormatError: there were no bytes, or too few for one header.
        """
        self._parser.finish()
        entries: list[Entry] = []
        warnings: list[str] = []
        if not self._parser.ended:
            self._give_out(entries)
            warnings.append(f"no end marker: the tar ends with a member at byte {self.position}")
        elif self._parser.trailing:
            warnings.append("data after the end marker was not read; was one tar appended to another?")
        if self._long_names:
            cause = f"their names have more than {NAME_LIMIT_BYTES:,} bytes"
            warnings.append(f"{self._long_names} members are left out: {cause}")
        if self._links is not None and (left_out := self._links.left_out()):
            warnings.append(
                f"members are left out, and their samples lack them: {left_out}; write the tar with "
                f"--hard-dereference --dereference, and without --sparse"
            )
        return entries, warnings

    def _place(self, member: Member) -> Payload | Member | None:
        """Note the next member. Return where its payload is; None: it is left out."""
        if self._links is None:
            from streamload.shards.links import Links

            self._links = Links(self._seen)
        if member.kind:
            return self._links.resolve(member)
        name = member.name
        if member.note and self._parse_note is not None and (names := split_name(name)) is not None:
            name = f"{names[0]}.{self._parse_note(member.note).extension}"  # links have the original's name
        self._links.add(name, member.start, member.size, member.note)
        return member

    def _begin(self, member: Member, entries: list[Entry]) -> None:
        """Begin a member. Complete the sample before it if the member doesn't belong to it."""
        self._member = member
        self._image = None
        place: Payload | Member | None = member
        if member.kind or member.note:
            place = self._place(member)
        elif len(self._seen) < _SEEN_LIMIT:
            path = normal_path(member.name) if "/" in member.name else member.name
            self._seen.extend((hash(path), member.start, member.size))
        is_long = 4 * len(member.name) > NAME_LIMIT_BYTES and _is_too_long(member.name)
        self._long_names += is_long
        names = None if is_long else split_name(member.name)
        self._is_ours = names is not None
        if names is None:
            return
        key, extension = names
        if place is None:
            self._is_ours = False
            self._left_out_key = key
            self._has_unsupported = self._has_unsupported or (bool(self._members) and key == self._key)
            return
        self._is_ours = not member.kind
        original = self._parse_note(place.note) if self._parse_note is not None and place.note else None
        if original is not None and not member.kind:
            extension = original.extension
        if key != self._key or extension in self._members or not self._members:
            self._give_out(entries)
            self._key = key
            self._names_bytes = len(key)
            self._start = member.start
            self._has_unsupported = key == self._left_out_key
        self._left_out_key = ""
        self._stop = member.start + member.size
        self._has_links = self._has_links or bool(member.kind)
        self._members[extension] = (extension, place.start, place.size)
        self._names_bytes += len(extension) + _MEMBER_COST_BYTES
        if self._names_bytes > NAMES_LIMIT_BYTES:
            raise ShardFormatError(
                f"the sample {key[:100]!a} has {len(self._members)} members at byte {member.start}; "
                f"their names may take {NAMES_LIMIT_BYTES} bytes"
            )
        if original is not None:
            if self._prepared is not None:
                raise ShardFormatError(
                    f"the sample {key[:100]!a} has two prepared images; use the original shard"
                )
            self._prepared = (extension, original.size)
        if is_image(extension):
            self._image_sizes[extension] = (original.width, original.height) if original else (0, 0)
            self._image = None if original else ImageLook(place.size)
        if member.kind:
            self._read_link(place)

    def _read_link(self, place: Payload | Member) -> None:
        """Take the payload of a link into checksum and size of the image."""
        if self._read_back is None:
            self._is_hashed, self._image = False, None
        start = place.start
        stop = start + (place.size if self._is_hashed else min(place.size, HEADER_BYTES))
        while start < stop and (self._is_hashed or self._image is not None):
            assert self._read_back is not None
            piece = memoryview(self._read_back(start, min(_PIECE_BYTES, stop - start)))
            if not piece:
                raise ShardCut(f"the tar can't be read again at byte {start}, where a link's payload is")
            start += len(piece)
            if self._is_hashed:
                self._update(piece)
            if self._image is not None and self._image.look(piece):
                self._know_size(self._image.size)
        self._image = None

    def _know_size(self, size: tuple[int, int]) -> None:
        """Note the size of the image member that began last."""
        self._image_sizes[next(reversed(self._image_sizes))] = size
        self._image = None

    def _give_out(self, entries: list[Entry]) -> None:
        """Append the entry of the current sample, and reset for the next."""
        if not self._members:
            return
        caption = self._members.get(CAPTION_EXTENSION)
        sizes = self._image_sizes
        first = min(sizes, key=lambda name: "." in name) if len(sizes) > 1 else next(iter(sizes), "")
        width, height = sizes.get(first, (0, 0))
        entry = Entry(
            self._next_number,
            self._key,
            tuple(self._members.values()),
            width,
            height,
            caption[2] if caption is not None else 0,
            self._hash.intdigest() if self._is_hashed else None,
            self._prepared,
            {},
            (self._start, self._stop) if self._has_links else None,
            self._has_unsupported,
            tuple(sizes.values()) if len(sizes) > 1 else (),
        )
        entries.append(entry)
        self.whole_stop = border(entry)
        self._next_number += 1
        self._members = {}
        self._image_sizes = {}
        self._has_links = False
        self._prepared = None
        self._hash.reset()
        self._is_hashed = self._checksums


def _is_too_long(name: str) -> bool:
    return len(name.encode("utf-8", "surrogateescape")) > NAME_LIMIT_BYTES


def border(entry: Entry) -> int:
    """Return where the block after an entry's last payload begins."""
    return entry.stop + -entry.stop % BLOCK_BYTES
