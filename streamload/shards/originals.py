"""The record that a prepared image has of its original, in a prepared shard (derived/prepare makes these)."""

from __future__ import annotations

from typing import NamedTuple

from streamload.errors import ShardFormatError

_NOTE_DIGITS = 15


class Original(NamedTuple):
    """The original of a prepared image, kept in a pax record of its member in the prepared shard.

    So the index of a prepared shard has the extensions and sizes of the original samples, and a run selects
    the same samples from either shard.

    Attributes:
        size: in bytes.
        width, height: in pixels as stored; 0: unknown.
    """

    extension: str
    size: int
    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.size} {self.width} {self.height} {self.extension}"

    @classmethod
    def parse(cls, note: str) -> Original:
        """Parse the output of `str()`.

        Raises:
            ShardFormatError: it is malformed.
        """
        *numbers, extension = note.split(" ", 3)
        is_number = [
            number.isascii() and number.isdigit() and len(number) <= _NOTE_DIGITS for number in numbers
        ]
        if len(numbers) != 3 or not all(is_number) or not extension:
            raise ShardFormatError(f"an invalid record of an original image: {note[:40]!a}")
        size, width, height = map(int, numbers)
        return cls(extension, size, width, height)
