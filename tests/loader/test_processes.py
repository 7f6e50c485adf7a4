"""Processes that can't have workers, and scripts that start them when a worker imports them: what is said."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

import streamload
from streamload.testing.shards import write_shards

UNGUARDED = """
import sys
import streamload

workers = streamload.Workers(multiprocessing_context="spawn")
url, cache_dir = sys.argv[1:]
loader = streamload.make_loader(url, batch_size=4, num_workers=1, cache_dir=cache_dir, workers=workers)
for batch in loader:
    pass
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("shards")
    write_shards(directory, [8])
    return f"{directory}/00000.tar"


FROM_STDIN = """
import sys, streamload
if __name__ == "__main__":
    workers = streamload.Workers(multiprocessing_context="forkserver")
    next(iter(streamload.make_loader(sys.argv[1], num_workers=1, cache_dir=sys.argv[2], workers=workers)))
"""


def iterate(url: str, cache: str, workers: int, answers: multiprocessing.Queue[str]) -> None:
    try:
        with streamload.make_loader(url, batch_size=4, num_workers=workers, cache_dir=cache) as loader:
            answers.put(str(sum(len(images) for images, _ in loader)))
    except Exception as exc:
        answers.put(f"{type(exc).__name__}: {exc}")


@pytest.mark.parametrize(
    ("workers", "answer"),
    [(0, "8"), (2, "OptionError: num_workers=2 in a daemonic process")],
)
def test_a_daemonic_process_is_told_to_have_no_workers(
    workers: int, answer: str, shards: str, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[str] = context.Queue()
    process = context.Process(target=iterate, args=(shards, str(tmp_path), workers, answers), daemon=True)
    process.start()
    said = answers.get(timeout=60)
    process.join()
    assert said.startswith(answer)
    assert workers == 0 or "give make_loader num_workers=0" in said


@pytest.mark.deep
def test_a_script_without_a_main_guard_is_told_where_it_belongs(shards: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNGUARDED)
    command = [sys.executable, str(script), shards, str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    of_worker, of_training = (
        line for line in done.stderr.splitlines() if line.startswith("streamload.errors")
    )
    assert "OptionError: a worker that was started by 'spawn' imports the main script" in of_worker
    assert "WorkerDied" in of_training
    for said in (of_worker, of_training):
        assert 'put all that runs the training under `if __name__ == "__main__":`' in said


def test_a_script_from_stdin_is_told_to_be_a_file_where_workers_import_it(
    shards: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-", shards, str(tmp_path / "cache")]
    done = subprocess.run(command, input=FROM_STDIN, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert "a script from stdin can't be imported: write the script to a file" in said
