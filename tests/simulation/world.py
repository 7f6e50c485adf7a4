"""The shards of a simulation: their bytes, an origin that misbehaves, and what a reader has to get."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from streamload.cache.shard import Shard
from streamload.errors import OriginCut, OriginNotFound, OriginStopped, OriginTimeout, OriginUnavailable
from streamload.origins.origin import Origin, Stream, Version
from streamload.origins.protocol import same_version

from .engine import Engine, Killed, Process

Sample = tuple[str, dict[str, bytes]]
KINDS = ("whole", "whole", "whole", "unmarked", "cut", "short", "damaged", "missing")
"""What a shard may be: `cut` ends within a member and nobody knows its size, `short` is shorter than said."""
_END_MARKER_BYTES = 1024


@dataclass
class Content:
    """One version of a shard at its origin."""

    data: bytes
    samples: list[Sample]
    version: Version

    def holds(self, number: int, key: str, members: Mapping[str, memoryview]) -> bool:
        """Whether a sample that was read is this version's."""
        read = key, {extension: bytes(data) for extension, data in members.items()}
        return number < len(self.samples) and read == self.samples[number]


@dataclass
class Truth:
    """One shard as it is, whatever anybody reads of it."""

    shard: Shard
    kind: str
    contents: list[Content]
    """Its versions, the last from `changes_at` on."""
    changes_at: float = float("inf")
    dies_at: float = float("inf")
    """At which byte its first filler is killed; with that it changes."""
    filling: list[Process] = field(default_factory=list)
    """The processes that transfer it now."""

    def at(self, now: float) -> Content:
        return self.contents[-1 if now >= self.changes_at else 0]

    @property
    def changes(self) -> bool:
        return len(self.contents) > 1

    @property
    def status(self) -> str:
        """How its index ends when nothing is wrong on this side."""
        named = {
            "cut": "ShardCut",
            "short": "ShardCut",
            "damaged": "ShardFormatError",
            "missing": "OriginNotFound",
        }
        return named.get(self.kind, "complete")


class World:
    """All shards, and their origin.

    Args:
        engine: gives time and chance.
        count: how many shards.
    """

    def __init__(self, engine: Engine, count: int):
        self.engine = engine
        self.requests = 0
        rng = engine.rng
        self._troubles = rng.choice([0, 0, 2, 6])
        self._chunk_bytes = rng.choice([(100, 700), (500, 3000), (20_000, 20_000)])
        payload_bytes = 1800
        if rng.random() < 0.2:  # of a size for which the spare room of a reservation doesn't make up
            payload_bytes, self._chunk_bytes = 40_000, (5_000, 30_000)
        self._pause_seconds = rng.choice([0.0, 0.005, 0.05])
        kinds = ["whole", *rng.choices(KINDS, k=count - 1)]
        while (
            sum(kind in ("missing", "damaged") for kind in kinds) > 2
        ):  # three in a row look like no data at all
            kinds = ["whole", *rng.choices(KINDS, k=count - 1)]
        rng.shuffle(kinds)
        self._may_change = sum(kind in ("missing", "damaged") for kind in kinds) < 2
        self.truths = [self._truth(number, kind, payload_bytes) for number, kind in enumerate(kinds)]
        self.shards = [truth.shard for truth in self.truths]
        self.of = {truth.shard.digest: truth for truth in self.truths}

    @property
    def largest_bytes(self) -> int:
        """The size of the largest shard."""
        return max(len(content.data) for truth in self.truths for content in truth.contents)

    def _truth(self, number: int, kind: str, payload_bytes: int) -> Truth:
        rng = self.engine.rng
        url = f"sim://origin/{number:02d}.tar"
        shard = Shard(url, url, f"{rng.getrandbits(128):032x}")
        knows_size, knows_version = rng.random() < 0.7, rng.random() < 0.8
        truth = Truth(shard, kind, [])
        versions = 2 if kind == "whole" and knows_version and self._may_change and rng.random() < 0.4 else 1
        if versions == 2:
            self._may_change = False
            truth.changes_at = self.engine.now + rng.uniform(0.0, 1.5)
        for version in range(versions):
            samples = _samples(rng, number, version, payload_bytes)
            data, kept = _broken(rng, kind, *_tar(samples), samples)
            size: int | None = len(data)
            if kind == "short":
                size = len(data) + _END_MARKER_BYTES
            elif kind == "cut" or not (knows_size or kind == "unmarked"):
                size = None
            etag = f'"{number}-{version}"' if knows_version else None
            truth.contents.append(Content(data, kept, Version(size, etag)))
        if versions == 2 and rng.random() < 0.5:
            truth.dies_at = rng.randrange(len(truth.contents[0].data))
        return truth

    def trouble(self, chance: float) -> bool:
        """Whether the origin misbehaves now; it has only so much of it."""
        if self._troubles and self.engine.rng.random() < chance:
            self._troubles -= 1
            return True
        return False

    def pause(self, stop: Any, name: str, seconds: float | None = None) -> None:
        """Keep somebody waiting, as long as nobody stops it."""
        if stop.wait(self.engine.rng.uniform(0.0, self._pause_seconds) if seconds is None else seconds):
            raise OriginStopped(f"{name}: reading was stopped")

    def chunk_bytes(self) -> int:
        return self.engine.rng.randint(*self._chunk_bytes)


class SimulatedOrigin(Origin):
    """Where one shard lives, as one process asks for it.

    Args:
        world: what is there.
        truth: of the shard.
        process: who asks; None where it asks for single samples.
        stop: ends waits.
    """

    def __init__(self, world: World, truth: Truth, process: Process | None, stop: Any):
        self.url = truth.shard.url
        self._world, self._truth, self._process, self._stop = world, truth, process, stop

    def open(self, start: int = 0, expected: Version | None = None) -> Stream:
        world, truth = self._world, self._truth
        world.pause(self._stop, self.url)
        world.requests += 1
        if world.trouble(0.1):
            raise OriginUnavailable(f"{self.url}: come back later")
        if truth.kind == "missing":
            raise OriginNotFound(f"{self.url}: no such shard")
        content = truth.at(world.engine.now)
        same_version(self.url, expected, content.version)
        return _SimulatedStream(world, truth, content, start, self._process, self._stop)

    def version(self) -> Version:
        return self._truth.at(self._world.engine.now).version


class _SimulatedStream:
    def __init__(
        self, world: World, truth: Truth, content: Content, start: int, process: Process | None, stop: Any
    ):
        self.version = content.version
        self._world, self._truth, self._content = world, truth, content
        self._position, self._process, self._stop = start, process, stop
        if process is not None:
            for other in truth.filling:
                if other.is_alive and other is not process and not (other.was_stopped or process.was_stopped):
                    world.engine.fail(
                        f"{process.name} asks for {truth.shard.url} while {other.name} fills it"
                    )
            truth.filling.append(process)

    def chunks(self) -> Iterator[bytes]:
        world, url = self._world, self._truth.shard.url
        while self._position < len(self._content.data):
            world.pause(self._stop, url)
            if self._process is not None and self._position >= self._truth.dies_at:
                self._truth.changes_at, self._truth.dies_at = world.engine.now, float("inf")
                world.engine.kill(self._process)
                raise Killed
            if world.trouble(0.05):
                raise OriginCut(f"{url}: the connection broke at byte {self._position}")
            if world.trouble(0.03):
                world.pause(self._stop, url, world.engine.rng.uniform(0.5, 3.0))
                raise OriginTimeout(f"{url}: nothing came")
            chunk = self._content.data[self._position : self._position + world.chunk_bytes()]
            self._position += len(chunk)
            yield chunk

    def close(self) -> None:
        if self._process is not None:
            self._truth.filling.remove(self._process)
            self._process = None


def _samples(rng: random.Random, shard: int, version: int, payload_bytes: int) -> list[Sample]:
    samples = []
    for number in range(rng.randint(3, 6)):
        members = {"txt": f"shard {shard} version {version} sample {number}".encode()}
        if rng.random() < 0.7:
            members["bin"] = rng.randbytes(rng.randint(1, payload_bytes))
        if rng.random() < 0.3:
            members["json"] = b"{}"
        samples.append((f"{shard:02d}{number:04d}", members))
    return samples


def _tar(samples: list[Sample]) -> tuple[bytes, list[int]]:
    """A tar, and where its samples begin; the end of the last member comes last."""
    file = io.BytesIO()
    starts = []
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for key, members in samples:
            starts.append(tar.offset)
            for extension, payload in members.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(payload)
                tar.addfile(info, io.BytesIO(payload))
        starts.append(tar.offset)
    return file.getvalue()[: starts[-1] + _END_MARKER_BYTES], starts


def _broken(
    rng: random.Random, kind: str, data: bytes, starts: list[int], samples: list[Sample]
) -> tuple[bytes, list[Sample]]:
    """A shard's bytes with what is wrong with them, and the samples that can be had of it."""
    at = rng.randrange(1, len(samples))
    match kind:
        case "unmarked" | "short":
            return data[: starts[-1]], samples
        case "cut":  # within the last member of a sample: the one before it is whole
            return data[: starts[at + 1] - rng.choice([512, 100])], samples[:at]
        case "damaged":  # a header: the sample before it can't be known to be whole
            return data[: starts[at]] + b"\xff" * 512 + data[starts[at] + 512 :], samples[: at - 1]
        case "missing":
            return b"", []
        case _:
            return data, samples
