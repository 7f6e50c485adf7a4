"""`streamload cache`: inspect, verify and clean up a tier; safe while trainings run."""

import typer

from streamload.cli.cache.ls import list_shards
from streamload.cli.cache.remove import clear, gc
from streamload.cli.cache.stat import stat
from streamload.cli.cache.verify import verify

cache = typer.Typer(
    help="Inspect, verify and clean up the cache; safe while trainings run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
cache.command("ls")(list_shards)
for command in (stat, verify, gc, clear):
    cache.command()(command)
