"""Prometheus' own parser, of Debian's package prometheus; tests are skipped without it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing: install prometheus (`make test` tries to)"
)


def run(*arguments: str | Path, text: str = "") -> subprocess.CompletedProcess[str]:
    """`promtool …` with a text on its standard input."""
    command = ["promtool", *map(str, arguments)]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


def complaints(text: str) -> str:
    """What `promtool check metrics` has against a scrape; "" if nothing."""
    done = run("check", "metrics", text=text)
    return done.stdout + done.stderr
