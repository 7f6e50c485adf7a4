"""Rows 6 and 18: bytes that rot in the tier, and tiers that others have been at."""

import json
import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.data import Data
from tests.faults.oracle import Attempt
from tests.faults.readers import Reading, read_in_child
from tests.faults.rows import Row
from tests.support.kills import Child


def rotten(attempt: Attempt) -> None:
    """A published shard is changed on disk: the next reader finds out and fetches it again."""
    data = attempt.borrow(attempt.seed)
    read_in_child(Reading(attempt.root, data.shards))
    victim, other = attempt.rng.sample(data.shards, 2)
    change, _, file = attempt.variant.partition(" in ")
    here = attempt.root / "shards" / victim.digest
    there = attempt.root / "shards" / other.digest
    content = bytearray((here / (file or "data")).read_bytes())
    match change:
        case "bit flipped":
            at = _in_a_payload(data, victim.digest, attempt) if file == "data" else None
            content[attempt.rng.randrange(len(content)) if at is None else at] ^= 1 << attempt.rng.randrange(
                8
            )
            (here / file).write_bytes(content)
        case "cut":
            os.truncate(here / file, attempt.rng.randrange(len(content) // 2))
        case "two files swapped":
            _swap(here / file, there / file, attempt.place / "aside")
        case "two shards swapped":
            _swap(here, there, attempt.place / "aside")
    attempt.happened[attempt.variant] += 1
    result = read_in_child(Reading(attempt.root, data.shards))
    attempt.check_no_error(result["error"])
    attempt.check_all(data.differences(result["seen"]))
    attempt.check_next_start(data)


def _in_a_payload(data: Data, digest: str, attempt: Attempt) -> int:
    """A byte that belongs to a sample: what is between the members is never read."""
    content = data.content[digest]
    while True:
        at = content.find(b"\xff\xd8\xff", attempt.rng.randrange(len(content)))
        if at >= 0:
            return at + 3 + attempt.rng.randrange(500)


def _swap(one: Path, other: Path, aside: Path) -> None:
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def meddled(attempt: Attempt) -> None:
    """Something that isn't ours lies in the tier, or in its place: it is left alone, and nobody hangs."""
    data = attempt.borrow(attempt.seed, spawn=True)
    read_in_child(Reading(attempt.root, data.shards[:2]))
    outside = attempt.place / "outside"
    outside.mkdir()
    (outside / "precious").write_text("not ours")
    still_there = _meddle(attempt, data, outside)
    before = still_there()
    with Child(
        lambda stage: read_in_child(Reading(attempt.root, data.shards, deadline_seconds=5.0))
    ) as child:
        ended = child.join(15.0) is not None
        stage = child.kill()
    attempt.happened[attempt.variant] += 1
    attempt.check("L", ended, f"it hangs ({stage})")
    attempt.check("B", still_there() == before, "what isn't ours was changed")
    attempt.check("B", [path.name for path in outside.iterdir()] == ["precious"], "written outside the tier")
    if ended:
        result = child.result
        attempt.check_all(
            (letter, what)
            for letter, what in data.differences(result["seen"])
            if letter != "N" or result["error"] is None
        )
        if result["error"] is not None:
            attempt.check_error(result["error"], "CacheError", str(attempt.place))


def _meddle(attempt: Attempt, data: Data, outside: Path) -> Callable[[], Any]:
    """Put something into the tier; returns how to see that it is as it was."""
    root = attempt.root
    new, old = data.shards[-1].digest, data.shards[0].digest
    match attempt.variant:
        case "foreign files":
            foreign = [
                root / "notes.txt",
                root / "shards" / "notes.txt",
                root / "parts" / "a b",
                root / "trash.txt",
            ]
            for path in foreign:
                path.write_text("mine")
            (root / "shards" / "my folder").mkdir()
            foreign.append(root / "shards" / "my folder" / "file")
            foreign[-1].write_text("mine")
            return lambda: [path.read_text() for path in foreign]
        case "another version's tier":
            (root / "tier.json").write_text(json.dumps({"format": 99, "limit_bytes": 1 << 30, "more": [1]}))
            shown = sorted(path for path in root.rglob("*") if "runs" not in path.parts)
            return lambda: [path.exists() for path in shown]
        case "another version's shard":
            index = root / "shards" / old / "index"
            index.write_bytes(b"SLINDEX9" + index.read_bytes()[8:])
            return lambda: None
        case "link for a room":
            shutil.rmtree(root / "trash")
            (root / "trash").symlink_to(outside)
        case "link for a shard":
            (root / "shards" / new).symlink_to(outside)
        case "link for a file":
            (root / "lock").unlink()
            (root / "lock").symlink_to(outside / "precious")
        case "link for the record":
            (root / "tier.json").unlink()
            (root / "tier.json").symlink_to(outside / "precious")
        case "FIFO for the record":
            (root / "tier.json").unlink()
            os.mkfifo(root / "tier.json")
        case "FIFO for a shard's names":
            (root / "shards" / old / "names").unlink()
            os.mkfifo(root / "shards" / old / "names")
        case "FIFO for a shard's data":
            (root / "shards" / old / "data").unlink()
            os.mkfifo(root / "shards" / old / "data")
        case "socket for the lock":
            (root / "lock").unlink()
            with socket.socket(socket.AF_UNIX) as at:
                at.bind(str(root / "lock"))
        case "open to all":
            root.chmod(0o777)
            return lambda: stat.S_IMODE(root.stat().st_mode)
        case "another owner":
            os.chown(root, 12345, 12345)
            return lambda: root.stat().st_uid
    return lambda: (outside / "precious").read_text()


def _needs_root() -> str:
    return "" if os.geteuid() == 0 else "giving a directory to another owner needs root"


ROWS = [
    Row(
        6,
        "bytes rot",
        "flipped bit, cut file, two files or two shards swapped in the tier",
        "NDBTC",
        "What the tier gives is what the origin gave, whatever happened to its files",
        rotten,
        count=400,
        variants=(
            *(f"{what} in {file}" for what in ("bit flipped", "cut") for file in ("data", "index", "names")),
            *(f"two files swapped in {file}" for file in ("data", "index", "names")),
            "two shards swapped",
        ),
    ),
    Row(
        18,
        "tier meddled with",
        "foreign files; another version's files; planted links, FIFOs, sockets; another owner; open to all",
        "NBEL",
        "What isn't streamload's is never deleted, never followed, and never waited for",
        meddled,
        count=130,
        variants=(
            "foreign files",
            "another version's tier",
            "another version's shard",
            "link for a room",
            "link for a shard",
            "link for a file",
            "link for the record",
            "FIFO for the record",
            "FIFO for a shard's names",
            "FIFO for a shard's data",
            "socket for the lock",
            "open to all",
            "another owner",
        ),
        needs=_needs_root,
    ),
]
