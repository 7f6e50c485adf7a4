"""`python -m streamload.integrations.openclip` in a prepared process, with a record of its batches.

As a script, with the arguments of the training behind it: `python launch.py --train-data …`. The model whose
configuration is in OPENCLIP_TEST_MODEL is known by the file's name. To the directory OPENCLIP_TEST_RECORD
goes, for each rank, a JSON line for each batch that the training took: {"train", "epoch" (counted by iter(),
from 0), "keys", "urls", "origin_requests" (so far)}. With OPENCLIP_TEST_DEVICES=n there are n simulated
devices, and device-RANK.json in that directory has the copies between host and device. If
OPENCLIP_TEST_KILL_BEHIND is n, rank 0 kills itself when the training has made n steps and asks for the next
batch.
"""

import atexit
import functools
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))  # this is run as a program, from anywhere
import streamload.loader
from benchmarks.torchvision_stub import define_torchvision_schemas
from streamload.loader import Batches
from tests.support import simulated_device


@dataclass(frozen=True)
class Taken:
    """Images and texts, and a call for when the training takes them: a batch may be made and not taken."""

    values: tuple[torch.Tensor, torch.Tensor]
    taken: Callable[[], None]

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.taken()
        return iter(self.values)


class Recorded:
    """A loader whose batches pass as they are, but for the keys, which are written down."""

    def __init__(self, loader: streamload.loader.Loader) -> None:
        self.loader = loader
        self.epoch = -1
        self.steps = 0
        first = os.environ.get("RANK", "0") == "0"
        self.kill_behind = int(os.environ.get("OPENCLIP_TEST_KILL_BEHIND", "-1")) if first else -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        for images, texts, keys in self.loader:
            yield Taken((images, texts), functools.partial(self.write, keys))
            self.steps += self.loader.options.train
            if self.steps == self.kill_behind:
                os.kill(os.getpid(), signal.SIGKILL)

    def write(self, keys: dict[str, list[str]]) -> None:
        line = {
            "train": self.loader.options.train,
            "epoch": self.epoch,
            "keys": keys["__key__"],
            "urls": keys["__url__"],
            "origin_requests": self.loader.stats().origin_requests,
        }
        record = Path(os.environ["OPENCLIP_TEST_RECORD"], f"rank-{os.environ.get('RANK', '0')}.jsonl")
        with record.open("a") as file:
            file.write(json.dumps(line) + "\n")


def write_copies(device: simulated_device.Device) -> None:
    record = Path(os.environ["OPENCLIP_TEST_RECORD"], f"device-{os.environ.get('RANK', '0')}.json")
    record.write_text(json.dumps({"copies": device.copied(), "pins": device.pins}))


def main() -> None:
    define_torchvision_schemas()
    if count := int(os.environ.get("OPENCLIP_TEST_DEVICES", "0")):
        atexit.register(write_copies, simulated_device.install(count))
    import open_clip

    open_clip.add_model_config(os.environ["OPENCLIP_TEST_MODEL"])
    plain_make_loader = streamload.loader.make_loader
    plain_parallel = torch.nn.parallel.DistributedDataParallel

    def make_loader(*args: Any, **options: Any) -> Recorded:
        options["batches"] = replace(options.get("batches", Batches()), with_keys=True)
        return Recorded(plain_make_loader(*args, **options))

    def parallel(module: torch.nn.Module, *, device_ids: Any, **options: Any) -> torch.nn.Module:
        """open_clip 3.3.0 gives [cpu] as device_ids, which torch refuses."""
        return plain_parallel(module, **options)

    streamload.loader.make_loader = make_loader
    torch.nn.parallel.DistributedDataParallel = parallel
    runpy.run_module("streamload.integrations.openclip", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
