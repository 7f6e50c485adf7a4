"""Watch a small CLIP train on shards while they arrive, then again from the cache: `make demo`.

    python examples/demo.py --link 5MB

This machine serves shards of real photographs to itself over HTTP at the speed of --link. The first epoch
trains while they arrive, the second from the cache on disk; a table and a picture show where the time went.
Needs `pip install 'streamload[demo]'`.
"""

import argparse
import math
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from demo_report import Epoch, Figures, Moment, draw, print_table, write_figures
from photograph_shards import write_photograph_shards
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from small_clip import SmallClip, tokenize

from streamload import Loader, StreamloadError, make_loader
from streamload.metrics import Snapshot, format_bytes
from streamload.options import parse_size
from streamload.testing.server import ShardServer

EPOCHS = 2
_LEARNING_RATE = 1e-3


def main() -> None:
    args = arguments()
    console = Console()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streamload-demo-")))
        shards = args.directory or scratch / "shards"
        if not (shards / "sizes.json").is_file():
            console.print(f"making shards of {args.samples:,} photographs", highlight=False)
            write_photograph_shards(shards, args.samples, args.samples_per_shard)
        server = stack.enter_context(ShardServer.spawn(shards, bytes_per_second=args.link))
        urls = [f"{server.url}/{path.name}" for path in sorted(shards.glob("*.tar"))]
        total_bytes = sum(path.stat().st_size for path in shards.glob("*.tar"))
        figures = Figures(total_bytes, args.batch_size, args.workers)
        train(urls, scratch / "cache", figures, console)
    print_table(figures, console)
    args.out.mkdir(parents=True, exist_ok=True)
    draw(figures, args.out / "demo.png")
    write_figures(figures, args.out / "demo.json")
    console.print(f"picture: {args.out / 'demo.png'}\nfigures: {args.out / 'demo.json'}", highlight=False)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, help="where the shards are, or are written and stay")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="for the picture and the figures")
    parser.add_argument("--samples", type=int, default=2048, help="photographs to train on")
    parser.add_argument("--samples-per-shard", type=int, default=256)
    parser.add_argument("--link", default="5MB", help="bytes per second of the server, over all connections")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    args.link = parse_size(args.link, "--link")
    return args


def train(urls: list[str], cache_dir: Path, figures: Figures, console: Console) -> None:
    """Train two epochs with a progress bar; what happened goes into `figures`."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the other cores are for the workers
    columns = (
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(),
        TextColumn("{task.completed:,} samples, loss {task.fields[loss]:.2f}, {task.description}"),
        TimeElapsedColumn(),
    )
    loader = make_loader(
        urls,
        tokenize,
        batch_size=figures.batch_size,
        num_workers=figures.workers,
        device="auto",
        cache_dir=cache_dir,
    )
    model = SmallClip().to(loader.device)
    optimizer = torch.optim.AdamW(model.parameters(), _LEARNING_RATE)
    with loader, Progress(*columns, console=console) as progress:
        for number in range(EPOCHS):
            train_epoch(number, loader, model, optimizer, figures, progress)


def train_epoch(
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
    seen = figures.moments[-1].seconds if figures.moments else 0.0
    losses: list[float] = []
    loader.set_epoch(number)
    began = time.perf_counter()
    for images, texts in loader:
        loss = model(images, texts)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        now, seconds = loader.stats(), seen + time.perf_counter() - began
        figures.moments.append(
            Moment(seconds, number, now.origin_bytes, now.samples_yielded, now.tier_hits, losses[-1])
        )
        if math.isnan(figures.seconds_of_download) and now.origin_bytes >= figures.total_bytes:
            figures.seconds_of_download = seconds
        arrived = f"{format_bytes(now.origin_bytes)} of {format_bytes(figures.total_bytes)} arrived"
        progress.update(line, advance=len(images), loss=losses[-1], description=arrived)
    seconds = time.perf_counter() - began
    progress.stop_task(line)
    after = loader.stats()
    figures.seconds_to_first_batch = after.seconds_to_first_batch or math.nan
    figures.epochs.append(summed_up(seconds, after.since(before), losses))


def summed_up(seconds: float, during: Snapshot, losses: list[float]) -> Epoch:
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


if __name__ == "__main__":
    try:
        main()
    except StreamloadError as exc:
        sys.exit(f"demo: {exc}")
    except KeyboardInterrupt:
        sys.exit(130)
