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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

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
from streamload.testing.server import ShardServer
from tests.support.s3 import S3Server
from tests.support.tally import Tally

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
        with pytest.raises(OriginCut, match=r"status 22 after 0 bytes; stderr: curl: \(22\).*500"):
            read(f"curl -fsSL {server.url}/a.tar | cat")


@pytest.mark.deep
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
@pytest.mark.sampled(5)
def test_a_failing_command_is_an_error_of_its_type(
    shard: Path, command: str, error: type[OriginError], says: str, no_leaks: Any
) -> None:
    with no_leaks(), pytest.raises(error, match=says) as caught:
        read(command.format(shard))
    assert type(caught.value) is error


@pytest.fixture
def ignored_children() -> Iterator[None]:
    """The kernel forgets the exit statuses of this process's children."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("ignored_children")
def test_where_sigchld_is_ignored_no_failure_looks_like_an_end(shard: Path, no_leaks: Any) -> None:
    with no_leaks():
        assert read(f"cat {shard}") == BODY
        for command, says in (
            (f"head -c 1000 {shard}; exit 3", "status 3 after 1000 bytes"),
            (f"(head -c 1000 {shard}; exit 3) | cat", "status 3 after 1000 bytes"),
            (f"head -c 1000 {shard}; kill -9 $$", "status 137 after 1000 bytes"),
            (f"head -c 1000 {shard}; kill -9 0", "status 137 after 1000 bytes"),
        ):
            with pytest.raises(OriginCut, match=says):
                read(command)


def test_a_command_that_closes_its_output_early_is_waited_for(shard: Path) -> None:
    with pytest.raises(OriginCut, match="status 4 after 1000 bytes"):
        read(f"head -c 1000 {shard}; exec >&-; sleep 0.2; exit 4")


def test_a_command_that_writes_nothing_gives_nothing() -> None:
    assert read("true") == b""


def test_a_command_that_fails_half_way_is_restarted_at_the_byte(shard: Path) -> None:
    flag = shard.with_name("tried")
    command = f"if [ -e {flag} ]; then cat {shard}; else touch {flag}; head -c 1000000 {shard}; exit 1; fi"
    tally = Tally()
    assert read(command, counters=tally) == BODY
    assert tally["origin_retries"] == 1
    assert tally["origin_bytes"] == len(BODY) + 1_000_000


def test_an_attempt_that_fails_early_forgets_nothing_of_what_was_given_before(shard: Path) -> None:
    """Run 1 gives two thirds, run 2 less of another version, run 3 all of that one: no mix of the two."""
    count, other = shard.with_name("count"), shard.with_name("b.tar")
    other.write_bytes(BODY[:1_500_000] + random.Random(2).randbytes(1_500_003))
    command = (
        f"echo >> {count}; case $(wc -l < {count}) in 1) head -c 2000000 {shard}; exit 1;; "
        f"2) head -c 1000000 {other}; exit 1;; *) cat {other};; esac"
    )
    with pytest.raises(DatasetChanged, match="other bytes than it did before"):
        read(command)
    assert len(count.read_text()) == 3


@pytest.mark.parametrize(
    "said",
    [
        "curl: (18) transfer closed with 4041234 bytes remaining to read",
        "curl: (18) transfer closed with 404 bytes remaining to read",
        "100 4100k    0 4100k    0     0   410k      0 --:--:--  0:00:10 --:--:--  401k",
        "  3  403M    3 14.0M    0     0   404k   410k --:--:--",
        "  100   404  100   404    0     0",
        "read 403.5 of 410.0 MB",
    ],
)
def test_a_number_that_is_no_status_is_no_reason_to_give_up(shard: Path, said: str) -> None:
    flag = shard.with_name("tried")
    again = f"touch {flag}; head -c 1000000 {shard}; echo '{said}' >&2; exit 18"
    assert read(f"if [ -e {flag} ]; then cat {shard}; else {again}; fi") == BODY


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("curl: (22) The requested URL returned error: 404", OriginNotFound),
        ("ERROR 404: Not Found.", OriginNotFound),
        ("HTTP/1.1 410 Gone", OriginNotFound),
        ("An error occurred (404) when calling the HeadObject operation", OriginNotFound),
        ("status code: 404, request id: x", OriginNotFound),
        ("response 404.", OriginNotFound),
        ("curl: (22) The requested URL returned error: 403", OriginDenied),
        ("fatal error: An error occurred (403) when calling HeadObject", OriginDenied),
    ],
)
def test_what_commands_say_of_a_status_is_understood(said: str, error: type[OriginError]) -> None:
    with pytest.raises(error):
        read(f"echo '{said}' >&2; exit 1")


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
