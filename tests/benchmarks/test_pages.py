"""Pages and charts of results: written from the committed JSON, between their marks."""

import argparse
import shutil
from pathlib import Path

from benchmarks import report, shuffle_report
from benchmarks.markdown import filled
from benchmarks.turns import RESULTS


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
