"""Runs drawn at random (tests/oracle) have the same batches, states and counts where the rank decodes."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import shutil
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import streamload
from streamload.derived.store.row_store import close_stores
from streamload.pixels import auto
from tests.oracle.cases import Case, draw
from tests.oracle.place import running
from tests.oracle.replay import _comparable as comparable
from tests.oracle.run import Outcome, read, resume, run

pytestmark = pytest.mark.timeout(900)

SHORT, ALL, PARTS = 40, 168, 7
CHOOSING = 8
CHOSEN = "chosen in mid-epoch"
FIRST_SEED = 1000


def with_decode(case: Case, decode: str) -> Case:
    """The case without what decode="device" refuses, and decoding there."""
    options = copy.deepcopy(case.options)
    for name in ("patches", "compile"):
        options.get("images", {}).pop(name, None)
    if options.get("images", {}).get("prepare") in ("raw-32", "auto"):  # as they are chosen by what decodes
        del options["images"]["prepare"]
    if options.get("preprocess") == "@tiny":
        del options["preprocess"]
    options.pop("workers", None)
    if "tokenizer" not in options:  # the feature of texts takes ids
        options.get("features", {}).pop("letters", None)
    options.setdefault("images", {})["decode"] = decode
    return replace(case, options=options)


def with_more(case: Case, seed: int) -> Case:
    """The case with more of what is seldom drawn: rows of features, prepared images, microbatches."""
    rng, options = random.Random(seed), copy.deepcopy(case.options)
    if rng.random() < 0.7:
        options["output"] = "dict"
        options["features"] = {"means": rng.choice(["@means", "@means_half", "@means_variants"])}
    if rng.random() < 0.6:
        options.setdefault("images", {})["prepare"] = rng.choice(["raw", "jpeg-48-q90"])
    if rng.random() < 0.5:
        options.setdefault("batches", {})["microbatch"] = rng.choice([1, 2, 3])
    return replace(case, options=options)


def cases() -> Iterator[Case]:
    """Cases that both ways of decoding can run; every second has more of what is seldom drawn."""
    for seed in itertools.count(FIRST_SEED):
        case = draw(f"d{seed}", seed)
        if seed % 2:
            case = with_more(case, seed)
        try:
            for layout in case.layouts:
                with_decode(case, "device").loader(layout, 0, "unused")
        except streamload.errors.OptionError:
            continue
        yield case


def attempt(read_case: Callable[[], Outcome]) -> Outcome | str:
    """The outcome of a run in empty caches; or the kind of its error, which has to be the same.

    Its text has the worker that was first, and some of the samples that it had seen.
    """
    close_stores()  # rows of features are still being stored
    for name in ("first", "second", "all", "replayed", "decisions.jsonl", "shared"):
        path = Path(name)
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    try:
        return read_case()
    except streamload.errors.StreamloadError as error:
        return type(error).__name__


def differing(case: Case, host: Outcome, device: Outcome) -> list[str]:
    """The names of values that differ, but for the decoder in states, and for numbers that depend on time.

    These are bytes fetched again, where the cache is small, and rows of features read, where another rank may
    have stored them already.
    """
    for outcome in (host, device):
        for name in ("origin bytes", "rows read"):
            outcome.numbers.pop(name, None)
    values = [
        comparable(case, {**outcome.parts, "numbers": outcome.numbers, "states": outcome.states})
        for outcome in (host, device)
    ]
    for state in [*values[0]["states"], *values[1]["states"]]:
        for key in ("decoder", auto.NAME):
            state.pop(key, None)
    return [name for name in {**values[0], **values[1]} if values[0].get(name) != values[1].get(name)]


def differences_of_batches(case: Case) -> list[str]:
    """What differs where the rank decodes."""
    host, device = with_decode(case, "host"), with_decode(case, "device")
    expected, outcome = (attempt(functools.partial(read, way, "all")) for way in (host, device))
    if isinstance(expected, str) or isinstance(outcome, str):
        return [] if expected == outcome else [f"{case.name}: {expected}; {outcome}"]
    return [f"{case.name}: {name}" for name in differing(case, expected, outcome)]


def differences(case: Case, decode: str = "device") -> list[str]:
    """What differs where the rank decodes, in states, and after a resume from the other way of decoding."""
    host, device = with_decode(case, "host"), with_decode(case, decode)
    expected, outcome = (attempt(functools.partial(run, way)) for way in (host, device))
    if isinstance(expected, str) or isinstance(outcome, str):
        return [] if expected == outcome else [f"{case.name}: {expected}; {outcome}"]
    names = [CHOSEN] if all(auto.NAME in state for state in outcome.states) else []
    names += differing(case, expected, outcome)
    for way, states in ((host, outcome.states), (device, expected.states)):
        close_stores()
        shutil.rmtree("second", ignore_errors=True)
        rest = resume(way, states, expected.numbers["epochs left"]).parts
        names += [
            f"{kind} from the other way's state"
            for kind in rest
            if rest[kind] != expected.parts[kind][expected.cut :]
        ]
    return [f"{case.name}: {name}" for name in names]


def _or_traceback(item: tuple[Callable[[Case], list[str]], Case]) -> list[str]:
    function, case = item
    try:
        return function(case)
    except Exception:
        return [f"{case.name}: {traceback.format_exc()}"]


def all_differences(function: Callable[[Case], list[str]], chosen: list[Case], jobs: int) -> list[str]:
    with running(jobs) as run_all:
        calls = [(case.name, (function, case)) for case in chosen]
        return [line for lines in run_all(_or_traceback, calls) for line in lines]


def test_the_batches_of_forty_runs_are_the_same_where_the_rank_decodes() -> None:
    assert all_differences(differences_of_batches, list(itertools.islice(cases(), SHORT)), jobs=2) == []


@pytest.mark.deep
@pytest.mark.parametrize("part", range(PARTS))
def test_many_runs_are_the_same_and_resume_either_way(part: int) -> None:
    assert all_differences(differences, list(itertools.islice(cases(), ALL))[part::PARTS], jobs=1) == []


@pytest.mark.parametrize("count", [CHOOSING, pytest.param(8 * CHOOSING, marks=pytest.mark.deep)])
def test_runs_that_choose_in_mid_epoch_are_the_same_and_resume_either_way(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(auto, "FIRST_STEP", 1)
    monkeypatch.setattr(auto, "LAST_STEP", 2)
    monkeypatch.setattr(auto.DecoderChoice, "_measured", lambda self, *began: auto.DecodingLoad("", 1.0, 1.0))
    alone = (
        replace(case, layouts=[replace(layout, ranks=1) for layout in case.layouts])
        for case in cases()
        if case.options.get("train", True)  # an evaluation chooses nothing
    )
    chosen = list(itertools.islice(alone, count))
    lines = all_differences(functools.partial(differences, decode="auto"), chosen, jobs=2)
    assert [line for line in lines if not line.endswith(CHOSEN)] == []
    assert len(lines) >= count // 4
