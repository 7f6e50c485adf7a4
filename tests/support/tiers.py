"""What the tests of a tier's upkeep share: a tier filled from a real server, and ways to harm it."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from streamload.cache.fill import FillOptions, fill
from streamload.cache.shard import shard_of
from streamload.cache.shard_view import ShardView
from streamload.cache.tier import Tier
from streamload.daemon.warm import warm
from streamload.origins.origin import open_origin
from streamload.shards.index import IndexReader
from streamload.testing.server import ShardServer
from streamload.testing.shards import read_oracle, write_shards

SHARDS, SAMPLES = 4, 12


class Filled:
    """A server of some shards, and a tier that holds them all."""

    def __init__(self, place: Path, query: str = ""):
        self.data = place / "data"
        self.paths = write_shards(self.data, [SAMPLES] * SHARDS, seed=41)
        self.server = ShardServer(self.data)
        self.urls = [f"{self.server.url}/{path.name}{query}" for path in self.paths]
        self.root = place / "tier"
        report = warm(self.urls, cache_dir=self.root, cache_size="1GB")
        assert report.shards_complete == SHARDS
        self.tier = Tier(self.root)
        self.asked = len(self.server.log)

    def close(self) -> None:
        self.server.close()

    def digest(self, number: int) -> str:
        return shard_of(self.urls[number], None).digest

    def shard(self, number: int) -> Path:
        """The directory of a published shard."""
        return self.tier.published(self.digest(number))

    def asked_for(self) -> set[str]:
        """The files that were asked for since the tier was filled."""
        return {request.path for request in self.server.log[self.asked :]}

    def orphan(self, number: int) -> Path:
        """A part of a shard, as a filler leaves it that dies half-way; the shard isn't held any more."""
        self.tier.trash(self.shard(number))
        self.server.stop_after(0.5)
        part = self.tier.claim(self.digest(number))
        assert part is not None
        stop = threading.Event()
        shard = shard_of(self.urls[number], None)

        def open_it() -> object:
            return open_origin(shard.url, stop=stop)

        thread = threading.Thread(
            target=fill, args=(part, shard, open_it), kwargs={"next_use": lambda: 0.0, "stop": stop}
        )
        thread.start()
        view = ShardView(self.tier, shard)
        until(lambda: (view.refresh(), view.count >= SAMPLES // 4)[1])
        view.close()
        stop.set()
        thread.join()
        self.server.go_on()
        self.asked = len(self.server.log)
        (found,) = self.tier.parts(shard.digest)
        return found

    def index_only(self, number: int, *, published: bool = False) -> Path:
        """The index alone of a shard, as it is kept where there is no room for it; `published`: beside it."""
        shard = shard_of(self.urls[number], None)
        aside = self.root / "aside"
        was_published = self.shard(number).exists()
        if was_published:
            self.shard(number).rename(aside)
        part = self.tier.claim(shard.digest)
        assert part is not None
        fill(
            part,
            shard,
            lambda: open_origin(shard.url),
            FillOptions(index_only=True),
            next_use=lambda: 0.0,
            stop=threading.Event(),
        )
        if was_published and published:
            aside.rename(self.shard(number))
        elif was_published:
            shutil.rmtree(aside)
        return self.tier.index_only(shard.digest)

    def is_whole(self, number: int) -> bool:
        """Whether a reader gets from the tier what `tarfile` reads at the origin."""
        view = ShardView(self.tier, shard_of(self.urls[number], None))
        found = []
        for at in range(view.count):
            read = view.read(at)
            assert read is not None
            entry, members = read
            found.append((entry.key, {extension: bytes(data) for extension, data in members.items()}))
        view.close()
        return found == read_oracle(self.paths[number])


def until(holds: Callable[[], object], seconds: float = 60) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def flip(path: Path, at: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 4]))


def payload_start(shard: Path, number: int) -> int:
    """Where a sample's first payload lies in the data."""
    with IndexReader(shard) as index:
        return index.entry(number).start


def swap(one: Path, other: Path) -> None:
    """Two files, or directories, change names."""
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def listing(root: Path) -> dict[str, tuple[int, int, int]]:
    """All that lies below a directory: what a command that only looks leaves as it is.

    Of the lock that there is one: whoever takes it leaves a stamp.
    """
    found = {}
    for path in [root, *root.rglob("*")]:
        status = path.lstat()
        facts = (status.st_ino, status.st_size, status.st_mtime_ns)
        found[str(path)] = facts if path.name != "lock" else (status.st_ino, 0, 0)
    return found


def in_a_child(work: Callable[[], object], *, uid: int) -> None:
    """Run something in a forked child of another user; fails if it does."""
    child = os.fork()
    if not child:
        status = 1
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            work()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
