"""Trainings on a simulated device, as a program: `python on_device.py SCENARIO DIRECTORY` prints JSON.

Each scenario is of one framework; what it prints are copies to the device (simulated_device.py), by thread.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).parents[2]))
from streamload.errors import OptionError
from streamload.observe import observer
from streamload.testing.shards import write_shards
from tests.support import flat, simulated_device

DEVICE = simulated_device.install(2)
SIDE = 224


def make(place: Path, **options: Any) -> Any:
    """A loader of 30 samples in batches of 5."""
    data = place / "data"
    if not data.exists():
        write_shards(data, [18, 12], seed=5)
    given = {"batch_size": 5, "num_workers": 1, "cache_dir": place / "cache", "cache_size": "1GB", "seed": 3}
    return flat.make_loader([str(path) for path in sorted(data.glob("*.tar"))], **{**given, **options})


def tokenize(texts: list[str]) -> torch.Tensor:
    return torch.tensor([[len(text)] * 4 for text in texts])


class Net(torch.nn.Module):
    """Takes the batches of every framework; remembers the devices of its images and their values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.devices: list[str] = []

    def forward(self, pixel_values: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        self.devices.append(f"{pixel_values.device} {pixel_values.dtype}")
        loss = self.layer(pixel_values.mean((2, 3))).pow(2).mean()
        return {"loss": loss, "logits": pixel_values[:, 0, 0, :1]}


def measured(train: Callable[..., Any], *args: Any, **options: Any) -> dict[str, Any]:
    """The copies of images by a training, the pins, and what it returns."""
    DEVICE.copies.clear()
    DEVICE.pins.clear()
    log: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("streamload")
    logger.setLevel("INFO")
    logger.addHandler(handler)
    try:
        result = train(*args, **options)
    finally:
        logger.removeHandler(handler)
    images = [copy for copy in DEVICE.copied() if copy["shape"][1:] == (3, SIDE, SIDE)]
    small = [copy for copy in DEVICE.copied() if copy["shape"] == (5, 4)]
    kinds = [f"{copy['thread'].partition('_')[0]} {copy['dtype']} {copy['pinned']}" for copy in images]
    return {
        "images": kinds,
        "ids": [f"{copy['thread'].partition('_')[0]} {copy['pinned']}" for copy in small],
        "targets": sorted({copy["target"] for copy in images}),
        "pins": len(DEVICE.pins),
        "result": result,
        "log": log,
    }


def plain(place: Path) -> dict[str, Any]:
    """Without a framework."""
    started_before_fork: list[bool] = []
    os.register_at_fork(before=lambda: started_before_fork.append(DEVICE.is_initialized))

    def epoch(rank: int | None = None, **options: Any) -> list[str]:
        ranks = {} if rank is None else {"rank": rank, "world_size": 2}
        with make(place, tokenizer=tokenize, **ranks, **options) as loader:
            return sorted({str(images.device) for _ in range(2) for images, _ in loader})

    def of_a_fork() -> list[str]:
        """The device that a loader says here, and the one that it says in a fork that is rank 1."""
        with make(place, device="auto") as loader:
            said = str(loader.device)
            reads, writes = os.pipe()
            pid = os.fork()
            if not pid:
                os.environ.update(RANK="1", WORLD_SIZE="2")
                os.write(writes, str(loader.device).encode())
                os._exit(0)
            os.waitpid(pid, 0)
            return [said, os.read(reads, 100).decode()]

    def slow_steps(**options: Any) -> dict[str, Any]:
        observer._SHORTEST_EPOCH_SECONDS = 1.0  # shorter epochs have no line in the log
        with make(place, **options) as loader:
            for _ in range(2):
                for _ in loader:
                    time.sleep(0.25)
            return {"limit": loader.observer.verdict(60).limit, "advice": loader.observer.verdict(60).advice}

    def full_memory(failures: int) -> dict[str, Any]:
        images = []
        with make(place, device="auto", output="dict") as loader:
            for batch in loader:
                images.append(next(simulated_device.on_host(batch["image"])).sum().item())
                if len(images) == 2:
                    DEVICE.failures = failures
        return {"sums": images}

    found = {"auto": measured(epoch, device="auto"), "forks": started_before_fork.copy()}
    found["rank 1"] = measured(epoch, 1, device="auto")
    DEVICE.index = 1
    found["current"] = measured(epoch, device="auto")
    DEVICE.index = 0
    found["of a fork"] = of_a_fork()
    found["host"] = measured(slow_steps)
    found["cpu"] = measured(slow_steps, device="cpu")
    found |= {f"{failures} failures": measured(full_memory, failures) for failures in (0, 1)}
    try:
        full_memory(9)
    except torch.OutOfMemoryError as error:
        found["9 failures"] = str(error)
    DEVICE.failures = 0
    return found


def accelerate(place: Path) -> dict[str, Any]:
    """Accelerate's `prepare`, on a loader and on a DataLoader around one; and a DataLoader that pins."""
    import accelerate

    accelerator = accelerate.Accelerator()
    split = accelerate.Accelerator(
        dataloader_config=accelerate.utils.DataLoaderConfiguration(dispatch_batches=False)
    )

    def epoch(batches: Any) -> list[str]:
        return sorted({str(images.device) for images, _ in batches})

    def prepared(loader: Any, accelerator: accelerate.Accelerator = split) -> list[str]:
        batches = accelerator.prepare(loader)
        return [*epoch(batches), *epoch(batches)]

    def around(loader: Any, **options: Any) -> DataLoader[Any]:
        return DataLoader(loader.as_dataset(), batch_size=None, **options)

    found: dict[str, Any] = {"device": str(accelerator.device)}
    for name, run in {
        "prepare": prepared,
        "around": lambda loader: prepared(around(loader)),
        "around, dispatched": lambda loader: prepared(around(loader), accelerator),
        "around, pinned": lambda loader: prepared(around(loader, pin_memory=True)),
        "pinned": lambda loader: epoch(around(loader, pin_memory=True)),
        "plain": lambda loader: epoch(around(loader)),
    }.items():
        with make(place, tokenizer=tokenize) as loader:
            found[name] = measured(run, loader)
    with make(place, device="npu:0") as loader:
        try:
            epoch(around(loader, pin_memory=True))
        except OptionError as error:
            found["refused"] = str(error)
    return found


def transformers(place: Path) -> dict[str, Any]:
    """transformers' Trainer: ours, and its own on `as_dataset`."""
    import transformers

    from streamload.integrations.transformers import Trainer

    def train(loader: Any, kind: Any, data: Any, **options: Any) -> dict[str, Any]:
        model = Net()
        arguments = transformers.TrainingArguments(
            str(place / "out"), max_steps=6, report_to=[], save_strategy="no", disable_tqdm=True, **options
        )
        more = {} if data is loader else {"data_collator": lambda rows: rows[0]}
        trainer = kind(model, arguments, train_dataset=data, eval_dataset=data, **more)
        trainer.train()
        if data is loader:
            trainer.evaluate()
        return {"device": str(arguments.device), "devices": sorted(set(model.devices))}

    found = {}
    single = {"per_device_train_batch_size": 1, "remove_unused_columns": False}
    for name, kind, options in (
        ("ours", Trainer, {}),
        ("as_dataset", transformers.Trainer, {**single, "dataloader_pin_memory": False}),
        ("as_dataset, pinned", transformers.Trainer, single),
    ):
        with make(place, tokenizer=tokenize, output="hf") as loader:
            data = loader if kind is Trainer else loader.as_dataset()
            found[name] = measured(train, loader, kind, data, **options)
    return found


def lightning(place: Path) -> dict[str, Any]:
    """Lightning's Trainer and Fabric."""
    import lightning
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class Npu(lightning.pytorch.accelerators.CPUAccelerator):
        """Lightning knows no accelerator of this name."""

        def setup_device(self, device: torch.device) -> None:
            torch.npu.set_device(device)

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.by_hand: list[str] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if index == 0 and self.trainer.current_epoch == 1:
                with make(place, tokenizer=tokenize, output="hf", train=False) as own:
                    self.by_hand += [str(batch["pixel_values"].device) for batch in own]
            return self.net(**batch)["loss"]

        def validation_step(self, batch: Any, index: int) -> None:
            self.net(**batch)

        def test_step(self, batch: Any, index: int) -> None:
            self.net(**batch)

        def predict_step(self, batch: Any, index: int) -> None:
            self.net(**batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(loader: Any, **options: Any) -> dict[str, Any]:
        model = Model()
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(
            max_epochs=2,
            enable_checkpointing=False,
            default_root_dir=place,
            **quiet,
            **options,
        )
        with make(place, tokenizer=tokenize, output="hf", train=False) as validation:
            trainer.fit(model, loader, validation)
            trainer.validate(model, validation, verbose=False)
            trainer.test(model, validation, verbose=False)
            trainer.predict(model, validation)
        return {"devices": sorted(set(model.net.devices)), "by hand": sorted(set(model.by_hand))}

    def fabric(loader: Any, **options: Any) -> list[str]:
        fabric = lightning.Fabric(strategy=Single("npu:1", Npu()))
        batches = fabric.setup_dataloaders(loader, **options)
        return sorted({str(batch["pixel_values"].device) for _ in range(2) for batch in batches})

    from lightning.fabric.strategies import SingleDeviceStrategy as Single

    found = {}
    for name, run in {
        "npu": functools.partial(fit, strategy=SingleDeviceStrategy("npu:1", Npu())),
        "cpu": functools.partial(fit, accelerator="cpu"),
        "fabric": fabric,
        "fabric, not moved": functools.partial(fabric, move_to_device=False),
    }.items():
        with make(place, tokenizer=tokenize, output="hf") as loader:
            found[name] = measured(run, loader)
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    scenario, place = sys.argv[1:]
    sys.stdout.write(json.dumps(globals()[scenario](Path(place))) + "\n")


if __name__ == "__main__":
    main()
