"""What a state says of how its rows were made, and a resume with another transform, tokenizer or library."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
import torch

import streamload
from streamload.errors import OptionError, StateMismatch
from streamload.loader.fingerprint import rows_fingerprint
from streamload.loader.state import FINGERPRINT, sealed
from streamload.testing.shards import ShardOptions, write_shards
from tests.support import flat


class Resized:
    """A transform of one's own, which holds what it goes by."""

    def __init__(self, size: int, **held: Any) -> None:
        self.size, self.rng, self.held = size, np.random.default_rng(), held

    def __call__(self, image: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(image.resize((self.size, self.size)))).permute(2, 0, 1)


class Locked(Resized):
    """One that nothing identifies."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.lock = threading.Lock()


class Counting(Resized):
    """One that changes what it holds as it is used."""

    def __call__(self, image: Any) -> torch.Tensor:
        self.held[str(len(self.held))] = image.size
        return super().__call__(image)


def processor(size: int, mean: float = 0.5, **options: Any) -> Any:
    import transformers

    kind = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor
    sides = {"size": {"shortest_edge": size}, "crop_size": {"height": size, "width": size}}
    return kind(**sides, image_mean=[mean] * 3, image_std=[0.5] * 3, **options)


def ids(captions: list[str]) -> list[list[int]]:
    return [[ord(letter) for letter in f"{caption:12.12}"] for caption in captions]


def other_ids(captions: list[str]) -> list[list[int]]:
    return [[1 + ord(letter) for letter in f"{caption:12.12}"] for caption in captions]


def drawn_ids(captions: list[str]) -> list[list[int]]:
    """Of a generator that nobody seeds."""
    return [[random.SystemRandom().randrange(1 << 30)] for _ in captions]


def names(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"]}


def names_and_size(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"], "size": len(sample["jpg"])}


PLAIN: dict[str, Any] = {"preprocess": Resized(8), "tokenizer": ids}
MAPPED: dict[str, Any] = {"map_sample": names}
COLLATED: dict[str, Any] = {**MAPPED, "collate": lambda examples: {"count": len(examples)}}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("data")
    return [str(path) for path in write_shards(folder, [24, 24], seed=1, options=ShardOptions((16, 16)))]


def make(paths: list[str], cache: Path, **options: Any) -> streamload.Loader:
    layout: dict[str, Any] = {"num_workers": 0, "batch_size": 4, "shuffle": 0, "with_keys": True}
    return flat.make_loader(paths, output="dict", cache_dir=cache, cache_size="1GB", **{**layout, **options})


def fingerprint(**options: Any) -> dict[str, str]:
    return rows_fingerprint(flat.make_loader("a.tar", **options).options)


@pytest.fixture
def resume(
    paths: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> Callable[[dict[str, Any], dict[str, Any]], list[str]]:
    """Resume a run under other options; what is logged of its rows."""

    def resumed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
        with make(paths, tmp_path, **before) as loader:
            next(iter(loader))
            state = json.loads(json.dumps(loader.state_dict()))
        caplog.clear()
        with caplog.at_level(logging.WARNING, "streamload"), make(paths, tmp_path, **after) as loader:
            loader.load_state_dict(state)
            assert len(list(loader)) == 11
        return [line for line in caplog.messages if "are made otherwise" in line]

    return resumed


SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the default": ({}, {}),
    "an equal object": (PLAIN, {"preprocess": Resized(8), "tokenizer": ids}),
    "more workers": (PLAIN, {**PLAIN, "num_workers": 2}),
    "dicts in another order": (
        {"preprocess": Resized(8, a=1, b={"x": 1, "y": [2]})},
        {"preprocess": Resized(8, b={"y": [2], "x": 1}, a=1)},
    ),
    "an equal lambda": (
        *({"preprocess": (lambda image: Resized(8)(image))} for _ in range(2)),
    ),
    "what nothing identifies": ({"preprocess": Locked(8)}, {"preprocess": Locked(4)}),
    "what nothing identifies, before": ({"preprocess": Locked(8)}, {"preprocess": Resized(8)}),
    "ids that are drawn": ({"tokenizer": drawn_ids}, {"tokenizer": ids}),
    "mapped": (MAPPED, MAPPED),
}  # fmt: skip
OTHER: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a size": (PLAIN, {**PLAIN, "preprocess": Resized(6)}, "preprocess (by Python"),
    "what is held": (PLAIN, {**PLAIN, "preprocess": Resized(8, a=2)}, "preprocess (by Python"),
    "code": (
        {"preprocess": (lambda image: Resized(8)(image))},
        {"preprocess": (lambda image: Resized(8)(image) + 1)},
        "preprocess (by Python",
    ),
    "a function for a plan": ({}, {"preprocess": Resized(8)}, "preprocess was compiled and is a function"),
    "a tokenizer": (PLAIN, {**PLAIN, "tokenizer": other_ids}, "tokenizer was "),
    "map_sample": (MAPPED, {"map_sample": names_and_size}, "map_sample (by Python"),
    "collate where there was none": (MAPPED, COLLATED, "collate was none and is a function"),
    "no collate where there was one": (COLLATED, MAPPED, "collate was a function and is none"),
    "prepared images": ({}, {"prepare": "raw-16"}, "prepare was none and is raw-16"),
}


@pytest.mark.parametrize("name", SAME)
def test_rows_that_are_made_as_before_are_not_spoken_of(name: str, resume: Any) -> None:
    before, after = SAME[name]
    assert resume(before, after) == []
    assert resume(before, {**after, "strict": True}) == []


def test_a_function_counts_as_it_was_before_it_made_rows(resume: Any) -> None:
    for after in ({}, {"strict": True}):
        assert resume({"preprocess": Counting(8)}, {"preprocess": Counting(8), **after}) == []


@pytest.mark.parametrize("name", OTHER)
def test_rows_that_are_made_otherwise_are_one_line_or_where_that_is_asked_an_error(
    name: str, resume: Any
) -> None:
    before, after, says = OTHER[name]
    (line,) = resume(before, after)
    assert says in line
    with pytest.raises(StateMismatch, match=r"made otherwise.*Order\(strict=True\)") as refused:
        resume(before, {**after, "strict": True})
    assert says in str(refused.value)


def test_a_state_that_is_refused_leaves_the_loader_where_it_was(paths: list[str], tmp_path: Path) -> None:
    with make(paths, tmp_path, **PLAIN) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with make(paths, tmp_path, preprocess=Resized(6), tokenizer=ids, strict=True) as loader:
        next(iter(loader))
        before = loader.state_dict()
        with pytest.raises(StateMismatch):
            loader.load_state_dict(state)
        assert loader.state_dict() == before


def test_a_compiled_transform_is_known_by_what_it_does() -> None:
    before = fingerprint(preprocess=processor(16))
    assert before["preprocess"] == "compiled"
    assert fingerprint(preprocess=processor(16)) == before
    assert fingerprint(preprocess=processor(16), compile=False) == before
    for other, name in ((processor(20), "size"), (processor(16, 0.4), "statistics")):
        after = fingerprint(preprocess=other)
        assert after.pop(f"preprocess.{name}") != before[f"preprocess.{name}"]
        if name == "statistics":
            assert after.items() <= before.items()
    assert fingerprint(train=False)["preprocess.fit"] != fingerprint()["preprocess.fit"]


def test_ranks_of_another_layout_resume_without_a_word(
    paths: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def rank(number: int, of: int) -> streamload.Loader:
        return make(paths, tmp_path, rank=number, world_size=of, batch_size=12 // of, groups=1, **PLAIN)

    states = []
    for number in range(2):
        with rank(number, 2) as loader:
            next(iter(loader))
            states.append(loader.state_dict())
    assert states[0][FINGERPRINT] == states[1][FINGERPRINT]
    for number in range(3):
        with rank(number, 3) as loader:
            loader.load_state_dict(states)
            next(iter(loader))
    assert "made otherwise" not in caplog.text


def test_a_state_of_ranks_that_differ_has_what_made_the_rows_of_one(paths: list[str], tmp_path: Path) -> None:
    with make(paths, tmp_path, **PLAIN) as loader:
        state = loader.state_dict()
        other = sealed({**state, FINGERPRINT: {**state[FINGERPRINT], "torch": "1.0"}})
        loader.load_state_dict([state, other])
        assert streamload.gather_state(loader) == state


SCRIPT = """
import json, sys
from streamload.loader.fingerprint import rows_fingerprint
from tests.loader.test_fingerprint import Resized, ids, names, processor
from tests.support import flat
for options in (
    {"preprocess": Resized(8, marks={"b", "a", "c"}), "tokenizer": ids},
    {"preprocess": Resized(8, sizes={frozenset(pair): 1 for pair in ("ab", "ac", "bc", "cd", "ad")})},
    {"preprocess": lambda image: Resized(8)(image)},
    {"preprocess": processor(16)},
    {"map_sample": names},
):
    print(json.dumps(rows_fingerprint(flat.make_loader("a.tar", **options).options)))
"""


def test_each_process_finds_the_same() -> None:
    outputs = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert "unknown" not in outputs[0]
    first = json.loads(outputs[0].splitlines()[0])
    assert first == fingerprint(preprocess=Resized(8, marks={"b", "a", "c"}), tokenizer=ids)


def test_another_version_of_a_library_is_named(resume: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    version = PIL.__version__
    assert resume(PLAIN, PLAIN) == []
    before = fingerprint(**PLAIN)
    assert before["numpy"] == np.__version__
    monkeypatch.setattr("PIL.__version__", "0.1+cpu")
    assert fingerprint(**PLAIN)["PIL"] == "0.1"
    assert {**fingerprint(**PLAIN), "PIL": version} == before
    assert "PIL" not in fingerprint(**MAPPED)


@pytest.mark.parametrize(
    "held",
    [["x"] * 30_000, torch.empty((1 << 28) + 1, dtype=torch.uint8), torch.nn.Linear(2, 2)],
    ids=["many", "large", "weights"],
)
def test_a_function_that_holds_much_or_what_is_trained_is_not_described(held: Any) -> None:
    assert fingerprint(preprocess=Resized(8, held=held))["preprocess"] == "unknown"


def test_a_loader_whose_transform_is_compiled_describes_no_code() -> None:
    script = (
        "import sys, streamload; loader = streamload.make_loader('a.tar'); loader.state_dict();"
        "print(*(name for name in sys.modules if 'derived' in name or 'described_code' in name))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize("damaged", [None, 7, "x", [], ["preprocess"]])
def test_a_damaged_fingerprint_fails(damaged: Any, paths: list[str], tmp_path: Path) -> None:
    with make(paths, tmp_path, **PLAIN) as loader:
        state = loader.state_dict()
        with pytest.raises(StateMismatch, match="not a valid state"):
            loader.load_state_dict(sealed({**state, FINGERPRINT: damaged}))


def test_strict_is_true_or_false() -> None:
    with pytest.raises(OptionError, match="strict='yes'; expected True or False"):
        streamload.Order(strict="yes")  # type: ignore[arg-type]
