"""Train a small fusion model on two sources, whose weights follow what is learned of each.

    python examples/train_fusion.py --decisions decisions.jsonl

The model looks at an image on several scales, and each word of the caption attends to all of them. One source
has photographs with captions that describe them, the other one noise with captions that say nothing; both are
made here, and nothing is downloaded. `Progress` gives samples to the source whose held-out loss falls; with
`--weigh loss` samples stay as they are, and `AlignmentBalanced` gives its rows more weight in the loss.
`streamload mixing show decisions.jsonl` shows their decisions.
"""

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from photograph_shards import write_photograph_shards
from small_clip import VOCABULARY, tokenize
from torch import nn
from torch.nn import functional

import streamload
from streamload.steering.recorded import read_points
from streamload.testing.shards import ShardOptions, write_shards

POLICIES = {
    "samples": streamload.mixing.Progress(signal="eval", every=4, max_passes=20),
    "loss": streamload.mixing.AlignmentBalanced(signal="eval", every=2),
}
HELD_OUT = 48
"""Samples of each source that are only evaluated on."""


class Outputs(NamedTuple):
    """Of a batch of N pairs: the loss of each, and the cosine of its image and caption; float32[N]."""

    losses: torch.Tensor
    cosines: torch.Tensor


class FusionModel(nn.Module):
    """Image features on three levels, to which the words of a caption attend."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.AvgPool2d(4), nn.Conv2d(3, width, 4, 4), nn.GELU())
        self.deeper = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, 2, 1), nn.GELU()) for _ in range(2)
        )
        self.projections = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.levels = nn.Parameter(torch.randn(3, width) * 0.02)
        self.words = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.normed = nn.LayerNorm(width)
        self.match = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, 1))
        self.log_scale = nn.Parameter(torch.tensor(2.3))

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """The features of all levels: float32[N, 3, 224, 224] → float32[N, 14² + 7² + 4², width]."""
        maps = [self.stem(images)]
        for layer in self.deeper:
            maps.append(layer(maps[-1]))
        tokens = [
            project(each.flatten(2).transpose(1, 2)) + level
            for each, project, level in zip(maps, self.projections, self.levels, strict=True)
        ]
        return torch.cat(tokens, 1)

    def fused(self, tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """How well captions fit images, as logits: each word attends to all levels."""
        words = self.words(ids)
        attended, _ = self.attention(words, tokens, tokens, need_weights=False)
        valid = (ids != 0).float().unsqueeze(-1)
        both = torch.cat([self.normed(attended) * valid, words * valid], -1)
        return self.match(both.sum(1) / valid.sum(1).clamp(min=1)).squeeze(-1)

    def forward(self, images: torch.Tensor, ids: torch.Tensor, source: torch.Tensor) -> Outputs:
        """A contrastive and a matching loss of float32[N, 3, 224, 224], int64[N, L] and int64[N]."""
        tokens = self.features(images)
        valid = (ids != 0).float().unsqueeze(-1)
        texts = (self.words(ids) * valid).sum(1) / valid.sum(1).clamp(min=1)
        image_features = functional.normalize(tokens.mean(1), dim=-1)
        text_features = functional.normalize(texts, dim=-1)
        logits = self.log_scale.exp().clamp(max=100) * image_features @ text_features.T
        here = torch.arange(len(ids), device=ids.device)
        contrastive = functional.cross_entropy(logits, here, reduction="none")
        contrastive = (contrastive + functional.cross_entropy(logits.T, here, reduction="none")) / 2
        fits, other = self.fused(tokens, ids), self.fused(tokens, ids[another(source)])
        matching = functional.softplus(-fits) + functional.softplus(other)
        return Outputs(contrastive + matching, (image_features * text_features).sum(-1))


def another(source: torch.Tensor) -> torch.Tensor:
    """For each row another one of its source, as a caption of the other source would be told too easily."""
    rows = torch.arange(len(source), device=source.device)
    found = rows.clone()
    for one in source.unique():
        own = rows[source == one]
        found[own] = own.roll(1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--weigh", choices=list(POLICIES), default="samples")
    parser.add_argument("--decisions", type=Path, help="keep the log of decisions in this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        where = make_sources(Path(scratch))
        log = args.decisions or Path(scratch) / "decisions.jsonl"
        loader = streamload.make_loader(
            [
                streamload.Source(str(where / "photographs"), name="photographs"),
                streamload.Source(str(where / "noise"), name="noise", floor=0.05),
            ],
            tokenize,
            batch_size=args.batch_size,
            num_workers=args.workers,
            device="auto",
            cache_dir=Path(scratch) / "cache",
            batches=streamload.Batches(sample_weight=streamload.complexity(0.3, 0.7)),
            order=streamload.Order(
                mixing=POLICIES[args.weigh],
                num_batches=args.steps,
                decisions=log,
            ),
        )
        with loader:
            names = ("photographs", "noise")
            train(loader, {name: held_out(where / f"{name}-held-out") for name in names}, args.weigh)
        report(log)


def make_sources(scratch: Path) -> Path:
    """Two sources and their held-out samples."""
    write_photograph_shards(scratch / "photographs", samples=256, samples_per_shard=64)
    write_photograph_shards(scratch / "photographs-held-out", HELD_OUT, HELD_OUT, seed=1)
    options = ShardOptions(image_side=(224, 320))
    write_shards(scratch / "noise", [64] * 4, options=options)
    write_shards(scratch / "noise-held-out", [HELD_OUT], seed=1, options=options)
    return scratch


def held_out(directory: Path) -> tuple[torch.Tensor, ...]:
    """Images, captions and sources of a directory, each once."""
    with streamload.make_loader(
        str(directory), tokenize, train=False, batch_size=HELD_OUT, num_workers=0, device="auto"
    ) as loader:
        ((images, ids),) = loader
        return images.clone(), ids.clone(), torch.zeros(len(ids), dtype=torch.int64, device=ids.device)


def train(loader: streamload.Loader, evaluated: dict[str, tuple[torch.Tensor, ...]], weigh: str) -> None:
    torch.manual_seed(0)
    model = FusionModel().to(loader.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, (images, ids, weight) in enumerate(loader, 1):
        outputs = model(images, ids, loader.info.source)
        # By complexity, times the weight that the policy gives the row's source.
        loss = (weight * outputs.losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loader.report(loss=outputs.losses, alignment=outputs.cosines)  # sums by source, on the device
        if (step + 1) % POLICIES[weigh].every == 0:  # before each decision
            with torch.no_grad():
                losses = {name: model(*pairs).losses.mean() for name, pairs in evaluated.items()}
            loader.report_eval(losses)


def report(log: Path) -> None:
    """Say how the run began and ended, from the log of decisions."""
    points = read_points(log)
    for source, first in zip(points[-1].sources, points[0].sources, strict=True):
        print(
            f"{source.name}: share {first.share:.0%} → {source.share:.0%}, "
            f"in the loss × {source.loss_weight:.2f}, "
            f"held-out loss {first.evaluation:.3f} → {source.evaluation:.3f}, "
            f"alignment {first.alignment.mean:.3f} → {source.alignment.mean:.3f}"
        )


if __name__ == "__main__":
    main()
