"""The Python in README and docs that is marked to run, runs: each block in a directory of its own."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUNNABLE = re.compile(r"^<!-- run -->\n```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks():
    for page in PAGES:
        text = page.read_text()
        for found in RUNNABLE.finditer(text):
            line = text.count("\n", 0, found.start(1)) + 1
            yield pytest.param(page, line, found[1], id=f"{page.relative_to(ROOT)}:{line}")


@pytest.mark.parametrize(("page", "line", "source"), list(blocks()))
def test_a_block_runs_as_it_stands(page, line, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STREAMLOAD_CACHE_SIZE", "50GB")
    placed = "\n" * (line - 1) + source  # so that an error names the line of the page
    exec(compile(placed, str(page), "exec"), {"__name__": "__main__"})


def test_the_pages_with_python_of_their_own_have_a_block_that_runs():
    guides = [
        f"guides/{name}"
        for name in ("getting-started", "samples", "making-shards", "mixing", "batches", "testing")
    ]
    for name in (*guides, "reference/caching", "reference/prepared-images", "reference/mixing"):
        assert RUNNABLE.search((ROOT / "docs" / f"{name}.md").read_text()), name
