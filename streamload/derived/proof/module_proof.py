"""The proof of a module's rows in this process: the fingerprint of the module as it is now, built or not.

Code and arguments are known at once; weights, buffers and attributes come from the built module, or from
records of earlier builds (builds.py).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from streamload.derived import log_once, logger
from streamload.derived.proof.builds import Build, Generators, believed, read_builds, with_latest
from streamload.derived.proof.code import ARRANGEMENT, Describer, digest_of
from streamload.derived.proof.fingerprint import (
    FORMAT,
    Fingerprint,
    LookPace,
    ModuleWatch,
    Stamp,
    built_parts,
    device_of,
    differences,
    torch_settings,
)
from streamload.derived.proof.lazy import Pending, build, is_pending, not_built, pending_of, unbuilt
from streamload.derived.proof.reads import ReadNames, Reads, digests_of
from streamload.derived.proof.row_check import is_refused, was_checked
from streamload.derived.store.row_store import RowPlace, RowStore, open_store
from streamload.errors import FeatureMismatch, FeatureNotCacheable

_FINGERPRINTS_KEPT = 64
_READ = b"read"
"""Prefix of the key of a note: with `Fingerprint.base`, the names that computing its rows reads."""
_Base = tuple[RowPlace, bytes]
"""A place and a `Fingerprint.base`."""


@dataclass(frozen=True)
class Options:
    """Options of keeping the rows of a class; the arguments of `cache_module`."""

    place: RowPlace | None  # None: no rows are kept
    label: str | None  # by which rows are listed and cleared; None: the class's name
    version: str | None  # replaces code and weights in the fingerprint
    weights: str | None  # file that all weights come from
    on_mismatch: str  # "error", or "recompute"
    check: bool = True  # whether a few stored rows are computed again in each run, unless there is a version

    @property
    def is_checked(self) -> bool:
        """True if a few rows are computed again in each run."""
        return self.check and self.version is None


@dataclass
class Description:
    """Record of a module before it is built."""

    parts: dict[str, Any]  # of the fingerprint: code and arguments
    strings: set[str]  # all strings in the parts; some may name files
    error: str = ""  # why the module can't be described; "": it can


def describe(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Description:
    """Describe a class and the arguments of its `__init__`."""
    describer = Describer()
    version = cls._streamload_options.version  # type: ignore[attr-defined]
    try:
        arguments = _bound(cls, args, kwargs)
        described = {name: describer.value(value, f"{cls.__name__}({name}=)") for name, value in arguments}
        if version is None:
            describer.reach(cls, cls.__name__)
            patches = describer.patches()
    except FeatureNotCacheable as exc:
        if version is None:
            return Description({}, set(), str(exc))
        described = {}
    parts = {"arguments": described, "code": {}, "class": cls.__name__}
    if version is None:
        parts |= {"code": describer.arranged_code, "patches": patches}
    return Description(parts, describer.strings)


def _bound(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Arguments by name, defaults included: passing a default explicitly changes nothing."""
    try:
        bound = inspect.signature(cls.__init__).bind(None, *args, **kwargs)  # type: ignore[misc]
    except (TypeError, ValueError):
        return [*((str(number), value) for number, value in enumerate(args)), *kwargs.items()]
    bound.apply_defaults()
    return list(bound.arguments.items())[1:]


def description_of(module: Any) -> Description:
    """Describe a module, built or not."""
    description: Description | None = module.__dict__.get("_streamload_description")
    if description is None:
        if is_pending(module):
            pending = pending_of(module)
            description = describe(type(module), pending.arguments, pending.keywords)
        else:  # not made by calling its class
            description = Description({}, set(), f"how this {type(module).__name__} was made isn't known")
        module.__dict__["_streamload_description"] = description
    return description


def _describe_before_fork() -> None:
    """Describe modules once for all workers: reading an object copies its memory page in each child."""
    for module in list(not_built):
        options = options_of(module)
        if is_pending(module) and options.place is not None and options.place.mapped is None:
            with contextlib.suppress(Exception):  # a later call describes it again and raises
                description_of(module)


os.register_at_fork(before=_describe_before_fork)


@dataclass
class Built:
    """Description of a built module."""

    parts: dict[str, Any]  # of the fingerprint, code included
    device: torch.device
    watch: ModuleWatch
    looked_at: float  # `time.monotonic()` before it was described


class Proof:
    """Proof of the rows of one module, in this process.

    Attributes:
        built: latest description of the built module; None: not built, or a version replaces it.
        served: latest fingerprint whose rows were returned while the module wasn't built.
        refused: error messages by fingerprint, for fingerprints whose stored rows differ from computed ones.
        noted: fingerprints whose parts have a note beside their rows.
        places: places where rows were looked up; a loader's rows are in its cache directory.
        has_settled: whether the module has computed since it was built.
        are_rows_apart: whether a row came out the same alone and in a batch, in the module's present state.
        is_chance_harmless: whether the random numbers that it draws are known not to change its results.
        looks, looks_after_computing: when to describe the built module again although nothing seems changed.
        seconds_per_row: time to compute a row in this process; 0: none was computed.
    """

    def __init__(self, module: Any) -> None:
        self._module = weakref.ref(module)
        self.built: Built | None = None
        self.served: Fingerprint | None = None
        self.refused: dict[bytes, str] = {}
        self.noted: set[bytes] = set()
        self.places: set[RowPlace] = set()
        self.has_settled = self.are_rows_apart = self.is_chance_harmless = False
        self.looks, self.looks_after_computing, self._looks_at_reads = LookPace(), LookPace(), LookPace()
        self.seconds_per_row, self._computed_rows, self._compute_seconds = 0.0, 0, 0.0
        self._believed: tuple[list[str], Build] | None = None
        """The calls that were recorded when the expected build was looked up, and that build."""
        self._was_built = False
        self._record: tuple[bytes, Build] | None = None
        """Key and record of the build in this process."""
        self._noted_in: set[RowPlace] = set()
        """Places where rows were looked up since the module was built in this process."""
        self._fingerprints: dict[Any, tuple[Fingerprint, Any]] = {}
        """By the ids of what a fingerprint covers; the objects are held, so that their ids aren't reused."""
        self._read_names: dict[_Base, ReadNames | None] = {}
        """Names of the files and variables that computing reads; None: unknown."""
        self._contents: dict[_Base, dict[str, Any]] = {}
        """Their contents when the fingerprint was made; no entry if computing reads nothing."""

    @property
    def module(self) -> Any:
        """The module."""
        return self._module()

    def fingerprint(self, store: RowStore, inputs: Mapping[str, Any] | None = None) -> Fingerprint:
        """The fingerprint of the module now; builds the module if there is no other way to know it.

        It gets a number if an earlier run found its rows to be wrong.

        Args:
            store: of the rows.
            inputs: description of how inputs are made from samples, for rows that are looked up by sample.

        Raises:
            FeatureNotCacheable: it can't be determined.
        """
        module = self.module
        if (self._contents or self._believed) and self._looks_at_reads.is_due:
            self.look_at_reads()
        if self.built is not None and not is_pending(module):
            parts = self.look().parts
        else:
            with unbuilt(module):
                parts = self._parts(store)
        if store.place not in self._noted_in:
            self._note_build(store)
        settings = torch_settings(parts["device"])
        covered = (id(parts), id(inputs), settings)
        entry = self._fingerprints.get(covered)
        if entry is None:
            if len(self._fingerprints) > _FINGERPRINTS_KEPT:
                self._fingerprints.clear()
            whole = {**description_of(module).parts, **parts, "settings": list(settings), "format": FORMAT}
            whole |= {} if inputs is None else {"inputs": dict(inputs)}
            entry = self._fingerprints[covered] = self._with_reads(store, whole), (parts, inputs)
            if is_pending(module):
                self._say_checked(store, entry[0])
        return entry[0]

    def _parts(self, store: RowStore) -> dict[str, Any]:
        """Parts of the fingerprint from the module's state; the same object until the state changes."""
        module, options = self.module, options_of(self.module)
        description = description_of(module)
        if description.error:
            raise FeatureNotCacheable(description.error)
        if options.version is not None:
            return _parts_of_version(options.version, module.training, self.device.type)
        if is_pending(module):
            if (expected := self._expected_build(store, description)) is not None:
                return expected.parts
            build(module)
        return self.look().parts

    def _expected_build(self, store: RowStore, description: Description) -> Build | None:
        """The build that the next one will equal, if that is known."""
        pending = pending_of(self.module)
        meanings = [meaning for _, _, meaning in pending.asked]
        if self._believed is None or self._believed[0] != meanings:
            builds = read_builds(store.read_note(_recipe(description, pending)))
            has_weights = options_of(self.module).weights is not None
            latest = believed(builds, pending.generators.digests, has_weights=has_weights)
            self._believed = None if latest is None else (meanings, latest)
        return None if self._believed is None else self._believed[1]

    def look(self, *, anew: bool = False) -> Built:
        """Describe the built module; returns the same parts object if nothing has changed.

        Args:
            anew: describe it even if the cheap checks find no change.

        Raises:
            FeatureNotCacheable: it can't be described.
        """
        start, last = time.monotonic(), self.built
        if last is not None and not anew and not self.looks.is_due and last.watch.is_unchanged():
            return last
        module, describer = self.module, Describer()
        stamp = Stamp(module)
        parts = built_parts(module, describer)
        code = {**description_of(module).parts["code"], **describer.code}
        parts["code"] = {**code, f"{ARRANGEMENT} when built": describer.arranged_code[ARRANGEMENT]}
        if last is not None and parts == last.parts and last.watch.are_device_samples_unchanged():
            parts = last.parts
            self.looks.looked(start)
        elif last is not None:
            self.are_rows_apart = self.is_chance_harmless = False
        self.built = Built(parts, device_of(module), ModuleWatch(module, stamp), start)
        return self.built

    def is_of(self, fingerprint: Fingerprint) -> bool:
        """True if a fingerprint has the latest described state and torch's present settings."""
        if self.built is None:
            return False
        parts = {**self.built.parts, "settings": list(torch_settings(self.built.parts["device"]))}
        return all(fingerprint.parts.get(name) == value for name, value in parts.items())

    def proving(self) -> Callable[[bool], bool | None]:
        """Return the function that proves rows computed now; see `ComputedRows.is_proved`."""
        module, built, computed_at = self.module, self.built, time.monotonic()

        def is_proved(look: bool) -> bool | None:
            proof = proof_of(module)
            if look and proof.built is not None and proof.built.looked_at < computed_at:
                try:
                    proof.look(anew=True)
                except FeatureNotCacheable:  # the next call raises it
                    proof.built = None
            if proof.built is None or built is None or proof.built.parts is not built.parts:
                proof.say_changed({} if built is None else built.parts)
                return False
            return True if proof.built.looked_at >= computed_at else None

        return is_proved

    def say_changed(self, parts: Mapping[str, Any]) -> None:
        """Log once which parts of the module have changed, so that its computed rows aren't stored."""
        latest = {} if self.built is None else self.built.parts
        names = [name for name in differences(parts, latest) if name.partition(".")[0] in latest]
        log_once(
            f"rows of {type(self.module).__name__} aren't stored, as computing changes it, or something did "
            f"since: {', '.join(names[:5])}"
        )

    def record_build(
        self, pending: Pending, description: Description, before: dict[str, str], reads: Reads
    ) -> None:
        """Record the outcome of the build for later processes; the next call with a key stores the record.

        Args:
            before: digests of the random generators before the build.
            reads: of the build.
        """
        module, options = self.module, options_of(self.module)
        if options.place is None:
            return
        self._was_built, self._record, self._noted_in, self._believed = True, None, set(), None
        if description.error or options.version is not None:
            return
        try:
            built = self.look()
        except FeatureNotCacheable:
            return  # the first call with a key raises it
        describer = Describer()
        for child in module.modules():
            describer.reach(type(child), type(child).__name__)
        strings = description.strings | ({str(options.weights)} if options.weights is not None else set())
        latest = Build(
            before,
            [name for name, state in Generators().digests.items() if state != before[name]],
            reads.is_closed or options.weights is not None,
            reads.files(strings),
            digests_of(reads.variables),
            built.parts,
            describer.origins,
            str(built.device),
        )
        self._record = _recipe(description, pending), latest

    def record_settled(self, before: Fingerprint) -> None:
        """Update the record of the build after the first computation has changed the module."""
        if self._record is None or self.built is None:
            return
        key, latest = self._record
        if any(before.parts.get(name) != value for name, value in latest.parts.items()):
            return
        self._record = key, replace(latest, parts=self.built.parts)
        for place in self._noted_in:
            if (store := open_store(place)) is not None:
                self._store_record(store)

    def _note_build(self, store: RowStore) -> None:
        """Count the build and store its record, once in each place where rows are looked up."""
        self.places.add(store.place)
        self._noted_in.add(store.place)
        if self._was_built:
            store.counts.builds += 1
            self._store_record(store)

    def _store_record(self, store: RowStore) -> None:
        if self._record is not None:
            key, latest = self._record
            store.write_note(key, with_latest(store.read_note(key), latest), label_of(self.module))

    def raise_if_refused(self, fingerprint: Fingerprint) -> None:
        """Refuse a fingerprint whose rows were found to be wrong.

        Raises:
            FeatureMismatch: its rows were found to be wrong.
        """
        if fingerprint.digest in self.refused:
            raise FeatureMismatch(self.refused[fingerprint.digest])

    def has_unknown_reads(self, store: RowStore, fingerprint: Fingerprint) -> bool:
        """True if the files and variables that computing reads are unknown."""
        base = store.place, fingerprint.base
        return base in self._read_names and self._read_names[base] is None

    def record_reads(self, store: RowStore, fingerprint: Fingerprint, names: ReadNames) -> None:
        """Store the names that computing reads; their contents are part of the fingerprint from now on."""
        store.write_note(_READ + fingerprint.base, names.written(), label_of(self.module))
        self._read_names[store.place, fingerprint.base] = names
        self._forget_fingerprints()

    def look_at_reads(self) -> bool:
        """Compare the files and variables that were read; False if what computing reads has changed."""
        start = time.monotonic()
        if self._believed is not None and not self._believed[1].still_holds():
            self._believed = None
        for base, contents in self._contents.items():
            names = self._read_names[base]
            if names is None or names.contents() != contents:
                self._forget_fingerprints()
                return False
        self._looks_at_reads.looked(start)
        return True

    def _forget_fingerprints(self) -> None:
        self._fingerprints.clear()
        self._contents.clear()

    def _with_reads(self, store: RowStore, whole: dict[str, Any]) -> Fingerprint:
        """The fingerprint of the parts and of what computing reads; numbered if rows were refused."""
        digest = Fingerprint.of(whole).digest
        base = store.place, digest
        if options_of(self.module).version is None:
            names = self._read_names.get(base) or ReadNames.read(store.read_note(_READ + digest))
            contents = None if names is None else names.contents()
            self._read_names[base] = None if contents is None else names
            if contents:
                self._contents[base] = whole["read"] = contents
        fingerprint, number = Fingerprint.of(whole), 0
        while fingerprint.digest not in self.refused and is_refused(store, fingerprint):
            number += 1
            fingerprint = Fingerprint.of({**whole, "computed again": number})
        return replace(fingerprint, base=digest)

    def _say_checked(self, store: RowStore, fingerprint: Fingerprint) -> None:
        """Log when the rows of a module that isn't built were last checked: this run checks none."""
        checked_at = was_checked(store, fingerprint)
        logger.info(
            "%s isn't built as long as all its rows are there; they were checked last: %s. `streamload "
            "features check` computes some again",
            label_of(self.module),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(checked_at)) if checked_at else "never",
        )

    @property
    def device(self) -> torch.device:
        """Device of the module, or the device that it will be on once built."""
        module = self.module
        if is_pending(module):
            return (
                pending_of(module).device
                if self._believed is None
                else torch.device(self._believed[1].device)
            )
        return device_of(module) if self.built is None else self.built.device

    def count_computed(self, rows: int, seconds: float) -> None:
        """Count computed rows and the time they took."""
        self._computed_rows += rows
        self._compute_seconds += seconds
        self.seconds_per_row = self._compute_seconds / self._computed_rows


_proofs: weakref.WeakKeyDictionary[Any, Proof] = weakref.WeakKeyDictionary()


def proof_of(module: Any) -> Proof:
    """The proof of a module in this process, with the module's lifetime."""
    proof = _proofs.get(module)
    if proof is None:
        proof = _proofs[module] = Proof(module)
    return proof


@functools.lru_cache(maxsize=_FINGERPRINTS_KEPT)
def _parts_of_version(version: str, training: bool, device: str) -> dict[str, Any]:
    return {"version": version, "training": training, "device": device}


def _recipe(description: Description, pending: Pending) -> bytes:
    """The key of a build's records: a digest of everything the build depends on."""
    calls = [[method, meaning] for method, _, meaning in pending.asked if method != "requires_grad_"]
    weights = [torch.__version__, sys.version_info[:2]]
    return b"build" + digest_of([description.parts, calls, weights, str(torch.get_default_dtype())]).encode()


def options_of(module: Any) -> Options:
    """The options of a cached module."""
    options: Options = module._streamload_options
    return options


def label_of(module: Any) -> str:
    """Name by which the rows of a module are listed and cleared."""
    label = options_of(module).label
    return type(module).__name__ if label is None else label
