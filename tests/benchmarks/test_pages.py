"""Pages and charts of results: written from the committed JSON, between their marks."""

import argparse
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import overview, provenance, report, shuffle_report
from benchmarks.markdown import Result, figure_sources, filled, with_figures
from benchmarks.turns import RESULTS, ROOT

RESULT_PAGES = sorted((ROOT / "docs/results").glob("*.md"))


def test_the_pages_and_charts_show_the_results_that_are_committed(tmp_path: Path) -> None:
    committed = report.pages()
    assert {*RESULT_PAGES} - {*committed} == {ROOT / f"docs/results/{name}.md" for name in BY_OTHERS}
    pages = [Path(shutil.copy(page, tmp_path / "-".join(page.parts[-2:]))) for page in committed]
    images = tmp_path / "images"
    report.write(argparse.Namespace(results=RESULTS, pages=pages, images=images))
    for page, written in zip(committed, pages, strict=True):
        assert page.read_text() == written.read_text(), page.name
    written_images = {path.name for path in images.iterdir()}
    # The one that shuffle_report writes is compared in tests/benchmarks/test_shuffle.py.
    assert written_images | {shuffle_report.CHART.name} == {path.name for path in report.IMAGES.iterdir()}
    for image in images.iterdir():
        assert (report.IMAGES / image.name).read_text() == image.read_text(), image.name


BY_OTHERS = ("faults", "notebook", "spot-nodes")
"""Pages of results that report.py doesn't write."""


def test_a_page_of_results_says_first_what_it_answers_then_what_it_shows() -> None:
    begins = re.compile(r"# .+\n\n(?:\w.*\n|\[.*\n)+\n<!-- measured -->\n\| result \| date \| commit \|")
    for page in RESULT_PAGES:
        if page.stem not in (*BY_OTHERS, "performance"):
            assert begins.match(page.read_text()), page.name


def test_each_result_with_a_table_is_on_one_page_of_results() -> None:
    marks = [re.findall(r"^<!-- (\w+) -->$", page.read_text(), re.MULTILINE) for page in RESULT_PAGES]
    shown = Counter(mark for page in marks for mark in page if mark in report.SHOWN)
    committed = {name for name in provenance.read_all() if name in report.TABLES} | {"scale_store"}
    assert not committed - shown.keys()
    assert not [mark for mark, pages in shown.items() if pages > 1]


def test_what_a_page_shows_is_listed_with_date_commit_and_machine() -> None:
    on = {"cpu": "EPYC", "cores": 2, "memory_bytes": 2**34, "kernel": "6.1"}
    one: Result = {"benchmark": "warm", "date": "2026-11-24", "commit": "9c2c573+", "machine": on}
    one |= {"seeds": [0], "rounds": [{"round": 0}, {"round": 1}], "versions": {"a": {"torch": "2.13.0"}}}
    other = {**one, "benchmark": "handover", "commit": "eef57c86", "rounds": [{}], "device": "H100"}
    other["versions"] = {"b": {"torch": "2.11.0", "numpy": "2.4.6", "streamload": "0.1.0"}}
    listed = provenance.measured({"warm": one, "handover_gpu": other}).splitlines()
    scripts, machine = "../../benchmarks", "EPYC, 2 cores, 16 GiB, Linux 6.1"
    assert listed[2:4] == [
        f"| [handover_gpu]({scripts}/handover.py) | 2026-11-24 | eef57c86 | 1 | H100; {machine} |",
        f"| [warm]({scripts}/warm.py) | 2026-11-24 | 9c2c573+ | 2 | {machine} |",
    ]
    assert "uncommitted" in listed[5]
    assert listed[7] == "Versions: numpy 2.4.6, torch 2.11.0 and 2.13.0."
    assert "uncommitted" not in provenance.measured({"handover_gpu": other})


def test_a_page_names_the_results_of_its_tables_charts_and_figures() -> None:
    page = "<!-- warm_chart -->\n<!-- articles -->\nx <!-- = cold → date -->?<!-- /= -->"
    assert report.shown_results(page) == {"warm", "features", "strategies", "cold"}


def test_targets_that_are_missed_are_listed_alone() -> None:
    targets = [
        {"claim": claim, "value": value, "at_most": 2.0, "at_least": None, "met": met}
        for claim, value, met in (("a", 1.0, True), ("b", 3.0, False), ("c", None, None))
    ]
    results = {"warm": {"targets": targets}}
    assert report.targets(results).count("\n") == 4
    assert report.targets(results, missed_only=True).splitlines()[2:] == ["| warm | b | ≤ 2 | 3 | no |"]


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
    of_labels = {"order": {"20 × 100, a": {"us": 3.0}, "4 × 500: b": {"us": 2.0}}}
    labels = "is <!-- = order → 20 × 100, a → us × 1e3 ÷ order → 4 × 500: b → us | .0f -->?<!-- /= -->"
    assert re.sub("<!--.*?-->", "", with_figures(labels, of_labels)) == "is 1500"
    assert figure_sources(labels) == {"order"}
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
