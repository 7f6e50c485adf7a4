"""Which samples a run can use (steps C and G): key specifications such as `jpg;png` and `txt;json:caption`.

Decided by the extensions in the index, without reading payloads. Whether a JSON member has the requested
field is only found out when it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from streamload.errors import OptionError
from streamload.shards.index import IndexReader
from streamload.shards.record import OWN_LAYOUT

Modality = Literal["image-text", "image", "text"]
"""Members that are used of a source's samples."""

MEMBER_LIMIT_BYTES = 64 << 20
"""The largest image or caption that is read; a sample with a larger one counts as lacking it."""


@dataclass(frozen=True, slots=True)
class KeySpec:
    """Extensions in order of preference, with the field for JSON members."""

    choices: tuple[tuple[str, str | None], ...]
    """(extension, field); field None: the whole member."""

    @classmethod
    def parse(cls, text: str) -> KeySpec:
        """Parse `ext;ext;…`, each `ext` or `ext:field`.

        Raises:
            OptionError: an empty choice, or a field of an extension other than JSON.
        """
        choices = []
        for choice in text.split(";"):
            extension, colon, field = choice.strip().partition(":")
            extension = extension.strip().lower().removeprefix(".")
            field = field.strip()
            is_json = extension.rpartition(".")[2] in ("json", "jsn")
            if not extension or (colon and not (field and is_json)):
                raise OptionError(
                    f"{text!r} is not a key: {choice!r} should be an extension, or json:<field>; "
                    'for example "jpg;png;webp" or "txt;json:caption"'
                )
            choices.append((extension, field or None))
        return cls(tuple(choices))

    @property
    def extensions(self) -> tuple[str, ...]:
        """The extensions in order of preference."""
        return tuple(extension for extension, _ in self.choices)

    def choose(self, extensions: Collection[str]) -> tuple[str, str | None] | None:
        """Return the first (extension, field) that is among these extensions, or None."""
        for choice in self.choices:
            if choice[0] in extensions:
                return choice
        return None


def usable(reader: IndexReader, keys: Sequence[KeySpec], start: int = 0) -> npt.NDArray[np.bool_]:
    """Return which entries, from number `start` on, have the members that a run needs.

    None of these members may be larger than MEMBER_LIMIT_BYTES.

    Args:
        reader: an index, finished or not.
        keys: of image, text and label: a sample needs a member for each.
        start: number of the first entry.

    Returns:
        bool[count - start].
    """
    layouts = reader.records["layout"][start:]
    if not keys:
        return np.ones(len(layouts), dtype=np.bool_)

    def serves(extensions: Collection[str]) -> bool:
        return all(spec.choose(extensions) is not None for spec in keys)

    shared = reader.layouts()
    table = np.zeros(max(shared, default=-1) + 2, dtype=np.bool_)
    for layout, extensions in shared.items():
        table[layout] = serves(extensions)
    have_own_layout = layouts == OWN_LAYOUT
    mask: npt.NDArray[np.bool_] = table[np.where(have_own_layout, len(table) - 1, layouts)]
    for place in np.flatnonzero(have_own_layout):
        mask[place] = serves(reader.entry(start + int(place)).sizes)
    spans = reader.records["stop"][start:] - reader.records["start"][start:]
    for place in np.flatnonzero(mask & (spans > MEMBER_LIMIT_BYTES)):
        sizes = reader.entry(start + int(place)).sizes
        mask[place] = all(sizes[extension] <= MEMBER_LIMIT_BYTES for extension in chosen(sizes, keys))
    return mask


def chosen(extensions: Collection[str], keys: Sequence[KeySpec]) -> set[str]:
    """Return the extensions of a sample that the keys choose."""
    choices = [spec.choose(extensions) for spec in keys]
    return {choice[0] for choice in choices if choice is not None}
