"""A CLIP with the shapes of open_clip's ViT-B/32, in plain torch, and its training step in bfloat16.

What matters to a feed is how long a step takes; so nothing is installed for it, and every machine runs the
same.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Of a model; the defaults are ViT-B/32's."""

    side: int = 224
    patch: int = 32
    image_width: int = 768
    image_layers: int = 12
    image_heads: int = 12
    words: int = 49_408
    length: int = 77
    text_width: int = 512
    text_layers: int = 12
    text_heads: int = 8
    embedding: int = 512


TINY = Shape(image_width=32, image_layers=1, image_heads=2, text_width=32, text_layers=1, text_heads=2)


class Clip(nn.Module):
    """Images float32[N, 3, side, side] and ids int64[N, length] to unit vectors of each."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        patches = (shape.side // shape.patch) ** 2
        self.patches = nn.Conv2d(3, shape.image_width, shape.patch, shape.patch, bias=False)
        self.first = nn.Parameter(torch.randn(1, 1, shape.image_width) * shape.image_width**-0.5)
        self.image_places = nn.Parameter(torch.randn(patches + 1, shape.image_width) * 0.01)
        self.before = nn.LayerNorm(shape.image_width)
        self.image_tower = _tower(shape.image_width, shape.image_layers, shape.image_heads)
        self.image_out = nn.Linear(shape.image_width, shape.embedding, bias=False)
        self.words = nn.Embedding(shape.words, shape.text_width)
        self.text_places = nn.Parameter(torch.randn(shape.length, shape.text_width) * 0.01)
        self.text_tower = _tower(shape.text_width, shape.text_layers, shape.text_heads)
        self.text_out = nn.Linear(shape.text_width, shape.embedding, bias=False)
        self.scale = nn.Parameter(torch.tensor(14.3).log())
        mask = nn.Transformer.generate_square_subsequent_mask(shape.length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, images: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = self.patches(images).flatten(2).transpose(1, 2)
        seen = torch.cat([self.first.expand(len(seen), -1, -1), seen], dim=1) + self.image_places
        seen = self.image_out(self.image_tower(self.before(seen))[:, 0])
        read = self.text_tower(self.words(ids) + self.text_places, mask=self.mask, is_causal=True)
        read = self.text_out(read[torch.arange(len(ids), device=ids.device), ids.argmax(dim=-1)])
        return functional.normalize(seen, dim=-1), functional.normalize(read, dim=-1)


class Training:
    """A model and its optimizer on a device.

    Args:
        shape: of the model.
        device: where it trains.
        backend: of torch.compile; None: it isn't compiled.
    """

    def __init__(self, shape: Shape, device: torch.device, backend: str | None = None) -> None:
        torch.manual_seed(0)
        self._model = Clip(shape).to(device)
        if backend is not None:
            self._model.compile(backend=backend)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self.device = device

    def step(self, images: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Train on a batch; the loss, which nobody has waited for."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            seen, read = self._model(images, ids)
            alike = self._model.scale.exp() * seen @ read.t()
        target = torch.arange(len(ids), device=self.device)
        towards_texts, towards_images = alike.float(), alike.t().float()
        loss = functional.cross_entropy(towards_texts, target) + functional.cross_entropy(
            towards_images, target
        )
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.detach()


def _tower(width: int, layers: int, heads: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
