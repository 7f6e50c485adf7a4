"""Shards of one seed behind a server, and what is in them: the truth that every attempt is held to."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from streamload.cache.shard import Shard, shard_of
from streamload.metrics import Counters
from streamload.origins.origin import Origin
from streamload.shards.index import IndexReader
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, read_oracle, write_shards

Samples = list[list[str]]
"""Of each sample, in order: its key and a digest of all of its members."""

OpenOrigin = Callable[[Shard, threading.Event, Counters], Origin]
"""As `open_origin` of `Reading`."""

SHARDS = 6
SAMPLES = 24


class Truth:
    """Shards and what is in them.

    Args:
        paths: their files.
        shards: the same as they are read, in the same order.
        open_origin: opens one of them, where its URL doesn't say all.
    """

    def __init__(self, paths: list[Path], shards: list[Shard], open_origin: OpenOrigin | None = None):
        self.paths = paths
        self.shards = shards
        self.open_origin = open_origin
        self.content = {shard.digest: path.read_bytes() for shard, path in zip(shards, paths, strict=True)}
        self.samples = {shard.digest: samples_of(path) for shard, path in zip(shards, paths, strict=True)}

    @property
    def total_bytes(self) -> int:
        return sum(map(len, self.content.values()))

    @property
    def largest_bytes(self) -> int:
        return max(map(len, self.content.values()))

    def differences(self, seen: dict[str, Samples]) -> list[tuple[str, str]]:
        """How what was read differs from what is there, by letter."""
        wrong = []
        for shard in self.shards:
            wrong += differences(shard, self.samples[shard.digest], seen.get(shard.digest, []))
        return wrong

    def published_differences(self, root: Path) -> list[tuple[str, str]]:
        """What is wrong with the published shards of a tier, read offline by their bytes."""
        wrong = []
        for path in sorted((root / "shards").iterdir()):
            try:
                content = (path / "data").read_bytes()
                with IndexReader(path) as index:
                    entries = [index.entry(number).key for number in range(index.count)]
                    complete = index.is_complete
            except FileNotFoundError:
                if path.exists():
                    wrong.append(("C", f"{path.name} lacks a file"))
                continue  # it was being evicted
            if content != self.content.get(path.name):
                wrong.append(("C", f"{path.name} was published with other bytes than the origin's"))
            if not complete or entries != [key for key, _ in self.samples[path.name]]:
                wrong.append(("C", f"{path.name} was published with {len(entries)} entries"))
        return wrong


class Data(Truth):
    """Shards and their server; made once for many attempts, read-only.

    Args:
        place: where the shards are written.
        spawn: the server in a process of its own, so that forked readers share nothing with it.
        server: options of the server.
    """

    def __init__(self, place: Path, seed: int, *, spawn: bool, counts: Any = None, **server: Any):
        self.place = place
        options = ShardOptions(padding_bytes=(2000, 5000))
        paths = write_shards(place, counts or [SAMPLES] * SHARDS, seed=seed, options=options)
        self.server: Any = ShardServer.spawn(place, **server) if spawn else ShardServer(place, **server)
        super().__init__(paths, [shard_of(f"{self.server.url}/{path.name}", None) for path in paths])

    @property
    def urls(self) -> list[str]:
        return [shard.url for shard in self.shards]

    def room_bytes(self, shards: float) -> int:
        """A limit in which so many shards find room, with what is reserved beside their bytes."""
        return int(shards * (self.largest_bytes * 9 / 8 + (96 << 10)))

    def close_server(self) -> None:
        self.server.close()

    def close(self) -> None:
        self.server.close()
        shutil.rmtree(self.place)


def differences(shard: Shard, expected: Samples, got: Samples) -> list[tuple[str, str]]:
    """N, D and B of one shard."""
    if got == expected:
        return []
    name = shard.name.rpartition("/")[2]
    keys, wanted = [key for key, _ in got], [key for key, _ in expected]
    wrong = []
    if missing := set(wanted) - set(keys):
        wrong.append(("N", f"{name}: {len(missing)} of {len(wanted)} samples are missing"))
    if len(keys) > len(set(keys)):
        wrong.append(("D", f"{name}: {len(keys) - len(set(keys))} samples came twice"))
    if other := [sample for sample in got if sample not in expected]:
        wrong.append(("B", f"{name}: {len(other)} samples aren't the origin's, the first is {other[0][0]}"))
    return wrong or [("D", f"{name}: samples came in another order")]


def samples_of(path: Path) -> Samples:
    """The samples of a tar, by tarfile."""
    return [[key, digest_of(members)] for key, members in read_oracle(path)]


def digest_of(members: dict[str, bytes]) -> str:
    return xxh3_64_hexdigest(
        b"\0".join(part for ext in sorted(members) for part in (ext.encode(), members[ext]))
    )
