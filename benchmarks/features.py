"""A linear head on a frozen model's features: an epoch by loader, with the features computed or read.

Question: how much CPU time does a sample of a training epoch take if its feature is computed, if a cache of
calls knows it, and if the loader brings it in place of the image? And what does it cost to read a row, to
store it in the first pass, and to keep it on disk?

Command: python -m benchmarks.features

A ViT-tiny of seeded weights (768 bytes of float32 a row) and a linear head over 1,000 classes, on shards of
photographs with labels in a local folder, batches of 64, two workers, samples as listed with the transform of
evaluation. Each contender is a process of its own a round: a first epoch, which stores what it can, then one
that warms up, then three that are measured; of "computed", whose epochs are alike, one after the first. The
CPU time is that of the process and its workers. "computed" runs the model in each epoch; "calls,
torch-module-cache" has that decorator on it, called with the same loader's images and the samples' keys;
"calls, streamload" is `cache_module` in its place; "features" is `Batches(features=…)`. "order" trains
the head on one constant feature, with a loader whose batches have labels alone, by map_sample: what is left
without images and features.

Result: results/features.json

Explanation: who caches calls still decodes and transforms each image, so a call gains at most what the model
takes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import turns
from benchmarks.process_tree import cpu_seconds
from benchmarks.turns import Contender

ANY = {"preprocess": "none"}
CONTENDERS = [
    Contender("computed", "", {**ANY, "kind": "computed"}),
    Contender("calls, torch-module-cache", "", {**ANY, "kind": "peer"}, "torch_module_cache"),
    Contender("calls, streamload", "", {**ANY, "kind": "calls"}),
    Contender("features", "", {**ANY, "kind": "features"}),
    Contender("order", "", {**ANY, "kind": "order"}),
]
SAMPLES, QUICK_SAMPLES, OF_A_SHARD = 2048, 128, 128
WIDTH = 192


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(**json.loads(sys.argv[2]))))
        return
    given = turns.arguments(__doc__, rounds=3, names=[contender.name for contender in CONTENDERS])
    contenders = turns.chosen(given, CONTENDERS)
    samples = QUICK_SAMPLES if given.quick else SAMPLES
    rows: list[dict[str, Any]] = []
    with turns.photographs(samples, OF_A_SHARD, ("jpg", "cls")) as (directory, total_bytes):
        for round_ in range(given.rounds):
            for contender in turns.rotated(contenders, round_):
                with turns.empty_directory(directory) as empty:
                    rows.append(measure(contender, given, directory / "shards", empty, round_))
    medians = turns.medians(rows)
    by_epoch = {name: turns.ratio(medians, "epoch_cpu_us", name, "features") for name in medians}
    by_clock = {name: turns.ratio(medians, "epoch_seconds", name, "features") for name in medians}
    above = None
    if {"features", "order"} <= medians.keys():
        above = medians["features"]["epoch_cpu_us"] - medians["order"]["epoch_cpu_us"]
    turns.write(
        given,
        "features",
        {
            "settings": {"samples": samples, "shard_bytes": total_bytes, "row_bytes": 4 * WIDTH},
            "seeds": list(range(given.rounds)),
            "rounds": rows,
            "medians": medians,
            "ratios": {"CPU time of a sample of a later epoch": by_epoch, "its duration": by_clock},
            "targets": [
                turns.target(
                    "a later epoch's duration: computed ÷ features", by_clock.get("computed"), at_least=300
                ),
                turns.target(
                    "a later epoch's duration: torch-module-cache ÷ features",
                    by_clock.get("calls, torch-module-cache"),
                    at_least=10,
                ),
                turns.target("features above index and order, CPU µs a sample", above, at_most=50),
                turns.target(
                    "a first epoch that stores ÷ one that doesn't, CPU time",
                    turns.ratio(medians, "first_cpu_us", "features", "computed"),
                    at_most=1.02,
                ),
            ],
        },
    )


def measure(
    contender: Contender, given: argparse.Namespace, shards: Path, empty: Path, seed: int
) -> dict[str, Any]:
    """One contender in a process of its own."""
    job = {"kind": contender.job["kind"], "shards": str(shards), "directory": str(empty), "seed": seed}
    python = turns.interpreters(given).of(contender)
    done = subprocess.run(
        [str(python), "-m", "benchmarks.features", "--one", json.dumps(job)],
        cwd=turns.ROOT,
        env={
            **turns.environment(),
            "STREAMLOAD_CACHE_SIZE": "50GB",
            "STREAMLOAD_CACHE_DIR": str(empty / "cache"),
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=turns.LIMIT_SECONDS,
    )
    return {"label": contender.name, "round": seed, **json.loads(done.stdout.splitlines()[-1])}


def vit() -> Any:
    """The class of the frozen model: images → float32[N, WIDTH]."""
    import torch
    from torch import nn
    from transformers import ViTConfig, ViTModel

    class Vit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            sizes = {"hidden_size": WIDTH, "num_hidden_layers": 12, "intermediate_size": 4 * WIDTH}
            self.vit = ViTModel(ViTConfig(num_attention_heads=3, **sizes)).eval()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.vit(x).last_hidden_state[:, 0]
            return found

    return Vit


def one(kind: str, shards: str, directory: str, seed: int) -> dict[str, Any]:
    """Some epochs of one contender, and what the first and the later ones took."""
    import torch
    from torch import nn

    import streamload

    torch.set_num_threads(1)
    options: dict[str, Any] = {"shards": streamload.Shards(text_key=None, label_key="cls")}
    if kind == "order":
        options = {"workers": streamload.Workers(map_sample=label_of)}
    model = None if kind == "order" else module(kind, directory)
    if kind == "features":
        options["batches"] = streamload.Batches(features={"vit": model})
    if kind in ("calls", "peer"):
        options["batches"] = streamload.Batches(with_keys=True)
    head, constant = nn.Linear(WIDTH, 1000), torch.ones(64, WIDTH)
    optimizer = torch.optim.SGD(head.parameters(), lr=1e-3)
    epochs = []
    with streamload.make_loader(
        shards, batch_size=64, num_workers=2, output="dict", seed=seed, train=False, **options
    ) as loader:
        for _ in range(2 if kind == "computed" else 5):
            began, cpu, samples = time.monotonic(), cpu_seconds(), 0
            for batch in loader:
                samples += len(batch["label"])
                found = constant[: len(batch["label"])] if model is None else features_of(model, kind, batch)
                loss = nn.functional.cross_entropy(head(found), batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            epochs.append((time.monotonic() - began, (cpu_seconds() - cpu) / samples * 1e6, samples))
        stats = loader.stats()
    later = epochs[1:] if kind == "computed" else epochs[2:]
    rows = (path for path in Path(directory).rglob("*") if "rows" in path.parts and path.is_file())
    taken = sum(path.stat().st_blocks * 512 for path in rows)
    read = stats.feature_read_seconds / stats.feature_rows_read * 1e6 if stats.feature_rows_read else None
    return {
        "first_seconds": epochs[0][0],
        "first_cpu_us": epochs[0][1],
        "epoch_seconds": statistics.mean(seconds for seconds, _, _ in later),
        "epoch_cpu_us": statistics.mean(cpu_us for _, cpu_us, _ in later),
        "read_us": read,
        "disk_ratio": taken / (epochs[0][2] * 4 * WIDTH) if taken else None,
    }


def module(kind: str, directory: str) -> Any:
    """The frozen model as a contender uses it."""
    cls = vit()
    if kind == "peer":
        import torch_module_cache

        return torch_module_cache.cache_module(cache_path=directory)(cls)()
    if kind == "computed":
        return cls().eval()
    import streamload

    return streamload.cache_module(directory)(cls)().eval()


def features_of(model: Any, kind: str, batch: dict[str, Any]) -> Any:
    """What the model returns for a batch."""
    import torch

    if kind == "features":
        return model(batch)
    with torch.no_grad():
        if kind == "computed":
            return model(batch["image"])
        return model(batch["image"], cache_key=batch["__key__"])


def label_of(sample: dict[str, Any]) -> dict[str, Any]:
    """The label alone."""
    return {"label": int(sample["cls"])}


if __name__ == "__main__":
    main()
