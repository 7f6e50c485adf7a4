"""Images as patches in the rank: the training loop gets their values in one dict (step K)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from streamload.extension import Extension, RankPart, Run
from streamload.patches.plan import NAMES


@dataclass(frozen=True, slots=True)
class PatchedImages(Extension):
    """The extension of a loader whose images are made into patches."""

    name = "patches"

    def in_rank(self, run: Run) -> RankPart:
        """Its part in the rank; None: it has none."""
        return RankPatches()


class RankPatches(RankPart):
    """The rank's part."""

    def shaped(self, values: dict[str, Any]) -> dict[str, Any]:
        """The patches' values as one, `image`, with the most patches of an image as `seq_len`."""
        if NAMES[0] not in values:
            return values
        image: dict[str, Any] = {name: values.pop(name) for name in NAMES}
        image["seq_len"] = image["patches"].shape[1]
        return {"image": image, **values}
