"""What Progress does for a real small CLIP on three sources, one of which is noise.

Question: at equal steps, is the held-out loss with `mixing=Progress(signal="eval")` at most that of fixed
equal weights?

Command: python -m benchmarks.mixing_clip

The sources: "photographs" (crops of 14 photographs with captions that describe them), "shapes" (drawn
squares and discs of six colours in nine places, with captions), "noise" (random images with captions that
say nothing); 12,000 samples each, of 32 pixels. A CLIP of two small towers trains for 1,600 steps of 64 rows,
read by a loader; its learning rate falls to 0 along a cosine. Held-out losses are those of 512 other samples
of each source, in batches of 64 of one source. With "progress" they are reported each 20 steps, and weights
change from step 200 on, at the earliest. Seeds are those of the data's order and of the model. Contenders run
in turn in one process.

"loss weights" and "loss weights by alignment" leave samples as they are: AlignmentBalanced decides on the
weights of sources in the loss, by the held-out losses or by cosines of the training's own rows.

What counts is the mean over all three sources after the last step, as that is what `Progress` assumes is to
fall; on noise nothing can be learned (chance is ln 64 = 4.16), so the mean over the other two is there, too.

Result: results/mixing_clip.json
"""

import io
import math
import statistics
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.nn import functional

import streamload
from benchmarks import turns
from benchmarks.turns import ROOT, Row

sys.path.insert(0, str(ROOT / "examples"))
from photograph_shards import picture
from small_clip import VOCABULARY, tokenize

SIDE, ROWS, STEPS, EVERY = 32, 64, 1_600, 20
SAMPLES, HELD_OUT, FIRST_HELD_OUT = 12_000, 512, 1_000_000
NAMES = ("photographs", "shapes", "noise")
_COLOURS = ("red", "green", "blue", "yellow", "white", "black")
_PLACES = [f"{row} {column}" for row in ("top", "middle", "bottom") for column in ("left", "centre", "right")]
Pairs = tuple[torch.Tensor, torch.Tensor]
POLICIES = {
    "fixed": None,
    "progress": streamload.mixing.Progress(signal="eval", every=EVERY),
    "loss weights": streamload.mixing.AlignmentBalanced(signal="eval", every=EVERY),
    "loss weights by alignment": streamload.mixing.AlignmentBalanced(every=EVERY),
}


class Clip(nn.Module):
    """A small convolutional tower, and the mean of the caption's word vectors."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, 32, 4, 4), nn.GELU(), nn.Conv2d(32, 64, 3, 2, 1), nn.GELU(),
            nn.Conv2d(64, width, 3, 2, 1), nn.GELU(), nn.Flatten(), nn.Linear(4 * width, width),
        )  # fmt: skip
        self.text = nn.EmbeddingBag(VOCABULARY, width, mode="mean", padding_idx=0)
        self.log_scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, images: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The contrastive loss of each row: float32[N]."""
        logits = functional.normalize(self.image(images)) @ functional.normalize(self.text(ids)).T
        self.cosines = logits.detach().diagonal()
        logits = self.log_scale.exp().clamp(max=100) * logits
        here = torch.arange(len(ids))
        return (
            functional.cross_entropy(logits, here, reduction="none")
            + functional.cross_entropy(logits.T, here, reduction="none")
        ) / 2


def samples_of(source: str, begin: int, stop: int) -> Iterator[tuple[Image.Image, str]]:
    for number in range(begin, stop):
        rng = np.random.default_rng([NAMES.index(source), number])
        if source == "photographs":
            one = picture(number)
            with Image.open(io.BytesIO(one.jpeg)) as image:
                image.draft("RGB", (2 * SIDE, 2 * SIDE))
                yield image.convert("RGB").resize((SIDE, SIDE)), one.caption
        elif source == "shapes":
            yield drawn(rng)
        else:
            pixels = rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
            yield Image.fromarray(pixels), " ".join(f"word{n}" for n in rng.integers(0, 500, 6))


def drawn(rng: np.random.Generator) -> tuple[Image.Image, str]:
    """A shape on a ground of another colour, and its caption."""
    colour, ground = (_COLOURS[int(place)] for place in rng.choice(6, 2, replace=False))
    place, square = int(rng.choice(9)), rng.random() < 0.5
    left, top = (10 * at + 1 + int(rng.integers(3)) for at in (place % 3, place // 3))
    image = Image.new("RGB", (SIDE, SIDE), ground)
    draw = ImageDraw.Draw(image)
    (draw.rectangle if square else draw.ellipse)([left, top, left + 8, top + 8], fill=colour)
    return image, f"a {colour} {'square' if square else 'disc'} on {ground}, {_PLACES[place]}"


def write_source(directory: Path, source: str, begin: int, stop: int) -> None:
    directory.mkdir(parents=True)
    with tarfile.open(directory / "00000.tar", "w") as tar:
        for number, (image, caption) in enumerate(samples_of(source, begin, stop)):
            encoded = io.BytesIO()
            image.save(encoded, "jpeg", quality=95)
            for extension, payload in (("jpg", encoded.getvalue()), ("txt", caption.encode())):
                member = tarfile.TarInfo(f"{number:06d}.{extension}")
                member.size = len(payload)
                tar.addfile(member, io.BytesIO(payload))


def as_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image.convert("RGB"), np.float32).transpose(2, 0, 1) / 127.5 - 1)


def held_out(directory: Path) -> list[Pairs]:
    with streamload.make_loader(
        str(directory), tokenize, preprocess=as_tensor, train=False, batch_size=ROWS, num_workers=0
    ) as loader:
        return [(images.clone(), ids.clone()) for images, ids in loader]


def run(where: Path, name: str, seed: int, steps: int) -> Row:
    policy = POLICIES[name]
    evaluated = {source: held_out(where / f"{source}-held-out") for source in NAMES}
    torch.manual_seed(seed)
    model = Clip()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2
    )

    def evaluate() -> dict[str, float]:
        with torch.no_grad():
            return {
                source: statistics.mean(float(model(*pairs).mean()) for pairs in batches)
                for source, batches in evaluated.items()
            }

    sources = [streamload.Source(str(where / source), name=source) for source in NAMES]
    course = []
    with (
        tempfile.TemporaryDirectory() as cache,
        streamload.make_loader(
            sources, tokenize, preprocess=as_tensor, batch_size=ROWS, num_workers=0, seed=seed,
            order=streamload.Order(num_batches=steps, mixing=policy), cache_dir=cache,
        ) as loader,
    ):  # fmt: skip
        for step, (images, ids) in enumerate(loader, 1):
            optimizer.zero_grad()
            (loader.info.weight * model(images, ids)).mean().backward()
            loader.report(alignment=model.cosines)
            optimizer.step()
            schedule.step()
            if step % EVERY == 0:
                found = evaluate()
                loader.report_eval(found)
                taken = loader.stats().source_samples
                course.append([step, *(round(found[s], 4) for s in NAMES), *(taken[s] for s in NAMES)])
    learnable = [found[source] for source in NAMES if source != "noise"]
    return {
        "label": name, "round": seed, "held_out_loss": statistics.mean(found.values()),
        "without_noise": statistics.mean(learnable), "losses": found, "samples": taken, "course": course,
    }  # fmt: skip


def main() -> None:
    given = turns.arguments(__doc__, rounds=3, names=list(POLICIES))
    torch.set_num_threads(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        where = Path(scratch)
        many, held = (ROWS, ROWS) if given.quick else (SAMPLES, HELD_OUT)
        for source in NAMES:
            write_source(where / source, source, 0, many)
            write_source(where / f"{source}-held-out", source, FIRST_HELD_OUT, FIRST_HELD_OUT + held)
        for seed in range(given.rounds):
            for name in turns.rotated(given.contenders, seed):
                rows.append(run(where, name, seed, 2 * EVERY if given.quick else STEPS))
                print(rows[-1]["label"], seed, rows[-1]["held_out_loss"], file=sys.stderr, flush=True)
    turns.write(given, "mixing_clip", content(given, rows))


def content(given: Any, rows: list[Row]) -> Row:
    by = {(row["label"], row["round"]): row for row in rows}
    pairs = [
        (by["progress", seed], by["fixed", seed])
        for seed in range(given.rounds)
        if {("progress", seed), ("fixed", seed)} <= by.keys()
    ]
    ratios = {
        measure: [ours[measure] / fixed[measure] for ours, fixed in pairs]
        for measure in ("held_out_loss", "without_noise")
    }
    return {
        "settings": {
            "steps": STEPS, "rows": ROWS, "every": EVERY, "samples of a source": SAMPLES,
            "held out of a source": HELD_OUT,
        },
        "seeds": list(range(given.rounds)),
        "rounds": rows,
        "medians": {
            name: {
                measure: statistics.median(row[measure] for row in rows if row["label"] == name)
                for measure in ratios
            }
            for name in dict.fromkeys(row["label"] for row in rows)
        },
        "ratios": {f"{measure}, progress ÷ fixed, by seed": each for measure, each in ratios.items()},
        "targets": [
            turns.target(
                "progress, a small CLIP, all three sources: held-out loss × fixed weights, worst seed",
                max(ratios["held_out_loss"], default=None),
                at_most=1.0,
            ),
            turns.target(
                "progress, a small CLIP, without noise: held-out loss × fixed weights, worst seed",
                max(ratios["without_noise"], default=None),
                at_most=1.0,
            ),
        ],
    }  # fmt: skip


if __name__ == "__main__":
    main()
