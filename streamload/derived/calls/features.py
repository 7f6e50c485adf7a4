"""Results of a frozen module from samples, in place of samples: features of a loader.

fingerprint (rank, each epoch) → rows that are there (worker) → missing ones computed, stored (rank)
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from streamload.columns.columns import Columns
from streamload.derived.calls.feature_rows import (
    FeaturesRead,
    FeatureStart,
    ModuleRows,
    leaves_in,
    rows_of,
)
from streamload.derived.calls.module_cache import Cached, switches
from streamload.derived.calls.module_call import Call, SampleRows
from streamload.derived.proof.fingerprint import Fingerprint, device_of
from streamload.derived.proof.lazy import build, is_pending
from streamload.derived.proof.module_proof import (
    Description,
    Options,
    label_of,
    options_of,
    proof_of,
)
from streamload.derived.proof.rounding import cast, map_tensors
from streamload.derived.proof.row_check import checks_of
from streamload.derived.store.results import Result, layout_of, overwrite, reordered
from streamload.derived.store.row_store import Mapped, RowPlace, RowStore, open_store
from streamload.derived.store.sealed import Row
from streamload.errors import FeatureMismatch, FeatureNotCacheable, OptionError
from streamload.metrics import Counts

FeatureInputs = Literal["image", "text", "sample"]
_COUNTERS = {
    "stored": "feature_rows_stored",
    "refused": "feature_rows_refused",
    "bytes_written": "feature_bytes_stored",
    "mismatches": "feature_mismatches",
    "builds": "feature_builds",
}
_CALLED = b"called"
"""Before the `Fingerprint.base` of a pass's start: the key of a note of the autocasts of calls."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Features:
    """Results of a frozen module for each sample, computed once: a value of `Batches(features=…)`.

    A batch has `FeatureRows` under the feature's name. Calling this (or the module itself, if it is decorated
    by `cache_module`) with the batch gives what the module returns for its samples: stored rows came with the
    batch; missing ones are computed then, and stored for all later epochs, ranks and runs.

    Args:
        module: of a class that `cache_module` decorates; or any built module, whose rows go into `rows` in
            streamload's cache directory. It is called with the input of several samples.
        inputs: "image": float32[N, 3, H, W] of `preprocess`; "text": the batch's texts; "sample": a dict of
            both.
        preprocess: of this module's images, as make_loader's; None: the loader's own, or open_clip's default
            of evaluation if that has none. It has to be the same for a sample at each time, unless there are
            variants.
        dtype: to which floating results are cast before they are stored; None: as computed.
        variants: how many random variants of each image have rows, if `preprocess` is random: a sample's
            variant changes from pass to pass.
        images: "auto": batches have no "image" if features are made of images, and only those of missing rows
            are decoded; False: batches have none; True: they have it as always.
        check: as of `cache_module`, for a loader's rows.
        store: a mapping that has a loader's rows in place of a directory, such as a dict or a
            `diskcache.Cache`. Only the rank reads and writes it, so workers make the inputs of all samples.

    Raises:
        OptionError: a value that can't be used.
        TypeError: it isn't a module.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        inputs: FeatureInputs = "image",
        preprocess: Callable[[Any], Any] | None = None,
        dtype: torch.dtype | None = None,
        variants: int = 1,
        images: bool | Literal["auto"] = "auto",
        check: bool = True,
        store: MutableMapping[str, bytes] | None = None,
    ):
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"features are of a torch.nn.Module, got a {type(module).__name__}")
        if inputs not in get_args(FeatureInputs):
            raise OptionError(f"inputs={inputs!r}; expected one of {', '.join(get_args(FeatureInputs))}")
        if dtype is not None and dtype not in _DTYPES:
            raise OptionError(f"dtype={dtype!r}; expected one of {', '.join(map(str, _DTYPES))}")
        if isinstance(variants, bool) or not isinstance(variants, int) or variants < 1:
            raise OptionError(f"variants={variants!r}; expected a whole number of at least 1")
        if images not in (True, False, "auto"):
            raise OptionError(f'images={images!r}; expected True, False or "auto"')
        if not isinstance(check, bool):
            raise OptionError(f"check={check!r}; expected True or False")
        if inputs == "text" and (preprocess is not None or variants > 1):
            raise OptionError("preprocess= and variants= are for features of images, not of texts")
        self.module: Any = module if isinstance(module, Cached) else _Built(module)
        self.inputs: FeatureInputs = inputs
        self.preprocess = preprocess
        self.dtype = dtype
        self.variants = variants
        self.images = images
        self.check = check
        self._mapped = None if store is None else RowPlace("", mapped=Mapped(store))

    def __repr__(self) -> str:
        return f"Features({self.label}, inputs={self.inputs!r})"

    def __call__(self, batch: Mapping[str, Any]) -> Any:
        """Return the module's results for the samples of a loader's batch.

        Args:
            batch: of a loader that has this as one of its features.

        Raises:
            TypeError: it is no such batch.
            FeatureError: as by calls of a cached module with `cache_key`.
        """
        if (rows := rows_of(self.module, batch)) is not None:
            return rows.result()
        raise TypeError(f"{self!r} is called with a batch of a loader that was given it in features=")

    def place(self, cache_dir: Path, cache_size: str | int | None) -> RowPlace | None:
        """Place of a loader's rows: its cache directory, unless this or the module names another; None: none.

        Rows that aren't there are looked for in the default directory, which then is only read.
        """
        place = self._mapped or options_of(self.module).place
        if place is None or place.mapped is not None or place.path or cache_dir / "rows" == place.root:
            return place
        cache_size = place.cache_size or cache_size
        return replace(place, path=str(cache_dir), cache_size=cache_size, reads_default=True)

    @property
    def label(self) -> str:
        """Name by which its rows are listed and cleared."""
        return label_of(self.module)


class _Built(Cached):
    """A module of any class, with rows; what proves them is what it consists of."""

    __module__ = "streamload.derived.features"  # where it was: a part of the fingerprints of stored rows

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module
        label = type(module).__name__
        self.__dict__["_streamload_options"] = Options(RowPlace(""), label, None, None, "error")
        self.__dict__["_streamload_description"] = Description(
            {"arguments": {}, "code": {}, "class": label}, set()
        )

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


class BoundFeatures:
    """A feature of one loader, in the rank.

    Args:
        features: which.
        place: of its rows; None: they are neither read nor stored.
        parts: what makes the module's input, as far as rows depend on it; part of their fingerprint.
        device: where results are put.
    """

    def __init__(
        self, features: Features, place: RowPlace | None, parts: Mapping[str, Any], device: torch.device
    ):
        self.features = features
        self.module = features.module
        self._place = place
        self._device = device
        cast = None if features.dtype is None else str(features.dtype)
        self._parts = {**parts, "inputs": features.inputs, "dtype": cast}
        self._base = b""  # of a pass's start
        self._autocast: str | None = None  # of the latest call in this process

    def start(self) -> FeatureStart:
        """Plan for the workers of an epoch that begins now.

        Raises:
            FeatureNotCacheable: what proves its rows can't be known.
        """
        store = self._store()
        if store is None:
            return FeatureStart("", False, False, None, False)
        store.flush()  # rows of the epoch before
        proof = proof_of(self.module)
        proof.look_at_reads()
        fingerprint = self._as_called(store)
        if fingerprint is None:
            return FeatureStart("", False, False, None, False)
        is_checked = self.features.check and options_of(self.module).is_checked
        checks = checks_of(store, fingerprint)
        is_checked = is_checked and not checks.is_done
        is_watched = proof.has_unknown_reads(store, fingerprint)
        hits_between = None if is_pending(self.module) else switches.hits_between
        is_first = checks.is_first and not checks.own
        return FeatureStart(str(fingerprint), is_checked, is_first, hits_between, is_watched)

    def _as_called(self, store: RowStore) -> Fingerprint | None:
        """The fingerprint under the autocast of the latest call: training loops enter it for each batch.

        Before the first call it is that of earlier runs; None if they had several.
        """
        device = proof_of(self.module).device.type
        fingerprint = self._fingerprint(store)
        if torch.is_autocast_enabled(device):
            return fingerprint
        if self._base != fingerprint.base:
            self._base, self._autocast = fingerprint.base, None
        autocasts = self._noted(store) if self._autocast is None else [self._autocast]
        if len(autocasts) > 1:
            return None
        if not any(autocasts):
            return fingerprint
        with torch.autocast(device, getattr(torch, autocasts[0].removeprefix("torch."))):
            return self._fingerprint(store)

    def note_call(self) -> None:
        """Note under which autocast rows are asked for: the next pass, or the next run, looks for these."""
        device = proof_of(self.module).device.type
        autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""
        if autocast == self._autocast or not self._base or (store := self._store()) is None:
            return
        self._autocast = autocast
        if autocast not in (autocasts := self._noted(store)):
            noted = ",".join([*autocasts, autocast]).encode()
            store.write_note(_CALLED + self._base, noted, self.features.label)

    def _noted(self, store: RowStore) -> list[str]:
        """The autocasts of all calls so far, in this run and earlier ones; "": none."""
        note = store.read_note(_CALLED + self._base)
        return [] if note is None else note.decode().split(",")

    @property
    def columns(self) -> Columns | None:
        """The columns of its rows; None: they are elsewhere, or aren't stored."""
        store = self._store()
        return None if store is None else store.columns

    def fingerprint(self) -> Fingerprint | None:
        """Under which rows are found now; None: rows are neither read nor stored."""
        store = self._store()
        return None if store is None else self._fingerprint(store)

    def _fingerprint(self, store: RowStore) -> Fingerprint:
        return proof_of(self.module).fingerprint(store, self._parts)

    def compute(
        self, inputs: Any, read: FeaturesRead, stored: Mapping[int, Row]
    ) -> tuple[Any, str, list[bool]]:
        """Compute and store rows, and check some of those that are stored.

        Args:
            inputs: of the rows that `read` has keys of.
            stored: see SampleRows.

        Returns:
            the rows; the fingerprint under which they are stored; for each key, True if its row was stored.
        """
        module, store = self.module, self._store()
        if store is None:
            with torch.no_grad():
                return self._run(inputs), "", [False] * len(read.keys)
        dtype, check = self.features.dtype, self.features.check
        samples = SampleRows(self._parts, dtype, stored, read.fingerprint, read.reads, check)
        call = Call(module, self._run, store, (inputs,), {}, list(read.keys), samples)
        value = call.result()
        return value, str(call.fingerprint), call.are_stored

    def raise_if_refused(self) -> None:
        """Raise a FeatureMismatch if its rows were found to be wrong."""
        store, proof = self._store(), proof_of(self.module)
        if store is not None and proof.refused:
            proof.raise_if_refused(self._fingerprint(store))

    def placed(self, value: Any) -> Any:
        """A result on the loader's device."""
        return _to(value, self._device)

    def count_read(self, counts: Counts, rows: int, row_bytes: int) -> None:
        """Count stored rows of a batch."""
        counts.add("feature_rows_read", rows)
        counts.add("feature_bytes_read", rows * row_bytes)
        counts.add("feature_saved_ns", int(rows * proof_of(self.module).seconds_per_row * 1e9))

    def count(self, counts: Counts, *, at_end: bool = False) -> None:
        """Count what happened to rows in the rank since the last call.

        Args:
            counts: of the rank.
            at_end: of an epoch, when rows that are on their way are stored.
        """
        store = self._store()
        if store is None:
            return
        if at_end:
            store.flush()
        happened = store.take_counts()
        for name, counter in _COUNTERS.items():
            if number := getattr(happened, name):
                counts.add(counter, number)

    def _store(self) -> RowStore | None:
        is_off = not switches.is_enabled or switches.is_inference
        return None if is_off or self._place is None else open_store(self._place)

    def _run(self, inputs: Any) -> Any:
        module = self.module
        build(module)
        return cast(module._streamload_run(_to(inputs, device_of(module))), self.features.dtype)


class FeatureRows(ModuleRows):
    """A feature of a batch, as it came from a worker; `result()` is what the module returns for the batch.

    Args:
        of: the feature of the loader.
        read: what the worker has found.
        bodies: uint8[N, bytes]: the rows, stacked; those that are missing are undefined. None: all are.
        inputs: of the missing rows and canaries, in the order of `read.keys`; None: there are none.
        counts: of the rank.
    """

    def __init__(
        self,
        of: BoundFeatures,
        read: FeaturesRead,
        bodies: torch.Tensor | None,
        inputs: Any,
        counts: Counts,
    ):
        self.module = of.module
        self._of, self._read = of, read
        self._bodies, self._inputs = bodies, inputs
        self._counts = counts
        self._result: Any = None
        self._is_made = False

    def __repr__(self) -> str:
        return f"<FeatureRows {len(self)} samples, {len(self.missing)} missing>"

    def __len__(self) -> int:
        return self._read.samples

    @property
    def missing(self) -> tuple[int, ...]:
        """The places of the rows that weren't stored when the batch was made."""
        return tuple(self._read.missing)

    def result(self) -> Any:
        """Results of the module for the batch: missing rows are computed and stored now. Once.

        Raises:
            FeatureError: as by calls of a cached module with `cache_key`.
        """
        if not self._is_made:
            self._result, self._is_made = self._made(), True
            self._bodies = self._inputs = None
        return self._result

    def bodies(self) -> tuple[bytes, list[bytes]]:
        """The layout of the rows and the bytes of each, as they are stored; missing ones are computed. Once.

        Raises:
            FeatureError: as by `result`.
        """
        read, bodies, layout = self._read, dict[int, bytes](), self._read.layout
        if read.keys:
            _, computed = self._computed()
            bodies, layout = dict(zip(read.places, computed.bodies(), strict=True)), computed.layout
        if self._bodies is not None:
            stored, missing = self._bodies.numpy(), set(read.missing)
            bodies.update(
                (place, stored[place].tobytes()) for place in range(len(self)) if place not in missing
            )
        return layout, [bodies[place] for place in range(len(self))]

    def _made(self) -> Any:
        read, feature = self._read, self._of
        feature.note_call()
        feature.raise_if_refused()
        if not read.keys:
            self._refuse_if_other(str(feature.fingerprint() or ""))
            return layout_of(read.layout).build(self._leaves())
        value, computed = self._computed()
        if self._bodies is None:
            return feature.placed(value)
        leaves, is_missing = self._leaves(), set(read.missing)
        numbers = [number for number, place in enumerate(read.places) if place in is_missing]
        for leaf, computed_leaf in zip(leaves, computed.leaves, strict=True):
            if numbers:
                overwrite(
                    leaf, [read.places[number] for number in numbers], reordered(computed_leaf, numbers)
                )
        return layout_of(read.layout).build(leaves)

    def _computed(self) -> tuple[Any, Result]:
        """Compute the rows whose inputs came with the batch: missing ones, and canaries to compare."""
        read, feature = self._read, self._of
        start_ns, missing, canaries = time.monotonic_ns(), set(read.missing), dict[int, Row]()
        if self._bodies is not None:
            places = ((number, place) for number, place in enumerate(read.places) if place not in missing)
            bodies = self._bodies.numpy()
            canaries = {number: Row(read.layout, bodies[place].tobytes(), 0) for number, place in places}
        value, fingerprint, are_stored = feature.compute(self._inputs, read, canaries)
        computed = Result(value, len(read.keys))
        self._counts.add("feature_compute_ns", time.monotonic_ns() - start_ns)
        stored = sum(itertools.compress((place in missing for place in read.places), are_stored))
        self._counts.add("feature_rows_computed", len(missing) - stored)
        if stored:  # by another process since, or in a store that only the rank reads
            feature.count_read(self._counts, stored, layout_of(computed.layout).body_bytes)
        if self._bodies is not None:
            self._refuse_if_other(fingerprint)
            if computed.layout != read.layout:
                raise FeatureNotCacheable(
                    "rows of this batch have different shapes, so they can't be one batch"
                )
        return value, computed

    def _leaves(self) -> list[Any]:
        """The leaves of the stored rows."""
        assert self._bodies is not None
        return leaves_in(self._bodies, layout_of(self._read.layout))

    def _refuse_if_other(self, fingerprint: str) -> None:
        if fingerprint != self._read.fingerprint:
            raise FeatureMismatch(
                "the module of these features, or the autocast under which they are asked for, isn't what it "
                "was when the pass began (or in the run before), and the batch has rows of that: iterate the "
                "loader again"
            )


def _to(value: Any, device: torch.device) -> Any:
    return map_tensors(lambda tensor: tensor.to(device), value)


def read_features(values: Mapping[str, Any] | None, taken: Sequence[str]) -> dict[str, Features]:
    """The features of a loader by name; modules are wrapped.

    Args:
        values: the argument.
        taken: names of other values of a batch.

    Raises:
        OptionError: a name that can't be used.
        TypeError: something else than modules and Features.
    """
    if values is not None and not isinstance(values, Mapping):
        raise OptionError(f'features={values!r}; expected a dict, such as {{"vit": module}}')
    features: dict[str, Features] = {}
    for name, value in (values or {}).items():
        if not isinstance(name, str) or not name or name in taken:
            raise OptionError(f"features has the name {name!r}; expected text other than {', '.join(taken)}")
        features[name] = value if isinstance(value, Features) else Features(value)
    if len({id(feature.module) for feature in features.values()}) < len(features):
        raise OptionError("features has a module twice: give each module one name")
    return features
