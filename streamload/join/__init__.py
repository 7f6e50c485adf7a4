"""Columns of another file for samples, `Shards(join=…)`: an extension (streamload/extension/).

A sample's row is a further member of it, `joined`, so `text_key="joined:caption"` is what `json:caption` is.
`options.py` says which file, `rows.py` reads it, `index.py` writes and maps it by key, `table.py` keeps that.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamload.cache.selection import KeySpec
from streamload.errors import OptionError, SampleError
from streamload.extension import Extension
from streamload.join.options import Join
from streamload.join.table import JoinTable, open_table
from streamload.order.steps import Split
from streamload.shards.columns import Column, Fact, FactSample, Values
from streamload.shards.facts import column_digest
from streamload.shards.samples import JOINED, Entry

if TYPE_CHECKING:
    from streamload.extension import BatchAssembly, LoaderOptions

__all__ = ["JoinedColumn", "JoinedRows", "joined_rows"]


def _has_row(sample: dict[str, Any]) -> bool:
    return JOINED in sample


@dataclass(frozen=True)
class JoinedRows(Extension):
    """The extension of a loader whose samples have rows of another file; those without one are left out.

    Attributes:
        table: has the rows.
        keys: of caption and label, as far as they read rows. A sample without a row is used if each has
            another choice, which the sample has.
        is_strict: raise for a sample that would be left out.
    """

    table: JoinTable
    keys: tuple[KeySpec, ...]
    is_strict: bool

    name = "join"

    @property
    def choice(self) -> str:
        """All that decides which samples have rows."""
        return f"{self.table.join.on} {self.table.keys}"

    @property
    def reads(self) -> tuple[KeySpec, ...]:
        """The members of samples by which rows are found."""
        member = self.table.join.member
        return (KeySpec((member,), is_optional=True),) if member[1] else ()

    def column(self, column: Column) -> JoinedColumn:
        """A fact that is made of samples with their rows."""
        definition = ["join", self.table.join.on, self.table.version, column.digest]
        digest, same = column_digest(definition), (column.dtype, column.from_members, column.check_name)
        return JoinedColumn(column, self.table, digest, *same)

    @property
    def own_facts(self) -> Mapping[str, Fact]:
        """Whether a sample has a row, if that takes a look at its JSON member."""
        return {JOINED: (_has_row, "row of join=")} if self.table.join.member[1] else {}

    def refuse_unusable(self, options: LoaderOptions) -> None:
        """Refuse images that would be in rows, and sources of images or texts alone."""
        if options.has_modalities:
            raise OptionError("join= is for samples with an image and a text: leave modality= out")
        if options.shards.image_key and JOINED in KeySpec.parse(options.shards.image_key).extensions:
            raise OptionError(f"image_key={options.shards.image_key!r}: an image can't be in a joined row")

    def assembly(self, assembly: BatchAssembly, options: LoaderOptions, split: Split | None) -> BatchAssembly:
        """Batches of samples with their rows."""
        return replace(assembly, add_members=self.table.add)

    def keep(self, entry: Entry) -> bool:
        """True if a sample has a row, or does without.

        Raises:
            SampleError: it hasn't, with on_error="raise".
        """
        if JOINED in entry.facts:
            has_row = entry.facts[JOINED] == 1
        else:
            has_row = self.table.row(entry.key, {}) is not None
        if has_row or (self.keys and all(key.choose(entry.sizes) for key in self.keys)):
            return True
        if self.is_strict:
            raise SampleError(f"the sample {entry.key!r} has no row in {self.table.join!r}")
        return False


def joined_rows(
    option: Join | str | os.PathLike[str],
    cache_dir: Path,
    storage_options: Mapping[str, Any] | None,
    keys: Iterable[str | None],
    *,
    is_strict: bool,
) -> JoinedRows:
    """The extension of `Shards(join=…)`; reads the file, unless the cache directory has its index.

    Args:
        keys: of caption and label; None: there are none.

    Raises:
        OptionError: the file can't be used, or lacks a column that a key names.
        OriginError, CacheError: it can't be read, or not kept.
    """
    table = open_table(Join.of(option), cache_dir, storage_options)
    specs = [KeySpec.parse(key) for key in keys if key is not None]
    for spec in specs:
        table.check(spec)
    return JoinedRows(table, tuple(spec for spec in specs if JOINED in spec.extensions), is_strict)


@dataclass(frozen=True, slots=True)
class JoinedColumn:
    """A fact that is made of samples with their rows; known by the version of the file, too."""

    column: Column
    table: JoinTable
    digest: str
    dtype: str
    from_members: bool
    check_name: str

    def needs(self, extensions: Collection[str]) -> Collection[str]:
        """Select those of a sample's extensions whose bytes are needed, with a row and without."""
        names = {self.table.join.member[0], *self.column.needs(extensions)}
        return names.union(self.column.needs({*extensions, JOINED})).intersection(extensions)

    def make(self, samples: Sequence[FactSample]) -> Values:
        """Return the value of each sample."""
        rows = [self.table.row(sample.entry.key, sample.members) for sample in samples]
        return self.column.make(
            [
                sample if row is None else sample._replace(members={**sample.members, JOINED: bytes(row)})
                for sample, row in zip(samples, rows, strict=True)
            ]
        )
