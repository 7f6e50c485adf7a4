"""Hostile input through the real loader, in a process with little memory and little time to spare.

The process is forked off one that has imported everything already. From then on it may take MEMORY_BYTES of
memory and CPU_SECONDS of processor time; what goes beyond ends as an error that no test expects.
"""

from __future__ import annotations

import io
import logging
import math
import multiprocessing
import re
import resource
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

from streamload.testing.server import ShardServer
from tests.fuzzing.blocks import END, member
from tests.support import flat

MEMORY_BYTES = 288 << 20
"""220 MiB for decoding the largest image (`transforms/limits.py`), its file, its batch and a loader's own."""
CPU_SECONDS = 2
_DEADLINE_SECONDS = 60.0
_IMPORTED = ("pytest", "numpy", "torch", "PIL.Image", "streamload.loader", "streamload.origins.web",
             "streamload.transforms.decode")  # fmt: skip
multiprocessing.set_forkserver_preload(list(_IMPORTED))  # before another test has started the forkserver


class Outcome(NamedTuple):
    """What came of reading some shards."""

    keys: list[str]
    """Of the samples that were delivered, in order."""
    values: list[Any]
    """Their captions, or what map_sample made of them."""
    images: list[Any]
    """Their images, where preprocess= was given."""
    skipped: dict[str, int]
    """Samples that were left out, by cause; those of 0 aren't in it."""
    given_up: int
    """Shards that were left out, to their end."""
    error: str
    """The name of the error that ended it; empty: none did."""
    log: str
    """What was logged on the way, and the error's message."""


def picture(kind: str = "JPEG", size: tuple[int, int] = (24, 16), mode: str = "RGB", **options: Any) -> bytes:
    """A small image with something in it."""
    image = Image.linear_gradient("L").resize(size).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def sample(key: str, image: bytes | None = None, text: bytes = b"a caption", **more: bytes) -> bytes:
    """A good sample, but for what is given."""
    members = {"jpg": picture() if image is None else image, "txt": text, **more}
    return b"".join(member(f"{key}.{extension}", payload) for extension, payload in members.items())


def outcomes(sources: Sequence[Sequence[str]], cache: Path, **options: Any) -> list[Outcome]:
    """Read each list of shards, one after the other, in one process within the limits.

    Args:
        sources: lists of URLs.
        cache: where caches are made, one for each list.
        options: of make_loader; by default all samples in order, without workers.
    """
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, [list(urls) for urls in sources], cache, options))
    process.start()
    theirs.close()
    try:
        if not ours.poll(_DEADLINE_SECONDS):
            pytest.fail(f"it still ran after {_DEADLINE_SECONDS:.0f} s")
        found: list[Outcome] = ours.recv()
    except EOFError:
        process.join()
        pytest.fail(f"the process ended with {process.exitcode} (-24: more than {CPU_SECONDS} s of CPU)")
    finally:
        ours.close()
        process.kill()
        process.join()
        process.close()
    return found


def read_both_ways(directory: Path, shards: Mapping[str, bytes | Path], **options: Any) -> Outcome:
    """Read shards as local files and from a web server; both have to come to the same.

    Args:
        directory: an empty one.
        shards: in order: their names, and what is in them.
        options: of make_loader.
    """
    data = directory / "data"
    data.mkdir()
    for name, content in shards.items():
        if isinstance(content, Path):
            content.rename(data / name)
        else:
            (data / name).write_bytes(content)
    with ShardServer(data) as server:
        sources = [[str(data / name) for name in shards], [f"{server.url}/{name}" for name in shards]]
        local, remote = outcomes(sources, directory, **options)
    if local.error:  # it comes when it is known: a batch in front of it may not have been made by then
        shorter, longer = sorted((local.keys, remote.keys), key=len)
        assert longer[: len(shorter)] == shorter
        assert (local.skipped, local.given_up, local.error) == (remote.skipped, remote.given_up, remote.error)
    else:
        assert local[:-1] == remote[:-1], f"of local files: {local}\nfrom a server: {remote}"
    return remote


def among_good_ones(directory: Path, content: bytes | Path, **options: Any) -> Outcome:
    """Read a shard between two good ones; what of these comes is checked here, and isn't in the outcome."""
    good = {name: sample(f"{name}-1") + sample(f"{name}-2") + END for name in ("first", "last")}
    found = read_both_ways(
        directory, {"a.tar": good["first"], "hostile.tar": content, "z.tar": good["last"]}, **options
    )
    if not found.error:
        assert found.keys[:2] == ["first-1", "first-2"], found
        assert found.keys[-2:] == ["last-1", "last-2"], found
        found = found._replace(keys=found.keys[2:-2], values=found.values[2:-2], images=found.images[2:-2])
    return found


def _run(connection: Connection, sources: list[list[str]], cache: Path, options: dict[str, Any]) -> None:
    said = io.StringIO()
    logging.basicConfig(stream=said, level=logging.DEBUG, force=True)
    _limit()
    found = []
    for number, urls in enumerate(sources):
        found.append(_read(urls, cache / f"cache-{number}", options, said))
        said.seek(0)
        said.truncate()
    connection.send(found)


def _limit() -> None:
    held = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert held is not None
    most = int(held[1]) * 1024 + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    seconds = math.ceil(time.process_time()) + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))


def _read(urls: list[str], cache: Path, options: dict[str, Any], said: io.StringIO) -> Outcome:
    plain = {"train": False, "num_workers": 0, "batch_size": 4, "with_keys": True, "cache_size": "2GB"}
    plain |= {"max_bad_samples": None, "max_bad_shards": None}
    keys: list[str] = []
    values: list[Any] = []
    images: list[Any] = []
    error = ""
    with flat.make_loader(urls, cache_dir=cache, **{**plain, **options}) as loader:
        try:
            for batch in loader:
                if isinstance(batch, dict):
                    keys += batch.pop("__key__")
                    values += batch["value"] if isinstance(batch["value"], list) else batch["value"].tolist()
                else:
                    pictures, captions, extra = batch
                    keys += extra["__key__"]
                    values += captions
                    images += list(pictures) if isinstance(pictures, list) else []
        except Exception as exc:
            error = type(exc).__name__
            said.write(f"{error}: {exc}\n")
        stats = loader.stats()
    skipped = {cause: count for cause, count in stats.samples_skipped.items() if count}
    return Outcome(keys, values, images, skipped, stats.shards_given_up, error, said.getvalue())
