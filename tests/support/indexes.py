"""An index that tests write: entries and its end at once, closed with its block."""

from __future__ import annotations

from collections.abc import Iterable

from streamload.shards.index import IndexWriter
from streamload.shards.record import COMPLETE
from streamload.shards.samples import Entry


class WrittenIndex(IndexWriter):
    def __enter__(self) -> WrittenIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, entries: Iterable[Entry]) -> None:
        self.write(self.pack(entries))

    def finish(
        self, status: str = COMPLETE, size: int = 0, cause: str = "", warnings: Iterable[str] = ()
    ) -> None:
        self.write(self.pack_end(status, size, cause, warnings))
