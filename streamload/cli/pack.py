"""`streamload pack`: make shards of tables, folders and data sets. Images are copied byte for byte."""

import json
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from streamload.cli.logs import progress
from streamload.cli.options import AsJson, StorageOptions, storage_options_of
from streamload.errors import OptionError


def pack(
    source: Annotated[
        str,
        typer.Argument(
            help="A .parquet, .csv, .tsv, .jsonl or .json file, hf://…, or a folder: of Parquet files, "
            "saved by `datasets`, of images with a .txt beside each, of a folder of images a label, of tars."
        ),
    ],
    target: Annotated[Path, typer.Argument(help="The folder for the shards and sizes.json.")],
    samples_per_shard: Annotated[int, typer.Option(min=1, help="Maximum samples per shard.")] = 10_000,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes, which don't change the shards. None: one per processor, at most 8."
        ),
    ] = None,
    image_column: Annotated[
        str,
        typer.Option(
            help="The column of a table with the image: a path, bytes, a struct of both, or a list."
        ),
    ] = "image",
    caption_column: Annotated[
        str, typer.Option(help="The column of a table with the caption, or a list of captions.")
    ] = "caption",
    label_column: Annotated[
        str | None,
        typer.Option(help='The column of a table with a number. None: "label", if there is no caption.'),
    ] = None,
    key_column: Annotated[
        str | None,
        typer.Option(
            help="The column of a table with the sample's key. None: the image's path, or the row's number."
        ),
    ] = None,
    image_folder: Annotated[
        Path | None, typer.Option(help="The folder of the paths in a table. None: that of the table.")
    ] = None,
    prefix: Annotated[str, typer.Option(help="Prefix of the shards' names.")] = "",
    no_quotes: Annotated[
        bool, typer.Option("--no-quotes", help="Treat quotes in a .csv or .tsv as ordinary characters.")
    ] = False,
    shuffle: Annotated[
        bool, typer.Option(help="Pack in random order (the same each time), or in the source's order.")
    ] = True,
    keep_columns: Annotated[
        str,
        typer.Option(help='Columns to store as a .json beside each image: "width,source", or "*".'),
    ] = "",
    storage_options: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Pack images with captions, labels or conversations into shards.

    Samples are shuffled, as a training mixes samples of one shard less well than those of different shards.

    Also writes a sizes.json with the number of samples per shard, and a classes.json with the labels' names
    if these are known. A shard appears once it is whole; after a kill the same command continues.
    """
    from streamload.limits import own_processors
    from streamload.pack.making import plan, write_shards
    from streamload.pack.rows import PackColumns
    from streamload.pack.sources import REMOTE, list_source

    if REMOTE.match(str(target)):
        raise OptionError(
            f"{target} is not a local folder: pack into one, and copy it (aws s3 cp --recursive, …)"
        )
    if "/" in prefix or prefix.startswith("."):
        raise OptionError(f"--prefix {prefix!r}: expected the beginning of a file's name, not hidden")
    kept = tuple(keep_columns.split(",")) if keep_columns else ()
    columns = PackColumns(image_column, caption_column, label_column, key_column, kept, image_folder)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the processes of --jobs, too
    try:
        listing = list_source(source, columns, no_quotes, storage_options_of(storage_options))
        shards = plan(listing, target, samples_per_shard, prefix, shuffle)
        with progress("samples packed") as show:
            show(total=sum(shard.total for shard in shards))
            count = min(8, own_processors()) if jobs is None else jobs
            sizes, left_out = write_shards(listing, shards, target, count, lambda done: show(advance=done))
    finally:
        signal.signal(signal.SIGTERM, before)
    if as_json:
        print(json.dumps({"target": str(target), "shards": sizes, "left_out": left_out}))
        return
    print(f"{sum(sizes.values()):,} samples in {len(sizes):,} shards: {target / next(iter(sizes))} …")
    for why, samples in left_out.items():
        print(f"left out: {samples:,} {why}")
