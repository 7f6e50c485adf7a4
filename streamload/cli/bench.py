"""`streamload bench`: how fast this machine loads your shards, and what limits it."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streamload.cli.logs import progress_console
from streamload.cli.options import StorageOptions, Urls, storage_options_of
from streamload.cli.terminal import format_bytes, print_table, say
from streamload.errors import OptionError

if TYPE_CHECKING:
    from streamload.profile.run import Report

_FLOOR = "floor, float32"


def bench(
    urls: Urls,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Worker processes; default: one per core.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="How often each measurement runs.")] = 3,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Samples per round; default: 1,000 per worker.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenize with this open_clip model's tokenizer: ViT-B-32.")
    ] = None,
    step_seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Duration of your training step, to compare with.")
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Also write the whole report to a file; '-': print it, and nothing else.",
        ),
    ] = None,
    cache_dir: Annotated[
        str | None, typer.Option(help="The cache whose disk is measured; nothing stays in it.")
    ] = None,
    storage_options: StorageOptions = None,
) -> None:
    """Measure what limits a training on these shards.

    Measures in turn, each in its own process: the download, the disk, decoding alone, bare processes that do
    the minimum work (the floor), and the loader. The first shards, as many as have enough samples, are
    downloaded into a temporary directory beside the cache, and again in each round.
    """
    from streamload.profile.measures import ProfileOptions
    from streamload.profile.run import profile

    options = ProfileOptions(
        workers=workers or len(os.sched_getaffinity(0)),
        batch_size=batch_size,
        rounds=rounds,
        samples=samples,
        tokenizer=tokenizer,
        step_seconds=step_seconds,
        cache_dir=cache_dir,
        storage_options=storage_options_of(storage_options),
    )
    is_printed = json_file == Path("-")
    if json_file is not None and not json_file.parent.is_dir():
        raise OptionError(f"--json={json_file}: there is no folder {json_file.parent}")
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit removes the temporary files
    try:
        with progress_console().status("starting") as status:
            report = profile(urls, options, on_step=status.update)
    finally:
        signal.signal(signal.SIGTERM, before)
    text = json.dumps(report.as_dict(), indent=1)
    if is_printed:
        print(text)
        return
    if json_file is not None:
        json_file.write_text(f"{text}\n")
    _print(report)


def _print(report: "Report") -> None:
    """Print the table, what was left out, and the verdict."""
    data, settings = report.data, report.settings
    say(
        f"{len(data['shards']):,} shards, {format_bytes(data['bytes'])}, {data['usable']:,} of "
        f"{data['samples']:,} samples usable, mean image size {data['mean_width']}×{data['mean_height']}; "
        f"{settings['workers']} workers, batches of {settings['batch_size']}, "
        f"{settings['samples']:,} samples\n"
    )
    titles = ("", ">images/s", ">min–max", ">× floor", ">CPU µs per image", ">MB/s")
    print_table(titles, _cells_of(report))
    left_out = [f"not measured: {name}: {why}" for name, why in report.left_out.items()]
    for line in (*left_out, "", *report.verdict.lines):
        say(line)


def _cells_of(report: "Report") -> list[tuple[str, ...]]:
    """The rows of the table: medians, and the range over the rounds."""
    floor = report.medians[_FLOOR]["images_per_second"]
    cells: list[tuple[str, ...]] = []
    for name, row in report.medians.items():
        rates = [row["images_per_second"] for row in report.rounds if row["label"] == name]
        cells.append(
            (
                name,
                f"{row['images_per_second']:,.0f}",
                f"{min(rates):,.0f}–{max(rates):,.0f}",
                f"{row['images_per_second'] / floor:.2f}" if "images" in row else "",
                f"{row['cpu_us_per_image']:,.0f}" if "cpu_us_per_image" in row else "",
                f"{row['bytes_per_second'] / 1e6:,.0f}" if "bytes_per_second" in row else "",
            )
        )
    return cells
