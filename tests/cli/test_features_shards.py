"""`streamload features` on derived shards of rows, in a node's cache and in a shared cache."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import streamload
from streamload.cache.inventory import meta_of
from streamload.cache.shard import Shard
from streamload.cache.shard_copy import ShardCopy
from streamload.cache.shared.leases import Leases
from streamload.cache.tier import Tier
from streamload.cli import main
from streamload.daemon.warm import warm
from streamload.derived.store.row_store import close_stores
from streamload.features.named import NamedFeatures
from streamload.loader.feature_recipe import make_recipe
from streamload.testing.shards import ShardOptions
from tests.support.sharing import Origin, Place

COUNTS = (3, 4)
SAMPLES = sum(COUNTS)
HERE = __name__


@streamload.cache_module(cache_name="tiny [x]")
class Tiny(nn.Module):
    """The mean of each colour, and the next weights."""

    def __init__(self, weight: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((2, 3)) * self.weight


def first() -> nn.Module:
    return Tiny().eval()


def second() -> nn.Module:
    """The same with other weights: its rows replace those of the first."""
    module = Tiny().eval()
    with torch.no_grad():
        module.weight.fill_(2.0)
    return module


def third() -> nn.Module:
    """The same with other arguments: its rows and the second's are in use at once."""
    return Tiny(3.0).eval()


class Made(NamedTuple):
    """The two places of derived shards, and their fingerprints: of the first, second and third module."""

    node: Path
    shared: Path
    fingerprints: list[str]

    @property
    def shared_cache(self) -> list[str]:
        return ["--shared-cache", str(self.shared)]


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    made = Made(folder / "node", folder / "shared", [])
    origin = Origin(folder / "data", COUNTS, options=ShardOptions(image_side=(16, 30)))
    with contextlib.closing(origin), pytest.MonkeyPatch.context() as patch:
        patch.setenv("STREAMLOAD_CACHE_DIR", str(made.node))
        origin.warm(made.node, Place(str(made.shared), {}), write_back=True)
        for name in ("first", "second", "third"):
            recipe = make_recipe(NamedFeatures(f"{HERE}:{name}", batch_size=4))
            report = warm(origin.urls, shared_cache=str(made.shared), write_back=True, prepare=recipe)
            assert report.failures == {}
            made.fingerprints.append(recipe.fingerprint)
        close_stores()
    return made


@pytest.fixture
def made(made_once: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Places that a test may change."""
    for kind in ("node", "shared"):
        shutil.copytree(getattr(made_once, kind), tmp_path / kind)
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "node"))
    monkeypatch.setenv("STREAMLOAD_CACHE", "disk")
    return Made(tmp_path / "node", tmp_path / "shared", made_once.fingerprints)


Run = Callable[..., Any]


@pytest.fixture
def features(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command; gives what it says as JSON, or its text."""

    def run(*arguments: object, code: int = 0, text: bool = False) -> Any:
        given = ["streamload", "features", *map(str, arguments), *([] if text else ["--json"])]
        monkeypatch.setattr(sys, "argv", given)
        monkeypatch.setenv("COLUMNS", "300")
        try:
            main()
            found = 0
        except SystemExit as exc:
            found = int(exc.code or 0)
        out, err = capsys.readouterr()
        assert found == code, err + out
        return out if text else json.loads(out)

    return run


def directories(made: Made, fingerprint: str) -> list[Path]:
    """The derived shards of a fingerprint in the node's tier."""
    found = (made.node / "shards").iterdir()
    return sorted(path for path in found if meta_of(path).get("prepared") == f"rows-{fingerprint}")


def objects(made: Made, fingerprint: str) -> list[Path]:
    """The files of its derived shards in the shared cache."""
    return sorted(
        path for path in (made.shared / "prepared" / f"rows-{fingerprint}").rglob("*") if path.is_file()
    )


def other_files(made: Made) -> set[Path]:
    """What isn't of derived shards."""
    found = {path for path in made.shared.rglob("*") if path.is_file() and "prepared" not in path.parts}
    plain = [path for path in (made.node / "shards").iterdir() if "prepared" not in meta_of(path)]
    return found | {path / "data" for path in plain}


def flip(path: Path) -> None:
    """Damage the first row of a derived shard."""
    data = bytearray(path.read_bytes())
    data[data.rindex(b"\x93NUMPY") + 128] ^= 1
    path.write_bytes(data)


def test_ls_and_show_say_where_derived_shards_are_and_how_many_rows_they_have(
    features: Run, made: Made
) -> None:
    found = features("ls", *made.shared_cache)["derived"]
    wanted = {(where, of) for where in (str(made.node), str(made.shared)) for of in made.fingerprints}
    assert {(one["where"], one["fingerprint"]) for one in found} == wanted
    for one in found:
        assert (one["label"], one["shards"], one["rows"], one["unreadable"]) == ("tiny [x]", 2, SAMPLES, 0)
        assert one["size_bytes"] > SAMPLES * 12
    assert len(features("ls")["derived"]) == 3
    table = features("ls", *made.shared_cache, text=True)
    assert table.count("tiny [x]") == 9  # three of the rows of this node
    shutil.rmtree(made.node / "rows")
    shown = features("show", made.fingerprints[1][:9], *made.shared_cache)
    assert shown["rows"] == []
    assert [one["where"] for one in shown["derived"]] == [str(made.node), str(made.shared)]
    assert shown["parts"]["class"] == "Tiny"
    assert "2 derived shards with 7 rows" in features("show", made.fingerprints[1], text=True)


def test_why_compares_the_fingerprints_of_derived_shards(features: Run, made: Made) -> None:
    shutil.rmtree(made.node / "rows")
    one, other, third = made.fingerprints
    (weights,) = features("why", one, other)["differences"]
    assert weights["part"] == "weights"
    shutil.rmtree(made.node / "shards")
    found = features("why", one, third, *made.shared_cache)
    assert (found["a"], found["b"]) == (one, third)
    assert [each["part"] for each in found["differences"]] == ["arguments.weight"]
    features("why", one, third, code=2, text=True)


def test_verify_names_damaged_rows_of_each_place_and_deletes_their_derived_shards(
    features: Run, made: Made
) -> None:
    whole = features("verify", *made.shared_cache)["derived"]
    assert (whole["shards"], whole["rows"], whole["damaged"]) == (12, 6 * SAMPLES, [])
    flip(directories(made, made.fingerprints[0])[0] / "data")
    flip(next(path for path in objects(made, made.fingerprints[1]) if path.suffix == ".tar"))
    next(path for path in objects(made, made.fingerprints[2]) if path.suffix == ".tar").unlink()
    damaged = features("verify", *made.shared_cache, code=1)["derived"]["damaged"]
    assert {(one["where"], one["fingerprint"]) for one in damaged} == {
        (str(made.node), made.fingerprints[0]),
        *((str(made.shared), of) for of in made.fingerprints[1:]),
    }
    assert damaged[0]["cause"].startswith("row '")
    assert all(one["url"].endswith(".tar") for one in damaged)
    assert "3 damaged, 0 deleted" in features("verify", *made.shared_cache, code=1, text=True)
    assert features("verify", *made.shared_cache, "--delete")["derived"]["deleted"] == 3
    left = features("verify", *made.shared_cache)["derived"]
    assert (left["shards"], left["damaged"]) == (9, [])


def test_a_derived_shard_whose_index_is_damaged_is_listed_as_such(features: Run, made: Made) -> None:
    index = next(path for path in objects(made, made.fingerprints[0]) if path.name == "index")
    index.write_bytes(index.read_bytes()[:-9])
    found = {one["fingerprint"]: one for one in features("ls", *made.shared_cache)["derived"]
             if one["where"] == str(made.shared)}  # fmt: skip
    assert found[made.fingerprints[0]]["unreadable"] == 1
    assert found[made.fingerprints[0]]["label"] == "tiny [x]"
    (damage,) = features("verify", *made.shared_cache, code=1)["derived"]["damaged"]
    assert "fails its checksum" in damage["cause"]


def test_gc_deletes_derived_shards_of_replaced_weights_alone(features: Run, made: Made) -> None:
    old, *new = made.fingerprints
    others = other_files(made)
    would = features("gc", "--stale", "--dry-run", *made.shared_cache)["derived"]
    assert (would["shards"], would["rows"], would["kept"]) == (4, 2 * SAMPLES, [])
    assert len(directories(made, old)) == 2
    assert features("gc", *made.shared_cache)["derived"]["shards"] == 0
    assert features("gc", "--stale", *made.shared_cache)["derived"] == would
    assert (directories(made, old), objects(made, old)) == ([], [])
    assert all(len(directories(made, of)) == 2 and len(objects(made, of)) == 4 for of in new)
    assert all(path.exists() for path in others)


def test_clear_deletes_all_derived_shards_but_those_that_are_open_or_being_made(
    features: Run, made: Made
) -> None:
    others = other_files(made)
    path = directories(made, made.fingerprints[0])[0]
    leased = objects(made, made.fingerprints[1])[0].parent.name
    foreign = made.shared / "prepared" / f"rows-{made.fingerprints[2]}" / "notes.txt"
    foreign.write_text("mine")
    leases = Leases(Place(str(made.shared), {}).objects())
    copy = ShardCopy.open(path, Shard("", "", path.name, recipe=f"rows-{made.fingerprints[0]}"))
    assert copy is not None
    part = Tier.open(made.node).claim("a" * 32)
    assert part is not None
    with contextlib.closing(leases), contextlib.closing(copy):
        assert leases.take(leased)
        assert features("clear", "other", "--yes", *made.shared_cache)["derived"]["shards"] == 0
        done = features("clear", "tiny [x]", "--yes", *made.shared_cache)["derived"]
        assert (done["shards"], len(done["kept"])) == (10, 2)
        assert {one["why"] for one in done["kept"]} == {"a process has it open", "a process has its lease"}
        assert part.path.exists()
    assert [one["shards"] for one in features("ls", *made.shared_cache)["derived"]] == [1, 1]
    assert "deleted 2 derived shards" in features("clear", "--yes", *made.shared_cache, text=True)
    assert features("ls", *made.shared_cache)["derived"] == []
    assert foreign.exists()
    assert all(path.exists() for path in others)


def test_a_folder_that_is_no_shared_cache_is_refused(features: Run, made: Made, tmp_path: Path) -> None:
    features("ls", "--shared-cache", tmp_path / "nowhere", code=2, text=True)
    features("clear", "--yes", "--shared-cache", "https://host/a?b", code=2, text=True)
    assert len(features("ls")["derived"]) == 3
