"""Random trainings and evaluations in trouble, held to the one way in which each must end.

Shards are missing, cut or compressed, images and captions damaged, servers misbehave for a while, and a
process may have few files open. A twin of the data without damaged samples tells which sample is due at each
place; from the damage and the limits follows whether the pass ends normally, or by which error, and with
which counts. Each rank is a process of its own, so a run that just stops is found, too.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import itertools
import logging
import os
import random
import re
import resource
import tarfile
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed
from PIL import Image

from streamload import Workers, limits
from streamload.errors import OriginError, ShardError, StreamloadError
from streamload.testing.server import Fault, ShardServer
from tests.fuzzing.trainings import Layout
from tests.support import flat
from tests.support.kills import Child

RUN_SECONDS = 240.0
"""A run that takes longer has stopped."""
FEW_FILES = 54
"""With so few a loader may be refused, if the error names the limit; with more it reads everything."""
_LIMITS = [0.0, 0.05, 0.1, 0.29, 0.5, 1.0, None]
_LINE = re.compile(r"at the end of epoch \d+, (?:at least )?(\d+) of (\d+) .*samples .*?, (\d+) of (\d+) ")
_LOST = {kind.__name__ for base in (OriginError, ShardError) for kind in (base, *base.__subclasses__())}
_BAD = {"CaptionError", "DecodeError"}
"""Errors about one shard and one sample, with on_error="raise"."""


@dataclass(frozen=True)
class Shard:
    """A shard, and what is wrong with it.

    Attributes:
        samples: of each, "sound", or what is damaged: "image", "caption"; "captionless": it has none.
        is_missing: the shard isn't there.
        cut_in: the number of the sample within which the file ends.
        faults: of its server, that pass.
    """

    samples: tuple[str, ...]
    is_missing: bool
    cut_in: int | None
    faults: tuple[Fault, ...]

    @property
    def is_lost(self) -> bool:
        """Whether a run has to give it up."""
        return self.is_missing or self.cut_in is not None

    def there(self) -> list[tuple[int, str]]:
        """The samples that can be read and have a caption, with their numbers."""
        whole = 0 if self.is_missing else len(self.samples) if self.cut_in is None else self.cut_in
        return [pair for pair in enumerate(self.samples[:whole]) if pair[1] != "captionless"]


@dataclass(frozen=True)
class Case:
    """A damaged data set, and a run on it.

    Attributes:
        batch: samples of a global batch.
        files: how many more files a process may open than it has at its start; None: as usual.
        stop_at: after how many steps a state is saved, and the run goes on from it, a training in the second
            layout; -1: it isn't interrupted.
        compressed: the numbers of the shards that are `.tar.gz`.
    """

    shards: tuple[Shard, ...]
    over_http: bool
    train: bool
    shuffle: int
    seed: int
    batch: int
    layouts: tuple[Layout, Layout]
    files: int | None
    max_bad_samples: float | None
    max_bad_shards: float | None
    on_error: str
    stop_at: int
    compressed: frozenset[int]

    @property
    def names(self) -> list[str]:
        """The shards' file names."""
        return [f"{n:02d}.tar{'.gz' if n in self.compressed else ''}" for n in range(len(self.shards))]


def make(rng: random.Random) -> Case:
    """A case by chance."""
    over_http = rng.random() < 0.5
    damage, loss = rng.choice([0.0, 0.02, 0.1, 0.3, 0.6, 1.0]), rng.choice([0.0, 0.1, 0.3, 0.3, 0.9])
    train = rng.random() < 0.6
    case = Case(
        shards=tuple(_make_shard(rng, over_http, damage, loss) for _ in range(rng.randint(1, 9))),
        over_http=over_http,
        train=train,
        shuffle=rng.choice([0, 1, 20, 200]),
        seed=rng.randint(0, 99),
        batch=rng.choice([2, 4, 8]),
        layouts=(_make_layout(rng), _make_layout(rng)),
        files=rng.choice([None, FEW_FILES, 86, 118, 246]),
        max_bad_samples=rng.choice(_LIMITS),
        max_bad_shards=rng.choice(_LIMITS),
        on_error=rng.choice(["skip"] * 9 + ["raise"]),
        stop_at=rng.choice([-1, rng.randint(0, 20)]),
        compressed=frozenset(),
    )
    share = rng.choice([0.0, 0.0, 0.3, 1.0])
    return replace(case, compressed=frozenset(n for n in range(len(case.shards)) if rng.random() < share))


def _make_layout(rng: random.Random) -> Layout:
    return Layout(rng.choice([1, 1, 1, 2]), rng.choice([0, 0, 0, 1, 2, 3]))


def _make_shard(rng: random.Random, over_http: bool, damage: float, loss: float) -> Shard:
    count = rng.choice([1, rng.randint(2, 10), rng.randint(5, 20)])
    kinds = ["image", "image", "image", "caption", "caption", "captionless"]
    samples = tuple(rng.choice(kinds) if rng.random() < damage else "sound" for _ in range(count))
    is_lost = rng.random() < loss
    is_missing = is_lost and rng.random() < 0.7
    return Shard(
        samples=samples,
        is_missing=is_missing,
        cut_in=rng.randrange(count) if is_lost and not is_missing else None,
        faults=_make_faults(rng) if over_http and not is_missing and rng.random() < 0.5 else (),
    )


def _make_faults(rng: random.Random) -> tuple[Fault, ...]:
    cut = rng.randint(1, 20_000)
    return rng.choice(
        [
            (Fault(first=rng.randint(1, 3), status=rng.choice([429, 500, 503])),),
            (Fault(first=rng.randint(1, 2), cut_after_bytes=cut, reset=rng.random() < 0.5),),
            (Fault(first=1, cut_after_bytes=cut, headers={"ETag": '"a"'}), Fault(headers={"ETag": '"b"'})),
            (Fault(first=1, cut_after_bytes=cut, ignore_range=True), Fault(ignore_range=True)),
            (Fault(first=1, cut_after_bytes=cut), Fault(headers={"ETag": "", "Last-Modified": ""})),
            (Fault(informational=rng.choice([(103,), (102, 103)])),),
            (Fault(framing="chunked"),),
            (Fault(bytes_per_second=rng.choice([20_000, 200_000])),),
        ]
    )


class End(NamedTuple):
    """How one rank's run has ended.

    Attributes:
        batches: of each its keys.
        kind: the type of the error; "": it ended normally.
        text: of the error.
        lines: the log's about the ends of epochs.
        state: after the last batch, as JSON.
    """

    batches: list[list[str]]
    kind: str
    text: str
    lines: list[str]
    state: Any


class Counts(NamedTuple):
    """What a pass has to come to."""

    bad: int
    samples: int
    lost: int
    shards: int


def check(case: Case, rng: random.Random) -> str:
    """Run it, and compare its batches, its end and its counts with what follows from the damage."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        for folder in ("sound", "damaged"):
            _write(case, place / folder)
        with ShardServer(place) as server:
            run = functools.partial(_run, case, place, server)
            due = _all_there(case)
            if case.train:
                due = _due_in_training(case, place, server)
            steps = [due[first : first + case.batch] for first in range(0, len(due), case.batch)]
            if not case.train:  # a batch without a sound sample isn't yielded
                steps = [keys for keys in steps if not _damaged(case).issuperset(keys)]
            stop_at = min(case.stop_at, len(steps) - 1)
            if stop_at < 0 or (not case.train and case.layouts[0].ranks > 1):
                return _check_end(case, due, [], run(case.layouts[0]))
            first = run(case.layouts[0], stop_at=stop_at)
            if any(end.kind for end in first):
                return _check_end(case, due, [], first)
            states = [end.state for end in first]
            second = run(case.layouts[1 if case.train else 0], states=states)
            return _check_end(case, due, first if stop_at else [], second)


def _all_there(case: Case) -> list[str]:
    """The keys of an evaluation, damaged ones included."""
    return [_key(shard, number) for shard, own in enumerate(case.shards) for number, _ in own.there()]


def _damaged(case: Case) -> set[str]:
    """The keys of the samples that are there and can't be used."""
    return {
        _key(shard, number)
        for shard, own in enumerate(case.shards)
        for number, kind in own.there()
        if kind != "sound"
    }


def _due_in_training(case: Case, place: Path, server: ShardServer) -> list[str]:
    """The keys of a pass by the twin, which has the same samples at the same places, all of them sound."""
    plain = replace(case, max_bad_samples=1.0, max_bad_shards=None, on_error="skip", files=None)
    (end,) = _run(plain, place, server, Layout(1, 0), folder="sound")
    there, due = _all_there(case), [key for batch in end.batches for key in batch]
    assert len(due) == len(set(due)) == len(there) // case.batch * case.batch, (
        f"a pass isn't each once: {end}"
    )
    assert set(due) <= set(there)
    assert bool(end.kind) == (not due), f"the twin ended with {end.kind}: {end.text}"
    return due


def _check_end(case: Case, due: list[str], before: list[End], ends: list[End]) -> str:
    kinds = {end.kind for end in ends}
    said = "; ".join(f"{end.kind}: {end.text}" for end in ends)
    if "LimitReached" in kinds:
        assert case.files == FEW_FILES, said
        assert "ulimit -n" in said, said
        return "limit"
    damaged = _damaged(case)
    is_whole = kinds == {""}
    if case.train:
        _check_training(due, damaged, _global(before) + _global(ends), is_whole)
    else:
        _check_evaluation(due, damaged, before, ends, is_whole)
    counts = Counts(
        sum(key in damaged for key in due),
        len(due),
        sum(shard.is_lost for shard in case.shards),
        len(case.shards),
    )
    allowed = _allowed(case, counts, is_resumed=bool(before))
    assert kinds <= allowed, f"ended with {sorted(kinds)}, not {sorted(allowed)}, of {counts}: {said}"
    is_alike = len(kinds - {"RankFailed"}) == 1 or case.on_error == "raise"
    if case.train and len(_all_there(case)) < case.batch:  # a rank gets a bad one, another none at all
        is_alike |= kinds <= {"TooManyBadSamples", "DataError", "RankFailed"}
    assert is_alike, f"ranks ended unlike one another: {said}"
    for line in [line for end in ends for line in [*end.lines, end.text]]:
        if match := _LINE.search(line):
            found = Counts(*(int(digits.replace(",", "")) for digits in match.groups()))
            least = Counts(0, 0, 0, 0) if before else counts
            is_right = all(map(int.__le__, least, found)) and all(map(int.__le__, found, counts))
            assert is_right, f"counted {found} instead of {counts}"
    if is_whole and not before and (counts.bad or counts.lost):
        assert sum(len(end.lines) for end in ends) in ((1,) if case.train else (1, len(ends)))
    return min(kinds - {"RankFailed"}) or "normal"


def _check_training(due: list[str], damaged: set[str], taken: list[str], is_whole: bool) -> None:
    """Each place has its sample, or another one that is sound where its own is damaged."""
    assert len(taken) == len(due) if is_whole else len(taken) <= len(due), f"{len(taken)} of {len(due)}"
    for place, (key, own) in enumerate(zip(taken, due, strict=False)):
        assert key == own or own in damaged, f"{key} at place {place} of {own}"
    assert not damaged & set(taken), "a damaged sample was used"


def _check_evaluation(
    due: list[str], damaged: set[str], before: list[End], ends: list[End], is_whole: bool
) -> None:
    """Each sound sample comes once, in the order of the list."""
    sound = [key for key in due if key not in damaged]
    taken = []
    for parts in itertools.zip_longest(ends, before):
        keys = [
            key for part in reversed(parts) if part is not None for batch in part.batches for key in batch
        ]
        assert keys == [key for key in sound if key in set(keys)], (
            "an evaluation isn't in the order of its list"
        )
        taken += keys
    assert len(taken) == len(set(taken)), "a sample of an evaluation comes twice"
    assert not is_whole or len(taken) == len(sound), f"{len(taken)} of {len(sound)} samples"


def _global(ends: list[End]) -> list[str]:
    """The keys of the ranks' batches, step by step."""
    return [
        key for step in zip(*(end.batches for end in ends), strict=False) for keys in step for key in keys
    ]


def _exceeds(count: int, total: int, limit: float | None) -> bool:
    return limit is not None and count > Fraction(str(limit)) * total and (count >= 3 or 2 * count >= total)


def _allowed(case: Case, counts: Counts, is_resumed: bool) -> set[str]:
    """The errors by which a run may end; "": normally."""
    is_share_lost = _exceeds(counts.lost, counts.shards, case.max_bad_shards)
    kinds = set()
    if _exceeds(counts.bad, counts.samples, case.max_bad_samples):
        kinds = {"TooManyBadSamples"}
    if is_share_lost and (counts.lost >= 3 or not kinds):  # three are compared as soon as they are lost
        kinds |= {"TooManyBadShards"}
    there = [kind for shard in case.shards for _, kind in shard.there()]
    damaged = len(there) - there.count("sound")
    if case.on_error == "raise" and (damaged or counts.lost):
        kinds = (_BAD if damaged else set()) | (_LOST if counts.lost else set())
    if not there:
        kinds |= {"NoValidSamples"}
    elif case.train and len(there) < case.batch:
        kinds = (kinds - {"TooManyBadSamples"}) | {"DataError"}
    elif damaged == len(there):
        kinds |= {"TooManyBadSamples"}
    if case.train and case.on_error == "skip" and 2 * damaged > len(there):
        kinds = (kinds or {""}) | {"TooManyBadSamples"}  # none of those that may replace a sample was sound
    if is_resumed and is_share_lost:
        kinds |= {""}  # shards that were lost before the state and after it count as the larger number
    if kinds and max(layout.ranks for layout in case.layouts) > 1:
        kinds |= {"RankFailed"}
    return kinds or {""}


def _run(
    case: Case,
    place: Path,
    server: ShardServer,
    layout: Layout,
    *,
    folder: str = "damaged",
    states: Sequence[Any] | None = None,
    stop_at: int | None = None,
) -> list[End]:
    """A run of all ranks, each in a process of its own, with an empty cache."""
    for name, shard in zip(case.names, case.shards, strict=True):
        server.misbehave(f"{folder}/{name}", *(shard.faults if folder == "damaged" else ()))
    root = f"{server.url}/{folder}" if case.over_http else str(place / folder)
    urls = [f"{root}/{name}" for name in case.names]
    with tempfile.TemporaryDirectory(dir=place) as own:
        children = [
            Child(
                functools.partial(_rank, case, urls, Path(own), layout, rank, states, stop_at),
                limit_seconds=RUN_SECONDS,
            )
            for rank in range(layout.ranks)
        ]
        with contextlib.ExitStack() as stack:
            for child in children:
                stack.enter_context(child)
            return [End(*child.finish(RUN_SECONDS)) for child in children]


def _rank(
    case: Case,
    urls: list[str],
    place: Path,
    layout: Layout,
    rank: int,
    states: Sequence[Any] | None,
    stop_at: int | None,
    stage: object,
) -> End:
    """In a process of its own: iterate one rank's loader once."""
    warnings.simplefilter("ignore")  # of more workers than processors
    limits.PATIENCE_SECONDS = 2.0
    os.environ["STREAMLOAD_ORIGIN_WAIT"] = "30"
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("streamload").handlers[:] = [handler]
    logging.getLogger("streamload").propagate = False
    ranks: dict[str, Any] = {}
    if layout.ranks > 1:
        store = f"file://{place}/rendezvous"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=layout.ranks)
        ranks = {"rank": rank, "world_size": layout.ranks}
    if case.files is not None:
        most = max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + case.files
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    batches, state, kind, text = [], None, "", ""
    try:
        with flat.make_loader(
            urls,
            workers=Workers(multiprocessing_context="fork" if layout.workers else None),
            with_keys=True,
            batch_size=case.batch // layout.ranks,
            num_workers=layout.workers,
            cache_dir=place / f"cache{rank}",
            cache_size="50MB",
            train=case.train,
            seed=case.seed,
            on_error=case.on_error,
            max_bad_samples=case.max_bad_samples,
            max_bad_shards=case.max_bad_shards,
            **({"shuffle": case.shuffle} if case.train else {}),
            **ranks,
        ) as loader:
            if states is not None:
                loader.load_state_dict(states)
            for _, _, origin in itertools.islice(loader, stop_at):
                batches.append(list(origin["__key__"]))
            state = loader.state_dict()
    except StreamloadError as exc:
        kind, text = type(exc).__name__, str(exc)
    if ranks:  # the store is rank 0's
        with contextlib.suppress(RuntimeError):
            torch.distributed.barrier()
    return End(batches, kind, text, [line for line in lines if "at the end of epoch" in line], state)


def _write(case: Case, folder: Path) -> None:
    """The shards; in "sound" no sample is damaged, and each has as many bytes as in "damaged"."""
    folder.mkdir()
    image = _image()
    for number, shard in enumerate(case.shards):
        if shard.is_missing:
            continue
        path, ends = folder / f"{number:02d}.tar", []
        with tarfile.open(path, "w") as tar:
            for sample, kind in enumerate(shard.samples):
                is_damaged = folder.name == "damaged"
                key = _key(number, sample)
                members = {"jpg": image, "txt": key.encode()}
                if kind == "image" and is_damaged:
                    members["jpg"] = b"broken".ljust(len(image))
                if kind == "caption" and is_damaged:
                    members["txt"] = b"\xff" * len(key)
                if kind == "captionless":
                    del members["txt"]
                for extension, data in members.items():
                    info = tarfile.TarInfo(f"{key}.{extension}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
                ends.append(tar.offset - 100)  # within the last member, or within its padding
        if shard.cut_in is not None:
            os.truncate(path, ends[shard.cut_in] - 412)
        if number in case.compressed:
            path.with_suffix(".tar.gz").write_bytes(gzip.compress(path.read_bytes(), 1))
            path.unlink()


@functools.cache
def _image() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG")
    return buffer.getvalue()


def _key(shard: int, number: int) -> str:
    return f"{shard:02d}-{number:03d}"
