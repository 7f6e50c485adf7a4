"""Values of samples that are drawn at random, for tests that hold one run against another."""

from __future__ import annotations

import random
from typing import Any

import torch


def augmented(sample: dict[str, Any]) -> dict[str, Any]:
    """Values that are drawn as an augmentation's are, and some that aren't."""
    return {"drawn": torch.rand(2), "python": random.random(), "size": len(sample["jpg"])}
