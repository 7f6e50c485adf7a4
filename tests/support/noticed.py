"""A training that gets a notice to end: SIGTERM to it and all that it has started.

`python noticed.py FOLDER METHOD HANDLER END` trains with workers that METHOD starts, and says "ready" after
its third batch. After the notice it takes twelve more batches, more than its workers had made by then, saves
its state to FOLDER, and ends by END.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import streamload


def preprocess(image: Any) -> torch.Tensor:
    """Hangs in every worker once there is a file for that."""
    while os.environ.get("STUCK") and Path(os.environ["STUCK"]).exists():
        time.sleep(3600)
    return torch.zeros(3)


def make(folder: Path, method: str) -> streamload.Loader:
    rank = int(os.environ.get("RANK", "0"))
    return streamload.make_loader(
        str(folder / "shards"),
        batch_size=2,
        num_workers=2,
        preprocess=preprocess,
        cache_dir=folder / f"cache-{rank}",
        order=streamload.Order(endless=True),
        workers=streamload.Workers(multiprocessing_context=method),
    )


def end(way: str, stuck: Path) -> None:
    """End the training, apart from its loader."""
    if way == "stuck at exit":
        stuck.touch()
        time.sleep(0.5)
    if way == "error":
        raise RuntimeError("a mistake in the training")
    if way == "os._exit":
        os._exit(0)
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "interrupted":
        os.killpg(0, signal.SIGINT)
        time.sleep(60)


def main() -> None:
    folder, (method, handler, way) = Path(sys.argv[1]), sys.argv[2:]
    stuck = folder / "stuck"
    os.environ["STUCK"] = str(stuck)
    noticed: list[int] = []
    if handler == "flag":
        signal.signal(signal.SIGTERM, lambda number, _: noticed.append(number))
    elif handler == "exit":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    loader = make(folder, method)
    count = after = 0
    try:
        for _ in loader:
            count, after = count + 1, after + bool(noticed)
            if count == 3:
                print("ready", os.environ.get("RANK", "0"), flush=True)
            if after == 12:
                break
            time.sleep(0.02)
    finally:
        state = loader.state_dict()
        (folder / f"saved-{os.environ.get('RANK', '0')}.json").write_text(json.dumps([count, state]))
    if way in {"closed", "stuck"}:
        if way == "stuck":
            stuck.touch()
            time.sleep(0.5)  # workers make batches ahead: each meets the file
        loader.close()
    elif way == "with":
        with loader:
            next(iter(loader))
    elif way == "collected":
        del loader
        gc.collect()
    elif way == "forked":
        if not os.fork():
            sys.exit()
        assert os.wait()[1] == 0
        assert next(iter(loader)) is not None
    else:
        end(way, stuck)
    print("left", len(torch.multiprocessing.active_children()), flush=True)


if __name__ == "__main__":
    main()
