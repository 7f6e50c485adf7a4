"""What a shared cache is made of: objects in a folder, in S3 stores, in whatever else fsspec writes to."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from benchmarks.stores.store import KINDS, Store
from streamload.cache.shared import folder as folder_module
from streamload.cache.shared.objects import Objects
from streamload.errors import OptionError, SharedTierError
from streamload.options import FileSystem
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from tests.support.certificate import write_certificate
from tests.support.s3 import S3Server

LARGE = random.Random(3).randbytes(20_000_001)


@pytest.fixture(scope="module")
def swift() -> Iterator[Store]:
    kind = KINDS["swift"]
    if kind.why_not():
        pytest.skip(kind.why_not())
    with Store(kind) as store:
        yield store


@pytest.fixture(params=["folder", "s3", "swift", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """Where objects can live: a URL and what its file system needs."""
    own = f"of-{random.getrandbits(64):x}"
    if request.param == "s3":
        return f"s3://bucket/{own}/tier", request.getfixturevalue("s3").storage_options
    if request.param == "swift":
        store: Store = request.getfixturevalue("swift")
        return f"s3://{store.bucket}/{own}/tier", store.storage_options(store.endpoint)
    if request.param == "memory":
        return f"memory://{own}/tier", {}
    return str(tmp_path / own / "tier"), {}


@pytest.fixture
def objects(place: tuple[str, dict[str, Any]]) -> Objects:
    url, storage_options = place
    return Objects(url, storage_options)


def test_nothing_is_there_before_something_is_written(objects: Objects) -> None:
    assert objects.read("a/b.json") is None
    assert objects.modified("a/b.json") is None
    assert objects.names() == objects.names("a") == []
    objects.delete("a/b.json")
    with pytest.raises(SharedTierError, match=r"a/b\.json"):
        objects.read_range("a/b.json", 0, 1)


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 1000])
def test_what_is_written_is_read_and_replaced_as_a_whole(objects: Objects, data: bytes) -> None:
    objects.write("some/where", b"another, longer or shorter" * 20)
    objects.write("some/where", data)
    assert objects.read("some/where") == data
    assert objects.read("some/where", limit_bytes=max(1, len(data))) == data


def test_more_than_the_limit_is_refused(objects: Objects) -> None:
    objects.write("a", b"12345")
    assert objects.read("a", limit_bytes=5) == b"12345"
    with pytest.raises(SharedTierError, match="more than 4 bytes"):
        objects.read("a", limit_bytes=4)


def test_a_range_is_exactly_what_was_asked_for(objects: Objects) -> None:
    objects.write("a", bytes(range(100)))
    assert objects.read_range("a", 0, 1) == b"\0"
    assert objects.read_range("a", 98, 100) == b"bc"
    assert objects.read_range("a", 50, 50) == b""
    for start, stop in ((99, 101), (100, 101), (200, 300)):
        with pytest.raises(SharedTierError):
            objects.read_range("a", start, stop)


def test_a_new_object_is_written_once(objects: Objects) -> None:
    assert objects.has_conditions
    assert objects.write_new("leases/a.json", b"mine")
    assert not objects.write_new("leases/a.json", b"yours")
    assert objects.read("leases/a.json") == b"mine"
    objects.delete("leases/a.json")
    assert objects.write_new("leases/a.json", b"yours")
    assert objects.names() == ["leases/a.json"]  # nothing is left of the probe


class Forgetful(MemoryFileSystem):
    """A store that ignores conditions, as some with an S3 front do."""

    protocol = "forgetful"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        super().pipe_file(path, value, **more)


def test_where_conditions_are_ignored_what_is_there_still_stays() -> None:
    fsspec.register_implementation("forgetful", Forgetful, clobber=True)
    objects = Objects("forgetful://tier")
    assert not objects.has_conditions
    assert objects.write_new("leases/a.json", b"mine")
    assert not objects.write_new("leases/a.json", b"yours")
    assert objects.read("leases/a.json") == b"mine"
    assert objects.names() == ["leases/a.json"]


def test_of_many_who_write_a_new_object_one_does(objects: Objects, request: pytest.FixtureRequest) -> None:
    start, won = threading.Barrier(8), []

    def write(number: int) -> None:
        own = pickle.loads(pickle.dumps(objects))
        assert own.has_conditions
        start.wait()
        if own.write_new("leases/a.json", b"%d" % number):
            won.append(b"%d" % number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert objects.read("leases/a.json") in won
    assert len(won) == 1 or "swift" in request.node.callspec.id  # it looks before the bytes come


def test_a_file_is_put_whatever_its_size(objects: Objects, tmp_path: Path) -> None:
    for data in (b"", b"small", LARGE):
        (tmp_path / "file").write_bytes(data)
        objects.put_file("shards/0/a.tar", tmp_path / "file")
        assert objects.read("shards/0/a.tar") == data
    assert objects.read_range("shards/0/a.tar", 9_000_000, 9_000_010) == LARGE[9_000_000:9_000_010]
    assert objects.names() == ["shards/0/a.tar"]


def test_names_are_those_below_a_folder(objects: Objects) -> None:
    for name in ("a", "ab/c", "ab/d/e", "b/c"):
        objects.write(name, b"")
    assert objects.names() == ["a", "ab/c", "ab/d/e", "b/c"]
    assert objects.names("ab") == ["ab/c", "ab/d/e"]
    assert objects.names("ab/d") == ["ab/d/e"]
    assert objects.names("c") == []
    objects.delete("ab/d/e")
    assert objects.names("ab") == ["ab/c"]


def test_each_look_is_a_new_one(objects: Objects) -> None:
    other = pickle.loads(pickle.dumps(objects))
    assert objects.names("runs") == []
    other.write("runs/a", b"1")
    assert objects.names("runs") == ["runs/a"]
    assert objects.read("runs/a") == b"1"
    first = objects.modified("runs/a")
    other.write("runs/a", b"22")
    assert objects.read("runs/a") == b"22"
    assert first is not None
    assert (objects.modified("runs/a") or 0) >= first


def test_the_age_of_an_object_is_by_the_stores_clock(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects.write("runs/a", b"1")
    time_of_day = time.time
    for hours_off in (-1, 0, 1):
        monkeypatch.setattr(time, "time", lambda hours_off=hours_off: time_of_day() + 3600 * hours_off)
        age = objects.age("runs/a")
        assert age is not None
        assert abs(age) < 1800
    monkeypatch.undo()
    assert objects.age("runs/b") is None
    assert objects.names() == ["runs/a"]


def test_the_age_of_a_file_is_known_where_its_file_system_has_one_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = Objects(str(tmp_path / "shared"))
    objects.write("runs/a", b"1")
    moment = time.time() - 500
    os.utime(objects.target("runs/a"), (moment, moment))
    for kind in ("ext4", "nfs4", "tmpfs"):
        monkeypatch.setattr(folder_module, "file_system", lambda path, kind=kind: FileSystem("/", kind))
        assert (objects.age("runs/a") or 0) >= 499
    for kind in ("lustre", "ceph", "fuse.juicefs", "9p", "unknown"):
        monkeypatch.setattr(folder_module, "file_system", lambda path, kind=kind: FileSystem("/", kind))
        assert objects.age("runs/a") is None
    assert not any((tmp_path / "shared" / ".incoming").iterdir())


@pytest.mark.parametrize(
    "name", ["", "/a", "a/", "../a", "a/../b", ".a", "a/.b", "a//b", "a b", "a\0", "ä", "a\n"]
)
def test_a_name_that_could_lead_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    objects = Objects(str(tmp_path))
    with pytest.raises(OptionError):
        objects.write(name, b"")
    with pytest.raises(OptionError):
        objects.read(name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    ["", " ", "pipe:cat", "s3://bucket/a?versionId=1", "simplecache::s3://b/c", "/tiers/{0..9}", "a::b"],
)
def test_a_url_that_is_no_folder_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match="shared_cache"):
        Objects(url)


def test_a_scheme_that_nobody_knows_is_said_when_it_is_used() -> None:
    with pytest.raises(OptionError, match="shared_cache"):
        Objects("nosuch://bucket/folder").read("a")


def test_a_forked_child_has_a_connection_of_its_own(objects: Objects) -> None:
    if objects.url.startswith("memory"):
        pytest.skip("memory isn't shared with a child")
    objects.write("a", b"1")
    child = os.fork()
    if not child:
        status = 1
        try:
            objects.write("b", objects.read("a") or b"")
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert objects.read("b") == b"1"


def test_a_store_that_is_not_there_is_one_error_without_secrets() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    options = {"endpoint_url": endpoint, "key": "k", "secret": "swordfish"}
    objects = Objects("s3://bucket/tier", options, timeout_seconds=3.0)
    with pytest.raises(SharedTierError) as caught:
        objects.read("a")
    assert "swordfish" not in str(caught.value) + repr(objects)


def test_a_bucket_that_is_not_there_is_no_empty_one(s3: S3Server) -> None:
    objects = Objects("s3://no-such-bucket/tier", s3.storage_options)
    for ask in (lambda: objects.read("a"), lambda: objects.write("a", b"")):
        with pytest.raises(SharedTierError, match="bucket does not exist"):
            ask()


@pytest.mark.parametrize("status", [500, 503])
def test_a_store_that_fails_now_and_then_is_asked_again(tmp_path: Path, status: int) -> None:
    (tmp_path / "bucket" / "tier").mkdir(parents=True)
    (tmp_path / "bucket" / "tier" / "a").write_bytes(b"data")
    with ShardServer(tmp_path) as front:
        front.misbehave("bucket/tier/a", Fault(status=status, first=1), Fault())
        assert Objects("s3://bucket/tier", {"anon": True, "endpoint_url": front.url}).read("a") == b"data"
        assert len(front.log) == 2


@pytest.mark.parametrize("is_secure", [False, True], ids=["http", "https"])
def test_a_store_that_takes_bytes_slowly_gets_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_secure: bool
) -> None:
    """No wait between two pieces is as long as the timeout; all together are longer than one wake-up."""
    certificate = write_certificate(tmp_path)
    monkeypatch.setenv("AWS_CA_BUNDLE", certificate[0])
    bodies: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            if is_secure:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(*certificate)
                connection = context.wrap_socket(connection, server_side=True)
            with connection, connection.makefile("rb") as lines:
                lines.readline()
                while lines.readline().strip():
                    pass
                time.sleep(0.4)
                bodies.append(lines.read(len(LARGE)))
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        server = threading.Thread(target=serve)
        server.start()
        scheme = "https" if is_secure else "http"
        options = {
            "endpoint_url": f"{scheme}://127.0.0.1:{listener.getsockname()[1]}",
            "key": "k",
            "secret": "s",
        }
        Objects("s3://bucket/tier", options).write("index", LARGE)
        server.join()
    assert bodies == [LARGE]


@pytest.mark.parametrize("asks", ["read", "write"])
def test_a_request_to_s3_ends_in_its_time_though_bytes_move(asks: str) -> None:
    """A body that drips on and on, and a server that takes nothing of a large one."""
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                if asks == "read":
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 206 Partial Content\r\nContent-Length: 1000000\r\n\r\n")
                    while not is_over.wait(0.02):
                        connection.sendall(b".")
                is_over.wait(100)

        server = threading.Thread(target=serve)
        server.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        objects = Objects(
            "s3://bucket/tier", {"endpoint_url": url, "key": "k", "secret": "s"}, timeout_seconds=0.5
        )
        with pytest.raises(SharedTierError, match=r"for 0\.5 s"):
            objects.read("a") if asks == "read" else objects.write("a", LARGE)
        is_over.set()
        server.join()


def test_small_objects_in_s3_need_neither_s3fs_nor_fsspec(s3: S3Server) -> None:
    url = f"s3://bucket/of-{random.getrandbits(64):x}/tier"
    code = (
        "import sys\n"
        "from streamload.cache.shared.objects import Objects\n"
        f"objects = Objects({url!r}, {s3.storage_options!r})\n"
        "objects.write('a', b'1')\n"
        "assert objects.write_new('b', b'2') and not objects.write_new('b', b'3')\n"
        "assert (objects.read('a'), objects.read('b'), objects.read('c')) == (b'1', b'2', None)\n"
        "assert objects.read_range('a', 0, 1) == b'1' and objects.age('a') < 60\n"
        "objects.delete('a')\n"
        "loaded = {'s3fs', 'fsspec', 'aiobotocore'} & sys.modules.keys()\n"
        "assert not loaded, loaded\n"
        "assert objects.names() == ['b']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_store_that_never_answers_is_left_in_time_and_at_once_on_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        options = {"endpoint_url": endpoint, "key": "k", "secret": "s"}
        with pytest.raises(SharedTierError):
            Objects("s3://bucket/tier", options, timeout_seconds=0.2).read("a")
        stop = threading.Event()
        stop.set()
        with pytest.raises(SharedTierError, match="was closed"):
            Objects("s3://bucket/tier", options, timeout_seconds=600.0).until(stop).read("a")


@pytest.mark.usefixtures("sync_http")
def test_a_file_system_without_asyncio_that_never_answers_is_left_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"sync-http://127.0.0.1:{silent.getsockname()[1]}/tier"
        with pytest.raises(SharedTierError, match=r"no answer for 0\.2 s"):
            Objects(url, timeout_seconds=0.2).read("a")
        stop = threading.Event()
        stop.set()
        with pytest.raises(SharedTierError, match="was closed"):
            Objects(url, timeout_seconds=600.0).until(stop).read("a")


def test_what_may_not_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SharedTierError, match="can't write a"):
        Objects(str(tmp_path / "file" / "tier")).write("a", b"1")
    (tmp_path / "tier" / "a").mkdir(parents=True)
    objects = Objects(str(tmp_path / "tier"))
    for ask in (lambda: objects.write("a", b"1"), lambda: objects.read("a"), lambda: objects.delete("a")):
        with pytest.raises(SharedTierError):
            ask()
    assert list((tmp_path / "tier" / ".incoming").iterdir()) == []  # nothing is left of an attempt


def test_a_pipe_in_a_folder_does_not_hold_anybody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(SharedTierError, match="not a regular file"):
        Objects(str(tmp_path)).read("a")


def test_what_a_killed_writer_left_goes_after_a_day(tmp_path: Path) -> None:
    incoming = tmp_path / ".incoming"
    incoming.mkdir()
    for name, age in (("old", 25 * 3600), ("young", 60)):
        (incoming / name).write_bytes(b"half")
        now = (incoming / name).stat().st_mtime
        os.utime(incoming / name, (now - age, now - age))
    objects = Objects(str(tmp_path))
    objects.write("a", b"1")
    assert [path.name for path in incoming.iterdir()] == ["young"]
    assert objects.names() == ["a"]
