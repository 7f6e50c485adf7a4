"""The fingerprint of a module as it is now, built or not.

What the class and its arguments tell is known at once; weights, buffers and attributes by the built module,
or by records of earlier builds (builds.py).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from xxhash import xxh3_64_hexdigest

from streamload.derived import logger
from streamload.derived.proof.builds import (
    Build,
    Generators,
    believed,
    process_name,
    read_builds,
    with_latest,
    written,
)
from streamload.derived.proof.code import ARRANGEMENT, Describer, digest_of
from streamload.derived.proof.fingerprint import (
    FORMAT,
    Fingerprint,
    LookPace,
    ModuleWatch,
    Stamp,
    built_parts,
    device_of,
    torch_settings,
)
from streamload.derived.proof.lazy import Pending, build, is_pending, not_built, pending_of, unbuilt
from streamload.derived.proof.reads import ReadNames, Reads, digests_of
from streamload.derived.proof.rounding import Difference
from streamload.derived.proof.row_check import RowChecks
from streamload.derived.store.row_store import RowPlace, RowStore, open_store
from streamload.derived.store.sealed import Row
from streamload.errors import FeatureMismatch, FeatureNotCacheable

_FINGERPRINTS_KEPT = 64
_REFUSED = b"refused"
"""Before a fingerprint: the key of a note that its rows aren't right."""
_CHECKED = b"checked"
"""Before a fingerprint: the key of a note of when its rows were found to be right."""
_READ = b"read"
"""Before `Fingerprint.base`: the key of a note of what computing its rows reads."""
_NOTHING_READ = ReadNames([], [])

RowDigests = Mapping[str, str]
"""Digests of rows' bytes, by the rows' names as hexadecimal digits."""


@dataclass(frozen=True)
class Options:
    """Options of keeping the rows of a class; the arguments of `cache_module`."""

    place: RowPlace | None  # where; None: they aren't
    label: str | None  # what they are listed and cleared by; None: the class's name
    version: str | None  # stands for code and weights
    weights: str | None  # a file that all weights come from
    on_mismatch: str  # "error", or "recompute"
    check: bool = True  # whether stored rows are computed again in each run, a few, unless there is a version

    @property
    def is_checked(self) -> bool:
        """True if a few rows are computed again in each run."""
        return self.check and self.version is None


@dataclass
class Description:
    """Record of a module before it is built."""

    parts: dict[str, Any]  # of its fingerprint: code and arguments
    strings: set[str]  # in them, some of which may name files
    error: str = ""  # why it can't be known; "": it is


def describe(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Description:
    """Facts of a class and the arguments of its `__init__`."""
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
    """Arguments by their names, with defaults: a call that says a default is the one that leaves it out."""
    try:
        bound = inspect.signature(cls.__init__).bind(None, *args, **kwargs)  # type: ignore[misc]
    except (TypeError, ValueError):
        return [*((str(number), value) for number, value in enumerate(args)), *kwargs.items()]
    bound.apply_defaults()
    return list(bound.arguments.items())[1:]


def description_of(module: Any) -> Description:
    """Facts of a module whether it is built or not."""
    description: Description | None = module.__dict__.get("_streamload_description")
    if description is None:
        if is_pending(module):
            pending = pending_of(module)
            description = describe(type(module), pending.arguments, pending.keywords)
        else:  # made by something that isn't its class
            description = Description({}, set(), f"how this {type(module).__name__} was made isn't known")
        module.__dict__["_streamload_description"] = description
    return description


def _describe_before_fork() -> None:
    """Describe modules once for all workers: a look at an object copies its page in each."""
    for module in list(not_built):
        options = options_of(module)
        if is_pending(module) and options.place is not None and options.place.mapped is None:
            with contextlib.suppress(Exception):  # the call that describes it raises it, too
                description_of(module)


os.register_at_fork(before=_describe_before_fork)


@dataclass
class Built:
    """Last description of a built module."""

    parts: dict[str, Any]
    code: dict[str, str]
    device: torch.device
    stamp: Stamp
    watch: ModuleWatch
    looked_at: float  # before it was described, `time.monotonic()`

    def holds(self) -> bool:
        """True if nothing in the module has changed, as far as a look that takes little time tells."""
        return self.stamp.holds() and self.watch.is_unchanged()


class Proof:
    """Proof of the rows of one module, in this process."""

    def __init__(self) -> None:
        self.built: Built | None = None
        self.believed: tuple[list[str], Build, torch.device] | None = None
        self.fingerprints: dict[Any, tuple[Fingerprint, Any]] = {}
        """By what a fingerprint covers; with that, so that nothing else gets its id."""
        self._latest: tuple[Any, Any, Any, Fingerprint | None] = (None, None, None, None)
        self.noted: set[bytes] = set()
        self.served: Fingerprint | None = None
        """The last by which rows were returned while the module wasn't built."""
        self._read_names: dict[tuple[RowPlace, bytes], ReadNames | None] = {}
        """Names that computing reads, by place and `Fingerprint.base`; None: they aren't known."""
        self._contents: dict[tuple[RowPlace, bytes], dict[str, Any]] = {}
        """Contents of these names when the fingerprint was made; nothing where computing reads nothing."""
        self.refused: dict[bytes, str] = {}
        """Of fingerprints whose rows aren't what is computed now: what to say of them."""
        self.recorded: tuple[bytes, Build | None] | None = None
        """The record of the build, if there can be one, and its key."""
        self.recorded_in: set[RowPlace] = set()
        self.places: set[RowPlace] = set()
        """Of the rows that were looked up: a loader's are in its cache directory."""
        self.has_settled = False
        """True if the module has computed since it was built."""
        self.are_rows_apart = False
        self.is_chance_harmless = False
        self.reads, self.looks, self.beliefs = LookPace(), LookPace(), LookPace()
        """When to describe a built module anew while rows are read, and while they are stored; when to look
        whether a belief still holds."""
        self.read_looks = LookPace()
        """When to look again at the files and variables that computing reads."""
        self.computed_rows, self.compute_seconds = 0, 0.0
        self.seconds_per_row = 0.0
        """Time of computing a row in this process; 0: none was computed."""
        self.refused_at: Any = None

    def fingerprint(
        self, module: Any, store: RowStore, inputs: Mapping[str, Any] | None = None
    ) -> Fingerprint:
        """The fingerprint of the module now; it is built if that is needed to know it.

        It has a number if rows were found to be wrong by an earlier run.

        Args:
            store: of the rows.
            inputs: what makes the module's input from a sample, for rows that are found without the input.

        Raises:
            FeatureNotCacheable: it can't be known.
        """
        if self._contents and self.read_looks.is_due:
            self.look_at_reads()
        built = self.built
        if built is not None and not is_pending(module) and not self.reads.is_due and built.holds():
            parts, code = built.parts, built.code
        else:
            with unbuilt(module):
                parts, code = _state(module, store, self)
            if self.recorded is not None:
                self._record_build(module, store)
        settings = torch_settings(parts["device"])
        latest_parts, latest_inputs, latest_settings, latest = self._latest
        if latest and latest_parts is parts and latest_inputs is inputs and latest_settings is settings:
            return latest
        covered = (id(parts), id(inputs), settings)
        entry = self.fingerprints.get(covered)
        if entry is None:
            self._record_build(module, store)
            if len(self.fingerprints) > _FINGERPRINTS_KEPT:
                self.fingerprints.clear()
            described = description_of(module).parts
            whole = {**described, **parts, "code": code, "settings": list(settings), "format": FORMAT}
            whole |= {} if inputs is None else {"inputs": dict(inputs)}
            entry = self.fingerprints[covered] = self._with_reads(module, store, whole), (parts, inputs)
            if is_pending(module):
                _say_checked(module, store, entry[0])
        self._latest = parts, inputs, settings, entry[0]
        return entry[0]

    def _record_build(self, module: Any, store: RowStore) -> None:
        """Count the build where rows are looked up, and store its record; once in each place."""
        self.places.add(store.place)
        if self.recorded is None or store.place in self.recorded_in:
            return
        self.recorded_in.add(store.place)
        store.counts.builds += 1
        key, build_ = self.recorded
        if build_ is not None:
            _noted(module, store, key, build_)

    def checks(self, store: RowStore, fingerprint: Fingerprint) -> RowChecks:
        """The checks of a fingerprint's rows in a store, whichever object of the module reads them."""
        key = store.place, fingerprint.digest
        return _checks.get(key) or _checks.setdefault(key, RowChecks())

    def raise_if_refused(self, fingerprint: Fingerprint) -> None:
        """Raise if the rows of a fingerprint were found to be wrong.

        Raises:
            FeatureMismatch: they were.
        """
        if fingerprint.digest in self.refused:
            raise FeatureMismatch(self.refused[fingerprint.digest])

    def has_unknown_reads(self, store: RowStore, fingerprint: Fingerprint) -> bool:
        """True if it isn't known which files and variables computing rows reads."""
        return self._read_names.get((store.place, fingerprint.base), _NOTHING_READ) is None

    def record_reads(self, module: Any, store: RowStore, fingerprint: Fingerprint, names: ReadNames) -> None:
        """Store what computing rows reads, once: its contents are part of the fingerprint from now on."""
        store.write_note(_READ + fingerprint.base, names.written(), label_of(module))
        self._read_names[store.place, fingerprint.base] = names
        self._forget_fingerprints()

    def look_at_reads(self) -> bool:
        """Look at the files and variables that computing reads; True if they hold what they held."""
        start = time.monotonic()
        for place, contents in self._contents.items():
            names = self._read_names[place]
            if names is None or names.contents() != contents:
                self._forget_fingerprints()
                return False
        self.read_looks.looked(start)
        return True

    def _forget_fingerprints(self) -> None:
        self.fingerprints.clear()
        self._contents.clear()
        self._latest = (None, None, None, None)

    def _with_reads(self, module: Any, store: RowStore, whole: dict[str, Any]) -> Fingerprint:
        """The fingerprint of parts and of what computing reads; with a number if its rows were wrong."""
        base = Fingerprint.of(whole).digest
        if options_of(module).version is None:
            place = store.place, base
            if self._read_names.get(place) is None:
                self._read_names[place] = ReadNames.read(store.read_note(_READ + base) or b"")
            names = self._read_names[place]
            contents = None if names is None else names.contents()
            if contents is None:
                self._read_names[place] = None
            if contents:
                self._contents[place] = whole["read"] = contents
        fingerprint, number = Fingerprint.of(whole), 0
        while fingerprint.digest not in self.refused and _is_refused(store, fingerprint):
            number += 1
            fingerprint = Fingerprint.of({**whole, "computed again": number})
        return replace(fingerprint, base=base)

    def device(self, module: Any) -> torch.device:
        """Device of the module, or of what it will be."""
        if is_pending(module):
            return self.believed[2] if self.believed is not None else pending_of(module).device
        return self.built.device if self.built is not None else device_of(module)

    def count_computed(self, rows: int, seconds: float) -> None:
        """Count rows that were computed, and the time that it took."""
        self.computed_rows += rows
        self.compute_seconds += seconds
        self.seconds_per_row = self.compute_seconds / self.computed_rows


_checks: dict[tuple[RowPlace, bytes], RowChecks] = {}
_proofs: weakref.WeakKeyDictionary[Any, Proof] = weakref.WeakKeyDictionary()


def proof_of(module: Any) -> Proof:
    """The proof of a module in this process; it goes with it."""
    proof = _proofs.get(module)
    if proof is None:
        proof = _proofs[module] = Proof()
    return proof


def _state(module: Any, store: RowStore, proof: Proof) -> tuple[dict[str, Any], dict[str, str]]:
    """State of a module, as parts of a fingerprint, and its code: the same objects until it changes."""
    description, options = description_of(module), options_of(module)
    if description.error:
        raise FeatureNotCacheable(description.error)
    if options.version is not None:
        device = pending_of(module).device if is_pending(module) else device_of(module)
        return _parts_of_version(options.version, module.training, device.type), {}
    if is_pending(module):
        build_ = _believed(module, store, description, proof)
        if build_ is not None:
            return build_.parts, build_.parts["code"]
        build(module)
    built = built_state(module)
    return built.parts, built.code


@functools.lru_cache(maxsize=_FINGERPRINTS_KEPT)
def _parts_of_version(version: str, training: bool, device: str) -> dict[str, Any]:
    return {"version": version, "training": training, "device": device}


def _believed(module: Any, store: RowStore, description: Description, proof: Proof) -> Build | None:
    pending, options = pending_of(module), options_of(module)
    meanings = [meaning for _, _, meaning in pending.asked]
    if proof.believed is not None and proof.believed[0] == meanings:
        start = time.monotonic()
        if proof.beliefs.is_due:
            if not proof.believed[1].still_holds():
                proof.believed = None
                return None
            proof.beliefs.looked(start)
        return proof.believed[1]
    builds = read_builds(store.read_note(_recipe(description, pending)))
    build = believed(builds, pending.generators.digests, has_weights=options.weights is not None)
    if build is not None:
        proof.believed = (meanings, build, torch.device(build.device))
    return build


def _recipe(description: Description, pending: Pending) -> bytes:
    """Dependencies of a build, as the key of its records."""
    calls = [[method, meaning] for method, _, meaning in pending.asked if method != "requires_grad_"]
    weights = [torch.__version__, sys.version_info[:2]]
    return b"build" + digest_of([description.parts, calls, weights, str(torch.get_default_dtype())]).encode()


def record_build(
    module: Any, pending: Pending, description: Description, before: dict[str, str], reads: Reads
) -> None:
    """Remember how a module came out, for those that aren't built; the next call with a key stores that."""
    options, proof = options_of(module), proof_of(module)
    if options.place is None:
        return
    proof.recorded = (b"", None)
    if description.error or options.version is not None:
        return
    try:
        built = built_state(module)
    except FeatureNotCacheable:
        return  # it is said when a key is given
    describer = Describer()
    for child in module.modules():
        describer.reach(type(child), type(child).__name__)
    strings = description.strings | ({str(options.weights)} if options.weights is not None else set())
    latest = Build(
        process_name(),
        before,
        [name for name, state in Generators().digests.items() if state != before[name]],
        reads.is_closed or options.weights is not None,
        reads.files(strings),
        digests_of(reads.variables),
        {**built.parts, "code": built.code},
        describer.origins,
        str(built.device),
    )
    proof.recorded = (_recipe(description, pending), latest)


def record_settled(module: Any, store: RowStore, before: Fingerprint) -> None:
    """Remember that a module came out of its first computation other than it went in, as it was built."""
    proof = proof_of(module)
    if proof.recorded is None or proof.built is None:
        return
    key, build_ = proof.recorded
    if build_ is None or {**before.parts, **build_.parts} != dict(before.parts):
        return
    settled = replace(build_, parts={**proof.built.parts, "code": proof.built.code})
    proof.recorded = (key, settled)
    for place in proof.recorded_in:
        if (recorded := open_store(place)) is not None:
            _noted(module, recorded, key, settled)


def _noted(module: Any, store: RowStore, key: bytes, latest: Build) -> list[Build]:
    """The records under a key with one more, which is stored."""
    builds = with_latest(read_builds(store.read_note(key)), latest)
    store.write_note(key, written(builds), label_of(module))
    return builds


def built_state(module: Any, *, anew: bool = False) -> Built:
    """Description of a built module as it is now; its parts are the same objects until something changes.

    Args:
        anew: describe it also if no look that takes little time finds a change.
    """
    start, proof = time.monotonic(), proof_of(module)
    last = proof.built
    if last is not None and not anew and not proof.reads.is_due and last.holds():
        return last
    stamp = Stamp(module)
    describer = Describer()
    parts = built_parts(module, describer)
    code = {**description_of(module).parts["code"], **describer.code}
    code[f"{ARRANGEMENT} when built"] = describer.arranged_code[ARRANGEMENT]
    if (
        last is not None
        and parts == last.parts
        and code == last.code
        and last.watch.are_device_samples_unchanged()
    ):
        parts, code = last.parts, last.code
        proof.reads.looked(start)
    elif last is not None:
        proof.are_rows_apart, proof.is_chance_harmless = False, False
    proof.built = Built(parts, code, device_of(module), stamp, ModuleWatch(module), start)
    return proof.built


def refuse_rows(
    module: Any, store: RowStore, fingerprint: Fingerprint, key: Any, rows: RowDigests, difference: Difference
) -> FeatureMismatch:
    """Let no row of a fingerprint be served any more, here and later; returns the error that says so.

    Args:
        rows: that were compared; the verdict goes with them.
    """
    label = label_of(module)
    store.counts.mismatches += 1
    store.write_note(_REFUSED + fingerprint.digest, json.dumps(rows).encode(), label)
    text = (
        f"the row of key {key!r} of {label} isn't what it computes now from the same input ({difference}): "
        f"its results depend on what can't be seen (a switch of a library, chance). None of its rows is "
        f"read any more, and a new run computes them again; or name the version yourself, "
        f'version="1", or turn this off, check=False'
    )
    proof_of(module).refused[fingerprint.digest] = text
    return FeatureMismatch(text)


def _is_refused(store: RowStore, fingerprint: Fingerprint) -> bool:
    """True if rows of a fingerprint were found to be wrong, and are there still."""
    note = store.read_note(_REFUSED + fingerprint.digest)
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        return note is not None and (not (rows := json.loads(note)) or _are_stored(store, rows, any))
    return True


def _are_stored(store: RowStore, rows: RowDigests, combine: Callable[[Iterable[bool]], bool]) -> bool:
    """True if rows, by their names, are stored with these digests: all of them, or any."""
    stored = store.read([bytes.fromhex(name) for name in rows], "checked rows")
    digests = {name.hex(): row_digest(row) for name, row in stored.items()}
    return combine(digests.get(name) == digest for name, digest in rows.items())


def checks_made() -> int:
    """How often rows were compared and found right in this process."""
    return sum(checks.count for checks in _checks.values())


def row_digest(row: Row) -> str:
    """A digest of the bytes of a row."""
    return xxh3_64_hexdigest(row.body)


def was_checked(store: RowStore, fingerprint: Fingerprint) -> float:
    """When rows of a fingerprint that are still there were checked, `time.time()`; 0: never."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        verdict = json.loads(store.read_note(_CHECKED + fingerprint.digest) or b"{}")
        if verdict and verdict["rows"] and _are_stored(store, verdict["rows"], all):
            return float(verdict["at"])
    return 0.0


def _say_checked(module: Any, store: RowStore, fingerprint: Fingerprint) -> None:
    """Log when rows of a module that isn't built were checked, as nothing in this run does."""
    checked_at = was_checked(store, fingerprint)
    logger.info(
        "%s isn't built as long as all its rows are there; they were checked last: %s. `streamload features "
        "check` computes some again",
        label_of(module),
        time.strftime("%Y-%m-%d %H:%M", time.localtime(checked_at)) if checked_at else "never",
    )


def note_checked(
    module: Any, store: RowStore, fingerprint: Fingerprint, rows: RowDigests, seconds: float
) -> None:
    """Store that rows were found to be right."""
    verdict = json.dumps({"at": seconds, "rows": rows}).encode()
    store.write_note(_CHECKED + fingerprint.digest, verdict, label_of(module))


def options_of(module: Any) -> Options:
    """The options of a cached module."""
    options: Options = module._streamload_options
    return options


def label_of(module: Any) -> str:
    """Name by which the rows of a module are listed and cleared."""
    label = options_of(module).label
    return type(module).__name__ if label is None else label
