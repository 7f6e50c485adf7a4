"""llms.txt and the Markdown beside it: every page of the site, in its order, with what is generated."""

import importlib.util
import posixpath
import re
import sys
from pathlib import Path

import pytest

from streamload import make_loader

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def files():
    """What is written beside the site, by path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        spec = importlib.util.spec_from_file_location("llms", DOCS / "llms.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module.files()
        sys.modules.pop("generated", None)


def listed():
    """The pages in the contents of index.md, in their order."""
    contents = re.findall(r"^```\{toctree\}\n(.*?)^```", (DOCS / "index.md").read_text(), re.M | re.S)
    return [name for block in contents for name in re.findall(r"^[a-z][\w/-]*$", block, re.MULTILINE)]


def test_every_page_has_a_line_with_its_title_and_a_sentence(files):
    lines = re.findall(r"^- \[(.+)\]\((.+)\.md\): (.+)$", files["llms.txt"], re.MULTILINE)
    names = [name for _, name, _ in lines]
    assert sorted(names) == sorted(listed())
    assert names.index("reference/arguments") < names.index("architecture")
    assert len(lines) == files["llms.txt"].count("\n- ")
    for title, name, said in lines:
        assert files[f"{name}.md"].lstrip().startswith(f"# {title}\n"), name
        assert len(said) > 20
        assert re.match("[A-Z`]|streamload ", said), f"{name} begins in mid-sentence: {said}"
        assert not re.search(r"\]\(|<!--|\*\*", said), name
    assert re.match(r"# streamload\n\n> streamload is a PyTorch loader .*\.\n", files["llms.txt"])


def test_pages_link_to_one_another_and_have_their_generated_parts(files):
    for name, text in files.items():
        assert "<!--" not in text, name
        assert "see it in the site" not in text, name
        prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)\s:#]+)(?:#[^)\s]*)?\)", prose):
            assert posixpath.normpath(posixpath.join(posixpath.dirname(name), target)) in files, (
                f"{name}: {target}"
            )
    assert "[Resume](guides/resume.md)" in files["llms-full.txt"]
    assert "[Resume](resume.md)" in files["guides/getting-started.md"]
    assert "first batches (examples/notebooks/first_batches.ipynb)" in files["guides/getting-started.md"]
    assert "](reference/urls.md#s3)" in files["llms-full.txt"]


def test_one_file_has_the_guides_and_the_whole_reference(files):
    full = files["llms-full.txt"]
    for argument in make_loader.__annotations__:
        if argument not in ("return", "unknown"):
            assert f"### `{argument}" in full, argument
    for heading in ("# Get started", "## streamload doctor", "## show", "# Errors", "## In a notebook"):
        assert f"\n{heading}\n" in f"\n{full}", heading
    assert "# Changelog" not in full
    assert 100_000 < len(full) < 1_000_000
