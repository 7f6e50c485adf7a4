"""Pipes: real commands that fail, hang, leave processes behind or lose their reader."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tally import Tally

from streamload.errors import (
    DatasetChanged,
    OriginCut,
    OriginDenied,
    OriginError,
    OriginNotFound,
    OriginStopped,
    OriginTimeout,
)
from streamload.origins.origin import OriginOptions, open_origin
from streamload.testing.faults import Fault
from streamload.testing.s3 import S3Server
from streamload.testing.server import ShardServer

BODY = random.Random(1).randbytes(3_000_003)
QUICK = OriginOptions(attempts=3, backoff_seconds=0.01, stall_seconds=0.5)


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "a.tar"
    path.write_bytes(BODY)
    return path


def read(command: str, start: int = 0, **facts: Any) -> bytes:
    return b"".join(
        open_origin(f"pipe:{command}", None, facts.pop("options", QUICK), **facts).open(start).chunks()
    )


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


def test_a_command_is_a_shell_command_with_all_its_syntax(shard: Path) -> None:
    assert (
        read(f'X={shard}; cat ${{X:-none}} | {{ cat; }} | awk \'BEGIN {{ printf "" }}\' ; cat "$X"') == BODY
    )


def test_a_command_may_wait_for_its_own_children_only(shard: Path) -> None:
    assert read(f"sleep 0.05 & cat {shard}; wait; jobs") == BODY


def test_curl_is_read(shard: Path) -> None:
    with ShardServer(shard.parent) as server:
        assert read(f"curl -fsSL {server.url}/a.tar | cat") == BODY


def test_curl_fails_at_once_for_what_is_not_there(shard: Path) -> None:
    with ShardServer(shard.parent) as server:
        with pytest.raises(OriginNotFound, match="404"):
            read(f"curl -fsSL {server.url}/b.tar | cat")
        server.misbehave("*", Fault(status=403))
        with pytest.raises(OriginDenied, match="403"):
            read(f"curl -fsSL {server.url}/a.tar | cat")
        assert len(server.log) == 2


def test_a_cut_below_curl_is_found_and_read_anew(shard: Path) -> None:
    with ShardServer(shard.parent) as server:
        server.misbehave("a.tar", Fault(first=2, cut_after_bytes=2_000_000))
        tally = Tally()
        assert read(f"curl -fsSL {server.url}/a.tar | cat", counters=tally) == BODY
        assert tally["origin_retries"] == 2


def test_a_page_with_an_error_status_is_an_error_with_curls_f(shard: Path) -> None:
    with ShardServer(shard.parent) as server:
        server.misbehave("a.tar", Fault(status=500, body=b"<html>"))
        with pytest.raises(OriginCut, match=r"status 22 after 0 bytes; it said: curl: \(22\).*500"):
            read(f"curl -fsSL {server.url}/a.tar | cat")


@pytest.mark.skipif(not shutil.which("aws", path=Path(sys.executable).parent), reason="needs the aws command")
def test_the_aws_command_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server() as s3:
        s3.create_bucket("bucket")
        url = s3.put("bucket", "a.tar", BODY)
        for name, value in s3.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        patient = OriginOptions(attempts=1, stall_seconds=60)
        assert read(f"aws s3 cp {url} - | cat", options=patient) == BODY
        with pytest.raises(OriginNotFound):
            read("aws s3 cp s3://bucket/b.tar - | cat", options=patient)


@pytest.mark.parametrize(
    ("command", "error", "says"),
    [
        ("head -c 1000 {}; exit 3", OriginCut, "status 3 after 1000 bytes"),
        ("(head -c 1000 {}; exit 3) | cat", OriginCut, "status 3 after 1000 bytes"),
        ("head -c 1000 {}; kill -9 $$", OriginCut, "status 137"),
        ("head -c 1000 {}; echo 'disk on fire' >&2; false", OriginCut, "disk on fire"),
        ("no-such-command", OriginError, "not found"),
        ("cat {}.missing", OriginNotFound, "No such file"),
        ("sleep 60", OriginTimeout, r"wrote nothing for 0\.5 s"),
        ("head -c 1000 {}; echo going slow >&2; sleep 60 | cat", OriginTimeout, "going slow"),
        ("head -c 1000 {}; sleep 60 & sleep 60", OriginTimeout, "wrote nothing"),
        ("true; )", OriginCut, "syntax error"),
    ],
)
def test_a_failing_command_is_an_error_of_its_type(
    shard: Path, command: str, error: type[OriginError], says: str, no_leaks: Any
) -> None:
    with no_leaks(), pytest.raises(error, match=says) as caught:
        read(command.format(shard))
    assert type(caught.value) is error


def test_a_command_that_writes_nothing_gives_nothing() -> None:
    assert read("true") == b""


def test_a_command_that_fails_half_way_is_restarted_at_the_byte(shard: Path) -> None:
    flag = shard.with_name("tried")
    command = f"if [ -e {flag} ]; then cat {shard}; else touch {flag}; head -c 1000000 {shard}; exit 1; fi"
    tally = Tally()
    assert read(command, counters=tally) == BODY
    assert tally["origin_retries"] == 1
    assert tally["origin_bytes"] == len(BODY) + 1_000_000


def test_a_restarted_command_that_writes_other_bytes_is_another_version(shard: Path) -> None:
    flag = shard.with_name("tried")
    command = (
        f"if [ -e {flag} ]; then tr a b < {shard}; else touch {flag}; head -c 1000000 {shard}; exit 1; fi"
    )
    with pytest.raises(DatasetChanged, match="other bytes"):
        read(command)


def test_a_restarted_command_that_writes_less_is_another_version(shard: Path) -> None:
    with pytest.raises(DatasetChanged, match="wrote 1000 bytes"):
        read(f"head -c 1000 {shard}", start=2000)


def test_much_on_stderr_neither_blocks_nor_is_shown_in_full(shard: Path) -> None:
    with pytest.raises(OriginCut) as caught:
        read(f"cat {shard}; yes complaint | head -c 1000000 >&2; false")
    assert "complaint" in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_no_secret_of_the_command_or_its_output_is_shown(shard: Path) -> None:
    command = (
        "curl -v -H 'Authorization: Bearer hunter2' -u me:hunter2 'http://127.0.0.1:9/a.tar?sig=hunter2'"
    )
    origin = open_origin(f"pipe:{command}; echo '> Authorization: Bearer hunter2' >&2; false", None, QUICK)
    with pytest.raises(OriginCut) as caught:
        list(origin.open().chunks())
    error: BaseException | None = caught.value
    while error is not None:
        assert "hunter2" not in f"{error!s} {error!r}"
        error = error.__cause__
    assert "hunter2" not in f"{origin!r} {origin.url}"


def test_closing_kills_the_whole_group(shard: Path, no_leaks: Any) -> None:
    with no_leaks():
        stream = open_origin(f"pipe:(cat {shard}; sleep 60) | (trap '' PIPE TERM HUP; cat; sleep 60)").open()
        chunks = stream.chunks()
        assert next(chunks)
        stream.close()
        chunks.close()


def test_a_stopped_loader_does_not_wait_for_a_command(no_leaks: Any) -> None:
    stop = threading.Event()
    with no_leaks():
        threading.Timer(0.2, stop.set).start()
        with pytest.raises(OriginStopped):
            read("sleep 60", options=OriginOptions(stall_seconds=60), stop=stop)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_the_group_dies_with_its_reader(sign: signal.Signals) -> None:
    script = (
        "from streamload.origins.origin import open_origin\n"
        "stream = open_origin('pipe:echo begun; sleep 987654 | (trap \"\" PIPE; sleep 987654)').open()\n"
        "for chunk in stream.chunks(): print(chunk, flush=True)\n"
    )
    reader = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert reader.stdout is not None

    def sleepers() -> bool:
        return any(p.info["cmdline"] == ["sleep", "987654"] for p in psutil.process_iter(["cmdline"]))

    with reader.stdout as out:
        out.readline()
        assert eventually(sleepers)
        reader.send_signal(sign)
        reader.wait()
    assert eventually(lambda: not sleepers())
