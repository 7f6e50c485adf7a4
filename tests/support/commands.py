"""The `streamload` command in a forked process: torch and streamload are imported there already.

A new interpreter spends seconds on that. That the command works in one is shown by test_cli_*.py.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import streamload.loader  # noqa: F401  with torch: commands import it when they run
from streamload.cli import main
from tests.support.kills import Child


def run_forked(
    arguments: Sequence[str],
    *,
    folder: Path | None = None,
    environ: Mapping[str, str] | None = None,
    limit_seconds: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Run `streamload ARGUMENTS` to its end, in `folder`, with `environ` beside this process's variables."""
    outputs = [os.memfd_create(name) for name in ("stdout", "stderr")]
    try:
        with Child(
            lambda stage: _main(arguments, folder, environ or {}, outputs), limit_seconds=limit_seconds
        ) as child:
            code = child.finish(limit_seconds)
        stdout, stderr = (os.pread(fd, os.fstat(fd).st_size, 0).decode() for fd in outputs)
    finally:
        for fd in outputs:
            os.close(fd)
    return subprocess.CompletedProcess(["streamload", *arguments], code, stdout, stderr)


def _main(
    arguments: Sequence[str], folder: Path | None, environ: Mapping[str, str], outputs: Sequence[int]
) -> int:
    """Make the forked process one that a shell started, and return the command's exit status."""
    for target, fd in enumerate(outputs, 1):
        os.dup2(fd, target)
    sys.stdout, sys.stderr = (open(fd, "w", closefd=False) for fd in (1, 2))  # noqa: SIM115
    sys.argv = ["streamload", *arguments]
    os.environ.update(environ)
    if folder is not None:
        os.chdir(folder)
    logging.getLogger().handlers.clear()  # pytest's
    warnings.resetwarnings()
    warnings.simplefilter("ignore", DeprecationWarning)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # its threads aren't forked
    code = 0
    try:
        main()
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    sys.stdout.flush()
    sys.stderr.flush()
    return code
