"""What methods of a loader ask of its extensions: imported when one is called."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from streamload.errors import OptionError, StateMismatch
from streamload.loader.destination import AUTO
from streamload.loader.options import MODEL_INPUTS, LoaderOptions
from streamload.loader.rank_run import RankRun
from streamload.loader.registered import by_rank, extensions_of
from streamload.ranks.distributed import gather

if TYPE_CHECKING:
    from streamload.batching.microbatches import Microbatching
    from streamload.loader.past import PastStep

_LEAVE_OUT = "leave_out"
"""The name of the extension that leaves samples out, and its key of a state."""


def warn_of_decoder(state: Mapping[str, Any], options: LoaderOptions) -> None:
    """Warn where a run of images that a device decoded goes on with the host's decoder.

    Args:
        state: of the loader.
        options: of the loader that continues it.
    """
    if "decoder" in state and options.images.decode == "host":
        from streamload.pixels.rank import warn_of_other

        warn_of_other(str(state["decoder"]), None)


def leave_out(run: RankRun, keys: Iterable[str | tuple[str, str]], why: str) -> int:
    """Leave samples out of a run; see Loader.leave_out."""
    part = run.parts.by_name.get(_LEAVE_OUT)
    if part is None:
        raise OptionError(
            "loader.leave_out() needs a file, where a resumed run finds the samples again: give "
            "Order(journal=folder), or Shards(leave_out=FILE), which may be missing"
        )
    from streamload.journal.leave_out import LeftOutChanges

    assert isinstance(part, LeftOutChanges)
    return part.leave_out(keys, why)


def refuse_left_out(state: Mapping[str, Any], options: LoaderOptions) -> None:
    """Refuse a state that has samples left out in a loader that can't leave any out.

    Raises:
        StateMismatch: they would come again.
    """
    if state.get(_LEAVE_OUT) and options.leave_out_file is None:
        raise StateMismatch(
            "the state's run has left samples out, which would come again: give Shards(leave_out=FILE) with "
            "the file of that run"
        )


def steps_of_journal(
    run: RankRun, make: Callable[[LoaderOptions], Any], step: int, segment: str | None
) -> Iterator[PastStep]:
    """The steps of a run with a journal again; see Loader.at. `make` makes a loader of options."""
    recorder = run.parts.by_name.get("journal")
    if recorder is None:
        raise OptionError("loader.at() goes by the run's journal: give Order(journal=folder)")
    from streamload.journal.history import RunHistory
    from streamload.loader.past import MakeLoaders, steps_from

    recorder.close()  # writes what it has
    topology = run.schedule.topology
    layout = topology.rank, topology.world_size, run.options.batch_size
    history = RunHistory(os.fspath(run.options.order.journal or ""))
    loaders = MakeLoaders(make, extensions_of, by_rank())
    return steps_from(history, step, run.options, loaders, layout, segment)


def microbatching_of(run: RankRun) -> Microbatching:
    """The microbatches of a loader; its ranks agree on the size of parts.

    Raises:
        OptionError: `microbatch="auto"` on a device whose memory can't be read.
    """
    from streamload.batching.microbatches import Microbatching
    from streamload.batching.retry import STATE, StepRetry

    def least(value: float) -> float:
        """The least of the ranks' values, in training; in evaluation they have other numbers of parts."""
        return min(gather(value, run.schedule.topology.world_size)) if options.train else value

    options = run.options
    batches, patches, decoding_bytes = options.batches, options.images.patches, 0
    if options.images.decode != "host":
        from streamload.pixels.pipeline import MOST_BYTES as decoding_bytes  # noqa: N811
    retry = run.parts.by_name.get(STATE)
    assert retry is None or isinstance(retry, StepRetry)
    microbatching = Microbatching(
        batches.microbatch,
        least,
        longest=0 if patches is None else max(patches.seq_lens),
        max_tokens=None if batches.bucketing is None else batches.max_tokens,
        names=MODEL_INPUTS if options.output == "hf" else {},
        decoding_bytes=decoding_bytes,
        retry=retry,
    )
    if batches.microbatch == "auto" and options.device != AUTO:
        microbatching.prepare(options.settled_device)
    return microbatching
