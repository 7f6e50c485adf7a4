"""Recordings and the report of a run: bounded, one file, the recorded numbers, and whole in a real browser.

How it shows that it works: curves of known rate, share and level are recorded, at other paces by several
ranks, and what is drawn is compared with them; a browser lays the page out, and tells what overlaps.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import streamload
from streamload.cache.tier import Tier
from streamload.cli.report import report as report_command
from streamload.errors import OptionError
from streamload.observe.charts import Chart, drawn, duration
from streamload.observe.page import RunPage
from streamload.observe.recording import MOST, Recording, Skipped, read_recording, recordings
from streamload.observe.report import numbers, report
from streamload.observe.skipped import rows_of
from streamload.observe.timeline import Timeline
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, read_oracle, write_shards
from tests.observe.test_exposition import full_page
from tests.support import browser

RATES = {
    "samples_yielded": 400,
    "data_wait_ns": 10**8,
    "decode_ns": 3 * 10**9,
    "tier_hits": 3,
    "tier_misses": 1,
}
SETTINGS = {"batch_size": 64, "shards": "<script>alert(1)</script>"}


def page_at(seconds: float, rank: int = 0, **changes: object) -> RunPage:
    """A rank whose counters grow steadily, from the first second on."""
    page = full_page(sources=3, rank=rank, world_size=2)
    written = page.began._replace(
        monotonic_ns=page.began.monotonic_ns + int(seconds * 1e9), unix=page.began.unix + seconds
    )
    shares = {"source 0": 0.7, "source 1": 0.2, "source 2": 0.1}
    gauges = dict(page.gauges) | {
        "samples": {(name,): 400 * share * seconds for name, share in shares.items()},
        "source_loss": {(name,): 10 / (1 + seconds / 100) for name in shares},
        "tier_bytes": {("disk",): 50.0},
        "tier_limit_bytes": {("disk",): 200.0},
    }
    counters = {name: int(rate * seconds) for name, rate in RATES.items()} | {"ready_batches": 5}
    buckets = (0,) * 5 + (int(seconds),) + (0,) * 18
    page = dataclasses.replace(
        page, written=written, counters=counters, gauges=gauges, wait_buckets=buckets, verdict="", alerts={}
    )
    return dataclasses.replace(page, **changes)  # type: ignore[arg-type]


def record(folder: Path, seconds: int, ranks: int = 1, every: float = 1.0) -> None:
    for rank in range(ranks):
        recording = Recording(folder, SETTINGS)
        for step in range(1, int(seconds / every) + 1):
            recording.add(page_at(step * every, rank))


def timeline(folder: Path) -> Timeline:
    return Timeline(tuple(read_recording(path) for path in recordings(folder)))


def test_a_recording_has_what_pages_said_and_a_report_the_rates_and_shares_of_it(tmp_path: Path) -> None:
    record(tmp_path, 300, ranks=2, every=1.7)
    found = numbers(timeline(tmp_path))
    charts = found["charts"]
    assert found["totals"]["samples_yielded"] == 2 * int(400 * 1.7 * 176)
    np.testing.assert_allclose(charts["Samples per second"]["all ranks"], 800, rtol=0.02)
    np.testing.assert_allclose(charts["Data wait"]["rank 1"], 0.1, rtol=0.02)
    np.testing.assert_allclose(charts["Where workers' time goes"]["decode"], 6, rtol=0.02)
    np.testing.assert_allclose(charts["Cache"]["hits"], 0.75, rtol=0.1)
    np.testing.assert_allclose(charts["Cache"]["fill of the cache (disk)"], 0.25)
    np.testing.assert_allclose(charts["Share of each source"]["source 0"], 0.7, rtol=0.02)
    np.testing.assert_allclose(charts["Ready batches"]["rank 0"], 5, rtol=0.5)
    losses = np.array(charts["Loss by source"]["source 1"], float)
    np.testing.assert_allclose(losses, 10 / (1 + np.array(found["seconds"]) / 100), rtol=0.05)


@pytest.mark.deep
def test_a_recording_stays_bounded_however_long_the_run_and_the_report_small(tmp_path: Path) -> None:
    record(tmp_path, 20_000)
    (path,) = recordings(tmp_path)
    lines = path.read_text().splitlines()
    assert MOST / 2 <= len(lines) <= MOST + 1
    assert path.stat().st_size < 1 << 20
    found = read_recording(path)
    assert found.moments[-1].run_seconds > 19_900
    gaps = np.diff([moment.run_seconds for moment in found.moments])
    assert gaps.max() <= 2 * gaps.min()
    assert len(report(timeline(tmp_path))) < 200_000


def test_a_rank_that_began_later_is_drawn_from_then_on(tmp_path: Path) -> None:
    late = 60.0
    for rank in (0, 1):
        recording = Recording(tmp_path, SETTINGS)
        for second in range(1, 121):
            page = page_at(second, rank)
            moved = {
                name: moment._replace(unix=moment.unix + late * rank)
                for name, moment in (("began", page.began), ("written", page.written))
            }
            recording.add(dataclasses.replace(page, **moved))
    drawn = timeline(tmp_path)
    assert drawn.seconds == pytest.approx(120 + late)
    rates = drawn.rate("samples_yielded")
    before, after = drawn.edges[1:] < late, (drawn.edges[:-1] > late) & (drawn.edges[1:] < 120)
    assert (rates[0][before] > 0).all()
    assert (rates[1][before] == 0).all()
    assert rates[1][after] == pytest.approx(400, rel=0.05)


def test_a_run_in_trouble_says_so_first_and_lists_its_alerts(tmp_path: Path) -> None:
    recording = Recording(tmp_path, {})
    for second in range(1, 101):
        late = 30 <= second < 60
        alerts = {"data wait": "waited <80 %>"} if late else {}
        counters = {"data_wait_ns": int(5e8 * second), "samples_yielded": second, "batches_yielded": second}
        verdict = "the origin gives 38 MB/s" if late else ""
        whole = f"waited 50% of the last {second} s for data: <bytes> don't arrive"
        recording.add(page_at(second, alerts=alerts, verdict=verdict, run_verdict=whole, counters=counters))
    text = report(timeline(tmp_path))
    assert "The training waited 50% of the time for data: it could be 2.00× as fast." in text
    assert (
        "Over the whole run: waited 50% of the last 100 s for data: &lt;bytes&gt; don&#x27;t arrive" in text
    )
    assert "The last verdict: the origin gives 38 MB/s" in text
    assert "<td>30 s<td>30 s<td>0<td>data wait<td>waited &lt;80 %&gt;" in text
    calm = report(timeline_of_calm(tmp_path / "calm"))
    assert "Data was hardly ever late" in calm
    assert "<h2>Alerts" not in calm


def test_a_run_that_only_read_is_told_so_instead_of_how_fast_it_could_be(tmp_path: Path) -> None:
    recording = Recording(tmp_path, {})
    for second in range(1, 11):
        counters = {"data_wait_ns": int(0.999e9 * second), "batches_yielded": 100 * second}
        recording.add(page_at(second, counters=counters))
    text = report(timeline(tmp_path))
    assert "Data took 100% of the time: data is the only work of this loop" in text
    assert "as fast" not in text


def test_verdicts_and_alerts_of_a_run_on_several_hosts_name_the_rank_and_its_host(tmp_path: Path) -> None:
    for rank, host in enumerate(["node-a", "node-b"]):
        counters = {"data_wait_ns": int(5e9 * (rank + 1))}
        said = {
            "verdict": f"verdict {rank}",
            "run_verdict": f"in all {rank}",
            "alerts": {"data wait": "late"},
        }
        recording = Recording(tmp_path, {})
        for second in (10, 20):
            recording.add(page_at(second, rank, host=host, counters=counters, **said))
    text = report(timeline(tmp_path))
    assert "Over the whole run: rank 1 on node-b: in all 1<" in text
    assert "The last verdict: rank 1 on node-b: verdict 1<" in text
    assert "<td>0 on node-a<td>data wait" in text
    assert "<td>1 on node-b<td>data wait" in text


def timeline_of_calm(folder: Path) -> Timeline:
    recording = Recording(folder, {})
    for second in range(1, 11):
        recording.add(page_at(second, counters={"samples_yielded": second}))
    return timeline(folder)


def test_a_report_is_one_file_without_network_with_its_numbers_and_hostile_names_as_text(
    tmp_path: Path,
) -> None:
    recording = Recording(tmp_path, SETTINGS)
    names = ("</script><script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a&b")
    for second in range(1, 20):
        gauges = {"samples": {(name,): second * (place + 1.0) for place, name in enumerate(names)}}
        recording.add(page_at(second, run="<b>run", sources=names, gauges=gauges))
    text = report(timeline(tmp_path))
    assert not re.findall(r"<script(?! type=\"application/json\")|<img|<b>run|<[^>]*(?:src|href)=", text)
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(data) == numbers(timeline(tmp_path))


LOOK = """
const overlaps=[], outside=[];
for (const svg of document.querySelectorAll('svg')) {
  const frame = svg.getBoundingClientRect(), boxes = [...svg.querySelectorAll('text')].map(
    text => [text.textContent, text.getBoundingClientRect()]);
  for (const [text, box] of boxes)
    if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1)
      outside.push(svg.ariaLabel + ': ' + text);
  for (const [i, [one, a]] of boxes.entries()) for (const [other, b] of boxes.slice(i + 1))
    if (a.left < b.right && b.left < a.right && a.top < b.bottom - 1 && b.top < a.bottom - 1)
      overlaps.push(svg.ariaLabel + ': ' + one + ' and ' + other);
}
const data = JSON.parse(document.getElementById('data').textContent);
return JSON.stringify({overlaps, outside, samples: data.totals.samples_yielded,
  charts: document.querySelectorAll('svg').length,
  wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  fetched: performance.getEntriesByType('resource').length,
  empty: [...document.querySelectorAll('svg')].filter(
    svg => ![...svg.querySelectorAll('path:not(.rule),rect')].some(shape => shape.getBBox().width > 100
      || shape.tagName == 'rect')).map(svg => svg.ariaLabel)});
"""


@browser.needs_browser
@pytest.mark.parametrize("width", [1240, pytest.param(500, marks=pytest.mark.deep)])
def test_a_browser_shows_every_chart_and_nothing_overlaps_or_is_cut(width: int, tmp_path: Path) -> None:
    record(tmp_path, 4000, ranks=2, every=4.0)
    page = tmp_path / "run.html"
    page.write_text(report(timeline(tmp_path)))
    seen = json.loads(browser.evaluated(page, LOOK, width))
    assert seen.pop("charts") >= 10
    assert seen == {
        "overlaps": [],
        "outside": [],
        "samples": 2 * 400 * 4000,
        "wide": 0,
        "fetched": 0,
        "empty": [],
    }


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "streamload", "report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.deep
def test_the_command_draws_the_run_with_the_most_samples_or_the_one_that_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    record(folder, 40, ranks=2)
    recording = Recording(folder, {})
    for second in range(1, 9):
        recording.add(page_at(second, run="evaluation"))
    out = tmp_path / "run.html"
    done = run(folder, "-o", out)
    assert done.stdout == f"{out}: run a1, 2 ranks; other runs there: evaluation (--run)\n"
    assert "streamload run a1" in out.read_text()
    asked = run(folder, "--run", "evaluation", "--json")
    assert json.loads(asked.stdout)["about"][0]["run"] == "evaluation"
    missing = run(folder, "--run", "b")
    assert (missing.returncode, "only a1, evaluation" in missing.stderr) == (2, True)


def test_what_is_no_recording_is_an_error_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    for content in ("", "{}", '{"format": 9}', "[1]\n", "\x00"):
        other.write_text(content)
        with pytest.raises(OptionError, match="is no recording"):
            read_recording(other)
    assert run(tmp_path / "empty").returncode == 2
    record(tmp_path, 20)
    (path,) = recordings(tmp_path)
    path.write_text(path.read_text()[:-30])
    assert len(read_recording(path).moments) == 19
    (tmp_path / "one").mkdir()
    Recording(tmp_path / "one", {}).add(page_at(1))
    with pytest.raises(OptionError, match="no two moments"):
        timeline(tmp_path / "one")


def epochs_of(seconds: int) -> dict[str, dict[tuple[str, ...], float]]:
    """The gauge of an epoch of two minutes each, the last of which has just begun."""
    return {"epoch": {(): float(seconds // 120)}}


def test_every_chart_over_time_marks_where_an_epoch_begins(tmp_path: Path) -> None:
    recording = Recording(tmp_path, {})
    for second in range(1, 361):
        page = page_at(second)
        counters = dict(page.counters) | {"samples_yielded": 400 * min(second, 359)}
        recording.add(page_at(second, gauges=dict(page.gauges) | epochs_of(second), counters=counters))
    run = timeline(tmp_path)
    assert run.epochs() == [(120.0, 1), (240.0, 2)]  # the one at 360 s never had a sample
    assert numbers(run)["epochs"] == [{"epoch": 1, "seconds": 120.0}, {"epoch": 2, "seconds": 240.0}]
    text = report(run)
    over_time = text.count('role="img"') - 1  # the histogram isn't
    assert text.count('class="mark"') == 2 * over_time
    assert text.count(">epoch 2</text>") == over_time
    places = [float(x) for x in re.findall(r'class="mark" d="M([\d.]+)', text)[:2]]
    rule = re.search(r'class="rule" d="M(\d+) [\d.]+H(\d+)', text)
    assert rule
    left, right = map(int, rule.groups())
    assert [(x - left) / (right - left) for x in places] == pytest.approx([1 / 3, 2 / 3], abs=0.01)
    marks = [(float(n), f"e{n}") for n in range(50)]
    many = drawn(Chart("", "", {"a": np.ones(2)}), np.array([0.0, 1.0]), 50.0, marks)
    assert many.count('class="mark"') == 50
    assert 3 <= len(re.findall(r">e\d+</text>", many)) <= 6


def test_a_recording_has_the_first_samples_that_could_not_be_used_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, kept = 64, 20
    monkeypatch.setattr("streamload.observe.recording.MOST", most)
    monkeypatch.setattr("streamload.observe.recording.MOST_SKIPPED", kept)
    skipped: list[Skipped] = []
    recording = Recording(tmp_path, {}, skipped)
    page = page_at(1)
    for second in range(1, most + 2):  # the last one has the others thinned out
        if second % 2 == 0:
            skipped.append(("decode", f"https://host/a.tar?sig=c0ffee{second}", f"k{second}", "x" * 9999))
        ns = page.began.monotonic_ns + second * 10**9
        recording.add(dataclasses.replace(page, written=page.written._replace(monotonic_ns=ns)))
    (path,) = recordings(tmp_path)
    assert "c0ffee" not in path.read_text()
    read = read_recording(path).skipped
    assert [key for _, _, key, _ in read] == [f"k{2 * n}" for n in range(1, kept + 1)]
    assert path.stat().st_size < 1 << 20
    with path.open("a") as file:
        file.write('{"s": ["decode", "url"]}\n{"s": 7}\n{"s": ["decode", "url", "k')
    assert read_recording(path).skipped == read


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording and cache of a run over HTTP, with three cut images and one that is none."""
    folder = tmp_path_factory.mktemp("damaged")
    (shard,) = write_shards(folder / "shards", [30], options=ShardOptions(padding_bytes=(0, 0)))
    samples = read_oracle(shard)
    with tarfile.open(shard, "w") as tar:
        for number, (key, members) in enumerate(samples):
            for extension, payload in members.items():
                if extension == "jpg" and number in (3, 9, 15):
                    payload = payload[: len(payload) * 3 // 4]
                if extension == "jpg" and number == 21:
                    payload = b"<script>alert(1)</script>"
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(payload)
                tar.addfile(info, io.BytesIO(payload))
    with ShardServer(folder / "shards") as server:
        loader = streamload.make_loader(
            f"{server.url}/00000.tar?X-Amz-Signature=c0ffee",
            batch_size=5,
            num_workers=0,
            cache_dir=folder / "cache",
            shards=streamload.Shards(max_bad_samples=None),
        )
        with loader:
            loader.record(folder / "recordings")
            for _ in range(2):
                assert len(list(loader)) == 6
            assert len(loader.skipped) == 8
    return folder


def shown(folder: Path) -> str:
    out = folder / "run.html"
    report_command(folder / "recordings", out=out, cache_dir=str(folder / "cache"))
    return out.read_text()


def test_samples_that_could_not_be_used_are_shown_with_what_there_is_of_their_pictures(damaged: Path) -> None:
    text = shown(damaged)
    section = text[text.index("<h2>Unusable samples") : text.index("<h2>Settings")]
    assert "8 over all epochs; the first 4 different ones are shown." in section
    pictures = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', section)
    assert len(pictures) == 3
    for encoded in pictures:
        with Image.open(io.BytesIO(base64.b64decode(encoded))) as image:
            assert min(image.size) >= 16
            assert np.asarray(image)[: image.height // 2].std() > 3  # its upper half is there
    for number in (3, 9, 15, 21):
        assert f"key: 00000{number:06d}" in section
        assert f"noise from shard 0 index {number} " in section
    assert section.count("no picture: it has no image") == 1
    assert "bytes that begin with b&#x27;&lt;script&gt;" in section
    assert "c0ffee" not in text


def test_without_the_cache_the_key_and_the_reason_are_shown(damaged: Path, tmp_path: Path) -> None:
    skipped = timeline(damaged / "recordings").skipped()
    rows = rows_of(skipped, None)
    assert [picture for _, picture in rows] == [None] * 4
    assert {values["no picture"] for values, _ in rows} == {"its bytes aren't in the cache"}
    assert {values["key"] for values, _ in rows} == {key for _, _, key, _ in skipped}
    tier = Tier.open(damaged / "cache")
    (path,) = tier.own("shards")
    held = {file: file.read_bytes() for file in path.iterdir() if file.name in ("data", "index")}
    data = bytearray(held[path / "data"])
    data[:] = bytes(len(data))
    (path / "data").write_bytes(data)
    try:
        assert [picture for _, picture in rows_of(skipped, tier)] == [None] * 4
        assert (path / "index").read_bytes() == held[path / "index"]  # nothing is removed by looking
    finally:
        (path / "data").write_bytes(held[path / "data"])
    assert sum(picture is not None for _, picture in rows_of(skipped, tier)) == 3
    ((values, _),) = rows_of([("caption", *skipped[0][1:3], "not UTF-8")], tier)
    assert values["error"] == "caption: not UTF-8"
    assert values["caption"].startswith("noise from shard 0 index ")


@browser.needs_browser
@pytest.mark.deep
def test_a_browser_shows_the_pictures_and_the_marks(damaged: Path) -> None:
    shown(damaged)
    look = """return JSON.stringify({sizes:[...document.images].filter(i=>i.naturalWidth>15).length,
      wide:document.documentElement.scrollWidth-document.documentElement.clientWidth})"""
    assert json.loads(browser.evaluated(damaged / "run.html", look)) == {"sizes": 3, "wide": 0}


def test_a_full_disk_ends_the_recording_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recording = Recording(tmp_path, {})
    recording.add(page_at(1))
    (path,) = recordings(tmp_path)
    path.unlink()
    path.symlink_to("/dev/full")
    for second in range(2, 9):
        recording.add(page_at(second))
    (said,) = caplog.records
    assert "No space left on device" in said.message
    assert "the training goes on" in said.message
    blocked = tmp_path / "file"
    blocked.write_text("")
    Recording(blocked / "folder", {}).add(page_at(1))
    assert len(caplog.records) == 2


def test_an_axis_has_round_numbers_and_the_largest_value_on_it() -> None:
    for largest in (1e-6, 0.34, 1.0, 7.3, 99.9, 1234.5, 3e9):
        values = np.array([0.0, largest])
        svg = drawn(Chart("", "", {"a": values}, repr), np.array([0.0, 1.0]), 1.0)
        ticks = [float(tick) for tick in re.findall(r'text-anchor="end">([-.e\d]+)<', svg)]
        assert 3 <= len(ticks) <= 7
        assert ticks[0] == 0
        assert largest <= ticks[-1] * 1.001 <= 2.5 * largest
    assert [duration(seconds) for seconds in (5, 90, 7200, 36000)] == ["5 s", "1.5 min", "2 h", "10 h"]


def test_a_run_of_one_short_epoch_has_a_report(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", [20])
    with streamload.make_loader(
        str(tmp_path / "shards"), batch_size=5, num_workers=0, cache_dir=tmp_path / "cache"
    ) as loader:
        loader.record(tmp_path / "recordings")
        assert len(list(loader)) == 4
    assert numbers(timeline(tmp_path / "recordings"))["totals"]["samples_yielded"] == 20
