"""The registry: each metric, declared once; rows of counters, `stats()`, exporters and docs follow from it.

To add a counter: one `counted` line here, and a field of the same name in Snapshot. To add a value that isn't
counted in rows, such as one that belongs to a source: one `given` line, and `Gauges.set` (publishing.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

# Why a sample was skipped or replaced.
CAUSES = {
    "missing": "it lacks a requested image, caption or label, has one of more than 64 MiB, or has a blank "
    "caption where these are skipped",
    "unsupported": "a requested image, caption or label is a sparse file in the tar, or a link to something "
    "outside or to a later member",
    "decode": "its image can't be decoded",
    "too_large": "its image would take more memory or time to decode than max_image_pixels allows",
    "caption": "its caption isn't text, or lacks the requested field",
    "label": "its label isn't an integer, or lacks the requested field",
    "left_out": "leave_out= or loader.leave_out() names it",
}
UNCOUNTED = ("missing", "left_out")
"""Causes of samples that aren't bad: no limit counts them."""

BUCKETS = 24
"""Buckets of the histogram of data waits: number k counts waits below BUCKET_NS << k, the last all others."""
BUCKET_NS = 1 << 14
"""The bound of the first bucket, 16 µs; that of the last but one is 69 s."""


@dataclass(frozen=True, slots=True)
class CounterRow:
    """A counter in each process's row.

    Attributes:
        name: as `Counts.add` takes it; one that ends in _ns is a time, which others see in seconds.
        help: what it counts.
        labels: the values of its metric's labels.
        low: what a value near 0 means; "": nothing special.
        high: what a value near its maximum means.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    low: str = ""
    high: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a rank.

    Attributes:
        name: without the prefix "streamload_" of exporters, and without a counter's suffix "_total".
        kind: a counter only grows; a gauge has any value; a histogram has BUCKETS buckets.
        help: what it is.
        unit: of its values, which its name ends with; "": it is a number.
        labels: beside run and rank.
        rows: the counters that it is the sum of over processes, one for each value of its labels; none: the
            loader gives its values.
        low: what a value near 0 means; "": nothing special.
        high: what a value near its maximum means.
    """

    name: str
    kind: Kind
    help: str
    unit: Literal["", "bytes", "seconds", "ratio"] = ""
    labels: tuple[str, ...] = ()
    rows: tuple[CounterRow, ...] = ()
    low: str = ""
    high: str = ""


def counted(
    name: str,
    means: str,
    *,
    unit: Literal["", "bytes", "seconds"] = "",
    kind: Kind = "counter",
    low: str = "",
    high: str = "",
) -> Metric:
    """Declare a metric without labels, whose row has its name; that of a time ends in _ns."""
    row = name.replace("_seconds", "_ns") if unit == "seconds" else name
    return Metric(name, kind, means, unit, (), (CounterRow(row, means, (), low, high),), low, high)


def given(
    name: str,
    means: str,
    labels: tuple[str, ...] = (),
    *,
    unit: Literal["", "bytes", "seconds", "ratio"] = "",
    kind: Kind = "gauge",
    low: str = "",
    high: str = "",
) -> Metric:
    """Declare a metric whose values the loader gives."""
    return Metric(name, kind, means, unit, labels, (), low, high)


STAGES = (
    CounterRow(
        "bytes_wait_ns",
        "time for which workers waited for bytes to arrive, summed over workers",
        ("bytes",),
        "bytes arrive before they are needed",
        "workers × duration: the origin is the bottleneck",
    ),
    CounterRow(
        "shuffle_wait_ns",
        "time for which workers waited for bytes while the shuffle window held back most samples that "
        "arrived, summed over workers",
        ("shuffle",),
        "samples come as their bytes arrive",
        "workers × duration: `shuffle=` is the bottleneck",
    ),
    CounterRow(
        "read_ns",
        "time that workers spent reading samples from the cache, summed over workers",
        ("read",),
        "samples are in memory when they are read",
        "workers × duration: the disk is the bottleneck",
    ),
    CounterRow(
        "decode_ns",
        "time that workers spent on samples up to decoded pixels; by one image of 16",
        ("decode",),
    ),
    CounterRow(
        "resize_ns", "time that workers spent transforming decoded pixels; by one image of 16", ("resize",)
    ),
    CounterRow("tokenize_ns", "time that workers spent tokenizing, summed over workers", ("tokenize",)),
    CounterRow("collate_ns", "time that workers spent on all else of making batches", ("collate",)),
    CounterRow(
        "hand_over_ns",
        "time that workers and the training's process spent passing batches on",
        ("hand-over",),
        high="duration: values of a batch aren't tensors, and are pickled",
    ),
    CounterRow(
        "device_ns",
        "time for which the training loop waited for a batch's copy to the device",
        ("device",),
        "copies overlap with the training",
        "duration: the copies are the bottleneck",
    ),
    CounterRow(
        "step_ns",
        "time between two batches in which the training loop did its own work",
        ("training",),
        high="duration: data is never late",
    ),
)
"""Seconds by stage. All but the last two are of workers; with num_workers=0 they are of the training."""

METRICS: tuple[Metric, ...] = (
    counted("origin_requests", "requests sent to origins, including retries"),
    counted("origin_bytes", "bytes of shards received from origins", unit="bytes"),
    counted("origin_retries", "requests that were retried after a failure"),
    counted("origin_outages", "times that a process found a server or bucket to be down, and waited for it"),
    counted("shared_requests", "requests sent to the shared cache"),
    counted(
        "shared_bytes",
        "bytes received from the shared cache, including indexes; not part of origin_bytes",
        unit="bytes",
    ),
    counted("shared_hits", "fills whose shard was in the shared cache"),
    counted("shared_misses", "fills whose shard was not in the shared cache"),
    counted(
        "shared_errors",
        "failures and checksum mismatches of the shared cache, after which the origin was used",
    ),
    counted("shared_stored", "shards that this loader stored in the shared cache"),
    counted(
        "shared_not_stored",
        "shards that it could not store: the shared cache refused them, or the run ended",
    ),
    counted("shared_waits", "fills that waited for another node's fill of the same shard"),
    counted("shared_overtakes", "fills of shards that a much slower node was fetching as well"),
    counted(
        "shared_wait_seconds",
        "total time of these waits, summed over concurrent fills",
        unit="seconds",
        low="no other node fetches the same shards at the same time",
    ),
    counted("tier_hits", "shards that were complete in the tier when a reader first needed them in a pass"),
    counted(
        "tier_misses", "shards that were not, and were filled or followed; hits + misses = shards started"
    ),
    counted("shards_published", "shards that this loader's fillers completed and published"),
    counted(
        "shards_complete",
        "distinct shards that this rank has seen complete in the tier, whoever filled them",
    ),
    counted("shards_taken_over", "fills that continued the part of a dead filler"),
    counted("shards_evicted", "shards deleted from the tier to make room"),
    counted("shards_revalidated", "cached shards that were compared with their origin's version"),
    counted("shards_changed", "revalidated shards that had changed, and were fetched again"),
    counted("shards_unverified", "shards used without revalidation, as their origin did not respond"),
    counted("shards_given_up", "shards dropped after their origin failed or the tar was cut"),
    counted("range_reads", "samples read from their origin, as the cache had no space for their shard"),
    counted("checksum_failures", "cached samples that failed their checksum, and were fetched again"),
    counted("samples_yielded", "samples in the batches that the training loop took"),
    counted(
        "samples_unprepared",
        "samples in the batches that workers made whose images weren't prepared, though prepare= asks for it",
        low="the cache has the data prepared",
        high="samples: none is prepared; the log's first lines say why",
    ),
    *(
        Metric(
            f"samples_{fate}",
            "counter",
            f"samples {fate}{how}, by cause",
            labels=("cause",),
            rows=tuple(
                CounterRow(f"samples_{fate}_{cause}", f"samples {fate} because {why}", (cause,))
                for cause, why in CAUSES.items()
            ),
        )
        for fate, how in (("skipped", ""), ("replaced", " by another of their shard"))
    ),
    counted(
        "samples_off_size",
        "samples in batches whose images have another size than their best one, as a block had no room there",
        high="a few percent of samples: a block has too few cells for as many sizes=",
    ),
    counted(
        "samples_of_unknown_size", "samples in batches with sizes= whose images have no size in the index"
    ),
    counted("feature_rows_read", "rows of features that were stored, and came with batches"),
    counted(
        "feature_rows_computed", "rows of features that weren't, and were computed in the training's process"
    ),
    counted("feature_rows_stored", "rows of features that the training's process has stored"),
    counted(
        "feature_rows_refused",
        "rows that it computed and couldn't store: no room, a read-only disk, or a module that has changed",
    ),
    counted("feature_bytes_read", "bytes of rows of features that came with batches", unit="bytes"),
    counted("feature_bytes_stored", "bytes of rows that the training's process has stored", unit="bytes"),
    counted("feature_mismatches", "rows of features that a check found to be other than what is computed"),
    counted("feature_builds", "modules of features that were built in the training's process"),
    counted(
        "feature_saved_seconds",
        "time that rows which were read would have taken to compute, by what a row has taken in this process",
        unit="seconds",
    ),
    counted(
        "feature_read_seconds",
        "time that workers spent reading rows of features, summed over workers",
        unit="seconds",
        high="workers × duration: the disk with the rows is the bottleneck",
    ),
    counted(
        "feature_compute_seconds",
        "time that the training's process spent computing and storing rows of features",
        unit="seconds",
        high="duration: the training mostly computes features; make them ahead",
    ),
    counted("batches_yielded", "batches that the training loop took"),
    counted("fresh_tensors", "tensors allocated because all pooled buffers were still in use"),
    counted(
        "ready_batches",
        "batches of this epoch that workers have made, and the training loop hasn't taken",
        kind="gauge",
        low="the training takes each batch as soon as it is made",
        high="workers × prefetch_factor: data is never late",
    ),
    Metric(
        "ready_bytes",
        "gauge",
        "bytes of these batches, by what they are of",
        "bytes",
        ("modality",),
        tuple(
            CounterRow(f"ready_{modality}_bytes", f"bytes of ready batches: {help_text}", (modality,))
            for modality, help_text in (
                ("image", "images and patches"),
                ("text", "ids of captions, and what goes with them"),
                ("other", "all other tensors"),
            )
        ),
    ),
    Metric(
        "tokens",
        "counter",
        "tokens of captions and patches of images, real and padding, where a batch knows them",
        labels=("modality", "kind"),
        rows=tuple(
            CounterRow(
                f"{modality}_tokens_{kind}",
                f"{help_text} in batches that were made, {kind}",
                (modality, kind),
            )
            for modality, help_text in (("text", "ids of captions"), ("image", "patches of images"))
            for kind in ("real", "padding")
        ),
    ),
    counted(
        "data_wait_seconds",
        "time for which the training loop waited for a batch",
        unit="seconds",
        kind="histogram",
        low="data is never late",
        high="the run's duration: the training only waits for data",
    ),
    counted(
        "blocked_wait_seconds",
        "the part of data_wait_seconds for batches whose worker was waiting for bytes at that time",
        unit="seconds",
        low="data is late for other reasons",
        high="data_wait_seconds: bytes are why data is late",
    ),
    counted("first_batch_seconds", "time from the first iter() to the first batch", unit="seconds"),
    Metric(
        "stage_seconds",
        "counter",
        "where the time goes, by stage, summed over workers",
        "seconds",
        ("stage",),
        STAGES,
    ),
    counted(
        "transform_seconds",
        "time that workers spent decoding, augmenting and tokenizing, summed over workers",
        unit="seconds",
        high="workers × duration: the CPU is the bottleneck",
    ),
)

BY_SOURCE: tuple[Metric, ...] = (
    given("samples", "samples that the training loop took, by source", ("source",), kind="counter"),
    given(
        "source_wait_seconds",
        "time for which workers waited for bytes of a source",
        ("source",),
        unit="seconds",
        kind="counter",
        high="workers × duration: this source's origin is the bottleneck",
    ),
    given("source_weight", "the weight of a source in the mix", ("source",)),
    given("source_share", "the share of a step's samples that a source has", ("source",), unit="ratio"),
    given("source_passes", "whole passes over a source's shards so far", ("source",)),
    given("source_loss", "the loss of a source's samples, as reported by the training", ("source",)),
    given(
        "source_alignment",
        "how well a source's images and texts fit, as reported by the training",
        ("source",),
    ),
    given("source_loss_weight", "the weight of a source's rows in the loss, as decided", ("source",)),
)
GIVEN: tuple[Metric, ...] = (
    *BY_SOURCE,
    given(
        "data_wait_ratio",
        "the share of the last minute in which the training loop waited for data",
        unit="ratio",
        low="data is never late",
        high="1: the training only waits for data",
    ),
    given(
        "waiting_seconds", "how long the training loop has been waiting for its next batch", unit="seconds"
    ),
    given(
        "still_seconds",
        "how long the training loop has neither requested nor got a batch, in an epoch",
        unit="seconds",
    ),
    given("workers", "worker processes that make this rank's batches"),
    given("epoch", "the epoch that the loader is in"),
    given(
        "samples_left_out",
        "samples that keep= or an extension leaves out, by its name; each is counted by one rank",
        ("name",),
        kind="counter",
    ),
    given("extension_value", "a number of an extension, by its name after that of the extension", ("name",)),
    given("tier_bytes", "bytes of the tier that are in use, by all runs", ("tier",), unit="bytes"),
    given("tier_limit_bytes", "its limit", ("tier",), unit="bytes"),
    given(
        "device_memory_ratio",
        "the share of the device's memory that this process's tensors have taken at most",
        unit="ratio",
        high="1: the next larger batch may fail",
    ),
)

BY_NAME = {metric.name: metric for metric in (*METRICS, *GIVEN)}
ROWS: dict[str, CounterRow] = {row.name: row for metric in METRICS for row in metric.rows}
COUNTERS: dict[str, str] = {name: row.help for name, row in ROWS.items()}
"""Descriptions of the counters of a row; the order is the layout of a row, which the buckets follow."""
WIDTH = len(COUNTERS) + BUCKETS
"""The length of a row."""
