"""What a prepared shard notes of an image that stands for another, as a pax record of its member (F).

So the index that is made of a prepared shard has the samples of the shard that it was made of: their
extensions, their sizes, the width and height of their images. By these a run chooses its samples, whichever
of the two shards it finds.
"""

from __future__ import annotations

from typing import NamedTuple

from streamload.errors import ShardFormatError

_DIGITS = 15


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
        is_number = [number.isascii() and number.isdigit() and len(number) <= _DIGITS for number in numbers]
        if len(numbers) != 3 or not all(is_number) or not extension:
            raise ShardFormatError(f"a note of an image that can't be read: {note[:40]!a}")
        size, width, height = map(int, numbers)
        return cls(extension, size, width, height)
