"""Train a small diffusion model on images of several sizes, each microbatch of one: aspect-ratio buckets.

    python examples/train_diffusion.py 's3://bucket/{00000..00099}.tar' --pixels 65536

As SDXL, the model is told each image's original size, where it was cropped and the size that it has; as Flux,
it learns the velocity of a rectified flow. Without URLs it makes shards of photographs and serves them to
itself over HTTP; nothing is downloaded.
"""

import argparse
import contextlib
import math
import tempfile
from collections import Counter
from collections.abc import Iterator

import torch
from photograph_shards import write_photograph_shards
from small_clip import VOCABULARY, tokenize
from torch import nn
from torch.nn import functional

import streamload
from streamload import Batches, Images
from streamload.aspects import image_sizes
from streamload.testing.server import ShardServer

PATCH = 4
CONDITIONS = ("original_size", "crop_top_left", "target_size")


class Block(nn.Module):
    """A residual block of convolutions, shifted by what is known of the image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Linear(width, width)
        self.layers = nn.Sequential(
            nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1), nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )  # fmt: skip

    def forward(self, values: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        return values + self.layers(values + self.shift(known)[..., None, None])


class SmallDenoiser(nn.Module):
    """Predicts the velocity from noise to image, for images of any size that patches divide."""

    def __init__(self, width: int = 64, blocks: int = 3) -> None:
        super().__init__()
        self.frequencies = 2.0 ** torch.arange(4)
        self.text = nn.EmbeddingBag(VOCABULARY, width, mode="mean", padding_idx=0)
        self.known = nn.Linear((1 + 2 * len(CONDITIONS)) * 2 * len(self.frequencies), width)
        self.first = nn.Sequential(nn.PixelUnshuffle(PATCH), nn.Conv2d(3 * PATCH**2, width, 3, padding=1))
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Sequential(nn.Conv2d(width, 3 * PATCH**2, 3, padding=1), nn.PixelShuffle(PATCH))

    def forward(
        self, noisy: torch.Tensor, time: torch.Tensor, texts: torch.Tensor, conditions: torch.Tensor
    ) -> torch.Tensor:
        """float32[N, 3, H, W], float32[N], int64[N, L], int64[N, 6] → float32[N, 3, H, W]."""
        numbers = torch.cat([time[:, None], conditions / 1024], dim=1)
        angles = (math.pi * numbers[..., None] * self.frequencies.to(noisy.device)).flatten(1)
        known = functional.silu(self.known(torch.cat([angles.sin(), angles.cos()], dim=1)) + self.text(texts))
        values = self.first(noisy)
        for block in self.blocks:
            values = block(values, known)
        return self.last(values)


@contextlib.contextmanager
def photographs() -> Iterator[tuple[str, str]]:
    """The URLs of some shards, and a directory for their cache."""
    with tempfile.TemporaryDirectory() as shards, tempfile.TemporaryDirectory() as cache:
        paths = write_photograph_shards(shards, samples=384, samples_per_shard=64)
        with ShardServer(shards) as server:
            yield f"{server.url}/{{00000..{len(paths) - 1:05d}}}.tar", cache


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", nargs="?", help="shards of images and captions")
    parser.add_argument("--pixels", type=int, default=64 * 64, help="of each image, about")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--microbatch", type=int, default=8, help="images of one size")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    with contextlib.nullcontext((args.urls, None)) if args.urls else photographs() as (urls, cache_dir):
        loader = streamload.make_loader(
            urls,
            tokenize,
            images=Images(sizes=image_sizes(args.pixels, step=2 * PATCH, longest=2.0), dtype="uint8"),
            batches=Batches(microbatch=args.microbatch),
            output="dict",
            batch_size=args.batch_size,
            num_workers=args.workers,
            device="auto",
            cache_dir=cache_dir,
        )
        with loader:
            train(loader, args.epochs)


def train(loader: streamload.Loader, epochs: int) -> None:
    torch.manual_seed(0)
    model = SmallDenoiser().to(loader.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        losses, sizes = [], Counter[torch.Size]()
        for batch in loader:
            optimizer.zero_grad()
            for part in loader.microbatches(batch):
                loss = loss_of(model, part)
                (loss * part.fraction).backward()
                losses.append(loss.item())
                sizes[part["image"].shape[2:]] += 1
            optimizer.step()
        counted = loader.stats()
        print(
            f"epoch {epoch + 1}: {len(losses)} microbatches of {len(sizes)} sizes, mean loss "
            f"{sum(losses) / len(losses):.3f}, {counted.samples_off_size / counted.samples_yielded:.1%} of "
            f"samples so far off their best size"
        )


def loss_of(model: SmallDenoiser, part: dict[str, torch.Tensor]) -> torch.Tensor:
    """The error of the velocity at random times between image and noise."""
    images = part["image"].float() / 127.5 - 1
    time, noise = torch.rand(len(images), device=images.device), torch.randn_like(images)
    noisy = torch.lerp(images, noise, time[:, None, None, None])
    conditions = torch.cat([part[name] for name in CONDITIONS], dim=1)
    return functional.mse_loss(model(noisy, time, part["text"], conditions), noise - images)


if __name__ == "__main__":
    main()
