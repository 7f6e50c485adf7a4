"""Train transformers' CLIPModel, from a configuration, on shards that arrive while it trains.

    python examples/train_transformers_clip.py 's3://bucket/shards/{00000..00009}.tar'

Without URLs it makes shards of photographs and serves them to itself over HTTP. Nothing is downloaded: the
model starts with random weights, and the tokenizer is trained on the captions of the first batches, which
then come from the cache. Needs `pip install transformers`.
"""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from photograph_shards import write_photograph_shards
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast

import streamload
from streamload import Workers
from streamload.testing.server import ShardServer

LENGTH = 24
SPECIAL = ("<pad>", "<unk>", "<start>", "<end>")


@contextlib.contextmanager
def photographs() -> Iterator[tuple[str, str]]:
    """The URLs of some shards, and a directory for their cache."""
    with tempfile.TemporaryDirectory() as shards, tempfile.TemporaryDirectory() as cache:
        paths = write_photograph_shards(shards, samples=384, samples_per_shard=64)
        with ShardServer(shards) as server:
            yield f"{server.url}/{{00000..{len(paths) - 1:05d}}}.tar", cache


def caption(sample: dict[str, Any]) -> dict[str, str]:
    """What is wanted of a sample where its image isn't."""
    return {"text": sample["txt"].decode()}


def tokenizer_of(captions: Iterator[str]) -> PreTrainedTokenizerFast:
    """A tokenizer by words, which knows those of these captions."""
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(captions, trainers.WordLevelTrainer(special_tokens=list(SPECIAL)))
    words.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[(name, SPECIAL.index(name)) for name in SPECIAL]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        model_max_length=LENGTH,
        pad_token="<pad>",
        bos_token="<start>",
        eos_token="<end>",
    )


def model_for(tokenizer: PreTrainedTokenizerFast) -> CLIPModel:
    """A small CLIP with random weights, for images of 224 pixels."""
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    text = {**tower, **ids, "vocab_size": len(tokenizer), "max_position_embeddings": LENGTH}
    vision = {**tower, "image_size": 224, "patch_size": 32}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=64))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", nargs="?", help="shards in the WebDataset convention")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    with contextlib.nullcontext((args.urls, None)) if args.urls else photographs() as (urls, cache_dir):
        train(urls, args.epochs, args.batch_size, args.workers, cache_dir)


def train(urls: str, epochs: int, batch_size: int, workers: int, cache_dir: str | None) -> None:
    torch.manual_seed(0)
    first = streamload.make_loader(
        urls, workers=Workers(map_sample=caption), num_samples=256, num_workers=0, cache_dir=cache_dir
    )
    with first:
        tokenizer = tokenizer_of(text for batch in first for text in batch["text"])
    loader = streamload.make_loader(
        urls,
        tokenizer,
        output="hf",
        batch_size=batch_size,
        num_workers=workers,
        device="auto",
        cache_dir=cache_dir,
    )
    model = model_for(tokenizer).to(loader.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with loader:
        for epoch in range(epochs):
            losses = []
            loader.set_epoch(epoch)
            for batch in loader:  # pixel_values, input_ids, attention_mask
                loss = model(**batch, return_loss=True).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            print(f"epoch {epoch + 1}: {len(losses)} steps, mean loss {sum(losses) / len(losses):.3f}")


if __name__ == "__main__":
    main()
