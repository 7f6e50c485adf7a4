"""Members → samples by the WebDataset convention (steps F and G): bytes in, entries of whole samples out.

The key of a member is its path up to the first dot of its base name; the rest, in lower case, is its
extension; neighbours with one key are one sample. Nothing is decoded here, and no sample is judged: which
ones a run can use is a matter of its keys (keys.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import xxhash

from streamload.errors import ShardFormatError
from streamload.shards.image_header import ImageLook
from streamload.shards.tar import BLOCK_BYTES, Member, TarParser

IMAGE_EXTENSIONS = frozenset(("jpg", "jpeg", "png", "webp", "gif"))
CAPTION_EXTENSION = "txt"
NAME_LIMIT_BYTES = 64 << 10
"""A member with a longer name is part of no sample: the index has each name, in memory and on disk."""
NAMES_LIMIT_BYTES = 16 << 20
"""What the names of one sample's members may take; some 100,000 members."""

_MEMBER_COST_BYTES = 128
_NOTE_DIGITS = 15


class Original(NamedTuple):
    """The image that was prepared, as its origin has it."""

    extension: str
    size: int
    """Its bytes."""
    width: int
    """Of the sample's first image, in pixels as stored; 0: unknown."""
    height: int

    def __str__(self) -> str:
        return f"{self.size} {self.width} {self.height} {self.extension}"

    @classmethod
    def parse(cls, note: str) -> Original:
        """What `str()` gave.

        Raises:
            ShardFormatError: it is something else.
        """
        *numbers, extension = note.split(" ", 3)
        is_number = [
            number.isascii() and number.isdigit() and len(number) <= _NOTE_DIGITS for number in numbers
        ]
        if len(numbers) != 3 or not all(is_number) or not extension:
            raise ShardFormatError(f"a note of an image that can't be read: {note[:40]!a}")
        size, width, height = map(int, numbers)
        return cls(extension, size, width, height)


class Entry(NamedTuple):
    """What the index knows of one sample: where its members are, and what is cheap to know early."""

    number: int
    """Its place in the shard, counted from 0."""
    key: str
    members: tuple[tuple[str, int, int], ...]
    """(extension, start, size) of each member as they come; starts count from the tar's first byte."""
    width: int
    """Of the first image member, in pixels as stored; 0: unknown."""
    height: int
    caption_bytes: int
    """Size of the `txt` member; 0: none."""
    checksum: int | None
    """xxh3_64 over the payloads in order; None where they were not read."""
    prepared: tuple[str, int] | None = None
    """Of a prepared shard: the extension of the image that stands for another (`members` has it under the
    name that its origin gave it), and how many bytes that one has."""

    @property
    def start(self) -> int:
        """Where the first payload begins in the tar."""
        return self.members[0][1]

    @property
    def stop(self) -> int:
        """Where the last payload ends in the tar."""
        _, start, size = self.members[-1]
        return start + size

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each member, by extension, as the shard's origin has them."""
        sizes = {extension: size for extension, _, size in self.members}
        if self.prepared is not None:
            extension, size = self.prepared
            sizes[extension] = size
        return sizes


def split_name(name: str) -> tuple[str, str] | None:
    """Key and extension of a member; None for one that is part of no sample.

    The rule is webdataset's `base_plus_ext` and `skip_meta`: the pattern `((?:.*/|)[^.]+)[.]([^/]*)`, and
    nothing below a `__…__` name at the top. Extensions in double underscores are passed over as well: they
    would replace a sample's own `__key__` or `__url__`.
    """
    base = name.rfind("/") + 1
    dot = name.find(".", base)
    if dot <= 0:
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
    """The pattern's corners, without its quadratic search.

    Before the dot it wants one or more characters without a dot, which may hold slashes (so `a/.jpg` has the
    key `a/`), and before those a folder without a line break.
    """
    line = name.find("\n", 0, dot - 1)
    start = name.rfind("/", 0, line if line >= 0 else dot - 1) + 1
    return name.find(".", start, dot) < 0


class ShardScanner:
    """Turns the bytes of one shard, in chunks of any size, into entries of whole samples.

    A sample is whole once a header with another key, one with an extension that it has already, or the end
    marker was read. A key that comes again later is a new sample.

    To take up a shard whose first entries are known and verified, start behind the last of them: its place
    and number are all that has to be known, since a sample's border is a member's border and global pax
    headers carry nothing that matters here (those which would are refused). `ShardScanner.after(entry)` does
    that; its first `feed` is given the bytes from `scanner.position` on.

    Not thread-safe. Costs about 25 µs a sample of three members (webdataset: 225 on the same machine), and
    what the checksum takes (7 to 20 µs for 100 KB); payloads are not copied.

    Args:
        position: where the first chunk lies in the tar: 0, or the `whole_stop` of an earlier scanner.
        number: of the first sample.
        checksums: False leaves them out, as for files whose payloads are skipped.
        prepared: heed what a prepared shard notes of its images: the entries are then those of the samples
            that it was made of, but for the places of their members.
    """

    def __init__(self, position: int = 0, number: int = 0, *, checksums: bool = True, prepared: bool = False):
        self.whole_stop = position
        """The border up to which all is covered by entries given out; a scanner can start here."""
        self._parser = TarParser(position)
        self._next_number = number
        self._checksums = checksums
        self._heeds_notes = prepared
        self._hash = xxhash.xxh3_64()
        self._update: Callable[[memoryview], None] = self._hash.update
        self._is_hashed = checksums
        self._key = ""
        self._members: dict[str, tuple[str, int, int]] = {}
        self._names_bytes = 0
        self._size = (0, 0)
        self._has_image = False
        self._image: ImageLook | None = None
        self._prepared: tuple[str, int] | None = None
        self._member: Member | None = None
        self._is_ours = False  # whether the current member belongs to the sample
        self._long_names = 0

    @classmethod
    def after(cls, entry: Entry | None, *, checksums: bool = True, prepared: bool = False) -> ShardScanner:
        """A scanner that goes on behind `entry`, the last of a verified prefix (None: from the start)."""
        if entry is None:
            return cls(checksums=checksums, prepared=prepared)
        return cls(border(entry), entry.number + 1, checksums=checksums, prepared=prepared)

    @property
    def position(self) -> int:
        """Bytes consumed, counted from the start of the tar; where the next chunk lies."""
        return self._parser.position

    @property
    def ended(self) -> bool:
        """Whether the end marker was read."""
        return self._parser.ended

    def feed(self, chunk: bytes | memoryview) -> list[Entry]:
        """Take the next bytes of the tar; gives the entries of the samples that they made whole.

        Raises:
            ShardFormatError: not a tar, damaged, or against a limit; says where.
        """
        entries: list[Entry] = []
        for member, payload in self._parser.feed(chunk):
            if member is not self._member:
                self._begin(member, entries)
            if self._is_ours:
                if self._is_hashed:
                    self._update(payload)
                if self._image is not None and self._image.look(payload):
                    self._size = self._image.size
                    self._image = None
        if self._parser.ended:
            self._give_out(entries)
        return entries

    @property
    def stop(self) -> int:
        """Where the end marker begins, or would have to."""
        return self._parser.stop

    @property
    def notes_at(self) -> list[int]:
        """Where notes of preparation stand in the bytes that came last; see TarParser."""
        return self._parser.notes_at

    @property
    def header_bytes(self) -> int:
        """How many of the bytes that came last are of a header of which more is to come."""
        return self._parser.header_bytes

    def skippable(self) -> int:
        """How many of the next bytes needn't be read, if no checksum is wanted of them."""
        return 0 if self._image is not None else self._parser.skippable

    def skip(self, count: int) -> None:
        """Go over bytes that were not read; the current sample has no checksum then."""
        self._is_hashed = False
        self._parser.skip(count)

    def finish(self) -> tuple[list[Entry], list[str]]:
        """Say that the origin has no more bytes.

        A tar without its end marker that ends between two members may be whole or cut there, which its bytes
        can't tell: call this only when the length is the origin's, or its command ended well.

        Returns:
            The entry of the last sample if it wasn't given out before, and warnings about the tar.

        Raises:
            ShardCut: the tar ends within a member or a header.
            ShardFormatError: there was nothing, or too little for one header.
        """
        self._parser.finish()
        entries: list[Entry] = []
        warnings: list[str] = []
        if not self._parser.ended:
            self._give_out(entries)
            warnings.append(f"no end marker: the tar ends with a member at byte {self.position}")
        elif self._parser.trailing:
            warnings.append("data behind the end marker was not read; was one tar appended to another?")
        if self._long_names:
            what = f"their names have more than {NAME_LIMIT_BYTES:,} bytes"
            warnings.append(f"{self._long_names} members are left out: {what}")
        return entries, warnings

    def _begin(self, member: Member, entries: list[Entry]) -> None:
        """Start on a member; gives out the sample before it if this one isn't part of it."""
        self._member = member
        self._image = None
        is_long = 4 * len(member.name) > NAME_LIMIT_BYTES and _is_too_long(member.name)
        self._long_names += is_long
        names = None if is_long else split_name(member.name)
        self._is_ours = names is not None
        if names is None:
            return
        key, extension = names
        original = Original.parse(member.note) if self._heeds_notes and member.note else None
        if original is not None:
            extension = original.extension
        if key != self._key or extension in self._members or not self._members:
            self._give_out(entries)
            self._key = key
            self._names_bytes = len(key)
        self._members[extension] = (extension, member.start, member.size)
        self._names_bytes += len(extension) + _MEMBER_COST_BYTES
        if self._names_bytes > NAMES_LIMIT_BYTES:
            raise ShardFormatError(
                f"the sample {key[:100]!a} has {len(self._members)} members at byte {member.start}; "
                f"their names may take {NAMES_LIMIT_BYTES} bytes"
            )
        if original is not None:
            self._prepared = (extension, original.size)
        if extension in IMAGE_EXTENSIONS and not self._has_image:
            self._has_image = True
            if original is not None:
                self._size = (original.width, original.height)
            else:
                self._image = ImageLook(member.size)

    def _give_out(self, entries: list[Entry]) -> None:
        """Give out the current sample and make room for the next."""
        if not self._members:
            return
        caption = self._members.get(CAPTION_EXTENSION)
        entry = Entry(
            self._next_number,
            self._key,
            tuple(self._members.values()),
            self._size[0],
            self._size[1],
            caption[2] if caption is not None else 0,
            self._hash.intdigest() if self._is_hashed else None,
            self._prepared,
        )
        entries.append(entry)
        self.whole_stop = border(entry)
        self._next_number += 1
        self._members = {}
        self._size = (0, 0)
        self._has_image = False
        self._prepared = None
        self._hash.reset()
        self._is_hashed = self._checksums


def _is_too_long(name: str) -> bool:
    return len(name.encode("utf-8", "surrogateescape")) > NAME_LIMIT_BYTES


def border(entry: Entry) -> int:
    """Where the block behind an entry's last payload begins."""
    return entry.stop + -entry.stop % BLOCK_BYTES
