"""FaultyOrigin does what its script says, to the byte; and what stands on origins survives it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamload.errors import OriginCut, OriginDenied, OriginError, OriginTimeout, OriginUnavailable
from streamload.origins.local import LocalOrigin
from streamload.origins.origin import Origin, OriginOptions
from streamload.origins.protocol import Session
from streamload.origins.retrying import RetryingOrigin
from streamload.testing.faulty_origin import Break, FaultyOrigin

BODY = bytes(range(256)) * 20
SESSION = Session(
    OriginOptions(attempts=20, backoff_seconds=0.001, backoff_limit_seconds=0.002, chunk_bytes=700)
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("origin") / "a.tar"
    path.write_bytes(BODY)
    return path


def faulty(path: Path, *breaks: Break) -> FaultyOrigin:
    return FaultyOrigin(LocalOrigin(str(path), SESSION), *breaks)


def read(origin: Origin, start: int = 0) -> tuple[bytes, OriginError | None]:
    stream = origin.open(start)
    got = b""
    try:
        for chunk in stream.chunks():
            got += chunk
    except OriginError as error:
        return got, error
    finally:
        stream.close()
    return got, None


@pytest.mark.parametrize("at", [0, 1, 699, 700, 701, len(BODY) - 1])
@pytest.mark.parametrize(
    ("how", "error"), [("cut", OriginCut), ("stall", OriginTimeout), ("end", None), ("flip", None)]
)
def test_a_fault_happens_at_its_byte_and_once(at: int, how: str, error: type | None, path: Path) -> None:
    origin = faulty(path, Break(at=at, how=how, stall_seconds=0.001))  # type: ignore[arg-type]
    got, raised = read(origin)
    flipped = BODY[:at] + bytes([BODY[at] ^ 1]) + BODY[at + 1 :]
    assert got == (flipped if how == "flip" else BODY[:at])
    assert type(raised) is (error or type(None))
    assert origin.happened == {how: 1}
    assert read(origin) == (BODY, None)


def test_an_open_is_refused_from_its_byte_on(path: Path) -> None:
    origin = faulty(
        path, Break(at=100, how="refuse", times=2), Break(at=0, how="refuse", error=OriginDenied("no"))
    )
    with pytest.raises(OriginDenied):
        origin.open(5)
    assert read(origin, 5) == (BODY[5:], None)
    for _ in range(2):
        with pytest.raises(OriginUnavailable, match="byte 200"):
            origin.open(200)
    assert read(origin, 200) == (BODY[200:], None)
    assert origin.happened == {"refuse": 3}


def test_a_fault_behind_which_a_stream_begins_does_not_happen(path: Path) -> None:
    origin = faulty(path, Break(at=10, how="cut"))
    assert read(origin, 11) == (BODY[11:], None)
    assert not origin.happened


breaks = st.builds(
    Break,
    at=st.integers(0, len(BODY) - 1),
    how=st.sampled_from(["cut", "stall", "refuse"]),
    times=st.integers(1, 3),
    stall_seconds=st.just(0.0),
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(breaks, max_size=5))
def test_retrying_gives_every_byte_once_whatever_breaks(path: Path, script: list[Break]) -> None:
    assert read(RetryingOrigin(faulty(path, *script), SESSION)) == (BODY, None)
