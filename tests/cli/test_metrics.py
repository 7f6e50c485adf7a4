"""`streamload metrics serve`, and a daemon beside runs: what Prometheus gets of a node's live runs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamload.cache.tier import Tier
from streamload.daemon.status import Status
from streamload.daemon.status_server import StatusServer
from streamload.errors import OptionError
from streamload.observe.metrics_server import MetricsServer
from streamload.observe.page import PageFile, now
from tests.observe.test_exposition import full_page, series
from tests.support import promtool
from tests.support.pages import get
from tests.support.tiers import until


def publish(root: Path, rank: int, ready: Any) -> None:
    file = PageFile(root)
    moment = now()
    file.write(full_page(rank=rank, pid=os.getpid(), began=moment, written=moment))
    ready.set()
    signal.pause()


@contextlib.contextmanager
def ranks(root: Path, count: int) -> Iterator[list[Any]]:
    """Processes that have published a page, and live."""
    context = multiprocessing.get_context("fork")
    found = []
    try:
        for rank in range(count):
            ready = context.Event()
            found.append(context.Process(target=publish, args=(root, rank, ready)))
            found[-1].start()
            assert ready.wait(60)
        yield found
    finally:
        for process in found:
            process.kill()
            process.join()


def scraped(url: str) -> dict[tuple[str, str], float]:
    status, text = get(f"{url}/metrics")
    assert status == 200
    return series(text)


def ranks_of(found: dict[tuple[str, str], float]) -> set[str]:
    return {re.search(r'rank="(\d+)"', labels)[1] for _, labels in found if "rank=" in labels}  # type: ignore[index]


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return Tier(tmp_path / "tier", 1 << 30)


def test_the_series_of_a_killed_rank_are_gone_at_the_next_scrape_and_those_of_a_stopped_one_grow_old(
    tier: Tier,
) -> None:
    with ranks(tier.root, 2) as (first, second), MetricsServer([tier.root], "127.0.0.1:0") as server:
        assert ranks_of(scraped(server.url)) == {"0", "1"}
        assert [page["rank"] for page in json.loads(get(f"{server.url}/runs")[1])] == [0, 1]
        first.kill()
        first.join()
        assert ranks_of(scraped(server.url)) == {"1"}
        os.kill(second.pid, signal.SIGSTOP)
        name = "streamload_page_age_seconds", 'run="a1",rank="1"'
        age = scraped(server.url)[name]
        until(lambda: scraped(server.url)[name] > age)
        os.kill(second.pid, signal.SIGCONT)


def test_a_daemon_exports_the_runs_of_its_node_beside_itself(tier: Tier) -> None:
    with ranks(tier.root, 1), StatusServer(Status, "127.0.0.1:0", [tier.root]) as server:
        status, text = get(f"{server.url}/metrics")
    assert status == 200
    found = series(text)
    assert found["streamload_daemon_shards_wanted", None] == 0  # type: ignore[index]
    assert ranks_of({key: value for key, value in found.items() if key[1]}) == {"0"}


@promtool.needs_promtool
def test_prometheus_reads_what_a_daemon_with_runs_exports(tier: Tier) -> None:
    with ranks(tier.root, 1), StatusServer(Status, "127.0.0.1:0", [tier.root]) as server:
        assert promtool.complaints(get(f"{server.url}/metrics")[1]) == ""


def test_serve_finds_runs_of_a_cache_and_ends_with_sigterm(tier: Tier) -> None:
    command = [sys.executable, "-m", "streamload", "metrics", "serve", "--listen", "127.0.0.1:0"]
    command += ["--cache-dir", str(tier.root), "--log-format", "json"]
    with (
        ranks(tier.root, 1),
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process,
    ):
        try:
            line = json.loads(process.stderr.readline())  # type: ignore[union-attr]
            (url,) = re.findall(r"http://\S+", line["message"])
            assert ranks_of(scraped(url)) == {"0"}
            assert get(f"{url}/healthz") == (200, "ok\n")
            assert get(f"{url}/other")[0] == 404
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_port_that_is_taken_is_said_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "streamload", "metrics", "serve", "--listen", listen]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith(f"streamload: can't listen on {listen}")
        assert done.stderr.count("\n") == 1
        with pytest.raises(OptionError, match="can't listen"):
            MetricsServer([], listen)


def test_a_page_without_a_process_and_a_root_without_a_tier_have_no_series(
    tier: Tier, tmp_path: Path
) -> None:
    file = PageFile(tier.root)
    file.write(dataclasses.replace(full_page(), pid=os.getpid()))
    content = file.path.read_bytes()
    file.close()
    (tier.root / "runs" / "17.0123abcd.metrics").write_bytes(content)
    with MetricsServer([tier.root, tmp_path / "none"], "127.0.0.1:0") as server:
        assert get(f"{server.url}/metrics") == (200, "")
