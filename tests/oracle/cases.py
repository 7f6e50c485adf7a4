"""A case of the oracle: a training or evaluation, written as JSON; and cases drawn at random."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field, replace
from typing import Any

import streamload
from tests.oracle.data import patterns
from tests.oracle.functions import resolved

Json = dict[str, Any]

_GROUPS = {
    "shards": streamload.Shards,
    "images": streamload.Images,
    "order": streamload.Order,
    "batches": streamload.Batches,
    "cache": streamload.Cache,
    "workers": streamload.Workers,
}

_IN_GROUPS = {"num_batches": "order", "mixing": "order", "with_keys": "batches", "features": "batches"}
"""The groups of options that cases have beside them."""


@dataclass(frozen=True)
class Layout:
    """Ranks, and workers of each."""

    ranks: int
    workers: int


@dataclass(frozen=True)
class Case:
    """A run that is stopped, and resumed from its state on another layout in an empty cache.

    Attributes:
        name: in the record.
        sources: what `patterns` takes, and a Source's other arguments; a single one isn't mixed.
        options: of make_loader, by group, but for `_IN_GROUPS`; "@name" is a function of
            `tests/oracle/functions.py`.
        batch: rows of a global batch.
        layouts: of the run, and of the resumed one.
        epochs: of the whole run.
        stop: after how many steps over all epochs the state is taken; at most all of them.
        calls: (step, method, argument): calls of the loader after so many steps.
        report: report losses that follow from the rows.
    """

    name: str
    sources: tuple[Json, ...]
    options: Json = field(hash=False)
    batch: int
    layouts: tuple[Layout, Layout]
    epochs: int
    stop: int
    calls: tuple[tuple[int, str, Any], ...] = ()
    report: bool = False

    def to_json(self) -> Json:
        """As the record has it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Json) -> Case:
        """Read back what `to_json` gave, through JSON."""
        return cls(
            **{
                **value,
                "sources": tuple(value["sources"]),
                "layouts": tuple(Layout(**layout) for layout in value["layouts"]),
                "calls": tuple((step, method, argument) for step, method, argument in value["calls"]),
            }
        )

    def loader(self, layout: Layout, rank: int, cache_dir: str) -> tuple[streamload.Loader, Json]:
        """The loader of a rank, in the directory of the sets, and its features by name."""
        options = resolved(self.options)
        features = options.get("features", {})
        for name in _IN_GROUPS.keys() & options.keys():
            group = options.setdefault(_IN_GROUPS[name], {})
            group[name] = options.pop(name)
        is_sized_by_steps = "steps" in options.get("images", {}).get("patches", {})
        if "patches" in options.get("images", {}):
            options["images"]["patches"] = streamload.Patches(**options["images"]["patches"])
        if layout.ranks > 1:
            options["order"] = {**options.get("order", {}), "rank": rank, "world_size": layout.ranks}
        groups = {name: _GROUPS[name](**options.pop(name)) for name in _GROUPS if name in options}
        if layout.workers:
            workers = groups.get("workers", streamload.Workers())
            groups["workers"] = replace(workers, multiprocessing_context="fork")
        if not is_sized_by_steps:
            options["batch_size"] = self.batch // layout.ranks
        loader = streamload.make_loader(
            self._urls(), cache_dir=cache_dir, num_workers=layout.workers, **groups, **options
        )
        return loader, features

    @property
    def is_local(self) -> bool:
        """Whether there are shards that a state knows by where they are on this machine."""
        return any(source["way"] == "local" for source in self.sources)

    def _urls(self) -> Any:
        if len(self.sources) == 1:
            return patterns(self.sources[0]["way"], self.sources[0]["set"])
        return [
            streamload.Source(
                patterns(source["way"], source["set"]),
                **{name: value for name, value in source.items() if name not in ("way", "set")},
            )
            for source in self.sources
        ]


def draw(name: str, seed: int) -> Case:
    """A case by chance, of options that can be used together.

    Args:
        name: of the case.
        seed: of what is drawn.
    """
    rng = random.Random(seed)
    while True:
        case = _Draw(rng).case(name)
        try:
            for layout in case.layouts:
                case.loader(layout, 0, "unused")
        except streamload.errors.OptionError:
            continue
        return case


class _Draw:
    """What depends on each other while a case is drawn."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self.train = rng.random() < 0.85
        self.is_mixed = self.train and rng.random() < 0.3
        self.has_modalities = self.is_mixed and rng.random() < 0.15
        self.options: Json = {"train": self.train, "seed": rng.randint(0, 99)}

    def _sometimes(self, share: float, group: str | None, name: str, *values: Any) -> None:
        """Give an option a value of these in so many of all cases."""
        if self._rng.random() < share:
            place = self.options if group is None else self.options.setdefault(group, {})
            place.setdefault(name, self._rng.choice(values))

    def case(self, name: str) -> Case:
        rng = self._rng
        sources = self._sources()
        self._text({source["set"] for source in sources})
        self._image()
        self._selection()
        if "damaged" in {source["set"] for source in sources}:  # more than a tenth of it is bad
            self.options.setdefault("shards", {}).setdefault("max_bad_samples", 1.0)
        self._order()
        self._features()
        self._cache()
        self._batch_form()
        batch = rng.choice([6, 12])
        ranks = [1, 1, 2, 3, 6]
        calls, report = self._steering(len(sources))
        if calls or "mixing" in self.options or "batch_policy" in self.options.get("batches", {}):
            ranks = [1]
        layouts = [Layout(rng.choice(ranks), rng.choice([0, 0, 0, 1, 2])) for _ in range(2)]
        if not self.train:  # of several ranks each has its own samples
            layouts[1] = replace(layouts[1], ranks=layouts[0].ranks)
        if calls:
            layouts[0] = replace(layouts[0], workers=0)
        return Case(
            name=name,
            sources=sources,
            options=self.options,
            batch=batch,
            layouts=(layouts[0], layouts[1]),
            epochs=rng.choice([1, 2, 2]),
            stop=rng.choice([0, rng.randint(1, 6), rng.randint(1, 30), 1000]),
            calls=calls,
            report=report,
        )

    def _sources(self) -> tuple[Json, ...]:
        rng = self._rng
        sets = ["plain", "plain", "few", "many", "sized", "captions", "captions", "damaged", "photographs"]
        ways = ["local", "local", "http", "http", "pipe"]
        if not self.is_mixed:
            return ({"way": rng.choice(ways), "set": rng.choice(sets)},)
        chosen = rng.sample(
            ["plain", "few", "many", "sized", "captions", "photographs"], rng.choice([2, 2, 3])
        )
        sources: list[Json] = []
        for place, chosen_set in enumerate(chosen):
            source: Json = {"way": rng.choice(ways), "set": chosen_set, "weight": rng.choice([1.0, 2.0, 0.5])}
            if rng.random() < 0.2:
                source["floor"] = 0.1
            if self.has_modalities and place:
                source["modality"] = rng.choice(["text", "image"])
            sources.append(source)
        return tuple(sources)

    def _text(self, sets: set[str]) -> None:
        if sets == {"captions"}:
            self._sometimes(0.4, "shards", "text_key", "json:caption", "txt;json:caption")
        self._sometimes(0.15, "shards", "blank_captions", False)
        self._sometimes(0.25, "shards", "label_key", "cls")
        self._sometimes(0.7, None, "tokenizer", "@letters", "@words", "@words", "@of_transformers")
        if self.options.get("tokenizer") in ("@words", "@of_transformers"):
            self._sometimes(0.6, "batches", "text_padding", "longest")
            self._sometimes(0.3, "batches", "text_pad_multiple", 2, 4)
            if "batches" in self.options:
                self._sometimes(0.6, "batches", "bucketing", "step", 30, 60)
        if self.options.get("batches", {}).get("bucketing"):
            self._sometimes(0.3, "batches", "max_tokens", 40, 100)

    def _image(self) -> None:
        rng = self._rng
        kind = rng.random()
        if kind < 0.2:
            self.options["preprocess"] = rng.choice(["@tiny", "@clip_processor"])
        elif kind < 0.32:
            self._patches()
        elif kind < 0.5:
            self._sometimes(1.0, "workers", "map_sample", "@drawn", "@drawn", "@with_image")
            if self.options["workers"]["map_sample"] == "@with_image":
                self.options["preprocess"] = "@tiny"
            self._sometimes(0.3, "workers", "collate", "@lists")
            self.options.pop("tokenizer", None)
            self.options.pop("batches", None)
        self._sometimes(0.15, "images", "dtype", "uint8")
        self._sometimes(0.15, "images", "compile", False)
        self._sometimes(0.2, "images", "prepare", "raw", "raw-32", "jpeg-48-q90", "auto")
        self._sometimes(0.05, "images", "max_pixels", 1000)

    def _patches(self) -> None:
        patches: Json = {"patch_size": 8, "seq_lens": [16, 64]}
        if self._rng.random() < 0.5:
            patches["max_ratio"] = 1.0
        if self._rng.random() < 0.25 and self.train:
            patches["steps"] = [[16, 8], [64, 2], [16, 8], [16, 4]]
        elif self._rng.random() < 0.5:
            patches["seq_len_probs"] = [1, 3]
        self.options.setdefault("images", {})["patches"] = patches

    def _selection(self) -> None:
        self._sometimes(0.15, "shards", "keep", "@most_keys", "@wide")
        if self._rng.random() < 0.15:
            self._sometimes(1.0, "shards", "facts", {"score": "json:score"}, {"score": "captions.csv"})
            self.options["shards"]["keep"] = "@good"
        elif self._rng.random() < 0.1:
            self._sometimes(1.0, "shards", "facts", {"length": "@caption_length"}, {"uses": "plain.csv"})
        if self.train:
            uses = "uses" if "uses" in self.options.get("shards", {}).get("facts", {}) else "@by_width"
            self._sometimes(0.15, "shards", "repeat", uses, "@by_width")
            self._sometimes(0.2, "batches", "sample_weight", "@by_caption", "@complexity")
        self._sometimes(0.7, "shards", "max_bad_samples", None)

    def _order(self) -> None:
        rng = self._rng
        if not self.train:
            return
        self._sometimes(0.7, None, "shuffle", 0, 1, rng.randint(2, 30), rng.randint(30, 300))
        self._sometimes(0.5, "order", "lanes", 1, 2, rng.randint(2, 12))
        self._sometimes(0.25, "order", "groups", 2, 3)
        if self.is_mixed or rng.random() < 0.5:
            name = rng.choice(["num_batches", "num_samples"])
            batches = rng.randint(2, 14)
            self.options[name] = batches if name == "num_batches" else 12 * batches + rng.randint(0, 11)
        if self.is_mixed:
            self._sometimes(0.2, "order", "objective", {"0": 2, "1": 1})

    def _features(self) -> None:
        if self._rng.random() < 0.15:
            self._sometimes(0.7, "features", "means", "@means", "@means_half", "@means_variants")
            self._sometimes(0.4, "features", "letters", "@letters_sum")

    def _cache(self) -> None:
        self._sometimes(0.9, None, "cache_size", "50MB")
        self._sometimes(0.1, None, "cache_size", "64KB", "200KB")
        self._sometimes(0.1, "cache", "shared", "shared")
        self._sometimes(0.15, "cache", "revalidate", "never", "always")

    def _batch_form(self) -> None:
        named = self.has_modalities or "features" in self.options
        self.options["output"] = self._rng.choice(["dict"] if named else ["tuple", "dict", "dict", "hf"])
        if self.options["output"] == "hf":
            self._sometimes(0.5, "batches", "text_columns", ["labels"], ["length"], ["labels", "length"])
        self.options["with_keys"] = self._rng.random() < 0.9
        self._sometimes(0.15, "batches", "microbatch", 2, 4)

    def _steering(self, sources: int) -> tuple[tuple[tuple[int, str, Any], ...], bool]:
        """Calls during the run, and whether losses are reported."""
        rng = self._rng
        if not self.train:
            return (), False
        if sources > 1 and rng.random() < 0.4:
            policies = ["@alternate", "@follow_loss", "@schedule", "@target"]
            self.options["mixing"] = rng.choice(policies)
            self._sometimes(0.7, "order", "decisions", "decisions.jsonl")
            return (), self.options["mixing"] in ("@follow_loss", "@target")
        calls: list[tuple[int, str, Any]] = []
        if sources > 1 and rng.random() < 0.5:
            calls.append((rng.randint(0, 6), "set_weights", {"0": 1, "1": 3}))
        if rng.random() < 0.15:
            calls.append((rng.randint(0, 6), "set_batch_size", rng.choice([4, 8, 24])))
        self._sometimes(0.05, "batches", "batch_policy", "@halve")
        return tuple(sorted(calls)), False
