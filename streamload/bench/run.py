"""The measurements in turn, and what comes of them: rows, medians, ratios, versions, a verdict."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from streamload.bench import machine
from streamload.bench.data import Data, prepare
from streamload.bench.job import Job
from streamload.bench.rounds import Row, medians, rotated
from streamload.bench.verdict import Figures, Verdict, verdict
from streamload.errors import OptionError, StreamloadError
from streamload.options import read_settings

NAMES = (
    "origin",
    "disk",
    "decode alone",
    "floor, uint8",
    "floor, float32",
    "streamload",
    "webdataset",
    "open_clip",
)
_SAMPLES_PER_WORKER = 1000
_LIMIT_SECONDS = 900
_PACKAGES = ("streamload", "torch", "simplejpeg", "pillow", "webdataset", "open_clip_torch")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure with.

    Attributes:
        workers: processes of each contender; None for as many as there are cores.
        batch_size: of each contender.
        rounds: how often each is measured.
        samples: that are read in a round; None for 1,000 for each worker.
        tokenizer: a model of open_clip's whose tokenizer is used; None leaves captions as strings.
        step_seconds: what a training step takes; None where that isn't known.
        cache_dir: a temporary directory is made beside it; None for the setting's.
        storage_options: for fsspec.
    """

    workers: int | None = None
    batch_size: int = 64
    rounds: int = 3
    samples: int | None = None
    tokenizer: str | None = None
    step_seconds: float | None = None
    cache_dir: str | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured.

    Attributes:
        settings: workers, batch size, rounds, samples, tokenizer.
        data: the shards, by names without secrets, and what they hold.
        rounds: a row for each measurement of each round.
        medians: of each measurement over the rounds.
        left_out: measurements that weren't possible, and why.
        verdict: what limits, and what to change.
    """

    settings: Row
    data: Row
    rounds: list[Row]
    medians: dict[str, Row]
    left_out: dict[str, str]
    verdict: Verdict

    def as_dict(self) -> Row:
        """Plain values, ready for JSON; with the machine and the versions."""
        return {
            "benchmark": "streamload bench",
            "machine": machine.describe(),
            "versions": _versions(),
            "settings": self.settings,
            "data": self.data,
            "rounds": self.rounds,
            "medians": self.medians,
            "left_out": self.left_out,
            "verdict": {
                "first_epoch": self.verdict.first_epoch,
                "later_epochs": self.verdict.later_epochs,
                "lines": list(self.verdict.lines),
            },
        }


def bench(
    urls: Sequence[str], options: BenchOptions, on_step: Callable[[str], None] = lambda step: None
) -> Report:
    """Measure everything on some shards, in turn.

    Args:
        urls: as for make_loader; of them the first shards that have enough samples.
        options: what to measure with.
        on_step: is told what is being done.

    Raises:
        UrlError, OriginError, ShardError, NoValidSamples, OptionError: these shards can't be measured.
        StreamloadError: a measurement failed.
    """
    cores = len(os.sched_getaffinity(0))
    workers = options.workers or cores
    wanted = options.samples or _SAMPLES_PER_WORKER * workers
    if options.tokenizer is not None and find_spec("open_clip") is None:
        raise OptionError(f"--tokenizer={options.tokenizer}: open_clip is not installed here")
    beside = read_settings(cache_dir=options.cache_dir).cache_dir.absolute().parent
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="streamload-bench-", dir=beside) as directory:
        on_step("getting the shards")
        data = prepare(urls, wanted, options.batch_size, options.storage_options, Path(directory) / "tier")
        job = Job(
            name="",
            urls=list(data.urls),
            paths=list(data.paths),
            tier=data.tier,
            directory=directory,
            workers=workers,
            batch_size=options.batch_size,
            samples=min(wanted, data.usable),
            size_bytes=data.size_bytes,
            seed=0,
            tokenizer=options.tokenizer,
            storage_options=dict(options.storage_options) if options.storage_options else None,
        )
        rounds, left_out = _in_turn(job, options.rounds, _left_out(data), data.bytes_per_sample, on_step)
    found = medians(rounds)
    settings = {
        "workers": workers,
        "batch_size": options.batch_size,
        "rounds": options.rounds,
        "samples": job.samples,
        "tokenizer": options.tokenizer,
        "step_seconds": options.step_seconds,
    }
    figures = figures_of(found, data, workers, cores, options)
    held = {
        "shards": list(data.names),
        "bytes": data.size_bytes,
        "samples": data.samples,
        "usable": data.usable,
        "mean_width": data.width,
        "mean_height": data.height,
    }
    return Report(settings, held, rounds, found, left_out, verdict(figures))


def figures_of(
    found: Mapping[str, Row], data: Data, workers: int, cores: int, options: BenchOptions
) -> Figures:
    """What the verdict is about."""
    ours, step = found["streamload"], options.step_seconds
    return Figures(
        link=found["origin"]["images_per_second"] if "origin" in found else None,
        disk=found["disk"]["images_per_second"] if "disk" in found else None,
        decode=found["decode alone"]["images_per_second"],
        loader=ours["images_per_second"],
        consumer=options.batch_size / step if step else None,
        floor_cpu_us=found["floor, float32"]["cpu_us_per_image"],
        loader_cpu_us=ours["cpu_us_per_image"],
        workers=workers,
        cores=cores,
        width=data.width,
        height=data.height,
        size_bytes=data.size_bytes,
        samples=data.usable,
        batch_size=options.batch_size,
    )


def _left_out(data: Data) -> dict[str, str]:
    left_out = {}
    if data.tier is None:
        left_out["origin"] = "the shards are local files: nothing is fetched"
    if find_spec("open_clip") is None or find_spec("open_clip_train") is None:
        left_out["open_clip"] = "it is not installed here"
    return left_out


def _in_turn(
    job: Job,
    rounds: int,
    left_out: dict[str, str],
    bytes_per_sample: float,
    on_step: Callable[[str], None],
) -> tuple[list[Row], dict[str, str]]:
    """The rows of all rounds, and what turned out not to be possible."""
    rows: list[Row] = []
    for round_ in range(rounds):
        for name in rotated(NAMES, round_):
            if name in left_out:
                continue
            on_step(f"round {round_ + 1} of {rounds}: {name}")
            said = _measured(replace(job, name=name, seed=round_))
            if "left_out" in said:
                left_out[name] = said["left_out"]
                continue
            if "images_per_second" not in said:
                said["images_per_second"] = said["bytes_per_second"] / bytes_per_sample
            rows.append({"label": name, "round": round_, **said})
    return rows, left_out


def _measured(job: Job) -> Row:
    """A measurement in a process of its own; nothing of it is left when this returns."""
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("STREAMLOAD_", "WDS_"))
    }
    environ["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "streamload.bench.measures"]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # so that its own workers can be ended with it
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
        if process.returncode:
            errors.seek(0)
            last = errors.read().strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
            raise StreamloadError(f"{job.name} failed: {last[0]}")
    said: Row = json.loads(output.splitlines()[-1])
    if "error" in said:
        raise StreamloadError(f"{job.name}: {said['error']}")
    return said


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
