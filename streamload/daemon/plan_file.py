"""Plan files: what a run reads, in which order, and the progress of its groups, in the shared tier.

    runs/<run>/plan.json        the shards and all that their order depends on; written once
    runs/<run>/group-<g>.json   the progress of a group, replaced regularly by one process that reads it

A daemon that reads both computes the next shards by the loader's own arithmetic (order/). The files hold no
secrets, and their contents aren't trusted: see `RunPlan.read`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from streamload import urls
from streamload.errors import PlanError, StreamloadError, UrlError
from streamload.order.plan import OrderOptions
from streamload.urls import UrlList
from streamload.urls.manifest import read_down, write_down

FORMAT = 1
PLAN_LIMIT_BYTES = 8 << 20
"""Enough for 100,000 URLs without a common pattern; patterns take some hundred bytes."""
PROGRESS_LIMIT_BYTES = 64 << 10
_MOST = 1 << 53
_NAMED = 2_000
"""A list is identified by the names of this many of its shards, at equal distances."""
_RUN = re.compile(r"[0-9a-f]{16}")
_GROUP = re.compile(r"runs/([0-9a-f]{16})/group-(0|[1-9][0-9]{0,8})\.json")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_RECIPE = re.compile(r"[a-z0-9-]{1,40}")
_RECIPE_NAME = re.compile(r"[A-Za-z0-9.+_-]{0,200}")


@dataclass(frozen=True, slots=True)
class PlannedSource:
    """One source of a run: its number of shards, and their order."""

    count: int
    order: OrderOptions


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The shards that a run reads, and all that their order depends on.

    Attributes:
        sources: in the order of their shards in `shards`; all have the same number of groups.
        one_pass: an epoch is one pass over the data, and the next epoch has another order.
        shards: all shards; None where their URLs can't be published.
        names: a digest that identifies the shards.
        prepare: the recipe by which the run's images are prepared, as "raw-256"; "": none.
        run: 16 hex characters, the same on all nodes that read the same shards in the same order and form.
    """

    sources: tuple[PlannedSource, ...]
    one_pass: bool
    shards: UrlList | None = field(repr=False)
    names: str
    prepare: str = ""
    run: str = field(init=False)

    def __post_init__(self) -> None:
        order = json.dumps(self._order()).encode()
        object.__setattr__(self, "run", hashlib.blake2b(order, digest_size=8).hexdigest())

    @property
    def groups(self) -> int:
        """The number of groups."""
        return self.sources[0].order.groups

    def written(self) -> bytes:
        """The content of the plan file: the same bytes from every node."""
        shards = None if self.shards is None else write_down(self.shards)
        return json.dumps({"format": FORMAT, "shards": shards, **self._order()}, indent=0).encode()

    def _order(self) -> dict[str, Any]:
        return {
            "names": self.names,
            "one_pass": self.one_pass,
            "sources": [
                {
                    "count": source.count,
                    "seed": source.order.seed,
                    "groups": source.order.groups,
                    "lanes": source.order.lanes,
                    "window": source.order.window,
                    "shuffle_shards": source.order.shuffle_shards,
                    "hints": None if source.order.hints is None else source.order.hints.tolist(),
                }
                for source in self.sources
            ],
            **({"prepare": self.prepare} if self.prepare else {}),
        }

    @classmethod
    def read(cls, run: str, data: bytes) -> RunPlan:
        """Parse the plan file of a run.

        Raises:
            PlanError: it is cut, forged or of another version, or names URLs that no plan may name.
        """
        subject = f"the plan of run {run}"
        value = _object(subject, data)
        if value.get("format") != FORMAT:
            raise PlanError(
                f"{subject} has format {value.get('format')!r:.40}, and this version reads {FORMAT}: "
                f"use the same version of streamload on both sides"
            )
        try:
            sources = tuple(_source(source) for source in _list(value["sources"]))
            shards = None if value["shards"] is None else read_down(value["shards"])
            prepare = _matched(_RECIPE, value["prepare"], "recipe") if "prepare" in value else ""
            plan = cls(
                sources,
                _flag(value["one_pass"]),
                shards,
                _matched(_DIGEST, value["names"], "digest"),
                prepare,
            )
            if not sources or len({source.order.groups for source in sources}) != 1:
                raise ValueError("its sources don't have the same groups")
            if shards is not None and len(shards) != sum(source.count for source in sources):
                raise ValueError(f"{len(shards):,} shards are not those of its sources")
        except (KeyError, TypeError, ValueError, OverflowError, StreamloadError) as exc:
            why = exc if isinstance(exc, StreamloadError) else f"{type(exc).__name__}: {exc}"
            raise PlanError(f"{subject} can't be followed: {why!s:.400}") from exc
        if plan.run != run:
            raise PlanError(f"{subject} is another run's ({plan.run}): it was changed, or moved there")
        return plan


def names_of(shards: UrlList, storage_options: Mapping[str, Any] | None) -> str:
    """A digest of the names of a list's shards in a tier, of some thousand shards at most."""
    step = max(1, -(-len(shards) // _NAMED))
    names_hash = hashlib.blake2b(f"{len(shards)}".encode(), digest_size=16)
    for place in range(0, len(shards), step):
        names_hash.update(urls.digest(shards[place], storage_options).encode())
    return names_hash.hexdigest()


def plan_of(
    sources: Sequence[PlannedSource],
    one_pass: bool,
    shards: UrlList,
    storage_options: Mapping[str, Any] | None,
    prepare: str = "",
) -> tuple[RunPlan, str]:
    """The plan of a run, and the reason why it omits the URLs ("" if it has them).

    They are published only if what may be published of them identifies the same shards.
    """
    names = names_of(shards, storage_options)
    published: UrlList | None
    try:
        published, why = read_down(write_down(shards)), ""
        if len(published) != len(shards) or names_of(published, storage_options) != names:
            published, why = None, "what is secret in them says which shards they are"
    except UrlError as exc:
        published, why = None, str(exc)
    plan = RunPlan(tuple(sources), one_pass, published, names, prepare)
    if published is not None and (size := len(plan.written())) > PLAN_LIMIT_BYTES:
        why = f"a plan with them has {size:,} bytes, and {PLAN_LIMIT_BYTES:,} are read: give patterns"
        plan = replace(plan, shards=None)
    return plan, why


@dataclass(frozen=True, slots=True)
class PlanProgress:
    """The progress of a group, as published by one of the processes that read it.

    Attributes:
        group: its number.
        epoch: of the order.
        fronts: for each source the current pass, and the position in it of the next shard to open.
        ahead: the shards from there on that the readers fetch themselves.
        mean_bytes: the mean size of its shards; 0: unknown.
        shards_per_second: the group's pace; 0: unknown.
        told: a counter of publications, which shows whether the group is alive.
        prepared: the full name, with versions of libraries, of the recipe whose prepared shards its readers
            look for; "": they look for none.
    """

    group: int
    epoch: int
    fronts: tuple[tuple[int, int], ...]
    ahead: int = 0
    mean_bytes: float = 0.0
    shards_per_second: float = 0.0
    told: int = 0
    prepared: str = ""

    @property
    def name(self) -> str:
        """The name of the file in the run's folder."""
        return f"group-{self.group}.json"

    def written(self) -> bytes:
        """The content of the progress file: some hundred bytes."""
        value = {
            "format": FORMAT,
            "group": self.group,
            "epoch": self.epoch,
            "fronts": [list(front) for front in self.fronts],
            "ahead": self.ahead,
            "mean_bytes": round(self.mean_bytes),
            "shards_per_second": float(f"{self.shards_per_second:.6g}"),
            "told": self.told,
            "prepared": self.prepared,
        }
        return json.dumps(value).encode()

    @classmethod
    def read(cls, plan: RunPlan, group: int, data: bytes) -> PlanProgress:
        """Parse the progress file of a group.

        Raises:
            PlanError: it is cut, forged, or of another version.
        """
        subject = f"the progress of group {group} of run {plan.run}"
        value = _object(subject, data)
        try:
            if value["format"] != FORMAT or value["group"] != group or group >= plan.groups:
                raise ValueError(f"format {value['format']!r:.40}, group {value['group']!r:.40}")
            fronts = tuple((_whole(pass_), _whole(place)) for pass_, place in _list(value["fronts"]))
            if len(fronts) != len(plan.sources):
                raise ValueError(f"{len(fronts)} sources")
            return cls(
                group,
                _whole(value["epoch"]),
                fronts,
                _whole(value["ahead"]),
                _number(value["mean_bytes"]),
                _number(value["shards_per_second"]),
                _whole(value["told"]),
                _matched(_RECIPE_NAME, value["prepared"], "recipe's name"),
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise PlanError(f"{subject} can't be read: {exc!s:.200}") from exc


def runs_in(names: Iterable[str]) -> dict[str, list[int]]:
    """For each run with a plan its groups with progress files, from the names of objects below "runs"."""
    groups_by_run: dict[str, list[int]] = {}
    for name in names:
        _, _, path = name.partition("runs/")
        run, _, file = path.partition("/")
        if file == "plan.json" and _RUN.fullmatch(run):
            groups_by_run.setdefault(run, [])
    for name in names:
        if (match := _GROUP.fullmatch(name)) and match[1] in groups_by_run:
            groups_by_run[match[1]].append(int(match[2]))
    return groups_by_run


def _object(subject: str, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise PlanError(f"{subject} isn't JSON: it was cut or overwritten ({exc!s:.100})") from exc
    if not isinstance(value, dict):
        raise PlanError(f"{subject} isn't a JSON object: {value!r:.100}")
    return value


def _source(value: Any) -> PlannedSource:
    hints = value["hints"]
    count = _whole(value["count"])
    if hints is not None:
        hints = np.array([_whole(size) for size in _list(hints)], np.int64)
        if hints.size != count:
            raise ValueError(f"{hints.size:,} sizes for {count:,} shards")
    seed = value["seed"]
    if type(seed) is not int or abs(seed) >= 1 << 128:
        raise ValueError(f"seed {seed!r:.60}")
    order = OrderOptions(
        seed,
        _whole(value["groups"]),
        _whole(value["lanes"]),
        _whole(value["window"]),
        _flag(value["shuffle_shards"]),
        hints,
    )
    if count > 1 << 23 or order.groups > 1 << 20:
        raise ValueError(f"{count:,} shards in {order.groups:,} groups")
    return PlannedSource(count, order)


def _list(value: Any) -> list[Any]:
    """Check that a value is a list.

    Raises:
        TypeError: it isn't. The checks below raise ValueError.
    """
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.100} is no list")
    return value


def _whole(value: Any) -> int:
    """Check that a value is a whole number from 0 to 2⁵³."""
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError(f"{value!r:.60} is no whole number from 0")
    return value


def _number(value: Any) -> float:
    """Check that a value is a number from 0 to 2⁵³."""
    if type(value) not in (int, float) or not 0 <= value <= _MOST:
        raise ValueError(f"{value!r:.60} is no number from 0")
    return float(value)


def _flag(value: Any) -> bool:
    """Check that a value is true or false."""
    if type(value) is not bool:
        raise ValueError(f"{value!r:.60} is neither true nor false")
    return value


def _matched(pattern: re.Pattern[str], value: Any, subject: str) -> str:
    """Check that a value is a string that matches a pattern; `what` names it in the error."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{value!r:.60} is no {subject}")
    return value
