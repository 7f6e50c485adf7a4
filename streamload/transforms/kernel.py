"""The functions of _avx2.c and _before.c, if they are built (step I). Doesn't import torch.

Wheels have them for x86-64 and aarch64; an installation from source builds them if there is a C compiler.
Otherwise Python, and torch or Pillow, replace them, slower, and torch not to the bit (resize.py).
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from types import ModuleType
from typing import Any

VECTORS = "NEON" if platform.machine() == "aarch64" else "AVX2"
"""The instructions that the kernel uses on this processor."""
_PROCESSORS = ("x86_64", "aarch64")
"""Processors that the kernel can be built for."""

_avx2: ModuleType | None
try:
    from streamload.transforms import _avx2
except ImportError:
    _avx2 = None
_before: ModuleType | None
try:
    from streamload.transforms import _before
except ImportError:
    _before = None

resize_into: Callable[..., None] | None = None
"""Resizes a box of an image into a batch's row (resize.py, _avx2.pyi); None if it can't be used."""
if _avx2 is not None and _avx2.is_supported():
    resize_into = _avx2.resize_into
jpeg_size: Callable[[bytes], tuple[int, int] | None] | None = getattr(_before, "jpeg_size", None)
"""A JPEG's size by its header (decode.py)."""
jpeg_passes: Callable[[bytes], int] | None = getattr(_before, "jpeg_passes", None)
"""The number of a JPEG's scans (limits.py)."""
jpeg_is_sound: Callable[[int, int], bool] | None = getattr(_before, "jpeg_is_sound", None)
"""True if no decoder can doubt a JPEG, by its address and size (pixels/segments.py)."""
random_box: Callable[..., Any] | None = getattr(_before, "random_box", None)
"""The box of a RandomResizedCrop (augment.py, _before.pyi)."""


def why_not() -> str:
    """Return why `resize_into` can't be used here, or ""."""
    if _avx2 is None:
        return "streamload was installed without a C compiler for this processor"
    return "" if _avx2.is_supported() else "the processor has no AVX2 or no FMA"


def lost() -> str:
    """Return what an installation without a C compiler costs on this processor, and the remedy, or ""."""
    missing = [module is None for module in (_avx2, _before)]
    if platform.machine() not in _PROCESSORS or not any(missing):
        return ""
    return (
        "streamload was installed without a C compiler, so torch resizes images (Pillow where torch has no "
        "vector code): uint8 takes 1.3 times as long, normalised float32 twice, and pixels can be a level of "
        "255 off Pillow's; transforms that need Pillow's to the bit run as given. "
        "Install a compiler (apt-get install gcc libc6-dev) and then streamload again"
    )
