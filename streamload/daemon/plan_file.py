"""A run's plan, published: what it will read, in which order, and how far each of its groups is.

    runs/<run>/plan.json        what the order depends on, and the shards; written once
    runs/<run>/group-<g>.json   how far a group is: replaced now and then by one process of those that read it

No process asks another for anything, and whoever reads both computes what comes next by the loader's own
arithmetic (order/). There is no secret in them, and nothing in them is trusted: see `RunPlan.read`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from streamload import urls
from streamload.daemon.checked import flag, listed, matched, number, whole
from streamload.errors import PlanError, StreamloadError, UrlError
from streamload.order.plan import OrderOptions, Pieces, pass_order, pieces
from streamload.urls import UrlList
from streamload.urls.manifest import read_down, write_down

FORMAT = 1
PLAN_LIMIT_BYTES = 8 << 20
"""Of a hundred thousand URLs that no pattern joins; patterns of any length are some hundred bytes."""
PROGRESS_LIMIT_BYTES = 64 << 10
_NAMED = 2_000
"""A list is told from others by the names of so many of its shards, at equal distances."""
_RUN = re.compile(r"[0-9a-f]{16}")
_GROUP = re.compile(r"runs/([0-9a-f]{16})/group-(0|[1-9][0-9]{0,8})\.json")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_RECIPE = re.compile(r"[a-z0-9-]{1,40}")
_RECIPE_NAME = re.compile(r"[A-Za-z0-9.+_-]{0,200}")


@dataclass(frozen=True, slots=True)
class PlannedSource:
    """One source of a run: so many of its shards, in this order."""

    count: int
    order: OrderOptions


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What the order of a run depends on, and which shards it reads.

    Attributes:
        sources: they follow each other in `shards`; all have as many groups.
        one_pass: an epoch is once through the data, and the next one is of another order.
        shards: all of them; None where their URLs can't be told to others.
        names: tells these shards from any others.
        prepare: by which recipe the run's images are prepared, "raw-256"; "": they aren't.
        run: 16 hex characters, the same on all nodes: of the same shards in the same order, prepared alike.
    """

    sources: tuple[PlannedSource, ...]
    one_pass: bool
    shards: UrlList | None = field(repr=False)
    names: str
    prepare: str = ""
    run: str = field(init=False)

    def __post_init__(self) -> None:
        said = json.dumps(self._order()).encode()
        object.__setattr__(self, "run", hashlib.blake2b(said, digest_size=8).hexdigest())

    @property
    def groups(self) -> int:
        """Into how many sequences the shards are split."""
        return self.sources[0].order.groups

    def written(self) -> bytes:
        """The plan as it is published: the same bytes from every node."""
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
        """The plan that was published under a name.

        Raises:
            PlanError: it is cut, forged, of another version, or names what nobody may be made to read.
        """
        what = f"the plan of run {run}"
        value = _object(what, data)
        if value.get("format") != FORMAT:
            raise PlanError(
                f"{what} has format {value.get('format')!r:.40}, and this version reads {FORMAT}: "
                f"use the same version of streamload on both sides"
            )
        try:
            sources = tuple(_source(source) for source in listed(value["sources"]))
            shards = None if value["shards"] is None else read_down(value["shards"])
            prepare = matched(_RECIPE, value["prepare"], "recipe") if "prepare" in value else ""
            plan = cls(
                sources, flag(value["one_pass"]), shards, matched(_DIGEST, value["names"], "digest"), prepare
            )
            if not sources or len({source.order.groups for source in sources}) != 1:
                raise ValueError("its sources don't have the same groups")
            if shards is not None and len(shards) != sum(source.count for source in sources):
                raise ValueError(f"{len(shards):,} shards are not those of its sources")
        except (KeyError, TypeError, ValueError, OverflowError, StreamloadError) as exc:
            why = exc if isinstance(exc, StreamloadError) else f"{type(exc).__name__}: {exc}"
            raise PlanError(f"{what} can't be followed: {why!s:.400}") from exc
        if plan.run != run:
            raise PlanError(f"{what} is another run's ({plan.run}): it was changed, or moved there")
        return plan


def names_of(shards: UrlList, storage_options: Mapping[str, Any] | None) -> str:
    """A digest of what the shards of a list are called in a tier, by some thousand of them at most."""
    step = max(1, -(-len(shards) // _NAMED))
    said = hashlib.blake2b(f"{len(shards)}".encode(), digest_size=16)
    for place in range(0, len(shards), step):
        said.update(urls.digest(shards[place], storage_options).encode())
    return said.hexdigest()


def plan_of(
    sources: Sequence[PlannedSource],
    one_pass: bool,
    shards: UrlList,
    storage_options: Mapping[str, Any] | None,
    prepare: str = "",
) -> tuple[RunPlan, str]:
    """The plan of a run, and why its URLs aren't told ("" if they are).

    They are told only where the same shards are found by what may be told of them.
    """
    names = names_of(shards, storage_options)
    told: UrlList | None
    try:
        told, why = read_down(write_down(shards)), ""
        if len(told) != len(shards) or names_of(told, storage_options) != names:
            told, why = None, "what is secret in them says which shards they are"
    except UrlError as exc:
        told, why = None, str(exc)
    plan = RunPlan(tuple(sources), one_pass, told, names, prepare)
    if told is not None and (size := len(plan.written())) > PLAN_LIMIT_BYTES:
        why = f"a plan with them has {size:,} bytes, and {PLAN_LIMIT_BYTES:,} are read: give patterns"
        plan = replace(plan, shards=None)
    return plan, why


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a group is, as one of the processes that read it tells.

    Attributes:
        group: its number.
        epoch: of the order.
        fronts: of each source the pass under way, and the place in it of the next shard that is opened.
        ahead: so many shards from there on are fetched by the readers themselves.
        mean_bytes: of its shards; 0 where none has been seen.
        shards_per_second: at which the group goes on; 0 where that isn't known.
        told: counts what was told, so that it shows whether anybody still tells.
        prepared: the full name, with the versions of libraries, of the recipe by which its readers look for
            prepared shards; "": for none; None: that isn't told.
    """

    group: int
    epoch: int
    fronts: tuple[tuple[int, int], ...]
    ahead: int = 0
    mean_bytes: float = 0.0
    shards_per_second: float = 0.0
    told: int = 0
    prepared: str | None = None

    @property
    def name(self) -> str:
        """The file's name in the run's folder."""
        return f"group-{self.group}.json"

    def written(self) -> bytes:
        """As it is published: some hundred bytes."""
        value = {
            "format": FORMAT,
            "group": self.group,
            "epoch": self.epoch,
            "fronts": [list(front) for front in self.fronts],
            "ahead": self.ahead,
            "mean_bytes": round(self.mean_bytes),
            "shards_per_second": float(f"{self.shards_per_second:.6g}"),
            "told": self.told,
            **({} if self.prepared is None else {"prepared": self.prepared}),
        }
        return json.dumps(value).encode()

    @classmethod
    def read(cls, plan: RunPlan, group: int, data: bytes) -> Progress:
        """How far a group of a plan is.

        Raises:
            PlanError: it is cut, forged, or of another version.
        """
        what = f"the progress of group {group} of run {plan.run}"
        value = _object(what, data)
        try:
            if value["format"] != FORMAT or value["group"] != group or group >= plan.groups:
                raise ValueError(f"format {value['format']!r:.40}, group {value['group']!r:.40}")
            fronts = tuple((whole(pass_), whole(place)) for pass_, place in listed(value["fronts"]))
            if len(fronts) != len(plan.sources):
                raise ValueError(f"{len(fronts)} sources")
            return cls(
                group,
                whole(value["epoch"]),
                fronts,
                whole(value["ahead"]),
                number(value["mean_bytes"]),
                number(value["shards_per_second"]),
                whole(value["told"]),
                matched(_RECIPE_NAME, value["prepared"], "recipe's name") if "prepared" in value else None,
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise PlanError(f"{what} can't be read: {exc!s:.200}") from exc


class Coming:
    """What the groups of a run read next, by their plan. Keeps which shards each has; not thread-safe."""

    def __init__(self, plan: RunPlan):
        self.plan = plan
        self._pieces: dict[tuple[int, int], Pieces] = {}

    def of(self, progress: Progress, count: int) -> list[int]:
        """The next shards of a group behind those that its readers fetch themselves, in order of need.

        Args:
            progress: how far the group is.
            count: how many, at most; none comes twice.

        Returns:
            Places among the shards of the run.
        """
        wanted = count + progress.ahead
        found: list[tuple[float, int]] = []
        first = 0
        for which, source in enumerate(self.plan.sources):
            coming = self._of_source(which, progress, wanted)
            # A source is read by as many lanes as it has a share of the samples.
            found += [((k + 1) / source.order.lanes, first + int(s)) for k, s in enumerate(coming)]
            first += source.count
        found.sort()
        return [shard for _, shard in found[progress.ahead : wanted]]

    def _of_source(self, number: int, progress: Progress, count: int) -> npt.NDArray[np.int64]:
        """Of one source: the rest of its pass, then the one that follows."""
        source, group = self.plan.sources[number], progress.group
        own = self._pieces.get((number, group))
        if own is None:
            own = self._pieces[number, group] = pieces(source.order, source.count, group)
        pass_, place = progress.fronts[number]
        epoch = progress.epoch
        rest = pass_order(source.order, own.shards, group, epoch, pass_)[place:]
        if len(rest) >= count:
            return rest[:count]
        epoch, pass_ = (epoch + 1, 0) if self.plan.one_pass else (epoch, pass_ + 1)
        after = pass_order(source.order, own.shards, group, epoch, pass_)
        return np.concatenate([rest, after[~np.isin(after, rest)]])[:count]


_Needed = TypeVar("_Needed", bound=Hashable)


def in_order(coming: Iterable[Sequence[_Needed]]) -> list[_Needed]:
    """What several groups need, each in its order, as one list: the next of each, then those behind them."""
    ranked = [(k, n, shard) for n, shards in enumerate(coming) for k, shard in enumerate(shards)]
    ranked.sort(key=lambda one: one[:2])
    return list(dict.fromkeys(shard for _, _, shard in ranked))


def runs_in(names: Iterable[str]) -> dict[str, list[int]]:
    """Of each run with a plan the groups that tell how far they are, by the names of objects below "runs"."""
    found: dict[str, list[int]] = {}
    for name in names:
        _, _, rest = name.partition("runs/")
        run, _, file = rest.partition("/")
        if file == "plan.json" and _RUN.fullmatch(run):
            found.setdefault(run, [])
    for name in names:
        if (match := _GROUP.fullmatch(name)) and match[1] in found:
            found[match[1]].append(int(match[2]))
    return found


def _object(what: str, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise PlanError(f"{what} is no JSON: it was cut, or somebody else wrote it ({exc!s:.100})") from exc
    if not isinstance(value, dict):
        raise PlanError(f"{what} is no JSON object: {value!r:.100}")
    return value


def _source(value: Any) -> PlannedSource:
    hints = value["hints"]
    count = whole(value["count"])
    if hints is not None:
        hints = np.array([whole(size) for size in listed(hints)], np.int64)
        if hints.size != count:
            raise ValueError(f"{hints.size:,} sizes for {count:,} shards")
    seed = value["seed"]
    if type(seed) is not int or abs(seed) >= 1 << 128:
        raise ValueError(f"seed {seed!r:.60}")
    order = OrderOptions(
        seed,
        whole(value["groups"]),
        whole(value["lanes"]),
        whole(value["window"]),
        flag(value["shuffle_shards"]),
        hints,
    )
    if count > 1 << 23 or order.groups > 1 << 20:
        raise ValueError(f"{count:,} shards in {order.groups:,} groups")
    return PlannedSource(count, order)
