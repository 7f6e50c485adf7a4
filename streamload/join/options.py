"""`Shards(join=…)`: which file has columns for the samples, and what finds a sample's row in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from streamload.cache.selection import KeySpec
from streamload.errors import OptionError
from streamload.shards.samples import JOINED
from streamload.urls import basename, is_local, local_path, redact

FORMATS = (".parquet", ".npz", ".csv", ".jsonl")
_BY_KEY = "key"
_KEY_COLUMNS = ("key", "__key__", "sample_key")


@dataclass(frozen=True, slots=True, repr=False)
class Join:
    """A file of captions, labels or scores that were computed after the shards were written.

    Args:
        file: a .parquet (needs `streamload[parquet]`), .npz, .csv or .jsonl file: a path, or a URL of http(s)
            or fsspec.
        on: what a sample and its row have in common. "key": the sample's key, in the file's column `key`,
            `__key__` or `sample_key`; "json:uid": the field `uid` of its JSON member, in the column `uid`.
        columns: those that are used, beside that of the keys; None: all.

    Raises:
        OptionError: a value that can't be used.
    """

    file: str | os.PathLike[str]
    on: str = _BY_KEY
    columns: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.file, str | os.PathLike) or self.suffix not in FORMATS:
            raise OptionError(
                f"{self!r:.200}; expected a path or URL that ends in one of {', '.join(FORMATS)}"
            )
        if self.on != _BY_KEY and not (isinstance(self.on, str) and self._is_field()):
            raise OptionError(f'on={self.on!r}; expected "key", or "json:<field>"')
        names = self.columns
        if names is not None:
            if isinstance(names, str) or not names or not all(isinstance(name, str) for name in names):
                raise OptionError(f"columns={names!r:.100}; expected a list of column names, or None for all")
            object.__setattr__(self, "columns", tuple(names))

    def __repr__(self) -> str:
        return f"join={redact(str(self.file))!r}"

    @classmethod
    def of(cls, option: Join | str | os.PathLike[str]) -> Join:
        """The join of `Shards(join=…)`."""
        return option if isinstance(option, Join) else cls(option)

    def _is_field(self) -> bool:
        choices = KeySpec.parse(self.on).choices
        return len(choices) == 1 and choices[0][0] != JOINED and choices[0][1] is not None

    @property
    def url(self) -> str:
        """The file as a URL or path."""
        text = os.fspath(self.file)
        return str(local_path(text).absolute()) if is_local(text) else text

    @property
    def suffix(self) -> str:
        """The end of the file's name, which says its format."""
        return Path(basename(str(self.file))).suffix.lower()

    @property
    def member(self) -> tuple[str, str | None]:
        """The JSON member, and its field, by which a row is found; ("", None): by the sample's key."""
        return ("", None) if self.on == _BY_KEY else KeySpec.parse(self.on).choices[0]

    @property
    def key_columns(self) -> tuple[str, ...]:
        """The names that the column of keys may have."""
        return _KEY_COLUMNS if self.member[1] is None else (self.member[1],)
