"""What live ranks do now: rates between two pages, by hand, and how `streamload top` shows them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from streamload.cache.tier import Tier
from streamload.cli.top import line, shown
from streamload.observe.live import RunWatch, live_rank
from streamload.observe.page import RunPage
from tests.cli.test_metrics import ranks
from tests.observe.test_exposition import full_page
from tests.support.tiers import until

COMMAND = [sys.executable, "-m", "streamload", "top"]


def later(page: RunPage, seconds: float, grown: int = 0) -> RunPage:
    """A page of the same rank, all of whose counters have grown."""
    counters = {name: n + grown for name, n in page.counters.items()}
    written = page.written._replace(monotonic_ns=page.written.monotonic_ns + int(seconds * 1e9))
    return dataclasses.replace(page, counters=counters, written=written, reader=written)


def test_rates_are_differences_over_the_time_between_two_pages() -> None:
    first = full_page()
    second = later(first, 4.0, 2 * 10**9)
    found = live_rank(second, first)
    assert found.samples_per_second == found.origin_bytes_per_second == 5e8
    assert [found.wait, found.hits, *found.stages.values()] == pytest.approx([0.5] * (2 + len(found.stages)))
    assert found.tiers == {"disk": (0.25, 0.25)}
    assert [source.weight for source in found.sources] == [0.25] * 3


def test_a_rank_that_is_seen_first_has_its_rates_since_it_began_and_an_old_page_keeps_its_rates() -> None:
    watch, page = RunWatch(), full_page(counters={"samples_yielded": 600})
    (found,) = watch.look([page])
    assert found.samples_per_second == pytest.approx(600 / page.run_seconds)
    newer = later(page, 1.0, 50)
    (found,) = watch.look([newer])
    assert found.samples_per_second == 50
    aged = newer.written._replace(monotonic_ns=newer.written.monotonic_ns + 9 * 10**9)
    (found,) = watch.look([dataclasses.replace(newer, reader=aged)])
    assert (found.samples_per_second, found.age_seconds) == (50, 9)
    assert watch.look([]) == []
    (found,) = watch.look([later(newer, 1.0, 50)])  # known no more
    assert found.samples_per_second == pytest.approx(700 / 62)


def test_rates_are_those_of_the_last_ten_seconds() -> None:
    watch, page = RunWatch(), full_page(counters={"samples_yielded": 0})
    for second in range(40):
        (found,) = watch.look(
            [later(page, second, 100 * second if second < 20 else 2000 + 10 * (second - 20))]
        )
    assert found.samples_per_second == 10


@given(st.lists(st.text(max_size=20), max_size=5), st.floats(0, 1e12))
def test_flat_numbers_have_names_that_every_tracker_takes(names: list[str], value: float) -> None:
    gauges = {
        "samples": {(name,): value for name in names},
        "source_loss": {(name,): value for name in names},
    }
    flat = live_rank(full_page(0, gauges=gauges), None).flat()
    assert all(type(number) is float for number in flat.values())
    assert all(re.fullmatch(r"loader(/[A-Za-z0-9_-][A-Za-z0-9_ -]*)+", name) for name in flat)
    assert sum(name.endswith("/share") for name in flat) == len(set(names))
    assert flat["loader/data_wait"] <= 1


def test_the_table_has_every_rank_source_verdict_and_alert_and_hostile_names_are_text() -> None:
    page = full_page(sources=2, run="[bold]a1", rank=0)
    gauges = page.gauges | {"samples": {("[red]one",): 3.0, ("two",): 1.0}}
    pages = [
        dataclasses.replace(page, rank=rank, gauges=gauges, sources=("[red]one", "two")) for rank in range(3)
    ]
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with contextlib.closing(console.file):
        console.print(shown(RunWatch().look(pages), "w"))
        console.print(shown([]))
    text = console.export_text()
    assert "run [bold]a1  3 of 8 ranks on node" in text
    assert re.findall(r"^ +(\d) ", text, re.M) == ["0", "1", "2"]
    assert re.search(r"^\[red\]one +0 +75.0%", text, re.M)
    assert "the origin gives 38 MB/s" in text
    assert "! rank 1 data wait: waited 31 %" in text
    assert "sorted by wait" in text
    assert "no run is live" in text


def test_a_rank_in_a_line_names_what_is_wrong() -> None:
    text = line(live_rank(full_page(), None))
    assert text.startswith("run a1 rank 1: ")
    assert "ALERT data wait: waited 31 %" in text
    assert "\n" not in text


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return Tier(tmp_path / "tier", 1 << 30)


def test_once_shows_a_line_for_each_rank_without_a_terminal_and_json_if_asked(tier: Tier) -> None:
    command = [*COMMAND, "--once", "--cache-dir", str(tier.root), "--sort", "wait"]
    with ranks(tier.root, 2):
        plain = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        asked = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=True)
    assert [text[:14] for text in plain.stdout.splitlines()] == ["run a1 rank 0:", "run a1 rank 1:"]
    assert [rank["rank"] for rank in json.loads(asked.stdout)] == [0, 1]
    empty = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert empty.stdout == "no run is live in the cache\n"


def test_a_sort_that_there_is_not_is_refused() -> None:
    done = subprocess.run(
        [*COMMAND, "--sort", "luck"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "--sort=luck" in done.stderr


def test_on_a_terminal_keys_sort_the_table_and_q_ends_it(tier: Tier) -> None:
    control, terminal = pty.openpty()
    shown_so_far = b""
    try:
        with ranks(tier.root, 1):
            command = [*COMMAND, "--every", "0.1", "--cache-dir", str(tier.root)]
            environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
            with subprocess.Popen(
                command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment
            ) as process:
                try:
                    for wanted, key in ((b"sorted by rank", b"w"), (b"sorted by wait", b"q")):

                        def has_come(wanted: bytes = wanted) -> bool:
                            nonlocal shown_so_far
                            shown_so_far += os.read(control, 65536)
                            return wanted in shown_so_far

                        until(has_come)
                        os.write(control, key)
                    assert process.wait(60) == 0
                finally:
                    process.kill()
    finally:
        os.close(control)
        os.close(terminal)
