"""Train a linear classifier on the features of a frozen CLIP tower, which are computed once.

    python examples/linear_probe.py 's3://bucket/train-{000..255}.tar' --model openai/clip-vit-base-patch32

The first epoch computes the features; all later ones, and later runs, read them instead of decoding images.
Without URLs it makes shards of photographs and serves them to itself over HTTP, and without --model the tower
is a small one with weights from a seed; nothing is downloaded.
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator

import torch
from photograph_shards import write_photograph_shards
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

import streamload
from streamload.testing.server import ShardServer


@streamload.cache_module(cache_name="clip-tower")
class Tower(nn.Module):
    """The frozen tower: images float32[N, 3, 224, 224] → features float32[N, D]."""

    def __init__(self, name: str | None = None):
        super().__init__()
        if name is None:
            torch.manual_seed(0)
            sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "patch_size": 32}
            config = CLIPVisionConfig(num_attention_heads=2, projection_dim=64, **sizes)
            self.clip = CLIPVisionModelWithProjection(config)
        else:
            self.clip = CLIPVisionModelWithProjection.from_pretrained(name)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.clip(pixel_values=images).image_embeds


@contextlib.contextmanager
def photographs() -> Iterator[tuple[str, str]]:
    """The URLs of shards to train on, and a directory for their cache."""
    with tempfile.TemporaryDirectory() as shards, tempfile.TemporaryDirectory() as cache:
        write_photograph_shards(shards, samples=256, samples_per_shard=64, members=("jpg", "cls"))
        with ShardServer(shards) as server:
            yield f"{server.url}/{{00000..00003}}.tar", cache


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", nargs="?", help="shards of jpg and cls members")
    parser.add_argument("--model", help="a CLIP model of transformers; a small one from a seed by default")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    given = contextlib.nullcontext((args.urls, None)) if args.urls else photographs()
    tower = Tower(args.model).eval()  # isn't built as long as all features are there
    with (
        given as (urls, cache_dir),
        streamload.make_loader(
            urls,
            batch_size=args.batch_size,
            num_workers=args.workers,
            output="dict",
            device="auto",
            cache_dir=cache_dir,
            shards=streamload.Shards(text_key=None, label_key="cls"),
            batches=streamload.Batches(features={"clip": tower}),
        ) as loader,
    ):
        train(loader, tower.to(loader.device), args.classes, args.epochs)


def train(loader: streamload.Loader, tower: nn.Module, classes: int, epochs: int) -> None:
    torch.manual_seed(0)
    head = nn.LazyLinear(classes).to(loader.device)
    optimizer = None
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        began, before, losses = time.monotonic(), loader.stats(), []
        for batch in loader:
            features = tower(batch)  # float32[N, D]: stored rows came with the batch
            loss = nn.functional.cross_entropy(head(nn.functional.normalize(features)), batch["label"])
            optimizer = optimizer or torch.optim.AdamW(head.parameters(), lr=3e-2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        rows = loader.stats().since(before)
        print(
            f"epoch {epoch + 1}: mean loss {sum(losses) / len(losses):.3f}, features: "
            f"{rows.feature_rows_read} read, {rows.feature_rows_computed} computed; "
            f"{time.monotonic() - began:.1f} s"
        )


if __name__ == "__main__":
    main()
