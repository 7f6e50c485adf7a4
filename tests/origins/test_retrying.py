"""The waits between attempts, without waiting: an event that notes for how long it was asked to wait."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from streamload.errors import (
    DatasetChanged,
    OriginCut,
    OriginError,
    OriginNotFound,
    OriginUnavailable,
    ShardFormatError,
)
from streamload.origins.endpoints import Endpoint
from streamload.origins.protocol import OriginOptions, Session, Version
from streamload.origins.retrying import RetryingOrigin


class Sleepless(threading.Event):
    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout or 0.0)
        return self.is_set()


class Flaky:
    """An origin of zeros that fails as its script says: a number of good bytes, then an error."""

    url = "flaky://a.tar"

    def __init__(self, size: int, script: list[tuple[int, Exception]]) -> None:
        self.size, self.script, self.opened = size, script, [0][:0]

    def open(self, start: int = 0, expected: Version | None = None) -> _Flaky:
        self.opened.append(start)
        good, error = self.script.pop(0) if self.script else (self.size, None)
        if error is not None and good < 0:
            raise error
        return _Flaky(Version(self.size, '"1"'), start, min(self.size, start + good), error)


class _Flaky:
    def __init__(self, version: Version, start: int, stop: int, error: Exception | None) -> None:
        self.version, self.start, self.stop, self.error = version, start, stop, error

    def chunks(self) -> Iterator[bytes]:
        for place in range(self.start, self.stop, 1000):
            yield bytes(min(1000, self.stop - place))
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        pass


def retrying(origin: Flaky, **options: float) -> tuple[RetryingOrigin, Sleepless]:
    stop = Sleepless()
    session = Session(OriginOptions(**options), None, stop)  # type: ignore[arg-type]
    return RetryingOrigin(origin, session, random.Random(7)), stop


def test_waits_are_jittered_and_double_up_to_their_limit() -> None:
    flaky = Flaky(10, [(-1, OriginUnavailable("away"))] * 9)
    origin, stop = retrying(flaky, attempts=10)
    assert b"".join(origin.open().chunks()) == bytes(10)
    limits = [min(15.0, 0.1 * 2**n) for n in range(9)]
    assert all(0 <= wait <= limit for wait, limit in zip(stop.waits, limits, strict=True))
    assert len(set(stop.waits)) == 9


def test_patience_ends_after_so_many_attempts() -> None:
    flaky = Flaky(10, [(-1, OriginUnavailable("away"))] * 99)
    origin, stop = retrying(flaky, attempts=5)
    with pytest.raises(OriginUnavailable, match=r"away \(given up after 5 attempts\)"):
        origin.open()
    assert len(stop.waits) == 4


class Away(Endpoint):
    def is_away(self, error: OriginError, session: Session) -> bool:
        return True


def test_while_its_endpoint_is_away_no_wait_is_longer_than_5_s() -> None:
    flaky = Flaky(10, [(-1, OriginUnavailable("away"))] * 1500)
    session = Session(OriginOptions(attempts=3, outage_seconds=600.0), None, stop := Sleepless())
    endpoint = Away("http://host/a.tar", lambda session: pytest.fail("not asked"))
    origin = RetryingOrigin(flaky, session, random.Random(7), endpoint)
    assert b"".join(origin.open().chunks()) == bytes(10)
    assert len(stop.waits) == 1500
    assert 4.9 < max(stop.waits) <= 5.0


def test_progress_renews_patience() -> None:
    flaky = Flaky(1_000_000, [(50_000, OriginCut("cut"))] * 15)
    origin, stop = retrying(flaky, attempts=3, slow_bytes=30_000)
    assert b"".join(origin.open().chunks()) == bytes(1_000_000)
    assert flaky.opened == [0, *range(50_000, 800_000, 50_000)]
    assert max(stop.waits) <= 0.1


def test_progress_of_a_few_bytes_does_not_renew_patience() -> None:
    flaky = Flaky(1_000_000, [(5_000, OriginCut("cut"))] * 99)
    origin, _ = retrying(flaky, attempts=3, slow_bytes=30_000)
    with pytest.raises(OriginCut, match="given up"):
        list(origin.open().chunks())
    assert flaky.opened == [0, 5_000, 10_000]


def test_a_retry_after_is_waited_for_up_to_its_limit() -> None:
    errors = [OriginUnavailable("away"), OriginUnavailable("away")]
    errors[0].retry_after_seconds, errors[1].retry_after_seconds = 7.0, 1e6
    origin, stop = retrying(Flaky(10, [(-1, error) for error in errors]))
    list(origin.open().chunks())
    assert stop.waits == [7.0, 60.0]


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), TypeError("x"), OverflowError("x")])
@pytest.mark.parametrize("good", [-1, 5_000])
def test_what_nobody_has_foreseen_is_an_error_of_this_origin(error: Exception, good: int) -> None:
    origin, stop = retrying(Flaky(10_000, [(good, error)]))
    with pytest.raises(OriginError, match=rf"flaky://a\.tar: {type(error).__name__}: '?x") as caught:
        list(origin.open().chunks())
    assert caught.value.__cause__ is error
    assert not stop.waits


@pytest.mark.parametrize("error", [MemoryError("x"), PermissionError("x"), RuntimeError("x")])
@pytest.mark.parametrize("good", [-1, 5_000])
def test_what_is_not_the_origins_fault_passes_as_it_is(error: Exception, good: int) -> None:
    origin, _ = retrying(Flaky(10_000, [(good, error)]))
    with pytest.raises(type(error)) as caught:
        list(origin.open().chunks())
    assert caught.value is error


@pytest.mark.parametrize("error", [OriginNotFound("gone"), OriginError("odd"), ShardFormatError("page")])
def test_what_another_attempt_cannot_mend_passes_at_once(error: Exception) -> None:
    origin, stop = retrying(Flaky(10_000, [(5_000, error)]))
    with pytest.raises(type(error)):
        list(origin.open().chunks())
    assert not stop.waits


class Nameless:
    """An origin whose answers say no version: each is some chunks, and whether it is cut after them."""

    url = "nameless://a.tar"

    def __init__(self, *answers: tuple[list[bytes], bool]) -> None:
        self.answers = list(answers)

    def open(self, start: int = 0, expected: Version | None = None) -> _Answer:
        assert start == 0, "nothing proves which version the rest would be of"
        return _Answer(*self.answers.pop(0))


class _Answer:
    def __init__(self, chunks: list[bytes], is_cut: bool) -> None:
        self.version, self._chunks, self._is_cut = Version(None, None), chunks, is_cut

    def chunks(self) -> Iterator[bytes]:
        yield from self._chunks
        if self._is_cut:
            raise OriginCut("cut")

    def close(self) -> None:
        pass


SHARD = b"".join(bytes([letter]) * 10 for letter in range(6))


def in_chunks(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def read_again(first: bytes, second: list[bytes]) -> bytes:
    """What comes of a shard that is cut after some bytes and then read from its start."""
    nameless = Nameless((in_chunks(first, 10), True), (second, False))
    return b"".join(retrying(nameless)[0].open().chunks())  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 7, 10, 15, 30, 60])
@pytest.mark.parametrize("cut", [10, 25, 30, 59, 60])
def test_a_shard_that_is_read_again_is_compared_up_to_the_byte_that_it_was_cut_at(
    cut: int, size: int
) -> None:
    assert read_again(SHARD[:cut], in_chunks(SHARD, size)) == SHARD
    for place in (0, cut - 1):
        other = SHARD[:place] + b"!" + SHARD[place + 1 :]
        with pytest.raises(DatasetChanged, match="gives other bytes than it did before"):
            read_again(SHARD[:cut], in_chunks(other, size))
    end = SHARD[:cut] + b"!" + SHARD[cut + 1 :]
    assert read_again(SHARD[:cut], in_chunks(end, size)) == end  # nothing can tell


@pytest.mark.parametrize("size", [1, 10, 15, 30])
@pytest.mark.parametrize("end", [0, 9, 10, 20, 29])
def test_a_shard_that_ends_before_the_byte_that_it_was_cut_at_is_another(end: int, size: int) -> None:
    with pytest.raises(DatasetChanged, match=rf"ended at byte {end}, and 30 had been read"):
        read_again(SHARD[:30], in_chunks(SHARD[:end], size))
    assert read_again(SHARD[:30], in_chunks(SHARD[:30], size)) == SHARD[:30]
