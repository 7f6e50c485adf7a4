"""A small CLIP for demo.py and docker/train.py: two towers, the contrastive loss, a hashing tokenizer."""

import re
import zlib

import torch
from torch import nn
from torch.nn import functional

CONTEXT_LENGTH = 16
VOCABULARY = 1024


def tokenize(texts: list[str]) -> torch.Tensor:
    """Hashed words: int64[N, CONTEXT_LENGTH], padded with 0."""
    ids = torch.zeros(len(texts), CONTEXT_LENGTH, dtype=torch.int64)
    for row, text in enumerate(texts):
        words = re.findall(r"\w+", text.lower())[:CONTEXT_LENGTH]
        for column, word in enumerate(words):
            ids[row, column] = 1 + zlib.crc32(word.encode()) % (VOCABULARY - 1)
    return ids


class SmallClip(nn.Module):
    """A transformer over 7 × 7 patches of the image, and the mean of the caption's word vectors."""

    def __init__(self, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Sequential(nn.AvgPool2d(4), nn.Conv2d(3, width, kernel_size=8, stride=8))
        self.places = nn.Parameter(torch.randn(49, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.image_tower = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.text_tower = nn.EmbeddingBag(VOCABULARY, width, mode="mean", padding_idx=0)
        self.log_scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        """The contrastive loss of float32[N, 3, 224, 224] and int64[N, CONTEXT_LENGTH]; chance is ln N."""
        patches = self.patches(images).flatten(2).transpose(1, 2) + self.places
        image_features = functional.normalize(self.image_tower(patches).mean(1), dim=-1)
        text_features = functional.normalize(self.text_tower(texts), dim=-1)
        logits = self.log_scale.exp().clamp(max=100) * image_features @ text_features.T
        here = torch.arange(len(images), device=images.device)
        return (functional.cross_entropy(logits, here) + functional.cross_entropy(logits.T, here)) / 2
