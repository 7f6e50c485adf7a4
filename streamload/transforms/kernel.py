"""The function of _avx2.c, if it is there (part of I); without torch.

It is built with the package where there is a C compiler, and runs on processors with AVX2 and FMA.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

_avx2: ModuleType | None
try:
    from streamload.transforms import _avx2
except ImportError:
    _avx2 = None

resize_into: Callable[..., None] | None = None
"""See fused.py and _avx2.pyi; None where it can't be used."""
if _avx2 is not None and _avx2.is_supported():
    resize_into = _avx2.resize_into


def why_not() -> str:
    """Why it can't be used here; empty: it can."""
    if _avx2 is None:
        return "streamload was installed without a C compiler for this processor"
    return "" if _avx2.is_supported() else "the processor has no AVX2 or no FMA"
