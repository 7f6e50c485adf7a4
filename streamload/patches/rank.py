"""Images as patches, `Images(patches=…)`: an extension (streamload/extension/).

Its images and its steps are made here; in the rank (step K) the training loop gets their values in one dict.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from streamload.errors import OptionError
from streamload.extension import Extension, RankPart
from streamload.order.steps import SeqLens, StepOptions, StepTable
from streamload.patches.compile import patch_transform
from streamload.patches.images import PatchImages
from streamload.patches.plan import NAMES, GivenPatches
from streamload.patches.steps import TableOptions

if TYPE_CHECKING:
    from streamload.extension import LoaderOptions, Run


@dataclass(frozen=True, slots=True)
class PatchedImages(Extension):
    """The extension of a loader whose images are made into patches.

    Attributes:
        seq_lens: the most patches of an image in each step.
        listed_steps: the steps of an epoch of training, where `Patches(steps=…)` gives them.
    """

    seq_lens: SeqLens
    listed_steps: StepTable | None = None

    name = "patches"
    takes_preprocess = True

    def refuse_unusable(self, options: LoaderOptions) -> None:
        """Refuse what needs images of one size, and a transform that isn't made for a number of patches."""
        if options.output == "hf":
            raise OptionError('patches= is for output="dict" or "tuple": "hf" has images of one size')
        for name, value in (("map_sample", options.workers.map_sample), ("features", options.features)):
            if value:
                raise OptionError(f"{name}= is for images of one size, and patches= makes images of several")
        if self.listed_steps is not None and (options.num_samples is not None or options.order.endless):
            raise OptionError("Patches(steps=…) says what an epoch has: leave out num_samples= and endless=")
        patch_transform(options, is_compiled=False)
        wants_bytes = options.images.dtype == "uint8"
        if wants_bytes and isinstance(patch_transform(options, options.images.compile), GivenPatches):
            raise OptionError('Images(dtype="uint8") is for a preprocess= that can be compiled')

    def step_options(self, steps: StepOptions) -> StepOptions:
        """Steps whose images have a number of patches, or the listed ones."""
        if self.listed_steps is not None:
            return TableOptions(steps.split, table=self.listed_steps)
        return replace(steps, seq_lens=self.seq_lens)

    def image_maker(self, options: LoaderOptions, plan: Any) -> PatchImages:
        """The transform to patches."""
        return PatchImages(patch_transform(options, options.images.compile))

    def in_rank(self, run: Run) -> RankPart:
        """Its part in the rank; None: it has none."""
        return RankPatches()


def patched_images(options: LoaderOptions) -> PatchedImages:
    """The extension of a loader, by its options, `LoaderOptions`, with patches."""
    patches, table = options.images.patches, None
    assert patches is not None
    if patches.steps is not None and options.train:
        table = StepTable(tuple(patches.steps), options.num_batches or len(patches.steps), options.seed)
    return PatchedImages(patches.lengths(options.train, options.seed), table)


class RankPatches(RankPart):
    """The rank's part."""

    def shaped(self, values: dict[str, Any]) -> dict[str, Any]:
        """The patches' values as one, `image`, with the most patches of an image as `seq_len`."""
        if NAMES[0] not in values:
            return values
        image: dict[str, Any] = {name: values.pop(name) for name in NAMES}
        image["seq_len"] = image["patches"].shape[1]
        return {"image": image, **values}
