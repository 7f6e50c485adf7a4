"""The `streamload` command: one file per command, which imports its dependencies when it runs.

`streamload --help` imports only typer. A StreamloadError or OSError becomes one line on stderr and exit
code 2.
"""

import sys
from typing import Annotated

import typer

from streamload.cli.bench import bench
from streamload.cli.cache import cache
from streamload.cli.daemon import daemon
from streamload.cli.doctor import doctor
from streamload.cli.features import features
from streamload.cli.pack import pack
from streamload.cli.warm import warm
from streamload.errors import StreamloadError

app = typer.Typer(
    help="Train image-text models on WebDataset tar shards while they are still arriving.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: half the time to start
)


def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    print(installed("streamload"))


def _print_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Options before the command."""


for command in (bench, daemon, doctor, pack, version, warm):
    app.command()(command)
app.add_typer(cache, name="cache")
app.add_typer(features, name="features")


def main() -> None:
    """Run the command line."""
    try:
        app()
    except (StreamloadError, OSError) as exc:
        print(f"streamload: {' '.join(str(exc).split())}", file=sys.stderr)
        sys.exit(2)
