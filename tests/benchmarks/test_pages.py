"""Pages and charts of results: written from the committed JSON, between their marks."""

import argparse
import re
import shutil
from pathlib import Path

import pytest

from benchmarks import overview, provenance, report, shuffle_report
from benchmarks.markdown import figure_sources, filled, with_figures
from benchmarks.turns import RESULTS, ROOT


def test_the_pages_and_charts_show_the_results_that_are_committed(tmp_path: Path) -> None:
    pages = [Path(shutil.copy(page, tmp_path / "-".join(page.parts[-2:]))) for page in report.PAGES]
    images = tmp_path / "images"
    report.write(argparse.Namespace(results=RESULTS, pages=pages, images=images))
    for page, written in zip(report.PAGES, pages, strict=True):
        assert page.read_text() == written.read_text(), page.name
    written_images = {path.name for path in images.iterdir()}
    # The one that shuffle_report writes is compared in tests/benchmarks/test_shuffle.py.
    assert written_images | {shuffle_report.CHART.name} == {path.name for path in report.IMAGES.iterdir()}
    for image in images.iterdir():
        assert (report.IMAGES / image.name).read_text() == image.read_text(), image.name


def test_tables_go_between_their_marks_and_nothing_else_changes() -> None:
    page = "before\n<!-- warm -->\nlast year\n<!-- /warm -->\nafter\n<!-- cold -->\n<!-- /cold -->\n"
    assert filled(page, {"warm": "| new |"}) == page.replace("last year", "| new |")


def test_figures_of_sentences_are_those_of_their_places_in_the_results() -> None:
    results = {"warm": {"medians": {"a, b": {"rate": 1234.5}}, "rounds": [{"us": 10}, {"us": 40}]}}
    page = "x <!-- = warm → medians → a, b → rate | ,.0f -->?<!-- /= -->"
    page += ", <!-- = warm → rounds → -1 → us -->?<!-- /= -->"
    written = with_figures(page, results)
    assert re.sub("<!--.*?-->", "", written) == "x 1,234, 40"
    assert with_figures(written, results) == written
    ratio = "is <!-- = warm → rounds → -1 → us − warm → rounds → 0 → us ÷ 15 | .1f -->2<!-- /= --> ×"
    assert re.sub("<!--.*?-->", "", with_figures(ratio, results)) == "is 2.0 ×"
    assert figure_sources(page + ratio + "a <!-- = cold → date -->?<!-- /= -->") == {"warm", "cold"}
    with pytest.raises(KeyError, match="medain"):
        with_figures("x <!-- = warm → medain -->?<!-- /= -->", results)


def test_no_line_of_a_page_begins_with_the_mark_of_a_figure() -> None:
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")):
        assert not re.search(r"^\W*<!-- /?= ", page.read_text(), re.MULTILINE), page.name


MOST_TO_MEASURE_AGAIN = 22
"""May only fall: lower it with the list."""


def test_each_result_says_its_commit_machine_and_date_or_is_to_be_measured_again() -> None:
    lacking = {
        name: missing for name, each in provenance.read_all().items() if (missing := provenance.lacks(each))
    }
    unlisted = lacking.keys() - provenance.TO_MEASURE_AGAIN
    assert not unlisted, {name: lacking[name] for name in unlisted}
    if provenance.is_history_whole():
        assert not provenance.TO_MEASURE_AGAIN - lacking.keys()
    assert len(provenance.TO_MEASURE_AGAIN) <= MOST_TO_MEASURE_AGAIN


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({"commit": None}, "the commit"),
        ({"commit": "{head}+"}, "a clean tree"),
        ({"commit": "0123456789"}, "a commit of this history"),
        ({"commit": "main"}, "a commit: 'main'"),
        ({"date": ""}, "the date"),
        ({"machine": None}, "the machine"),
        ({"store": {"date": "2026-11-27", "commit": "{head}+"}}, "a clean tree"),
        ({"rows": [{"date": "2026-11-27"}]}, "the commit (in rows)"),
    ],
)
def test_a_row_of_the_readme_is_refused_where_its_result_does_not_say_where_it_comes_from(
    change, missing
) -> None:
    if not provenance.is_history_whole():
        pytest.skip("this clone has not its whole history")
    results = {name: each for name, each in provenance.read_all().items() if name in overview.NEEDED}
    whole = {**results["half"], "commit": provenance.head()}
    assert overview.beside({**results, "half": whole}) == overview.beside(results)
    changed = {
        part: value.format(head=provenance.head()) if isinstance(value, str) else value
        for part, value in change.items()
    }
    if "store" in changed:
        changed["store"]["commit"] = changed["store"]["commit"].format(head=provenance.head())
    with pytest.raises(provenance.Unproven, match=re.escape(missing)):
        overview.beside({**results, "half": {**whole, **changed}})


def test_a_result_is_old_after_many_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_positions", lambda: {f"{age:040x}": age for age in range(500)})
    results = {str(age): {"commit": f"{age:040x}"} for age in (0, 400, 401)}
    assert provenance.old({**results, "other": {"commit": "f" * 40}}) == {"401": 401}
