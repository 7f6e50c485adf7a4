"""Rows in company: two versions of a module, two jobs on one store, eviction beside readers, little memory.

How it shows that it works: each process knows what its own module gives, or which bytes it stored under a
key, and compares all that it reads with that.
"""

from __future__ import annotations

import multiprocessing
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from streamload import cache_info, cache_module
from streamload.derived.store import row_store, table
from streamload.derived.store.row_store import RowPlace, RowStore
from streamload.derived.store.sealed import seal
from streamload.derived.store.table import RowCounts, RowTable

ROWS = 16
X = torch.arange(float(ROWS))[:, None].expand(ROWS, 4).contiguous()
KEYS = [f"key {at}" for at in range(ROWS)]


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "cache"))
    yield
    row_store.close_stores()


class Scaled(nn.Module):
    def __init__(self, factor: float = 1.0):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


Cached: Any = cache_module(Scaled)


def test_two_versions_of_a_module_in_one_process_never_share_rows() -> None:
    one, other = Cached(2.0), Cached(2.0)
    with torch.no_grad():
        other.factor.mul_(3)
    for start in (0, 4, 8, 0):  # the same keys in turn, some of them stored by the other a moment ago
        some = slice(start, start + 8)
        assert torch.equal(one(X[some], cache_key=KEYS[some]), 2 * X[some])
        assert torch.equal(other(X[some], cache_key=KEYS[some]), 6 * X[some])
    assert cache_info(one).rows_computed == 2 * ROWS
    with torch.no_grad():
        other.factor.div_(3)  # now it is the other
    assert torch.equal(other(X, cache_key=KEYS), 2 * X)
    assert cache_info(one).rows_computed == 2 * ROWS


def _pass_over(factor: float, began: Any, answer: Any) -> None:
    module = Cached(factor)
    began.wait(60)
    for _ in range(3):
        for at in range(0, ROWS, 4):
            assert torch.equal(module(X[at : at + 4], cache_key=KEYS[at : at + 4]), factor * X[at : at + 4])
    counts = cache_info(module)
    answer.put((factor, counts.rows_computed, counts.corrupt, counts.mismatches))
    row_store.close_stores()


@pytest.mark.parametrize("factors", [(2.0, 3.0), (2.0, 2.0)], ids=["two versions", "two jobs"])
@pytest.mark.sampled(1)
def test_processes_that_share_a_store_have_their_own_rows(factors: tuple[float, float]) -> None:
    context = multiprocessing.get_context("fork")
    began, answer = context.Barrier(2), context.Queue()
    children = [context.Process(target=_pass_over, args=(factor, began, answer)) for factor in factors]
    for child in children:
        child.start()
    found = [answer.get(timeout=60) for _ in children]
    for child in children:
        child.join()
    assert sorted(factor for factor, *_ in found) == sorted(factors)
    assert all(computed <= ROWS and not corrupt and not wrong for _, computed, corrupt, wrong in found)
    for factor in set(factors):
        module = Cached(factor)
        before = cache_info(module).rows_computed
        assert torch.equal(module(X, cache_key=KEYS), factor * X)
        assert cache_info(module).rows_computed == before


def _key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def _sealed(number: int, size: int) -> tuple[bytes, bytes]:
    body = number.to_bytes(4, "big") * (size // 4)
    return _key(number), seal(_key(number), b'["n","|u1",[%d]]' % len(body), body, number)


def _is_exact(row: Any, number: int, size: int) -> bool:
    return bytes(row.body) == number.to_bytes(4, "big") * (size // 4)


def test_the_times_of_reads_are_stored_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "_TOUCH_SECONDS", 0.0)
    rows = RowTable(tmp_path / "rows", lambda used_bytes, new_bytes: 1 << 20, RowCounts())
    rows.write([_sealed(at, 12_000) for at in range(70)], "it")
    for _ in range(3):
        read = rows.read([_key(at) for at in range(70)])
        assert rows.used_bytes <= 1 << 20
    assert 30 < len(read) < 70  # the table is full
    rows.write([_sealed(70, 12_000)], "it")
    assert rows.used_bytes <= 1 << 20
    rows.close()


@pytest.mark.deep
def test_rows_that_are_evicted_while_others_read_are_whole_or_gone(tmp_path: Path) -> None:
    place = RowPlace(str(tmp_path), cache_size=4 << 20)
    writer, reader = RowStore(place), RowStore(place)
    is_done = threading.Event()

    def write() -> None:
        for start in range(0, 2000, 25):
            writer.write([_sealed(at, 4000) for at in range(start, start + 25)], "it")
        is_done.set()

    thread = threading.Thread(target=write)
    thread.start()
    rng, read = random.Random(0), 0
    while not is_done.is_set() or not read:
        numbers = rng.sample(range(2000), 50)
        found = reader.read([_key(at) for at in numbers], "it")
        read += len(found)
        assert all(_is_exact(found[_key(at)], at, 4000) for at in numbers if _key(at) in found)
    thread.join()
    assert writer.counts.evicted > 1000
    assert reader.counts.corrupt == 0
    assert reader.disk.used_bytes <= 4 << 20
    writer.close()
    reader.close()
