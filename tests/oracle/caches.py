"""Cache directories of every kind: made anew and compared by file; those of the record are read."""

from __future__ import annotations

import functools
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import xxhash

from streamload.testing.server import ShardServer
from tests.oracle.cases import Case, Layout
from tests.oracle.place import root
from tests.oracle.record import OLD, PLACE, Values
from tests.oracle.run import read, strings

ARCHIVE = PLACE / "caches.tar.xz"
DIRECTORIES = ("cache", "shared", "home")

_PACKAGE = str(Path(__file__).parents[2])
_URLS = "http://shards.test/few/{00000..00001}.tar"
_DIFFERS = re.compile(r"(^|/)(lock|reserved|runs/.*|rows/.*|parts/.*/(index|names))$")
"""Files that differ from run to run: locks, databases, plans, and how far a killed process had come."""
_NONCE = re.compile(r"(?<=parts/)([0-9a-f]+)\.[^/]+")
_SHARD = re.compile(r"[0-9a-f]{32}")


def _case(set_name: str = "few", way: str = "http", **options: Any) -> Case:
    fixed = {
        "train": True,
        "seed": 3,
        "shuffle": 20,
        "output": "dict",
        "with_keys": True,
        "cache_size": "50MB",
    }
    return Case(
        name="",
        sources=({"way": way, "set": set_name},),
        options={**fixed, "tokenizer": "@words", **options},
        batch=4,
        layouts=(Layout(1, 0), Layout(1, 0)),
        epochs=2,
        stop=0,
    )


_LONGEST = {"text_padding": "longest", "bucketing": "step"}
_SHARED = {"shared": "shared", "write_back": True}
KINDS: dict[str, Case] = {
    "disk": _case(),
    "local": _case(way="local"),
    "pipe": _case(way="pipe"),
    "part": _case(),
    "index only": _case("sized", cache_size="90KB"),
    "facts": _case(batches=_LONGEST, shards={"facts": {"place": "json:index"}}),
    "prepared": _case(images={"prepare": "raw-32"}),
    "rows": _case(features={"means": "@means"}),
    "derived rows": _case(features={"means": "@means"}),
    "shared": _case(cache=_SHARED),
    "shared prepared": _case(cache=_SHARED, images={"prepare": "jpeg-48-q90"}),
    "given up": _case("cut", shards={"max_bad_shards": None}),
}
"""By kind of directory, the run that makes and reads it."""

_WARMED = {
    "part": [],
    "prepared": ["--prepare", "raw-32"],
    "derived rows": ["--features", "tests.oracle.functions:frozen_means"],
    "shared": ["--shared-cache", "shared", "--write-back"],
    "shared prepared": ["--prepare", "jpeg-48-q90", "--shared-cache", "shared", "--write-back"],
}
"""The arguments of `streamload warm` where it makes the directory, at least in part."""


def made(kind: str) -> Values:
    """Make the directory of a kind in the current one; its files, and what was read while it was made."""
    if kind == "part":
        _make_part()
        return {"files": files()}
    if kind in _WARMED:
        subprocess.run(
            _warm(kind), check=True, capture_output=True, env={**os.environ, "PYTHONPATH": _PACKAGE}
        )
    outcome = read(KINDS[kind], "cache")
    by_name = files()
    if kind in ("local", "index only"):  # shards are named by their paths; which have room is chance
        by_name = {_SHARD.sub("*", name): "" for name in by_name if "/parts/" not in name}
    return {**strings(outcome), "files": by_name}


def used(kind: str) -> Values:
    """Read the directories of the record in the current one."""
    if kind == "local":  # its shards were elsewhere
        return {}
    unpack(kind)
    outcome = read(KINDS[kind], "cache")
    values = {OLD + name: digests for name, digests in strings(outcome).items()}
    if kind == "index only":
        del outcome.numbers["origin bytes"]  # how far ranges are read ahead is chance
    return {**values, "numbers": outcome.numbers}


def clear() -> None:
    """Remove all directories from the current one."""
    for name in DIRECTORIES:
        shutil.rmtree(name, ignore_errors=True)


def _warm(kind: str) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "streamload",
        "warm",
        _URLS,
        "--cache-dir",
        "cache",
        "--cache-size",
        "50MB",
    ]
    return [*command, *_WARMED[kind]]


def _make_part() -> None:
    """Kill a process that fills when half of the bytes of each shard have come."""
    with ShardServer(root() / "sets") as server:
        server.stop_after(0.5)
        environ = {**os.environ, "http_proxy": server.url, "PYTHONPATH": _PACKAGE}
        process = subprocess.Popen(_warm("part"), env=environ, stderr=subprocess.DEVNULL)
        gates = [server.gate(path.stat().st_size) for path in sorted(Path("few").glob("*.tar"))]
        while sorted(path.stat().st_size for path in Path("cache").glob("parts/*/data")) != sorted(gates):
            assert process.poll() is None, "it ended by itself"
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()


def files() -> dict[str, str]:
    """The files of all directories by name, each with a digest; "" where it differs from run to run."""
    by_name = {}
    for path in sorted(Path().rglob("*")):
        if path.is_file() and path.parts[0] in DIRECTORIES and path.parts[:2] != ("cache", "runs"):
            name = _NONCE.sub(r"\1.*", str(path))
            differs = _DIFFERS.search(str(path))
            by_name[name] = "" if differs else xxhash.xxh3_64_hexdigest(path.read_bytes())
    return by_name


def packed(kind: str) -> bytes:
    """The directories of a kind in the current one, as a tar."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in DIRECTORIES:
            if Path(name).exists():
                tar.add(name, f"{kind}/{name}", filter=_anonymous)
    return buffer.getvalue()


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info if info.isfile() or info.isdir() else None


def unpack(kind: str) -> None:
    """Put the directories of a kind, as they are in the record, into the current one."""
    with tarfile.open(fileobj=io.BytesIO(_archive())) as tar:
        for info in tar.getmembers():
            if info.name.startswith(f"{kind}/"):
                info.name = info.name.removeprefix(f"{kind}/")
                info.uid, info.gid = os.getuid(), os.getgid()
                tar.extract(info)


@functools.cache
def _archive() -> bytes:
    return ARCHIVE.read_bytes()


def write_archive(tars: list[bytes]) -> None:
    """Write the directories of all kinds as the record's archive."""
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        for content in tars:
            with tarfile.open(fileobj=io.BytesIO(content)) as tar:
                for info in tar:
                    archive.addfile(info, tar.extractfile(info) if info.isfile() else None)
