"""The benchmarks' small forms run and say what they should; the numbers are not looked at.

`make test` runs one of them, in tests/benchmarks/test_openclip.py.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import arrival, machine, peer_tables, report, shuffle_report
from examples.photograph_shards import write_photograph_shards
from streamload.options import file_system
from tests.support import mounts
from tests.support.nodes import why_no_nodes

pytestmark = [pytest.mark.deep, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]

METRICS = {
    "cold": {"first_batch_seconds", "epoch_1_seconds", "epoch_2_seconds", "epoch_1_bytes", "epoch_2_bytes"},
    "warm": {"images_per_second", "cpu_us_per_image"},
    "memory": {"peak_bytes", "steady_bytes", "before_bytes"},
    "scaling": {"images_per_second", "cpu_us_per_image"},
    "consumer": {"images_per_second", "waited_share"},
    "half": {"held_bytes", "fetched_bytes", "images_per_second"},
}


OWN_METRICS = {
    "cold_large": {"first_batch_seconds", "epoch_1_seconds", "epoch_2_seconds", "epoch_1_bytes"},
    "small_shards": {"seconds", "samples_per_second", "cpu_us"},
    "mount": {
        *("first_batch_seconds", "first_batch_cpu_seconds", "first_batch_server_cpu_seconds"),
        *("cpu_us", "warm_cpu_us", "read_times"),
    },
    "small_cache": {"seconds", "first_batch_seconds", "fetched", "requests", "range_reads"},
    "hits": {"hits", "hits_counted", "expected", "limit_bytes", "live_bytes", "data_bytes"},
    "fill": {"bytes_per_cpu_second", "bytes_per_second", "cpu_ns_per_byte"},
    "scale": set(),
    "flat": {"private_bytes", "slope"},
    "verification": {"checked", "check_us_per_image", "cpu_us_per_image", "share"},
}


def run_quickly(name: str, out: Path, *more: str) -> dict[str, Any]:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--out", str(out)]
    command += ["--python", sys.executable, *more]
    subprocess.run(command, cwd=ROOT, check=True, timeout=380)
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", ["cold", "warm", "memory"])
def test_a_benchmark_writes_machine_versions_seeds_rounds_and_medians(name: str, tmp_path: Path) -> None:
    contender = "streamload, last 10 batches kept" if name == "warm" else "streamload"
    out = tmp_path / f"{name}.json"
    result = run_quickly(name, out, "--contenders", contender, "--openclip-python", "none")

    assert {"cpu", "cores", "memory_bytes", "kernel"} == result["machine"].keys()
    commits = [commit and commit.removesuffix("+") for commit in (result["commit"], machine.commit())]
    assert commits[0] == commits[1]  # None outside a clone, or in one that git doesn't trust
    assert result["versions"][contender].keys() >= {"python", "streamload", "torch"}
    assert result["seeds"] == [0]
    assert [row["images"] for row in result["rounds"]] == [256 if name == "memory" else 128]
    assert result["rounds"][0].get("changed_batches", 0) == 0
    (medians,) = result["medians"].values()
    assert medians.keys() >= METRICS[name]
    assert result["targets"]


def test_the_hand_over_is_compared_with_a_copy_and_with_workers_that_take_turns(tmp_path: Path) -> None:
    result = run_quickly("handover", tmp_path / "out.json")
    assert [row["label"] for row in result["rounds"] if row["workers"] == 2] == [
        "copy alone, 2",
        "hand-over, 2 workers",
        "a core is busy, 2 workers, in turn",
        "a core is busy, 2 workers, claimed",
    ]
    assert all(row["bytes_per_second"] > 0 for row in result["rounds"])
    assert report.tables_of({"handover": result})["handover"].count("\n") == 7


def test_a_devices_decoder_is_timed_and_compared_with_the_hosts_by_kind_of_image(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.gpu_decode", "--quick", "--device", "cpu", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=380)
    result = json.loads(out.read_text())
    loaders = [label for label in result["medians"] if label.startswith("loader, ")]
    cores = [count for count in (1, 2) if count <= len(os.sched_getaffinity(0))]
    assert loaders == [f"loader, {way}, {n} cores" for n in cores for way in ("Pillow", "host", "device")]
    alone = ["host", "decoder alone, 8", "resize alone, 8", "device, 8"]
    assert list(result["medians"]) == [*alone, *loaders]
    assert all(row["images_per_second"] > 0 for row in result["rounds"])
    assert {"4:2:0, quality 85", "progressive, 4:2:0", "gray"} < result["differences"].keys()
    assert {kind["same"] for kind in result["differences"].values()} == {1.0}  # both are the host's
    assert result["device"] == "cpu"
    of_workers, *of_a_gpu = result["targets"]
    assert of_workers["value"] > 0
    assert {target["met"] for target in of_a_gpu} == {None}
    tables = report.tables_of({"gpu_decode": result})
    assert all(f"{label} |" in tables["gpu_decode"] for label in result["medians"])
    ((_, chart),) = peer_tables.charts_of({"gpu_decode": result}).values()
    assert "three decoders, cpu (small form: no figures)" in chart
    assert chart.count("<polyline") == 3


def test_what_a_worker_spends_on_an_image_that_the_device_decodes_is_set_beside_decoding_it(
    tmp_path: Path,
) -> None:
    result = run_quickly("decode_workers", tmp_path / "out.json")
    host, device, text = (f"{way}, batches of 16" for way in ("host", "device", "device, text"))
    assert list(result["medians"]) == [host, device, text]
    ratios = result["ratios"]["worker_cpu_microseconds"]
    assert ratios[host] == 1
    assert 0 < ratios[device] < 1  # no matter how busy the machine is: it decodes nothing
    assert [target["value"] for target in result["targets"]] == [
        result["medians"][device]["worker_cpu_microseconds"]
    ]
    table = report.tables_of({"decode_workers": result})["decode_workers"]
    assert all(f"{label} |" in table for label in (host, device, text))


def test_streamload_is_compared_with_the_floor_of_its_kind_and_its_stages_are_timed(tmp_path: Path) -> None:
    contenders = ["floor, uint8", "streamload, uint8", "stages, uint8"]
    result = run_quickly(
        "overhead", tmp_path / "out.json", "--openclip-python", "none", "--contenders", *contenders
    )

    floor, ours, stages = (result["medians"][name] for name in contenders)
    turns = [(row["contender"], row.get("turn"), row["images"]) for row in result["rounds"]]
    assert turns == [(name, turn, 128) for name in contenders[1::-1] for turn in (0, 1)] + [
        (contenders[2], None, 128)
    ]
    assert 60 < ours["channel_mean"] < 200  # levels, not normalised

    def by_turn(metric: str) -> float:
        values = [row[metric] for row in result["rounds"]]
        return statistics.median([ours / floor for ours, floor in zip(values[:2], values[2:4], strict=True)])

    found = {target["claim"]: target["value"] for target in result["targets"] if target["value"] is not None}
    assert found == {
        "streamload, uint8: × the CPU time of floor, uint8": by_turn("loading_us_per_image"),
        "streamload, uint8: × the images/s of floor, uint8": by_turn("images_per_second"),
        "hand-over of a uint8 image, worker and rank, µs": stages["hand-over"] + stages["rank"],
        "index and order, µs a sample": sum(  # which is not what + gives, from Python 3.12 on
            (stages["order"], stages["what is wanted and done"], stages["entry"])
        ),
        "tokenizing, µs a caption": stages["tokenize"],
    }
    assert floor["consumer_us_per_image"] == 0 < ours["consumer_us_per_image"]
    loading = ours["cpu_us_per_image"] - ours["consumer_us_per_image"]
    assert ours["loading_us_per_image"] == pytest.approx(loading)
    named = result["settings"]["stages"]
    assert sum(stages[stage] for stage in named) == pytest.approx(stages["cpu_us_per_image"])
    assert all(stages[stage] > 0 for stage in named if stage not in {"normalise", "the rest"})
    assert stages["normalise"] == 0
    tables = report.tables_of({"overhead": result})
    assert tables["overhead"].count("\n") == 2
    assert tables["stages"].count("\n") == 2 + len(named)


@pytest.mark.parametrize("name", ["cold_large", "hits", "fill", "verification", "scale", "flat"])
def test_a_benchmark_of_streamload_alone_writes_the_same(name: str, tmp_path: Path) -> None:
    result = run_quickly(name, tmp_path / f"{name}.json", "--openclip-python", "none")

    assert {"python", "streamload"} <= set().union(*result["versions"].values())
    assert result["seeds"] == [0]
    assert all(medians.keys() >= OWN_METRICS[name] for medians in result["medians"].values())
    assert all(target["value"] is not None for target in result["targets"])
    assert report.tables_of({name: result})[name].count("\n") >= 2
    if name == "cold_large":
        assert result["settings"]["shards"] == 2
        assert [row["epoch_1_bytes"] for row in result["rounds"]] == [result["settings"]["bytes"]]
        assert [row["epoch_2_bytes"] for row in result["rounds"]] == [0]
    if name == "hits":
        assert [row["epoch"] for row in result["rounds"]] == [1, 2, 3] * 2
        assert {row["samples"] for row in result["rounds"]} == {32 * 24}
        assert result["rounds"][0]["fetched_bytes"] >= result["settings"]["bytes"]
        assert all(0 < row["live_bytes"] < row["limit_bytes"] for row in result["rounds"])
    if name == "scale":
        assert list(result["medians"]) == [
            "idle DataLoader, 4 workers",
            "0 workers",
            "4 workers",
            "following",
        ]
        times = {
            "import_seconds",
            "make_loader_seconds",
            "iter_seconds",
            "start_seconds",
            "first_batch_seconds",
        }
        sizes = {"above_bytes", "above_later_bytes", "above_peak_rss_bytes"}
        assert result["medians"]["4 workers"].keys() >= times | sizes | {"start_cpu_seconds"}
        store = result["store"]
        assert list(store["medians"]) == ["4 ranks", "8 ranks"]
        assert store["gloo"]["sockets_by_mixing"] == 0
        assert store["extrapolated_start"]["ranks"] == result["settings"]["ranks"]
        assert all(target["value"] is not None for target in store["targets"])
        assert report.tables_of({name: result})["scale_store"].count("\n") == 4
    if name == "verification":  # every sample of the epoch, and none
        assert [row["checked"] for row in result["rounds"]] == [128, 0]


@pytest.mark.skipif(bool(why_no_nodes()), reason=why_no_nodes())
def test_the_first_batches_of_nodes_that_lost_one_or_have_a_slow_one_are_measured(tmp_path: Path) -> None:
    result = run_quickly("nodes", tmp_path / "out.json")

    assert list(result["medians"]) == ["after losing a node", "beside a slow node"]
    assert all(row["first_batch_seconds"] > 0 for row in result["medians"].values())
    assert report.tables_of({"nodes": result})["nodes"].count("\n") == 3


@pytest.mark.skipif(bool(mounts.why_not()), reason=mounts.why_not())
def test_shards_on_a_mount_are_measured_beside_the_same_over_http(tmp_path: Path) -> None:
    result = run_quickly("mount", tmp_path / "out.json")
    assert {*result["medians"]} == {"mount", "http", "disk"}
    assert all(medians.keys() >= OWN_METRICS["mount"] for medians in result["medians"].values())
    assert [row["read_times"] for row in result["medians"].values()] == pytest.approx([1, 0, 0], abs=0.01)
    assert report.tables_of({"mount": result})["mount"].count("\n") == 4


def test_many_small_shards_are_measured_beside_webdataset_by_epoch(tmp_path: Path) -> None:
    result = run_quickly("small_shards", tmp_path / "out.json")
    runs = [(name, shards) for shards in (20, 60) for name in ("streamload", "webdataset")]
    assert list(result["medians"]) == [
        f"{name}, {shards} shards of 8, epoch {epoch}" for name, shards in runs for epoch in (1, 2)
    ]
    assert all(medians.keys() >= OWN_METRICS["small_shards"] for medians in result["medians"].values())
    assert [target["value"] > 0 for target in result["targets"]] == [True, True]
    assert report.tables_of({"small_shards": result})["small_shards"].count("\n") == 9


def test_packed_shards_are_measured_beside_the_parquet_they_were_made_of(tmp_path: Path) -> None:
    result = run_quickly("converted", tmp_path / "out.json")
    assert {*result["medians"]} == {
        *("pack, 1 jobs", "pack, 2 jobs", "streamload, shards", "Parquet, buffer", "Parquet, any row")
    }
    rows = [row for name, row in result["medians"].items() if "pack" not in name]
    assert all(row.keys() >= {"cpu_us", "samples_per_second", "first_batch_seconds"} for row in rows)
    assert report.tables_of({"converted": result})["converted"].count("\n") == 4


def test_a_small_cache_is_measured_with_and_without_lanes_and_window_that_fit(tmp_path: Path) -> None:
    result = run_quickly("small_cache", tmp_path / "out.json", "--contenders", "defaults")

    assert [row["epoch"] for row in result["rounds"]] == [1, 2]
    assert all(medians.keys() >= OWN_METRICS["small_cache"] for medians in result["medians"].values())
    assert {row["samples"] for row in result["rounds"]} == {1000}
    assert result["targets"][1]["met"]


def test_a_start_is_measured_beside_a_bare_loaders_and_asks_the_origin_for_nothing(tmp_path: Path) -> None:
    loaders = ["streamload, fork", "bare DataLoader, fork"]
    commands = ["streamload --help", "streamload warm, to its first request"]
    result = run_quickly("start", tmp_path / "out.json", "--contenders", *loaders, *commands)

    medians = result["medians"]
    assert list(medians) == [*loaders, *commands]
    assert [medians[name]["images"] for name in loaders] == [128, 128]
    assert medians[loaders[0]]["fetched_bytes"] == 0
    assert all(row["making_to_first_batch_seconds"] > 0 for row in (medians[name] for name in loaders))
    found = {target["claim"]: target["value"] for target in result["targets"]}
    assert [value is None for value in found.values()] == [False, True, True, False, False]
    assert report.tables_of({"start": result})["start"].count("\n") == 5


def test_a_run_that_is_taken_up_gives_the_rest_of_its_epoch_and_fetches_nothing(tmp_path: Path) -> None:
    result = run_quickly(
        "resume", tmp_path / "out.json", "--contenders", "streamload", "--openclip-python", "none"
    )

    (row,) = result["rounds"]
    assert (row["to_come"], row["images"], row["lost"], row["again"]) == (192, 192, 0, 0)
    assert row["in_order"]
    assert row["fetched_bytes"] == 0
    assert 0 < row["first_batch_seconds"] < row["start_to_first_batch_seconds"]
    assert [target["met"] for target in result["targets"]] == [True] * 3
    table = report.tables_of({"resume": result})["resume"]
    assert all(f"| {name} |" in table for name in ("streamload", *result["cannot"]))


def test_what_a_link_carries_is_measured_beside_curl(tmp_path: Path) -> None:
    result = run_quickly("link_busy", tmp_path / "out.json")

    rows = [row for row in result["rounds"] if "share" in row]
    for warm, curl in zip(rows[::2], rows[1::2], strict=True):
        assert (warm["contender"], curl["contender"]) == ("streamload warm", "curl")
        assert warm["bytes"] >= curl["bytes"] > result["settings"]["shard_bytes"]
    assert result["medians"].keys() == {
        f"{name} at 100 MB/s{scheme}"
        for name in ("streamload warm", "curl")
        for scheme in ("", ", https", ", https-s3", ", s3")
    } | {"streamload warm of one shard, http", "streamload warm of one shard, s3"}
    assert all(0 < row["share"] <= 1.05 for row in rows)
    assert all(warm["requests_per_shard"] <= 3 for warm in rows[::2])
    assert report.tables_of({"link_busy": result})["link_busy"].count("\n") == 9


def test_arrivals_are_followed_by_every_order(tmp_path: Path) -> None:
    result = run_quickly("arrival", tmp_path / "out.json")
    assert {row["contender"] for row in result["rounds"]} == set(arrival.ORDERS)
    assert shuffle_report.arrival_tables(result)["trained"].count("\n") > 2
    assert shuffle_report.trained_chart(result).count("<circle") == 4
    assert all(target["met"] for target in result["targets"]), result["targets"]


def test_the_shuffle_is_measured_beside_a_permutation(tmp_path: Path) -> None:
    result = run_quickly("shuffle", tmp_path / "out.json", "--openclip-python", "none")

    assert result["versions"]["streamload"].keys() >= {"python", "streamload", "numpy"}
    assert result["seeds"] == [0]
    rows = {row["contender"]: row for row in result["rounds"]}
    assert {"permutation", "streamload, default", "streamload, shuffle=0", "cost"} <= rows.keys()
    assert rows["permutation"]["pairs"] < rows["streamload, shuffle=0"]["pairs"]
    assert {row["doubled"] for row in result["rounds"] if row["contender"] != "cost"} == {0}
    assert shuffle_report.tables_of(result)["ranks"].count("\n") > 2


def test_a_tier_on_disk_and_one_in_memory_are_read_and_only_dropped_pages_come_from_the_disk(
    tmp_path: Path,
) -> None:
    dropped, kept = "read: disk, pages dropped", "read: memory"
    result = run_quickly("memory_tier", tmp_path / "out.json", "--contenders", dropped, kept)

    assert [row["images"] for row in result["rounds"]] == [6 * 128] * 2
    assert result["medians"][kept]["disk_bytes_per_image"] == 0
    assert {"images_per_second", "cpu_us_per_image"} <= result["medians"][dropped].keys()
    if file_system(Path(tempfile.gettempdir())).is_memory:
        return
    assert result["medians"][dropped]["disk_bytes_per_image"] > 0


def test_prepared_shards_are_read_without_their_origin(tmp_path: Path) -> None:
    chosen = ["raw-256, uint8", "jpeg-256-q90, none prepared, uint8"]
    result = run_quickly("prepared", tmp_path / "out.json", "--contenders", *chosen)

    assert [(row["images"], row["origin_bytes"]) for row in result["rounds"]] == [(64, 0)] * 2
    assert result["preparing"]["raw"]["bytes_per_image"] > 500_000
    assert result["preparing"]["raw-256"]["bytes_per_image"] > 200_000
    assert result["preparing"]["jpeg-256-q90"]["bytes_per_image"] < 60_000
    assert all(psnr["mean_db"] > 30 for psnr in result["psnr"].values())
    tables = report.tables_of({"prepared": result})
    assert tables["prepared"].count("\n") > 2
    assert tables["preparing"].count("\n") > 2


def test_strategies_of_caching_are_measured_beside_the_datasets_of_articles(tmp_path: Path) -> None:
    chosen = ["Dataset, no cache", "Dataset, a file a sample", "streamload, memory", "streamload, raw"]
    result = run_quickly("strategies", tmp_path / "out.json", "--contenders", *chosen)

    assert [(row["contender"], row["images"]) for row in result["rounds"]] == [(name, 128) for name in chosen]
    tensor_bytes = 3 * 224 * 224 * 4
    kept = {name: row["kept_bytes_per_image"] for name, row in result["medians"].items()}
    assert kept["Dataset, no cache"] == 0
    assert kept["Dataset, a file a sample"] > tensor_bytes
    assert 1000 < kept["streamload, memory"] < 200_000 < kept["streamload, raw"]
    assert all(row["training_loss"] > 0 for row in result["rounds"])
    assert all(row["training_images_per_second"] > 0 for row in result["rounds"])
    assert [target["value"] is None for target in result["targets"]] == [False, True]
    assert report.tables_of({"strategies": result})["strategies"].count("\n") == 1 + len(chosen)


def test_daemons_are_measured_beside_trainings_that_get_the_same_batches(tmp_path: Path) -> None:
    result = run_quickly("daemons", tmp_path / "out.json")

    beside, filled = result["rounds"]
    assert [row["other_batches"] for row in result["rounds"]] == [0, 0]
    assert (beside["daemons"], beside["trainers"], beside["filled"]) == (1, 1, False)
    assert (filled["daemons"], filled["trainers"], filled["filled"]) == (0, 2, True)
    assert (filled["from_origin"], filled["shared_hits"]) == (1.0, result["settings"]["shards"])
    assert beside["from_origin"] >= 1.0
    assert all(0 <= row["waited_share"] < 1 for row in result["rounds"])
    tables = report.tables_of({"daemons": result})
    assert tables["daemons"].count("\n") == 2
    assert tables["daemons_trainers"].count("\n") == 2


def test_a_contender_that_fails_ends_the_benchmark_with_its_own_words(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such luck >&2\nexit 3\n")
    broken.chmod(0o755)
    command = [sys.executable, "-m", "benchmarks.warm", "--quick", "--contenders", "streamload"]
    command += ["--python", str(broken), "--openclip-python", "none"]
    ended = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=380)

    assert ended.returncode != 0
    assert "streamload ended with 3:\nno such luck" in ended.stderr


@pytest.mark.parametrize(
    ("name", "images"), [("scaling", [128] * 2), ("consumer", [128]), ("half", [128] * 3)]
)
def test_a_benchmark_beside_the_peers_writes_rows_a_table_and_a_chart(
    name: str, images: list[int], tmp_path: Path
) -> None:
    result = run_quickly(
        name, tmp_path / f"{name}.json", "--contenders", "streamload", "--openclip-python", "none"
    )

    assert result["seeds"] == [0]
    assert [row["images"] for row in result["rounds"]] == images
    assert all(medians.keys() >= METRICS[name] for medians in result["medians"].values())
    tables = report.tables_of({name: result})
    assert tables[name].count("\n") == 2
    assert tables[f"{name}_chart"].endswith(f"(images/{name}.svg)")
    _, drawing = peer_tables.charts_of({name: result})[name]
    assert result["rounds"][0]["contender"] in "".join(ElementTree.fromstring(drawing).itertext())
    if name == "half":
        assert result["rounds"][0]["fetched_bytes"] >= result["settings"]["bytes"]
        assert all(0 < row["held_bytes"] < result["settings"]["bytes"] for row in result["rounds"])
    if name == "consumer":
        assert all(0 <= row["waited_share"] < 1 for row in result["rounds"])


def test_shards_of_ones_own_are_read_where_they_are(tmp_path: Path) -> None:
    write_photograph_shards(tmp_path / "shards", samples=384, samples_per_shard=128)
    command = ["--contenders", "streamload", "floor", "--openclip-python", "none"]
    result = run_quickly("own", tmp_path / "own.json", f"{tmp_path}/shards/{{00000..00002}}.tar", *command)

    assert result["settings"]["shards"] == 2  # with enough samples
    assert {row["contender"]: row["images"] for row in result["rounds"]} == {"streamload": 256, "floor": 256}
    assert all(medians.keys() >= METRICS["warm"] for medians in result["medians"].values())


def test_a_training_on_the_loaders_batches_is_compared_with_one_on_batches_that_are_there(
    tmp_path: Path,
) -> None:
    out = tmp_path / "gpu_feed.json"
    command = [sys.executable, "-m", "benchmarks.gpu_feed", "--device", "cpu", "--quick", "--out", str(out)]
    command += ["--openclip-python", "none"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=380)
    result = json.loads(out.read_text())

    assert result["device"] == "cpu"
    labels = [
        "synthetic",
        "cold",
        "warm",
        "loader alone",
        "own loop",
        "synthetic, compiled",
        "warm, compiled",
    ]
    assert [(row["label"], row["images"]) for row in result["rounds"]] == [(label, 48) for label in labels]
    fetched = {row["label"]: row["fetched_bytes"] for row in result["rounds"]}
    assert fetched.pop("cold") >= result["settings"]["bytes"]
    assert set(fetched.values()) == {0}
    assert all(0 <= row["waited_share"] < 1 for row in result["rounds"])
    assert [name.partition(",")[0] for name in result["cannot"]] == [
        f"open_clip: {name}" for name in ("synthetic", "streamload", "stock")
    ]
    assert report.tables_of({"gpu_feed": result})["gpu_feed"].count("\n") == 1 + len(labels)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="it says where there is no GPU")
@pytest.mark.parametrize("arguments", [[], ["--device", "cuda", "--quick"], ["--device", "cpu"]])
def test_without_a_gpu_its_benchmark_says_so(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_feed", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "--device cpu" in done.stderr or "torch finds no cuda here" in done.stderr


def test_features_in_a_loader_are_measured(tmp_path: Path) -> None:
    result = run_quickly("features", tmp_path / "out.json", "--contenders", "features")

    assert result["medians"]["features"].keys() >= {"first_cpu_us", "epoch_cpu_us", "epoch_seconds"}
    assert result["medians"]["features"]["read_us"] > 0  # rows were read
    assert report.tables_of({"features": result})["features"].count("\n") == 2


def test_rows_in_columns_are_measured(tmp_path: Path) -> None:
    result = run_quickly("row_columns", tmp_path / "out.json")

    assert result["medians"]["columns"]["disk_ratio"] < 1.05
    assert report.tables_of({"row_columns": result})["row_columns"].count("\n") == 10


def test_what_bucketing_saves_and_costs(tmp_path: Path) -> None:
    result = run_quickly("buckets", tmp_path / "out.json")

    rates = result["ratios"]["rate against the order of the run"]
    assert rates["captions; step; 1"] == 1  # a whole step is padded alike, however it is sorted
    blocks = [rates[f"captions; {way}; 4"] for way in ("blocks of 65,536", "blocks of 4,096", "step")]
    assert blocks == sorted(blocks, reverse=True)
    assert blocks[-1] > 1
    assert all(target["value"] is not None for target in result["targets"])
    assert report.tables_of({"buckets": result})["buckets"].count("\n") == 1 + len(rates) // 4


def test_steps_of_a_transformer_have_less_padding_with_rows_of_like_size(tmp_path: Path) -> None:
    result = run_quickly("naflex_step", tmp_path / "out.json")

    whole, run, *bucketed = (row["padding"] for row in result["medians"].values())
    assert max(bucketed) < min(whole, run)
    assert all(target["value"] > 0 for target in result["targets"])


def test_groups_that_agree_lose_little_of_one_plan(tmp_path: Path) -> None:
    result = run_quickly("bucket_groups", tmp_path / "out.json")

    ratios = result["ratios"]["useful, × one plan"]
    for kind in ("captions", "captions and images"):
        agreed, like, own = (
            ratios[f"{kind}; 4 groups; {way}"] for way in ("agreed", "like cells", "cells of its own")
        )
        assert own < agreed <= like < 1
    assert all(target["met"] for target in result["targets"])


def test_cells_planned_for_all_ranks_are_more_alike_than_those_that_each_packs(tmp_path: Path) -> None:
    result = run_quickly("packing", tmp_path / "out.json")

    for kind in ("mixture", "documents"):
        planned, *others = (row for label, row in result["medians"].items() if label.startswith(kind))
        assert planned["slowest"] < min(row["slowest"] for row in others)
        assert planned["useful"] > max(row["useful"] for row in others)
        assert planned["filled"] > 0.95


def test_what_a_journal_costs_is_measured(tmp_path: Path) -> None:
    result = run_quickly("journal", tmp_path / "out.json")

    assert 0.9 < result["medians"]["training"]["ratio"] < 1
    assert 20 < result["medians"]["journal"]["bytes_per_step"] <= 50
    assert len(result["targets"]) == 6
    assert report.tables_of({"journal": result})["journal"].count("\n") == 1 + 6


def test_what_looking_at_runs_costs_is_measured(tmp_path: Path) -> None:
    result = run_quickly("looking", tmp_path / "looking.json", "--rounds", "1")
    assert set(result["medians"]) == {"scrape", "report"}
    assert result["medians"]["scrape"]["series_per_rank"] <= 85 + 9 * result["settings"]["sources"]
    assert len(result["targets"]) == 4


def test_mixing_policies_compares_rules_in_simulated_trainings(tmp_path: Path) -> None:
    result = run_quickly("mixing_policies", tmp_path / "out.json")
    assert result["scores"]["progress"]["all"][0] > result["scores"]["softmax of the loss"]["all"][0]
    assert report.tables_of({"mixing_policies": result})["mixing_policies"].count("\n") == 1 + 7


def test_mixing_clip_trains_a_small_clip_with_fixed_weights_and_with_progress(tmp_path: Path) -> None:
    result = run_quickly("mixing_clip", tmp_path / "out.json")
    samples = [row["samples"] for row in result["rounds"]]
    assert [sum(each.values()) for each in samples] == [2 * 20 * 64] * 4
    assert [len(row["course"]) for row in result["rounds"]] == [2] * 4
    assert len(result["targets"]) == 2
    assert report.tables_of({"mixing_clip": result})["mixing_clip"].count("\n") == 1 + 4
