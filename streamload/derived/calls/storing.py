"""Storing what a call has computed, once the module is found to be what it was before it computed.

One look at the whole module proves the rows of all calls before it. Looks take a hundredth of the time, but
for the first ones; and come when rows are needed, too many wait, or the store is closed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from streamload.derived.log_once import log_once
from streamload.derived.proof.fingerprint import Fingerprint, differences, torch_settings
from streamload.derived.proof.module_proof import (
    Built,
    built_state,
    description_of,
    label_of,
    options_of,
    proof_of,
)
from streamload.derived.store.keys import Digests
from streamload.derived.store.queue import ComputedRows, Material
from streamload.derived.store.results import Result
from streamload.derived.store.row_store import RowStore
from streamload.errors import FeatureNotCacheable

_OF_INPUT_BYTES = 8192
"""Most time a row for telling the inputs of a device apart, until the rows are proved."""


def store_result(
    module: Any,
    store: RowStore,
    fingerprint: Fingerprint,
    names: Sequence[bytes],
    result: Result,
    digests: Digests,
) -> None:
    """Store the rows of a result, soon, if the module is what its fingerprint said before it computed."""
    label, proof = label_of(module), proof_of(module)
    prover = None if options_of(module).version is not None else _StateProver(module)
    if prover is not None and not _is_of(fingerprint, proof.built):
        store.counts.refused += len(names)
        _say_changed(module, fingerprint.parts, proof.built)
        return
    if fingerprint.digest not in proof.noted:
        proof.noted.add(fingerprint.digest)
        note = json.dumps(dict(fingerprint.parts), sort_keys=True).encode()
        store.disk.write_note(b"parts" + fingerprint.digest, note, label)
    copy = result.copied()

    def material() -> Material:
        return copy(), digests()

    of_device = result.is_of_device
    size_bytes = result.size_bytes + (len(names) * _OF_INPUT_BYTES if of_device else 0)
    rows = ComputedRows(names, result.layout, material, size_bytes, of_device, label, proof.built)
    store.queue.add(rows, prover)
    if prover is not None and proof.looks.is_due:
        start = time.monotonic()
        prover.look()
        proof.looks.looked(start)
        store.queue.settle()


class _StateProver:
    """True if a built module is still in the state in which it computed rows (`queue.Prover`)."""

    def __init__(self, module: Any):
        self._module = module
        self._proof = proof_of(module)

    def is_proved(self, rows: ComputedRows) -> bool | None:
        """True if the rows are of the module as it was taken for; None: it wasn't looked at since."""
        was, built = rows.state, self._proof.built
        if built is None or built.parts is not was.parts or built.code is not was.code:
            _say_changed(self._module, {**was.parts, "code": was.code}, built)
            return False
        return True if built.watch.looked_at >= rows.computed_at else None

    def look(self) -> None:
        """Look at the whole module now."""
        description, start = description_of(self._module), time.monotonic()
        try:
            watch = built_state(self._module, description, self._proof).watch
            if watch.looked_at < start and not watch.is_unchanged(whole=True):
                built_state(self._module, description, self._proof)  # all of it is due: described anew
        except FeatureNotCacheable:  # it is said by the next call
            self._proof.built = None


def _is_of(fingerprint: Fingerprint, built: Built | None) -> bool:
    """True if a fingerprint is that of a module's last known state, and of torch's settings now."""
    if built is None:
        return False
    parts = {**built.parts, "code": built.code, "settings": list(torch_settings(built.parts["device"]))}
    return all(fingerprint.parts.get(name) == value for name, value in parts.items())


def _say_changed(module: Any, was: Any, built: Built | None) -> None:
    parts = {} if built is None else {**built.parts, "code": built.code}
    names = [name for name in differences(was, parts) if name.partition(".")[0] in parts]
    log_once(
        f"rows of {type(module).__name__} aren't stored, as computing changes it, or something did since: "
        f"{', '.join(names[:5])}"
    )
