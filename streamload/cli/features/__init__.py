"""`streamload features`: make, check, carry, explain and export rows; safe while trainings run."""

import typer

from streamload.cli.features.carry import carry
from streamload.cli.features.export import export
from streamload.cli.features.make import check, make
from streamload.cli.features.show import show, why

features = typer.Typer(
    help="Make, check, carry, explain and export the features of frozen modules; safe while trainings run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for command in (make, check, carry, show, why, export):
    features.command()(command)
