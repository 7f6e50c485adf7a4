"""Random trainings and evaluations (tests/oracle) where the rank decodes, beside the same where workers do.

Batches, states and counts are the same, and so is what follows a resume from the other way's state.
"""

from __future__ import annotations

import copy
import functools
import random
import shutil
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import streamload
from streamload.derived.store.row_store import close_stores
from streamload.pixels import auto
from tests.oracle.cases import Case, draw
from tests.oracle.place import running
from tests.oracle.replay import _comparable as comparable
from tests.oracle.run import Outcome, read, resume, run

CHOSEN = "chosen in mid-epoch"


def make(rng: random.Random) -> Case:
    """A case by chance that both ways of decoding can run; half of them have more of what is seldom drawn."""
    while True:
        seed = rng.getrandbits(32)
        case = draw(f"d{seed}", seed)
        if rng.random() < 0.5:
            case = with_more(case, rng)
        try:
            for layout in case.layouts:
                with_decode(case, "device").loader(layout, 0, "unused")
        except streamload.errors.OptionError:
            continue
        return case


def check(case: Case, rng: random.Random) -> str:
    """Run it both ways, and compare."""
    lines = all_differences(differences, [case], jobs=1)
    assert not lines, "\n".join(lines)
    return "with features" if "features" in case.options else "without features"


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


def with_more(case: Case, rng: random.Random) -> Case:
    """The case with more of what is seldom drawn: rows of features, prepared images, microbatches."""
    options = copy.deepcopy(case.options)
    if rng.random() < 0.7:
        options["output"] = "dict"
        options["features"] = {"means": rng.choice(["@means", "@means_half", "@means_variants"])}
    if rng.random() < 0.6:
        options.setdefault("images", {})["prepare"] = rng.choice(["raw", "jpeg-48-q90"])
    if rng.random() < 0.5:
        options.setdefault("batches", {})["microbatch"] = rng.choice([1, 2, 3])
    return replace(case, options=options)


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


def all_differences(function: Callable[[Case], list[str]], chosen: Sequence[Case], jobs: int) -> list[str]:
    """What differs by a function of a case, for each of some, so many at a time."""
    with running(jobs) as run_all:
        calls = [(case.name, (function, case)) for case in chosen]
        return [line for lines in run_all(_or_traceback, calls) for line in lines]
