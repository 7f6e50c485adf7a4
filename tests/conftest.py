"""What every test shares: how a hang shows itself, a place for files, a check that nothing is left over."""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import psutil
import pytest

from streamload.cache import memory
from tests.support.certificate import write_certificate

if TYPE_CHECKING:
    from tests.support.s3 import S3Server

SHARED_MEMORY = Path("/dev/shm")

# A busy machine is no failure.
hypothesis.settings.register_profile(
    "whatever it takes", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("whatever it takes")

# These run open_clip's own code, in an environment of their own (make pytest-openclip).
collect_ignore_glob = [] if importlib.util.find_spec("open_clip") else ["*openclip*"]


_GRACE_SECONDS = 120
_HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25  # of linux/mman.h
_stderr = pytest.StashKey[int]()


_CHANGES_WORDS = {
    *("BUILD_NUMBER", "CI", "GITHUB_ACTIONS"),  # pytest shows whole differences: minutes for large bytes
    *("CLICOLOR_FORCE", "COLUMNS", "FORCE_COLOR", "NO_COLOR", "PY_COLORS"),
}
_CHANGES_REQUESTS = {"ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "HF_TOKEN"}


def pytest_configure(config: pytest.Config) -> None:
    # What a CI or a user has set for other programs: some is read once, when a library is imported.
    for name in list(os.environ):
        if name.upper() in _CHANGES_WORDS | _CHANGES_REQUESTS or name.startswith("AWS_"):
            del os.environ[name]
    # `kill -USR1` on a run that seems to hang, or on a process which it forked, prints all stacks;
    # crashes and time limits (pytest-timeout) print them by themselves.
    config.stash[_stderr] = os.dup(2)  # while a test runs, 2 is a file that holds what the test writes
    faulthandler.register(signal.SIGUSR1, file=config.stash[_stderr], all_threads=True)
    # Names of semaphores tell which of the runs side by side made them, see `_is_anothers`.
    multiprocessing.current_process()._config["semprefix"] = f"/mp-{os.getpid()}"  # type: ignore[attr-defined]
    # A shell's background job ignores Ctrl-C and so would what it starts: some tests are about Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection(session: pytest.Session) -> None:
    """Import the test files, each of xdist's workers beginning at another one.

    The assertions of a file are rewritten when it is imported for the first time, which takes 13 s of CPU for
    all files. Workers that go through them side by side would all do it for each; so each does it for a part.
    """
    config = session.config
    if (worker := getattr(config, "workerinput", None)) is None:
        return
    places = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    paths = [path for place in places for path in (sorted(place.rglob("test_*.py")) or [place])]
    first = int(worker["workerid"][2:]) * len(paths) // worker["workercount"] % len(paths)
    for path in [*paths[first:], *paths[:first]]:
        if path.is_relative_to(config.rootpath) and not any(map(path.match, collect_ignore_glob)):
            name = ".".join(path.relative_to(config.rootpath).with_suffix("").parts)
            with contextlib.suppress(Exception, pytest.skip.Exception):  # collecting it raises that again
                importlib.import_module(name)


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all cases of a `sampled` test deep, but the first and others at equal distances."""
    by_test: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("deep"):
            by_test.setdefault((str(item.path), getattr(item, "originalname", item.name)), []).append(item)
    for cases in by_test.values():
        (count,) = cases[0].get_closest_marker("sampled").args
        kept = {len(cases) * place // count for place in range(count)}
        for place, case in enumerate(cases):
            if place not in kept:
                case.add_marker(pytest.mark.deep)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End the process of a test that its time limit didn't end: one whose clean-up hangs, too.

    All stacks are printed, and the test counts as failed.
    """
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit + _GRACE_SECONDS, file=item.config.stash[_stderr], exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_collection_finish() -> None:
    # Modules and tests stay to the end: without this each full collection goes through all of them for half a
    # second, and copies their pages in a forked process.
    gc.collect()
    gc.freeze()
    _fold_into_huge_pages()


def _fold_into_huge_pages() -> None:
    """Ask for huge pages under what this process has by now, where the kernel is Linux 6.1 or newer.

    Thousands of processes are forked from here: a fork copies the table of all pages, 340 MB of them, in
    45 ms, or in 17 with huge ones. That is a tenth of all CPU time of tests of loaders.
    """
    madvise = ctypes.CDLL(None).madvise
    for mapping in psutil.Process().memory_maps(grouped=False):
        if mapping.path in ("[anon]", "[heap]") and mapping.perms == "rw-p":
            first, last = (int(address, 16) for address in mapping.addr.split("-"))
            first, last = -(-first // _HUGE_PAGE) * _HUGE_PAGE, last // _HUGE_PAGE * _HUGE_PAGE
            if first < last:
                madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_COLLAPSE)


def pytest_sessionfinish() -> None:
    # Python would wait at its end for what a failed test has left running.
    for process in multiprocessing.active_children():
        process.kill()


@pytest.fixture(scope="module")
def s3() -> "Iterator[S3Server]":
    """An S3 store on loopback, with the bucket "bucket"."""
    from tests.support.sharing import running_s3  # moto: a second of imports, for those who need it

    with running_s3() as server:
        yield server


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test starts without the variables that would change what streamload does."""
    for name in list(os.environ):
        if name.startswith(("STREAMLOAD_", "WDS_", "SLURM_", "OMPI_", "PMI_")):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def unknown_endpoints() -> None:
    """A test starts without what others learnt of servers whose ports its own may get."""
    if endpoints := sys.modules.get("streamload.origins.endpoints"):
        endpoints.remember()()  # forgets all, unless a fixture's loader still uses it


@pytest.fixture(scope="module", autouse=True)
def small_process() -> Iterator[None]:
    """Give back what the tests of a file leave: each fork of the tests after them would copy its page table.

    A client of S3 is kept for as long as a process lives and takes 10 MB, and each test has another server's.
    """
    yield
    if signing := sys.modules.get("streamload.origins.signing"):
        signing._accesses.clear()
    gc.collect()
    gc.freeze()  # what tests have imported stays, as in pytest_collection_finish
    ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for what is made once and read by many tests, such as shards."""
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place of the test's own in the machine's tmpfs, instead of all of it."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix=f"streamload-test-{os.getpid()}-") as place:
        monkeypatch.setattr(memory, "PLACE", Path(place))
        yield Path(place)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Files of a certificate for this machine, which nobody trusts yet, and of its key."""
    return write_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def trusted(certificate: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """The same, trusted as long as the test runs."""
    from streamload.origins import sockets  # urllib3: a while of imports, for those who need it

    monkeypatch.setenv("SSL_CERT_FILE", certificate[0])
    sockets._tls_context.cache_clear()
    yield certificate
    sockets._tls_context.cache_clear()


Held = dict[str, set[str]]

TRACKED_TIMES = 2
"""How many times as long files in /dev/shm may stay: what a process of another test, which kills some, had
there is nobody's until the tracker of that process removes it."""


def _held() -> Held:
    """What this process holds now, by kind, in words that tell where it came from."""
    me = psutil.Process()
    descriptors = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own
            descriptors.add(f"{descriptor.name} → {descriptor.readlink()}")
    children = set()
    for child in me.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "resource_tracker" not in (command := " ".join(child.cmdline())):
                is_dead = child.status() == psutil.STATUS_ZOMBIE
                children.add(f"{child.pid} {command or child.name()}{' (zombie)' if is_dead else ''}")
    return {
        "threads": {f"{thread.ident} {thread.name}" for thread in threading.enumerate()},
        "child processes": children,
        "descriptors": {d for d in descriptors if "/proc/" not in d and "anon_inode:[eventpoll]" not in d},
        "shared memory": {str(path) for path in SHARED_MEMORY.iterdir()},
    }


def _is_anothers(path: Path) -> bool:
    """Whether a file or directory in /dev/shm is of a process that isn't of this test.

    Tests run side by side. torch, loky and the tests, for semaphores too, put a process into the name of what
    they make; of what is named otherwise whoever has it open is asked.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        if named := re.match(r"(?:torch|streamload-test|sem\.loky|sem\.mp)[_-](\d+)(?:[_-]|$)", path.name):
            return not _is_of_this_test(psutil.Process(int(named[1])))
    of_this_test = [psutil.Process(), *psutil.Process().children(recursive=True)]
    if any(_has_open(process, path) for process in of_this_test):
        return False
    return any(_has_open(process, path) for process in psutil.process_iter() if process not in of_this_test)


def _is_of_this_test(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # it, or one of those, has just ended
        return os.getpid() in {process.pid, *(parent.pid for parent in process.parents())}
    return False


def _has_open(process: psutil.Process, path: Path) -> bool:
    """Whether a process has a file, or one below a directory, open or mapped, as semaphores are."""
    with contextlib.suppress(OSError, psutil.Error):
        if str(path) in Path(f"/proc/{process.pid}/maps").read_text():
            return True
        opened = [Path(f"/proc/{process.pid}/fd/{name}") for name in os.listdir(f"/proc/{process.pid}/fd")]
        return any(link.readlink().is_relative_to(path) for link in opened)
    return False


@contextlib.contextmanager
def leaks_nothing(patience_seconds: float = 30.0) -> Iterator[None]:
    """Fail if the block leaves a thread, child process, open descriptor or file in /dev/shm behind.

    What is on its way out when the block ends gets `patience_seconds` to go. A block that runs for the first
    time in a process may open what stays open for good (a random source, a library): warm it up before.
    """
    before = _held()
    yield
    others: set[str] = set()  # asked once: reading what all processes have mapped takes long
    began = time.monotonic()
    while True:
        gc.collect()  # an exception's traceback may hold what nobody can reach any more
        left = {kind: sorted(now - before[kind]) for kind, now in _held().items()}
        others |= {path for path in left["shared memory"] if path not in others and _is_anothers(Path(path))}
        left["shared memory"] = [path for path in left["shared memory"] if path not in others]
        left = {kind: some for kind, some in left.items() if some}
        if not left:
            return
        times = TRACKED_TIMES if left.keys() == {"shared memory"} else 1
        if time.monotonic() > began + times * patience_seconds:
            pytest.fail(f"left behind: {left}", pytrace=False)
        time.sleep(0.02)


@pytest.fixture
def sync_http() -> str:
    """The scheme of a file system that has no asyncio, and waits for a web server as long as that likes."""
    import fsspec
    from fsspec.implementations.http_sync import HTTPFileSystem

    fsspec.register_implementation("sync-http", HTTPFileSystem, clobber=True)
    return "sync-http"


@pytest.fixture
def port() -> int:
    """Where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        found: int = probe.getsockname()[1]
        return found


@pytest.fixture
def no_leaks() -> Callable[..., contextlib.AbstractContextManager[None]]:
    """`with no_leaks(): …` fails when the block leaves something behind; see `leaks_nothing`."""
    return leaks_nothing
