"""Row 13: origins that are commands."""

import shlex
from pathlib import Path

from streamload.cache.shard import shard_of
from tests.faults.oracle import Attempt
from tests.faults.readers import QUICK, Reading, read_in_child
from tests.faults.rows import Row


def piped(attempt: Attempt) -> None:
    """A command that fails, hangs, or says nothing, some times; then it works."""
    data = attempt.borrow(attempt.seed)
    place = attempt.rng.randrange(len(data.shards))
    digest, path = data.shards[place].digest, data.paths[place]
    command, times = pipe_command(attempt, path)
    shards = [shard_of(f"pipe:cat {shlex.quote(str(path))}", None) for path in data.paths]
    shards[place] = shard_of(f"pipe:{command}", None)
    result = read_in_child(Reading(attempt.root, shards, origin=QUICK))
    attempt.happened[attempt.variant] += min(runs_of(attempt), times)
    seen = {
        own.digest: result["seen"].get(there.digest, [])
        for own, there in zip(data.shards, shards, strict=True)
    }
    if result["error"] is None:
        attempt.check_all(data.differences(seen))
        return
    attempt.check("N", attempt.variant == "prints nothing", f"given up: {result['error']}")
    attempt.check_error(result["error"], "OriginError|ShardError", path.name)
    right = seen[digest] == data.samples[digest][: len(seen[digest])]
    attempt.check("B", right, "what came in front of the error isn't the origin's")


def pipe_command(attempt: Attempt, path: Path) -> tuple[str, int]:
    """A shell command that gives a file, but not the first times; and how many times it fails."""
    size, times = path.stat().st_size, attempt.rng.randrange(1, 3)
    at = attempt.rng.randrange(size)
    if "border" in attempt.variant:
        at = 10240 * attempt.rng.randrange(1, size // 10240)
    how = attempt.variant.partition(",")[0]
    fails = {
        "fails half-way": f"head -c {at} {path}; exit 3",
        "fails behind a pipe": f"(head -c {at} {path}; exit 3) | cat",
        "is killed": f"head -c {at} {path}; kill -9 $$",
        "hangs": f"head -c {at} {path}; sleep 60",
        "prints nothing": "true",
    }[how]
    runs = attempt.place / "runs"
    # A line is noted for each run; the first runs fail.
    script = f"echo x >> {runs}; if [ $(wc -l < {runs}) -le {times} ]; then {fails}; else cat {path}; fi"
    return script, times


def runs_of(attempt: Attempt) -> int:
    runs = attempt.place / "runs"
    return runs.read_text().count("x") if runs.exists() else 0


ROWS = [
    Row(
        13,
        "pipe",
        "command fails half-way, fails behind a `|`, is killed, hangs, prints nothing; 1 or 2 times",
        "NDBE",
        "A half is never taken for a whole, and a second run of the command doubles nothing",
        piped,
        count=200,
        variants=(
            "fails half-way",
            "fails half-way, at a border",
            "fails behind a pipe",
            "fails behind a pipe, at a border",
            "is killed",
            "hangs",
            "prints nothing",
        ),
    ),
]
