"""examples/notebooks: each runs to its last cell in a kernel of its own, and shows what it promises."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NAMES = ("features_once", "first_batches", "seeing_a_run")
EXECUTE = "from nbclient.cli import main; main()"


def code_of(path: Path) -> list[Any]:
    return [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]


def executed(name: str, folder: Path) -> list[Any]:
    """The cells of code with their outputs."""
    out = folder / f"{name}.ipynb"
    places = {"IPYTHONDIR": "ipython", "JUPYTER_CONFIG_DIR": "config", "JUPYTER_RUNTIME_DIR": "runtime"}
    here = {variable: str(folder / place) for variable, place in places.items()}
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, f"--output={out}", "--timeout=120", str(FOLDER / f"{name}.ipynb")],
        env={**os.environ, **here, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return code_of(out)


def outputs(cells: list[Any], kind: str) -> list[str]:
    """What cells showed of a kind: "stdout", "stderr", or a type of data, in order."""
    found = [output for cell in cells for output in cell.outputs]
    if kind in ("stdout", "stderr"):
        return [output.text for output in found if output.output_type == "stream" and output.name == kind]
    return [output.data[kind] for output in found if kind in output.get("data", {})]


def test_every_notebook_is_valid_is_committed_without_outputs_and_is_tested() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(NAMES)
    for name in NAMES:
        text = (FOLDER / f"{name}.ipynb").read_text()
        nbformat.validate(json.loads(text))
        for cell in code_of(FOLDER / f"{name}.ipynb"):
            assert (cell.outputs, cell.execution_count) == ([], None)
            ast.parse(cell.source)


def test_features_are_computed_once(tmp_path: Path) -> None:
    said = "".join(outputs(executed("features_once", tmp_path), "stdout"))
    assert [line.rpartition(",")[0] for line in said.split("\n")[:3]] == [
        "epoch 0: 0 rows read, 256 computed",
        "epoch 1: 256 rows read, 0 computed",
        "epoch 2: 256 rows read, 0 computed",
    ]


@pytest.mark.deep
def test_first_batches_come_before_the_shards_and_are_shown(tmp_path: Path) -> None:
    cells = executed("first_batches", tmp_path)
    assert outputs(cells, "stderr") == []
    said = "".join(outputs(cells, "stdout"))
    assert "0 of 4 shards are complete" in said
    assert "37 batches, then 37 from the cache" in said
    before, grid, after = outputs(cells, "text/html")
    assert "no batch was taken yet" in before
    assert grid.count('src="data:image/jpeg') == 8
    assert "<dt>samples</dt><dd>2,368</dd>" in after


@pytest.mark.deep
def test_a_run_is_seen_as_a_grid_a_course_of_waits_and_a_report(tmp_path: Path) -> None:
    cells = executed("seeing_a_run", tmp_path)
    card, grid, verdict, report = outputs(cells, "text/html")
    assert "<dt>unusable samples</dt><dd>8</dd>" in card
    assert grid.count('src="data:image/jpeg') == 8
    assert "<dt>samples/s</dt>" in verdict
    assert len(outputs(cells, "image/png")) == 1
    assert "Unusable samples" in report
    assert report.count("data:image/jpeg") == 4
    assert "epoch 1" in report
    assert all("could not be" in text for text in outputs(cells, "stderr"))
