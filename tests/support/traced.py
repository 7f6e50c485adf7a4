"""The modules of streamload whose code runs for one batch of a loader without options, in this process.

Usage: python -m tests.support.traced URL FOLDER. Prints them as JSON: `cold`, from iter() to the first batch
in all threads, with bytes from a server; `warm`, for a batch from the cache, in the training's thread.
"""

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


def main(url: str, folder: str) -> None:
    with streamload.make_loader(
        url, ids, batch_size=8, num_workers=0, shuffle=16, cache_dir=Path(folder)
    ) as loader:
        cold = modules_run(lambda: next(iter(loader)), threads=True)
        loader.set_epoch(1)
        assert len(list(loader)) == BATCHES
        batches = iter(loader)
        for _ in range(6):
            next(batches)
        warm = [modules_run(lambda: next(batches), threads=False) for _ in range(10)]
    print(json.dumps({"cold": sorted(cold), "warm": sorted(min(warm, key=len))}))  # once a second, one counts


if __name__ == "__main__":
    main(*sys.argv[1:])
