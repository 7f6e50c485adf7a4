"""`streamload demo`: watch a small CLIP train on shards while they arrive, then again from the cache."""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer


def demo(
    directory: Annotated[
        Path | None,
        typer.Option(help="Where the shards are, or are written and stay. Default: a temporary one."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the picture and the figures go.")] = Path("demo-out"),
    samples: Annotated[int, typer.Option(min=128, help="Photographs to train on.")] = 2048,
    samples_per_shard: Annotated[int, typer.Option(min=1)] = 256,
    link: Annotated[str, typer.Option(help="What the server sends in a second, in all.")] = "5MB",
    batch_size: Annotated[int, typer.Option(min=2)] = 32,
    workers: Annotated[int, typer.Option(min=0)] = 2,
) -> None:
    """Train a small CLIP while its shards arrive.

    Shards of real photographs are served over HTTP by this machine at the speed of --link. The first epoch
    trains while they arrive, the second from the cache on disk; then a table and a picture show where the
    time went.
    """
    from rich.console import Console

    from streamload.cli.demo.picture import draw, print_table, write_figures
    from streamload.cli.demo.run import train
    from streamload.options import parse_size
    from streamload.testing.photographs import write_photograph_shards
    from streamload.testing.server import SpawnedServer

    console, bytes_per_second = Console(), parse_size(link, "--link")
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streamload-demo-")))
        shards = directory or scratch / "shards"
        if not (shards / "sizes.json").is_file():
            console.print(f"making shards of {samples:,} photographs", highlight=False)
            write_photograph_shards(shards, samples, samples_per_shard)
        server = stack.enter_context(SpawnedServer(shards, bytes_per_second=bytes_per_second))
        urls = [f"{server.url}/{path.name}" for path in sorted(shards.glob("*.tar"))]
        total_bytes = sum(path.stat().st_size for path in shards.glob("*.tar"))
        figures = train(urls, total_bytes, scratch / "cache", batch_size, workers, console)
    print_table(figures, console)
    out.mkdir(parents=True, exist_ok=True)
    draw(figures, out / "demo.png")
    write_figures(figures, out / "demo.json")
    console.print(f"picture: {out / 'demo.png'}\nfigures: {out / 'demo.json'}", highlight=False)
