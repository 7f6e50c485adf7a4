"""Rows 29, 31, 32, 36 and 42: a tier among hostile users, names, forks and kills, and beside many shards."""

import contextlib
import io
import os
import signal
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamload.cache import memory
from streamload.cache.directory import Directory
from streamload.cache.locks import FileLock
from streamload.cache.placement import agreement_on
from streamload.cache.shard import shard_of
from streamload.cache.tier import Choice, Tier
from streamload.metrics import Counters
from streamload.options import read_settings
from streamload.prefetch import fallback
from streamload.testing.server import ShardServer
from tests.faults.data import Truth
from tests.faults.oracle import Attempt, DiskWatch
from tests.faults.readers import Reading, read, read_in_child
from tests.faults.rows import Row
from tests.support.indexes import WrittenIndex
from tests.support.kills import Child, Stage

_OTHER_USER = 12345
_FORKS = 150
_HELD = 1000
_SECONDS = 20.0
_FILES = {"lock", "data", "index", "names", "data (deleted)", "index (deleted)", "names (deleted)"}


def planted(attempt: Attempt) -> None:
    """Another user has put a link, to a directory of ours, where a cache is looked for."""
    data = attempt.borrow(attempt.seed, spawn=True)
    mine, open_to_all = attempt.place / "mine", attempt.place / "for all"
    mine.mkdir(mode=0o700)
    (mine / "precious").write_text("mine")
    open_to_all.mkdir()
    open_to_all.chmod(0o1777)
    root = open_to_all / f"streamload-{os.geteuid()}"

    def place() -> Path:
        match attempt.variant:
            case "the cache":
                return root
            case "above the cache":
                return root.parent / "above"
            case "the spare":
                found = fallback.place(attempt.root)
                assert found is not None
                return found
            case _:
                settings = read_settings(cache_dir=root, cache="auto", environ={})
                return agreement_on(settings, data.shards)._path

    def work(stage: Stage) -> Any:
        fallback._MEMORY = open_to_all
        memory.PLACE = open_to_all
        link = place()
        link.symlink_to(mine if attempt.variant != "the answer of auto" else mine / "precious")
        os.chown(link, _OTHER_USER, _OTHER_USER, follow_symlinks=False)
        if attempt.variant == "the spare":
            fallback.FallbackTier(attempt.root, Counters()).open()
            return {"error": None}
        if attempt.variant == "the answer of auto":
            agreement = agreement_on(read_settings(cache_dir=root, cache="auto", environ={}), data.shards)
            agreement.join(lambda: Choice("disk", "by this process"))
            agreement.close()
            return {"error": None}
        below = link / "cache" if attempt.variant == "above the cache" else link
        return read_in_child(Reading(below, data.shards, deadline_seconds=5.0))

    with Child(work) as child:
        result = child.finish(60)
    attempt.happened[attempt.variant] += 1
    attempt.check("B", [path.name for path in mine.iterdir()] == ["precious"], "written where a link leads")
    attempt.check("B", (mine / "precious").read_text() == "mine", "another's file was overwritten")
    if "cache" in attempt.variant:
        attempt.check_error(result["error"], "CacheError", str(open_to_all))


def long_names(attempt: Attempt) -> None:
    """Shards whose names take more in the index than all of the tier may: it stays within its limit."""
    place = attempt.place / "data"
    place.mkdir()
    length = 50_000 if attempt.variant == "just allowed" else 200_000
    paths = []
    for number in range(2):
        paths.append(place / f"{number:05d}.tar")
        with tarfile.open(paths[-1], "w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar:
            for sample in range(16):
                for name in (
                    f"{sample:03d}" + attempt.rng.randrange(length // 2, length) * "\udcff",
                    f"s{sample}",
                ):
                    info = tarfile.TarInfo(f"{name}.txt")
                    info.size = 2000
                    tar.addfile(info, io.BytesIO(attempt.rng.randbytes(2000)))
    with ShardServer.spawn(place) as server:
        data = Truth(paths, [shard_of(f"{server.url}/{path.name}", None) for path in paths])
        limit = 3_000_000
        with DiskWatch(attempt.root) as watch:
            result = read_in_child(Reading(attempt.root, data.shards, limit, no_room_seconds=0.2))
    watch.check(attempt, limit)
    attempt.check_no_error(result["error"])
    for shard in data.shards:
        expected = [sample for sample in data.samples[shard.digest] if len(os.fsencode(sample[0])) < 65_000]
        attempt.happened[attempt.variant] += len(data.samples[shard.digest]) - len(expected) or 16
        attempt.check("N", result["seen"].get(shard.digest) == expected, f"{shard.name}: other samples came")


def forks(attempt: Attempt) -> None:
    """A process fills and reads in threads, and forks meanwhile: no child has a lock or a shard's file."""
    data = attempt.borrow(attempt.seed, spawn=True)
    limit = data.room_bytes(2)

    def look(unrelated: list[int], root: Path) -> str:
        for descriptor in unrelated:
            try:
                os.fstat(descriptor)
            except OSError:
                return "an unrelated descriptor was closed"
        links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
        for link in links:
            with contextlib.suppress(OSError):
                target = Path(os.readlink(link))  # of what was only listed, a copy does no harm
                if target.is_relative_to(root) and (target.name in _FILES or target.parent.name == "runs"):
                    return f"it holds {target}"
        return ""

    def work(stage: Stage) -> Any:
        found: list[Any] = []
        ended = threading.Event()

        def reads() -> None:
            while not ended.is_set():
                found.append(read(Reading(attempt.root, data.shards, limit, threads=2)))

        thread = threading.Thread(target=reads)
        thread.start()
        unrelated = [os.open(data.paths[0], os.O_RDONLY) for _ in range(4)]
        wrong: list[str] = []
        children = []
        for _ in range(_FORKS // 10 if attempt.short else _FORKS):
            reader, writer = os.pipe()
            child = os.fork()
            if not child:
                os.write(writer, look(unrelated, attempt.root).encode())
                time.sleep(0.3)  # a copy of a lock would be held for so long
                os._exit(0)
            os.close(writer)
            children.append(child)
            said = os.read(reader, 4096).decode()
            os.close(reader)
            wrong += [said] if said else []
        ended.set()
        thread.join()
        for child in children:
            os.waitpid(child, 0)
        errors = [repr(one.error) for one in found if one.error is not None]
        return [len(children), wrong, errors, [one.seen for one in found]]

    with Child(work) as child:
        count, wrong, errors, seen = child.finish(120)
    attempt.happened["forks"] += count
    attempt.check("L", not wrong, f"{len(wrong)} of {count} children: {wrong[:3]}")
    attempt.check("N", not errors, f"{errors[:3]}")
    for one in seen:
        attempt.check_all(data.differences(one))
    attempt.check_next_start(data, limit)


def trash(attempt: Attempt) -> None:
    """A process is killed while it deletes, or deletes what is read: another that lives clears it away."""
    data = attempt.borrow(attempt.seed, spawn=True)
    read_in_child(Reading(attempt.root, data.shards))
    shards = sorted((attempt.root / "shards").iterdir())
    amid = attempt.rng.randrange(3)

    def lives(stage: Stage) -> None:
        tier = Tier(attempt.root, enforce_seconds=0.05)
        stage.enter("lives")
        while True:
            tier.budget.enforce_limits()
            time.sleep(0.02)

    def deletes(stage: Stage) -> None:
        unlink, count = os.unlink, 0

        def killed(*args: Any, **named: Any) -> None:
            nonlocal count
            if count == amid:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            unlink(*args, **named)

        os.unlink = killed  # type: ignore[assignment]
        Tier(attempt.root).trash(shards[0])

    if attempt.variant == "killed":
        with Child(deletes) as child:
            child.join(30)
        release: Callable[[], None] = lambda: None  # noqa: E731
    else:
        reader = FileLock.acquire(shards[0] / "names", shared=True)
        assert reader is not None
        release = reader.close
        Tier(attempt.root).trash(shards[0])
    left = len(list((attempt.root / "trash").iterdir()))
    attempt.happened[attempt.variant] += left
    with Child(lives) as bystander:
        bystander.stage.wait_for("lives", 30)
        release()
        deadline = time.monotonic() + _SECONDS
        while list((attempt.root / "trash").iterdir()) and time.monotonic() < deadline:
            time.sleep(0.02)
        left = len(list((attempt.root / "trash").iterdir()))
    attempt.check("T", not left, f"{left} directories were left in the trash")
    attempt.check_next_start(data)


def many_held(attempt: Attempt) -> None:
    """Fills beside thousands of held shards look at none of them, whichever process begins."""
    data = attempt.borrow(attempt.seed, spawn=True)
    held = _HELD // 10 if attempt.short else _HELD
    tier = Tier(attempt.root, 1 << 34)
    _hold(tier, held)
    read_in_child(Reading(attempt.root, data.shards[:1], 1 << 34))  # which may have to count them once

    def work(stage: Stage) -> Any:
        looked_at, measure = 0, Directory._held

        def counted(self: Directory, kind: str, entry: Any) -> Any:
            nonlocal looked_at
            looked_at += kind == "shards"
            return measure(self, kind, entry)

        Directory._held = counted  # type: ignore[method-assign]
        return [read_in_child(Reading(attempt.root, data.shards[1:], 1 << 34)), looked_at]

    with Child(work) as child:
        result, looked_at = child.finish(120)
    attempt.happened["held shards"] += held
    attempt.check("L", looked_at == 0, f"{looked_at} looks at held shards in {len(data.shards) - 1} fills")
    attempt.check_no_error(result["error"])
    wrong = data.differences({**result["seen"], data.shards[0].digest: data.samples[data.shards[0].digest]})
    attempt.check_all(wrong)
    attempt.check_note(attempt.root)


def _hold(tier: Tier, count: int) -> None:
    """Shards that nobody reads."""
    for number in range(count):
        path = tier.published(f"{number:032x}")
        path.mkdir()
        with WrittenIndex(path, {"url": f"http://elsewhere.invalid/{number}.tar"}) as index:
            index.finish(size=1024)
        (path / "data").write_bytes(bytes(1024))


def _needs_root() -> str:
    return "" if os.geteuid() == 0 else "a link of another user needs root"


ROWS = [
    Row(
        29,
        "link planted",
        "another user's link where a cache, the spare or an answer of `auto` is looked for",
        "BE",
        "Nothing is written where another's link leads; the error names the link",
        planted,
        count=60,
        variants=("the cache", "above the cache", "the spare", "the answer of auto"),
        needs=_needs_root,
    ),
    Row(
        31,
        "index larger than the tier",
        "names of up to 600 KB in the index, in a tier that is smaller than all of them",
        "NK",
        "Room is made for an index before it is written: the limit holds, and all samples come",
        long_names,
        count=30,
        variants=("just allowed", "too long"),
    ),
    Row(
        32,
        "forks beside filling threads",
        "a process that fills and reads in threads forks 150 children",
        "NDBTL",
        "A child has none of the tier's locks and of its shards' files, and all files that are others'",
        forks,
        count=20,
        short=1,
    ),
    Row(
        36,
        "killed while deleting",
        "SIGKILL between a rename into the trash and its end; what is taken away is read meanwhile",
        "T",
        "A process that lives clears the trash, without a new start",
        trash,
        count=60,
        variants=("killed", "read"),
    ),
    Row(
        42,
        "many shards held",
        "fills beside 1,000 held shards, by a process that has looked at none",
        "NDBKL",
        "What a fill costs doesn't depend on how many shards are held",
        many_held,
        count=10,
        short=1,
    ),
]
