"""`streamload runs` and `streamload replay`: what a run with a journal did, and any of its batches again."""

import typer

from streamload.cli.runs.show import ls, show
from streamload.cli.runs.spikes import spikes
from streamload.cli.runs.used import used

runs = typer.Typer(
    help="Runs that kept a journal (Order(journal=folder)): what they did, their spikes, what they used.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for command in (ls, show, spikes, used):
    runs.command()(command)
