"""One call of a cached module with keys, from inputs to rows.

look up → spot check → compute what is missing → check → store → put together
"""

from __future__ import annotations

import functools
import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from streamload.derived import log_once
from streamload.derived.calls.feature_rows import shown
from streamload.derived.proof.builds import Generators
from streamload.derived.proof.code import Describer
from streamload.derived.proof.fingerprint import Fingerprint, differences
from streamload.derived.proof.lazy import build, is_pending
from streamload.derived.proof.module_proof import label_of, options_of, proof_of
from streamload.derived.proof.reads import ReadNames, watched
from streamload.derived.proof.rounding import (
    SEVERAL_ROWS,
    Difference,
    JudgedRows,
    RowComparison,
    arithmetic_epsilon,
    has_whole_numbers,
)
from streamload.derived.proof.row_check import (
    RowChecks,
    checks_of,
    note_checked,
    note_refused,
    refuse_module,
    run_began,
    was_checked,
)
from streamload.derived.store.keys import Inputs, Naming, digest_of, keys_of
from streamload.derived.store.queue import ComputedRows
from streamload.derived.store.results import Result, concatenated, join, layout_of, reordered, result_of
from streamload.derived.store.row_store import RowStore
from streamload.derived.store.sealed import KEY_BYTES, NOTE, Row
from streamload.errors import CacheCorrupt, FeatureError, FeatureMismatch, FeatureNotCacheable, OptionError
from streamload.torch_internals import tree_map

_CHECK_BITS = 4
"""One in 2 to this power of the in-memory results of single keys has its input compared."""
_OF_INPUT_BYTES = 8192
"""Most time a row for telling the inputs of a device apart, until the rows are proved."""
_SIMPLE_KEYS = frozenset((str, int, bytes))
_places = random.Random()
"""Chooses rows to compare: no seed of the user's is touched."""
os.register_at_fork(after_in_child=_places.seed)
_NO_NAME = b"%d"
"""In place of the name of a row that has none: it is shorter, and is never stored."""


def stored_result(module: Any, store: RowStore, args: tuple[Any, ...], cache_key: Any) -> tuple[Any] | None:
    """The result of one simple key, in a tuple, if its row is there; None: it takes a Call."""
    if type(cache_key) not in _SIMPLE_KEYS or len(args) != 1 or type(args[0]) is not torch.Tensor:
        return None
    proof = proof_of(module)
    if args[0].requires_grad and torch.is_grad_enabled():
        return None
    fingerprint = proof.fingerprint(store)
    if fingerprint.digest in proof.refused:
        return None
    is_built = not is_pending(module)
    name = _naming(fingerprint.digest).name(cache_key)
    if is_built and options_of(module).is_checked and not checks_of(store, fingerprint).passes(name):
        return None
    row = store.read_from_memory(name)
    is_compared = row is None or not _places.getrandbits(_CHECK_BITS)
    row = store.read((name,), label_of(module)).get(name) if row is None else row
    if row is None:
        return None
    if is_compared and row.input_digest and digest_of(args[0]) not in (0, row.input_digest):
        return None
    try:
        value = result_of(row, proof.device)
    except (CacheCorrupt, TypeError, ValueError):
        return None
    if not is_built:
        proof.served = fingerprint
    store.counts.hits += 1
    store.counts.saved_seconds += proof.seconds_per_row
    return (value,)


@functools.lru_cache(maxsize=64)
def _naming(digest: bytes) -> Naming:
    return Naming(digest, b"", is_row=False)


@dataclass(frozen=True)
class SampleRows:
    """Rows of samples, whose keys stand for their inputs, too.

    Attributes:
        made_by: what makes an input from a sample: a part of the fingerprint.
        dtype: to which results are cast before they are stored; None: they aren't.
        stored: rows that came with the samples, by the places of their keys.
        fingerprint: of these, as hexadecimal digits.
        reads: of making the inputs; None: it wasn't watched.
        check: see `Features`.
    """

    made_by: Mapping[str, Any]
    dtype: torch.dtype | None
    stored: Mapping[int, Row]
    fingerprint: str
    reads: ReadNames | None
    check: bool


class Call:
    """One call with keys. Rows go by the places of their keys among `unique`, where each key is once.

    Args:
        run: calls the module without keys, once it is built.
        samples: of which the rows are; None: of a user's inputs.

    Raises:
        OptionError: keys that can't be used, or not one for each row.
        FeatureNotCacheable: an input requires a gradient.
    """

    def __init__(
        self,
        module: Any,
        run: Callable[..., Any],
        store: RowStore,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cache_key: Any,
        samples: SampleRows | None = None,
    ):
        self.module, self.run, self.store, self.options = module, run, store, options_of(module)
        self._samples = samples
        self.counts = store.counts
        values = [*args, *kwargs.values()]
        keys = keys_of(cache_key, values)
        self.rows = None if keys is None else len(keys)
        self.keys: list[Any] = [cache_key] if keys is None else keys
        self.inputs = Inputs(args, kwargs, self.rows)
        self._refuse(values)
        self.proof = proof_of(module)
        self._is_checked = self.options.is_checked and (samples is None or samples.check)

    def _refuse(self, values: Sequence[Any]) -> None:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.inputs.tensors):
            raise FeatureNotCacheable(
                "an input requires a gradient, and stored rows have none: detach() it, or call the module "
                "without cache_key"
            )
        first = next((value for value in values if isinstance(value, (torch.Tensor, np.ndarray))), None)
        if self.rows is not None and first is not None and (not first.ndim or first.shape[0] != self.rows):
            raise OptionError(
                f"{self.rows} keys for an input of shape {list(first.shape)}; expected one key a row"
            )

    def result(self) -> Any:
        """Return the module's results for the inputs."""
        if self.rows == 0:
            return self._detached(*self.inputs.of([]))
        self._look_up()
        if self.missing and is_pending(self.module):
            build(self.module)
            if self._is_another():
                self._look_up()
        if self.missing and not self.proof.has_settled:
            self._settle()
        self.proof.raise_if_refused(self.fingerprint)
        if self.held and self._is_checked and not is_pending(self.module):
            self._check()
        hits = sum(self.are_stored) if self.missing else len(self.where)
        self.counts.hits += hits
        self.counts.saved_seconds += hits * self.proof.seconds_per_row
        self.counts.misses += len(self.missing)
        return self._put_together(self._compute_missing() if self.missing else None)

    @property
    def _label(self) -> str:
        """Name of the module in messages."""
        return label_of(self.module)

    def _key(self, place: int) -> Any:
        """Key of a row in messages."""
        key = self.keys[self.first[place]]
        return key if self._samples is None else shown(key)

    def _now(self) -> Fingerprint:
        made_by = None if self._samples is None else self._samples.made_by
        return self.proof.fingerprint(self.store, made_by)

    def _look_up(self) -> None:
        """Read the rows that are there."""
        self.fingerprint = self._now()
        self._has_new_reads = False
        naming = Naming(self.fingerprint.digest, self._context(), is_row=self.rows is not None)
        self._place(
            [_NO_NAME % number if key is None else naming.name(key) for number, key in enumerate(self.keys)]
        )
        rows = self.store.read([name for name in self.unique if len(name) >= KEY_BYTES], self._label)
        self.stored: list[Row | None] = list(map(rows.get, self.unique))
        self._canaries: set[int] = set()
        if self._samples is not None and self._samples.fingerprint == str(self.fingerprint):
            for number, row in self._samples.stored.items():
                self.stored[self.where[number]] = row
                self._canaries.add(self.where[number])
        for layout in {row.layout for row in rows.values()}:
            self._drop_unreadable(layout)
        self._spot_check()
        self.missing = [place for place, row in enumerate(self.stored) if row is None]
        if is_pending(self.module) and self.held:
            self.proof.served = self.fingerprint

    @property
    def held(self) -> list[int]:
        """Places of the rows that are stored."""
        return [place for place, row in enumerate(self.stored) if row is not None]

    @property
    def are_stored(self) -> list[bool]:
        """For each key, True if its row was there."""
        return [self.stored[place] is not None for place in self.where]

    def _place(self, names: list[bytes]) -> None:
        """Give each name a place."""
        self.unique = names
        self.where: Sequence[int] = range(len(names))
        self.first: Sequence[int] = self.where
        if len(set(names)) == len(names):
            return
        firsts: dict[bytes, int] = {}
        for number, name in enumerate(names):
            firsts.setdefault(name, number)
        self.unique, self.first = list(firsts), list(firsts.values())
        places = {name: place for place, name in enumerate(firsts)}
        self.where = [places[name] for name in names]

    def _drop_unreadable(self, layout: bytes) -> None:
        """Compute rows again whose layout has a class in it that isn't imported here."""
        try:
            layout_of(layout)
        except CacheCorrupt as exc:
            log_once(f"rows of {self._label} are computed again: {exc}")
            self.stored = [None if row is None or row.layout == layout else row for row in self.stored]

    def _context(self) -> bytes:
        if not self.inputs.context:
            return b""
        describer = Describer()
        described = describer.value([list(pair) for pair in self.inputs.context], "an argument")
        return json.dumps([described, describer.arranged_code], sort_keys=True).encode()

    def _is_another(self) -> bool:
        """True if the module came out other than was believed before it was built."""
        fingerprint = self._now()
        if fingerprint.digest == self.fingerprint.digest:
            self.fingerprint = fingerprint
            return False
        served, self.proof.served = self.proof.served, None
        if served is not None and served.digest != fingerprint.digest:
            self.counts.mismatches += 1
            names = ", ".join(differences(served.parts, fingerprint.parts)[:5])
            raise FeatureMismatch(
                f"{self._label} was built otherwise than twice before ({names}), and rows of "
                f"the other were returned already: its __init__ depends on what can't be seen; name the "
                f'version yourself, cache_module(version="1"), and start anew'
            )
        return True

    def _spot_check(self) -> None:
        """Compare the input of one row with that which it was computed from; and of keys given twice."""
        place = _places.randrange(len(self.stored))
        row = self.stored[place]
        if row is None or not row.input_digest:
            places = [place for place, row in enumerate(self.stored) if row is not None and row.input_digest]
            place = _places.choice(places) if places else -1
        row = self.stored[place]
        if row is not None and row.input_digest:
            (digest,) = self.inputs.digests([self.first[place]])
            if digest not in (0, row.input_digest):
                self._mismatch(place)
        if len(self.unique) < len(self.keys):
            digests = self.inputs.digests(range(len(self.keys)))
            for number, place in enumerate(self.where):
                if digests[number] != digests[self.first[place]]:
                    raise FeatureMismatch(
                        f"key {self._key(place)!r} is given for two different inputs in one call: a key "
                        f"has to name one input"
                    )

    def _mismatch(self, place: int) -> None:
        self.counts.mismatches += 1
        key = self._key(place)
        if self.options.on_mismatch == "error":
            raise FeatureMismatch(
                f"the row of key {key!r} was computed from another input: two samples share the key, the "
                f"sample has changed, or something random comes before the module; put what tells inputs "
                f'apart into the key, or compute such rows again: cache_module(on_mismatch="recompute")'
            )
        log_once(
            f"rows of {self._label} were computed from other inputs than are given "
            f"with their keys now, and are computed again (first: {key!r})"
        )
        digests = self.inputs.digests(self.first)
        self.stored = [
            None if row is None or digest not in (0, row.input_digest) else row
            for row, digest in zip(self.stored, digests, strict=True)
        ]

    def _check(self) -> None:
        """Compute some rows again that other processes stored, and compare: the first, then a few.

        Raises:
            FeatureMismatch: a row isn't what is computed now.
        """
        checks = checks_of(self.store, self.fingerprint)
        places = [] if checks.is_done else checks.foreign(self.unique, self.held)
        canaries = [place for place in places if place in self._canaries]
        if not places or not (checks.is_due(len(places)) or canaries):
            return
        if not checks.is_first:
            self._compare(checks, canaries or places)
            return
        began = time.time()
        if was_checked(self.store, self.fingerprint) >= run_began():  # by another process of this run
            checks.checked()
        elif rows := self._compare(checks, canaries or places):
            note_checked(self.store, self.fingerprint, rows, self._label, began)

    def _compare(self, checks: RowChecks, places: Sequence[int]) -> dict[bytes, Row]:
        """Compare rows with what is computed now; returns those that were judged.

        One row shows what exact arithmetic would do otherwise. Of coarse arithmetic several are taken where
        they are there; of whole numbers several are needed, and wait in `checks` for others.
        """
        places = self._with_same_inputs(places)
        if not places:
            checks.postpone()
            return {}
        others = self._joined(self.held)[1]
        comparison, are_whole = self._comparison(others), has_whole_numbers(others)
        most = SEVERAL_ROWS if are_whole or comparison.is_coarse else 1
        chosen = sorted(_places.sample(places, min(most, len(places))))
        sample = replace(
            self._inputs_of([self.first[place] for place in chosen]), leaves=self._joined(chosen)[1]
        )
        samples = [*checks.samples, sample]
        if are_whole and sum(1 if self.rows is None else len(sample.leaves[0]) for sample in samples) < most:
            checks.samples = samples
            return {}
        checks.samples = []
        checks.checked()
        rows = {self.unique[place]: row for place in chosen if (row := self.stored[place]) is not None}
        difference = comparison.difference(samples)
        if difference is not None:
            self._refuse_rows(rows, self._key(chosen[0]), difference)
        return rows

    def _refuse_rows(self, rows: Mapping[bytes, Row], key: Any, difference: Difference) -> None:
        """Let no row of the fingerprint be read any more, here and later.

        Raises:
            FeatureMismatch: always.
        """
        self.counts.mismatches += 1
        note_refused(self.store, self.fingerprint, rows, self._label)
        self.proof.refused[self.fingerprint.digest] = (
            f"the row of key {key!r} of {self._label} isn't what it computes now from the same input "
            f"({difference}): its results depend on what can't be seen (a switch of a library, chance). None "
            f"of its rows is read any more, and a new run computes them again; or name the version yourself, "
            f'version="1", or turn this off, check=False'
        )
        self.proof.raise_if_refused(self.fingerprint)

    def _with_same_inputs(self, places: Sequence[int]) -> list[int]:
        """Places of stored rows whose inputs are those that the rows came from."""
        if self._samples is not None or not self.inputs.leaves:  # keys of samples stand for their inputs
            return list(places)
        digests = self.inputs.digests([self.first[place] for place in places])
        rows = ((place, self.stored[place], digest) for place, digest in zip(places, digests, strict=True))
        return [place for place, row, digest in rows if row and digest and digest == row.input_digest]

    def _inputs_of(self, numbers: Sequence[int]) -> JudgedRows:
        """Inputs of some rows of the call, for a comparison."""
        if self.rows is None:
            return JudgedRows(self.inputs.of(numbers), [])
        return JudgedRows(self.inputs.of(numbers), [], lambda count: self.inputs.of([*numbers] * count))

    def _comparison(self, others: Sequence[Any]) -> RowComparison:
        """A comparison with what the module computes now; `others` are leaves of rows of the call."""
        epsilon = arithmetic_epsilon(
            self.module,
            (self.inputs.args, self.inputs.kwargs),
            self.fingerprint.parts["settings"],
            self.proof.device.type,
        )
        is_of_rows = self.rows is not None and self.rows > 1
        return RowComparison(self._leaves_of, epsilon, self.rows or 1, others if is_of_rows else ())

    def _leaves_of(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Any]:
        args, kwargs = arguments
        with torch.no_grad():
            return Result(self.run(*args, **kwargs), None).leaves

    def _compute_missing(self) -> tuple[Result, list[int]]:
        """Compute what is missing, and store what may be stored."""
        places = self.missing
        start = time.perf_counter()
        value = self._watched(self.inputs.of([self.first[place] for place in places]))
        seconds = time.perf_counter() - start
        self.counts.compute_seconds += seconds
        self.counts.rows_computed += len(places)
        self.proof.count_computed(len(places), seconds)
        result = Result(value, None if self.rows is None else len(places))
        self._refuse_mixing(result, places)
        self._store(result, places)
        return result, places

    def _settle(self) -> None:
        """Compute one row after a build: that may complete the module, as by a table made when needed."""
        before = self.fingerprint
        self._watched(self.inputs.of([self.first[self.missing[0]]]))
        self.proof.has_settled = True
        self.fingerprint = self._now()
        if self.fingerprint.digest != before.digest:
            self.proof.record_settled(before)
            self._look_up()

    def _watched(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Compute; the first time under a fingerprint store which files and variables that reads."""
        if not self.proof.has_unknown_reads(self.store, self.fingerprint):
            return self._detached(*arguments)
        with watched(of_project=True) as reads:
            value = self._detached(*arguments)
        values: list[Any] = []
        tree_map(values.append, arguments)
        names = reads.names().without(values)
        if self._samples is not None and self._samples.reads is not None:
            names |= self._samples.reads
        self.proof.record_reads(self.store, self.fingerprint, names)
        self._has_new_reads = names.contents() != {}
        return value

    def _store(self, result: Result, places: Sequence[int]) -> None:
        """Store rows, soon, if the module is what its fingerprint said before it computed them."""
        named = [number for number, place in enumerate(places) if len(self.unique[place]) >= KEY_BYTES]
        if not named or self._has_new_reads:  # the next call has names by what is read
            return
        proof, store, fingerprint = self.proof, self.store, self.fingerprint
        if not proof.look_at_reads():  # a file has changed since the call began
            self.counts.refused += len(named)
            return
        has_version = self.options.version is not None
        if not has_version and not proof.is_of(fingerprint):
            self.counts.refused += len(named)
            proof.say_changed(fingerprint.parts)
            return
        if fingerprint.digest not in proof.noted:
            proof.noted.add(fingerprint.digest)
            text = json.dumps(dict(fingerprint.parts), sort_keys=True).encode()
            store.write_note(NOTE + fingerprint.digest, text, self._label)
        if len(named) < len(places):  # rows of a call in which some have None for a key
            result = result.taken(named)
        names = [self.unique[places[number]] for number in named]
        digests = self.inputs.digests_later([self.first[places[number]] for number in named])
        copy = result.copied()
        of_device = result.is_of_device
        size_bytes = result.size_bytes + (len(names) * _OF_INPUT_BYTES if of_device else 0)
        is_proved = None if has_version else proof.proving()
        rows = ComputedRows(
            *(names, result.layout, lambda: (copy(), digests()), size_bytes, of_device),
            *(self._label, is_proved),
        )
        checks_of(store, fingerprint).add_own(names)
        store.queue.add(rows)
        if is_proved is not None and proof.looks_after_computing.is_due:
            start = time.monotonic()
            is_proved(True)
            proof.looks_after_computing.looked(start)
            store.queue.settle()

    def _refuse_mixing(self, result: Result, places: Sequence[int]) -> None:
        """Compute one row by itself: it has to be the same as among others."""
        if self.proof.are_rows_apart or self.rows is None or len(places) < 2 or not self.inputs.leaves:
            return
        difference = self._alone(result, places, 1)
        if difference is not None and has_whole_numbers(result.leaves):
            if len(places) < SEVERAL_ROWS:
                return  # a few whole numbers prove nothing: the next call may have more
            difference = self._alone(result, places, SEVERAL_ROWS)
        if difference is not None:
            raise FeatureNotCacheable(
                f"{self._label} computes another result for a row by itself than among "
                f"others ({difference}): it mixes the rows of a batch (a norm or mean over dimension 0?), or "
                f"something random is in it; give such calls one key for the whole batch"
            )
        self.proof.are_rows_apart = True

    def _alone(self, result: Result, places: Sequence[int], count: int) -> Difference | None:
        """Compute the last rows of a result one by one, and compare."""
        samples = []
        for number in range(len(places) - count, len(places)):
            sample = self._inputs_of([self.first[places[number]]])
            samples.append(replace(sample, leaves=[leaf[number : number + 1] for leaf in result.leaves]))
        return self._comparison(result.leaves).difference(samples)

    def _detached(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute without gradients; what draws random numbers that matter is refused."""
        module = self.module
        build(module)
        refuse_module(module)
        with torch.no_grad():
            if self.proof.is_chance_harmless:
                return self.run(*args, **kwargs)
            before = Generators()
            value = self.run(*args, **kwargs)
            if before.were_used():
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
            sample = JudgedRows((args, kwargs), Result(value, None).leaves)
            difference = self._comparison(()).difference([sample])
        finally:
            after.restore()
        if difference is not None:
            raise FeatureNotCacheable(
                f"{self._label} draws random numbers, and its results depend on them: a "
                f"stored row would repeat one draw for ever; move what is random out of the module"
            )
        self.proof.is_chance_harmless = True

    def _joined(self, places: Sequence[int]) -> tuple[bytes, list[Any]]:
        rows = [row for place in places if (row := self.stored[place]) is not None]
        if len({row.layout for row in rows}) > 1:
            raise FeatureNotCacheable("rows of this call have different shapes, so they can't be one batch")
        return rows[0].layout, join(rows, self.proof.device, is_row=self.rows is not None)

    def _put_together(self, computed: tuple[Result, list[int]] | None) -> Any:
        """The result of all keys, in their order, out of stored rows and computed ones."""
        order: Sequence[int] = self.held
        if computed is None:
            layout, leaves = self._joined(order)
        else:
            result, places = computed
            layout, leaves = result.layout, result.leaves
            if order:
                stored_layout, stored = self._joined(order)
                if stored_layout != layout:
                    raise FeatureNotCacheable(
                        "rows of this call have different shapes, so they can't be one batch"
                    )
                leaves = [concatenated(first, second) for first, second in zip(stored, leaves, strict=True)]
            order = [*order, *places]
        if self.rows is not None and (computed is not None or len(self.unique) < len(self.keys)):
            number_of = {place: number for number, place in enumerate(order)}
            numbers = [number_of[place] for place in self.where]
            if numbers != list(range(len(order))):
                leaves = [reordered(leaf, numbers) for leaf in leaves]
        try:
            return layout_of(layout).build(leaves)
        except (TypeError, ValueError) as exc:
            raise FeatureError(f"the result of {self._label} can't be made again: {exc}") from exc
