"""Fingerprint of what makes a run's rows: transform, tokenizer and versions of their libraries (step K).

It is part of each state. A run that resumes with another one trains on the same samples, but on other pixels
or ids: the loader logs that, or refuses it (`Order(strict=True)`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import PIL
import simplejpeg
import torch

from streamload.batches.tokenize import adapt_tokenizer
from streamload.cache.selection import KeySpec
from streamload.errors import OptionError, StateMismatch
from streamload.loader.options import LoaderOptions
from streamload.loader.state import FINGERPRINT
from streamload.shards.columns import TOKENS
from streamload.shards.samples import JOINED
from streamload.transforms import kernel
from streamload.transforms.compile import compile_transform
from streamload.transforms.plan import ImagePlan, NotRecognised, clip_plan
from streamload.transforms.resize import torch_has_vectors

_ALWAYS = ("preprocess", "patches", "map_sample", "collate", "tokenizer", "prepare")
"""Parts of every fingerprint, empty if not given, so that giving one later is a difference."""
_PLAN = "plan"
"""What the names of parts begin with by which steps are planned."""
UNKNOWN = "unknown"
"""Stands for a transform or tokenizer that nothing stable identifies; it is compared with nothing."""


def rows_fingerprint(options: LoaderOptions) -> dict[str, str]:
    """Return what makes the rows of a run, by name; the same in every process of equal code and options.

    A compiled transform is known by its fields, a function by a digest of its code and of what it holds, a
    tokenizer by a digest of the ids of some captions.
    """
    fingerprint = dict.fromkeys(_ALWAYS, "")
    if options.workers.map_sample is None or options.preprocess is not None:
        versions = {"PIL": PIL.__version__, "simplejpeg": simplejpeg.__version__, "torch": torch.__version__}
        fingerprint |= {name: _release(version) for name, version in versions.items()}
        without = "no" if torch_has_vectors() else "Pillow"
        fingerprint["pixel kernel"] = without if kernel.why_not() else "yes"
        fingerprint["prepare"] = _changing_recipe(options.images.prepare)
        fingerprint |= _transform(options)
    for name in ("map_sample", "collate"):
        if (function := getattr(options.workers, name)) is not None:
            fingerprint |= _function(name, function)
    if options.tokenizer is not None:
        fingerprint |= _tokenizer(options.tokenizer)
    if options.join is not None:
        fingerprint["join"] = options.join.table.version
    return fingerprint | _plan(options)


def compared_rows(state: Mapping[str, Any], ours: Mapping[str, str], is_strict: bool) -> str:
    """Return how rows are made otherwise than those before a state; "" if nothing known differs.

    Args:
        state: of a loader.
        ours: the fingerprint of the loader that resumes.
        is_strict: whether a difference is an error.

    Raises:
        StateMismatch: the fingerprint in the state is damaged, or differs where `is_strict`.
    """
    saved = state.get(FINGERPRINT)
    if not isinstance(saved, Mapping):
        raise StateMismatch(f"not a valid state of a loader: a {type(saved).__name__} as {FINGERPRINT}")
    differences = [
        f"{name} was {saved[name] or 'none'!s:.120} and is {value or 'none':.120}"
        for name, value in ours.items()
        if saved.get(name, UNKNOWN) not in (value, UNKNOWN)
        and value != UNKNOWN
        and not name.startswith(_PLAN)
    ]
    if not differences:
        return ""
    message = f"the rows after the state are made otherwise than those before it: {'; '.join(differences)}"
    if is_strict:
        raise StateMismatch(f"{message}. Resume with the same, or without Order(strict=True)")
    return message


def _transform(options: LoaderOptions) -> dict[str, str]:
    preprocess, patches = options.preprocess, options.images.patches
    shown = {} if patches is None else {"patches": repr(patches)}
    if options.images.sizes is not None:
        shown["sizes"] = repr(options.images.sizes)
    if preprocess is None:
        return shown | _fields(clip_plan(options.train))
    try:
        return shown | _fields(compile_transform(preprocess))
    except NotRecognised:
        return shown | _function("preprocess", preprocess)


def _fields(plan: ImagePlan) -> dict[str, str]:
    """A plan is the same for each chain of functions that it replaces, and whether it is used or not."""
    known = {
        f"preprocess.{entry.name}": str(getattr(plan, entry.name))
        for entry in fields(plan)
        if entry.name != "given"
    }
    given = _function("preprocess.given", plan.given) if plan.given else {"preprocess.given": ""}
    return {"preprocess": "compiled", **known, **given}


def _function(name: str, function: Any) -> dict[str, str]:
    from streamload.loader.described_code import described  # of a feature, and only for functions as given

    parts = described(function, name)
    return {name: UNKNOWN} if parts is None else {name: "a function", **parts}


def _plan(options: LoaderOptions) -> dict[str, str]:
    planned_by = [part for extension in options.extensions for part in extension.planned_by(options)]
    parts = {_PLAN: "; ".join(part if isinstance(part, str) else "a function" for part in planned_by)}
    for number, part in enumerate(planned_by):
        name = f"{_PLAN} {number}"
        described = {} if isinstance(part, str) else _function(name, part)
        if UNKNOWN in described.values():
            raise OptionError(
                f"{part!r:.100} holds what can't be compared with that of a state, whose plan of steps goes "
                f"on: give a function of plain values, or the name of a fact"
            )
        parts |= described
    return parts if planned_by else {}


def _changing_recipe(prepare: str | None) -> str:
    """The recipe of prepared images if these have other pixels than the originals; else ""."""
    return "" if prepare in (None, "raw", "auto") else prepare


def has_other_plan(options: LoaderOptions, state: Mapping[str, Any], ours: Mapping[str, str]) -> bool:
    """True if steps are planned by what may be other than in a state's run, such as what samples cost.

    Args:
        options: of the loader that resumes.
        state, ours: as for `compared_rows`.
    """
    saved = state[FINGERPRINT]
    if saved.get(_PLAN) != ours.get(_PLAN):
        return True
    names = {name for name in saved if name.startswith(_PLAN)}  # a function's has the version of Python
    if any(TOKENS in extension.facts for extension in options.extensions):
        names.add("tokenizer")
        key = options.shards.text_key
        if key is not None and JOINED in KeySpec.parse(key).extensions:
            names.add("join")
    return any(
        UNKNOWN not in (before := saved.get(name, UNKNOWN), current := ours.get(name, UNKNOWN))
        and before != current
        for name in names
    )


def _tokenizer(tokenizer: Any) -> dict[str, str]:
    adapted = adapt_tokenizer(tokenizer)
    assert adapted is not None
    inner = getattr(tokenizer, "tokenizer", None)
    packages = {type(part).__module__.partition(".")[0] for part in (tokenizer, inner)}
    if "transformers" in packages:
        packages.add("tokenizers")
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in packages}
    known = {name: _release(version) for name, version in versions.items() if isinstance(version, str)}
    return {**known, "tokenizer": adapted.digest() or UNKNOWN}


def _release(version: str) -> str:
    return version.partition("+")[0]
