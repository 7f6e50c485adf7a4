"""Facts in a shared cache: made by one node, checked by the others, and never those of anything else."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from streamload.cache.companion import FactsCarrier
from streamload.cache.shard_view import ShardView
from streamload.cache.tier import Tier
from streamload.daemon.warm import WarmReport, warm
from streamload.facts.recipes import read_facts
from streamload.facts.shard_facts import ShardFacts
from streamload.shards.columns import Column
from streamload.shards.samples import Entry
from streamload.testing.shards import read_oracle, write_shards
from tests.support import flat
from tests.support.sharing import Origin, Place
from tests.support.tiers import flip, until

COUNTS = (30, 25, 40)


class Words:
    """A tokenizer that counts the captions of which it is asked the tokens."""

    def __init__(self, most: int = 8):
        self.most, self.asked = most, 0

    def __call__(self, captions: list[str]) -> dict[str, list[list[int]]]:
        self.asked += len(captions)
        rows = [[1 + len(word) for word in caption.split()][: self.most] for caption in captions]
        return {
            "input_ids": [row + [0] * (self.most - len(row)) for row in rows],
            "attention_mask": [[1] * len(row) + [0] * (self.most - len(row)) for row in rows],
        }

    def __getstate__(self) -> dict[str, Any]:
        return {"most": self.most}


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Origin]:
    made = Origin(tmp_path / "data", COUNTS)
    yield made
    made.close()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "shared"), {})


def tokens(words: Words) -> Column:
    found = read_facts({"it": "tokens"}, "jpg", "txt", words)["it"]
    words.asked = 0
    return found


def expected(path: Path, most: int = 8) -> list[float]:
    return [float(min(most, len(members["txt"].split()))) for _, members in read_oracle(path)]


def assert_true(origin: Origin, root: Path, column: Column, most: int = 8) -> None:
    """A tier has the right values, beside its indexes."""
    for number, path in enumerate(origin.paths):
        with closing(ShardView(Tier(root), origin.shard(number))) as view:
            facts = ShardFacts(FactsCarrier())
            assert facts.extend(view, [column], view.count)
            np.testing.assert_array_equal(facts.values(column), expected(path, most))


def objects(place: Place) -> list[Path]:
    return sorted(Path(place.url).glob("shards/*/facts.*"))


@pytest.fixture
def stored(origin: Origin, place: Place, tmp_path: Path) -> Words:
    """A shared cache has all shards and their token counts."""
    words = Words()
    report = origin.warm(tmp_path / "first", place, write_back=True, facts=[tokens(words)])
    assert (report.shards_with_facts, report.shared_stored, report.shared_failures) == (3, 3, {})
    assert words.asked == sum(COUNTS)
    assert len(objects(place)) == len(COUNTS)
    return words


def test_a_second_node_makes_none(stored: Words, origin: Origin, place: Place, tmp_path: Path):
    sent, words = origin.sent, Words()
    column = tokens(words)
    assert origin.warm(tmp_path / "second", place, facts=[column]).shards_with_facts == 3
    assert_true(origin, tmp_path / "second", column)
    assert (words.asked, origin.sent) == (0, sent)


def test_counts_of_another_tokenizer_are_made(stored: Words, origin: Origin, place: Place, tmp_path: Path):
    words = Words(most=3)
    column = tokens(words)
    for name in objects(place):  # not even under its name
        shutil.copy(name, name.parent / f"facts.{column.digest}")
    origin.warm(tmp_path / "second", place, facts=[column])
    assert words.asked == sum(COUNTS)
    assert_true(origin, tmp_path / "second", column, most=3)


@pytest.mark.parametrize("at", [0, 41, 60, 700, -1])
def test_what_is_damaged_is_made_again_and_replaced(
    stored: Words, origin: Origin, place: Place, tmp_path: Path, at: int
):
    before = [path.read_bytes() for path in objects(place)]
    for path, content in zip(objects(place), before, strict=True):
        flip(path, at % len(content))
    words = Words()
    column = tokens(words)
    origin.warm(tmp_path / "second", place, facts=[column], write_back=True)
    assert_true(origin, tmp_path / "second", column)
    assert 0 < words.asked <= sum(COUNTS)
    assert [path.read_bytes() for path in objects(place)] == before


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_what_is_cut_is_completed(stored: Words, origin: Origin, place: Place, tmp_path: Path, share: float):
    for path in objects(place):
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    words = Words()
    column = tokens(words)
    origin.warm(tmp_path / "second", place, facts=[column])
    assert_true(origin, tmp_path / "second", column)
    assert 0 < words.asked <= sum(COUNTS)


def test_those_of_another_version_of_a_shard_are_made_again(
    stored: Words, origin: Origin, place: Place, tmp_path: Path
):
    write_shards(tmp_path / "data", COUNTS, seed=62)  # other bytes under the same names
    for path in objects(place):
        (path.parent / "index").unlink()
    words = Words()
    column = tokens(words)
    origin.warm(tmp_path / "second", place, facts=[column], write_back=True)
    assert_true(origin, tmp_path / "second", column)
    assert words.asked == sum(COUNTS)
    third = Words()
    origin.warm(tmp_path / "third", place, facts=[tokens(third)])
    assert_true(origin, tmp_path / "third", column)
    assert third.asked == 0


def test_a_failing_shared_cache_costs_only_the_work(
    stored: Words, origin: Origin, place: Place, tmp_path: Path
):
    for path in objects(place):
        path.unlink()
        path.mkdir()
    words = Words()
    column = tokens(words)
    report = origin.warm(tmp_path / "second", place, facts=[column], write_back=True)
    assert_true(origin, tmp_path / "second", column)
    assert (report.shards_complete, report.shards_with_facts, words.asked) == (3, 3, sum(COUNTS))
    assert len(report.shared_failures) == 3


def test_a_warm_up_stores_those_that_the_node_had(
    stored: Words, origin: Origin, place: Place, tmp_path: Path
):
    for path in objects(place):
        path.unlink()
    words = Words()
    column = tokens(words)
    origin.warm(tmp_path / "first", place, facts=[column])
    assert objects(place) == []
    origin.warm(tmp_path / "first", place, facts=[column], write_back=True)
    assert (len(objects(place)), words.asked) == (3, 0)


def test_several_facts_of_one_function_are_one_object(origin: Origin, place: Place, tmp_path: Path):
    called: list[str] = []

    def several(sample: dict[str, Any]) -> tuple[int, int]:
        called.append(sample["__key__"])
        ((width, _),) = sample["__images__"].values()
        return len(sample["txt"].split()), width

    found = read_facts({("words", "width of the image"): (several, "1")}, "jpg", "txt", None)
    facts = [found["words"], found["width of the image"]]
    report = origin.warm(tmp_path / "first", place, write_back=True, facts=facts)
    assert (report.shards_with_facts, report.shared_failures) == (3, {})
    assert len(called) == sum(COUNTS)
    assert len(objects(place)) == len(COUNTS)
    assert origin.warm(tmp_path / "second", place, facts=facts[::-1]).shards_with_facts == 3
    assert_true(origin, tmp_path / "second", facts[0], most=99)
    for number, path in enumerate(origin.paths):
        with closing(ShardView(Tier(tmp_path / "second"), origin.shard(number))) as view:
            values = ShardFacts(FactsCarrier())
            assert values.extend(view, facts, view.count)
            sizes = [Image.open(io.BytesIO(members["jpg"])).size for _, members in read_oracle(path)]
            np.testing.assert_array_equal(values.values(facts[1]), [width for width, _ in sizes])
    assert len(called) == sum(COUNTS)


def test_what_needs_no_members_and_local_shards_are_not_stored(origin: Origin, place: Place, tmp_path: Path):
    (tmp_path / "t.csv").write_text("key,p\n00001000003,0.5\n")
    cheap = read_facts({"p": str(tmp_path / "t.csv")}, "jpg", "txt", None)
    origin.warm(tmp_path / "first", place, write_back=True, facts=list(cheap.values()))
    report: WarmReport = warm(
        [str(path) for path in origin.paths],
        cache_dir=tmp_path / "own",
        shared_cache=place.url,
        write_back=True,
        facts=[tokens(Words())],
    )
    assert report.shards_with_facts == 3
    assert objects(place) == []


def is_long(entry: Entry) -> bool:
    return entry.facts["letters"] > 20


@pytest.mark.parametrize("workers", [0, 2])
def test_a_training_on_a_second_node_makes_none_as_shards_arrive(
    origin: Origin, place: Place, tmp_path: Path, workers: int
):
    log = tmp_path / "made"

    def letters(sample: dict[str, Any]) -> float:
        with log.open("a") as file:
            file.write(f"{sample['__key__']}\n")
        return float(len(sample["txt"]))

    def run(node: str, wait: Callable[[], object] = lambda: True, **more: Any) -> list[str]:
        facts = {"letters": (letters, "1")}
        options: dict[str, Any] = {"shared_cache": place.url, "cache_dir": tmp_path / node, **more}
        with flat.make_loader(
            origin.urls, batch_size=5, num_workers=workers, with_keys=True, text_key=None,
            facts=facts, keep=is_long, cache_size="1GB", **options,
        ) as loader:  # fmt: skip
            keys = [key for *_, origins in loader for key in origins["__key__"]]
            until(wait)
        return keys

    def is_stored() -> bool:
        return len(objects(place)) == len(list(Path(place.url).glob("shards/*/index"))) == len(COUNTS)

    first = run("first", is_stored, write_back=True)
    assert sorted(log.read_text().split()) == sorted(
        key for path in origin.paths for key, _ in read_oracle(path)
    )
    log.unlink()
    sent = origin.sent
    assert run("second") == first
    assert not log.exists()
    assert origin.sent == sent
