"""What the numbers were measured on."""

import os
import shutil
import subprocess
from pathlib import Path

from streamload.profile.machine import describe

__all__ = ["commit", "describe", "load", "why_not_repeatable"]


def load() -> float:
    """Processes that ran or wanted to, in the mean of the last minute."""
    return os.getloadavg()[0]


def commit(here: Path = Path(__file__).parents[1]) -> str | None:
    """The commit whose code runs, with "+" where files that it has were changed; None outside a clone.

    Results don't count: each benchmark of a series changes its own.
    """
    if not (here / ".git").exists() or shutil.which("git") is None:
        return None
    question = ["git", "-C", here, "rev-parse", "--short", "HEAD"]
    name = subprocess.run(question, capture_output=True, text=True, check=False).stdout.strip()
    if not name:
        return None
    differs = ["git", "-C", here, "diff", "--quiet", "HEAD", "--", ".", ":(exclude)benchmarks/results"]
    return f"{name}+" if subprocess.run(differs, check=False).returncode else name


def why_not_repeatable() -> str:
    """Return why nobody could measure the code that runs again, "" if a commit has it."""
    name = commit()
    if name is None:
        return "this is no clone with a commit"
    return f"files differ from {name[:-1]}" if name.endswith("+") else ""
