"""The demo's training: two epochs over one loader, and what was seen on the way."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from streamload.cli.demo.model import SmallClip, tokenize
from streamload.loader import Loader, make_loader
from streamload.metrics import Snapshot, format_bytes

EPOCHS = 2
_LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Moment:
    """What was so `seconds` after the first iter()."""

    seconds: float
    epoch: int
    origin_bytes: int
    samples: int
    tier_hits: int
    loss: float


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch: its length, what it trained on and fetched, and its share of waiting for data."""

    seconds: float
    samples: int
    origin_bytes: int
    origin_requests: int
    tier_hits: int
    data_wait_share: float
    loss: float

    @property
    def samples_per_second(self) -> float:
        """Trained samples by time."""
        return self.samples / self.seconds


@dataclass(slots=True)
class Figures:
    """All that the demo shows.

    Attributes:
        seconds_to_first_batch: from the first iter(), the start of the workers included.
        seconds_of_download: until the last byte of the shards had arrived.
    """

    total_bytes: int
    batch_size: int
    workers: int
    seconds_to_first_batch: float = math.nan
    seconds_of_download: float = math.nan
    epochs: list[Epoch] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)


def train(
    urls: list[str], total_bytes: int, cache_dir: Path, batch_size: int, workers: int, console: Console
) -> Figures:
    """Train two epochs on the shards at `urls`, with a line of progress."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the other cores are the workers'; threads that wait for a busy core only spin
    model = SmallClip()
    optimizer = torch.optim.AdamW(model.parameters(), _LEARNING_RATE)
    figures = Figures(total_bytes, batch_size, workers)
    columns = (
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(),
        TextColumn("{task.completed:,} samples, loss {task.fields[loss]:.2f}, {task.description}"),
        TimeElapsedColumn(),
    )
    loader = make_loader(urls, tokenize, batch_size=batch_size, num_workers=workers, cache_dir=cache_dir)
    with loader, Progress(*columns, console=console) as progress:
        for number in range(EPOCHS):
            _train_epoch(number, loader, model, optimizer, figures, progress)
    return figures


def _train_epoch(
    number: int,
    loader: Loader,
    model: SmallClip,
    optimizer: torch.optim.Optimizer,
    figures: Figures,
    progress: Progress,
) -> None:
    before = loader.stats()
    line = progress.add_task(
        "waiting for the first batch", total=loader.num_samples, epoch=number + 1, loss=math.nan
    )
    seen = figures.moments[-1] if figures.moments else Moment(0.0, 0, 0, 0, 0, math.nan)
    losses: list[float] = []
    loader.set_epoch(number)
    began = time.perf_counter()
    for images, texts in loader:
        loss = model(images, texts)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        now = loader.stats()
        moment = _moment(number, seen.seconds + time.perf_counter() - began, now, losses[-1])
        figures.moments.append(moment)
        if math.isnan(figures.seconds_of_download) and now.origin_bytes >= figures.total_bytes:
            figures.seconds_of_download = moment.seconds
        arrived = f"{format_bytes(now.origin_bytes)} of {format_bytes(figures.total_bytes)} arrived"
        progress.update(line, advance=len(images), loss=losses[-1], description=arrived)
    seconds = time.perf_counter() - began
    progress.stop_task(line)
    after = loader.stats()
    figures.seconds_to_first_batch = after.seconds_to_first_batch or math.nan
    figures.epochs.append(_epoch(seconds, after.since(before), losses))


def _moment(number: int, seconds: float, now: Snapshot, loss: float) -> Moment:
    return Moment(seconds, number, now.origin_bytes, now.samples_yielded, now.tier_hits, loss)


def _epoch(seconds: float, during: Snapshot, losses: list[float]) -> Epoch:
    last = losses[-10:]
    return Epoch(
        seconds=seconds,
        samples=during.samples_yielded,
        origin_bytes=during.origin_bytes,
        origin_requests=during.origin_requests,
        tier_hits=during.tier_hits,
        data_wait_share=during.data_wait_seconds / seconds,
        loss=sum(last) / len(last),
    )
