"""Features that are computed once: a decorator that gives a module's calls a `cache_key`.

    keys and inputs → fingerprint → rows that are there → a spot check → the missing ones computed, stored

The module isn't built as long as all rows are there and how it would be built is known (builds.py). What
proves a row is in fingerprint.py; what can't be proved is an error or is computed again.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import random
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, overload

import numpy as np
import torch

from streamload.derived.builds import Build, Generators, believed, process_name, read_builds, watched, written
from streamload.derived.code import Describer, digest_of
from streamload.derived.fingerprint import (
    FORMAT,
    Fingerprint,
    Stamp,
    Watch,
    built_parts,
    device_of,
    differences,
    stamp_of,
    torch_settings,
)
from streamload.derived.lazy import (
    LazyModule,
    Pending,
    build,
    is_pending,
    lazy_metaclass,
    made_lazy,
    pending_of,
)
from streamload.derived.module_checks import Chance, is_close, refuse_module, row_of
from streamload.derived.row_format import Result, Row, join, layout_of, seal
from streamload.derived.row_keys import Inputs, keys_of, row_key
from streamload.derived.row_store import CacheLevel, Place, RowStore, open_store
from streamload.derived.rows import RowCounts
from streamload.errors import CacheCorrupt, FeatureError, FeatureMismatch, FeatureNotCacheable, OptionError

__all__ = ["CacheLevel", "Options", "cache_info", "cache_module"]

logger = logging.getLogger("streamload")

_CANARIES = 4
"""So many rows are computed again after a build."""
_MODULE = TypeVar("_MODULE", bound=type[torch.nn.Module])


@dataclass(frozen=True)
class Options:
    """How the rows of a class are kept; the arguments of `cache_module`.

    Attributes:
        place: where; None: they aren't.
        label: what they are listed and cleared by; None: the class's name.
        version: stands for code and weights.
        weights: a file that all weights come from.
        on_mismatch: "error", or "recompute".
    """

    place: Place | None
    label: str | None
    version: str | None
    weights: str | None
    on_mismatch: str


class Switches:
    """Whether modules are cached in this process, for all of them.

    Attributes:
        is_enabled: whether rows are read and stored.
        is_inference: whether modules are built at once and compute always.
    """

    def __init__(self) -> None:
        self.is_enabled = True
        self.is_inference = False


switches = Switches()
places: set[Place] = set()
"""Where the rows of this process's decorated classes go."""


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
) -> Any:
    """Decorate a class of modules so that what they compute for a key is computed once.

    `module(x, cache_key=keys)` returns what `module(x)` would: of a list of N keys row i of every tensor is that
    of key i, and only rows that aren't stored are computed; of one key the whole result is stored. Without
    `cache_key` nothing is cached. Results have no gradient, and are in memory of their own. A row is found only
    by the same code, arguments, weights, buffers, flags and settings of torch as it was computed by.

    Args:
        cache_path: the directory; "": `rows` in streamload's cache directory; None: nothing is cached. Or the
            class itself, to decorate it without parentheses.
        cache_name: a label by which rows are listed and cleared; None: the class's name.
        cache_level: DISK, MEMORY (also one copy in memory for all processes of the node) or AUTO.
        safe_load: has no effect: nothing is ever unpickled.
        max_memory_cache_size_mb: the limit of the copy in memory, in MiB; None: by STREAMLOAD_MEMORY_SIZE.
        cache_size: the limit on disk, as of `make_loader`: bytes, "500GB" or "80%".
        version: stands for code and weights, which then don't count: yours to change when they do.
        weights: a file that all weights come from. Then one earlier build is enough to know of the weights
            without building; otherwise two, in different processes.
        on_mismatch: "error": a row that was stored for another input than is given with its key is a
            FeatureMismatch; "recompute": it is computed again.

    Raises:
        OptionError: an argument that can't be used.
        TypeError: what is decorated is no class of modules.
        FeatureNotCacheable: by a call: the module draws random numbers, is in train mode with dropout or batch
            norm, is sharded, mixes the rows of a batch, needs gradients, has arguments or attributes that can't
            be described, or results that can't be stored.
        FeatureMismatch: by a call: a row is of another input, or isn't what is computed now.
    """
    caller = sys._getframe(1).f_locals
    if isinstance(cache_path, type):
        places.add(Place(""))
        return _decorated(cache_path, Options(Place(""), None, None, None, "error"), caller)
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
    place = None if cache_path is None else Place(str(cache_path), cache_level, memory_bytes, cache_size)
    if place is not None:
        place.settings()  # what can't be read is said here
        places.add(place)
    options = Options(place, cache_name, version, weights, on_mismatch)
    return lambda cls: _decorated(cls, options, caller)


def cache_info(module: torch.nn.Module | type[torch.nn.Module]) -> RowCounts:
    """What happened to the rows of a module's directory in this process.

    Args:
        module: decorated by `cache_module`, or its class.

    Raises:
        TypeError: it isn't.
    """
    options = getattr(module, "_streamload_options", None)
    if not isinstance(options, Options):
        raise TypeError(f"{module!r} is no module that cache_module decorates")
    store = None if options.place is None else open_store(options.place)
    return RowCounts() if store is None else replace(store.counts)


class Cached(LazyModule):
    """What `cache_module` adds to a class: `cache_key=` in calls, and that instances are built lazily."""

    _streamload_transparent = True
    _streamload_options: Options
    _streamload_wrapped: type | None = None

    @classmethod
    def _streamload_eager(cls) -> bool:
        if cls._streamload_options.place is None or switches.is_inference:
            return True
        if cls._streamload_options.place.level is not CacheLevel.DISK:
            open_store(cls._streamload_options.place)  # the copy in memory outlives the workers that fill it
        return False

    def _streamload_made(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.__dict__["_streamload_description"] = _describe(type(self), args, kwargs)

    def _streamload_build(self, pending: Pending) -> None:
        description = self.__dict__.get("_streamload_description") or _describe(
            type(self), pending.arguments, pending.keywords
        )
        with watched() as inputs:
            before = Generators().digest
            super()._streamload_build(pending)
        self.__dict__["_streamload_description"] = description
        _count(self, "builds")
        _record(self, pending, description, before, Generators().digest, inputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache_key = kwargs.pop("cache_key", None)
        if cache_key is None:
            args, cache_key = _key_by_position(type(self), args)
        options = self._streamload_options
        if cache_key is None or options.place is None or not switches.is_enabled or switches.is_inference:
            return _compute(self, args, kwargs)
        store = open_store(options.place)
        if store is None:
            with torch.no_grad():
                return _compute(self, args, kwargs)
        return _Call(self, options, store, args, kwargs, cache_key).result()

    def __reduce_ex__(self, protocol: Any) -> Any:
        cls = type(self)
        reduced = super().__reduce_ex__(protocol)
        if cls._streamload_wrapped is None or vars(cls).get("_streamload_wrapped") is None:
            return reduced
        return _unwrapped, (cls._streamload_wrapped, cls._streamload_options), self.__dict__


def _decorated(cls: type[torch.nn.Module], options: Options, names: dict[str, Any]) -> Any:
    """The class with `Cached` among its bases; one that has a name already stays as it is, and gets a subclass.

    A class that is being defined has no name yet: there `super(Name, self)` will mean what is returned here, so
    that has to be the class itself, made anew.
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
        raise TypeError(f"cache_module decorates a class of torch.nn.Module, got {cls!r}")
    found: Any = sys.modules.get(cls.__module__)
    for step in cls.__qualname__.split("."):
        found = getattr(found, step, None)
    if found is cls or names.get(cls.__name__) is cls:
        return _subclass(cls, options)
    if issubclass(cls, Cached):
        cls._streamload_options = options
        return cls
    return made_lazy(cls, Cached, {"_streamload_options": options})


@functools.cache
def _subclass(cls: type[torch.nn.Module], options: Options) -> Any:
    bases = (cls,) if issubclass(cls, Cached) else (Cached, cls)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made = {**names, "_streamload_options": options, "_streamload_wrapped": cls}
    return lazy_metaclass(type(cls))(cls.__name__, bases, made)


def _unwrapped(cls: type[torch.nn.Module], options: Options) -> Any:
    made = _subclass(cls, options)
    return made.__new__(made)


def _key_by_position(cls: type, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    """A key that stands where `forward` itself has a parameter of that name."""
    at = _place_of_key(cls.forward)  # type: ignore[attr-defined]
    if at is None or len(args) <= at:
        return args, None
    return args[:at] + args[at + 1 :], args[at]


@functools.lru_cache(maxsize=256)
def _place_of_key(forward: Any) -> int | None:
    names = list(inspect.signature(forward).parameters)
    return names.index("cache_key") - 1 if "cache_key" in names else None


def _compute(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    build(module)
    return super(Cached, module).__call__(*args, **kwargs)


def _count(module: Any, name: str) -> None:
    options = module._streamload_options
    store = None if options.place is None else open_store(options.place)
    if store is not None:
        setattr(store.counts, name, getattr(store.counts, name) + 1)


@dataclass
class Description:
    """What is known of a module before it is built.

    Attributes:
        parts: of its fingerprint: code and arguments.
        strings: in them, some of which may name files.
        error: why it can't be known; "": it is.
    """

    parts: dict[str, Any]
    strings: set[str]
    error: str = ""


def _describe(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Description:
    describer = Describer()
    version = cls._streamload_options.version  # type: ignore[attr-defined]
    try:
        arguments = _bound(cls, args, kwargs)
        described = {name: describer.value(value, f"{cls.__name__}({name}=)") for name, value in arguments}
        if version is None:
            describer.reach(cls, cls.__name__)
    except FeatureNotCacheable as exc:
        if version is None:
            return Description({}, set(), str(exc))
        described = {}
    code = describer.code if version is None else {}
    return Description({"arguments": described, "code": code, "class": cls.__name__}, describer.strings)


def _bound(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Arguments by their names, with defaults: a call that says a default is the one that leaves it out."""
    try:
        bound = inspect.signature(cls.__init__).bind(None, *args, **kwargs)  # type: ignore[misc]
    except (TypeError, ValueError):
        return [*((str(at), value) for at, value in enumerate(args)), *kwargs.items()]
    bound.apply_defaults()
    return list(bound.arguments.items())[1:]


def _description(module: Any) -> Description:
    description: Description | None = module.__dict__.get("_streamload_description")
    if description is None:
        if is_pending(module):
            pending = pending_of(module)
            description = _describe(type(module), pending.arguments, pending.keywords)
        else:  # made by something that isn't its class
            description = Description({}, set(), f"how this {type(module).__name__} was made isn't known")
        module.__dict__["_streamload_description"] = description
    return description


@dataclass
class _Built:
    """What was last known of a built module."""

    stamp: Stamp
    watch: Watch
    parts: dict[str, Any]
    code: dict[str, str]
    device: torch.device


class _Proof:
    """What proves the rows of one module, in this process."""

    def __init__(self) -> None:
        self.built: _Built | None = None
        self.believed: tuple[list[str], Build] | None = None
        self.fingerprints: dict[Any, Fingerprint] = {}
        self.noted: set[bytes] = set()
        self.served: Fingerprint | None = None
        """The last by which rows were returned while the module wasn't built."""
        self.canaries = _CANARIES
        self.are_rows_apart = False
        self.is_chance_harmless = False
        self.refused_at: Any = None


_proofs: weakref.WeakKeyDictionary[Any, _Proof] = weakref.WeakKeyDictionary()


def _proof(module: Any) -> _Proof:
    proof = _proofs.get(module)
    if proof is None:
        proof = _proofs[module] = _Proof()
    return proof


def _fingerprint(module: Any, options: Options, store: RowStore) -> Fingerprint:
    """The fingerprint of a module now; it is built if that is needed to know it.

    Raises:
        FeatureNotCacheable: it can't be known.
    """
    description = _description(module)
    if description.error:
        raise FeatureNotCacheable(description.error)
    proof = _proof(module)
    if options.version is not None:
        return _of_version(module, options.version, description, proof)
    if is_pending(module):
        known = _believed(module, options, store, description, proof)
        if known is not None:
            return _with_settings(
                proof, (id(known), known.device), description, known.parts, known.parts["code"]
            )
        build(module)
    built = _of_built(module, description, proof)
    return _with_settings(
        proof, (id(built.parts), built.parts["device"]), description, built.parts, built.code
    )


def _of_version(module: Any, version: str, description: Description, proof: _Proof) -> Fingerprint:
    device = pending_of(module).device if is_pending(module) else device_of(module)
    parts = {"version": version, "training": module.training, "device": device.type}
    return _with_settings(proof, (device.type, module.training), description, parts, {})


def _with_settings(
    proof: _Proof, which: Any, description: Description, parts: dict[str, Any], code: dict[str, str]
) -> Fingerprint:
    settings = torch_settings(parts["device"])
    known = proof.fingerprints.get((which, settings))
    if known is None:
        if len(proof.fingerprints) > 64:
            proof.fingerprints.clear()
        whole = {**description.parts, **parts, "code": code, "settings": list(settings), "format": FORMAT}
        known = proof.fingerprints[which, settings] = Fingerprint.of(whole)
    return known


def _believed(
    module: Any, options: Options, store: RowStore, description: Description, proof: _Proof
) -> Build | None:
    pending = pending_of(module)
    asked = [meaning for _, _, meaning in pending.asked]
    if proof.believed is not None and proof.believed[0] == asked:
        return proof.believed[1]
    builds = read_builds(store.disk.read_note(_recipe(description, pending)))
    known = believed(builds, pending.generators.digest, needed=1 if options.weights is not None else 2)
    if known is not None:
        proof.believed = (asked, known)
    return known


def _recipe(description: Description, pending: Pending) -> bytes:
    """What a build depends on, as the key of its records."""
    asked = [[method, meaning] for method, _, meaning in pending.asked if method != "requires_grad_"]
    weights = [torch.__version__, sys.version_info[:2]]
    return b"build" + digest_of([description.parts, asked, weights, str(torch.get_default_dtype())]).encode()


def _record(
    module: Any, pending: Pending, description: Description, before: str, after: str, inputs: Any
) -> None:
    """Remember how a module came out, for those that aren't built."""
    options = module._streamload_options
    store = None if options.place is None else open_store(options.place)
    if store is None or description.error or options.version is not None:
        return
    try:
        built = _of_built(module, description, _proof(module))
    except FeatureNotCacheable:
        return  # it is said when a key is given
    describer = Describer()
    for one in module.modules():
        describer.reach(type(one), type(one).__name__)
    strings = description.strings | ({str(options.weights)} if options.weights is not None else set())
    latest = Build(
        process_name(),
        before,
        before != after,
        inputs.is_closed or options.weights is not None,
        inputs.files(strings),
        {**built.parts, "code": built.code},
        describer.origins,
        str(built.device),
    )
    key = _recipe(description, pending)
    builds = read_builds(store.disk.read_note(key))
    store.disk.write_note(key, written(builds, latest), _label(module, options))


def _of_built(module: Any, description: Description, proof: _Proof) -> _Built:
    """What is known of a built module now; anew if something in it has changed."""
    stamp = stamp_of(module)
    built = proof.built
    if built is not None and built.stamp == stamp and built.watch.is_unchanged(whole=False):
        return built
    describer = Describer()
    parts = built_parts(module, describer)
    code = {**description.parts["code"], **describer.code}
    if built is not None and parts == built.parts and code == built.code:
        parts, code = built.parts, built.code
    elif built is not None:
        proof.canaries, proof.are_rows_apart, proof.is_chance_harmless = _CANARIES, False, False
    proof.built = _Built(stamp, Watch(module), parts, code, device_of(module))
    return proof.built


def _label(module: Any, options: Options) -> str:
    return options.label if options.label is not None else type(module).__name__


class _Call:
    """One call with keys.

    Rows are handled by the places of their keys among `unique`, where each key is once.
    """

    def __init__(
        self,
        module: Any,
        options: Options,
        store: RowStore,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cache_key: Any,
    ):
        self.module, self.options, self.store = module, options, store
        self.counts = store.counts
        given = [*args, *kwargs.values()]
        keys = keys_of(cache_key, given)
        self.rows = None if keys is None else len(keys)
        self.keys: list[Any] = [cache_key] if keys is None else keys
        self.inputs = Inputs(args, kwargs, self.rows)
        self._refuse(given)
        self.proof = _proof(module)

    def _refuse(self, given: Sequence[Any]) -> None:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.inputs.tensors):
            raise FeatureNotCacheable(
                "an input requires a gradient, and stored rows have none: detach() it, or call the module "
                "without cache_key"
            )
        first = next((value for value in given if isinstance(value, (torch.Tensor, np.ndarray))), None)
        if self.rows is not None and first is not None and (not first.ndim or first.shape[0] != self.rows):
            raise OptionError(
                f"{self.rows} keys for an input of shape {list(first.shape)}; expected one key a row"
            )

    def result(self) -> Any:
        """What the module returns for the inputs."""
        if self.rows == 0:
            return self._detached(*self.inputs.of([]))
        self._look_up()
        if self.missing and is_pending(self.module):
            build(self.module)
            if self._is_another():
                self._look_up()
        if self.found and not is_pending(self.module):
            self._canaries()
        return self._put_together(self._compute_missing() if self.missing else None)

    def _look_up(self) -> None:
        """Read the rows that are there."""
        self.fingerprint = _fingerprint(self.module, self.options, self.store)
        context = self._context()
        places: dict[Any, int] = {}
        self.where: list[int] = []
        self.unique: list[bytes | None] = []
        self.first: list[int] = []
        for at, key in enumerate(self.keys):
            name = (
                None
                if key is None
                else row_key(self.fingerprint.digest, context, key, is_row=self.rows is not None)
            )
            place = places.setdefault(name if name is not None else (None, at), len(self.unique))
            if place == len(self.unique):
                self.unique.append(name)
                self.first.append(at)
            self.where.append(place)
        names = [name for name in self.unique if name is not None]
        rows = self.store.read(names, _label(self.module, self.options))
        unreadable = self._unreadable({row.layout for row in rows.values()})
        self.found: dict[int, Row] = {
            place: row
            for place, name in enumerate(self.unique)
            if name is not None and (row := rows.get(name)) is not None and row.layout not in unreadable
        }
        self._spot_check()
        self.missing = [place for place in range(len(self.unique)) if place not in self.found]
        self.counts.hits += sum(place in self.found for place in self.where)
        self.counts.misses += len(self.missing)
        if is_pending(self.module):
            self.proof.served = self.fingerprint if self.found else self.proof.served

    def _unreadable(self, layouts: set[bytes]) -> set[bytes]:
        """Layouts with a class in them that isn't imported here: such rows are computed again."""
        found = set()
        for layout in layouts:
            try:
                layout_of(layout)
            except CacheCorrupt as exc:
                _say_once(f"rows of {type(self.module).__name__} are computed again: {exc}")
                found.add(layout)
        return found

    def _context(self) -> bytes:
        if not self.inputs.context:
            return b""
        described = Describer().value([list(one) for one in self.inputs.context], "an argument")
        return json.dumps(described, sort_keys=True).encode()

    def _is_another(self) -> bool:
        """Whether the module came out other than was believed before it was built."""
        now = _fingerprint(self.module, self.options, self.store)
        if now.digest == self.fingerprint.digest:
            return False
        served, self.proof.served = self.proof.served, None
        if served is not None and served.digest != now.digest:
            self.counts.mismatches += 1
            names = ", ".join(differences(served.parts, now.parts)[:5])
            raise FeatureMismatch(
                f"{type(self.module).__name__} was built otherwise than twice before ({names}), and rows of the "
                f"other were returned already: its __init__ depends on what can't be seen; name the version "
                f'yourself, cache_module(version="1"), and start anew'
            )
        return True

    def _spot_check(self) -> None:
        """Compare the input of one row with that which it was computed from; and of keys given twice."""
        known = [place for place, row in self.found.items() if row.input_digest]
        if known:
            place = known[random_place(len(known))]
            (digest,) = self.inputs.digests([self.first[place]])
            if digest not in (0, self.found[place].input_digest):
                self._mismatch(place)
        if len(self.unique) < len(self.keys):
            digests = self.inputs.digests(range(len(self.keys)))
            for at, place in enumerate(self.where):
                if digests[at] != digests[self.first[place]]:
                    raise FeatureMismatch(
                        f"key {self.keys[at]!r} is given for two different inputs in one call: a key has to name "
                        f"one input"
                    )

    def _mismatch(self, place: int) -> None:
        self.counts.mismatches += 1
        key = self.keys[self.first[place]]
        if self.options.on_mismatch == "error":
            raise FeatureMismatch(
                f"the row of key {key!r} was computed from another input: two samples share the key, the sample "
                f"has changed, or something random comes before the module; put what tells inputs apart into the "
                f'key, or compute such rows again with cache_module(on_mismatch="recompute")'
            )
        digests = self.inputs.digests([self.first[one] for one in range(len(self.unique))])
        stale = [one for one, row in self.found.items() if digests[one] not in (0, row.input_digest)]
        for one in stale:
            del self.found[one]

    def _canaries(self) -> None:
        """Compute some rows again, the first after a build, and compare."""
        places = [] if not self.proof.canaries or not self.inputs.leaves else list(self.found)
        digests = self.inputs.digests([self.first[place] for place in places])
        places = [
            place
            for place, digest in zip(places, digests, strict=True)
            if digest and digest == self.found[place].input_digest
        ][: self.proof.canaries]
        if not places:
            return
        self.proof.canaries -= len(places)
        value = self._detached(*self.inputs.of([self.first[place] for place in places]))
        computed = Result(value, None if self.rows is None else len(places))
        _, stored = self._joined(places)
        if not is_close(computed.leaves, stored):
            self.counts.mismatches += 1
            self.store.delete([name for place in places if (name := self.unique[place]) is not None])
            key = self.keys[self.first[places[0]]]
            raise FeatureMismatch(
                f"the row of key {key!r} isn't what {type(self.module).__name__} computes now from the same input: "
                f"its results depend on what can't be seen (another library, a file, chance); those rows are "
                f'deleted; name the version yourself: cache_module(version="1")'
            )

    def _compute_missing(self) -> tuple[Result, list[int]]:
        """Compute what is missing, and store what may be stored."""
        places = self.missing
        began = time.perf_counter()
        value = self._detached(*self.inputs.of([self.first[place] for place in places]))
        self.counts.compute_seconds += time.perf_counter() - began
        self.counts.rows_computed += len(places)
        result = Result(value, None if self.rows is None else len(places))
        self._refuse_mixing(result, places)
        now = _fingerprint(self.module, self.options, self.store)
        if now.digest != self.fingerprint.digest:
            names = ", ".join(differences(self.fingerprint.parts, now.parts)[:5])
            _say_once(f"rows of {type(self.module).__name__} aren't stored, as computing changes it: {names}")
        elif self.options.version is not None or self._weights_are_same():
            self._store(result, places)
        return result, places

    def _weights_are_same(self) -> bool:
        built = self.proof.built
        return built is not None and built.watch.is_unchanged(whole=True)

    def _store(self, result: Result, places: Sequence[int]) -> None:
        digests = self.inputs.digests([self.first[place] for place in places])
        sealed = [
            (name, seal(name, result.layout, body, digest))
            for place, body, digest in zip(places, result.bodies(), digests, strict=True)
            if (name := self.unique[place]) is not None
        ]
        if not sealed:
            return
        label = _label(self.module, self.options)
        if self.fingerprint.digest not in self.proof.noted:
            self.proof.noted.add(self.fingerprint.digest)
            note = json.dumps(dict(self.fingerprint.parts), sort_keys=True).encode()
            self.store.disk.write_note(b"parts" + self.fingerprint.digest, note, label)
        self.store.write(sealed, label)

    def _refuse_mixing(self, result: Result, places: Sequence[int]) -> None:
        """Compute one row by itself: it has to be the same as among others."""
        if self.proof.are_rows_apart or self.rows is None or len(places) < 2 or not self.inputs.leaves:
            return
        alone = Result(self._detached(*self.inputs.of([self.first[places[-1]]])), 1)
        if not is_close(alone.leaves, row_of(result, len(places) - 1)):
            raise FeatureNotCacheable(
                f"{type(self.module).__name__} computes another result for a row by itself than among others: it "
                f"mixes the rows of a batch (a norm or mean over dimension 0?), or something random is in it; "
                f"give such calls one key for the whole batch"
            )
        self.proof.are_rows_apart = True

    def _detached(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute without gradients; what draws random numbers that matter is refused."""
        module = self.module
        build(module)
        flags = (module.training, self.proof.built.stamp if self.proof.built is not None else None)
        if self.proof.refused_at != flags:
            refuse_module(module)
            self.proof.refused_at = flags
        with torch.no_grad():
            if self.proof.is_chance_harmless:
                return super(Cached, module).__call__(*args, **kwargs)
            before, chance = Generators(), Chance(device_of(module))
            value = super(Cached, module).__call__(*args, **kwargs)
            if chance.was_used():
                self._refuse_chance(value, before, args, kwargs)
        return value

    def _refuse_chance(
        self, value: Any, before: Generators, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        after = Generators()
        try:
            before.restore()
            torch.rand(1)
            random.random()
            np.random.random_sample()
            again = super(Cached, self.module).__call__(*args, **kwargs)
        finally:
            after.restore()
        if not is_close(Result(value, None).leaves, Result(again, None).leaves):
            raise FeatureNotCacheable(
                f"{type(self.module).__name__} draws random numbers, and its results depend on them: a stored row "
                f"would repeat one draw for ever; move what is random out of the module"
            )
        self.proof.is_chance_harmless = True

    def _joined(self, places: Sequence[int]) -> tuple[bytes, list[Any]]:
        rows = [self.found[place] for place in places]
        if any(row.layout != rows[0].layout for row in rows):
            raise FeatureNotCacheable("rows of this call have different shapes, so they can't be one batch")
        _, leaves = join(rows, self._device(), is_row=self.rows is not None)
        return rows[0].layout, leaves

    def _device(self) -> torch.device:
        if is_pending(self.module):
            known = self.proof.believed
            return torch.device(known[1].device) if known is not None else pending_of(self.module).device
        return self.proof.built.device if self.proof.built is not None else device_of(self.module)

    def _put_together(self, computed: tuple[Result, list[int]] | None) -> Any:
        """The result of all keys, in their order, out of stored rows and computed ones."""
        places = list(self.found)
        if computed is None:
            layout, leaves = self._joined(places)
            order = places
        else:
            result, order = computed
            layout, leaves = result.layout, result.leaves
            if places:
                found_layout, found = self._joined(places)
                if found_layout != layout:
                    raise FeatureNotCacheable(
                        "rows of this call have different shapes, so they can't be one batch"
                    )
                leaves = [_concatenated(one, other) for one, other in zip(found, leaves, strict=True)]
                order = [*places, *order]
        if self.rows is not None:
            at = {place: number for number, place in enumerate(order)}
            wanted = [at[place] for place in self.where]
            if wanted != list(range(len(order))):
                leaves = [_reordered(leaf, wanted) for leaf in leaves]
        try:
            return layout_of(layout).build(leaves)
        except (TypeError, ValueError) as exc:
            raise FeatureError(
                f"the result of {type(self.module).__name__} can't be made again: {exc}"
            ) from exc


def random_place(count: int) -> int:
    """A place among so many, by a generator of its own: no seed of the user's is touched."""
    return _places.randrange(count)


_places = random.Random()
_said: set[str] = set()


def _concatenated(one: Any, other: Any) -> Any:
    if isinstance(one, np.ndarray):
        return np.concatenate([one, other])
    return (
        torch.cat([_as_bytes(one), _as_bytes(other)]).view(one.dtype).reshape(-1, *one.shape[1:])
        if one.numel() and other.numel()
        else torch.cat([one, other])
    )


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _reordered(leaf: Any, wanted: list[int]) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf[wanted]
    index = torch.as_tensor(wanted, device=leaf.device)
    if not leaf.numel():
        return leaf[index]
    return (
        leaf.contiguous()
        .reshape(len(leaf), -1)
        .view(torch.uint8)[index]
        .view(leaf.dtype)
        .reshape(len(wanted), *leaf.shape[1:])
    )


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        logger.warning("%s", message)
