"""The metrics server of a node: /metrics (for Prometheus) and /runs (JSON) of its runs, for one machine.

It reads the pages that the ranks publish, so it needs nothing of them, and a killed one is gone at the next
request. `streamload metrics serve` runs it, or a training by itself (`STREAMLOAD_METRICS`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from streamload.observe.exposition import CONTENT_TYPE, exposition
from streamload.observe.page import as_dict, read_runs
from streamload.observe.page_server import Page, PageServer
from streamload.options import DEFAULT_METRICS_LISTEN


class MetricsServer(PageServer):
    """Serves the metrics of a node's runs; a context manager.

    Args:
        roots: of the node's tiers.
        listen: address and port; port 0: any.

    Raises:
        OptionError: `listen` isn't an address and port, or is in use.
    """

    def __init__(self, roots: Sequence[Path], listen: str = DEFAULT_METRICS_LISTEN):
        def metrics() -> Page:
            return Page(exposition(read_runs(roots)), CONTENT_TYPE)

        def runs() -> Page:
            return Page(json.dumps([as_dict(page) for page in read_runs(roots)]), "application/json")

        super().__init__({"/metrics": metrics, "/runs": runs, "/healthz": lambda: Page("ok\n")}, listen)
