"""Two epochs over HTTP, from nothing, with the whole link held to a rate.

Question: when does the first batch come, compared with the time that its bytes need on the link; how long
is the first epoch, compared with the longer of download and compute; and what does the second epoch fetch?

Command: python -m benchmarks.cold

The server is a process of its own. Its link is shared by all connections, and one alone gets all of it
(measured before each run; less is an error), so nobody gains by opening more. Every run begins with empty
caches, and when what was written before is on the disk. All times are read alike from outside: the workers
are taken to be up when the server sees the first request of the run (`to_first_request_seconds` is the time
from iter() to there, mostly the start of processes), and first batch and first epoch count from that moment.

- bytes' time: a batch of mean samples, with what tar adds, at the link's rate. Target: first batch ≤ 1.15 ×
  that + 0.1 s.
- download: all shards once at the link's rate. compute: the contender's own epoch with the bytes near, on
  the same machine in the same round: its second epoch where it has a cache, else a second epoch over the
  paths. Target: first epoch ≤ 1.05 × the longer of the two.

Contenders: streamload (default transform); open_clip's loader with `pipe:curl`, as its documentation has
it; webdataset with cache_dir; and of the other peers those that can read over HTTP: Hugging Face datasets and
SPDL the tars, LitData and MosaicML Streaming what was made of the tars in their own formats, with a
downloader of ours, as they bring none. open_clip, Hugging Face datasets and SPDL have no cache: they can't do
but fetch again. Captions to ids by a word tokenizer.

Result: results/cold.json; docs/results/other-loaders.md has it as a table.

Explanation: open_clip collects 1,000 samples per worker before the first batch, webdataset downloads a
whole shard per worker before the first sample; streamload follows the index of shards that are still
arriving, and takes the first batch from the first samples of each.
"""

import os
from pathlib import Path
from typing import Any

from benchmarks import link, machine, near, turns
from benchmarks.contenders.job import Job
from benchmarks.near import QUICK_SAMPLES_PER_SHARD, QUICK_SHARDS, SAMPLES_PER_SHARD, SHARDS
from benchmarks.peers import HUGGINGFACE, LITDATA, MOSAIC, OPEN_CLIP, SPDL, STREAMLOAD, WEBDATASET
from benchmarks.turns import Contender

CONTENDERS = [STREAMLOAD, OPEN_CLIP, WEBDATASET, HUGGINGFACE, SPDL, LITDATA, MOSAIC]
RATES = (20e6, 40e6)
FIRST_BATCH_FACTOR, FIRST_BATCH_SECONDS = 1.15, 0.1
EPOCH_FACTOR = 1.05
_CLOCKS_SECONDS = 0.05
"""So well, at least, do the server's clock and the contender's agree."""


def main() -> None:
    given = turns.arguments(__doc__, rounds=3, names=[contender.name for contender in CONTENDERS])
    shards, per_shard = (
        (QUICK_SHARDS, QUICK_SAMPLES_PER_SHARD) if given.quick else (SHARDS, SAMPLES_PER_SHARD)
    )
    rates = RATES[1:] if given.quick else RATES
    places = turns.interpreters(given)
    contenders = turns.chosen(given, CONTENDERS)
    rows: list[dict[str, Any]] = []
    with turns.photographs(shards * per_shard, per_shard) as (directory, total_bytes):
        conversions = near.converted(contenders, places, directory / "shards", shards)
        for round_ in range(given.rounds):
            for contender in turns.rotated(contenders, round_):
                its_bytes = conversions.get(contender.name, {}).get("bytes", total_bytes)
                job = {
                    "samples": shards * per_shard,
                    "epochs": 2,
                    "seed": round_,
                    "packages": places.packages(),
                    **contender.job,
                }
                python, is_quick = places.of(contender), given.quick
                rows += measure(contender, job, python, directory, shards, its_bytes, rates, is_quick)
    content = turns.content(given, settings(shards * per_shard, shards, total_bytes, rates), rows)
    medians = content["medians"]
    turns.write(
        given,
        "cold",
        {
            **content,
            "conversions": conversions,
            "ratios": {
                name: {
                    "first batch": row["first_batch_seconds"] / row["first_batch_limit_seconds"],
                    "first epoch": row["epoch_1_seconds"] / row["epoch_1_limit_seconds"],
                }
                for name, row in medians.items()
            },
            "targets": targets(medians, rates),
        },
    )


def settings(samples: int, shards: int, total_bytes: int, rates: tuple[float, ...]) -> dict[str, Any]:
    """What the result says of the work."""
    return {**near.settings(samples, shards, total_bytes), "rates": list(rates)}


def measure(
    contender: Contender,
    job: dict[str, Any],
    python: Path,
    directory: Path,
    shards: int,
    total_bytes: int,
    rates: tuple[float, ...],
    is_quick: bool,  # nothing is made of its numbers: a busy machine may give the link less
) -> list[dict[str, Any]]:
    """A run at each rate, and before them the epoch with the bytes near of one that has no cache."""
    least_share = 0.0 if is_quick else link.LEAST_SHARE
    compute = None
    if contender.reads == "path":
        at_hand = Job(urls=contender.data(str(directory / "shards"), shards), **job)
        compute = _seconds(turns.run(contender, at_hand, python).epochs[1])
    rows = []
    for rate in rates:
        with link.serving(directory / "shards", rate) as line:
            url = f"{line.url}/00000.tar"
            measured = link.measured_bytes_per_second(url, rate, least_share=least_share)
            row = over_link(contender, job, python, directory, shards, line)
        row["compute_seconds"] = compute or row["epoch_2_seconds"]
        row["download_seconds"] = total_bytes / rate
        row["epoch_1_limit_seconds"] = EPOCH_FACTOR * max(row["compute_seconds"], row["download_seconds"])
        row["bytes_time_seconds"] = Job.batch_size * total_bytes / job["samples"] / rate
        row["first_batch_limit_seconds"] = (
            FIRST_BATCH_FACTOR * row["bytes_time_seconds"] + FIRST_BATCH_SECONDS
        )
        row["label"] = f"{contender.name} at {rate / 1e6:.0f} MB/s"
        rows.append({**row, "bytes_per_second": rate, "link_measured_bytes_per_second": measured})
    return rows


def over_link(
    contender: Contender, job: dict[str, Any], python: Path, directory: Path, shards: int, line: link.Link
) -> dict[str, Any]:
    url = contender.data(line.url, shards)
    if contender.adapter == "openclip":
        url = f"pipe:curl -f -s -L {url}"
    load = machine.load()
    os.sync()  # what those before have written isn't on its way to the disk any more
    with turns.empty_directory(directory) as cache:
        ran = turns.run(contender, Job(urls=url, cache_dir=str(cache), **job), python)
    first, second = ran.epochs
    asked = min(at for at, _ in line.requests(first.began - _CLOCKS_SECONDS, first.ended))
    assert asked < first.first_batch, "no request was seen before the first batch"
    return {
        "contender": contender.name,
        "round": job["seed"],
        "load_before": load,
        "imports_seconds": ran.result.imported - ran.started,
        "to_first_request_seconds": asked - first.began,
        "first_batch_seconds": first.first_batch - asked,
        "iter_to_first_batch_seconds": first.first_batch - first.began,
        "epoch_1_seconds": first.ended - asked,
        "epoch_1_bytes": line.fetched_bytes(ran.started, second.began),
        "epoch_2_first_batch_seconds": second.first_batch - second.began,
        "epoch_2_seconds": _seconds(second),
        "epoch_2_bytes": line.fetched_bytes(second.began, float("inf")),
        "images": first.images,
        "limits": ran.result.limits,
        "notes": ran.result.notes,
        "versions": ran.result.versions,
    }


def targets(medians: dict[str, dict[str, Any]], rates: tuple[float, ...]) -> list[dict[str, Any]]:
    found = []
    for rate in rates:
        row = medians.get(f"streamload at {rate / 1e6:.0f} MB/s")
        if row is None:
            continue
        at = f"at {rate / 1e6:.0f} MB/s"
        found.append(
            turns.target(
                f"first batch {at}, s", row["first_batch_seconds"], at_most=row["first_batch_limit_seconds"]
            )
        )
        found.append(
            turns.target(f"first epoch {at}, s", row["epoch_1_seconds"], at_most=row["epoch_1_limit_seconds"])
        )
        found.append(turns.target(f"bytes fetched in epoch 2 {at}", row["epoch_2_bytes"], at_most=0))
    return found


def _seconds(epoch: Any) -> float:
    return epoch.ended - epoch.began


if __name__ == "__main__":
    main()
