"""Features that are computed once: a decorator that gives a module's calls a `cache_key`.

    keys and inputs → fingerprint → rows that are there → a spot check → the missing ones computed, stored

The module isn't built as long as all rows are there and how it would be built is known
(proof/builds.py). What can't be proved is an error or is computed again.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, TypeVar, overload

import torch

from streamload.derived.calls.feature_rows import rows_of
from streamload.derived.calls.module_call import Call, stored_result
from streamload.derived.proof.builds import Generators
from streamload.derived.proof.lazy import (
    LazyModule,
    Pending,
    build,
    lazy_metaclass,
    made_lazy,
)
from streamload.derived.proof.module_proof import Options, describe, proof_of
from streamload.derived.proof.reads import watched
from streamload.derived.proof.row_check import HITS_BETWEEN
from streamload.derived.store.row_store import CacheLevel, Mapped, RowPlace, open_store
from streamload.derived.store.table import RowCounts
from streamload.errors import OptionError

__all__ = ["CacheLevel", "cache_info", "cache_module"]

_MODULE = TypeVar("_MODULE", bound=type[torch.nn.Module])


class Switches:
    """True if modules are cached in this process, for all of them.

    Attributes:
        is_enabled: whether rows are read and stored.
        is_inference: whether modules are built at once and compute always.
        hits_between: least and most stored rows of a loader from one that is checked to the next.
    """

    def __init__(self) -> None:
        self.is_enabled = True
        self.is_inference = False
        self.hits_between = HITS_BETWEEN


switches = Switches()
places: set[RowPlace] = set()
"""Places of the rows of this process's decorated classes."""


@overload
def cache_module(cache_path: _MODULE) -> _MODULE: ...
@overload
def cache_module(
    cache_path: str | None = "",
    cache_name: str | None = None,
    cache_level: CacheLevel = CacheLevel.DISK,
    safe_load: bool = False,
    max_memory_cache_size_mb: float | None = None,
    *,
    cache_size: str | int | None = None,
    version: str | None = None,
    weights: str | None = None,
    on_mismatch: str = "error",
    check: bool = True,
    store: MutableMapping[str, bytes] | None = None,
) -> Callable[[_MODULE], _MODULE]: ...
def cache_module(
    cache_path: Any = "",
    cache_name: str | None = None,
    cache_level: CacheLevel = CacheLevel.DISK,
    safe_load: bool = False,
    max_memory_cache_size_mb: float | None = None,
    *,
    cache_size: str | int | None = None,
    version: str | None = None,
    weights: str | None = None,
    on_mismatch: str = "error",
    check: bool = True,
    store: MutableMapping[str, bytes] | None = None,
) -> Any:
    """Decorate a class of modules so that what they compute for a key is computed once.

    `module(x, cache_key=keys)` returns what `module(x)` would: of a list of N keys row i of every tensor is
    that of key i, and only rows that aren't stored are computed; of one key the whole result is stored.
    Without `cache_key` nothing is cached. Results have no gradient, and are in memory of their own. A row is
    found only by the same code, arguments, weights, buffers, flags and settings of torch.

    Args:
        cache_path: the directory; "": `rows` in streamload's cache directory; None: nothing is cached. Or the
            class itself, to decorate it without parentheses.
        cache_name: a label by which rows are listed and cleared; None: the class's name.
        cache_level: DISK, MEMORY (this process holds rows, too) or AUTO.
        safe_load: has no effect: nothing is ever unpickled.
        max_memory_cache_size_mb: the limit of rows in memory, of all processes of the node together, in MiB;
            None: by STREAMLOAD_MEMORY_SIZE.
        cache_size: the limit on disk, as of `make_loader`: bytes, "500GB" or "80%".
        version: stands for code and weights, which then don't count: yours to change when they do.
        weights: a file that all weights come from. Then one earlier build is enough to know of the weights
            without building; otherwise two, in different processes.
        on_mismatch: "error": a row that was stored for another input than is given with its key is a
            FeatureMismatch; "recompute": it is computed again, which is logged once.
        check: where the module is built, compute the first row that another process stored again, then at
            most one in a hundred, and refuse all if one differs by more than rounding explains. With a
            version nothing is checked.
        store: a mapping that has the rows in place of a directory, such as a dict or a `diskcache.Cache`; it
            decides itself how many it keeps. See docs/reference/compute-once.md.

    Raises:
        OptionError: an argument that can't be used.
        TypeError: what is decorated is no class of modules.
        FeatureNotCacheable: by a call: the module draws random numbers, is in train mode with dropout or
            batch norm, is sharded, mixes the rows of a batch, needs gradients, has arguments or attributes
            that can't be described, or results that can't be stored.
        FeatureMismatch: by a call: a row is of another input, or isn't what is computed now.
    """
    caller = sys._getframe(1).f_locals
    bare, cache_path = (cache_path, "") if isinstance(cache_path, type) else (None, cache_path)
    if not (cache_path is None or isinstance(cache_path, str) or hasattr(cache_path, "__fspath__")):
        raise OptionError(f"cache_path={cache_path!r}: expected a directory, or None")
    if not isinstance(cache_level, CacheLevel):
        raise OptionError(f"cache_level={cache_level!r}; expected one of {', '.join(map(str, CacheLevel))}")
    if on_mismatch not in ("error", "recompute"):
        raise OptionError(f'on_mismatch={on_mismatch!r}; expected "error" or "recompute"')
    memory_bytes = None
    if max_memory_cache_size_mb is not None:
        memory_bytes = int(max_memory_cache_size_mb * (1 << 20))
        if memory_bytes <= 0:
            raise OptionError(f"max_memory_cache_size_mb={max_memory_cache_size_mb!r}; expected more than 0")
    place = None
    if cache_path is not None:  # of a process that changes its directory, all forks have one store
        path = str(Path(cache_path).expanduser().absolute()) if str(cache_path) else ""
        place = RowPlace(path, cache_level, memory_bytes, cache_size)
    if store is not None:
        if place is None or place.path:
            raise OptionError("store= has the rows in place of a directory: leave out cache_path")
        place = RowPlace("", cache_level, memory_bytes, mapped=Mapped(store))
    if place is not None:
        place.settings()  # what can't be read is said here
        places.add(place)
    if not isinstance(check, bool):
        raise OptionError(f"check={check!r}; expected True or False")
    options = Options(place, cache_name, version, weights, on_mismatch, check)
    if bare is not None:
        return _decorated(bare, options, caller)
    return lambda cls: _decorated(cls, options, caller)


def cache_info(module: torch.nn.Module | type[torch.nn.Module]) -> RowCounts:
    """Counts of the rows where a module's are, in this process; rows that wait to be stored are stored.

    Args:
        module: decorated by `cache_module`: of all directories in which its rows were looked up, those of
            loaders too, and a build counts in each; or its class: of the directory that this names.

    Raises:
        TypeError: it isn't.
    """
    options = getattr(module, "_streamload_options", None)
    if not isinstance(options, Options):
        raise TypeError(f"{module!r} is no module that cache_module decorates")
    places: set[RowPlace | None] = {*(() if isinstance(module, type) else proof_of(module).places)}
    counts = RowCounts()
    for place in places or {options.place}:
        store = None if place is None else open_store(place)
        if store is not None:
            store.flush()
            counts += store.counts
    return counts


class Cached(LazyModule):
    """Additions of `cache_module` to a class: `cache_key=` in calls, and instances that are built lazily."""

    _streamload_transparent = True
    _streamload_options: Options
    _streamload_wrapped: type | None = None

    @classmethod
    def _streamload_eager(cls) -> bool:
        return cls._streamload_options.place is None or switches.is_inference

    def _streamload_made(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.__dict__["_streamload_description"] = describe(type(self), args, kwargs)

    def _streamload_build(self, pending: Pending) -> None:
        description = self.__dict__.get("_streamload_description") or describe(
            type(self), pending.arguments, pending.keywords
        )
        with watched() as reads:
            before = Generators().digests
            super()._streamload_build(pending)
        self.__dict__["_streamload_description"] = description
        proof_of(self).record_build(pending, description, before, reads)

    def __call__(self, *args: Any, cache_key: Any = None, **kwargs: Any) -> Any:
        if cache_key is None:
            args, cache_key = _key_by_position(type(self), args)
            if cache_key is None and len(args) == 1 and not kwargs:
                rows = rows_of(self, args[0])
                if rows is not None:
                    return rows.result()
        options = self._streamload_options
        if cache_key is None or options.place is None or not switches.is_enabled or switches.is_inference:
            return self._streamload_run(*args, **kwargs)
        store = open_store(options.place)
        if store is None:
            with torch.no_grad():
                return self._streamload_run(*args, **kwargs)
        if not kwargs and (stored := stored_result(self, store, args, cache_key)) is not None:
            return stored[0]
        return Call(self, self._streamload_run, store, args, kwargs, cache_key).result()

    def _streamload_run(self, *args: Any, **kwargs: Any) -> Any:
        build(self)
        return super().__call__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        cls = type(self)
        reduced = super().__reduce_ex__(protocol)
        if cls._streamload_wrapped is None or vars(cls).get("_streamload_wrapped") is None:
            return reduced
        return _unwrapped, (cls._streamload_wrapped, cls._streamload_options), self.__dict__


def _decorated(cls: type[torch.nn.Module], options: Options, names: dict[str, Any]) -> Any:
    """The class with `Cached` among its bases; one that has a name already stays, and gets a subclass.

    A class that is being defined has no name yet: there `super(Name, self)` will mean what is returned here,
    so that has to be the class itself, made anew.
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
        raise TypeError(f"cache_module decorates a class of torch.nn.Module, got {cls!r}")
    holder: Any = sys.modules.get(cls.__module__)
    for step in cls.__qualname__.split("."):
        holder = getattr(holder, step, None)
    if holder is cls or names.get(cls.__name__) is cls:
        return _subclass(cls, options)
    if issubclass(cls, Cached):
        cls._streamload_options = options
        return cls
    return made_lazy(cls, Cached, {"_streamload_options": options})


def _subclass(cls: type[torch.nn.Module], options: Options) -> Any:
    if (cls, options) in _subclasses:
        return _subclasses[cls, options]
    bases = (cls,) if issubclass(cls, Cached) else (Cached, cls)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    members = {**names, "_streamload_options": options, "_streamload_wrapped": cls}
    metaclass: Any = type(cls)
    _subclasses[cls, options] = lazy_metaclass(metaclass)(cls.__name__, bases, members)
    return _subclasses[cls, options]


_subclasses: dict[tuple[type, Options], Any] = {}


def _unwrapped(cls: type[torch.nn.Module], options: Options) -> Any:
    subclass = _subclass(cls, options)
    return subclass.__new__(subclass)


def _key_by_position(cls: type, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    """A key that stands where `forward` itself has a parameter of that name."""
    position = _place_of_key(cls.forward)  # type: ignore[attr-defined]
    if position is None or len(args) <= position:
        return args, None
    return args[:position] + args[position + 1 :], args[position]


@functools.lru_cache(maxsize=256)
def _place_of_key(forward: Any) -> int | None:
    names = list(inspect.signature(forward).parameters)
    return names.index("cache_key") - 1 if "cache_key" in names else None
