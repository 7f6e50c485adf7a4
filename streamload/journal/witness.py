"""Where the rows of a batch are from: an extension of loaders that make a step again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from streamload.errors import SampleError
from streamload.extension import BatchColumn, Extension, RankPart, WorkerPart
from streamload.journal.content import CONTENT, UNKNOWN, Content

if TYPE_CHECKING:
    from streamload.extension import BatchAssembly, BatchRows, Run, WorkerProcess
    from streamload.extension.kernel import Allocate
    from streamload.shards.samples import Sample

_CAPTIONS = "__caption__"
_PASS_MASK = 0xFFFFFFFF


class PastRow(NamedTuple):
    """A row of a step.

    Attributes:
        key, url: of its sample.
        source: the index of its source.
        shard, number: where its sample is: the index of the shard in the run, and the sample's in it.
        passes: how many passes over its source came before, in each of which it was used as often.
        caption: as it was chosen; None: there is none, or `map_sample` reads it.
        instead_of: the key of the sample that it replaces; None: of none.
    """

    key: str
    url: str
    source: int
    shard: int
    number: int
    passes: int
    caption: str | None
    instead_of: str | None


class Witnessed(NamedTuple):
    """What the witness saw of a batch.

    Attributes:
        rows: of it.
        images: a tensor, or one for each row; None: it has none.
        content: a digest of the samples' bytes; 0: unknown.
    """

    rows: list[PastRow]
    images: Any
    content: int


@dataclass(frozen=True, slots=True)
class Witness(Extension):
    """Tells of each row of a batch where it is from.

    Attributes:
        tell: takes what it saw.
    """

    tell: Callable[[Witnessed], object]

    name = "witness"

    def in_worker(self, process: WorkerProcess) -> WorkerPart:
        """See the rows, and read their captions."""
        return _WitnessInWorker(process.reader.config.assembly)

    def in_rank(self, run: Run) -> RankPart:
        """Tell of them."""
        return _WitnessInRank(self.tell)


class _WitnessInWorker(WorkerPart):
    def __init__(self, assembly: BatchAssembly):
        self._assembly = assembly

    def columns(self, size: int, allocate: Allocate) -> Sequence[BatchColumn]:
        """The captions of the rows, and the digest of their bytes."""
        return [_Captions(self._assembly), Content()]

    def finish(self, values: dict[str, object], rows: BatchRows) -> bytes:
        """Where each row is from."""
        reader = rows.reader
        origins = []
        for (shard, number), visit in zip(rows.samples, rows.visits, strict=True):
            entry = reader.entries(shard, [number])[0]
            is_other = (visit.shard, visit.number) != (shard, number)
            instead_of = reader.entries(visit.shard, [visit.number])[0].key if is_other else None
            passes = visit.pass_ & _PASS_MASK
            url = reader.shards[shard].name
            origins.append([entry.key, url, visit.source, shard, number, passes, None, instead_of])
        return json.dumps([values.pop(CONTENT, UNKNOWN), origins]).encode()


class _Captions:
    """The captions of a batch, as strings; see BatchColumn."""

    def __init__(self, assembly: BatchAssembly):
        self._assembly, self._captions = assembly, list[str | None]()

    def parse(self, sample: Sample, image: str, is_prepared: bool, seed: int) -> str | None:
        """The caption of a sample; None: it has none."""
        from streamload.batches.captions import read_caption

        assembly = self._assembly
        if assembly.text is None:
            return None
        members = (sample if assembly.add_members is None else assembly.add_members(sample)).members
        chosen = assembly.text(tuple(members))
        try:
            if assembly.captions is not None:
                return assembly.captions.read(members, seed)
            return None if chosen is None else read_caption(members[chosen[0]])
        except SampleError:
            return None

    def add(self, parsed: Any) -> None:
        """Add one."""
        self._captions.append(parsed)

    def drop_last(self) -> None:
        """Remove the last one."""
        self._captions.pop()

    def finish(self, texts: Any) -> dict[str, object]:
        """All of them."""
        return {_CAPTIONS: self._captions}

    def close(self) -> None:
        """Nothing is open."""


class _WitnessInRank(RankPart):
    def __init__(self, tell: Callable[[Witnessed], object]):
        self._tell = tell

    def yielded(self, part: bytes, values: dict[str, object]) -> Mapping[str, object]:
        """Tell of a batch."""
        captions: Any = values.pop(_CAPTIONS, None)
        content, origins = json.loads(part)
        rows = [PastRow(*row) for row in origins]
        if captions is not None:
            rows = [row._replace(caption=caption) for row, caption in zip(rows, captions, strict=True)]
        images = next((values[name] for name in ("image", "pixel_values", "patches") if name in values), None)
        self._tell(Witnessed(rows, images, content))
        return {}
