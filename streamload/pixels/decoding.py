"""Images decoded on a device, `Images(decode=…)`: an extension (streamload/extension/).

Its workers make files and random choices (`files.py`), of which the rank makes images (`rank.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streamload.derived.prepare.preparation import AUTO, Preparation
from streamload.errors import OptionError
from streamload.extension import Extension, RankPart, WorkerPart
from streamload.pixels import auto
from streamload.pixels.auto import DecoderChoice, Switch, SwitchInWorker
from streamload.pixels.files import FileImages
from streamload.pixels.pipeline import why_not
from streamload.pixels.rank import DecodingRecord
from streamload.transforms.compile import compile_transform
from streamload.transforms.plan import ImagePlan, NotRecognised

if TYPE_CHECKING:
    from streamload.extension import LoaderOptions, Run, WorkerProcess


@dataclass(frozen=True, slots=True)
class DeviceDecoding(Extension):
    """The extension of a loader whose images are decoded on a device.

    Attributes:
        is_auto: the run chooses whether they are.
        switch: whether the workers of a process leave images to the device.
    """

    is_auto: bool = False
    switch: Switch = field(default_factory=lambda: Switch(True), compare=False)

    name = auto.NAME

    def refuse_unusable(self, options: LoaderOptions) -> None:
        """Refuse options with which it can't be used.

        Raises:
            OptionError: it says which, and what to give instead.
        """
        if self.is_auto and not options.train:
            return  # an evaluation stays in the workers
        refused = {
            "map_sample=": options.workers.map_sample is not None,
            "patches=": options.images.patches is not None,
        } | {
            f"the extension {extension.name!r}": extension.takes_preprocess
            for extension in options.batches.extensions
        }
        if used := [name for name, is_given in refused.items() if is_given]:
            raise OptionError(
                f"{', '.join(used)} can't be used with Images(decode='device') or 'auto', which leave images "
                f"to the rank: leave one out, or give decode='host'"
            )
        if (recipe := options.images.prepare) not in (None, AUTO):
            preparation = Preparation.parse(recipe)
            if preparation.quality is None and not preparation.is_exact:
                raise OptionError(
                    f"prepare={recipe!r} leaves no JPEG to Images(decode='device'): workers resize each "
                    f"image, or read its pixels. Give decode='host', or prepare='jpeg-{preparation.size}-q90'"
                )
        if options.preprocess is None:
            return
        if not options.images.compile:
            raise OptionError("compile=False runs preprocess= in workers, which decode='device' doesn't do")
        try:
            reason = why_not(compile_transform(options.preprocess))
        except NotRecognised as error:
            reason = (
                f"preprocess= can't be compiled ({error}), and only compiled transforms run on a device: see "
                f"docs/guides/transforms.md, or give Images(decode='host')"
            )
        if reason is not None:
            raise OptionError(reason)

    def image_maker(self, options: LoaderOptions, plan: Any) -> Any:
        """Images that the rank decodes; in an evaluation with "auto" workers do."""
        if self.is_auto and not options.train:
            return plan
        assert isinstance(plan, ImagePlan)  # others are refused
        return FileImages(plan, "image" in (options.workers.memory or {}), self.switch)

    def in_worker(self, process: WorkerProcess) -> WorkerPart | None:
        """Its part in a worker process."""
        return SwitchInWorker(self.switch) if self.is_auto else None

    def in_rank(self, run: Run) -> RankPart:
        """Its part in the rank."""
        return DecodingRecord(DecoderChoice(run) if self.is_auto and run.options.train else None)


def decoding_by(decode: str) -> DeviceDecoding:
    """The extension for `Images(decode=…)`, "device" or "auto"."""
    return DeviceDecoding(decode == "auto", Switch(decode != "auto"))
