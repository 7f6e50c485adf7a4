"""Several captions of a sample: what is used and drawn, on any layout, in each pass and after a resume."""

from __future__ import annotations

import io
import itertools
import json
import random
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import streamload
from tests.support import flat

COUNTS = [10, 5, 9]
WORDS = ["a cat", "two dogs in the sun", "", " \n", "x", "a long caption of very many words indeed", "été"]
PATHS = ["caption", "alt", "meta.caption", "meta.en.text", "list[0]", "list[1]", "list[*]", "meta.list[*]",
         "list", "objects[*].text", "objects[0].text", "a.b", "meta.a.b"]  # fmt: skip


def png(number: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (1 + number % 3, 1), (number % 256, 0, 0)).save(content, "PNG")
    return content.getvalue()


def random_text(draw: random.Random) -> Any:
    return draw.choice([*WORDS, *WORDS, None, 7, "\ud83d", ["in a list"], {}])


def random_meta(draw: random.Random) -> Any:
    """An object of about half of all fields, of any kinds."""
    if draw.random() < 0.08:
        return draw.choice([[], "text", None, ["a", "b"]])

    def texts() -> list[Any]:
        return [random_text(draw) for _ in range(draw.randrange(4))]

    objects = [{"text": text} for text in texts()] + draw.choice([[], [3]])
    meta = {
        "caption": random_text(draw), "alt": random_text(draw), "list": texts(), "a.b": random_text(draw),
        "a": {"b": random_text(draw)}, "objects": objects,
        "meta": {"caption": random_text(draw), "list": texts(), "en": {"text": random_text(draw)},
                 "a": {"b": random_text(draw)}, "a.b": random_text(draw)},
    }  # fmt: skip
    return {name: field for name, field in meta.items() if draw.random() < 0.6}


def random_members(draw: random.Random, number: int) -> dict[str, bytes]:
    members = {"png": png(number)}
    if draw.random() < 0.8:
        members["json"] = b"{cut" if draw.random() < 0.05 else json.dumps(random_meta(draw)).encode()
    if draw.random() < 0.6 or "json" not in members:
        members["txt"] = b"\xff" if draw.random() < 0.1 else draw.choice(WORDS).encode()
    return members


def write(folder: Path, samples: list[list[dict[str, bytes]]]) -> str:
    folder.mkdir(exist_ok=True)
    for place, shard in enumerate(samples):
        with tarfile.open(folder / f"{place}.tar", "w") as tar:
            for number, members in enumerate(shard):
                for extension, payload in members.items():
                    info = tarfile.TarInfo(f"{place}-{number:02d}.{extension}")
                    info.size = len(payload)
                    tar.addfile(info, io.BytesIO(payload))
    return str(folder / f"{{0..{len(samples) - 1}}}.tar")


# The oracle.


def walk(node: Any, steps: list[str]) -> list[Any]:
    if not steps:
        return [node]
    if isinstance(node, list):
        if steps[0] == "[*]":
            return [leaf for entry in node for leaf in walk(entry, steps[1:])]
        is_entry = re.fullmatch(r"\[\d+\]", steps[0]) is not None
        place = int(steps[0][1:-1]) if is_entry else len(node)
        return walk(node[place], steps[1:]) if place < len(node) else []
    if isinstance(node, dict):
        for count in range(len(steps), 0, -1):
            name = ".".join(steps[:count]).replace(".[", "[")
            if name in node:
                return walk(node[name], steps[count:])
    return []


def is_text(leaf: Any) -> bool:
    return isinstance(leaf, str) and not any(0xD800 <= ord(letter) < 0xE000 for letter in leaf)


def texts_of(members: dict[str, bytes], choice: str) -> list[str] | None:
    """The captions that a choice may give; those that aren't blank, if any; None: it gives none."""
    extension, _, path = choice.partition(":")
    if extension not in members:
        return None
    try:
        if not path:
            return [members[extension].decode()]
        meta = json.loads(members[extension])
    except ValueError:
        return None
    if not isinstance(meta, dict):
        return None
    leaves = walk(meta, re.findall(r"\[(?:\d+|\*)\]|[^.\[]+", path))
    if "[*]" in path:
        texts = [leaf for leaf in leaves if is_text(leaf)]
        return [text for text in texts if text.strip()] or texts or None
    return leaves if leaves and is_text(leaves[0]) else None


def allowed(members: dict[str, bytes], text_key: str, probs: list[float] | None) -> set[str]:
    """The captions that a sample may have; none: it has none that can be read."""
    choices = text_key.split(";")
    weights = [*(probs or []), *[0.0] * (len(choices) - len(probs or []))]
    first = [choice for choice, weight in zip(choices, weights, strict=True) if weight > 0]
    captions: list[set[str]] = []
    for order in itertools.permutations(first):
        gone = [*order, *(choice for choice in choices if choice not in order)]
        given = [texts for choice in gone if (texts := texts_of(members, choice)) is not None]
        full = [texts for texts in given if texts[0].strip()]
        captions += [set((full or given)[0])] if given else []
    return set().union(*captions)


# Runs.


def make(urls: str, cache: Path, **options: Any) -> streamload.Loader:
    defaults = {"batch_size": 4, "num_workers": 0, "seed": 3, "cache_size": "1GB", "max_bad_samples": None}
    defaults |= {
        "with_keys": True,
        "output": "dict",
        "preprocess": width,
        "compile": False,
        "cache_dir": cache,
    }
    return flat.make_loader(urls, **{**defaults, **options})


def width(image: Any) -> torch.Tensor:
    return torch.tensor([float(image.width)])


def steps(loaders: list[streamload.Loader], most: int | None = None) -> Iterator[list[tuple[str, str]]]:
    """(key, caption) of the rows of each step over all ranks, sorted."""
    for batches in itertools.islice(zip(*loaders, strict=True), most):
        yield sorted(
            row for batch in batches for row in zip(batch["__key__"], batch["text"], strict=True)
        )  # fmt: skip


def random_key(draw: random.Random) -> tuple[str, list[float] | None]:
    choices = draw.sample([f"json:{path}" for path in PATHS] + ["txt"], draw.randrange(1, 5))
    count = draw.randrange(1, len(choices) + 1)
    probs = [draw.choice([0.0, 0.5, 1.0, 2.0]) for _ in range(count)] if draw.random() < 0.5 else None
    return ";".join(choices), probs


def check_random_run(seed: int, folder: Path) -> None:
    draw = random.Random(seed)
    samples = [[random_members(draw, number) for number in range(count)] for count in COUNTS]
    for shard in samples:  # each has one that is good whatever the key is
        shard[1] = {"png": png(0), "json": json.dumps(
            {"caption": "c", "alt": "a", "list": ["l", "m"], "a.b": "ab", "objects": [{"text": "o"}],
             "meta": {"caption": "mc", "list": ["ml", "mm"], "en": {"text": "met"}, "a.b": "mab"}}
        ).encode(), "txt": b"t"}  # fmt: skip
    urls = write(folder / "data", samples)
    (text_key, probs), blank = random_key(draw), draw.random() < 0.5
    if text_key == "json:list":
        text_key = "json:list;txt"
    options: dict[str, Any] = {"text_key": text_key, "text_key_probs": probs, "blank_captions": blank}
    by_key = {
        f"{place}-{number:02d}": members
        for place, shard in enumerate(samples)
        for number, members in enumerate(shard)
    }
    has_member = {
        key: any(choice.partition(":")[0] in members for choice in text_key.split(";"))
        for key, members in by_key.items()
    }
    readable = {key: allowed(members, text_key, probs) for key, members in by_key.items() if has_member[key]}
    used = {key: {text for text in texts if blank or text.strip()} for key, texts in readable.items()}
    # Evaluation: exactly the samples that have a caption, each other one counted by its cause.
    with make(urls, folder / "c", train=False, **options) as loader:
        rows = [row for step in steps([loader]) for row in step]
        skipped = {(entry.key, entry.cause) for entry in loader.skipped}
        missing = loader.stats().samples_skipped["missing"]
    assert sorted(key for key, _ in rows) == sorted(key for key, texts in used.items() if texts)
    assert all(text in used[key] for key, text in rows), (text_key, probs)
    assert skipped == {(key, "caption") for key, texts in readable.items() if not texts}
    assert missing == sum(not used[key] if readable.get(key) else not has_member[key] for key in by_key)
    # Training: the same on each layout, and after a resume on another one.
    workers = draw.choice([0, 0, 0, 0, 1, 2])
    with make(urls, folder / "c", **options) as loader:
        passes = [[*steps([loader])] for _ in range(2)]
        assert all(text in used[key] for each in passes for step in each for key, text in step)
    ranks = [
        make(
            urls,
            folder / "c",
            batch_size=2,
            num_workers=workers,
            rank=rank,
            world_size=2,
            groups=1,
            **options,
        )
        for rank in range(2)
    ]
    assert [*steps(ranks)] == passes[0]
    for rank in ranks:
        rank.close()
    cut = draw.randrange(1, len(passes[0]))
    with make(urls, folder / "c", **options) as loader:
        [*steps([loader], cut)]
        state = loader.state_dict()
    with make(urls, folder / "c2", num_workers=workers, **options) as loader:
        loader.load_state_dict(state)
        assert [*steps([loader])] == passes[0][cut:]


@pytest.mark.parametrize(
    "part", [*range(2), *(pytest.param(part, marks=pytest.mark.deep) for part in range(2, 24))]
)
def test_random_forms_on_random_layouts(part: int, tmp_path: Path) -> None:
    for seed in range(16 * part, 16 * part + 16):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            check_random_run(seed, folder)
        except Exception as exc:
            exc.add_note(f"seed {seed}")
            raise


def test_each_pass_draws_anew_and_evaluation_is_the_same_on_any_workers(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(4)]
    members = {"png": png(0), "json": json.dumps({"captions": texts}).encode()}
    urls = write(tmp_path / "data", [[members] * 40, [members] * 24])
    for options in ({"text_key": "json:captions[*]"}, {"text_key": "json:captions[0];json:captions[1]"}):
        probs = None if "*" in options["text_key"] else [1, 1]
        with make(urls, tmp_path / "c", text_key_probs=probs, **options) as loader:
            passes = [dict(row for step in steps([loader]) for row in step) for _ in range(3)]
        assert len(passes[0]) == 64
        for one, other in itertools.pairwise(passes):
            same = sum(one[key] == other[key] for key in one)
            assert 5 < same < 50
        read = []
        for workers in (0, 2):
            with make(
                urls, tmp_path / "c", train=False, num_workers=workers, text_key_probs=probs, **options
            ) as loader:
                read.append([*steps([loader])])
        assert read[0] == read[1]
        assert len({text for step in read[0] for _, text in step}) > 1


@pytest.mark.parametrize(
    ("text_key", "probs"),
    [("txt", ()), ("txt", (1, 2)), (None, (1,)), ("txt;x", (-1,)), ("txt;x", (float("inf"), 1)),
     ("txt;x", 0.5), ("txt;x", (True,)), ("txt;x", "11"), ("txt;x", ("a",))],
)  # fmt: skip
def test_probabilities_that_say_nothing_are_refused(text_key: str | None, probs: Any) -> None:
    with pytest.raises(streamload.StreamloadError, match=r"text_key_probs=.*expected a number from 0 on"):
        streamload.Shards(text_key=text_key, text_key_probs=probs)


def test_a_resume_with_other_probabilities_is_refused(tmp_path: Path) -> None:
    members = {"png": png(0), "txt": b"a", "cap": b"b"}
    urls = write(tmp_path / "data", [[members] * 20])
    options: dict[str, Any] = {"text_key": "txt;cap"}
    with make(urls, tmp_path / "c", text_key_probs=[1, 2], **options) as loader:
        [*steps([loader], 2)]
        state = loader.state_dict()
    for probs in ([2, 1], None):
        with (
            make(urls, tmp_path / "c", text_key_probs=probs, **options) as loader,
            pytest.raises(streamload.StreamloadError, match="text_key"),
        ):
            loader.load_state_dict(state)


# Lengths that are known before a caption is read, and rows of modules.


def tokenize(texts: list[str]) -> dict[str, torch.Tensor]:
    ids = torch.zeros(len(texts), 40, dtype=torch.long)
    for row, text in zip(ids, texts, strict=True):
        row[: length_of(text)] = torch.tensor([1 + byte for byte in text.encode()[:40]] or [1])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def length_of(text: str) -> int:
    return min(40, max(1, len(text.encode())))


def of_many_lengths(folder: Path, count: int) -> tuple[str, dict[str, str]]:
    """Shards whose samples have a caption at one of three places or more; and the first, by key."""
    draw, first = random.Random(count), {}
    shards: list[list[dict[str, bytes]]] = [[], []]
    for number in range(count):
        texts = [f"{number}" + draw.choice("abc") * draw.randrange(38) for _ in range(3)]
        place = draw.randrange(3)
        shown = ["" if other < place else text for other, text in enumerate(texts)]
        meta = {"captions": [shown[0], "spare" * draw.randrange(4)], "meta": {"alt": shown[1]}}
        shards[number % 2].append(
            {"png": png(number), "json": json.dumps(meta).encode(), "txt": shown[2].encode()}
        )
        first[f"{number % 2}-{len(shards[number % 2]) - 1:02d}"] = texts[place]
    return write(folder, shards), first


FIXED = "json:captions[0];json:meta.alt;txt"
DRAWN = [("json:captions[*];txt", None), (FIXED, (1, 0.5))]


@pytest.mark.parametrize(("text_key", "probs"), [(FIXED, None), (f"json:none;{FIXED}", [0, 3])])
def test_steps_are_planned_by_the_length_of_the_caption_that_is_used(
    text_key: str, probs: Any, tmp_path: Path
) -> None:
    urls, first = of_many_lengths(tmp_path / "data", 96)
    options: dict[str, Any] = {"text_padding": "longest", "text_pad_multiple": 1}
    options |= {"text_key": text_key, "text_key_probs": probs}
    ranks = [
        make(
            urls,
            tmp_path / "c",
            tokenizer=tokenize,
            bucketing=32,
            rank=rank,
            world_size=2,
            groups=1,
            **options,
        )
        for rank in range(2)
    ]
    for step, batches in enumerate(zip(*ranks, strict=True)):
        longest = max(length_of(first[key]) for batch in batches for key in batch["__key__"])
        assert [batch["text"].shape[1] for batch in batches] == [longest if step else 40] * 2
    for rank in ranks:
        rank.close()


def test_the_fact_of_tokens_is_of_the_caption_that_is_used(tmp_path: Path) -> None:
    urls, first = of_many_lengths(tmp_path / "data", 40)

    def is_long(entry: Any) -> bool:
        assert entry.facts["tokens"] == length_of(first[entry.key])
        return bool(entry.facts["tokens"] > 20)

    options = {"tokenizer": tokenize, "facts": {"tokens": "tokens"}, "keep": is_long, "text_key": FIXED}
    with make(urls, tmp_path / "c", train=False, **options) as loader:
        kept = [key for batch in loader for key in batch["__key__"]]
    assert sorted(kept) == sorted(key for key, text in first.items() if length_of(text) > 20)


@pytest.mark.parametrize(("text_key", "probs"), DRAWN)
@pytest.mark.parametrize(
    "options",
    [
        {"facts": {"tokens": "tokens"}},
        {"bucketing": "step", "text_padding": "longest"},
        {"sample_weight": streamload.complexity(text=1)},
        {"features": {"f": streamload.Features(torch.nn.Identity(), inputs="sample")}},
    ],
)
def test_what_has_one_number_or_row_of_a_sample_refuses_captions_that_are_drawn(
    text_key: str, probs: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    urls = write(tmp_path, [[{"png": png(0), "txt": b"a"}]])
    options = {"tokenizer": tokenize, "text_key": text_key, "text_key_probs": probs, **options}
    with pytest.raises(streamload.StreamloadError, match=r"draws a caption for each pass.*without|leave out"):
        make(urls, tmp_path / "c", **options)


class Sums(torch.nn.Module):
    """Sums of ids, which tell texts apart; of a whole sample with its image's width."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(1.0, 41.0))

    def forward(self, inputs: Any) -> torch.Tensor:
        if isinstance(inputs, torch.Tensor):
            return (inputs * self.weight).sum(1)
        return (inputs["text"] * self.weight).sum(1) + inputs["image"].flatten()


def test_rows_of_texts_are_of_the_caption_that_is_drawn(tmp_path: Path) -> None:
    urls, _ = of_many_lengths(tmp_path / "data", 64)
    computed, texts = [], []
    for _ in range(2):
        feature = streamload.Features(Sums().eval(), inputs="text", check=False)
        options = {
            "tokenizer": tokenize,
            "features": {"f": feature},
            "text_key": "json:captions[*];txt;json:meta.alt",
        }
        with make(urls, tmp_path / "c", num_workers=1, **options) as loader:
            for epoch in range(3):
                loader.set_epoch(epoch)
                for batch in loader:
                    torch.testing.assert_close(feature(batch), feature.module.module(batch["text"]))
                    texts += [tuple(row) for row in batch["text"].tolist()]
            computed.append(loader.stats().feature_rows_computed)
    assert len(set(texts)) > 25
    assert computed[0] >= len(set(texts))
    assert computed[1] < computed[0]


def test_rows_of_samples_are_of_the_caption_that_the_text_key_chooses(tmp_path: Path) -> None:
    urls, _ = of_many_lengths(tmp_path / "data", 64)
    keys = [(FIXED, None), ("txt;json:meta.alt;json:captions[0]", None), (FIXED, [0, 1]), (FIXED, None)]
    for place, (text_key, probs) in enumerate(keys):
        feature = streamload.Features(Sums().eval(), inputs="sample", images=True, check=False)
        options = {
            "tokenizer": tokenize,
            "features": {"f": feature},
            "text_key": text_key,
            "text_key_probs": probs,
        }
        with make(urls, tmp_path / "c", train=False, **options) as loader:
            for batch in loader:
                torch.testing.assert_close(feature(batch), feature.module.module(batch))
            assert loader.stats().feature_rows_read == (64 if place == 3 else 0)
