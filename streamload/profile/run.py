"""Runs the measurements in rounds, each in its own process, and reports rows, medians and a verdict."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from streamload.errors import OptionError, StreamloadError
from streamload.options import read_settings
from streamload.profile import machine
from streamload.profile.data import BenchData, prepare
from streamload.profile.measures import MEASURES, MeasureJob, ProfileOptions, Row
from streamload.profile.verdict import BenchFigures, BenchVerdict, verdict

T = TypeVar("T")

_SAMPLES_PER_WORKER = 1000
_LIMIT_SECONDS = 900
_PACKAGES = ("streamload", "torch", "simplejpeg", "pillow", "open_clip_torch")


@dataclass(frozen=True, slots=True)
class Report:
    """The result.

    Attributes:
        settings: workers, batch size, rounds, samples, tokenizer, step_seconds.
        data: the shards' names, without secrets, and their contents.
        rounds: one row per measurement and round.
        medians: of each measurement over the rounds.
        left_out: measurements that weren't possible, with the reason.
        verdict: what limits the training, and what to change.
    """

    settings: Row
    data: Row
    rounds: list[Row]
    medians: dict[str, Row]
    left_out: dict[str, str]
    verdict: BenchVerdict

    def as_dict(self) -> Row:
        """Plain values for JSON, with the machine and the versions."""
        head = {"benchmark": "streamload bench", "machine": machine.describe(), "versions": _versions()}
        return head | asdict(self)


def profile(
    urls: Sequence[str], options: ProfileOptions, on_step: Callable[[str], None] = lambda step: None
) -> Report:
    """Measure on the first of some shards: as many as have enough samples.

    Args:
        urls: as for make_loader.
        options: how to measure.
        on_step: called with a description of each step.

    Raises:
        UrlError, OriginError, ShardError, NoValidSamples, OptionError: these shards can't be measured.
        StreamloadError: a measurement failed.
    """
    samples = options.samples or _SAMPLES_PER_WORKER * options.workers
    if options.tokenizer is not None and find_spec("open_clip") is None:
        raise OptionError(f"--tokenizer={options.tokenizer}: open_clip is not installed here")
    beside = read_settings(cache_dir=options.cache_dir).cache_dir.absolute().parent
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="streamload-bench-", dir=beside) as directory:
        on_step("getting the shards")
        data = prepare(urls, samples, options.batch_size, options.storage_options, Path(directory) / "tier")
        job = MeasureJob("", 0, directory, min(samples, data.usable), data, options)
        rows, left_out = _run_rounds(job, on_step)
    measured = medians(rows)
    names = ("workers", "batch_size", "rounds", "tokenizer", "step_seconds")
    settings = {"samples": job.samples, **{name: getattr(options, name) for name in names}}
    return Report(
        settings, data.as_dict(), rows, measured, left_out, verdict(_figures(measured, data, options))
    )


def rotated(contenders: Sequence[T], round_: int) -> list[T]:
    """The order of a round: each round starts one place later, so that drift of the machine affects all."""
    start = round_ % len(contenders)
    return [*contenders[start:], *contenders[:start]]


def medians(rows: Sequence[Row]) -> dict[str, Row]:
    """For the rows of each label, the median of each number over the rounds."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["label"], []).append(row)
    return {
        label: {
            key: statistics.median(row[key] for row in group)
            for key, value in group[0].items()
            if isinstance(value, (int, float)) and key != "round"
        }
        for label, group in groups.items()
    }


def _figures(measured: Mapping[str, Row], data: BenchData, options: ProfileOptions) -> BenchFigures:
    ours, step = measured["streamload"], options.step_seconds
    return BenchFigures(
        link=measured["origin"]["images_per_second"] if "origin" in measured else None,
        disk=measured["disk"]["images_per_second"] if "disk" in measured else None,
        loader=ours["images_per_second"],
        consumer=options.batch_size / step if step else None,
        floor_cpu_us=measured["floor, float32"]["cpu_us_per_image"],
        loader_cpu_us=ours["cpu_us_per_image"],
        workers=options.workers,
        cores=len(os.sched_getaffinity(0)),
        width=data.width,
        height=data.height,
        size_bytes=data.size_bytes,
        samples=data.usable,
        batch_size=options.batch_size,
    )


def _run_rounds(job: MeasureJob, on_step: Callable[[str], None]) -> tuple[list[Row], dict[str, str]]:
    """The rows of all rounds, and the measurements that weren't possible, with the reason."""
    rows: list[Row] = []
    rounds = job.options.rounds
    left_out = {} if job.data.tier else {"origin": "the shards are local files: nothing is fetched"}
    for round_ in range(rounds):
        for name in rotated(list(MEASURES), round_):
            if name in left_out:
                continue
            on_step(f"round {round_ + 1} of {rounds}: {name}")
            row = _measured(replace(job, name=name, seed=round_))
            if "left_out" in row:
                left_out[name] = row["left_out"]
                continue
            if "images_per_second" not in row:
                row["images_per_second"] = row["bytes_per_second"] * job.data.usable / job.data.size_bytes
            rows.append({"label": name, "round": round_, **row})
    return rows, left_out


def _measured(job: MeasureJob) -> Row:
    """Run one measurement in its own process; none of its processes survives."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("STREAMLOAD_")}
    environ["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "streamload.profile.measures"]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # a process group: its workers are killed with it
        )
        try:
            output = process.communicate(job.to_json(), timeout=_LIMIT_SECONDS)[0]
        except subprocess.TimeoutExpired:
            raise StreamloadError(
                f"{job.name} took more than {_LIMIT_SECONDS} s; give fewer --samples"
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode or not output.strip():  # the status is lost where SIGCHLD is ignored
            errors.seek(0)
            last = errors.read().strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
            raise StreamloadError(f"{job.name} failed: {last[0]}")
    row: Row = json.loads(output.splitlines()[-1])
    if "error" in row:
        raise StreamloadError(f"{job.name}: {row['error']}")
    return row


def _versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
