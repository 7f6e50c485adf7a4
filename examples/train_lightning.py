"""Train a small CLIP-like model with Lightning on shards that arrive meanwhile; run it again to resume.

    python examples/train_lightning.py 's3://bucket/shards/{00000..00009}.tar' --steps 1000

Loaders are passed to `fit` like DataLoaders. Lightning's checkpoints contain their state, so `ckpt_path`
resumes with the next batch. Without URLs it makes shards of photographs in its output folder. Needs
`pip install lightning`.
"""

import argparse
import zlib
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from photograph_shards import write_photograph_shards
from torch.nn import functional

import streamload

WORDS = 4096


def hashed_words(captions: list[str]) -> torch.Tensor:
    """Each caption's first 16 words as numbers, filled up with 0: int64[N, 16]."""
    ids = torch.zeros(len(captions), 16, dtype=torch.int64)
    for row, text in zip(ids, captions, strict=True):
        for place, word in enumerate(text.lower().split()[:16]):
            row[place] = 1 + zlib.crc32(word.encode()) % (WORDS - 1)
    return ids


class SmallClip(lightning.LightningModule):
    """An image tower and a bag of words."""

    def __init__(self) -> None:
        super().__init__()
        self.image = torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 16, stride=16),
            torch.nn.GELU(),
            torch.nn.Conv2d(32, 64, 4, stride=4),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
        )
        self.text = torch.nn.EmbeddingBag(WORDS, 64, padding_idx=0)

    def loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, texts = (
            functional.normalize(tower(part))
            for tower, part in zip((self.image, self.text), batch, strict=True)
        )
        logits = 20 * images @ texts.T
        target = torch.arange(len(logits), device=logits.device)
        return (functional.cross_entropy(logits, target) + functional.cross_entropy(logits.T, target)) / 2

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", nargs="?", help="shards in the WebDataset convention")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("trained"))
    args = parser.parse_args()
    shards = args.output / "shards"
    if not args.urls and not (shards / "sizes.json").exists():  # written last
        write_photograph_shards(shards, samples=384, samples_per_shard=64)
    train(args, args.urls or str(shards))


def train(args: argparse.Namespace, urls: str) -> None:
    lightning.seed_everything(0)
    common = {"num_workers": args.workers, "batch_size": args.batch_size, "device": "auto"}
    saves = ModelCheckpoint(args.output, save_last=True, every_n_train_steps=max(1, args.steps // 4))
    trainer = lightning.Trainer(
        max_steps=args.steps,
        callbacks=[saves],
        val_check_interval=max(1, args.steps // 2),
        check_val_every_n_epoch=None,
        logger=False,
    )
    with (
        streamload.make_loader(urls, hashed_words, num_samples=12 * args.batch_size, **common) as loader,
        streamload.make_loader(urls, hashed_words, train=False, **common) as held_out,
    ):
        last = args.output / "last.ckpt"
        checkpoint = last if last.exists() else None
        print(f"going on from {checkpoint}" if checkpoint else "beginning")
        trainer.fit(SmallClip(), loader, held_out, ckpt_path=checkpoint)
        print(f"step {trainer.global_step}: loss {trainer.callback_metrics['val_loss']:.3f}")


if __name__ == "__main__":
    main()
