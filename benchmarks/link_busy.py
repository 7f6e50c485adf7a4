"""How busy `streamload warm` keeps a link.

Question: of what a link of 50, 100, 200 or 400 MB/s can carry between the first request and the last byte,
how much does `streamload warm` take? And of 200 MB/s by https, of 200 and 400 as S3, of 200 as S3 by https,
of 200 where a connection gets 50?
How much more CPU time does a single shard take as S3?

Command: python -m benchmarks.link_busy

Shards of about 42 MB over HTTP on loopback; the server is a process of its own whose token bucket is shared
by all connections. There are as many shards as take the link eight seconds; they are the same eight under
many names, so that the server has them in the page cache. The cache is on disk and empty. Both ends are on
one machine: the server takes a part of its cores, too.

- share: bytes sent, divided by what the link could have carried from the first request that the server saw to
  the end of its last answer. Target: ≥ 0.98.
- curl: what `curl` gets that fetches the same by as many connections and throws it away. Where it gets less
  than the rate, it is the server that can't give more.
- https: with a certificate made for it, at half of the highest rate: the server encrypts on the same cores.
- s3, https-s3: the same server as an S3 store, with signed requests, which it doesn't check; `curl` fetches
  the same by HTTP or HTTPS.
- CPU: of all of the client's processes. Target: as S3 at most 1.1 times what HTTP takes in the same call.
- requests: to the server, a shard. Target: ≤ 3.
- one shard: CPU time of a `streamload warm` of it, with the start of the interpreter. Target: as S3 at most
  0.25 s more than by HTTP.

Result: results/link_busy.json; docs/results/fetching.md has it as a table.

Explanation: eight shards are filled at a time, and the next begins when one has ended, so that several
connections want what the link can carry at any moment. What CPU time a byte costs beyond curl's is to parse,
index, checksum and write it; at 400 MB/s that is most of a core. TLS brings bytes in records of 16 KB at
most, each of which would cost what a whole piece does: those that are there are read as one. For S3, botocore
prepares and signs the two requests of a shard, which costs next to nothing beside its bytes; these come as by
HTTP.
"""

import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks import link, machine, turns
from benchmarks.turns import ROOT, Row
from tests.support.certificate import write_certificate


class Line(NamedTuple):
    """A link: its rate, what is spoken over it, and what one connection gets at most (0: all of it)."""

    rate: float
    scheme: str
    connection_rate: float = 0.0

    @property
    def name(self) -> str:
        name = f"{self.rate / 1e6:.0f} MB/s"
        name += f", {self.connection_rate / 1e6:.0f} a connection" if self.connection_rate else ""
        return name + ("" if self.scheme == "http" else f", {self.scheme}")


LINES = (
    *(Line(rate, "http") for rate in (50e6, 100e6, 200e6, 400e6)),
    *(Line(200e6, scheme) for scheme in ("https", "https-s3")),
    *(Line(rate, "s3") for rate in (200e6, 400e6)),
    *(Line(200e6, scheme, 50e6) for scheme in ("http", "s3")),
)
QUICK_LINES = tuple(Line(100e6, scheme) for scheme in ("http", "https", "https-s3", "s3"))
BUCKET = "bucket"
SECONDS, QUICK_SECONDS = 8.0, 0.5
SHARDS, SAMPLES_PER_SHARD = 8, 384
QUICK_SHARDS, QUICK_SAMPLES_PER_SHARD = 2, 64
CONNECTIONS = 8
AT_LEAST = 0.98
MOST_CPU, MOST_REQUESTS, MOST_START_SECONDS = 1.1, 3.0, 0.25
STREAMLOAD, CURL = "streamload warm", "curl"
COMMANDS = (STREAMLOAD, CURL)


def main() -> None:
    given = turns.arguments(__doc__, rounds=3, names=COMMANDS)
    full = (SHARDS, SAMPLES_PER_SHARD, LINES, SECONDS)
    quick = (QUICK_SHARDS, QUICK_SAMPLES_PER_SHARD, QUICK_LINES, QUICK_SECONDS)
    shards, per_shard, lines, seconds = quick if given.quick else full
    wanted = [(name, line) for line in lines for name in COMMANDS if name in given.contenders]
    rows: list[Row] = []
    with turns.photographs(shards * per_shard, per_shard) as (directory, total_bytes):
        served = directory / "served" / BUCKET
        names = named_again(
            directory / "shards",
            served,
            math.ceil(max(line.rate for line in lines) * seconds * shards / total_bytes),
        )
        tls = write_certificate(directory)
        for round_ in range(given.rounds):
            for name, line in turns.rotated(wanted, round_):
                count = math.ceil(line.rate * seconds * shards / total_bytes)
                used = tls if line.scheme.startswith("https") else None
                row = measure(name, given.python, directory, served, names[:count], line, used)
                rows.append({"round": round_, **row})
            for scheme in ("http", "s3") if STREAMLOAD in given.contenders else ():
                line = Line(lines[-1].rate, scheme)
                row = measure(STREAMLOAD, given.python, directory, served, names[:1], line, None)
                del row["share"]  # of a link, of which one shard is too little
                rows.append({"round": round_, **row, "label": one_shard(scheme)})
    settings = {
        "shard_bytes": total_bytes // shards,
        "rates": [line.rate for line in lines],
        "schemes": [line.scheme for line in lines],
        "connection_rates": [line.connection_rate for line in lines],
        "seconds": seconds,
        "connections": CONNECTIONS,
    }
    content = turns.content(given, settings, rows)
    medians = content["medians"]
    turns.write(
        given,
        "link_busy",
        {
            **content,
            "targets": [
                turns.target(
                    f"share of a link of {line.name}",
                    medians.get(f"{STREAMLOAD} at {line.name}", {}).get("share"),
                    at_least=AT_LEAST,
                )
                for line in lines
            ]
            + [target for line in lines if line.scheme.endswith("s3") for target in _s3(medians, line)]
            + [
                turns.target(
                    "CPU s of one shard as S3, beyond HTTP",
                    _more_cpu_seconds(medians, one_shard("s3"), one_shard("http")),
                    at_most=MOST_START_SECONDS,
                )
            ],
        },
    )


def _s3(medians: dict[str, Row], line: Line) -> list[Row]:
    """The targets of a line as S3, beside the same line without."""
    name = f"{STREAMLOAD} at {line.name}"
    plain = line._replace(scheme="https" if line.scheme.startswith("https") else "http")
    plain_name = f"{STREAMLOAD} at {plain.name}"
    cpu = turns.target(
        f"CPU a GB at {line.name}, × without S3",
        turns.ratio(medians, "cpu_seconds_per_gb", name, plain_name),
        at_most=MOST_CPU,
    )
    requests = turns.target(
        f"requests for a shard at {line.name}",
        medians.get(name, {}).get("requests_per_shard"),
        at_most=MOST_REQUESTS,
    )
    # A shard whose connection is slow is fetched by several.
    return [cpu] if line.connection_rate else [cpu, requests]


def _more_cpu_seconds(medians: dict[str, Row], of: str, than: str) -> float | None:
    if of not in medians or than not in medians:
        return None
    return float(medians[of]["cpu_seconds"] - medians[than]["cpu_seconds"])


def named_again(shards: Path, served: Path, count: int) -> list[str]:
    """Serve a few shards under many names."""
    served.mkdir(parents=True)
    real = sorted(shards.glob("*.tar"))
    names = [f"{number:05d}.tar" for number in range(count)]
    for number, name in enumerate(names):
        os.link(real[number % len(real)], served / name)
    return names


def measure(
    name: str,
    python: Path,
    directory: Path,
    served: Path,
    names: list[str],
    line: Line,
    tls: tuple[str, str] | None,
) -> Row:
    load = machine.load()
    environ = turns.environment()
    if tls is not None:
        environ |= {"SSL_CERT_FILE": tls[0], "AWS_CA_BUNDLE": tls[0]}
    serving = link.serving(served.parent, line.rate, tls, connection_rate=line.connection_rate)
    with serving as server, turns.empty_directory(directory) as cache:
        environ |= {
            "AWS_ENDPOINT_URL": server.url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }
        is_s3 = line.scheme.endswith("s3") and name == STREAMLOAD
        place = f"s3://{BUCKET}" if is_s3 else f"{server.url}/{BUCKET}"
        words = command(name, python, place, names, cache, tls)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.monotonic()
        subprocess.run(words, cwd=ROOT, env=environ, check=True, stdout=subprocess.DEVNULL)
        whole = time.monotonic() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        first, last, sent = server.busy()
        requests = len(server.requests(-math.inf, math.inf))
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    expected = sum((served / name).stat().st_size for name in names)
    assert sent >= expected, (sent, expected)
    return {
        "label": f"{name} at {line.name}",
        "contender": name,
        "load_before": load,
        "bytes_per_second": line.rate,
        "bytes": sent,
        "share": expected / line.rate / (last - first),
        "seconds": last - first,
        "to_first_request_seconds": first - began,
        "whole_seconds": whole,
        "cpu_seconds": cpu,
        "cpu_seconds_per_gb": cpu / sent * 1e9,
        "requests_per_shard": requests / len(names),
        "limits": (),
        "versions": {"python": sys.version.split()[0]} if name == STREAMLOAD else curl_version(),
    }


def one_shard(scheme: str) -> str:
    return f"{STREAMLOAD} of one shard, {scheme}"


def command(
    name: str, python: Path, url: str, names: list[str], cache: Path, tls: tuple[str, str] | None
) -> list[str]:
    pattern = f"{url}/{{{names[0][:-4]}..{names[-1][:-4]}}}.tar"
    if name == STREAMLOAD:
        own = [str(python), "-m", "streamload", "warm", pattern]
        return [*own, "--cache-dir", str(cache), "--cache", "disk", "--concurrency", str(CONNECTIONS)]
    urls = [word for each in names for word in ("-o", "/dev/null", f"{url}/{each}")]
    trust = ["--cacert", tls[0]] if tls is not None else []
    at_once = ["--parallel", "--parallel-immediate", "--parallel-max", str(CONNECTIONS)]
    return ["curl", "-sSf", *trust, *at_once, *urls]


def curl_version() -> dict[str, str]:
    said = subprocess.run(["curl", "--version"], check=True, capture_output=True, text=True).stdout
    return {"curl": said.split()[1]}


if __name__ == "__main__":
    main()
