"""The board of docker/grafana: every expression finds series of a run that Prometheus itself has scraped."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml

import streamload
from streamload.daemon.status import Status
from streamload.daemon.status_server import StatusServer
from streamload.observe.metrics_server import MetricsServer
from streamload.testing.server import ShardServer
from streamload.testing.shards import write_shards
from tests.support.tiers import until

ROOT = Path(__file__).parents[2] / "docker"
BOARD = json.loads((ROOT / "grafana" / "streamload.json").read_text())
EMPTY = {"streamload_origin_outages_total"}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    found += [annotation["expr"] for annotation in BOARD["annotations"]["list"]]
    return found


def test_panels_lie_side_by_side_and_each_says_what_it_shows() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    assert all(panel["description"] for panel in panels())


@contextlib.contextmanager
def prometheus(folder: Path, targets: list[str]) -> Iterator[str]:
    """A Prometheus with the rules of docker/, which scrapes the targets twice a second."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    config = yaml.safe_load((ROOT / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    config["rule_files"] = [str(ROOT / "alerts.yml")]
    config["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
    config.pop("alerting")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address={listen}", "--log.level=error"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield f"http://{listen}"
        finally:
            process.terminate()
            process.communicate()


def query(pools: urllib3.PoolManager, url: str, expression: str) -> list[Any]:
    """The series of an expression now; [] while Prometheus starts.

    Raises:
        AssertionError: it is none.
    """
    try:
        answer = pools.request(
            "POST", f"{url}/api/v1/query", fields={"query": expression}, encode_multipart=False
        )
    except urllib3.exceptions.HTTPError:
        return []
    content = json.loads(answer.data) if answer.status in (200, 400, 422) else {}
    assert content.get("status", "success") == "success", f"{expression}: {content}"
    found: list[Any] = content.get("data", {}).get("result", [])
    return found


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus isn't installed")
def test_every_expression_finds_series_of_a_real_run_that_prometheus_has_scraped(tmp_path: Path) -> None:
    for name in ("photos", "drawings"):
        write_shards(tmp_path / name, [32] * 4, seed=3)
    over = threading.Event()
    with (
        ShardServer(tmp_path) as origin,
        MetricsServer([tmp_path / "cache"], "127.0.0.1:0") as runs,
        StatusServer(lambda: Status(wanted=4, held=2), "127.0.0.1:0") as daemon,
        prometheus(tmp_path, [server.url.removeprefix("http://") for server in (runs, daemon)]) as url,
        urllib3.PoolManager(retries=False, timeout=10.0) as pools,
    ):
        trained = threading.Thread(target=train, args=(origin.url, tmp_path / "cache", over))
        trained.start()
        try:
            missing = [adapted(expression) for expression in expressions() if "ALERTS" not in expression]

            def is_complete() -> bool:
                missing[:] = [one for one in missing if not query(pools, url, one)]
                return not missing or not trained.is_alive()

            until(is_complete)
        finally:
            over.set()
            trained.join()
        assert missing == []
        assert query(pools, url, 'ALERTS{alertname=~"Streamload.*",alertstate="firing"}') == []


def adapted(expression: str) -> str:
    """An expression with what Grafana puts into it."""
    return expression.replace("$__rate_interval", "5s").replace("$run", ".*")


def train(origin: str, cache: Path, over: threading.Event) -> None:
    """A training on two sources, until `over`."""
    sources = [
        streamload.Source(f"{origin}/{name}/{{00000..00003}}.tar", weight=weight, name=name)
        for name, weight in (("photos", 3.0), ("drawings", 1.0))
    ]
    with streamload.make_loader(
        sources,
        batch_size=4,
        num_workers=1,
        order=streamload.Order(num_batches=50),
        cache_dir=cache,
        cache_size="1GB",
    ) as loader:
        while not over.is_set():
            for _ in loader:
                if over.wait(0.05):
                    break


def test_the_board_asks_for_metrics_that_are_exported() -> None:
    from streamload.daemon.status_server import metrics_text
    from streamload.observe.exposition import exposition
    from tests.observe.test_exposition import full_page

    text = exposition([full_page()]) + metrics_text(Status())
    exported = set(re.findall(r"^(streamload_\w+)", text, re.M))
    for expression in expressions():
        assert set(re.findall(r"\bstreamload_\w+", expression)) <= exported, expression
