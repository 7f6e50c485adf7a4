"""`ShardWriter`: samples → shards that have their names only once they are whole, by webdataset's writer."""

from __future__ import annotations

import fcntl
import json
import os
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from streamload.errors import OptionError
from streamload.shards.samples import NAME_LIMIT_BYTES, split_name

SIZES = "sizes.json"
TAR_OPTIONS: Mapping[str, Any] = {"mtime": 0, "format": "GNU_FORMAT"}
"""Options of webdataset's TarWriter: equal samples give equal bytes, and keys may be long."""


def publish(part: Path, path: Path) -> None:
    """Give a written file its name. After a power cut it is there whole, or not at all."""
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def is_readable(key: str, extensions: Collection[str]) -> bool:
    """Whether loaders read these members under this key."""
    names = [f"{key}.{extension}" for extension in extensions]
    return (
        [split_name(name) for name in names] == [(key, extension.lower()) for extension in extensions]
        and len({name.lower() for name in names}) == len(names) > 0
        and max(len(name.encode("utf-8", "surrogatepass")) for name in names) <= NAME_LIMIT_BYTES
        and "\0" not in "".join(names)  # at which a tar ends a name
    )


def lock(folder: Path, holder: object) -> Callable[[], object]:
    """Keep others from writing into a folder, until the result is called or the holder is gone.

    Raises:
        OptionError: another one is writing into it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise OptionError(
            f"{folder} is being written by another ShardWriter or `streamload pack`: close it, or wait"
        ) from None
    except OSError:
        pass  # a file system without locks
    release = weakref.finalize(holder, _unlock, descriptor)
    release.atexit = False
    return release


def _unlock(descriptor: int) -> None:
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # of forked processes, too, which have the same open file
    os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write a small JSON file as `publish` does."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(value, indent=1))
    publish(part, path)


class ShardWriter:
    """Writes samples into shards, and continues where a killed run stopped.

        with streamload.ShardWriter("shards", max_samples=10_000) as writer:
            for sample in itertools.islice(samples(), writer.samples, None):
                writer.write(sample)

    A shard appears as `00000.tar`, … once it is whole and on the disk; sizes.json, which loaders read, counts
    its samples. A `with` block that ends by an error drops the shard it has begun, and so does an error of
    the disk. A new writer continues after the whole shards: the same samples in the same order give the same
    bytes, however often the run was killed.

    Args:
        folder: created if missing.
        max_samples: of a shard.
        max_bytes: a shard ends after the sample with which its payloads reach so many; None: no limit.

    Attributes:
        samples: number of samples in whole shards, which a new run has to skip, and written since.
        sizes: samples of each whole shard, by file name.

    Raises:
        OptionError: a limit is below 1, `folder` has tars that sizes.json doesn't count, or another writer is
            at work in it.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, max_samples: int = 10_000, max_bytes: int | None = None
    ):
        if max_samples < 1 or (max_bytes is not None and max_bytes < 1):
            raise OptionError(f"max_samples={max_samples}, max_bytes={max_bytes}: expected 1 or more")
        self._folder = Path(folder).absolute()
        self._limits = {"maxcount": max_samples, "maxsize": max_bytes or 2**62}
        self._folder.mkdir(parents=True, exist_ok=True)
        self._release = lock(self._folder, self)
        counted = self._folder / SIZES
        sizes: dict[str, int] = json.loads(counted.read_bytes()) if counted.exists() else {}
        present = {path.name for path in self._folder.glob("*.tar")}
        self.sizes = {
            name: sizes[name] for name in sorted(present & {*sizes})
        }  # the last may be only counted
        if [*self.sizes] != [f"{number:05d}.tar" for number in range(len(present))]:
            self._release()
            raise OptionError(
                f"{self._folder} has other tars than 00000.tar, … as counted in {SIZES}: give another folder"
            )
        for part in self._folder.glob(".*.part"):
            part.unlink()
        self.samples = sum(self.sizes.values())
        self._writer: Any = None
        self._last_key: str | None = None
        self._is_closed = False

    def write(self, sample: Mapping[str, Any]) -> None:
        """Write a sample.

        Args:
            sample: `__key__`, and members by extension: bytes, text, or a value that webdataset encodes
                by the extension (`cls`: a number, `json`: JSON, `npy`: an array, `png`: an image).

        Raises:
            OptionError: loaders would read it under another key, or as one with the sample before.
            ValueError: webdataset has no encoder for a value (and whatever its encoder raises), or the writer
                is closed.
            OSError: the writer is closed, and the shard it has begun is gone.
        """
        if self._is_closed:
            raise ValueError("the ShardWriter is closed; a new one continues after the whole shards")
        key = sample.get("__key__")
        names = [name for name in sample if not name.startswith("_")]
        if not isinstance(key, str) or not is_readable(key, names):
            raise OptionError(
                f"__key__={key!r:.200} with the members {names!r:.200}: expected a path without a dot in its "
                f"last part, and at least one member, none of them twice; a name has at most "
                f"{NAME_LIMIT_BYTES:,} bytes"
            )
        if key == self._last_key:
            raise OptionError(f"__key__={key!r:.200} comes twice in a row: both would be one sample")
        try:
            if self._writer is None:
                from webdataset.writer import ShardWriter as TarShards

                pattern = f"{self._folder}/.".replace("%", "%%") + "%05d.tar.part"
                options = {"start_shard": len(self.sizes), "verbose": 0, **self._limits, **TAR_OPTIONS}
                self._writer = TarShards(pattern, post=self._publish, **options)
            self._writer.write(dict(sample))
        except OSError:  # perhaps within the sample
            self._drop()
            raise
        self._last_key = key
        self.samples += 1

    def _publish(self, part: str) -> None:
        """Count the shard first: its name is the sign that it is whole."""
        name = Path(part).name[1 : -len(".part")]
        sizes = {**self.sizes, name: self._writer.count}
        write_json(self._folder / SIZES, sizes)
        publish(Path(part), self._folder / name)
        self.sizes = sizes

    def close(self) -> None:
        """Write the last shard, which may have fewer samples. Idempotent."""
        try:
            if self._writer is not None:
                self._writer.close()
        except BaseException:
            self._drop()
            raise
        self._writer, self._is_closed = None, True
        self._release()

    def _drop(self) -> None:
        """Close without the shard that was begun."""
        writer, self._writer, self._is_closed = self._writer, None, True
        if writer is not None:
            writer.post = None
            try:
                writer.close()
            except OSError:  # the tar has no end; now its file
                with suppress(OSError):
                    writer.close()
        self.samples = sum(self.sizes.values())
        for part in self._folder.glob(".*.part"):
            part.unlink()
        self._release()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif not self._is_closed:
            self._drop()
