"""The user's functions that cases name: tokenizers, selections, transforms, modules, policies."""

from __future__ import annotations

import functools
import random
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

import streamload

_LENGTH = 24
_WORDS = 10


def letters(captions: list[str]) -> torch.Tensor:
    """The first letters of each caption: int64[N, 24]."""
    return torch.tensor([[ord(c) % 256 for c in caption[:_LENGTH].ljust(_LENGTH)] for caption in captions])


def words(captions: list[str]) -> dict[str, list[list[int]]]:
    """A number for each of the first words, and which are padding."""
    rows = [[1 + zlib.crc32(word.encode()) % 97 for word in text.split()][:_WORDS] for text in captions]
    return {
        "input_ids": [row + [0] * (_WORDS - len(row)) for row in rows],
        "attention_mask": [[1] * len(row) + [0] * (_WORDS - len(row)) for row in rows],
    }


@functools.cache
def of_transformers() -> Any:
    """A word-level tokenizer of transformers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = ["[PAD]", "[UNK]", "a", "the", "red", "old", "small", "dog", "cat", "noise", "from", "shard"]
    model = Tokenizer(models.WordLevel({word: place for place, word in enumerate(vocabulary)}, "[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="[PAD]", unk_token="[UNK]", model_max_length=12
    )


def most_keys(entry: Any) -> bool:
    return zlib.crc32(entry.key.encode()) % 4 != 0


def wide(entry: Any) -> bool:
    return entry.width > 24 and entry.height > 16


def good(entry: Any) -> bool:
    return not entry.facts["score"] < 0.3


def by_width(entry: Any) -> float:
    return 0.5 + (entry.width % 5) / 2


def by_caption(entry: Any) -> float | None:
    return None if entry.caption_bytes % 3 == 0 else 1 + entry.caption_bytes % 7


def caption_length(sample: Mapping[str, Any]) -> float:
    return len(sample.get("txt", b""))


def drawn(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Values drawn as an augmentation's are, and some that aren't."""
    numbers = np.random.rand(2).astype(np.float32)
    size = max((len(value) for value in sample.values() if isinstance(value, bytes)), default=0)
    return {"drawn": torch.rand(2), "python": random.random(), "numpy": numbers, "size": size}


def with_image(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {"corner": sample["image"][:, :4, :4].clone(), "letters": len(sample.get("txt", b""))}


def lists(examples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"rows": len(examples), **{name: [row[name] for row in examples] for name in examples[0]}}


def tiny(image: Any) -> torch.Tensor:
    """A transform of a user's own, by Pillow and numpy: float32[3, 20, 20]."""
    if random.random() < 0.5:
        image = image.rotate(90)
    pixels = np.asarray(image.convert("RGB").resize((20, 20)), np.float32)
    return torch.from_numpy(pixels / 128 - 1).permute(2, 0, 1).contiguous()


@functools.cache
def clip_processor() -> Any:
    """An image processor of transformers, for 32 pixels."""
    import transformers

    kind = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor
    return kind(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})


class Means(torch.nn.Module):
    """A frozen module whose results are exact in any order of addition: float32[N, 3]."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.round(images * 64).flatten(2).sum(2)


def frozen_means() -> streamload.Features:
    return streamload.Features(Means().eval())


class Letters(torch.nn.Module):
    """Of ids: float32[N, 2]."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.stack([ids.sum(1), ids.max(1).values], 1).float()


class Alternate:
    """A policy that looks at nothing but the step."""

    every = 3

    def decide(self, summary: Any, memory: Any) -> streamload.mixing.Decided:
        count = 0 if memory is None else memory["count"] + 1
        names = [source.name for source in summary.sources]
        weights = {name: 1 + (place + count) % 3 for place, name in enumerate(names)}
        return streamload.mixing.Decided(weights, {"count": count}, f"turn {count}")


class FollowLoss:
    """A policy that follows what was reported."""

    every = 4

    def decide(self, summary: Any, memory: Any) -> streamload.mixing.Decided:
        means = {source.name: source.loss.mean or 0.0 for source in summary.sources}
        highest = max(means, key=lambda name: means[name])
        weights = {name: 3.0 if name == highest else 1.0 for name in means}
        return streamload.mixing.Decided(weights, memory, f"{highest} has the highest loss")


class Halve:
    """A policy of the batch size that looks at nothing but the size."""

    every = 3

    def decide(self, measured: Any, memory: Any) -> streamload.batching.SizeDecided:
        return streamload.batching.SizeDecided(
            max(2, measured.size // 2), memory, f"after step {measured.step}"
        )


NAMED: dict[str, Callable[[], Any]] = {
    "letters": lambda: letters,
    "words": lambda: words,
    "of_transformers": of_transformers,
    "most_keys": lambda: most_keys,
    "wide": lambda: wide,
    "good": lambda: good,
    "by_width": lambda: (by_width, "1"),
    "by_caption": lambda: by_caption,
    "complexity": lambda: streamload.complexity(0.3, 0.7, mean=20.0),
    "caption_length": lambda: (caption_length, "1"),
    "drawn": lambda: drawn,
    "with_image": lambda: with_image,
    "lists": lambda: lists,
    "tiny": lambda: tiny,
    "clip_processor": clip_processor,
    "means": frozen_means,
    "means_half": lambda: streamload.Features(Means().eval(), dtype=torch.float16, images=True),
    "means_variants": lambda: streamload.Features(Means().eval(), variants=2, preprocess=tiny),
    "letters_sum": lambda: streamload.Features(Letters().eval(), inputs="text"),
    "alternate": Alternate,
    "follow_loss": FollowLoss,
    "halve": Halve,
    "schedule": lambda: streamload.mixing.Schedule({3: {"0": 2}, 7: {"0": 1, "1": 3}}),
    "target": lambda: streamload.mixing.Target({"0": 0.5, "1": 0.25}, every=4),
    "replay": lambda: streamload.mixing.Replay("decisions.jsonl"),
}
"""Makers of the values that cases write as "@name"."""


def resolved(value: Any) -> Any:
    """A value of a case with the functions in place of their names."""
    if isinstance(value, str) and value.startswith("@"):
        return NAMED[value[1:]]()
    if isinstance(value, Mapping):
        return {name: resolved(entry) for name, entry in value.items()}
    return value
