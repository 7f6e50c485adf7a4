"""Train a small CLIP on the CPU from shards in an object store, streaming them: the trainer of compose.yaml.

The store and its keys come from the AWS_* variables, the cache from STREAMLOAD_CACHE_DIR.
"""

import argparse

import torch
from small_clip import SmallClip, tokenize

import streamload


def train(urls: str, epochs: int, batch_size: int, workers: int) -> None:
    """Train, and print after each epoch the loss and what the loader did."""
    model = SmallClip()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with streamload.make_loader(urls, tokenize, batch_size=batch_size, num_workers=workers) as loader:
        before = loader.stats()
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            for images, texts in loader:
                loss = model(images, texts)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            now = loader.stats()
            print(f"epoch {epoch + 1}: loss {loss.item():.2f}\n{now.since(before)}", flush=True)
            before = now


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("urls")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    train(**vars(parser.parse_args()))
