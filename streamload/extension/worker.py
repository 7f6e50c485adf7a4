"""An extension's part in a worker process, and what it sees there: rows, shards' facts, the steps ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from streamload.order.events import Event
from streamload.shards.samples import Sample

if TYPE_CHECKING:
    from streamload.extension.kernel import Allocate, BatchRows, EpochStart, Sampler, torch


class ReadProgress(NamedTuple):
    """Progress of a process in reading.

    Attributes:
        epoch: of the order.
        fronts: by group and source of the rank, where reading has begun: the current pass, and the index in
            it of the next shard to open.
        shards_ahead: how many of the next shards the process fetches itself.
        mean_bytes: the mean size of its shards; 0: unknown.
    """

    epoch: int
    fronts: Mapping[tuple[int, int], tuple[int, int]]
    shards_ahead: int
    mean_bytes: float


class BatchColumn(Protocol):
    """Values of a batch that aren't decoded from its samples, each of which is parsed and then added.

    For example the sizes of images, as bytes:

        class ImageSizes:
            def __init__(self):
                self._sizes = []

            def parse(self, sample, image, is_prepared, seed):
                return len(sample.members[image])

            def add(self, parsed):
                self._sizes.append(parsed)

            def drop_last(self):
                self._sizes.pop()

            def finish(self, texts):
                return {"image_size": torch.tensor(self._sizes)}

            def close(self):
                pass
    """

    def parse(self, sample: Sample, image: str, is_prepared: bool, seed: int) -> object:
        """Do what can be done before the sample's pixels.

        Args:
            sample: its bytes have to stay valid until it has been added.
            image: the extension of its image.
            is_prepared: whether that is a prepared image.
            seed: uint64, of the sample's random choices in this pass.
        """
        ...

    def add(self, parsed: object) -> None:
        """Add a sample, given the result of `parse`.

        Raises:
            SampleError: it can't be used; the batch is unchanged.
        """
        ...

    def drop_last(self) -> None:
        """Remove the sample that was added last."""
        ...

    def finish(self, texts: torch.Tensor | list[str] | None) -> dict[str, object]:
        """The values of the samples that were added.

        Args:
            texts: of the batch: a tensor of ids that isn't cut, or a list; None: it has none.
        """
        ...

    def close(self) -> None:
        """Restore the random generators. Idempotent."""
        ...


class WorkerPart:
    """An extension in a worker process; it lasts from epoch to epoch.

    What it makes of a step follows from the epoch's events and the step's rows alone. By default nothing.
    """

    def start_epoch(self) -> None:
        """Forget the events of the epoch before: `self.limit = 0`."""

    def apply(self, event: Event) -> None:
        """Go by an event from now on: `self.limit = event.value["limit"]`.

        Events come in order, each before the first step for which it holds. Those that hold at the start of
        the epoch come before its first step is asked for.
        """

    def may_begin(self, number: int) -> bool:
        """True if a step may be begun: `return number <= self.process.decided`.

        Asked again and again until it is, before later events are read.

        Args:
            number: of the step, from 0 at the start of the epoch.
        """
        return True

    def sampler(self, start: EpochStart) -> Sampler | None:
        """The steps of an epoch, if they aren't those of the plain order: `return MySampler(…, start)`.

        Args:
            start: of the epoch.
        """
        return None

    def before_step(self, number: int) -> None:
        """Return when a step may begin, by its number in the epoch; its events are known by now.

        while self.bytes_of(number) > self.limit_bytes:
            time.sleep(0.01)
        """

    def excludes(self, sample: Sample) -> bool:
        """True if another sample is to take the place of this one, as of a bad one; an evaluation skips it.

            return sample.key in self.keys

        Asked of each sample of a step and of those that may take a place, by parts alone that override it.
        """
        return False

    def columns(self, size: int, allocate: Allocate) -> Sequence[BatchColumn]:
        """Values of an empty batch that aren't decoded from its samples: `return [ImageSizes()]`.

        Args:
            size: its capacity, in samples.
            allocate: makes their tensors, by shape and torch.dtype.
        """
        return ()

    def finish(self, values: dict[str, object], rows: BatchRows) -> bytes:
        """Message to the rank's part with a batch.

            widths = np.zeros(len(rows), np.int32)
            for shard_rows in rows.by_shard():
                widths[shard_rows.places] = [entry.width for entry in shard_rows.entries()]
            return widths.tobytes()

        Args:
            values: of the batch by name; the part may add some.
            rows: of the batch.
        """
        return b""

    def close(self) -> None:
        """End with the process: `self.file.close()`. Idempotent."""
