"""Train a small CLIP of open_clip's parts on shards that arrive while it trains.

    python examples/train_openclip.py 'https://host/shards/{00000..00009}.tar'

Without URLs it makes shards of photographs and serves them to itself over HTTP. Needs `pip install
open_clip_torch`. To run open_clip's own training on streamload, with all that it can do:

    python -m streamload.integrations.openclip --dataset-type webdataset --train-data URLS …
"""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator

import open_clip
import torch
from photograph_shards import write_photograph_shards

import streamload
from streamload.testing.server import ShardServer

IMAGE_SIZE = 64


@contextlib.contextmanager
def photographs() -> Iterator[tuple[str, str]]:
    """The URLs of some shards, and a directory for their cache."""
    with tempfile.TemporaryDirectory() as shards, tempfile.TemporaryDirectory() as cache:
        paths = write_photograph_shards(shards, samples=384, samples_per_shard=64)
        with ShardServer(shards) as server:
            yield f"{server.url}/{{00000..{len(paths) - 1:05d}}}.tar", cache


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", nargs="?", help="shards, as open_clip's --train-data")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    with contextlib.nullcontext((args.urls, None)) if args.urls else photographs() as (urls, cache_dir):
        train(urls, args.epochs, args.batch_size, args.workers, cache_dir)


def train(urls: str, epochs: int, batch_size: int, workers: int, cache_dir: str | None) -> None:
    torch.manual_seed(0)
    model = open_clip.CLIP(
        embed_dim=64,
        vision_cfg={"image_size": IMAGE_SIZE, "patch_size": 16, "width": 128, "layers": 2, "head_width": 32},
        text_cfg={"context_length": 24, "width": 64, "layers": 2, "heads": 2},
        output_dict=True,
    )
    contrastive_loss = open_clip.ClipLoss()

    loader = streamload.make_loader(
        urls,
        open_clip.SimpleTokenizer(context_length=24),
        preprocess=open_clip.image_transform(IMAGE_SIZE, is_train=True),
        batch_size=batch_size,
        num_workers=workers,
        device="auto",
        cache_dir=cache_dir,
    )
    model = model.to(loader.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with loader:
        for epoch in range(epochs):
            losses = []
            loader.set_epoch(epoch)
            for images, texts in loader:
                loss = contrastive_loss(**model(images, texts))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            arrived = loader.stats().origin_bytes / 1e6
            print(
                f"epoch {epoch + 1}: {len(losses)} steps, mean loss {sum(losses) / len(losses):.3f}, "
                f"{arrived:.1f} MB fetched so far"
            )


if __name__ == "__main__":
    main()
