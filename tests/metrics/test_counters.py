"""Counters: nothing is lost between threads and processes, and a Snapshot adds the rows up."""

import dataclasses
import json
import multiprocessing
import threading
from multiprocessing import shared_memory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamload.metrics import (
    CAUSES,
    COUNTERS,
    GIVEN,
    METRICS,
    WIDTH,
    Counters,
    Snapshot,
    format_bytes,
)
from streamload.metrics.registry import BUCKET_NS
from streamload.observe.publishing import Gauges


@given(
    st.lists(st.tuples(st.sampled_from(list(COUNTERS)), st.integers(0, 10**12)), max_size=30),
    st.integers(1, 4),
)
def test_a_snapshot_is_the_sum_of_all_rows(additions, processes):
    rows = np.zeros((processes, WIDTH), np.int64)
    counters = [Counters(row) for row in rows]
    expected = dict.fromkeys(COUNTERS, 0)
    for place, (name, n) in enumerate(additions):
        counters[place % processes].add(name, n)
        expected[name] += n
    found = Snapshot.of(rows)
    plain = {name for name in COUNTERS if hasattr(found, name)}
    assert {name: getattr(found, name) for name in plain} == {name: expected[name] for name in plain}
    assert found.samples_skipped == {cause: expected[f"samples_skipped_{cause}"] for cause in CAUSES}
    assert found.samples_replaced == {cause: expected[f"samples_replaced_{cause}"] for cause in CAUSES}
    assert found.data_wait_seconds == expected["data_wait_ns"] / 1e9


def test_every_counter_is_shown_in_a_snapshot():
    for name in COUNTERS:
        counters = Counters()
        counters.add(name, 1_000_000_000)
        assert counters.snapshot() != Snapshot(), name
        assert [counters.value(each) for each in COUNTERS] == [10**9 * (each == name) for each in COUNTERS]


def test_threads_lose_nothing():
    counters = Counters()
    threads = [
        threading.Thread(target=lambda: [counters.add("samples_yielded", 1) for _ in range(5000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.snapshot().samples_yielded == 20_000


def count_in_process(name, row, processes):
    memory = shared_memory.SharedMemory(name)
    rows = np.ndarray((processes, WIDTH), np.int64, memory.buf)
    counters = Counters(rows[row])
    for _ in range(1000):
        counters.add("origin_bytes", row + 1)
    del rows, counters
    memory.close()


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.deep)])
def test_processes_lose_nothing_each_with_its_row(method):
    context = multiprocessing.get_context(method)
    memory = shared_memory.SharedMemory(create=True, size=3 * WIDTH * 8)
    rows = np.ndarray((3, WIDTH), np.int64, memory.buf)
    processes = [context.Process(target=count_in_process, args=(memory.name, row, 3)) for row in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert Snapshot.of(rows).origin_bytes == 1000 * (1 + 2 + 3)
    del rows
    memory.close()
    memory.unlink()


@pytest.mark.parametrize(
    "row", [np.zeros(WIDTH + 1, np.int64), np.zeros(WIDTH, np.float64), np.zeros((1, WIDTH), np.int64)]
)
def test_a_row_of_another_shape_fails(row):
    with pytest.raises(ValueError, match=f"int64\\[{WIDTH}\\]"):
        Counters(row)


def test_an_unknown_counter_fails():
    with pytest.raises(KeyError, match="samples_lost"):
        Counters().add("samples_lost")


def test_a_timed_block_counts_also_when_it_raises():
    counters = Counters()
    with pytest.raises(RuntimeError), counters.timed("data_wait_ns"):
        raise RuntimeError
    assert counters.snapshot().data_wait_seconds > 0


def test_the_time_to_the_first_batch_is_none_before_it():
    assert Counters().snapshot().seconds_to_first_batch is None
    assert "not yet" in str(Snapshot())


def test_since_gives_the_difference_and_keeps_the_first_batch():
    counters = Counters()
    counters.add("origin_bytes", 100)
    counters.add("samples_skipped_decode", 2)
    counters.add("first_batch_ns", 10**9)
    earlier = counters.snapshot()
    counters.add("origin_bytes", 11)
    counters.add("samples_skipped_decode", 1)
    later = counters.snapshot().since(earlier)
    assert (later.origin_bytes, later.samples_skipped["decode"], later.seconds_to_first_batch) == (11, 1, 1.0)
    assert later.samples_skipped["missing"] == 0


def test_a_snapshot_is_frozen_and_becomes_json():
    snapshot = Snapshot(shards_published=2, shards_complete=5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        snapshot.origin_bytes = 1
    assert json.loads(json.dumps(snapshot.as_dict()))["shards_complete"] == 5


def test_a_snapshot_reads_as_text():
    counters = Counters()
    counters.add("origin_bytes", 1_234_567)
    counters.add("samples_skipped_decode", 3)
    text = str(counters.snapshot())
    assert "1.2 MB" in text
    assert "3 (decode 3) skipped, 0 replaced" in text


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KB"),
        (999_990, "1.0 MB"),
        (1_234_567, "1.2 MB"),
        (4.2e12, "4.2 TB"),
        (4.2e15, "4,200.0 TB"),
    ],
)
def test_bytes_are_shown_in_thousands(number, expected):
    assert format_bytes(number) == expected


@given(st.lists(st.integers(0, 1 << 45), max_size=30))
def test_a_wait_is_counted_in_the_bucket_whose_bound_is_the_first_above_it(waits):
    counters = Counters()
    for waited_ns in waits:
        counters.observe_wait(waited_ns)
    buckets = counters.snapshot().wait_buckets
    bounds = [BUCKET_NS << place for place in range(len(buckets) - 1)]
    assert sum(buckets) == len(waits)
    for place, bound in enumerate(bounds):
        assert sum(buckets[: place + 1]) == sum(waited_ns < bound for waited_ns in waits)


def test_every_metric_has_its_own_name_and_labels_that_tell_its_rows_apart():
    names = [metric.name for metric in (*METRICS, *GIVEN)]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        labels = [row.labels for row in metric.rows]
        assert len(set(labels)) == len(labels) > 0
        assert {len(each) for each in labels} == {len(metric.labels)}
        assert all(row.name.endswith("_ns") == (metric.unit == "seconds") for row in metric.rows)
    assert len(COUNTERS) == sum(len(metric.rows) for metric in METRICS)


def test_since_keeps_what_is_ready_now_and_takes_buckets_apart():
    counters = Counters()
    counters.observe_wait(1)
    counters.set("ready_batches", 3)
    earlier = counters.snapshot()
    counters.observe_wait(1)
    later = counters.snapshot().since(earlier)
    assert (later.ready_batches, later.wait_buckets[0]) == (3, 1)


def test_a_gauge_keeps_its_last_value_by_labels_and_loses_one_that_is_no_number():
    gauges = Gauges()
    gauges.set("source_loss", 2.5, "a")
    gauges.set("source_loss", 1.5, "a")
    gauges.set("source_loss", 0.5, "b")
    gauges.set("source_loss", float("nan"), "b")
    gauges.set("epoch", 3)
    assert gauges.values() == {"source_loss": {("a",): 1.5}, "epoch": {(): 3.0}}


def test_a_gauge_of_an_unknown_metric_or_with_other_labels_fails():
    with pytest.raises(KeyError, match="source_mood"):
        Gauges().set("source_mood", 1.0)
    with pytest.raises(ValueError, match="1 labels"):
        Gauges().set("source_loss", 1.0)
    with pytest.raises(ValueError, match="origin_bytes"):
        Gauges().set("origin_bytes", 1.0)
