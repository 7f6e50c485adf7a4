"""Rows on their way into the store: proved by one look for many calls, stored by a thread, never stale."""

from __future__ import annotations

import math
import os
import threading

import numpy as np
import pytest
import torch
from torch import nn

from streamload import cache_info, cache_module
from streamload.derived.proof import fingerprint, module_proof
from streamload.derived.store import queue as row_queue
from streamload.derived.store import row_store
from streamload.derived.store.catalog import open_catalog
from streamload.derived.store.queue import ComputedRows, RowQueue
from streamload.derived.store.row_store import RowPlace
from streamload.derived.store.sealed import seal, seal_rows, unseal

X = torch.randn(8, 10, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "cache"))
    yield
    row_store.close_stores()


@pytest.fixture
def no_looks(monkeypatch):
    """Nothing is looked at as a whole unless something asks for it."""
    never = {"_share": 1e-9, "due": math.inf}
    monkeypatch.setattr(module_proof.LookPace, "__init__", lambda self, share=0: vars(self).update(never))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(10, 3)

    def forward(self, x):
        return self.linear(x)


Cached = cache_module(Plain)


def keys(count, start=0):
    return [f"key {at}" for at in range(start, start + count)]


def stored_now():
    """The rows that another process would find."""
    with open_catalog(RowPlace("").root) as catalog:
        return sum(rows.rows for rows in catalog.fingerprints() if rows.label == "Plain")


def name(number):
    return number.to_bytes(32, "big")


def computed(numbers, label="it", judge=None):
    bodies = np.stack([np.full(5, number, np.uint8) for number in numbers])
    return ComputedRows(
        [name(number) for number in numbers],
        b"layout",
        lambda: (bodies, list(numbers)),
        100,
        False,
        label,
        judge,
    )


class Judge:
    """Evidence that says what it is told to."""

    def __init__(self, after_look):
        self.verdict, self.after_look, self.looks = None, after_look, 0

    def __call__(self, look):
        if look and self.verdict is None:
            self.looks += 1
            self.verdict = self.after_look
        return self.verdict


def names_in(batch):
    """The label and name of each row that a queue stores."""
    return [(rows.label, key) for rows, _ in batch for key in rows.names]


def test_rows_sealed_together_are_those_sealed_one_by_one():
    bodies = np.arange(40, dtype=np.uint8).reshape(4, 10)
    together = seal_rows([name(at) for at in range(4)], b"layout", bodies, [0, 1, 2**64 - 1, 7])
    for at, (key, data) in enumerate(together):
        assert bytes(data) == seal(key, b"layout", bodies[at].tobytes(), [0, 1, 2**64 - 1, 7][at])
        assert unseal(key, bytes(data)).body == bodies[at].tobytes()


def test_rows_are_stored_after_their_proof_and_dropped_without_it():
    written, dropped = [], []
    queue = RowQueue(lambda batch: written.extend(names_in(batch)), dropped.append)
    good, bad = Judge(after_look=True), Judge(after_look=False)
    queue.add(computed([1, 2], judge=good))
    queue.add(computed([3], judge=good))
    queue.add(computed([4, 5], judge=bad))
    assert queue.is_busy
    assert written == []
    queue.flush()
    assert written == [("it", name(at)) for at in (1, 2, 3)]
    assert dropped == [2]
    assert (good.looks, bad.looks) == (1, 1)
    assert not queue.is_busy
    assert not queue.read([name(at) for at in range(9)])


def test_a_call_waits_while_too_much_is_on_its_way(monkeypatch):
    monkeypatch.setattr(row_queue, "_MOST_BYTES", 150)
    may_write, began, written = threading.Event(), threading.Event(), []

    def write(batch):
        began.set()
        assert may_write.wait(30)
        written.extend(names_in(batch))

    queue = RowQueue(write, lambda count: None)
    queue.add(computed([1]))
    queue.add(computed([2]))
    assert began.wait(30)
    third = threading.Thread(target=queue.add, args=(computed([3]),))
    third.start()
    assert not written
    may_write.set()
    third.join(30)
    queue.flush()
    assert [key for _, key in written] == [name(1), name(2), name(3)]


def test_an_error_while_storing_is_said_once_and_later_rows_are_stored(caplog):
    written = []

    def write(batch):
        if batch[0][0].label == "bad":
            raise MemoryError("no room for that")
        written.extend(names_in(batch))

    queue = RowQueue(write, lambda count: None)
    for at in range(3):
        queue.add(computed([at], "bad"))
        queue.flush()
    queue.add(computed([7]))
    queue.flush()
    assert [key for _, key in written] == [name(7)]
    assert caplog.text.count("no room for that") == 1
    assert not queue.is_busy


@pytest.mark.usefixtures("no_looks")
def test_one_look_proves_the_rows_of_many_calls(monkeypatch):
    looks = []
    original = module_proof.Proof.look

    def look(self, *, anew=False):
        looks.extend([1] if anew else [])
        return original(self, anew=anew)

    monkeypatch.setattr(module_proof.Proof, "look", look)
    module = Cached()
    for start in range(0, 80, 8):
        module(X, cache_key=keys(8, start))
    assert stored_now() == 0
    assert cache_info(module).stored == 80
    assert len(looks) == 1
    assert stored_now() == 80


@pytest.mark.usefixtures("no_looks")
def test_rows_on_their_way_are_read_and_edited_results_change_none():
    module = Cached()
    first = module(X, cache_key=keys(8))
    expected = first.clone()
    first.zero_()
    assert torch.equal(module(X[2:4], cache_key=keys(2, 2)), expected[2:4])
    assert cache_info(module).rows_computed == 8


@pytest.mark.usefixtures("no_looks")
@pytest.mark.parametrize("seen", [True, False])
def test_rows_of_calls_before_an_unproved_change_are_computed_again(seen):
    module = Cached()
    module(X, cache_key=keys(8))  # looked at, as nothing was known before
    cache_info(module)
    before = module(X, cache_key=keys(8, 8))
    if seen:
        with torch.no_grad():
            module.linear.weight.mul_(2)
    else:
        module.linear.weight.data.mul_(2)
    after = module(X, cache_key=keys(8, 8))
    assert not torch.equal(before, after)
    assert torch.equal(after, module(X).detach())
    again = Cached()
    assert torch.equal(again(X, cache_key=keys(8, 8)), before)


@pytest.mark.usefixtures("no_looks")
def test_a_forked_child_finds_the_rows_of_its_parent_and_stores_its_own():
    module = Cached()
    module(X, cache_key=keys(8))
    child = os.fork()
    if not child:
        status = 1
        try:
            module(X, cache_key=keys(8))
            module(X, cache_key=keys(8, 8))
            counts = cache_info(module)
            status = 0 if (counts.hits, counts.stored) == (8, 8) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    module(X, cache_key=keys(8, 8))
    counts = cache_info(module)
    assert (counts.hits, counts.stored) == (8, 8)


def test_a_change_on_a_device_is_found_by_the_next_look():
    weight = torch.ones(5000)
    samples = fingerprint._Samples([weight, torch.ones(0), torch.ones(3, 3).t()])
    samples.compare()
    assert samples.are_unchanged()
    weight.data.mul_(2)
    samples.compare()
    weight.data.div_(2)  # put back, as after an evaluation of averaged weights
    samples.compare()
    assert not samples.are_unchanged()
