"""Rows 24 and 30: plans that name places that nobody meant, credentials of several hosts, secrets in URLs."""

import base64
import contextlib
import io
import logging
import os
import shlex
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from streamload.cache.shard import Shard, shard_of
from streamload.daemon.plan_file import PlannedSource, PlanProgress, plan_of
from streamload.metrics import Counters
from streamload.order.plan import OrderOptions
from streamload.origins.origin import Origin, open_origin
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from streamload.urls import expand_urls
from tests.faults.daemons import Shared
from tests.faults.data import Data
from tests.faults.oracle import Attempt
from tests.faults.readers import QUICK, Reading, read
from tests.faults.rows import Row
from tests.support.kills import Child, Stage

_END_SECONDS = 60.0
_LOOPBACK = (
    *("127.0.0.1", "localhost", "localhost.", "127.1", "2130706433", "0x7f000001", "0177.0.0.1"),
    *("[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "0.0.0.0"),
)


def planned(attempt: Attempt) -> None:
    """A plan names places that the user of a daemon didn't; the daemon has credentials."""
    data = attempt.borrow(attempt.seed)
    secret = _secret(attempt)
    shared = Shared(attempt, data)
    with ShardServer(data.place) as meant, ShardServer(data.place) as inside:
        good = [f"{meant.url}/{path.name}" for path in data.paths]
        name, environment = data.paths[attempt.rng.randrange(len(data.paths))].name, {}
        origins, planned, brought = (meant.url,), good, len(good)
        if attempt.variant == "an address inside":
            port = inside.url.rpartition(":")[2]
            planned = [*good, *(f"http://{host}:{port}/{name}" for host in _LOOPBACK)]
        elif attempt.variant == "a redirect inside":
            meant.misbehave(name, Fault(status=302, headers={"Location": f"{inside.url}/{name}"}))
            brought -= 1
        else:  # by way of a proxy, so that a name can stand for a place that is far away
            planned = [f"http://far.invalid/{path.name}" for path in data.paths]
            origins, environment = (), {"http_proxy": meant.url}
        _publish(shared, planned)
        asked = shared.work(
            "a", urls=(), origins=origins, storage_options={"headers": {"Authorization": f"Bearer {secret}"}}
        )
        with Child(_with_environment(asked, environment)) as child:
            done, _, wanted, failed = child.finish(_END_SECONDS)
        attempt.check("N", (done, wanted) == (brought, len(planned)), f"{done} of {wanted} came: {failed}")
        refused = [why for why in failed.values() if "--origin" in why or "no address for the host" in why]
        attempt.check("E", len(refused) == len(failed), f"refused for another reason: {failed}")
        attempt.check("S", not inside.log, f"what nobody named was asked: {inside.log[:2]}")
        told = [request for request in meant.log if secret in str(request.headers)]
        attempt.check("S", bool(told) == bool(origins), f"{len(told)} of {len(meant.log)} got credentials")
        attempt.happened[attempt.variant] += len(failed) if origins else len(meant.log)


def _publish(shared: Shared, urls: Sequence[str]) -> None:
    """As anybody can who may write to the shared tier."""
    listed = expand_urls(list(urls))
    plan, _ = plan_of([PlannedSource(len(listed), OrderOptions(1, 1, 2, 8))], False, listed, None)
    objects = shared.objects()
    objects.write(f"runs/{plan.run}/plan.json", plan.written())
    objects.write(f"runs/{plan.run}/group-0.json", PlanProgress(0, 0, ((0, 0),)).written())


def _with_environment(work: Callable[[Stage], Any], environment: dict[str, str]) -> Callable[[Stage], Any]:
    def changed(stage: Stage) -> Any:
        for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
            del os.environ[name]
        os.environ.update(environment)
        return work(stage)

    return changed


def two_hosts(attempt: Attempt) -> None:
    """Shards on two hosts, each with a header of its own, and a redirect from one to the other."""
    data = attempt.borrow(attempt.seed)
    secrets = [_secret(attempt), _secret(attempt)]
    with ShardServer(data.place) as one, ShardServer(data.place) as other:
        hosts = (one, other)
        headers = {host.url: {"X-Key": secret} for host, secret in zip(hosts, secrets, strict=True)}
        shards = [shard_of(f"{hosts[n % 2].url}/{path.name}", None) for n, path in enumerate(data.paths)]
        led = attempt.rng.randrange(len(shards))
        here, there = hosts[led % 2], hosts[1 - led % 2]
        name = data.paths[led].name
        here.misbehave(name, Fault(status=307, headers={"Location": f"{there.url}/{name}"}))

        def opened(shard: Shard, stop: Any, counts: Counters) -> Origin:
            return open_origin(shard.url, {"headers": headers}, QUICK, counts, stop)

        found = read(Reading(attempt.root, shards, open_origin=opened))
        attempt.check("N", found.error is None, f"{found.error!r}")
        attempt.check_all(data.differences(_as_listed(data, shards, found.seen)))
        attempt.happened["redirects to the other host"] += len(there.requests(name))
        for n, host in enumerate(hosts):
            foreign = sum(secrets[1 - n] in str(request.headers) for request in host.log)
            own = sum(secrets[n] in str(request.headers) for request in host.log)
            attempt.check("S", not foreign, f"{foreign} requests had the other host's header")
            attempt.check("S", own > 0, "no request had the host's own header")


_COMMANDS = {
    "curl -x user:password": "curl -sf -x me:{S}@127.0.0.1:9 {url}; cat {path}",
    "curl user:password@host": "curl -sf me:{S}@127.0.0.1:9/{name}; cat {path}",
    "a signed URL without a scheme": "curl -sf '127.0.0.1:9/{name}?X-Amz-Signature={S}'; cat {path}",
    "-Dfs.s3a.secret.key=": "true -Dfs.s3a.secret.key={S}; cat {path}",
    "swift -K, unzip -P": "true -K {S}; true -P {S}; cat {path}",
    "curl -v": "curl -svf -H 'Private: {S}' -u me:{S} {url} | cat",
}
_URLS = {
    "user and query of a URL": "{at}/{name}?X-Amz-Signature={S}&token={S}",
    "a redirect with a token": "{at}/{name}?sig={S}",
}


def hidden(attempt: Attempt) -> None:
    """URLs and commands with secrets, some of which fail: nothing that is said or left holds one."""
    data = attempt.borrow(attempt.seed)
    secret = _secret(attempt)
    place = attempt.rng.randrange(len(data.paths))
    with ShardServer(data.place) as server:
        host = server.url.partition("://")[2]
        urls = []
        for path in data.paths:
            pattern = _URLS.get(attempt.variant) or f"pipe:{_COMMANDS[attempt.variant]}"
            values = {"S": secret, "url": f"{server.url}/{path.name}", "at": f"http://me:{secret}@{host}"}
            values |= {"name": path.name, "path": shlex.quote(str(path))}
            for key, value in values.items():
                pattern = pattern.replace(f"{{{key}}}", value)
            urls.append(pattern)
        name = data.paths[place].name
        if attempt.variant == "a redirect with a token":
            wrong = {"Location": f"http://me:{secret}@127.0.0.1:9/{name}?token={secret}"}
            server.misbehave(name, Fault(status=302, headers=wrong))
        elif "cat {path}" in _COMMANDS.get(attempt.variant, ""):  # it says what it is, and fails
            urls[place] = f"pipe:set -x; {urls[place].removeprefix('pipe:')}; echo {secret} >&2; false"
        else:
            server.misbehave(name, Fault(status=403, body=b"<Error><Code>AccessDenied</Code></Error>"))
        shards = [shard_of(url, None) for url in urls]
        with _logged() as said:
            found = read(Reading(attempt.root, [*shards[:place], *shards[place + 1 :], shards[place]]))
            if found.error is not None:
                said.write("".join(traceback.format_exception(found.error)))
    attempt.check(
        "E", found.error is not None and data.paths[place].name in str(found.error), f"{found.error}"
    )
    expected = {
        s.digest: v for s, v in zip(shards, data.samples.values(), strict=True) if s is not shards[place]
    }
    came = {digest: samples for digest, samples in found.seen.items() if digest in expected}
    attempt.check("N", came == expected, f"{len(came)} of {len(expected)} shards came whole")
    hidden = [secret, base64.b64encode(f"me:{secret}".encode()).decode()]
    shown = " ".join([said.getvalue(), *(f"{shard!r} {shard.name}" for shard in shards)])
    attempt.check("S", not any(text in shown for text in hidden), f"it is shown: {_around(shown, hidden)}")
    left = [path for path in attempt.root.rglob("*") if _holds(path, secret)]
    attempt.check("S", not left, f"it is in {left[:3]}")
    attempt.happened[attempt.variant] += len(urls)


def _holds(path: Path, secret: str) -> bool:
    return secret in path.name or (path.is_file() and secret.encode() in path.read_bytes())


def _around(text: str, secrets: Sequence[str]) -> str:
    at = min((found for secret in secrets if (found := text.find(secret)) >= 0), default=0)
    return text[max(0, at - 100) : at + 60]


@contextlib.contextmanager
def _logged() -> Iterator[io.StringIO]:
    """All that is logged in this process, at level DEBUG."""
    said = io.StringIO()
    handler, root = logging.StreamHandler(said), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield said
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def _as_listed(data: Data, shards: Sequence[Shard], seen: dict[str, Any]) -> dict[str, Any]:
    """What was read of shards at other URLs, by the names of those that they are."""
    return {own.digest: seen.get(read.digest, []) for own, read in zip(data.shards, shards, strict=True)}


def _secret(attempt: Attempt) -> str:
    return "S3CRET" + attempt.rng.randbytes(8).hex()


ROWS = [
    Row(
        24,
        "plan of another's",
        "a plan names addresses inside, a place that redirects there, a far place; the daemon has a token",
        "NES",
        "A plan gets no credentials and reads nothing inside, unless the daemon's user named the place",
        planned,
        count=30,
        variants=("an address inside", "a redirect inside", "a token by a proxy"),
    ),
    Row(
        24,
        "two hosts",
        "shards on two hosts with a header each; one redirects to the other",
        "NDBS",
        "A header goes to the host that it is for, and follows no redirect",
        two_hosts,
        count=50,
    ),
    Row(
        30,
        "secrets shown",
        "passwords, keys and signatures in URLs and commands, one of which fails; all logs at DEBUG",
        "NES",
        "No message, cause, log line, name or file holds a secret",
        hidden,
        count=80,
        variants=(*_COMMANDS, *_URLS),
        short=5,
    ),
]
