"""Cards of loaders, stats and verdicts: the numbers that were counted, whole in a browser, light and dark.

How it shows that it works: numbers and widths are compared with the counters; secrets and markup are given as
names; a browser lays a card out on a light and on a dark page, and tells its colours, and what is cut.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import streamload
from streamload.metrics import Snapshot
from streamload.metrics.display import card_of_loader
from streamload.metrics.findings import Verdict
from streamload.metrics.registry import BUCKETS, STAGES
from streamload.testing.shards import write_shards
from tests.support import browser

WORKERS = [row.labels[0] for row in STAGES if row.labels[0] not in ("training", "device")]
STATS = Snapshot(
    samples_yielded=12_800,
    batches_yielded=200,
    tier_hits=3,
    tier_misses=1,
    origin_bytes=5_000_000,
    samples_skipped={"decode": 2},
    samples_replaced={"missing": 3},
    data_wait_seconds=4.0,
    seconds_to_first_batch=0.25,
    wait_buckets=(90, 100, *(0,) * 8, 9, 1, *(0,) * (BUCKETS - 12)),
    decode_seconds=6.0,
    read_seconds=2.0,
    step_seconds=100.0,
    device_seconds=50.0,
)
VERDICT = Verdict("CPU", 20.0, 0.2, "workers decode", "Take more.", 1.25, STATS)


def cells(card: str) -> dict[str, str]:
    return dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", card))


def test_a_card_has_six_numbers_as_they_were_counted() -> None:
    assert cells(STATS._repr_html_()) == {
        "samples": "12,800",
        "first batch": "250 ms",
        "waited for data": "4 s",
        "cache hits": "75%",
        "from origins": "5.0 MB",
        "unusable samples": "5",
    }
    assert cells(VERDICT._repr_html_()) == {
        "samples/s": "640",
        "without waits": "1.25 ×",
        "waited for data": "20%",
        "cache hits": "75%",
        "from origins": "5.0 MB",
        "unusable samples": "5",
    }
    said = "CPU</b>: waited 20% of the last 20 s for data: workers decode. Take more."
    assert said in VERDICT._repr_html_()


def test_the_bar_has_the_workers_stages_alone_and_the_line_every_wait() -> None:
    card = STATS._repr_html_()
    widths = [float(width) for width in re.findall(r'<rect x="[\d.]+" width="([\d.]+)"', card)]
    assert widths == [150.0, 450.0]  # read, decode
    assert "Waits for a batch: half below 0.033 ms, 99 % below 17 ms" in card
    whole = dataclasses.replace(STATS, **{f"{name}_seconds": 1.0 for name in fields_of_stages()})
    named = re.findall(r"<title>([\w-]+) \d+%", whole._repr_html_())
    assert named == WORKERS
    assert cells(Snapshot()._repr_html_())["first batch"] == "not yet"
    assert "<svg" not in Snapshot()._repr_html_()


def fields_of_stages() -> list[str]:
    return [row.name.removesuffix("_ns") for row in STAGES if row.labels[0] in WORKERS]


def test_a_card_fetches_nothing_runs_nothing_and_has_markup_as_text_without_secrets() -> None:
    secret = "https://host/a.tar?X-Amz-Signature=c0ffee"
    evidence = f"<img src=x onerror=alert(1)> from {secret}"
    verdict = dataclasses.replace(VERDICT, evidence=evidence)
    for card in (
        verdict._repr_html_(),
        card_of_loader("<Loader <script>alert(1)</script>>", STATS, verdict),
    ):
        assert "c0ffee" not in card
        assert not re.findall(r"<script|<img|<[^>]*(?:src|href|onerror)=|url\(|@import", card)
        assert "&lt;img src=x" in card


def test_a_loader_draws_itself_before_its_first_batch_and_after_its_last(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", [40])
    options = {"batch_size": 8, "num_workers": 0, "cache_dir": tmp_path / "cache"}
    with streamload.make_loader(str(tmp_path / "shards"), **options) as loader:
        assert "<p>no batch was taken yet. Look at" in loader._repr_html_()
        assert len(list(loader)) == 5
        card = loader._repr_html_()
        assert cells(card) == cells(loader.stats()._repr_html_())
        assert cells(card)["samples"] == "40"
        assert "Loader 1 shards, batch_size=8" in card
        verdict = loader.verdict()
        assert verdict.counted.samples_yielded <= 40
        assert "counted" not in repr(verdict)
        assert str(loader.stats()).startswith("origin ")


LOOK = """
const card=document.querySelector('.streamload'), frame=card.getBoundingClientRect();
const spread=s=>s.match(/[\\d.]+/g).map(Number);
const cut=[...card.querySelectorAll('dd,p,span,svg')].filter(part=>{const box=part.getBoundingClientRect();
  return box.left<frame.left-1||box.right>frame.right+1||
    part.tagName=='DD'&&part.scrollWidth>part.clientWidth+1});
const texts=[...card.querySelectorAll('dd,dt,p,b')].map(part=>getComputedStyle(part).color);
return JSON.stringify({cut:cut.length, fetched:performance.getEntriesByType('resource').length,
  text:[...new Set(texts)],
  tile:spread(getComputedStyle(card.querySelector('dl div')).backgroundColor)[3],
  bar:card.querySelectorAll('rect').length, waits:card.querySelector('path').getBBox().width,
  wide:document.documentElement.scrollWidth-document.documentElement.clientWidth})
"""


@browser.needs_browser
@pytest.mark.parametrize(
    ("width", "page", "text"),
    [
        pytest.param(700, "#111", "rgb(238, 238, 238)", id="dark"),
        pytest.param(700, "#fff", "rgb(17, 17, 17)", id="light", marks=pytest.mark.deep),
        pytest.param(500, "#111", "rgb(238, 238, 238)", id="narrow", marks=pytest.mark.deep),
    ],
)
def test_a_browser_shows_a_whole_card_in_the_colours_of_its_page(
    width: int, page: str, text: str, tmp_path: Path
) -> None:
    file = tmp_path / "card.html"
    body = f"<!doctype html><meta charset=utf-8><body style='background:{page};color:{text}'>"
    file.write_text(body + card_of_loader("<Loader 4 shards>", STATS, VERDICT))
    seen = json.loads(browser.evaluated(file, LOOK, width))
    assert 0.1 < seen.pop("tile") < 0.2
    assert seen == {"cut": 0, "fetched": 0, "text": [text], "bar": 2, "waits": 600, "wide": 0}


def test_counting_loads_nothing_that_draws() -> None:
    script = "import sys, streamload; streamload.Snapshot(); streamload.Verdict; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"streamload.metrics.display", "html"} & set(done.stdout.split())
