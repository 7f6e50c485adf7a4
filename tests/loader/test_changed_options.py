"""Every option that is changed at a resume is honoured, refused by name, or changes no batch.

One row for each argument of make_loader and each field of its groups, of Source and of Patches: a run is cut
and resumed with another value. An option without a row fails the test.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import streamload
from streamload import Patches, Source
from streamload.errors import DatasetChanged, StateMismatch
from streamload.extension import Extension
from streamload.loader.groups import GROUPS
from streamload.testing.shards import write_shards
from tests.support import flat

STEPS, REST = 3, 6
"""Batches before the cut, and batches of the rest that are compared."""
Batches = list[Any]


def pixels(image: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(image.resize((8, 8)), np.uint8)).permute(2, 0, 1).float()


def darker(image: Any) -> torch.Tensor:
    return pixels(image) / 2


def ids(captions: list[str]) -> torch.Tensor:
    """Ids of 5 to 44 letters of each caption, padded by 0: int64[N, 64]."""
    cut = [text[: 5 + zlib.crc32(text.encode()) % 40] for text in captions]
    return torch.tensor([[1 + ord(letter) % 90 for letter in text] + [0] * (64 - len(text)) for text in cut])


def masked(captions: list[str]) -> dict[str, torch.Tensor]:
    return {"input_ids": ids(captions), "attention_mask": (ids(captions) > 0).long()}


def other_ids(captions: list[str]) -> torch.Tensor:
    return ids(captions) + (ids(captions) > 0)


def odd(entry: Any) -> bool:
    return int(entry.key[-1]) % 2 == 1


def rate(entry: Any) -> float:
    return 2.0


def only_key(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"]}


def key_and_size(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"], "size": len(sample["jpg"])}


def joined(examples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"key": "+".join(example["key"] for example in examples)}


def keep_weights(summary: Any) -> None:
    return None


def keep_size(measured: Any) -> None:
    return None


class Nothing(Extension):
    name = "nothing"


class Row(NamedTuple):
    """A changed option, and what a resume does with it.

    Attributes:
        outcome: "honoured", "refused", or "same": it changes no batch.
        changed: the options that the second loader has beside those of the first.
        base: options of both.
        shows: whether the batches after the resume show an option that is honoured, given those without it.
        says: what the error names.
        error: its class.
    """

    outcome: str
    changed: dict[str, Any]
    base: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    shows: Callable[[Batches, Batches], bool] = lambda batches, plain: False
    says: str = ""
    error: type[Exception] = StateMismatch


def honoured(
    shows: Callable[[Batches, Batches], bool], base: dict[str, Any] | None = None, **changed: Any
) -> Row:
    return Row("honoured", changed, base or {}, shows)


def refused(
    says: str, base: dict[str, Any] | None = None, error: type[Exception] = StateMismatch, **changed: Any
) -> Row:
    return Row("refused", changed, base or {}, says=says, error=error)


def same(base: dict[str, Any] | None = None, **changed: Any) -> Row:
    return Row("same", changed, base or {})


def keys(batches: Batches) -> list[str]:
    return [key for batch in batches for key in batch["__key__"]]


def other_values(name: str) -> Callable[[Batches, Batches], bool]:
    """The same samples, with other values."""

    def shows(batches: Batches, plain: Batches) -> bool:
        pairs = list(zip(batches, plain, strict=True))
        return keys(batches) == keys(plain) and any(not alike(a.get(name), b.get(name)) for a, b in pairs)

    return shows


def other_batches(batches: Batches, plain: Batches) -> bool:
    """The same samples from the cut on, in other batches."""
    count = min(len(keys(batches)), len(keys(plain)))
    sizes = [len(batch["__key__"]) for batch in batches], [len(batch["__key__"]) for batch in plain]
    return keys(batches)[:count] == keys(plain)[:count] and sizes[0] != sizes[1]


def others_in_place_of_threes(batches: Batches, plain: Batches) -> bool:
    pairs = list(zip(keys(batches), keys(plain), strict=True))
    are_threes = {other[-1] == "3" for _, other in pairs}
    return are_threes == {True, False} and all(
        one[-1] != "3" if other[-1] == "3" else one == other for one, other in pairs
    )


def parts_of_steps(batches: Batches, plain: Batches) -> bool:
    pairs = zip(batches, plain, strict=True)
    return all(len(a["__key__"]) == 2 and {*a["__key__"]} < {*b["__key__"]} for a, b in pairs)


def same_steps_in_another_order(batches: Batches, plain: Batches) -> bool:
    pairs = zip(batches, plain, strict=True)
    return keys(batches) != keys(plain) and all(
        sorted(a["__key__"]) == sorted(b["__key__"]) for a, b in pairs
    )


def as_many(count: int) -> Callable[[Batches, Batches], bool]:
    return lambda batches, plain: (
        len(batches) == count and keys(batches)[:8] == keys(plain)[: 8 if count > 1 else 4]
    )


def row_of_patches(**changed: Any) -> Row:
    options = {"patch_size": 4, "seq_lens": (4, 9)}
    base = {"patches": Patches(**options), "preprocess": None}
    return honoured(other_values("image"), base, patches=Patches(**{**options, **changed}))


def of_sources(data: Path, **first: Any) -> dict[str, Any]:
    options = {"urls": str(data / "a"), "name": "a", **first}
    sources = [Source(**options), Source(str(data / "b"), name="b")]
    return {"urls": sources, "num_samples": 400}


MAPPED = {"map_sample": only_key, "preprocess": None, "tokenizer": None}
SIZES = [(8, 8), (8, 12), (12, 8)]
LONGEST = {"tokenizer": masked, "text_padding": "longest"}
ANY_NUMBER = {"max_bad_samples": None, "max_bad_shards": None}


def rows(data: Path, place: Path) -> dict[str, Row]:
    """A row for each option."""
    sources = of_sources(data)
    table = data / "scores.csv"
    return {
        "urls": refused("another data set", urls=str(data / "b")),
        "tokenizer": honoured(other_values("text"), tokenizer=other_ids),
        "preprocess": honoured(other_values("image"), preprocess=darker),
        "batch_size": honoured(other_batches, batch_size=6),
        "num_workers": same(num_workers=1),
        "num_samples": honoured(as_many(2), num_samples=4 * (STEPS + 2)),
        "seed": refused("another seed: 0, and this is 1", seed=1),
        "shuffle": refused("shuffle=8, and this is 9", shuffle=9),
        "shuffle of several": refused("shuffle=.* by shuffle=30", sources, shuffle=30),
        "train": refused("another train", train=False),
        "output": honoured(lambda batches, _: isinstance(batches[0], tuple), output="tuple"),
        "device": same(device="cpu"),
        "cache_dir": same(cache_dir=place / "another"),
        "cache_size": same(cache_size="100MB"),
        "shards.image_key": refused("image_key", image_key="jpg"),
        "shards.text_key": refused("text_key", text_key="json:digest"),
        "shards.text_key_probs": refused("text_key", {"text_key": "txt;json:digest"}, text_key_probs=(1, 2)),
        "shards.label_key": refused("label_key", label_key="json:index"),
        "shards.label_type": refused("label_key", {"label_key": "json:index"}, label_type="float"),
        "shards.blank_captions": honoured(
            lambda batches, plain: {key[-1] in "05" for key in keys(batches)} == {False} and len(plain) > 1,
            {"urls": str(data / "blank"), **ANY_NUMBER},
            blank_captions=False,
        ),
        "shards.keep": refused("keep, image_key", {"shuffle": None, "lanes": 2}, DatasetChanged, keep=odd),
        "shards.keep of a file": refused("listed uids", keep=str(data / "uids.npy")),
        "shards.keep_key": same(keep_key="json:of_no_file"),
        "shards.facts": refused("facts", facts={"score": str(table)}),
        "shards.join": refused("joined rows", join=str(table)),
        "shards.leave_out": honoured(others_in_place_of_threes, leave_out=str(data / "threes")),
        "shards.repeat": refused("repeat", repeat=(rate, "1")),
        "shards.storage_options": same(storage_options={"headers": {}}),
        "shards.on_error": same(on_error="raise"),
        "shards.max_bad_samples": same(max_bad_samples=None),
        "shards.max_bad_shards": same(max_bad_shards=None),
        "images.dtype": honoured(
            lambda batches, _: batches[0]["image"].dtype == torch.uint8, {"preprocess": None}, dtype="uint8"
        ),
        "images.compile": same({"preprocess": None}, compile=False),
        "images.prepare": same({"preprocess": None}, prepare="raw"),
        "images.max_pixels": honoured(
            lambda batches, plain: keys(batches) != keys(plain), ANY_NUMBER, max_pixels=30 * 30
        ),
        "images.patches": honoured(
            lambda batches, _: "patches" in batches[0]["image"],
            {"preprocess": None},
            patches=Patches(patch_size=4, seq_lens=(4,)),
        ),
        "images.sizes": honoured(
            lambda batches, plain: (
                {batch["image"].shape[2:] for batch in batches} == {(8, 8), (8, 12), (12, 8)}
                and len(set(keys(batches))) == len(keys(plain))
            ),
            {"preprocess": None},
            sizes=SIZES,
        ),
        "images.sizes_by": refused(
            "within a block", {"preprocess": None, "sizes": SIZES, "microbatch": 2}, sizes_by="step"
        ),
        "images.decode": same({"preprocess": None}, decode="auto"),
        "order.num_batches": honoured(as_many(1), num_batches=STEPS + 1),
        "order.lanes": refused("lanes=2, and this is 3", lanes=3),
        "order.lanes of several": refused("lanes=.* by lanes=9", {**sources, "lanes": 4}, lanes=9),
        "order.groups": refused("groups=1, and this is 2", groups=2, num_samples=80),
        "order.endless": honoured(as_many(REST), {"urls": str(data / "short")}, endless=True),
        "order.upsampling_factors": refused(
            "weight, floor",
            {"urls": f"{data}/a::{data}/b", "upsampling_factors": "1::2", "num_samples": 400},
            upsampling_factors="1::3",
        ),
        "order.rank": honoured(parts_of_steps, rank=0, world_size=2, batch_size=2),
        "order.world_size": honoured(parts_of_steps, rank=0, world_size=2, batch_size=2),
        "order.mixing": same(sources, mixing=keep_weights),
        "order.decisions": same(sources, decisions=place / "decisions.jsonl"),
        "order.journal": same(journal=place / "journal"),
        "order.objective": same(sources, objective={"a": 2.0}),
        "order.strict": same(strict=True),
        "batches.text_padding": honoured(other_values("text"), {"tokenizer": masked}, text_padding="longest"),
        "batches.text_pad_multiple": honoured(
            other_values("text"), {**LONGEST, "text_pad_multiple": 1}, text_pad_multiple=12
        ),
        "batches.text_columns": honoured(
            lambda batches, _: "length" in batches[0],
            {"output": "hf", "tokenizer": masked},
            text_columns=("length",),
        ),
        "batches.sources": refused("sources='mixed'.*'step'", sources, **of_sources(data), sources="step"),
        "batches.bucketing": honoured(same_steps_in_another_order, LONGEST, bucketing="step"),
        "batches.cost": honoured(
            lambda batches, plain: (
                keys(batches) != keys(plain) and len(set(keys(batches))) == len(keys(plain))
            ),
            cost="width",
        ),
        "batches.microbatch": same(microbatch=2),
        "batches.max_tokens": same({**LONGEST, "bucketing": "step"}, max_tokens=64),
        "batches.max_patches": honoured(
            lambda batches, plain: keys(batches) != keys(plain),
            {"cost": ("height", "width"), "max_tokens": 150},
            max_patches=100,
        ),
        "batches.sample_weight": honoured(
            lambda batches, _: batches[0]["weight"].tolist() == [2.0] * 4, sample_weight=rate
        ),
        "batches.batch_policy": same(batch_policy=keep_size),
        "batches.with_keys": honoured(lambda batches, _: "__key__" not in batches[0], with_keys=False),
        "batches.features": honoured(
            lambda batches, plain: keys(batches) == keys(plain), features={"means": Means().eval()}
        ),
        "batches.extensions": same(extensions=[Nothing()]),
        "cache.where": same(where="disk"),
        "cache.memory_size": same(memory_size="10MB"),
        "cache.free_disk": same(free_disk="1MB"),
        "cache.ahead": same(ahead="10KB"),
        "cache.revalidate": same(revalidate="always"),
        "cache.copy": same(copy="always"),
        "cache.shared": same(shared=str(place / "shared")),
        "cache.shared_options": same(shared=str(place / "shared"), shared_options={}),
        "cache.write_back": same(shared=str(place / "shared"), write_back=False),
        "cache.shared_wait": same(shared_wait=1.0),
        "cache.origin_wait": same(origin_wait=1.0),
        "workers.map_sample": refused("image_key, text_key", **MAPPED),
        "workers.map_sample of another": honoured(other_values("size"), MAPPED, map_sample=key_and_size),
        "workers.collate": honoured(other_values("key"), MAPPED, collate=joined),
        "workers.prefetch_factor": same({"num_workers": 1}, prefetch_factor=3),
        "workers.memory": same({"preprocess": None}, memory={"image": "1GB"}),
        "workers.multiprocessing_context": same({"num_workers": 1}, multiprocessing_context="fork"),
        "Source.urls": refused("another data set", sources, **of_sources(data, urls=str(data / "short"))),
        "Source.weight": refused("weight, floor", sources, **of_sources(data, weight=3.0)),
        "Source.name": refused("names of the sources", sources, **of_sources(data, name="c")),
        "Source.floor": refused("weight, floor", sources, **of_sources(data, floor=0.6)),
        "Source.modality": refused("image_key, text_key", sources, **of_sources(data, modality="text")),
        "Patches.patch_size": row_of_patches(patch_size=5),
        "Patches.seq_lens": row_of_patches(seq_lens=(9, 16)),
        "Patches.seq_len_probs": row_of_patches(seq_len_probs=(0, 1)),
        "Patches.max_ratio": row_of_patches(max_ratio=0.2),
        "Patches.steps": refused(
            r"Patches\(steps=",
            {"preprocess": None, "patches": Patches(4, (4, 9), steps=[(4, 4), (9, 4)] * 8)},
            patches=Patches(4, (4, 9), steps=[(4, 4), (9, 2)] * 8),
        ),
    }


class Means(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1).sum(1, keepdim=True)


NAMES = [
    *(
        name
        for name in inspect.signature(streamload.make_loader).parameters
        if name not in (*GROUPS, "unknown")
    ),
    *(f"{name}.{field.name}" for name, group in GROUPS.items() for field in dataclasses.fields(group)),
    *(f"{kind.__name__}.{field.name}" for kind in (Source, Patches) for field in dataclasses.fields(kind)),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_shards(folder / "a", [20, 17, 23, 20], seed=1)
    write_shards(folder / "b", [30, 30], seed=2)
    write_shards(folder / "short", [10, 10], seed=3)
    for path in write_shards(folder / "blank", [20, 20], seed=4):
        caption = re.compile(rb"noise from shard \d+ index \d*[05] digest [0-9a-f]+")
        path.write_bytes(caption.sub(lambda found: b" " * len(found[0]), path.read_bytes()))
    (folder / "threes").write_text(
        "".join(f"{shard:05d}{place:06d}\n" for shard in range(4) for place in (3, 13))
    )
    (folder / "scores.csv").write_text("key,score\n00000000001,1\n")
    np.save(folder / "uids.npy", np.array(["0" * 32]))
    return folder


def test_each_option_has_a_row(tmp_path: Path) -> None:
    named = {name.partition(" ")[0] for name in rows(tmp_path, tmp_path)}
    assert named == set(NAMES)


def make(data: Path, place: Path, options: dict[str, Any]) -> streamload.Loader:
    defaults: dict[str, Any] = {
        "urls": str(data / "a"), "tokenizer": ids, "preprocess": pixels, "batch_size": 4, "num_workers": 0,
        "shuffle": 8, "lanes": 2, "output": "dict", "with_keys": True, "cache_dir": place / "cache",
        "cache_size": "1GB",
    }  # fmt: skip
    return flat.make_loader(**{**defaults, **options})


def taken(loader: streamload.Loader, count: int) -> Batches:
    return [batch for _, batch in zip(range(count), loader, strict=False)]


def resumed(loader: streamload.Loader, state: dict[str, Any]) -> Batches:
    loader.load_state_dict(state)
    return taken(loader, REST)


def alike(one: Any, other: Any) -> bool:
    """True if two values of batches are equal to the bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize("name", list(rows(Path(), Path())))
def test_an_option_changed_at_a_resume_does_what_its_row_says(name: str, data: Path, tmp_path: Path) -> None:
    row = rows(data, tmp_path)[name]
    with make(data, tmp_path, row.base) as loader:
        taken(loader, STEPS)
        state = json.loads(json.dumps(loader.state_dict()))
    with make(data, tmp_path, row.base) as loader:
        plain = resumed(loader, state)
    assert plain
    with make(data, tmp_path, {**row.base, **row.changed}) as loader:
        if row.outcome == "refused":
            with pytest.raises(row.error, match=row.says):
                resumed(loader, state)
            return
        batches = resumed(loader, state)
    if row.outcome == "same":
        assert len(batches) == len(plain)
        assert all(alike(one, other) for one, other in zip(batches, plain, strict=True))
    else:
        assert row.shows(batches, plain)
