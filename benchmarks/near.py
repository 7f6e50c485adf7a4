"""Contenders with the bytes near: what warm.py, scaling.py and consumer.py do alike.

Every shard lies in local files. An epoch goes before the measured ones: in it those that have a cache fill it
from a local server; the others are given the paths, or what was made of the shards in their own format.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine, turns
from benchmarks.contenders.job import TURN, Job
from benchmarks.turns import Contender, Interpreters, Row
from streamload.testing.server import ShardServer

SHARDS = 8
SAMPLES_PER_SHARD = 384  # with these every worker has the same share: nobody has to read a shard twice
QUICK_SHARDS, QUICK_SAMPLES_PER_SHARD = 2, 64


@dataclass(frozen=True)
class Near:
    """Shards in local files, a server of them, and the contenders that read them.

    Attributes:
        contenders: those that were asked for and are installed.
        conversions: of those that read a format of their own, what making it took.
    """

    contenders: Sequence[Contender]
    places: Interpreters
    directory: Path
    url: str
    shards: int
    samples: int
    total_bytes: int
    conversions: Mapping[str, Row]

    @property
    def tokenizer(self) -> str:
        """open_clip's, for all, where it is installed."""
        return "open_clip" if self.places.open_clip is not None else "words"

    def run(
        self,
        contender: Contender,
        round_: int,
        label: str | None = None,
        notes: Sequence[str] = (),
        **more: Any,
    ) -> Row:
        """Measure the second epoch of a contender; with some of what it notes; `more` is for its job."""
        load, job = machine.load(), self._job(contender, round_, epochs=2, **more)
        ran = turns.run(contender, job, self.places.of(contender))
        return {"label": label or contender.name, **_row(contender, round_, ran, load, notes)}

    def run_in_turn(self, contenders: Sequence[Contender], round_: int, epochs: int) -> list[Row]:
        """Measure so many epochs of each, taken in turn: a row for the last of each turn."""
        load = machine.load()
        jobs = [
            (one, self._job(one, round_, epochs=TURN * epochs), self.places.of(one)) for one in contenders
        ]
        return [
            {"label": one.name, "turn": turn, **_row(one, round_, ran, load, epoch=TURN * turn + TURN - 1)}
            for one, ran in zip(contenders, turns.run_in_turn(jobs), strict=True)
            for turn in range(epochs)
        ]

    def _job(self, contender: Contender, round_: int, **more: Any) -> Job:
        base = self.url if contender.reads == "url" else str(self.directory / "shards")
        cache = self.directory / f"cache-{contender.adapter}"
        cache.mkdir(exist_ok=True)
        told = {
            "urls": contender.data(base, self.shards),
            "samples": self.samples,
            "seed": round_,
            "tokenizer": self.tokenizer,
            "cache_dir": str(cache),
            "packages": self.places.packages(),
            **contender.job,
            **more,
        }
        return Job(**told)

    def content(self, given: argparse.Namespace, rows: list[Row], **more: Any) -> Row:
        """What the result holds of these rows; `more` are settings."""
        told = settings(self.samples, self.shards, self.total_bytes)
        told |= {"tokenizer": self.tokenizer, **more}
        return {**turns.content(given, told, rows), "conversions": self.conversions}


def settings(samples: int, shards: int, total_bytes: int) -> Row:
    """What a result says of the work, where nothing else is asked of a Job."""
    return {
        "samples": samples,
        "shards": shards,
        "bytes": total_bytes,
        "batch_size": Job.batch_size,
        "workers": Job.workers,
        "tokenizer": Job.tokenizer,
    }


def _row(
    contender: Contender,
    round_: int,
    ran: turns.Ran,
    load: float,
    notes: Sequence[str] = (),
    epoch: int = -1,
) -> Row:
    """What an epoch took, its start included; `load` is the machine's before."""
    one = ran.epochs[epoch]
    return {
        "contender": contender.name,
        "round": round_,
        "load_before": load,
        "images": one.images,
        "seconds": one.ended - one.began,
        "images_per_second": one.images / (one.ended - one.began),
        "cpu_us_per_image": one.cpu_seconds / one.images * 1e6,
        "consumer_us_per_image": one.consumer_cpu_seconds / one.images * 1e6,
        "first_batch_seconds": one.first_batch - one.began,
        "waited_share": one.waited_seconds / (one.ended - one.first_batch),
        "changed_batches": sum(each.changed_batches for each in ran.epochs),
        "channel_mean": one.channel_mean,
        "limits": ran.result.limits,
        **{name: ran.result.notes[name] for name in notes},
        "versions": ran.result.versions,
    }


@contextmanager
def ready(
    given: argparse.Namespace, all_of_them: Sequence[Contender], shards: int = SHARDS
) -> Iterator[Near]:
    """Write so many shards, or a few to be quick, serve them, and convert them for those that need it."""
    per_shard = SAMPLES_PER_SHARD
    if given.quick:
        shards, per_shard = QUICK_SHARDS, QUICK_SAMPLES_PER_SHARD
    places, contenders = turns.interpreters(given), turns.chosen(given, all_of_them)
    with (
        turns.photographs(shards * per_shard, per_shard) as (directory, total_bytes),
        ShardServer.spawn(directory / "shards") as server,
    ):
        conversions = converted(contenders, places, directory / "shards", shards)
        samples = shards * per_shard
        yield Near(contenders, places, directory, server.url, shards, samples, total_bytes, conversions)


def converted(
    contenders: Sequence[Contender], places: Interpreters, folder: Path, shards: int
) -> dict[str, Row]:
    """Convert shards for those that read a format of their own; by name, the seconds and bytes of each."""
    done = {}
    for contender in contenders:
        if contender.reads != "converted":
            continue
        job = Job(
            turns.pattern(str(folder), shards),
            samples=0,
            epochs=0,
            seed=0,
            convert_to=contender.data(str(folder), 0),
        )
        done[contender.name] = turns.run(contender, job, places.of(contender)).result.notes
        print(f"converted for {contender.name}", file=sys.stderr, flush=True)
    return done
