"""Options that can be set by STREAMLOAD_* variables, arguments and flags. One row per option.

`Settings` is the only reader of those variables. An argument overrides the variable, the variable the
default, and `sources` records which applied. The command line, `streamload doctor` and the reference page are
made from the same rows. Nothing is created and no space is measured here: a share of the disk stays a share
until the tier is opened.
"""

from __future__ import annotations

import difflib
import functools
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeVar, get_args, overload

from streamload.options.directories import default_cache_dir, own_directory
from streamload.options.values import (
    CacheSize,
    FreeDisk,
    parse_cache_size,
    parse_choice,
    parse_count,
    parse_directory,
    parse_folder,
    parse_free_disk,
    parse_listen,
    parse_seconds,
    parse_size,
    parse_switch,
)

Revalidate = Literal["never", "start", "always"]
Where = Literal["auto", "disk", "memory"]
Copy = Literal["auto", "never", "always"]

DEFAULT_SHARED_WAIT_SECONDS = 120.0
"""Another node fetches and stores a shard of 300 MB at 3 MB/s in this time, or one of 1 GB at 10 MB/s."""
DEFAULT_ORIGIN_WAIT_SECONDS = 300.0
"""Half of NCCL's default timeout: the time that other ranks wait for one in a collective operation."""
DEFAULT_METRICS_LISTEN = "127.0.0.1:9434"
DEFAULT_MAX_IMAGE_PIXELS = 20_000_000
"""An image of this size takes at most 240 MB to decode (transforms/limits.py)."""
DEFAULT_FREE_DISK = FreeDisk()

_T = TypeVar("_T")


class Option(Generic[_T]):
    """The only declaration of an option; a descriptor that gives its value in a Settings.

    Args:
        parse: takes a value or its text and the option's name for errors; returns the value.
        default: as a user would give it, None for no value, or a function of the environment.
        help: one or two sentences, for the docstring, the command line and the reference page.
        argument: of make_loader: "cache_dir", or "cache.ahead" for Cache(ahead=…); "": there is only the
            variable.
        variable: its environment variable, if that isn't STREAMLOAD_ and its name.
        unit: of a number: "bytes", "seconds", "pixels".
        is_secret: whether the value may hold credentials, and is left out of reprs.

    Attributes:
        name: the name in Settings.
        flag: on the command line.
    """

    name: str

    def __init__(
        self,
        parse: Callable[[Any, str], _T],
        default: object,
        help: str,  # noqa: A002
        *,
        argument: str,
        variable: str = "",
        unit: str = "",
        is_secret: bool = False,
    ):
        self.parse, self.default, self.help, self.argument = parse, default, help, argument
        self.variable, self.unit, self.is_secret = variable, unit, is_secret

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.flag = "--" + name.replace("_", "-")
        self.variable = self.variable or f"STREAMLOAD_{name.upper()}"

    @overload
    def __get__(self, settings: None, owner: type) -> Option[_T]: ...
    @overload
    def __get__(self, settings: Settings, owner: type) -> _T: ...
    def __get__(self, settings: Settings | None, owner: type) -> Option[_T] | _T:
        if settings is None:
            return self
        value: _T = settings._values[self.name]
        return value

    def __set__(self, settings: Settings, value: _T) -> None:
        raise AttributeError(f"settings are read-only: {self.name}")


def _choice(allowed: Any) -> Callable[[Any, str], Any]:
    return lambda value, name: parse_choice(value, get_args(allowed), name)


class Settings:
    """The values of all options. Read-only.

    Args:
        arguments: values by option name; None counts as not given.
        environ: with the STREAMLOAD_* variables; by default this process's environment.

    Attributes:
        sources: by option name: "argument", the name of its variable, or "default".

    Raises:
        OptionError: a value that can't be parsed; the message names the argument or variable.
        TypeError: an unknown option name.
    """

    cache_dir: Final = Option[Path](
        lambda value, name: own_directory(parse_directory(value, name)),
        default_cache_dir,
        "The directory of this node's cache.",
        argument="cache_dir",
    )
    cache_size: Final = Option[CacheSize](
        parse_cache_size,
        "80%",
        'The limit of the cache: bytes, "500GB", or "80%" of the free space plus what it holds.',
        argument="cache_size",
    )
    cache: Final = Option[Where](
        _choice(Where),
        "disk",
        'Where the cache is: "disk", "memory" (a tmpfs), or "auto": in memory if the data is known to fit '
        "there or no disk is usable, else on disk.",
        argument="cache.where",
    )
    memory_size: Final = Option[CacheSize](
        lambda value, name: parse_cache_size(value, name, "the free memory"),
        "50%",
        'The limit of a cache in memory: bytes, "20GB", or "50%" of the free memory.',
        argument="cache.memory_size",
    )
    free_disk: Final = Option[FreeDisk](
        lambda value, name: value if isinstance(value, FreeDisk) else parse_free_disk(value, name),
        DEFAULT_FREE_DISK,
        'Space that the cache leaves free on its disk: bytes, "20GB", or "5%" of the disk.',
        argument="cache.free_disk",
    )
    ahead: Final = Option[int](
        parse_size,
        "1GiB",
        "How many bytes to prefetch ahead of the readers.",
        argument="cache.ahead",
        unit="bytes",
    )
    revalidate: Final = Option[Revalidate](
        _choice(Revalidate),
        "never",
        'When to ask the origin whether a cached shard has changed: "never", before its first use in a run '
        '("start"), or in each epoch ("always").',
        argument="cache.revalidate",
    )
    copy: Final = Option[Copy](
        _choice(Copy),
        "auto",
        'Whether shards under a path are copied into the cache: "auto" copies those on a network file system '
        'where the cache can keep a fifth of them, "never", or "always".',
        argument="cache.copy",
    )
    shared_cache: Final = Option[str | None](
        parse_folder,
        None,
        "A folder shared by many nodes, in an object store or on a network, that is asked for a shard before "
        'its origin: "s3://bucket/folder", "/mnt/nfs/folder". If it fails, the origin is asked.',
        argument="cache.shared",
        is_secret=True,
    )
    write_back: Final = Option[bool](
        parse_switch,
        False,
        "Store shards fetched from origins in the shared cache, in the background.",
        argument="cache.write_back",
        variable="STREAMLOAD_SHARED_WRITE_BACK",
    )
    shared_wait: Final = Option[float](
        parse_seconds,
        DEFAULT_SHARED_WAIT_SECONDS,
        "The longest wait, in seconds, for a shard that another node is fetching into the shared cache.",
        argument="cache.shared_wait",
        unit="seconds",
    )
    origin_wait: Final = Option[float](
        parse_seconds,
        DEFAULT_ORIGIN_WAIT_SECONDS,
        "How many seconds to wait for a server or bucket that stopped answering after it had served shards; "
        "0: no longer than for one shard.",
        argument="cache.origin_wait",
        unit="seconds",
    )
    max_image_pixels: Final = Option[int](
        parse_count,
        DEFAULT_MAX_IMAGE_PIXELS,
        "Larger images are skipped, counted as `too_large`, as are those that need as much memory or time "
        "to decode (docs/guides/samples.md).",
        argument="images.max_pixels",
        unit="pixels",
    )

    metrics: Final = Option[str | None](
        parse_listen,
        None,
        "Where a training itself serves the metrics of its node's runs to Prometheus: 127.0.0.1:9434. "
        "Without it `streamload metrics serve` or a daemon does.",
        argument="",
    )
    record: Final = Option[Path | None](
        parse_directory,
        None,
        "A folder in which each rank records its numbers for `streamload report`.",
        argument="",
    )

    def __init__(self, arguments: Mapping[str, object], environ: Mapping[str, str] | None = None):
        if unknown := arguments.keys() - {option.name for option in options()}:
            raise TypeError(f"there is no option {', '.join(sorted(unknown))}")
        environ = os.environ if environ is None else environ
        _warn_of_unknown(environ)
        self._values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        for option in options():
            self._values[option.name], self.sources[option.name] = _resolve(
                option, arguments.get(option.name), environ
            )

    def __repr__(self) -> str:
        shown = (
            f"{option.name}={self._values[option.name]!r}" for option in options() if not option.is_secret
        )
        return f"Settings({', '.join(shown)})"


def read_settings(*, environ: Mapping[str, str] | None = None, **arguments: object) -> Settings:
    """The settings from arguments, then the environment, then defaults; see `Settings`."""
    return Settings(arguments, environ)


@functools.cache
def options() -> tuple[Option[Any], ...]:
    """All options, in the order in which they are shown."""
    return tuple(row for row in vars(Settings).values() if isinstance(row, Option))


def _resolve(option: Option[Any], value: object, environ: Mapping[str, str]) -> tuple[Any, str]:
    """The value of an option and its source. An empty variable counts as not set."""
    if value is not None:
        return option.parse(value, option.name), "argument"
    if text := environ.get(option.variable, "").strip():
        return option.parse(text, option.variable), option.variable
    if callable(option.default):
        return option.default(environ), "default"
    return None if option.default is None else option.parse(option.default, option.name), "default"


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    names = {option.variable for option in options()}
    for name in environ:
        if name.startswith("STREAMLOAD_") and name not in names:
            _warn_once(name)


@functools.cache
def _warn_once(name: str) -> None:
    names = sorted(option.variable for option in options())
    # By what follows the prefix, which alone would make a short name alike.
    rests = {variable.removeprefix("STREAMLOAD_"): variable for variable in names}
    close = difflib.get_close_matches(name.removeprefix("STREAMLOAD_"), rests, n=1, cutoff=0.6)
    advice = f"did you mean {rests[close[0]]}?" if close else f"there are {', '.join(names)}"
    warnings.warn(f"streamload doesn't read a variable {name}; {advice}", UserWarning, stacklevel=5)
