"""Row 44: a training from S3 or a web server whose token ends in mid-run, with and without a new one."""

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamload import Workers
from streamload.cli.options import storage_options_of
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, write_shards
from tests.faults.data import samples_of
from tests.faults.oracle import Attempt
from tests.faults.processes import describe, differences, import_torch
from tests.faults.rows import Row
from tests.support import flat
from tests.support.kills import Child
from tests.support.signed_s3 import Keys, SignedS3

_COUNTS = (4,) * 24
_REQUESTS = range(10, 22)
"""Of the 24 that a training of these shards sends, those at which the token may end."""
_WEB_REQUESTS = range(16, 22)
"""A web server's token ends without a pause, after more than are under way at once: some were answered."""
_SETTLE_SECONDS = 0.5
"""In which a client reads what it was sent: a server that has given nothing yet could be a wrong address."""
_NAME = "the token has expired (ExpiredToken)"
_WEB_NAME = "403"


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
    _check(attempt, when, paths, result, refused, _NAME)


def web_token_ends(attempt: Attempt) -> None:
    """As `token_ends`, of a bearer token in a file of options, or of URLs that a function signs."""
    import_torch()
    place, when = attempt.variant.split(", ", 1)
    options = ShardOptions(padding_bytes=(2000, 5000))
    paths = write_shards(attempt.place / "data", _COUNTS, seed=attempt.seed, options=options)
    requests = attempt.rng.choice(_WEB_REQUESTS)
    given = _Given(attempt.place / "token")
    given.give("token-1")
    with ShardServer(attempt.place / "data") as server:
        server.misbehave(
            "*", Fault(first=requests, requires="token-1"), Fault(requires="token-2", status=403)
        )
        is_over = threading.Event()

        def refused() -> int:
            return [request.status for request in server.log].count(403)

        def renew() -> None:
            while not (len(server.log) >= requests - 2 if when == "renewed before" else refused()):
                if is_over.wait(0.002):
                    return
            attempt.happened[attempt.variant] += 1
            if when == "renewed late":
                is_over.wait(attempt.rng.uniform(0.05, 3))
            if when != "never renewed":
                given.give("token-2")

        renewal = threading.Thread(target=renew)
        renewal.start()
        environ = {"STREAMLOAD_ORIGIN_WAIT": "3" if when == "never renewed" else "60"}
        storage = storage_options_of(f"@{given.options}") if place == "file of options" else {"sign": given}
        try:
            with Child(
                lambda stage: _train(
                    [f"{server.url}/{path.name}" for path in paths], attempt, environ, storage
                )
            ) as child:
                result = child.finish(90)
        finally:
            is_over.set()
            renewal.join()
        _check(attempt, when, paths, result, refused(), _WEB_NAME)


@dataclass(frozen=True)
class _Given:
    """A token, where a training finds it: in a file of options, and in URLs signed by calling this."""

    file: Path

    @property
    def options(self) -> Path:
        return self.file.with_suffix(".json")

    def give(self, token: str) -> None:
        for file, text in (
            (self.file, token),
            (self.options, json.dumps({"headers": {"Authorization": f"Bearer {token}"}})),
        ):
            (fresh := file.with_suffix(".new")).write_text(text)
            fresh.replace(file)

    def __call__(self, url: str) -> str:
        return f"{url}?X-Amz-Signature={self.file.read_text()}"


def _check(
    attempt: Attempt, when: str, paths: list[Path], result: dict[str, Any], refused: int, name: str
) -> None:
    """Check that no shard was given up, each sample came once, and an endless wait ended by name."""
    is_asked_each_time = attempt.variant == "signed URLs, renewed before"
    attempt.check("E", refused > 0 or is_asked_each_time, "no request was sent with the old token")
    given_up = result["stats"].get("shards_given_up", 0)
    attempt.check("N", given_up == 0, f"{given_up} shards were given up")
    expected = sorted(sample for path in paths for sample in samples_of(path))
    if when == "never renewed":
        attempt.check_error(result["error"], "OriginOutage", name)
        expected = [sample for sample in expected if sample in result["samples"]]
    else:
        attempt.check_no_error(result["error"])
    attempt.check_all(differences(expected, result["samples"]))


def _giver(home: Path, place: str) -> Callable[[Keys], None]:
    """Return a function that leaves keys where boto looks for them."""
    if place == "file":
        return lambda keys: keys.write_file(home / "credentials")
    (home / "config").write_text(f"[default]\ncredential_process = /bin/cat {home}/printed.json\n")
    return lambda keys: keys.write_process_output(home / "printed.json")


def _train(
    urls: list[str], attempt: Attempt, environ: dict[str, str], storage: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train for one epoch of the raw samples; return what came, and what ended it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(environ)
    samples: list[list[str]] = []
    error, stats = None, {}
    try:
        with flat.make_loader(
            urls,
            storage_options=storage,
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


_WHEN = ("renewed late", "renewed before", "never renewed")

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
        variants=tuple(f"{place}, {when}" for when in _WHEN for place in ("file", "process")),
    ),
    Row(
        44,
        "token of a web server ends",
        "a bearer token in a file of options, or that of signed URLs, ends at a random request; "
        "new ones come before, late, or never",
        "NDBEL",
        "File or function is asked again, and no shard is given up; without a new token the wait ends",
        web_token_ends,
        count=48,
        variants=tuple(f"{place}, {when}" for when in _WHEN for place in ("file of options", "signed URLs")),
    ),
]
