"""Weights of rows in the loss, `Batches(sample_weight=…)`: an extension (streamload/extension/).

`sample.py` has the value of a sample, `worker.py` those of a batch's rows, and `rank.py` the rows' weights.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamload.errors import OptionError
from streamload.extension import Extension
from streamload.shards.columns import TOKENS
from streamload.weights.rank import RankWeights
from streamload.weights.sample import SampleWeight
from streamload.weights.worker import WorkerWeights

if TYPE_CHECKING:
    from streamload.extension import LoaderOptions, Run, WorkerProcess

__all__ = ["RowWeights"]


@dataclass(frozen=True, slots=True)
class RowWeights(Extension):
    """The extension of a loader whose rows are weighed.

    Attributes:
        sample_weight: what a sample weighs.
    """

    sample_weight: SampleWeight

    name = "row_weights"

    @property
    def facts(self) -> Collection[str]:
        """The names of the built-in facts that it needs."""
        return self.sample_weight.facts

    def refuse_unusable(self, options: LoaderOptions) -> None:
        """Refuse an evaluation, and weights by tokens without captions or a tokenizer."""
        if not options.train:
            raise OptionError("sample_weight= is for training: leave it out in an evaluation")
        if TOKENS in self.facts and (options.tokenizer is None or options.shards.text_key is None):
            raise OptionError(
                "complexity(…) counts the tokens of captions: give a tokenizer, or complexity(1, 0), which "
                "goes by images alone"
            )

    def in_worker(self, process: WorkerProcess) -> WorkerWeights:
        """Its part in a worker process; None: it has none there."""
        return WorkerWeights(self.sample_weight)

    def in_rank(self, run: Run) -> RankWeights:
        """Its part in the rank; None: it has none."""
        return RankWeights(self.sample_weight, run)
