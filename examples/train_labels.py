"""Train a classifier on shards of images and labels (`jpg` and `cls`, as of ImageNet) while they arrive.

    python examples/train_labels.py 's3://bucket/train-{000..255}.tar' --validation 's3://bucket/val-{0..9}.tar'

Without URLs it makes shards of photographs and serves them to itself over HTTP; nothing is downloaded.
"""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator

import torch
from photograph_shards import write_photograph_shards
from torch import nn

import streamload
from streamload import Shards
from streamload.testing.server import ShardServer


@contextlib.contextmanager
def photographs() -> Iterator[tuple[str, str, str]]:
    """The URLs of shards to train on, those of one to validate on, and a directory for their cache."""
    with tempfile.TemporaryDirectory() as shards, tempfile.TemporaryDirectory() as cache:
        write_photograph_shards(shards, samples=256, samples_per_shard=64, members=("jpg", "cls"))
        with ShardServer(shards) as server:
            yield f"{server.url}/{{00000..00002}}.tar", f"{server.url}/00003.tar", cache


def classifier(classes: int) -> nn.Module:
    """A small network of convolutions, for images of any size."""
    layers: list[nn.Module] = [nn.AvgPool2d(4)]
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", nargs="?", help="shards of jpg and cls members")
    parser.add_argument("--validation", help="more of them, to validate on")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    given = contextlib.nullcontext((args.urls, args.validation, None)) if args.urls else photographs()
    with given as (urls, validation, cache_dir):
        options = {
            "shards": Shards(text_key=None, label_key="cls"),
            "batch_size": args.batch_size,
            "num_workers": args.workers,
            "device": "auto",
            "cache_dir": cache_dir,
        }
        # preprocess= takes a transform of torchvision, or an image processor of transformers.
        with contextlib.ExitStack() as stack:
            loader = stack.enter_context(streamload.make_loader(urls, **options))
            held_out = None
            if validation:
                held_out = stack.enter_context(streamload.make_loader(validation, train=False, **options))
            train(loader, held_out, args.classes, args.epochs)


def train(loader: streamload.Loader, held_out: streamload.Loader | None, classes: int, epochs: int) -> None:
    torch.manual_seed(0)
    model = classifier(classes).to(loader.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        model.train()
        loader.set_epoch(epoch)
        losses = []
        for images, labels in loader:  # float32[N, 3, 224, 224], int64[N]
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}: {len(losses)} steps, mean loss {sum(losses) / len(losses):.3f}")
        if held_out is not None:
            print(f"epoch {epoch + 1}: {accuracy(model, held_out):.0%} of the validation set are right")


@torch.no_grad()
def accuracy(model: nn.Module, loader: streamload.Loader) -> float:
    """The share of samples whose class is found."""
    model.eval()
    right = [model(images).argmax(1) == labels for images, labels in loader]
    return torch.cat(right).float().mean().item()


if __name__ == "__main__":
    main()
