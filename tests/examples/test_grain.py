"""examples/grain_source.py: a loader as a source of grain, with its state."""

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from streamload.testing.shards import read_oracle, write_shards

EXAMPLE = Path(__file__).parents[2] / "examples" / "grain_source.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    pytest.importorskip("grain", reason="grain needs Python 3.11")
    spec = importlib.util.spec_from_file_location("grain_source", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_shards(tmp_path_factory.mktemp("shards"), [12, 9, 11], seed=5)


def texts(documents: Any) -> list[bytes]:
    return [bytes(document["input_ids"].astype("uint8")) for document in documents]


def test_every_document_comes_once(example: ModuleType, shards: list[Path], tmp_path: Path) -> None:
    source = iter(example.documents(str(shards[0].parent), str(tmp_path), 2))
    found = Counter(texts(source))
    source.close()
    assert found == Counter(sample["txt"][:-1] for path in shards for _, sample in read_oracle(path))


def test_a_state_at_every_document_restores_the_rest(
    example: ModuleType, shards: list[Path], tmp_path: Path
) -> None:
    urls = str(shards[0].parent)
    source = iter(example.documents(urls, str(tmp_path), 0))
    states, whole = [source.get_state()], []
    for document in source:
        whole.append(document)
        states.append(json.loads(json.dumps(source.get_state())))
    whole = texts(whole)
    other = iter(example.documents(urls, str(tmp_path / "other"), 0))
    for place in [*range(len(states)), 3]:  # the last again: an iterator that is in use goes back
        other.set_state(states[place])
        assert texts([next(other) for _ in whole[place : place + 3]]) == whole[place : place + 3]
    source.close()
    other.close()


def test_packed_rows_continue_on_other_workers(
    example: ModuleType, shards: list[Path], tmp_path: Path
) -> None:
    def rows(cache: str, workers: int) -> Any:
        return iter(
            example.packed(example.documents(str(shards[0].parent), str(tmp_path / cache), workers), 128)
        )

    first = rows("cache", 0)
    used = [example.digest(next(first)) for _ in range(4)]
    state = json.dumps(first.get_state())
    rest = [example.digest(row) for row in first]
    resumed = rows("other", 2)
    resumed.set_state(json.loads(state))
    assert [example.digest(row) for row in resumed] == rest
    assert len(rest) > 4
    assert not set(used) & set(rest)
    first.close()
    resumed.close()


@pytest.mark.deep
def test_the_example_runs_as_it_stands() -> None:
    pytest.importorskip("grain", reason="grain needs Python 3.11")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("20 after the state: the same\n")
