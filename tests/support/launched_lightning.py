"""A training that Lightning's Trainer starts in two processes.

`python launched_lightning.py STRATEGY FOLDER` trains and resumes as launched.py does. The first loader is
made where the script begins, the second one, which resumes, in a DataModule.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from launched import SAVED_AFTER, make, write
from lightning.pytorch.callbacks import ModelCheckpoint

import streamload


class Notes(lightning.LightningModule):
    """Notes on which samples this rank is trained, step by step."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.name, self.folder = name, folder
        self.steps: list[list[str]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, _, names = batch
        self.steps.append(names["__key__"])
        return self.layer(images.mean((2, 3))).pow(2).mean()

    def on_train_end(self) -> None:
        write(self.folder, self.name, self.trainer.train_dataloader, self.steps)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(lightning.LightningDataModule):
    def __init__(self, folder: Path, workers: int) -> None:
        super().__init__()
        self.folder, self.workers = folder, workers

    def train_dataloader(self) -> streamload.Loader:
        return make(self.folder, num_workers=self.workers)


def main() -> None:
    strategy, folder = sys.argv[1], Path(sys.argv[2])
    workers = 0 if strategy == "ddp_spawn" else 1  # there these are spawned, too: seconds of imports
    loader = make(folder, num_workers=workers)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    common = {"accelerator": "cpu", "devices": 2, "strategy": strategy, "max_epochs": 1, **quiet}
    saves = ModelCheckpoint(
        folder / "saved", filename="{step}", every_n_train_steps=SAVED_AFTER, save_top_k=-1
    )
    lightning.Trainer(callbacks=[saves], **common).fit(Notes("first", folder), loader)
    resumed = lightning.Trainer(enable_checkpointing=False, **common)
    checkpoint = folder / "saved" / f"step={SAVED_AFTER}.ckpt"
    resumed.fit(Notes("resumed", folder), datamodule=Data(folder, workers), ckpt_path=checkpoint)


if __name__ == "__main__":
    main()
