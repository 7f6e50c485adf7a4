"""The documents tell the truth: what they name is there, and their code can be run as it stands."""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import streamload.errors
from streamload.cli import app
from streamload.options import options

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md"))
    if path.is_file() and "_build" not in path.parts
)
COMMANDS = {command.callback.__name__ for command in app.registered_commands} | {
    group.name for group in app.registered_groups
}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def per_page(test):
    return pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))(test)


@per_page
def test_every_link_to_a_file_leads_to_one(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", without_blocks(page)):
        if "://" not in target:
            there = page.parent / target if target else page
            assert there.exists(), target
            if anchor and "generated:" not in there.read_text():
                assert anchor in anchors(there), f"{target}#{anchor}"


def without_blocks(page):
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """Of the headings, as GitHub and the site name them; of a page that includes another: of that one."""
    included = re.search(r"^```{include} (.+)$", page.read_text(), re.MULTILINE)
    headings = re.findall(
        r"^#+ (.+)$", without_blocks(page.parent / included[1] if included else page), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@per_page
def test_every_python_file_that_is_named_is_there(page):
    for name in re.findall(
        r"`((?:streamload|tests|examples|benchmarks|docker|deploy)/[\w/.-]+)`", page.read_text()
    ):
        assert (ROOT / name).exists(), name


@per_page
def test_python_blocks_can_be_parsed_and_use_public_names(page):
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("streamload"):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "streamload"
            ):
                assert hasattr(importlib.import_module("streamload"), node.attr), node.attr


GROUPS = ("make_loader", "Shards", "Images", "Order", "Cache", "Workers", "Patches", "Features")
TAKEN = {name: set(inspect.signature(getattr(streamload, name)).parameters) for name in (*GROUPS, "Source")}


@per_page
def test_python_blocks_give_only_arguments_that_exist(page):
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).rpartition(".")[2]
                given = {keyword.arg for keyword in node.keywords if keyword.arg}
                assert given <= TAKEN.get(name, given), ast.unparse(node)


@per_page
def test_every_command_and_target_that_is_named_exists(page):
    text = page.read_text()
    code = "\n".join(re.findall(r"`([^`\n]+)`", text) + blocks(page, "(?:bash|sh|console|text)?"))
    named = re.findall(r"^(?:\$ )?(?:\.venv/bin/)?streamload ([a-z]+)", code, re.MULTILINE)
    assert set(named) <= COMMANDS
    assert set(re.findall(r"^(?:\$ )?make ([a-z-]+)", code, re.MULTILINE)) <= TARGETS


def test_the_readme_is_short_and_names_both_commands():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 150
    for needed in ("make demo", "make test", "docs/architecture.md"):
        assert needed in readme


def test_a_guide_has_at_most_150_lines():
    for path in (ROOT / "docs/guides").iterdir():
        assert len(path.read_text().splitlines()) <= 150, path.stem


def test_every_page_is_in_the_contents():
    listed = set(re.findall(r"^[a-z]+[\w/-]*$", (ROOT / "docs/index.md").read_text(), re.MULTILINE))
    there = {
        path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")
    }
    assert {name for name in there if not name.startswith("_build")} == listed | {"index"}


UNDESCRIBED = {"### `unknown`", "### `rank`", "### `world_size`"}
"""Refused, or described together."""


@pytest.fixture(scope="module")
def generated():
    """The reference pages by name, as the site has them."""
    spec = importlib.util.spec_from_file_location("generated", ROOT / "docs/generated.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pages = {path.stem: module.MARK.findall(path.read_text()) for path in (ROOT / "docs/reference").iterdir()}
    assert {name: marks for name, marks in pages.items() if marks} == {name: [name] for name in module.PARTS}
    return {name: part() for name, part in module.PARTS.items()}


def test_the_reference_is_complete(generated):
    errors = {
        name
        for name, value in vars(streamload.errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    for page, names in {
        "arguments": {f"### `{name}`" for group in GROUPS for name in TAKEN[group]} - UNDESCRIBED,
        "variables": {option.variable for option in options()},
        "commands": {f"streamload {command}" for command in COMMANDS},
        "stats": {f"`{field.name}`" for field in dataclasses.fields(streamload.Snapshot)},
        "errors": {f"`{name}`" for name in errors},
        "loader": {"state_dict", "load_state_dict", "set_epoch", "set_weights", "stats", "close"},
    }.items():
        assert not {name for name in names if name not in generated[page]}, page


def test_the_reference_says_what_each_of_its_rows_means(generated):
    for page, text in generated.items():
        assert not re.search(r"\|  \|$", text, re.MULTILINE), page


def test_make_help_lists_every_target_that_the_readme_names():
    shown = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    for target in set(re.findall(r"make ([a-z]+)", (ROOT / "README.md").read_text())):
        assert f"{target} " in shown


@pytest.mark.parametrize("url", ["", "https://host/files"])
def test_the_readme_of_a_wheel_has_no_link_that_leads_nowhere(url, tmp_path):
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    command = [sys.executable, ROOT / ".ci" / "readme.py", tmp_path, *([f"{url}/"] if url else [])]
    subprocess.run(command, check=True, timeout=60)
    before, readme = (folder / "README.md" for folder in (ROOT, tmp_path))
    targets = re.findall(r"\]\(([^)]+)\)", readme.read_text())
    assert all(target.startswith(("https://", "#")) for target in targets)
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", before.read_text())
    assert pictures
    assert re.findall(r"!\[[^\]]*\]\(([^)]+)\)", readme.read_text()) == [
        f"{url}/{picture}" for picture in pictures if url
    ]
    named = re.findall(r'^[A-Z]\w+ = "(.*)"$', (tmp_path / "pyproject.toml").read_text(), re.MULTILINE)
    assert [name for name in named if "://" in name] == (
        [url, f"{url}/docs", f"{url}/CHANGELOG.md"] if url else []
    )


def test_times_are_written_into_the_rows_of_their_targets_until_one_fails(tmp_path):
    page = tmp_path / "CONTRIBUTING.md"
    before = shutil.copy(ROOT / "CONTRIBUTING.md", page).read_text().splitlines()
    (tmp_path / "Makefile").write_text("test:\n\t@sleep 0.6\ndeep:\n\t@false\ndemo:\n\t@true\n")
    identity = ["-c", "user.name=tests", "-c", "user.email=tests@example.com"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "all"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    command = [sys.executable, ROOT / ".ci" / "times.py"]
    assert subprocess.run([*command, "demo", "nothing"], cwd=tmp_path, check=False).returncode == 1
    assert page.read_text().splitlines() == before
    assert subprocess.run([*command, "test", "deep", "demo"], cwd=tmp_path, check=False).returncode == 1
    ((old, new),) = [
        pair for pair in zip(before, page.read_text().splitlines(), strict=True) if len({*pair}) > 1
    ]
    assert old.rsplit("|", 2)[0] == new.rsplit("|", 2)[0]
    assert old.startswith("| `make test` |")
    assert re.fullmatch(r" \d+ s \(\d+ cores, \d{4}-\d\d-\d\d, [0-9a-f]{7,}\) ", new.split("|")[-2])


@pytest.mark.parametrize("command", [("quick.py", "main"), ("times.py", "demo")])
def test_what_asks_git_shows_why_it_refuses_a_clone(command, tmp_path):
    """As it does the clone of another user, before anything is run."""
    (tmp_path / "CONTRIBUTING.md").write_text("| `make demo` | trains | |\n")
    (tmp_path / "Makefile").write_text("demo:\n\t@touch made\n")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    refused = {"GIT_TEST_ASSUME_DIFFERENT_OWNER": "1", "GIT_CONFIG_GLOBAL": "/dev/null"}
    script, *arguments = command
    result = subprocess.run(
        [sys.executable, ROOT / ".ci" / script, *arguments],
        cwd=tmp_path,
        env={**os.environ, **refused, "GIT_CONFIG_SYSTEM": "/dev/null"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "safe.directory" in result.stderr
    assert "git " in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "made").exists()


def test_ci_calls_make_test_and_make_deep():
    assert re.findall("^make (.*)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE) == ["test", "deep"]
    assert subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=False).returncode == 0


def test_the_pins_name_no_place_and_hold_every_direct_dependency():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r'[\w.-]+==[\w.]+( ; python_version >= "3\.\d+")?', pin) for pin in pins)
    project = (ROOT / "pyproject.toml").read_text()
    direct = re.findall(r'^    "([a-z0-9-]+)(?:\[[a-z,]+\])?>=', project, re.MULTILINE)
    pinned = {line.partition("==")[0].lower() for line in pins}
    assert {name for name in direct if name != "streamload"} <= pinned
    assert len(direct) > 15


MODULES = sorted((ROOT / "streamload").rglob("*.py"))


def test_every_module_that_code_names_is_there():
    folders = [ROOT / name for name in ("streamload", "tests", "benchmarks", "examples")]
    there = [path.as_posix() for folder in folders for path in folder.rglob("*.py")]
    for path in MODULES:
        for name in re.findall(r"(?<![\w/.-])((?:\w+/)*[a-z]\w*\.py)\b", path.read_text()):
            assert any(one.endswith(f"/{name}") for one in there), f"{path.name}: {name}"


def test_docstrings_describe_arguments_that_exist():
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                described = arguments_described(ast.get_docstring(node) or "")
                assert described <= arguments_of(node), f"{path.name}: {node.name}"


def arguments_described(docstring):
    section = re.search(r"^Args:\n((?: +.*\n?|\n)*)", docstring, re.MULTILINE)
    names = re.findall(r"^    ([a-z_*][\w*, ]*):", section[1], re.MULTILINE) if section else []
    return {name.strip("* ") for several in names for name in several.split(",")}


def arguments_of(node):
    """Of a function, or of a class: of its constructor, or its fields."""
    if isinstance(node, ast.ClassDef):
        fields = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign)}
        made_by = [one for one in node.body if getattr(one, "name", "") == "__init__"]
        return fields.union(*map(arguments_of, made_by))
    given = node.args
    several = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return {one.arg for one in several if one is not None}
