"""`streamload cache`: look at a tier, check it, clean it up; safe while trainings run. One command a file."""

import typer

from streamload.cli.cache.clear import clear
from streamload.cli.cache.gc import gc
from streamload.cli.cache.ls import list_shards
from streamload.cli.cache.stat import stat
from streamload.cli.cache.verify import verify

_HELP = "Look at what the cache holds, check it, clean it up; safe while trainings run."

cache = typer.Typer(help=_HELP, no_args_is_help=True, rich_markup_mode=None)
cache.command("ls")(list_shards)
for command in (stat, verify, gc, clear):
    cache.command()(command)
