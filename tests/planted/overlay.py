"""A copy of the project in which bugs are planted, one after the other: the checkout never changes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.planted.table import ROOT, Plant
from tests.planted.zygote import is_killed

SECONDS = 150.0
_LEFT_OUT = shutil.ignore_patterns(".*", "_build", "*.egg-info", "build", "dist")
_PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=short")
_IMPORTED = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # by the zygote


class Overlay:
    """A copy of the project, and the process that runs its tests.

    Args:
        folder: Where the copy and the tests' own files are; it is removed by `close`.
    """

    def __init__(self, folder: Path | None = None):
        self.folder = Path(tempfile.mkdtemp(prefix="planted-")) if folder is None else folder
        self.copy = self.folder / "project"
        shutil.copytree(ROOT, self.copy, ignore=_LEFT_OUT, symlinks=True)
        self._zygote = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py")), str(self.copy)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={**os.environ, "TMPDIR": str(self.folder)},
        )

    def __enter__(self) -> Overlay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def log(self) -> str:
        """What the last run wrote."""
        return (self.folder / "log").read_text(errors="replace")

    def run(self, tests: Sequence[str], *options: str, seconds: float = SECONDS) -> dict[str, Any]:
        """Run tests of the copy as it is now, up to the first that fails."""
        timeout = f"--timeout={max(1, int(seconds) - 20)}"
        base = f"--basetemp={self.folder / 'base'}"
        request = {
            "arguments": [*_PYTEST, *_IMPORTED, timeout, base, *options, *tests],
            "log": str(self.folder / "log"),
            "seconds": seconds,
        }
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.write(json.dumps(request) + "\n")
        self._zygote.stdin.flush()
        answer: dict[str, Any] = json.loads(self._zygote.stdout.readline())
        return answer

    def kills(self, plant: Plant, tests: Sequence[str], *options: str, seconds: float = SECONDS) -> str:
        """The id of the test that fails with a plant; empty: none does."""
        with self.planted(plant):
            answer = self.run(tests, *options, seconds=seconds)
        return str(answer["failure"]["test"]) if is_killed(answer) else ""

    @contextlib.contextmanager
    def planted(self, plant: Plant) -> Iterator[None]:
        """Plant a bug for the block."""
        path = self.copy / "streamload" / plant.file
        text, times = path.read_text(), path.stat()
        path.write_text(plant.planted(text))
        try:
            yield
        finally:
            path.write_text(text)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # its compiled form is still right

    def close(self) -> None:
        """Remove the copy. Idempotent."""
        for pipe in (self._zygote.stdin, self._zygote.stdout):
            if pipe is not None:
                pipe.close()
        self._zygote.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
