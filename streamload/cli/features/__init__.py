"""`streamload features`: list, verify, export and delete rows of `cache_module`; safe while trainings run."""

import typer

from streamload.cli.features.export import export
from streamload.cli.features.ls import list_fingerprints
from streamload.cli.features.remove import clear, gc
from streamload.cli.features.show import show, why
from streamload.cli.features.verify import verify

features = typer.Typer(
    help="List, verify, export and delete the rows of cache_module; safe while trainings run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
features.command("ls")(list_fingerprints)
for command in (show, why, verify, gc, clear, export):
    features.command()(command)
