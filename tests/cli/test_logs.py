"""Logs of the command line: text or JSON lines on stderr, with times and levels."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from streamload.cli.logs import LogFormat, LogLevel, flags_first, log_to_stderr, logger, stop_logging
from streamload.testing.server import ShardServer
from streamload.testing.shards import write_shards

COMMAND = [sys.executable, "-m", "streamload"]
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR) \S.*")


@pytest.fixture
def restored() -> Iterator[None]:
    """Nothing that a test has set up is left."""
    yield
    stop_logging()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    write_shards(tmp_path / "origin", [3, 3])
    (tmp_path / "origin" / "00001.tar").unlink()
    with ShardServer(tmp_path / "origin") as server:
        yield server


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def of_daemon(server: ShardServer, folder: Path) -> list[object]:
    pattern = f"{server.url}/{{00000..00001}}.tar"
    tier = ["--cache-dir", folder / "tier", "--cache-size", "1GB", "--notices", "none"]
    return ["daemon", pattern, *tier, "--once", "--listen", "127.0.0.1:0"]


def test_a_daemon_logs_json_lines_with_times_and_levels_and_its_end_is_json(
    server: ShardServer, tmp_path: Path
) -> None:
    done = run(*of_daemon(server, tmp_path), "--log-format", "json", "--json")
    assert done.returncode == 1
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert {line["level"] for line in lines} == {"INFO", "WARNING"}
    assert any("/metrics, /healthz and /status are at" in line["message"] for line in lines)
    assert any("00001.tar" in line["message"] for line in lines if line["level"] == "WARNING")
    assert all(datetime.fromisoformat(line["time"].replace("Z", "+00:00")).tzinfo for line in lines)
    status = json.loads(done.stdout)
    assert (status["held"], status["wanted"]) == (1, 2)
    assert list(status["failed"]) == [f"{server.url}/00001.tar"]


def test_a_daemon_logs_text_with_times_and_levels_and_a_level_may_be_chosen(
    server: ShardServer, tmp_path: Path
) -> None:
    done = run("--log-level", "info", *of_daemon(server, tmp_path))
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines
    assert all(LINE.fullmatch(line) for line in lines), done.stderr
    quiet = run(*of_daemon(server, tmp_path / "other"), "--log-level=error")
    assert quiet.stderr == ""


def test_a_command_that_fails_says_so_in_one_json_line() -> None:
    done = run("cache", "ls", "--cache-dir", "/nowhere", "--log-format=json")
    assert done.returncode == 2
    (line,) = map(json.loads, done.stderr.splitlines())
    assert line["level"] == "ERROR"
    assert "/nowhere" in line["message"]


def test_a_format_or_level_that_there_is_not_is_refused() -> None:
    for flag in ("--log-format", "--log-level"):
        done = run("version", flag, "loud")
        assert done.returncode == 2
        assert "loud" in done.stderr


def test_flags_of_logs_may_stand_anywhere_but_after_two_dashes() -> None:
    assert flags_first(["daemon", "u", "--log-format", "json", "--once"]) == [
        *("--log-format", "json", "daemon", "u", "--once")
    ]
    assert flags_first(["daemon", "--log-level=info"]) == ["--log-level=info", "daemon"]
    assert flags_first(["pack", "--", "--log-format", "x"]) == ["pack", "--", "--log-format", "x"]
    assert flags_first(["daemon", "--log-format"]) == ["--log-format", "daemon"]


@pytest.mark.usefixtures("restored")
def test_a_log_line_is_one_line_of_json_whatever_is_in_its_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log_to_stderr(LogFormat.json, LogLevel.warning)
    logging.getLogger("other").warning('a "name"\nand \x1b[31m more')
    try:
        raise ValueError("cause")
    except ValueError:
        logger.exception("it %s", "failed")
    logger.info("below the level")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["message"] == 'a "name"\nand \x1b[31m more'
    assert (first["logger"], second["logger"]) == ("other", "streamload")
    assert second["message"] == "it failed"
    assert "ValueError: cause" in second["traceback"]


def test_every_command_that_shows_something_has_json() -> None:
    from typer.main import get_command

    from streamload.cli import app

    def leaves(command: object, path: str) -> Iterator[tuple[str, object]]:
        children = getattr(command, "commands", None)
        if children is None:
            yield path, command
            return
        for name, child in children.items():
            yield from leaves(child, f"{path} {name}".strip())

    for path, command in leaves(get_command(app), ""):
        flags = [flag for one in command.params for flag in one.opts]  # type: ignore[attr-defined]
        assert "--json" in flags or path == "metrics serve", path


def test_the_version_is_json_on_demand() -> None:
    assert json.loads(run("version", "--json").stdout)["version"] == run("--version").stdout.strip()
