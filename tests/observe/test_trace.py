"""A trace has what workers and fills did, in the clock of torch.profiler's own events."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile, record_function

import streamload
from streamload.errors import OptionError
from streamload.ipc import ControlBlock
from streamload.observe.trace import Trace
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from streamload.testing.shards import write_shards
from streamload.worker.stages import Spans


def spans(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event.get("cat") == "streamload"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_trace_of_the_profiler_gets_rows_of_workers_fills_and_waits(workers: int, tmp_path: Path) -> None:
    write_shards(tmp_path / "data", [16] * 6, seed=3)
    path = tmp_path / "trace.json"
    with ShardServer(tmp_path / "data") as server:
        server.misbehave("00002.tar", Fault(bytes_per_second=60_000))
        with streamload.make_loader(
            f"{server.url}/{{00000..00005}}.tar?token=secret",
            batch_size=4,
            num_workers=workers,
            cache_dir=tmp_path / "cache",
            cache_size="1GB",
        ) as loader:
            trace = loader.trace(10)
            with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
                for _ in loader:
                    with record_function("the step"):
                        pass
                    if trace.is_done:
                        break
            profiled.export_chrome_trace(str(path))
    ours = len(spans(json.loads(path.read_text())["traceEvents"]))
    added = trace.merge(path)
    merged = json.loads(path.read_text())
    found = spans(merged["traceEvents"])
    assert (ours, len(found)) == (0, added)
    assert {"batch 0", "data wait", "fill", "wait for bytes"} <= {span["name"] for span in found}
    assert len({span["pid"] for span in found} - {os.getpid()}) == workers
    assert {span["args"]["shard"] for span in found if span["name"] == "fill"} <= {
        f"{server.url}/{number:05d}.tar" for number in range(6)
    }
    steps = [event for event in merged["traceEvents"] if event.get("name") == "the step"]
    waits = sorted((span for span in found if span["name"] == "data wait"), key=lambda span: span["ts"])
    assert len(waits) == 10
    for wait, step in zip(waits, steps, strict=True):  # by one clock
        assert wait["ts"] + wait["dur"] <= step["ts"]
    assert all(step["ts"] <= wait["ts"] for step, wait in zip(steps, waits[1:], strict=False))
    first = min(waits, key=lambda span: span["ts"])
    (made,) = [span for span in found if span["name"] == "batch 0"]
    assert first["ts"] <= made["ts"]
    assert made["ts"] + made["dur"] <= first["ts"] + first["dur"]
    named = {event["args"].get("name") for event in merged["traceEvents"] if event["ph"] == "M"}
    assert {f"streamload worker {number}" for number in range(workers)} <= named
    assert "streamload data wait" in named


def test_without_a_trace_workers_write_nothing_and_a_second_one_ends_the_first(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path / "data", [8], seed=3)
    with streamload.make_loader(
        str(path), batch_size=4, num_workers=0, cache_dir=tmp_path / "cache", cache_size="1GB"
    ) as loader:
        first = loader.trace(100)
        second = loader.trace(1)
        assert first.is_done
        assert len(list(loader)) == 2
        assert second.is_done
        assert list(first.events()) == []
        names = [event["name"] for event in second.events() if event["ph"] == "X"]
        assert names.count("data wait") == 1
    with pytest.raises(OptionError, match="steps=0"):
        loader.trace(0)


def test_what_is_no_trace_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    trace = Trace(ControlBlock(1), 1)
    for name, raw in (("list.json", b"[1]"), ("cut.json", b'{"traceEv'), ("cut.json.gz", b"\x1f\x8b")):
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(OptionError, match=f"{name} is no trace"):
            trace.merge(tmp_path / name)
        assert (tmp_path / name).read_bytes() == raw
    with pytest.raises(OptionError, match="is no trace"):
        trace.merge(tmp_path / "missing.json")


def test_waits_for_one_shard_are_joined_and_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    control = ControlBlock(1)
    trace, own = Trace(control, 1), Spans(control, "worker 0")
    for began in range(0, 100, 10):
        own.add("wait for bytes", began * 10**6, began * 10**6 + 9 * 10**6, shard="a")
    own.add("wait for bytes", 200 * 10**6, 201 * 10**6, shard="b")
    folder = Path(control.tracing.read()["folder"])
    with (folder / f"{os.getpid()}.jsonl").open("a") as file:
        file.write('["cut')
    source = tmp_path / "trace.json.gz"
    source.write_bytes(gzip.compress(b'{"traceEvents": [], "baseTimeNanoseconds": 1000}'))
    assert trace.merge(source, tmp_path / "out.json") == 2
    found = spans(json.loads((tmp_path / "out.json").read_text())["traceEvents"])
    assert [(span["ts"], span["dur"]) for span in found] == [(-1.0, 99_000.0), (199_999.0, 1000.0)]


def test_a_full_disk_ends_the_trace_and_nothing_else() -> None:
    control = ControlBlock(1)
    own = Spans(control, "worker 0")
    control.tracing.write({"folder": "/nowhere"})
    with own.of("batch 0"):
        assert not own.is_on
    trace = Trace(control, 1)
    assert own.is_on
    (file,) = Path(control.tracing.read()["folder"]).iterdir()
    file.unlink()
    file.symlink_to("/dev/full")
    own.add("batch 1", 0, 1)
    assert not own.is_on
    file.unlink()
    own.add("batch 2", 0, 1)
    assert list(trace.events()) == []
