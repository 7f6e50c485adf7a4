"""A training that a launcher starts in two processes; each writes the keys of its steps to a folder.

`python launched.py LAUNCHER FOLDER`, by torchrun, `accelerate launch` or Lightning's Fabric. The first
training saves a state after step 2, from which a second one in the same processes resumes.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import streamload

SAVED_AFTER = 2


def make(folder: Path, **options: Any) -> streamload.Loader:
    options = {"batch_size": 4, "num_workers": 1, "num_samples": 40, **options}
    options.setdefault("batches", streamload.Batches(with_keys=True))
    return streamload.make_loader(
        str(folder / "shards"), cache_dir=folder / "cache", cache_size="1GB", shuffle=20, **options
    )


def write(folder: Path, name: str, loader: streamload.Loader, steps: list[list[str]]) -> None:
    page, topology = loader.observer.page(), loader._run.schedule.topology
    assert page is not None
    content = {"steps": steps, "topology": dataclasses.asdict(topology), "run": page.run}
    (folder / f"{name}-{topology.rank}.json").write_text(json.dumps(content))


def train(folder: Path, before_resuming: Callable[[], object] = bool, **options: Any) -> None:
    """One rank's trainings, as a plain loop has them."""
    state: dict[str, Any] = {}
    for name in ("first", "resumed"):
        with make(folder, **options) as loader:
            if state:
                loader.load_state_dict(state)
            steps = []
            for batch in loader:
                steps.append(batch[-1]["__key__"])
                if len(steps) == SAVED_AFTER and not state:
                    saved = loader.state_dict()
            write(folder, name, loader, steps)
        state = saved
        before_resuming()


def by_torchrun(folder: Path) -> None:
    """The first training reads torchrun's variables, the second one torch.distributed."""
    train(folder, lambda: torch.distributed.is_initialized() or torch.distributed.init_process_group("gloo"))
    torch.distributed.destroy_process_group()


def by_torchrun_with_seeds(folder: Path) -> None:
    """A training whose ranks have other seeds."""
    torch.distributed.init_process_group("gloo")
    train(folder, seed=torch.distributed.get_rank())


def by_accelerate(folder: Path) -> None:
    import accelerate

    loader = make(folder)
    length = len(loader)  # by the variables
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, steps = accelerator.prepare(loader), []
    for batch in prepared:
        steps.append(batch[-1]["__key__"])
        if len(steps) == SAVED_AFTER:
            accelerator.save_state(str(folder / "saved"))
            accelerator.wait_for_everyone()
    assert len(steps) == length
    write(folder, "first", loader, steps)
    accelerator.load_state(str(folder / "saved"))
    write(folder, "resumed", loader, [batch[-1]["__key__"] for batch in prepared])
    loader.close()
    accelerator.end_training()


def by_fabric(folder: Path) -> None:
    import lightning

    loader = make(folder)
    fabric = lightning.Fabric(accelerator="cpu", devices=2)
    fabric.launch()
    batches: Iterable[Any] = fabric.setup_dataloaders(loader)
    steps = []
    for batch in batches:
        steps.append(batch[-1]["__key__"])
        if len(steps) == SAVED_AFTER:
            saved = loader.state_dict()
    write(folder, "first", loader, steps)
    loader.load_state_dict(saved)
    write(folder, "resumed", loader, [batch[-1]["__key__"] for batch in batches])
    loader.close()


def main() -> None:
    launcher, folder = sys.argv[1], Path(sys.argv[2])
    {
        "torchrun": by_torchrun,
        "seeds": by_torchrun_with_seeds,
        "accelerate": by_accelerate,
        "fabric": by_fabric,
    }[launcher](folder)


if __name__ == "__main__":
    main()
