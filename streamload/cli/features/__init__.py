"""`streamload features`: make, check, list, verify, export and delete rows; safe while trainings run."""

import typer

from streamload.cli.features.export import export
from streamload.cli.features.make import check, make
from streamload.cli.features.show import show, why
from streamload.cli.features.upkeep import clear, gc, ls, verify

features = typer.Typer(
    help="Make, check, list, export and delete the features of frozen modules; safe while trainings run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for command in (ls, make, check, show, why, verify, gc, clear, export):
    features.command()(command)
