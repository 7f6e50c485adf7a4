"""Builds the C code with AddressSanitizer and UndefinedBehaviorSanitizer, for processes that fuzz it.

The interpreter isn't built with them, so their libraries are preloaded. Then whatever is allocated has fences
around it, and the C code, which alone is checked, ends the process with a report where it touches one.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "streamload" / "transforms"
PLACE = "FUZZING_SANITIZED"
"""The variable by which a process knows where they are."""

_NAMES = ("_before", "_avx2")
_FLAGS = ("-shared", "-fPIC", "-O0", "-g", "-ffp-contract=off", "-fsanitize=address,undefined",
          "-fno-sanitize-recover=undefined")  # fmt: skip
_LIBRARIES = ("libasan.so", "libubsan.so")


def why_not() -> str:
    """Why it can't be built here; empty: it can."""
    if shutil.which("gcc") is None:
        return "there is no gcc"
    missing = [name for name in _LIBRARIES if not Path(_library(name)).is_absolute()]
    return f"gcc has no {' and no '.join(missing)}" if missing else ""


def build(place: Path, sources: Path = SOURCES) -> None:
    """Build what there is of it, and what is for this processor, into a directory."""
    for name in _NAMES:
        is_for_others = name == "_avx2" and platform.machine() not in ("x86_64", "aarch64")
        if is_for_others or not (sources / f"{name}.c").exists():
            continue
        command = ["gcc", *_FLAGS, f"-I{sysconfig.get_path('include')}", str(sources / f"{name}.c")]
        subprocess.run([*command, "-o", str(place / f"{name}.so")], check=True)


def environment(place: Path) -> dict[str, str]:
    """Of a process that is to use what was built there."""
    return {
        **os.environ,
        PLACE: str(place),
        "LD_PRELOAD": " ".join(map(_library, _LIBRARIES)),
        "ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=16",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # else small pieces lie side by side, without fences
    }


def load() -> None:
    """Make what was built the modules that will be imported, in a process with such an environment."""
    place = os.environ.get(PLACE)
    if not place:
        return
    for name in _NAMES:
        full = f"streamload.transforms.{name}"
        if full in sys.modules or not Path(f"{place}/{name}.so").exists():
            continue
        loader = importlib.machinery.ExtensionFileLoader(full, f"{place}/{name}.so")
        spec = importlib.util.spec_from_loader(full, loader)
        assert spec is not None
        sys.modules[full] = module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)


def _library(name: str) -> str:
    """Where gcc has a library; its name alone if it has none."""
    done = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return done.stdout.strip()
