"""Row 44: a training from S3 whose session token ends in mid-run, with and without a new one."""

import os
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.faults.data import samples_of
from benchmarks.faults.oracle import Attempt
from benchmarks.faults.processes import describe, differences, import_torch
from benchmarks.faults.rows import Row
from streamload import Workers
from streamload.testing.shards import ShardOptions, write_shards
from tests import flat
from tests.kills import Child
from tests.signed_s3 import Keys, SignedS3

_COUNTS = (4,) * 24
_REQUESTS = range(10, 22)
"""Of the 24 that a training of these shards sends, those at which the token may end."""
_SETTLE_SECONDS = 0.5
"""In which a client reads what it was sent: a server that has given nothing yet could be a wrong address."""
_NAME = "the token has expired (ExpiredToken)"


def token_ends(attempt: Attempt) -> None:
    """The token ends at a random request. Each sample comes once, or a wait ends by name and loses none.

    New keys are there before the old ones end, or a while after; in the credentials file, or in what the
    credential_process prints.
    """
    import_torch()
    place, when = attempt.variant.split(", ", 1)
    options = ShardOptions(padding_bytes=(2000, 5000))
    paths = write_shards(attempt.place / "data", _COUNTS, seed=attempt.seed, options=options)
    home = attempt.place / "home"
    home.mkdir()
    with SignedS3() as store:
        urls = [store.put("bucket", path.name, path.read_bytes()) for path in paths]
        give = _giver(home, place)
        give(Keys(1))
        threads: list[threading.Timer] = []

        def end() -> None:
            time.sleep(_SETTLE_SECONDS)
            if when == "renewed before":
                give(Keys(2))
            store.valid = {Keys(2)}
            attempt.happened[attempt.variant] += 1
            if when == "renewed late":
                threads.append(threading.Timer(attempt.rng.uniform(0.05, 3), give, [Keys(2)]))
                threads[0].start()

        store.call_after(attempt.rng.choice(_REQUESTS), end)
        environ = store.environ() | {
            "AWS_CONFIG_FILE": str(home / "config"),
            "AWS_SHARED_CREDENTIALS_FILE": str(home / "credentials"),
            "STREAMLOAD_ORIGIN_WAIT": "3" if when == "never renewed" else "60",
        }
        with Child(lambda stage: _train(urls, attempt, environ)) as child:
            result = child.finish(90)
        for thread in threads:
            thread.join()
        refused = store.codes()["ExpiredToken"]
    attempt.check("E", refused > 0, "no request was sent with the old token")
    given_up = result["stats"].get("shards_given_up", 0)
    attempt.check("N", given_up == 0, f"{given_up} shards were given up")
    expected = sorted(sample for path in paths for sample in samples_of(path))
    if when == "never renewed":
        attempt.check_error(result["error"], "OriginOutage", _NAME)
        expected = [sample for sample in expected if sample in result["samples"]]
    else:
        attempt.check_no_error(result["error"])
    attempt.check_all(differences(expected, result["samples"]))


def _giver(home: Path, place: str) -> Any:
    """Return a function that leaves keys where boto looks for them."""
    if place == "file":
        return lambda keys: keys.write_file(home / "credentials")
    (home / "config").write_text(f"[default]\ncredential_process = /bin/cat {home}/printed.json\n")
    return lambda keys: keys.write_process_output(home / "printed.json")


def _train(urls: list[str], attempt: Attempt, environ: dict[str, str]) -> dict[str, Any]:
    """Train for one epoch of the raw samples; return what came, and what ended it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(environ)
    samples: list[list[str]] = []
    error, stats = None, {}
    try:
        with flat.make_loader(
            urls,
            workers=Workers(map_sample=describe),
            batch_size=1,
            cache_dir=attempt.root,
            cache_size="1GB",
            num_workers=attempt.rng.randrange(2),
            seed=attempt.seed,
        ) as loader:
            try:
                samples += ([batch["key"][0], batch["digest"][0]] for batch in loader)
            finally:
                stats = loader.stats().as_dict()
    except Exception as exc:
        error = {"kinds": [kind.__name__ for kind in type(exc).__mro__], "text": str(exc)}
    return {"samples": sorted(samples), "stats": stats, "error": error}


ROWS = [
    Row(
        44,
        "token ends",
        "an S3 session token ends at a random request; new ones come before, late, or never; "
        "by credentials file or credential_process",
        "NDBEL",
        "New credentials are found beside the run and no shard is given up; without any, the wait ends",
        token_ends,
        count=48,
        variants=tuple(
            f"{place}, {when}"
            for when in ("renewed late", "renewed before", "never renewed")
            for place in ("file", "process")
        ),
    ),
]
