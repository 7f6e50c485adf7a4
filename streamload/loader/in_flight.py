"""The limits of `Workers(memory=…)`: what rows take of them, by the options alone, and which limits fit.

Workers keep to them in worker/in_flight.py.
"""

from __future__ import annotations

import logging
import math

from streamload.batches.assembly import BatchAssembly
from streamload.batches.images import ImageAssembly
from streamload.errors import OptionError
from streamload.loader.options import LoaderOptions
from streamload.metrics import format_bytes
from streamload.options.values import parse_size
from streamload.patches.images import PatchImages
from streamload.transforms.plan import ImagePlan
from streamload.worker.in_flight import InFlight

logger = logging.getLogger("streamload")

_LONG_TEXT = "word " * 4096


def in_flight_of(options: LoaderOptions, assembly: BatchAssembly) -> InFlight | None:
    """The limits of batches in flight, and what rows take of them; None: there are none.

    Args:
        options: the loader's.
        assembly: of its batches.

    Raises:
        OptionError: the bytes of a row aren't known before it is made.
    """
    memory = options.workers.memory
    if memory is None:
        return None
    limits = {name: parse_size(value, f"memory[{name!r}]") for name, value in memory.items()}
    row_bytes, patch_bytes = {}, 0
    if "text" in limits:
        row_bytes["text"] = _text_bytes(assembly)
    if "image" in limits:
        row_bytes["image"], patch_bytes = _image_bytes(assembly.images)
    return InFlight(limits, row_bytes, patch_bytes)


def check_step(options: LoaderOptions, in_flight: InFlight, rows: int) -> int:
    """Largest number of steps in flight, of the dearest kind.

    Args:
        options: the loader's.
        in_flight: its limits.
        rows: of a rank in a step; with Patches(steps=…), each says its own.

    Raises:
        OptionError: a step is larger than a limit.
    """
    patches, table = options.images.patches, options.step_table
    kinds = [(rows, max(patches.seq_lens) if patches is not None else 0)]
    if table is not None:
        kinds = [(step_rows, seq_len) for seq_len, step_rows in table.steps]
    for step_rows, seq_len in kinds:
        for name, needed in in_flight.step_bytes(step_rows, seq_len).items():
            if needed > in_flight.limits[name]:
                fits = in_flight.limits[name] * step_rows // needed
                smaller = f", or a batch_size of at most {fits}" if fits else ""
                raise OptionError(
                    f"memory={{{name!r}: …}}: the {name} of a batch of {step_rows} rows has "
                    f"{format_bytes(needed)}, more than the {format_bytes(in_flight.limits[name])} allowed: "
                    f"give at least {needed}{smaller}"
                )
    return min(in_flight.steps_that_fit(*kind) for kind in kinds)


def report(options: LoaderOptions, in_flight: InFlight, rows: int) -> None:
    """Log what is in flight at most.

    Args:
        options: the loader's.
        in_flight: its limits.
        rows: of a rank in a step.
    """
    steps_ahead = max(1, options.workers.prefetch_factor * options.num_workers)
    fitting = min(steps_ahead, check_step(options, in_flight, rows))
    patches = options.images.patches
    most = in_flight.step_bytes(rows, max(patches.seq_lens) if patches is not None else 0)
    varies = patches is not None and (len(set(patches.seq_lens)) > 1 or options.step_table is not None)
    shown = []
    for name, limit in in_flight.limits.items():
        most_bytes = min(limit, (steps_ahead if varies else fitting) * most[name])
        shown.append(f"{name} {format_bytes(most_bytes)} of {format_bytes(limit)}")
    count = f"{fitting} or more" if varies and fitting < steps_ahead else str(fitting)
    logger.info("memory: batches in flight have at most %s (%s of %d)", ", ".join(shown), count, steps_ahead)


def _text_bytes(assembly: BatchAssembly) -> int:
    """Of the ids of a caption that is as long as it may be, and of what comes with them."""
    if assembly.tokenizer is None or assembly.map_sample is not None:
        raise OptionError('memory={"text": …} is for ids: give a tokenizer, or leave "text" out')
    texts = assembly.tokenizer([_LONG_TEXT], [0])
    text_bytes = texts.ids.nbytes
    if assembly.as_model_inputs:
        text_bytes += sum(value.nbytes for value in texts.others.values())
    if assembly.trim is not None:
        text_bytes += sum(value.nbytes for value in assembly.trim.beside(texts).values())
    return text_bytes


def _image_bytes(images: ImageAssembly | None) -> tuple[int, int]:
    """Of an image, and of each patch of one."""
    if images is None:
        raise OptionError('memory={"image": …} is for batches with images: leave "image" out')
    preprocess, item_bytes = images.preprocess, 4
    if isinstance(preprocess, ImagePlan):
        if images.as_bytes or preprocess.statistics is None:
            item_bytes = 1
        return 3 * math.prod(preprocess.size) * item_bytes, 0
    if isinstance(preprocess, PatchImages):
        if images.unnormalised is not None:
            item_bytes = 1
        values = 3 * math.prod(preprocess.transform.patch_size)
        return 0, values * item_bytes + 2 * 8 + 1  # with place and mask
    raise OptionError(
        'memory={"image": …} is for images whose size is known before they are made: give a preprocess= that '
        'can be compiled (docs/guides/transforms.md), or patches=, or leave "image" out'
    )
