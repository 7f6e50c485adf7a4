"""What the numbers were measured on."""

import os
import shutil
import subprocess
from pathlib import Path

from streamload.bench.machine import describe

__all__ = ["commit", "describe", "load"]


def load() -> float:
    """Processes that ran or wanted to, in the mean of the last minute."""
    return os.getloadavg()[0]


def commit() -> str | None:
    """The commit whose code runs, with "+" where files that it has were changed; None outside a clone."""
    here = Path(__file__).parents[1]
    if not (here / ".git").exists() or shutil.which("git") is None:
        return None
    question = ["git", "-C", here, "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(question, capture_output=True, text=True, check=False).stdout.strip() or None
