"""`streamload daemon` as a command: to its end, told to end, followed by its pages and by `status`."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from streamload.cli.options import storage_options_of
from streamload.daemon.options import ServiceOptions
from streamload.daemon.service import Service
from streamload.daemon.status import Status
from streamload.daemon.status_server import StatusServer, complaint, metrics_text
from streamload.errors import OptionError
from streamload.observe import page_server as page_module
from streamload.options import listen_at
from streamload.testing.server import ShardServer
from streamload.testing.shards import write_shards
from tests.support.pages import get

COMMAND = [sys.executable, "-m", "streamload"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    write_shards(tmp_path / "origin", [5, 4, 6])
    with ShardServer(tmp_path / "origin") as server:
        yield server


def arguments(server: ShardServer, tmp_path: Path, *more: str) -> list[str]:
    pattern = f"{server.url}/{{00000..00002}}.tar"
    tier = ["--cache-dir", str(tmp_path / "tier"), "--cache-size", "1GB", "--notices", "none"]
    return [*COMMAND, "daemon", pattern, *tier, *more]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_once_fills_the_cache_and_says_so(server: ShardServer, tmp_path: Path) -> None:
    done = run(arguments(server, tmp_path, "--once", "--listen", "none"))
    assert done.returncode == 0, done.stderr
    assert "3 of 3 shards are held (3 listed shards), 3 brought" in done.stdout
    assert len(list((tmp_path / "tier" / "shards").iterdir())) == 3


def test_once_is_1_if_a_shard_could_not_be_had(server: ShardServer, tmp_path: Path) -> None:
    (server.root / "00001.tar").unlink()
    done = run(arguments(server, tmp_path, "--once", "--listen", "none"))
    assert done.returncode == 1
    assert f"{server.url}/00001.tar: " in done.stdout
    assert len(list((tmp_path / "tier" / "shards").iterdir())) == 2


def test_it_goes_on_until_it_is_told_to_end_and_tells_how_it_is(
    server: ShardServer, tmp_path: Path, port: int
) -> None:
    command = arguments(server, tmp_path, "--listen", f"127.0.0.1:{port}")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: len(list((tmp_path / "tier").glob("shards/*"))) == 3)
            status, text = get(f"http://127.0.0.1:{port}/metrics")
            assert status == 200
            assert re.search(r"^streamload_daemon_shards_wanted 3$", text, re.M)
            assert get(f"http://127.0.0.1:{port}/healthz") == (200, "ok\n")
            shown = run([*COMMAND, "daemon", "status", "--listen", f"127.0.0.1:{port}"])
            assert shown.returncode == 0
            assert "3 listed shards" in shown.stdout
            shown = run([*COMMAND, "daemon", "status", "--json", "--listen", f"127.0.0.1:{port}"])
            assert json.loads(shown.stdout)["held"] == 3
            os.kill(process.pid, signal.SIGTERM)
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "told to end by SIGTERM" in out


def test_status_without_a_daemon_is_one_line(port: int) -> None:
    done = run([*COMMAND, "daemon", "status", "--listen", f"127.0.0.1:{port}"])
    assert done.returncode == 2
    assert done.stderr.startswith("streamload: no daemon answers at")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "nothing to do"),
        (["https://h/a.tar", "--run", "0123456789abcdef"], "--shared-cache"),
        (["https://h/a.tar", "--into", "shared"], "--shared-cache"),
        (["https://h/a.tar", "--into", "elsewhere"], "shared or local"),
        (["https://h/a.tar", "--window", "soon"], "neither a size nor a time"),
        (["https://h/a.tar", "--window", "30min"], "a list has no pace"),
        (["https://h/a.tar", "--bandwidth", "fast"], "bandwidth"),
        (["https://h/a.tar", "--notices", "ibm"], "notices"),
        (["https://h/a.tar", "--listen", "nowhere"], "no address and port"),
        (["https://h/a.tar", "--listen", "127.0.0.1:99999"], "no address and port"),
        (["not-a-scheme://h/a.tar"], "unknown scheme"),
    ],
)
def test_what_cant_be_asked_for_is_said(given: list[str], says: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"cache_dir": tmp_path / "tier", "cache_size": "1GB"}
    urls = tuple(word for word in given[:1] if not word.startswith("--"))
    names = [word.removeprefix("--") for word in given[1::2]]
    options |= dict(zip(names, given[2::2], strict=True))
    if "run" in options:
        options["runs"] = (options.pop("run"),)
    with pytest.raises(OptionError, match=says), Service(ServiceOptions(urls=urls, **options)):
        pass


def test_a_daemon_beside_another_takes_any_port(tmp_path: Path) -> None:
    def service(name: str, **more: Any) -> Service:
        return Service(ServiceOptions(("https://h/a.tar",), cache_dir=tmp_path / name, **more))

    with service("a") as one, service("b") as other:
        assert one.status_server is not None
        assert other.status_server is not None
        assert one.status_server.url != other.status_server.url
        address = one.status_server.url.removeprefix("http://")
        with pytest.raises(OptionError, match="can't listen"), service("c", listen=address):
            pass


@contextmanager
def page(status: Status) -> Iterator[str]:
    with StatusServer(lambda: status, "127.0.0.1:0") as served:
        yield served.url


def test_the_page_is_on_this_machine_only_and_answers_nothing_else() -> None:
    assert listen_at("127.0.0.1:9433") == ("127.0.0.1", 9433)
    with page(Status(trouble="no leases")) as url:
        assert url.startswith("http://127.0.0.1:")
        assert get(url + "/healthz") == (503, "no leases\n")
        assert json.loads(get(url + "/status?x=1")[1])["trouble"] == "no leases"
        for path in ("/", "/etc/passwd", "/metrics/x", "/" + 5000 * "a"):
            assert get(url + path)[0] == 404


def test_the_page_listens_on_ipv6_and_its_url_has_brackets() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as exc:
        pytest.skip(f"no IPv6 here: {exc}")
    with StatusServer(Status, "[::1]:0") as served:
        assert served.url.startswith("http://[::1]:")
        assert get(served.url + "/healthz") == (200, "ok\n")
        shown = run([*COMMAND, "daemon", "status", "--listen", served.url.removeprefix("http://")])
        assert shown.returncode == 0, shown.stderr


def test_a_client_that_resets_its_connection_leaves_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with page(Status()) as url:
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
            until(answering)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        until(lambda: not answering())
    assert capfd.readouterr().err == ""


def ask(url: str, host: str | None) -> int:
    """The status of an answer to a request with another Host, or none."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    with contextlib.closing(connection):
        connection.putrequest("GET", "/status", skip_host=True)
        if host is not None:
            connection.putheader("Host", host)
        connection.endheaders()
        return connection.getresponse().status


def test_the_page_answers_no_foreign_name_that_was_bound_to_its_address() -> None:
    with page(Status()) as url:
        for host in ("evil.example", "evil.example:9433", "127.0.0.1.evil.example", "evil.localhost.com."):
            assert ask(url, host) == 421
        own = (urlsplit(url).netloc, "localhost", "LOCALHOST:9433", "[::1]:9433", "[::1]", "10.0.0.7:9433")
        inside = ("daemon-1:9433", "daemon.default.svc.cluster.local:9433", "node.internal", None)
        for known in (*own, *inside, socket.getfqdn()):
            assert ask(url, known) == 200, known


def test_a_client_that_drips_its_request_is_let_go_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "_ANSWER_SECONDS", 0.5)
    with page(Status()) as url, socket.create_connection(("127.0.0.1", urlsplit(url).port)) as client:
        client.settimeout(0.05)
        client.sendall(b"GET /status HTTP/1.0\r\n")
        dripped = 0
        while True:
            try:
                assert client.recv(1) == b""  # no answer, and the end
                break
            except TimeoutError:
                client.sendall(b"X")
                dripped += 1
            except ConnectionError:
                break
        assert dripped > 1  # each of them would have begun another wait
        assert get(url + "/healthz")[0] == 200


def test_connections_beyond_the_limit_are_closed_and_the_page_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_module, "_CONNECTIONS", 3)
    with page(Status()) as url, contextlib.ExitStack() as held:
        idle = [
            held.enter_context(socket.create_connection(("127.0.0.1", urlsplit(url).port))) for _ in range(3)
        ]
        until(lambda: len(answering()) == 3)
        with socket.create_connection(("127.0.0.1", urlsplit(url).port)) as more:
            more.settimeout(60)
            with contextlib.suppress(ConnectionError):
                assert more.recv(1) == b""
        idle[0].close()
        until(lambda: len(answering()) == 2)
        assert get(url + "/healthz")[0] == 200


def answering() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]


def test_a_daemon_that_doesnt_look_any_more_isnt_well() -> None:
    assert complaint(Status()) == ""
    assert "nothing was looked at" in complaint(Status(seconds_since_look=1e4))


def test_metrics_are_in_prometheus_format() -> None:
    text = metrics_text(Status(wanted=7, held=3, working=("a", "b"), notice="aws, 9 s"))
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    values = dict(line.split(" ") for line in lines)
    assert all(re.fullmatch(r"[a-z_]+ [0-9.]+", line) for line in lines)
    assert values["streamload_daemon_shards_wanted"] == "7"
    assert values["streamload_daemon_shards_working"] == "2"
    assert values["streamload_daemon_preempted"] == "1"
    assert text.count("# TYPE") == len(lines)


def test_many_ask_at_once() -> None:
    found: list[int] = []
    with page(Status()) as url:
        threads = [threading.Thread(target=lambda: found.append(get(url + "/metrics")[0])) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [200] * 8


@pytest.mark.parametrize("option", ["--shared-cache-options", "--storage-options"])
@pytest.mark.parametrize("text", ["{'key': 'hunter2'}", '["hunter2"]'])
@pytest.mark.sampled(2)
def test_options_that_are_no_json_are_called_by_their_own_name_and_not_shown(option: str, text: str) -> None:
    done = run([*COMMAND, "daemon", "https://h/a.tar", option, text])
    assert done.returncode == 2
    assert re.search(rf" {option} is (not|no) JSON", done.stderr)
    assert "hunter2" not in done.stderr


@pytest.mark.parametrize("option", ["--shared-cache-options", "--storage-options"])
def test_options_may_stand_in_a_file(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "good.json").write_text('{"key": "hunter2"}')
    (tmp_path / "bad.json").write_text("{'key': 'hunter2'}")
    (tmp_path / "bytes").write_bytes(b"\xff")
    assert storage_options_of("@~/good.json", option) == {"key": "hunter2"}
    assert storage_options_of(f"@{tmp_path}/good.json", option) == {"key": "hunter2"}
    for name, says in (("bad.json", "is not JSON"), ("none", "can't be read: No such"), ("bytes", "no text")):
        with pytest.raises(OptionError, match=says) as caught:
            storage_options_of(f"@~/{name}", option)
        assert option in str(caught.value)
        assert "hunter2" not in str(caught.value)
