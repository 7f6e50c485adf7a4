"""Train a small CLIP on images of any aspect and resolution, as patches, with captions of any length.

    python examples/train_naflex.py 's3://bucket/{00000..00099}.tar'

Each step has images of at most so many patches, and as many rows as a budget of patches has room for. Without
URLs it makes shards of photographs and serves them to itself over HTTP; nothing is downloaded.
"""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from photograph_shards import write_photograph_shards
from small_clip import VOCABULARY, tokenize
from torch import nn
from torch.nn import functional

import streamload
from streamload import Batches, Images, Patches
from streamload.testing.server import ShardServer

PATCH_SIZE, SEQ_LENS, BUDGET = 16, (36, 72, 144), 1152


class HashedWords:
    """The tokenizer of small_clip.py; its id of padding lets captions be cut to the longest of a batch."""

    pad_token_id = 0

    def __call__(self, texts: list[str]) -> torch.Tensor:
        return tokenize(texts)


class SmallNaFlexClip(nn.Module):
    """A transformer over the patches that there are, and the mean of the caption's word vectors."""

    def __init__(self, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH_SIZE * PATCH_SIZE * 3, width)
        self.places = nn.Linear(2, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.image_tower = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.text_tower = nn.Embedding(VOCABULARY, width)
        self.log_scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, image: dict[str, Any], text: torch.Tensor, text_valid: torch.Tensor) -> torch.Tensor:
        """The contrastive loss of a batch; chance is ln N."""
        valid = image["patch_valid"]
        grid = image["patch_coord"].amax(1, keepdim=True) + 1
        tokens = self.patches(image["patches"]) + self.places(image["patch_coord"] / grid)
        tokens = self.image_tower(tokens, src_key_padding_mask=~valid)
        image_features = functional.normalize(mean_of(tokens, valid), dim=-1)
        text_features = functional.normalize(mean_of(self.text_tower(text), text_valid), dim=-1)
        logits = self.log_scale.exp().clamp(max=100) * image_features @ text_features.T
        here = torch.arange(len(text), device=text.device)
        return (functional.cross_entropy(logits, here) + functional.cross_entropy(logits.T, here)) / 2


def mean_of(values: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """The mean of each row's valid vectors: float32[N, L, C], bool[N, L] → float32[N, C]."""
    return (values * valid[..., None]).sum(1) / valid.sum(1, keepdim=True).clamp(min=1)


def steps_for(samples: int) -> list[tuple[int, int]]:
    """The steps of an epoch: each length in turn, with the rows that the budget has room for."""
    steps: list[tuple[int, int]] = []
    while samples > 0:
        seq_len = SEQ_LENS[len(steps) % len(SEQ_LENS)]
        steps.append((seq_len, min(BUDGET // seq_len, samples)))
        samples -= steps[-1][1]
    return steps


@contextlib.contextmanager
def photographs() -> Iterator[tuple[str, str]]:
    """The URLs of some shards, and a directory for their cache."""
    with tempfile.TemporaryDirectory() as shards, tempfile.TemporaryDirectory() as cache:
        paths = write_photograph_shards(shards, samples=256, samples_per_shard=64)
        with ShardServer(shards) as server:
            yield f"{server.url}/{{00000..{len(paths) - 1:05d}}}.tar", cache


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", nargs="?", help="shards of images and captions")
    parser.add_argument("--samples", type=int, default=256, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    with contextlib.nullcontext((args.urls, None)) if args.urls else photographs() as (urls, cache_dir):
        loader = streamload.make_loader(
            urls,
            HashedWords(),
            images=Images(patches=Patches(PATCH_SIZE, SEQ_LENS, steps=steps_for(args.samples))),
            batches=Batches(text_padding="longest", text_pad_multiple=4),
            output="dict",
            num_workers=args.workers,
            device="auto",
            cache_dir=cache_dir,
        )
        with loader:
            train(loader, args.epochs)


def train(loader: streamload.Loader, epochs: int) -> None:
    torch.manual_seed(0)
    model = SmallNaFlexClip().to(loader.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        losses, patches, places = [], 0, 0
        for batch in loader:
            loss = model(**batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            valid = batch["image"]["patch_valid"]
            patches, places = patches + int(valid.sum()), places + valid.numel()
        print(
            f"epoch {epoch + 1}: {len(losses)} steps, mean loss {sum(losses) / len(losses):.3f}, "
            f"{patches / places:.0%} of the places have a patch"
        )


if __name__ == "__main__":
    main()
