"""One rank of a training on one node, for hits.py and small_cache.py: reads epochs, computes nothing.

Started as torchrun starts ranks, by RANK, WORLD_SIZE and their like; it says on its standard output when each
epoch began and ended, what it read, and what its loader counted.
"""

import json
import sys
import time
from typing import Any

import torch
from torch import distributed

import streamload
from benchmarks.contenders.job import versions
from streamload import Workers
from tests.support import flat


def only_key(sample: dict[str, Any]) -> dict[str, Any]:
    """The least that a sample can become: nothing is decoded, so the tier is what is measured."""
    return {"key": sample["__key__"]}


def main() -> None:
    job = json.loads(sys.argv[1])
    distributed.init_process_group("gloo")
    epochs = []
    with flat.make_loader(
        job.pop("urls"), workers=Workers(map_sample=only_key), **job.pop("loader")
    ) as loader:
        for _ in range(job["epochs"]):
            epochs.append(read_epoch(loader))
            distributed.barrier()
    distributed.destroy_process_group()
    print(json.dumps({"epochs": epochs, "versions": versions("streamload", "torch")}))


def read_epoch(loader: streamload.Loader) -> dict[str, Any]:
    """Go through an epoch; after each batch all ranks wait for each other, as for their gradients."""
    before, began = loader.stats(), time.monotonic()
    step, samples, first = torch.zeros(1), 0, 0.0
    for batch in loader:
        first = first or time.monotonic() - began
        distributed.all_reduce(step)
        samples += len(batch["key"])
    counted = loader.stats().since(before).as_dict()
    names = ("tier_hits", "tier_misses", "origin_bytes", "origin_retries", "shards_evicted", "range_reads")
    return {
        "began": began,
        "ended": time.monotonic(),
        "first_batch_seconds": first,
        "samples": samples,
        **{name: counted[name] for name in names},
    }


if __name__ == "__main__":
    main()
