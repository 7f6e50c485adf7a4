"""The modules of streamload whose code runs for one batch of a loader without options, in this process.

Usage: python -m tests.support.traced URL FOLDER. Prints them as JSON: `made`, while the loader is made;
`cold`, from iter() to the first batch in all threads, with bytes from a server; `warm`, for a batch from the
cache, in the training's thread; `imported`, those that are imported by then, by their dotted names;
`spawned`, those that a spawned worker has imported by its first batch. `walk`: of such a warm batch the
functions of streamload that run, their calls, and the deepest stack of them.
"""

import functools
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import streamload

PACKAGE = os.path.dirname(streamload.__file__)
BATCHES = 22
"""Of an epoch over the shards."""


def ids(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[len(caption)] * 8 for caption in captions])


def ids_with_modules(captions: list[str], file: Path) -> torch.Tensor:
    file.write_text(json.dumps(sorted(name for name in sys.modules if name.startswith("streamload."))))
    return ids(captions)


def modules_run(act: Callable[[], Any], threads: bool) -> set[str]:
    codes = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes.add(frame.f_code.co_filename)

    if threads:
        threading.setprofile(note)
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {os.path.relpath(path, PACKAGE) for path in codes if path.startswith(PACKAGE)}


def walk(act: Callable[[], Any]) -> tuple[int, int, int]:
    """The functions that run, their calls, and the deepest stack of them."""
    functions: set[Any] = set()
    calls = depth = deepest = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls, depth, deepest
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if event == "call":
            functions.add((frame.f_code.co_filename, frame.f_code.co_name))
            calls, depth = calls + 1, depth + 1
            deepest = max(deepest, depth)
        elif event == "return":
            depth -= 1

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return len(functions), calls, deepest


def spawned(url: str, folder: Path) -> list[str]:
    """The modules that a spawned worker has imported by its first batch."""
    tokenizer = functools.partial(ids_with_modules, file=folder / "imported.json")
    workers = streamload.Workers(multiprocessing_context="spawn")
    with streamload.make_loader(
        url, tokenizer, batch_size=8, num_workers=1, cache_dir=folder, workers=workers
    ) as loader:
        next(iter(loader))
    imported: list[str] = json.loads((folder / "imported.json").read_text())
    return imported


def main(url: str, folder: str) -> None:
    from streamload.observe import observer  # not in a worker, which imports this file

    def make() -> streamload.Loader:
        return streamload.make_loader(
            url, ids, batch_size=8, num_workers=0, shuffle=16, cache_dir=Path(folder)
        )

    make().close()
    importlib.import_module("streamload.loader.pool")  # imports are no part of it
    observer.TICK_SECONDS = 60.0  # a busy machine takes more than a second for a first batch
    made = modules_run(make, threads=False)
    with make() as loader:
        cold = modules_run(lambda: next(iter(loader)), threads=True)
        loader.set_epoch(1)
        assert len(list(loader)) == BATCHES
        batches = iter(loader)
        for _ in range(6):
            next(batches)
        warm = [modules_run(lambda: next(batches), threads=False) for _ in range(6)]
        walks = [walk(lambda: next(batches)) for _ in range(8)]
    runs = {"made": made, "cold": cold, "warm": min(warm, key=len)}  # once a second, a batch counts more
    runs["imported"] = {name for name in sys.modules if name.startswith("streamload.")}
    runs["spawned"] = set(spawned(url, Path(folder)))
    print(json.dumps({name: sorted(modules) for name, modules in runs.items()} | {"walk": min(walks)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
