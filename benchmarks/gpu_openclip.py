"""open_clip's own training on a GPU: with its own loader, with ours, and on synthetic data (gpu_feed.py)."""

import contextlib
import json
import os
import re
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks import turns
from benchmarks.turns import Row

Data = Literal["synthetic", "stock", "streamload"]

TINY_MODEL = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 64, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
_STEP = re.compile(r"Train Epoch: 0 \[\s*(\d+)/.*?Data \(t\): ([\d.]+)")
_LEAST_SECONDS = 30.0


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        data: where batches come from.
        cores: that it may use.
        is_compiled: with --torchcompile.
    """

    data: Data
    cores: int
    is_compiled: bool = False

    @property
    def label(self) -> str:
        compiled = ", compiled" if self.is_compiled else ""
        return f"open_clip: {self.data}, {self.cores} cores{compiled}"


def runs(cores: Sequence[int], *, are_compiled: bool) -> list[Run]:
    """The trainings, the ones that tell most first."""
    most, *fewer = sorted(cores, reverse=True)
    planned = [Run(data, most) for data in ("synthetic", "streamload", "stock")]
    planned += [Run(data, count) for count in fewer for data in ("streamload", "stock")]
    if are_compiled:
        planned += [Run(data, most, is_compiled=True) for data in ("synthetic", "streamload")]
    return planned


class GpuUse:
    """The use of the GPU while a block runs, in percent, by nvidia-smi; None where that is missing."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []

    @contextlib.contextmanager
    def measured(self) -> Iterator["GpuUse"]:
        """Ask ten times a second."""
        command = [
            "nvidia-smi",
            "--query-gpu=utilization.gpu",
            "--format=csv,noheader,nounits",
            "-lms",
            "100",
        ]
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            yield self
            return
        reader = threading.Thread(target=self._read, args=(process,))
        reader.start()
        try:
            yield self
        finally:
            process.terminate()
            reader.join()
            process.wait()

    def mean(self, start: float, stop: float) -> float | None:
        """The mean between two times of the monotonic clock."""
        used = [percent for at, percent in self._samples if start <= at <= stop]
        return statistics.mean(used) if used else None

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                self._samples.append((time.monotonic(), float(line)))


def train(run: Run, python: Path, shards: str, samples: int, *, is_quick: bool, seconds: float) -> Row:
    """Train an epoch; the clock runs from its second line in the log to its last.

    Args:
        run: the training.
        python: with open_clip's training code.
        shards: pattern of local shards.
        samples: of the epoch.
        is_quick: a tiny model on the CPU.
        seconds: after which it is ended.

    Raises:
        TimeoutError: it took too long.
        RuntimeError: it failed; the message ends with what it said last.
    """
    with tempfile.TemporaryDirectory() as place:
        command = _command(run, python, shards, samples, Path(place), is_quick=is_quick)
        environ = {**turns.environment(), "STREAMLOAD_CACHE_DIR": f"{place}/cache"}
        stamps: list[tuple[float, int, float]] = []
        said: list[str] = []
        with GpuUse().measured() as use:
            process = subprocess.Popen(
                command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            timer = threading.Timer(seconds, process.kill)
            timer.start()
            assert process.stdout is not None
            for line in process.stdout:
                said.append(line)
                if match := _STEP.search(line):
                    stamps.append((time.monotonic(), int(match[1]), float(match[2])))
            is_over = not timer.is_alive()
            timer.cancel()
            status = process.wait()
    if is_over:
        raise TimeoutError(f"not done after {seconds:.0f} s")
    if status or len(stamps) < 3:
        raise RuntimeError(f"{run.label} ended with {status}:\n{''.join(said[-20:])}")
    (began, first, _), (ended, last, _) = stamps[1], stamps[-1]
    return {
        "images": last - first,
        "seconds": ended - began,
        "images_per_second": (last - first) / (ended - began),
        "data_seconds_per_step": statistics.median(waited for *_, waited in stamps[1:]),
        "gpu_use": use.mean(began, ended),
    }


def _command(
    run: Run, python: Path, shards: str, samples: int, place: Path, *, is_quick: bool
) -> list[str | Path]:
    """The command of a training."""
    model = "-"
    shape = [
        "--model",
        "ViT-B-32",
        "--batch-size",
        "512",
        "--precision",
        "amp_bf16",
        "--log-every-n-steps",
        "8",
    ]
    if is_quick:
        model = f"{place}/tiny.json"
        Path(model).write_text(json.dumps(TINY_MODEL))
        shape = ["--model", "tiny", "--batch-size", "16", "--device", "cpu", "--precision", "fp32"]
        shape += ["--log-every-n-steps", "1"]
    data = ["--dataset-type", "synthetic"]
    if run.data != "synthetic":
        data = ["--dataset-type", "webdataset", "--train-data", shards]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: run.cores]))
    name = "streamload" if run.data == "streamload" else "stock"
    return [
        *("taskset", "-c", cores, python, "-m", "benchmarks.contenders.openclip_training", name, model),
        *shape,
        *data,
        *("--workers", str(max(1, run.cores - 1)), "--train-num-samples", str(samples), "--epochs", "1"),
        *("--warmup", "10", "--lr", "1e-4", "--save-frequency", "0", "--logs", place, "--name", "run"),
        *(["--torchcompile"] if run.is_compiled else []),
    ]


def has_room(deadline: float) -> bool:
    """Whether one more training can be begun before a time of the monotonic clock."""
    return deadline - time.monotonic() >= _LEAST_SECONDS
