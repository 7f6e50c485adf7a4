"""`streamload metrics serve`: the node's runs for Prometheus, from a process of its own."""

import signal
from typing import Annotated

import typer

from streamload.cli.logs import logger
from streamload.cli.options import CacheDirs, roots_of

metrics = typer.Typer(
    help="Export the metrics of this node's runs.", no_args_is_help=True, rich_markup_mode=None
)


@metrics.callback()
def _group() -> None:
    """Keeps `serve` a subcommand."""


@metrics.command()
def serve(
    listen: Annotated[
        str, typer.Option(help="The address and port of /metrics (Prometheus) and /runs (JSON).")
    ] = "127.0.0.1:9434",
    cache_dirs: CacheDirs = None,
) -> None:
    """Serve the metrics of this node's runs until SIGTERM or Ctrl-C.

    The runs are found by their caches, started before or after this. A killed rank is gone at the next
    request. A daemon's /metrics has them, too.
    """
    from streamload.observe.metrics_server import MetricsServer

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with MetricsServer(roots_of(cache_dirs), listen) as server:
            logger.info("/metrics and /runs are at %s", server.url)
            signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
