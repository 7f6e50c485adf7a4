"""Values of metrics that aren't counted in rows, such as those by source: the loader sets them."""

from __future__ import annotations

import math

from streamload.metrics.registry import BY_NAME

Labels = tuple[str, ...]


class Gauges:
    """The latest values of metrics, by name and labels. Thread-safe."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Labels, float]] = {}

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a value; one that isn't a number takes the value away.

        Args:
            name: of a metric whose values the loader gives (registry.py).
            value: in the metric's unit.
            labels: the values of its labels.

        Raises:
            KeyError: no metric has this name.
            ValueError: the metric has other labels.
        """
        metric = BY_NAME[name]
        if len(labels) != len(metric.labels) or metric.rows:
            raise ValueError(f"{name} is given with {len(metric.labels)} labels, not {len(labels)}")
        values = self._values.setdefault(name, {})
        if math.isfinite(value):
            values[labels] = float(value)
        else:
            values.pop(labels, None)

    def values(self) -> dict[str, dict[Labels, float]]:
        """A copy of all of them, by name and labels."""
        return {name: dict(values) for name, values in list(self._values.items())}
