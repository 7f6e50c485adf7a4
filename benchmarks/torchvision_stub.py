"""Lets a torchvision built for CUDA be imported beside a CPU torch, to test and measure with open_clip.

Only the schemas of two operators are missing there; with them transforms, timm and open_clip work. The two
operators themselves don't.
"""

from __future__ import annotations

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[torch.library.Library] = []


def define_torchvision_schemas() -> None:
    """Define `torchvision::nms` and `qnms` where nobody has; to be called before torchvision is imported.

    A torch for CUDA loads torchvision's own operators, whose definitions would come a second time.
    """
    if torch.version.cuda is not None:
        return
    for schema in _SCHEMAS:
        if hasattr(torch.ops.torchvision, schema.partition("(")[0]):
            continue
        library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        library.define(schema)  # type: ignore[no-untyped-call]
        _libraries.append(library)  # its end would take the schema away
