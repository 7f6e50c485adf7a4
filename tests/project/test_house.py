"""The modules that a batch of a loader without options runs, and the architecture page, which has them."""

import ast
import collections
import fnmatch
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from streamload.testing.server import ShardServer
from streamload.testing.shards import write_shards

ROOT = Path(__file__).parents[2]
MOST = {"warm": 37, "cold": 85}
"""Modules that such a batch runs. They may only fall: lower them with the count."""
SLACK = 3
"""How far a count may be below: what runs in a batch depends on when bytes arrive."""


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    return min((traced(tmp_path_factory.mktemp("plain")) for _ in range(2)), key=lambda run: len(run["cold"]))


def traced(folder):
    """The modules of a run; a second one has less where the first had to wait on a busy machine."""
    write_shards(folder / "shards", [60, 60, 60])
    with ShardServer(folder / "shards") as server:
        command = [sys.executable, "-m", "tests.support.traced", f"{server.url}/{{00000..00002}}.tar", folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", MOST)
def test_a_plain_batch_runs_no_more_modules_than_it_did(modules, kind):
    count = len(modules[kind])
    assert MOST[kind] - SLACK <= count <= MOST[kind], "\n".join(modules[kind])


@pytest.mark.deep
def test_the_command_that_prints_the_figures_counts_as_the_import_contract_and_this_file_do():
    done = subprocess.run(
        [sys.executable, ".ci/house.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "imports from the kernel into features: 0\n" in done.stdout
    warm, cold = map(int, re.search(r"warm / cold: (\d+) / (\d+)\n", done.stdout).groups())
    assert warm <= MOST["warm"]
    assert cold <= MOST["cold"]


@pytest.mark.parametrize("kind", ["imported", "spawned"])
def test_a_plain_loader_imports_no_feature_and_neither_does_its_worker(modules, kind):
    project = (ROOT / "pyproject.toml").read_text()
    protected = re.search(r"^protected_modules = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)[1]
    features = {name for name in re.findall(r'"([\w.*]+)"', protected) if ".observe" not in name}
    assert {"streamload.derived.**", "streamload.facts"} <= features
    assert "streamload.cache.tier" in modules[kind]
    loaded = [name for name in modules[kind] if any(fnmatch.fnmatch(name, pattern) for pattern in features)]
    assert not loaded


def test_a_spawned_worker_imports_nothing_of_the_loader(modules):
    assert "streamload.loader.pool" in modules["imported"]
    of_the_rank = ("streamload.loader", "streamload.observe.observer", "streamload.ranks")
    assert not [name for name in modules["spawned"] if name.startswith(of_the_rank)]


@pytest.fixture(scope="module")
def page():
    return (ROOT / "docs" / "architecture.md").read_text()


def listed(cells):
    """The modules and the folders that cells of the page name."""
    names = set(re.findall(r"`([\w/.]+)`", "".join(cells)))
    return {name for name in names if name.endswith(".py")}, {name for name in names if name.endswith("/")}


def test_the_journey_on_the_page_is_that_of_a_batch(modules, page):
    made, cold, warm = (set(modules[kind]) for kind in ("made", "cold", "warm"))
    rows = re.findall(r"^\| ([A-L]) \| [^|]+ \| ([^|]*) \| ([^|]*) \|$", page, re.MULTILINE)
    assert [letter for letter, *_ in rows] == list("ABCDEFGHIJKL")
    for_each, no_folders = listed([each for _, each, _ in rows])
    before, folders = listed([first for *_, first in rows])
    in_folders = {name for name in made | cold for folder in folders if name.startswith(folder)}
    assert not no_folders
    assert all(any(name.startswith(folder) for name in in_folders) for folder in folders)
    assert not for_each & before
    assert not warm - for_each - before - in_folders
    assert not for_each - warm - cold
    assert len((made | cold) - for_each - before - in_folders) <= SLACK, (made | cold) - for_each - before
    assert len(before - made - cold) <= SLACK, before - made - cold


def test_the_objects_of_a_run_on_the_page_are_where_it_says(page):
    rows = re.findall(r"^\| `(\w+)` \(`(loader/\w+\.py)`\) \|", page, re.MULTILINE)
    assert len(rows) == 8
    for name, path in rows:
        assert re.search(rf"^class {name}\b", (ROOT / "streamload" / path).read_text(), re.MULTILINE), name


def test_the_rooms_on_the_page_are_those_of_the_import_contract(page):
    project = (ROOT / "pyproject.toml").read_text()
    contract = re.search(r'name = "Imports go down only".*?layers = (\[.*?\])', project, re.DOTALL)
    layers = [set(re.findall(r"\w+", layer)) for layer in ast.literal_eval(contract[1])]
    drawing = re.search(r"^## The rooms\n.*?```text\n(.*?)```", page, re.MULTILINE | re.DOTALL)
    drawn = [set(re.findall(r"\w+", line.partition("   ")[0])) for line in drawing[1].splitlines()]
    assert [{"__main__"}, *drawn] == layers


def test_a_class_name_has_one_meaning():
    places = collections.defaultdict(list)
    for path in (ROOT / "streamload").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.name)
    several = {name for name, files in places.items() if len(files) > 1}
    assert several <= {"LoaderMetrics"}, several  # one in each integration
