"""The resize kernel on aarch64, by qemu: the bits that this processor's has, for a thousand random cases."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from streamload.transforms import kernel

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "streamload" / "transforms"
HARNESS = Path(__file__).with_name("kernel_cases.c")
CASES = 1000
OPENAI = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def compilers() -> dict[str, list[str]]:
    """Commands that compile C for aarch64, by name: zig of `make release`, and a distribution's gcc."""
    found = {}
    if (python := ROOT / ".venv-release" / "bin" / "python").exists():
        found["zig"] = [str(python), "-m", "ziglang", "cc", "-target", "aarch64-linux-musl"]
    if gcc := shutil.which("aarch64-linux-gnu-gcc"):
        found["gcc"] = [gcc]
    return found


@pytest.fixture(scope="session")
def qemu() -> str:
    """The command that runs aarch64's programs; installed where it may be."""
    name = "qemu-aarch64-static"
    done = subprocess.run(
        ["bash", ".ci/need", "qemu-user-static", name], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(done.stderr.strip())
    return name


class Case:
    """One resize: random sides from 1 to 400, filter, order of the passes, part, and kind of result."""

    def __init__(self, number: int) -> None:
        rng = np.random.default_rng(number)
        most = 12 if number % 5 == 0 else 400
        height, width = (int(side) for side in rng.integers(1, most + 1, 2))
        whole = rng.integers(1, 261, 2)
        part = [int(rng.integers(1, side + 1)) for side in whole]
        begin = [int(rng.integers(0, side - cut + 1)) for side, cut in zip(whole, part, strict=True)]
        levels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        self.pixels = levels // 128 * 255 if number % 3 == 0 else levels
        self.is_bilinear, self.is_columns_first, is_floats, is_random = (
            int(n) for n in rng.integers(0, 2, 4)
        )
        self.whole, self.part = [*map(int, whole)], [*begin, *part]
        statistics = (rng.random(3), rng.random(3) + 0.001) if is_random else OPENAI
        self.statistics = np.array(statistics, np.float32)
        self.dtype = np.float32 if is_floats else np.uint8
        self.shape = (3, *part) if is_floats else (*part, 3)

    def packed(self) -> bytes:
        """As kernel_cases.c reads it."""
        numbers = [*self.pixels.shape[:2], self.is_bilinear, self.is_columns_first, *self.whole, *self.part,
                   self.dtype is np.float32]  # fmt: skip
        return np.array(numbers, np.int32).tobytes() + self.statistics.tobytes() + self.pixels.tobytes()

    def here(self) -> np.ndarray:
        """Return the result of the kernel that is installed."""
        pixels, out = np.ascontiguousarray(self.pixels), np.empty(self.shape, self.dtype)
        height, width, _ = pixels.shape
        statistics = self.statistics.tobytes() if self.dtype is np.float32 else None
        assert kernel.resize_into is not None
        kernel.resize_into(
            pixels.ctypes.data, 3 * width, height, width, self.is_bilinear, self.is_columns_first,
            *self.whole, out.ctypes.data, *self.part, statistics,
        )  # fmt: skip
        return out


def without_python(place: Path) -> Path:
    """Write the kernel's code up to its Python part, beside what it includes."""
    code, mark, _ = (SOURCES / "_avx2.c").read_text().partition("/* ---- Python ---- */")
    assert mark
    shutil.copy(SOURCES / "_neon.h", place)
    (place / "kernel.c").write_text(code.replace("#include <Python.h>\n", ""))
    return place / "kernel.c"


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(kernel.why_not()), reason=kernel.why_not())
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compares another processor with x86-64")
@pytest.mark.parametrize("compiler", ["zig", "gcc"])
def test_every_bit_of_a_resize_is_the_same_on_aarch64(compiler: str, qemu: str, tmp_path: Path) -> None:
    if compiler not in compilers():
        pytest.skip(f"no {compiler} for aarch64: `make release` installs zig, gcc-aarch64-linux-gnu has gcc")
    program = tmp_path / "cases"
    flags = [
        "-O3",
        "-ffp-contract=off",
        "-static",
        "-Wall",
        "-Werror",
        f'-DKERNEL="{without_python(tmp_path)}"',
    ]
    subprocess.run(
        [*compilers()[compiler], *flags, str(HARNESS), "-o", str(program), "-lm"], check=True, timeout=300
    )
    cases = [Case(number) for number in range(CASES)]
    given = b"".join(case.packed() for case in cases)
    done = subprocess.run([qemu, str(program)], input=given, capture_output=True, check=True, timeout=300)
    at = 0
    for number, case in enumerate(cases):
        expected = case.here().tobytes()
        assert done.stdout[at : at + len(expected)] == expected, (number, vars(case))
        at += len(expected)
    assert at == len(done.stdout)
