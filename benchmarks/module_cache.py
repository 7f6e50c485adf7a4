"""Rows of a module that are there: what reading them takes, and their bytes, beside Torch Module Cache.

Question: features of 3 KB lie on disk; how much CPU time does a row take in batches of 64, by streamload's
`cache_module`, by Torch Module Cache, from HDF5, from safetensors and by a pickle a sample? How many bytes do
they take on disk, by the batch in which they were computed? And what does the first pass take that stores
them?

Command: python -m benchmarks.module_cache

The module is a linear layer, so that nearly all of a pass over stored rows is the cache. Each contender is a
process of its own a round, which first stores all rows, in batches of 1, 64 or 256, and then passes over them
in batches of 64 and of 512, in another order; the time is the CPU time of the last pass of three, and of as
many passes over 128 results of one key each, 1,024 where rows are in memory. "compute" is the module without
a cache. Storing is measured against computing by a ViT-tiny of seeded weights: CPU time of a first pass with
and without the cache, until all rows are stored. "ViT-tiny, one key" are 128 images of one key each; "not
built" is the third process on one directory, which knows from the two before what the module would be. Torch
Module Cache runs as it is; "singly" its rows are computed one by one, so that each file holds one row; as it
writes batches, each file holds all of its batch. HDF5 is one data set, in the layout that it has unless told
otherwise or in chunks of 1 MB, from which a batch's rows are taken by one index in rising order; safetensors
is one file with a tensor a row. Both are written once, by one process, when all rows are there.

Result: results/module_cache.json

Explanation: a batch here is one statement to SQLite and two checksums a row. A file a row costs an open, a
zip directory and an unpickling.
"""

import argparse
import json
import pickle
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import turns
from benchmarks.turns import Contender

WIDTH, VIT_WIDTH = 768, 192
"""Numbers of a row: 3 KB; of the ViT-tiny's."""
ANY = {"preprocess": "none"}
CONTENDERS = [
    Contender("streamload", "", {**ANY, "kind": "streamload", "stored_in": 64}),
    Contender("streamload, batches of 1", "", {**ANY, "kind": "streamload", "stored_in": 1}),
    Contender("streamload, batches of 256", "", {**ANY, "kind": "streamload", "stored_in": 256}),
    Contender("streamload, memory", "", {**ANY, "kind": "streamload", "stored_in": 64, "level": "MEMORY"}),
    Contender("torch-module-cache", "", {**ANY, "kind": "peer", "stored_in": 64}, "torch_module_cache"),
    Contender(
        "torch-module-cache, memory",
        "",
        {**ANY, "kind": "peer", "stored_in": 64, "level": "MEMORY"},
        "torch_module_cache",
    ),
    Contender(
        "torch-module-cache, singly", "", {**ANY, "kind": "peer", "stored_in": 1}, "torch_module_cache"
    ),
    Contender("a pickle a sample", "", {**ANY, "kind": "pickle", "stored_in": 64}),
    Contender("HDF5", "", {**ANY, "kind": "hdf5", "stored_in": 64}, "h5py"),
    Contender("HDF5, 1 MB chunks", "", {**ANY, "kind": "hdf5", "stored_in": 64, "level": "CHUNKS"}, "h5py"),
    Contender("safetensors", "", {**ANY, "kind": "safetensors", "stored_in": 64}),
    Contender("compute", "", {**ANY, "kind": "none", "stored_in": 64}),
    Contender("ViT-tiny", "", {**ANY, "kind": "none", "stored_in": 64, "model": "vit"}),
    Contender("ViT-tiny, stored", "", {**ANY, "kind": "streamload", "stored_in": 64, "model": "vit"}),
    Contender("ViT-tiny, one key", "", {**ANY, "kind": "streamload", "stored_in": 0, "model": "vit"}),
    Contender(
        "ViT-tiny, one key, not built",
        "",
        {**ANY, "kind": "streamload", "stored_in": 0, "model": "vit", "runs": 3},
    ),
    Contender(
        "ViT-tiny, one key, torch-module-cache",
        "",
        {**ANY, "kind": "peer", "stored_in": 0, "model": "vit"},
        "torch_module_cache",
    ),
]
ROWS, QUICK_ROWS = 2048, 256
VIT_ROWS, QUICK_VIT_ROWS = 512, 8
PASSES, BATCH, LARGE_BATCH = 3, 64, 512
SINGLE_KEYS, SINGLE_KEYS_IN_MEMORY, QUICK_SINGLE_KEYS = 128, 1024, 8


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(**json.loads(sys.argv[2]))))
        return
    given = turns.arguments(__doc__, rounds=5, names=[contender.name for contender in CONTENDERS])
    contenders = turns.chosen(given, CONTENDERS)
    rows: list[dict[str, Any]] = []
    with turns.scratch() as directory:
        for round_ in range(given.rounds):
            for contender in turns.rotated(contenders, round_):
                with turns.empty_directory(directory) as empty:
                    rows.append(measure(contender, given, str(empty), round_))
    medians = turns.medians(rows)
    hit = {name: turns.ratio(medians, "hit_cpu_us", name, "streamload") for name in medians}
    turns.write(
        given,
        "module_cache",
        {
            "settings": {"row_bytes": 4 * WIDTH, "rows": ROWS, "batch": BATCH, "vit_rows": VIT_ROWS},
            "seeds": list(range(given.rounds)),
            "rounds": rows,
            "medians": medians,
            "ratios": {"CPU time of a row": hit},
            "targets": [
                turns.target(
                    "CPU of a hit: its files singly ÷ ours",
                    hit.get("torch-module-cache, singly"),
                    at_least=10,
                ),
                turns.target(
                    "CPU of a hit: its files as written ÷ ours", hit.get("torch-module-cache"), at_least=20
                ),
                *(
                    turns.target(f"{name}: bytes on disk ÷ payload", row["disk_ratio"], at_most=1.5)
                    for name, row in medians.items()
                    if name.startswith("streamload") and "memory" not in name
                ),
                turns.target(
                    "ViT-tiny: a first pass that stores ÷ one that doesn't",
                    turns.ratio(medians, "first_cpu_us", "ViT-tiny, stored", "ViT-tiny"),
                    at_most=1.02,
                ),
                *(
                    turns.target(
                        f"{name}: CPU µs of a row, {form}", medians.get(name, {}).get(key), at_most=most
                    )
                    for name, form, key, most in (
                        ("ViT-tiny, one key", "one key at a time", "single_cpu_us", 200),
                        ("ViT-tiny, one key, not built", "one key at a time", "single_cpu_us", 100),
                        ("streamload, memory", "one key at a time", "single_cpu_us", 10),
                        ("streamload, memory", "batches of 64", "hit_cpu_us", 3),
                        ("streamload, memory", "batches of 512", "large_hit_cpu_us", 3),
                    )
                ),
            ],
        },
    )


def measure(contender: Contender, given: argparse.Namespace, directory: str, seed: int) -> dict[str, Any]:
    """One contender in a process of its own."""
    is_vit = contender.job.get("model") == "vit"
    rows = (QUICK_VIT_ROWS if given.quick else VIT_ROWS) if is_vit else (QUICK_ROWS if given.quick else ROWS)
    single_keys = SINGLE_KEYS_IN_MEMORY if contender.job.get("level") == "MEMORY" else SINGLE_KEYS
    single_keys = QUICK_SINGLE_KEYS if given.quick else single_keys
    job = {**contender.job, "directory": directory, "rows": rows, "single_keys": single_keys, "seed": seed}
    del job["preprocess"]
    runs = job.pop("runs", 1)
    job["is_built"] = runs == 1
    python = turns.interpreters(given).of(contender)
    for _ in range(runs):
        done = subprocess.run(
            [str(python), "-m", "benchmarks.module_cache", "--one", json.dumps(job)],
            cwd=turns.ROOT,
            env={**turns.environment(), "STREAMLOAD_CACHE_SIZE": "50GB"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=turns.LIMIT_SECONDS,
        )
    return {"label": contender.name, "round": seed, **json.loads(done.stdout.splitlines()[-1])}


def one(
    kind: str,
    stored_in: int,
    directory: str,
    rows: int,
    single_keys: int,
    is_built: bool,
    seed: int,
    level: str = "DISK",
    model: str = "linear",
) -> dict[str, Any]:
    """Store all rows, read them, and say what that took.

    Args:
        kind: of cache, or "none".
        stored_in: rows of a batch when they are stored; 0: there are only results of one key each.
        directory: of the cache.
        rows: how many.
        single_keys: results of one key each.
        is_built: whether the module is built before it is called.
        seed: of the order in which rows are read.
        level: of the cache, or a layout of HDF5.
        model: "linear", or "vit".
    """
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    is_vit = model == "vit"
    rows = rows if stored_in else single_keys
    inputs = torch.randn(rows, 3, 224, 224) if is_vit else torch.randn(rows, 32)
    call, finish = caller(kind, directory, level, is_vit, is_built)
    start = time.process_time()
    for first in range(0, rows if stored_in else 0, stored_in or 1):
        call(inputs[first : first + stored_in], list(range(first, min(rows, first + stored_in))))
    finish()
    first_us = (time.process_time() - start) / rows * 1e6
    order = list(range(rows))
    random.Random(seed).shuffle(order)
    hit_us, large_hit_us, single_us, builds = 0.0, 0.0, 0.0, None
    if stored_in and not is_vit:
        batches = [
            [order[first : first + size] for first in range(0, rows, size)] for size in (BATCH, LARGE_BATCH)
        ]
        hit_us, large_hit_us = (
            last_pass([(inputs[keys], keys) for keys in some], call) / rows * 1e6 for some in batches
        )
    is_single = kind in ("streamload", "peer") and (not stored_in or not is_vit)
    if is_single:
        places = [number % rows for number in range(single_keys)]
        calls = [(inputs[place : place + 1], f"one {number}") for number, place in enumerate(places)]
        for x, key in calls:
            call(x, key)
        builds = getattr(finish(), "builds", None)
        single_us = last_pass(calls, call) / single_keys * 1e6
    taken = sum(path.stat().st_blocks * 512 for path in Path(directory).rglob("*") if path.is_file())
    width = VIT_WIDTH if is_vit else WIDTH
    payload = 4 * width * ((rows if stored_in else 0) + (single_keys if is_single else 0))
    return {
        "first_cpu_us": first_us,
        "hit_cpu_us": hit_us,
        "large_hit_cpu_us": large_hit_us,
        "single_cpu_us": single_us,
        "disk_ratio": taken / payload,
        "builds": builds,
    }


def last_pass(calls: list[tuple[Any, Any]], call: Any) -> float:
    """CPU seconds of the last of some passes."""
    seconds = 0.0
    for _ in range(PASSES):
        start = time.process_time()
        for x, keys in calls:
            call(x, keys)
        seconds = time.process_time() - start
    return seconds


def caller(kind: str, directory: str, level: str, is_vit: bool, is_built: bool) -> tuple[Any, Any]:
    """A function of inputs and keys, by one of the caches; and one that waits for what it stores."""
    import torch
    from torch import nn

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    class Vit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            from transformers import ViTConfig, ViTModel

            config = ViTConfig(
                hidden_size=VIT_WIDTH, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768
            )
            self.vit = ViTModel(config).eval()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.vit(x).last_hidden_state[:, 0]
            return found

    cls = Vit if is_vit else Linear
    cls.__qualname__ = cls.__name__  # found by its name in another run, as a class of a script is
    globals()[cls.__name__] = cls
    if kind == "streamload":
        import streamload

        module = streamload.cache_module(directory, cache_level=getattr(streamload.CacheLevel, level))(
            cls
        )().eval()
        if is_built:
            module.state_dict()
        return lambda x, keys: module(x, cache_key=keys), lambda: streamload.cache_info(module)
    if kind == "peer":
        import torch_module_cache

        peer_level = torch_module_cache.CacheLevel[level]
        peer = torch_module_cache.cache_module(cache_path=directory, cache_level=peer_level)(cls)()
        return lambda x, keys: peer(x, cache_key=keys), lambda: None
    plain = cls().eval()
    if kind == "none":
        return torch.no_grad()(lambda x, keys: plain(x)), lambda: None
    if kind in ("hdf5", "safetensors"):
        return in_one_file(plain, kind, directory, level)

    def pickled(x: torch.Tensor, keys: list[int]) -> torch.Tensor:
        paths = [Path(directory) / f"{key}.pkl" for key in keys]
        if not paths[0].exists():
            with torch.no_grad():
                for path, row in zip(paths, plain(x).numpy(), strict=True):
                    path.write_bytes(pickle.dumps(row))
        return torch.stack([torch.from_numpy(pickle.loads(path.read_bytes())) for path in paths])

    return pickled, lambda: None


def in_one_file(module: Any, kind: str, directory: str, level: str) -> tuple[Any, Any]:
    """All rows in one file, which is written when all are there, and read by a batch's keys."""
    import numpy as np
    import torch

    path = Path(directory) / f"rows.{kind}"
    computed: dict[int, torch.Tensor] = {}
    read: list[Any] = []

    def call(x: torch.Tensor, keys: list[int]) -> torch.Tensor:
        if read:
            rows: torch.Tensor = read[0](keys)
            return rows
        with torch.no_grad():
            rows = module(x)
        computed.update(zip(keys, rows, strict=True))
        return rows

    def finish() -> None:
        if kind == "safetensors":
            from safetensors import safe_open
            from safetensors.torch import save_file

            save_file({str(key): row.clone() for key, row in computed.items()}, path)
            file = safe_open(path, "pt").__enter__()
            read.append(lambda keys: torch.stack([file.get_tensor(str(key)) for key in keys]))
        else:
            import h5py

            with h5py.File(path, "w") as writing:
                chunks = (2**20 // (4 * WIDTH), WIDTH) if level == "CHUNKS" else None
                values = torch.stack([computed[key] for key in sorted(computed)]).numpy()
                writing.create_dataset("rows", data=values, chunks=chunks)
            rows = h5py.File(path)["rows"]

            def taken(keys: list[int]) -> torch.Tensor:
                order = np.argsort(keys)
                batch = np.empty((len(keys), WIDTH), np.float32)
                batch[order] = rows[np.asarray(keys)[order]]
                return torch.from_numpy(batch)

            read.append(taken)
        computed.clear()

    return call, finish


if __name__ == "__main__":
    main()
