"""The `streamload` command: one file per command, which imports its dependencies when it runs.

`streamload --help` imports only typer. A StreamloadError or OSError becomes one line on stderr and exit
code 2.
"""

import atexit
import gc
import json
import sys
from typing import Annotated

import typer

from streamload.cli.bench import bench
from streamload.cli.cache import cache
from streamload.cli.daemon import daemon
from streamload.cli.doctor import doctor
from streamload.cli.features import features
from streamload.cli.logs import LogFormat, LogLevel, flags_first, log_to_stderr, report_failure, stop_logging
from streamload.cli.metrics import metrics
from streamload.cli.mixing import mixing
from streamload.cli.options import AsJson
from streamload.cli.pack import pack
from streamload.cli.report import report
from streamload.cli.runs import runs
from streamload.cli.runs.replay import replay
from streamload.cli.terminal import printable_stdout
from streamload.cli.top import top
from streamload.cli.warm import warm
from streamload.errors import StreamloadError, printable

app = typer.Typer(
    help="Train image-text models on WebDataset tar shards while they are still arriving.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: half the time to start
)


_SERVERS = ("daemon", "metrics")
_COLLECTOR = (200_000, 20, 100)
"""Garbage is collected less often: imports and the models of botocore make many objects, and all stay."""


def version(as_json: AsJson = False) -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    number = installed("streamload")
    print(json.dumps({"version": number}) if as_json else number)


def _print_version(is_given: bool) -> None:
    if is_given:
        version()
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    _: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version),
    ] = False,
    log_format: Annotated[
        LogFormat,
        typer.Option(help="Of the logs, which go to stderr: text, or a JSON object a line. For any command."),
    ] = LogFormat.text,
    log_level: Annotated[
        LogLevel | None,
        typer.Option(
            help="The least that is logged. None: info for daemon and metrics, warning for other commands.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Options before the command; those of logs may stand after it, too."""
    usual = LogLevel.info if context.invoked_subcommand in _SERVERS else LogLevel.warning
    log_to_stderr(log_format, log_level or usual)


for command in (bench, daemon, doctor, pack, replay, report, top, version, warm):
    app.command()(command)
app.add_typer(cache, name="cache")
app.add_typer(features, name="features")
app.add_typer(metrics, name="metrics")
app.add_typer(mixing, name="mixing")
app.add_typer(runs, name="runs")


def main() -> None:
    """Run the command line."""
    gc.set_threshold(*_COLLECTOR)
    atexit.register(gc.freeze)  # or the interpreter looks for garbage several times while it ends
    try:
        with printable_stdout():
            app(flags_first(sys.argv[1:]))
    except (StreamloadError, OSError) as exc:
        report_failure(printable(" ".join(str(exc).split())))
        sys.exit(2)
    finally:
        stop_logging()
