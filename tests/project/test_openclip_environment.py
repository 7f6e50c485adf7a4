"""An installation beside open_clip, which needs an older webdataset, changes nothing that is there."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "open_clip", reason="open_clip is not in this environment; `make pytest-openclip` runs these tests"
)
ROOT = Path(__file__).parents[2]


def test_pip_would_install_streamload_alone(tmp_path):
    assert importlib.metadata.version("webdataset").startswith("0.2.")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(
        ROOT / "streamload", tmp_path / "streamload", ignore=shutil.ignore_patterns("__pycache__")
    )
    options = [
        "--dry-run",
        "--quiet",
        "--no-index",
        "--no-build-isolation",
        "--report",
        tmp_path / "report.json",
    ]
    command = [sys.executable, "-m", "pip", "install", *options, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert [package["metadata"]["name"] for package in report["install"]] == ["streamload"]
