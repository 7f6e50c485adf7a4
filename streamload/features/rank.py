"""The features of a loader in the rank: what came of them in a batch becomes FeatureRows (step K)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from streamload.derived.calls.feature_rows import FeaturesRead
from streamload.derived.calls.features import BoundFeatures, FeatureRows
from streamload.errors import OptionError
from streamload.extension import Event, RankPart
from streamload.features.columns import INPUTS, READ, ROWS
from streamload.metrics import Counts

if TYPE_CHECKING:
    from streamload.extension import Run

NAME = "features"


class RankFeatures(RankPart):
    """The rank's part, with the features of the loader by name."""

    def __init__(self, features: Mapping[str, BoundFeatures], run: Run):
        self._features, self._run = features, run
        self._rows: dict[str, FeatureRows] = {}  # of the batch that is yielded now

    def start_epoch(self, start: int) -> list[Event]:
        """The FeatureStart of each feature."""
        return [Event(0, NAME, {name: feature.start() for name, feature in self._features.items()})]

    def yielded(self, part: bytes, values: dict[str, Any]) -> dict[str, Any]:
        """Take the features' values out of a batch's.

        Raises:
            OptionError: it has a value of a feature's name.
        """
        self._rows = take_features(values, self._features, self._run.counts)
        return {}

    def values(self, info: Any) -> dict[str, Any]:
        """The FeatureRows of the batch."""
        rows, self._rows = self._rows, {}
        return dict(rows)

    def end_epoch(self) -> None:
        """Store the rows that are on their way, and count them."""
        for feature in self._features.values():
            feature.count(self._run.counts, at_end=True)


def take_features(
    values: dict[str, Any], features: Mapping[str, BoundFeatures], counts: Counts
) -> dict[str, FeatureRows]:
    """Take what belongs to features out of a batch's values, and put it together, by name.

    Raises:
        OptionError: the batch has a value of a feature's name.
    """
    rows: dict[str, FeatureRows] = {}
    for name, feature in features.items():
        if name in values:
            raise OptionError(
                f"features={{{name!r}: …}}: the batch has a {name!r} already; give another name"
            )
        read: FeaturesRead = values.pop(f"{name}{READ}")
        bodies, inputs = values.pop(f"{name}{ROWS}", None), values.pop(f"{name}{INPUTS}", None)
        if feature.features.inputs == "sample" and inputs is not None:
            inputs = {"image": inputs, "text": values.pop(f"{name}{INPUTS} text")}
        if bodies is not None:
            feature.count_read(counts, read.samples - len(read.missing), bodies.shape[1])
        feature.count(counts)
        counts.add("feature_read_ns", read.read_ns)
        rows[name] = FeatureRows(feature, read, bodies, inputs, counts)
    return rows
