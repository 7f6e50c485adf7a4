"""What is published: the rules of .ci/release.py, a build that must have its C code, and files for a host."""

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture
def release(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def elf(machine):
    return b"\x7fELF" + bytes(14) + machine.to_bytes(2, "little") + bytes(44)


def wheel(folder, **changes):
    """A wheel with what one for aarch64 must have, but for some members."""
    members = {
        "streamload/py.typed": b"",
        "streamload/transforms/_avx2.abi3.so": elf(183),
        "streamload/transforms/_before.abi3.so": elf(183),
        **changes,
    }
    with zipfile.ZipFile(path := folder / "one.whl", "w") as archive:
        for name, data in members.items():
            if data is not None:
                archive.writestr(name, data)
    return path


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("streamload/transforms/_avx2.abi3.so", None, "_avx2.abi3.so is missing"),
        ("streamload/transforms/_before.abi3.so", elf(62), "isn't for aarch64"),
        ("streamload/transforms/_avx2.abi3.so", b"a script", "isn't for aarch64"),
        ("streamload/py.typed", None, "py.typed is missing"),
        ("streamload/transforms/_neon.h", b"", "_neon.h is for building alone"),
    ],
)
def test_a_wheel_that_lacks_something_or_has_too_much_is_no_release(release, tmp_path, name, data, words):
    assert list(release.problems(wheel(tmp_path), "aarch64")) == []
    (problem,) = release.problems(wheel(tmp_path, **{name: data}), "aarch64")
    assert words in problem


@pytest.mark.parametrize(
    ("tag", "changelog", "words"),
    [
        ("v1.2.3", "## [Unreleased]\n\n## [1.2.3] - 2027-01-01\n", ""),
        ("v1.2.3", "## [Unreleased]\n", ""),  # the first release
        ("1.2.3", "## [1.2.3] - 2027-01-01\n", "expected v1.2.3"),
        ("v1.2.4", "## [1.2.4] - 2027-01-01\n", "expected v1.2.3"),
        ("v1.2.3", "## [Unreleased]\n\n## [1.2.2] - 2027-01-01\n", r"no section \[1.2.3\]"),
    ],
)
def test_a_tag_is_the_version_of_the_project_and_of_a_section_of_the_changelog(
    release, tmp_path, monkeypatch, tag, changelog, words
):
    monkeypatch.setattr(release, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "streamload"\nversion = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(changelog)
    if words:
        with pytest.raises(SystemExit, match=words):
            release.tag(tag)
    else:
        release.tag(tag)


def test_the_version_is_said_in_one_place(release):
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    release.tag(f"v{version}")
    assert "version:" not in (ROOT / "CITATION.cff").read_text().replace("cff-version:", "")
    said = [path for path in (ROOT / "streamload").rglob("*.py") if f'"{version}"' in path.read_text()]
    assert not said


def test_the_oldest_dependencies_are_the_bounds_of_the_metadata_without_extras(release, tmp_path):
    metadata = "Name: a\nRequires-Dist: torch>=2.7\nRequires-Dist: s3fs>=2025.3.2; extra == 's3'\n"
    metadata = metadata.replace("'", '"')
    path = wheel(tmp_path, **{"a-1.dist-info/METADATA": metadata.encode()})
    assert release.oldest(path) == ["torch==2.7"]


def test_every_dependency_has_one_bound_below_so_that_the_oldest_can_be_tried():
    project = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)[1]
    lines = listed.strip().splitlines()
    assert len(lines) > 8
    assert all(re.fullmatch(r'\s*"[\w-]+>=[\d.]+",', line) for line in lines), lines


@pytest.mark.parametrize("is_required", [True, False])
def test_a_build_without_a_compiler_fails_if_the_c_code_is_required(is_required, tmp_path):
    environ = {**os.environ, "CC": "false", "STREAMLOAD_REQUIRE_KERNEL": "1" if is_required else ""}
    folders = ["--build-lib", tmp_path / "lib", "--build-temp", tmp_path / "temp"]
    command = [sys.executable, "setup.py", "--quiet", "build_ext", *folders]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert bool(done.returncode) is is_required, done.stderr
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_pins_actions_by_major_version_and_calls_what_there_is(path):
    text = path.read_text()
    used = re.findall(r"uses: (\S+)@(\S+)", text)
    assert used
    assert all(re.fullmatch(r"v\d+|release/v\d+", version) for _, version in used), used
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"run: make ([a-z-]+)", text)) <= targets
    for command in re.findall(r"run: (?:python )?(\.ci/\S+)", text):
        assert (ROOT / command).is_file(), command
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    assert "secrets." not in text
    rights = {name: job["permissions"] for name, job in workflow["jobs"].items() if "permissions" in job}
    assert rights == ({"publish": {"id-token": "write"}} if path.stem == "publish" else {})


def test_what_is_published_was_tried_on_both_processors_before():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "publish.yml").read_text())["jobs"]
    assert jobs["publish"]["needs"] == "build"
    assert len(jobs["build"]["strategy"]["matrix"]["runner"]) == 2


def test_the_report_of_a_bug_needs_what_doctor_prints():
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    (doctor,) = (
        field for field in form["body"] if "streamload doctor --json" in field["attributes"]["label"]
    )
    assert doctor["validations"]["required"]


@pytest.mark.parametrize("name", [".readthedocs.yaml", ".github/dependabot.yml", "CITATION.cff"])
def test_what_a_host_reads_names_files_that_are_there(name):
    text = (ROOT / name).read_text()
    assert yaml.safe_load(text)
    for path in re.findall(r"(?: |- )(?:configuration|requirements|directory): /?(\S*)$", text, re.MULTILINE):
        assert (ROOT / path).exists(), path
