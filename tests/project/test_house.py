"""How many modules a batch of a loader without options runs: unused features have no part in it."""

import json
import subprocess
import sys

import pytest

from streamload.testing.server import ShardServer
from streamload.testing.shards import write_shards

MOST = {"warm": 60, "cold": 123}
"""Modules that such a batch runs. They may only fall: lower them with the count."""
SLACK = 3
"""How far a count may be below: what runs in a batch depends on when bytes arrive."""


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    write_shards(folder / "shards", [60, 60, 60])
    with ShardServer(folder / "shards") as server:
        command = [sys.executable, "-m", "tests.support.traced", f"{server.url}/{{00000..00002}}.tar", folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", MOST)
def test_a_plain_batch_runs_no_more_modules_than_it_did(modules, kind):
    count = len(modules[kind])
    assert MOST[kind] - SLACK <= count <= MOST[kind], "\n".join(modules[kind])
