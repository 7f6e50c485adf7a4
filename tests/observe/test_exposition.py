"""Runs in Prometheus' text format: read by Prometheus' own parser, with the numbers of the pages."""

from __future__ import annotations

import dataclasses
import re

from hypothesis import given
from hypothesis import strategies as st

from streamload.metrics import COUNTERS, GIVEN, METRICS
from streamload.observe.exposition import exposition, full_name
from streamload.observe.page import RunPage, names_of_sources
from tests.observe.test_pages import PAGE
from tests.support import promtool

SERIES = re.compile(r'^([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\\\|\\"|\\n)*",?)*)\})? (\S+)$')


def full_page(sources: int = 3, **changes: object) -> RunPage:
    """A page on which nothing is missing."""
    names = names_of_sources(f"source {place}" for place in range(sources))
    gauges: dict[str, dict[tuple[str, ...], float]] = {}
    for metric in GIVEN:
        values = names if "source" in metric.labels else ("disk",) if metric.labels else (None,)
        gauges[metric.name] = {(value,) if value else (): 0.25 for value in values}
    page = dataclasses.replace(
        PAGE,
        sources=names,
        counters={name: place + 1 for place, name in enumerate(COUNTERS)},
        wait_buckets=tuple(range(24)),
        gauges=gauges,
    )
    return dataclasses.replace(page, **changes)  # type: ignore[arg-type]


def series(text: str) -> dict[tuple[str, str], float]:
    """Each series of a text: its name and labels, and the value."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = SERIES.match(line)
            assert match, line
            assert (match[1], match[2]) not in found, line
            found[match[1], match[2]] = float(match[3])
    return found


@promtool.needs_promtool
def test_prometheus_parses_every_metric_and_has_nothing_against_it() -> None:
    pages = [full_page(rank=rank) for rank in range(8)]
    assert promtool.complaints(exposition(pages)) == ""


def test_the_values_are_those_of_the_page_in_its_units() -> None:
    page = full_page()
    found = series(exposition([page]))
    own = 'run="a1",rank="1"'
    assert found["streamload_origin_bytes_total", own] == page.counters["origin_bytes"]
    assert (
        found["streamload_stage_seconds_total", f'{own},stage="decode"'] == page.counters["decode_ns"] / 1e9
    )
    assert found["streamload_samples_total", f'{own},source="source 0"'] == 0.25
    assert found["streamload_data_wait_seconds_sum", own] == page.counters["data_wait_ns"] / 1e9
    assert found["streamload_data_wait_seconds_count", own] == sum(range(24))
    assert found["streamload_data_wait_seconds_bucket", f'{own},le="+Inf"'] == sum(range(24))
    assert found["streamload_data_wait_seconds_bucket", f'{own},le="0.000524288"'] == sum(range(6))
    assert found["streamload_run_info", f'{own},host="node",pid="17",world_size="8",workers="4"'] == 1


def test_the_buckets_of_the_histogram_grow_and_end_in_its_count() -> None:
    found = series(exposition([full_page()]))
    buckets = [value for (name, _), value in found.items() if name.endswith("_bucket")]
    assert buckets == sorted(buckets)
    assert len(buckets) == 10
    (count,) = (value for (name, _), value in found.items() if name.endswith("_count"))
    assert buckets[-1] == count


def test_a_rank_has_at_most_88_series_and_8_for_each_source() -> None:
    for sources in (1, 3, 16):
        assert len(series(exposition([full_page(sources)]))) <= 88 + 8 * sources
    plain = exposition([dataclasses.replace(full_page(1), counters={})])
    assert "streamload_shared_" not in plain
    assert "streamload_feature_" not in plain


def test_every_metric_of_the_registry_is_there_once_but_for_sums_of_others_and_most_of_features() -> None:
    text = exposition([full_page()])
    shown = re.findall(r"^# TYPE (\S+) ", text, re.M)
    assert len(set(shown)) == len(shown)
    left_out = {full_name(metric) for metric in (*METRICS, *GIVEN)} - set(shown)
    features = {name for name in left_out if name.startswith("streamload_feature_")}
    assert len(features) == 7
    assert left_out - features == {
        "streamload_transform_seconds_total",
        "streamload_first_batch_seconds_total",
        "streamload_batches_yielded_total",
        "streamload_fresh_tensors_total",
        "streamload_workers",
        "streamload_samples_off_size_total",  # extension_value has these, of runs with sizes
        "streamload_samples_of_unknown_size_total",
    }


def test_two_pages_of_one_run_and_rank_have_other_names_and_no_page_is_no_text() -> None:
    found = series(exposition([full_page(), full_page(pid=18)]))
    assert {labels.split(",")[0] for _, labels in found} == {'run="a1"', 'run="a1~2"'}
    assert exposition([]) == ""


@promtool.needs_promtool
def test_hostile_names_stay_in_their_labels() -> None:
    hostile = [
        'a"} 1\nx{b="',
        "back\\slash\\",
        "\x1b[31m",
        "{}",
        "ü,=",
        "'",
        '"',
        "a" * 500,
        "https://u:p@h/x?key=1",
    ]
    sources = names_of_sources(hostile)
    page = dataclasses.replace(
        full_page(1), run='r"\n\\', gauges={"samples": {(name,): 1.0 for name in sources}}
    )
    text = exposition([page])
    assert promtool.complaints(text) == ""
    assert len(series(text)) == len(series(exposition([dataclasses.replace(page, gauges={})]))) + len(hostile)
    assert "u:p@h" not in text


@given(st.lists(st.text(max_size=40), unique=True, max_size=6), st.text(max_size=20))
def test_any_name_makes_one_line(names: list[str], run: str) -> None:
    page = dataclasses.replace(PAGE, run=run, gauges={"samples": {(name,): 1.0 for name in names}})
    text = exposition([page])
    lines = text.split("\n")
    assert len([line for line in lines if line.startswith("streamload_samples_total")]) == len(names)
    assert all(line.startswith(("#", "streamload_")) for line in lines[:-1])
