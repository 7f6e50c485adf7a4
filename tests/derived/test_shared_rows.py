"""Rows in a shared cache: made ahead of a training, read by others, never a wrong one."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from xxhash import xxh3_64_intdigest

import streamload
from streamload import Features
from streamload.cache.locks import FileLock
from streamload.cache.shard import prepared_form, shard_of
from streamload.cli import main
from streamload.cli.options import recipe_of
from streamload.columns import blocks as column_blocks
from streamload.columns.blocks import RowBlock, object_name
from streamload.columns.catalog import fingerprints as columns_by_fingerprint
from streamload.columns.column import checksum_of
from streamload.columns.columns import name_of
from streamload.daemon import ray_task
from streamload.daemon.options import ServiceOptions
from streamload.daemon.ray_task import Job, bring, own_version
from streamload.daemon.service import Service
from streamload.daemon.warm import warm
from streamload.derived.store.catalog import open_catalog
from streamload.derived.store.row_store import RowPlace, close_stores, open_store
from streamload.errors import FeatureMismatch, OptionError
from streamload.features.named import NamedFeatures
from streamload.features.recipe import FeatureRecipe
from streamload.features.sharing import SharedColumns, noted_fingerprints, read_note, store_rows
from streamload.loader.feature_recipe import make_recipe
from streamload.metrics import Counters
from streamload.origins.origin import open_origin
from streamload.testing.shards import ShardOptions, write_shards
from tests.support import flat
from tests.support.ray_cluster import RayCluster
from tests.support.s3 import S3Server
from tests.support.sharing import Origin, Place, opened, place_of, running_s3

COUNTS = (70, 65)
SAMPLES = sum(COUNTS)
HERE = __name__
IMAGES = ShardOptions(image_side=(16, 30))


@streamload.cache_module
class Net(nn.Module):
    """A frozen encoder."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.project = nn.Linear(48, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.project(nn.functional.adaptive_avg_pool2d(images, 4).flatten(1))


@streamload.cache_module
class Slow(Net):
    """Takes its time, so that it can be killed."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2)
        return super().forward(images)


@streamload.cache_module
class Parts(nn.Module):
    """Returns tensors of several types, in a tree."""

    def forward(self, images: torch.Tensor) -> dict[str, Any]:
        small = nn.functional.adaptive_avg_pool2d(images, 2)
        return {"half": small.half(), "both": (small.mean((1, 2, 3)).bfloat16(), small[:, 0] > 0)}


@streamload.cache_module
class Counts(Net):
    """Changes what its rows depend on when it computes some."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(images)


made: list[Any] = []


@dataclass
class Loud:
    """Notices when one is made."""

    value: Any

    def __post_init__(self) -> None:
        made.append(self.value)


class Row(NamedTuple):
    value: Any


@streamload.cache_module
class Records(Net):
    """Returns an object."""

    def forward(self, images: torch.Tensor) -> Row:
        return Row(super().forward(images))


@streamload.cache_module
class Ragged(nn.Module):
    """Returns no rows."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.sum()


def texts() -> Features:
    return Features(Net(), inputs="text")


def variants() -> Features:
    return Features(Net(), variants=2)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server


@pytest.fixture(params=["folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place_of(request, tmp_path)


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Origin]:
    made = Origin(tmp_path / "data", COUNTS, options=IMAGES)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Work as the node of that name from now on: it has a cache and rows of its own."""

    def become(name: str) -> None:
        close_stores()
        monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / name))

    monkeypatch.setenv("STREAMLOAD_CACHE_SIZE", "1GB")
    become("maker")
    yield become
    close_stores()


def make(origin: Origin, place: Place, name: str = "Net") -> FeatureRecipe:
    recipe = make_recipe(NamedFeatures(f"{HERE}:{name}", batch_size=16), shared=streamload_shared(place))
    options = ServiceOptions(
        urls=tuple(origin.urls),
        prepare=recipe,
        into="shared",
        once=True,
        notices="none",
        listen="none",
        shared_cache=place.url,
        shared_cache_options=place.options,
    )
    with Service(options) as service:
        status = service.run()
    assert status.is_complete, status
    return recipe


def epoch(
    urls: list[str], place: Place | None, module: nn.Module, epochs: int = 1, **options: Any
) -> tuple[dict[str, torch.Tensor], list[list[str]], Any]:
    """Rows by key, the keys of batches, and the counts of a training."""
    cache = (
        streamload.Cache()
        if place is None
        else streamload.Cache(shared=place.url, shared_options=place.options)
    )
    given = {"batch_size": 4, "num_workers": 0, "output": "dict", "with_keys": True, "seed": 3, **options}
    shards = streamload.Shards(text_key=None)
    rows: dict[str, torch.Tensor] = {}
    keys = []
    with flat.make_loader(
        urls, features={"f": module}, cache=cache, shards=shards, train=False, **given
    ) as loader:
        for _ in range(epochs):
            for batch in loader:
                keys.append(list(batch["__key__"]))
                rows.update(zip(batch["__key__"], module(batch), strict=True))
        return rows, keys, loader.stats()


def blocks(place: Place) -> list[Path]:
    """The objects with rows in a folder."""
    return sorted(Path(place.url).glob("columns/*/rows.*"))


def are_equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.allclose(some[key], others[key]) for key in some)


def test_blocks_have_the_rows_of_all_samples_and_a_note_says_of_what(origin: Origin, place: Place) -> None:
    recipe = make(origin, place, "Parts")
    fingerprint = bytes.fromhex(recipe.fingerprint)
    tier, _ = opened(place)
    for number, count in enumerate(COUNTS):
        checksums = checksums_in(origin.paths[number])
        assert len(checksums) == count
        data = tier.column(object_name(name_of(checksums), fingerprint, 0))
        assert data is not None
        block = RowBlock.unpack(data)
        assert [place for place, *_ in block.items()] == list(range(count))
        assert all(checksum_of(row, checksums[place]) == check for place, check, row in block.items())
    assert len(blocks(place)) == 2
    note = read_note(tier, fingerprint)
    assert note is not None
    assert (note["label"], note["parts"]["class"]) == ("Parts", "Parts")
    assert noted_fingerprints(tier) == [recipe.fingerprint]


def checksums_in(path: Path) -> list[int]:
    """The checksum of each sample of a tar, by tarfile alone."""
    payloads: dict[str, bytes] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            key = member.name.partition(".")[0]
            payloads[key] = payloads.get(key, b"") + tar.extractfile(member).read()  # type: ignore[union-attr]
    return [xxh3_64_intdigest(payload) for payload in payloads.values()]


def test_rows_of_a_module_that_computing_changes_are_not_shared(origin: Origin) -> None:
    recipe = make_recipe(NamedFeatures(f"{HERE}:Counts", batch_size=4))
    derived_origin = recipe.derive(open_origin(origin.urls[0]))
    with (
        contextlib.closing(derived_origin.open()) as stream,
        pytest.raises(FeatureMismatch, match="another fingerprint after it computed its first rows"),
    ):
        b"".join(stream.chunks())


@pytest.mark.parametrize("place", ["folder", "s3"], indirect=True)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.deep)])
def test_a_training_on_another_node_reads_all_rows(
    origin: Origin, place: Place, workers: int, nodes: Any
) -> None:
    recipe = make(origin, place)
    assert recipe.counts.snapshot().feature_rows_computed == SAMPLES
    nodes("trainer")
    rows, keys, stats = epoch(origin.urls, place, Net().eval(), num_workers=workers)
    assert stats.feature_rows_read + stats.feature_rows_computed == SAMPLES
    assert stats.feature_rows_computed <= 16 * len(COUNTS)  # those that came before their shards had a name
    nodes("other")
    computed, batches, alone = epoch(origin.urls, None, Net().eval())
    assert alone.feature_rows_computed == SAMPLES
    assert keys == batches
    assert are_equal(rows, computed)


def test_of_an_edited_shard_only_edited_samples_are_computed(
    origin: Origin, place: Place, nodes: Any, tmp_path: Path
) -> None:
    make(origin, place)
    other = write_shards(tmp_path / "other", COUNTS, seed=99, options=IMAGES)
    with tarfile.open(origin.paths[0]) as old, tarfile.open(other[0]) as new:
        # After the first 16 samples, which name the columns.
        image = [name for name in old.getnames() if name.endswith((".jpg", ".png", ".webp"))][20]
        members = [(info, old.extractfile(info).read()) for info in old]  # type: ignore[union-attr]
        with_same = next(info for info in new if info.name.rpartition(".")[2] == image.rpartition(".")[2])
        edited = new.extractfile(with_same).read()  # type: ignore[union-attr]
    with tarfile.open(origin.paths[0], "w") as tar:
        for info, data in members:
            data = edited if info.name == image else data
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    nodes("trainer")
    rows, _, stats = epoch(origin.urls, place, Net().eval())
    assert stats.feature_rows_read + stats.feature_rows_computed == SAMPLES
    assert 1 <= stats.feature_rows_computed <= 1 + 16 * len(COUNTS)
    nodes("other")
    assert are_equal(rows, epoch(origin.urls, None, Net().eval())[0])
    nodes("maker")
    recipe = make_recipe(NamedFeatures(f"{HERE}:Net", batch_size=16), shared=streamload_shared(place))
    derived_origin = recipe.derive(open_origin(origin.urls[0]))
    with contextlib.closing(derived_origin.open()) as stream:
        assert b"".join(stream.chunks())
    assert recipe.counts.snapshot().feature_rows_computed == 1
    checksums = checksums_in(origin.paths[0])
    stored = opened(place)[0].column(object_name(name_of(checksums), bytes.fromhex(recipe.fingerprint), 0))
    assert stored is not None
    block = RowBlock.unpack(stored)  # the row of the edited sample took the place of the former one
    assert all(checksum_of(row, checksums[place]) == check for place, check, row in block.items())


def test_rows_after_many_samples_without_any_are_found(
    origin: Origin, place: Place, nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_blocks, "_MOST_BYTES", 100)  # as of rows of some megabytes: four to a block
    broken = {*range(8), *range(16, 20)}
    with tarfile.open(origin.paths[0]) as old:
        members = [(info, old.extractfile(info).read()) for info in old]  # type: ignore[union-attr]
    keys = list(dict.fromkeys(info.name.partition(".")[0] for info, _ in members))
    with tarfile.open(origin.paths[0], "w") as tar:
        for info, data in members:
            is_image = info.name.endswith((".jpg", ".png", ".webp"))
            is_broken = is_image and keys.index(info.name.partition(".")[0]) in broken
            tar.addfile(info, io.BytesIO(bytes(len(data)) if is_broken else data))
    make(origin, place)
    nodes("trainer")
    _, _, stats = epoch(origin.urls, place, Net().eval())
    assert stats.feature_rows_read + stats.feature_rows_computed == SAMPLES - len(broken)
    assert stats.feature_rows_computed <= 16 * len(COUNTS)


def test_rows_of_other_weights_are_not_used(origin: Origin, place: Place, nodes: Any) -> None:
    make(origin, place)
    nodes("trainer")
    _, _, stats = epoch(origin.urls, place, Net(seed=1).eval())
    assert (stats.feature_rows_read, stats.feature_rows_computed) == (0, SAMPLES)


@pytest.mark.parametrize("damage", ["row", "cut", "head"])
def test_damaged_rows_are_computed(origin: Origin, place: Place, nodes: Any, damage: str) -> None:
    make(origin, place)
    for path in blocks(place):
        data = bytearray(path.read_bytes())
        data[len(data) - 3 if damage == "row" else 40] ^= 1
        path.write_bytes(data[:-5] if damage == "cut" else data)
    nodes("trainer")
    rows, _, stats = epoch(origin.urls, place, Net().eval())
    lost = len(COUNTS) if damage == "row" else SAMPLES
    assert lost <= stats.feature_rows_computed <= min(SAMPLES, lost + 16 * len(COUNTS))
    nodes("other")
    assert are_equal(rows, epoch(origin.urls, None, Net().eval())[0])


LAYOUTS = {
    "an object": lambda layout: json.dumps(["c", f"{HERE}:Loud", [["value", layout]]]),
    "an object deep inside": lambda layout: json.dumps(
        ["d", [["a", ["u", [["c", f"{HERE}:Loud", [["value", layout]]]]]]]]
    ),
    "great depth": lambda layout: '["l",[' * 50_000 + json.dumps(layout) + "]]" * 50_000,
    "no node": lambda layout: "7",
    "numbers of no type": lambda layout: json.dumps(layout).replace("float32", "number32"),
    "numbers of a type that isn't parsed": lambda layout: json.dumps(["n", "f4,,", [7]]),
    "an infinite size": lambda layout: '["l",[["s",[Infinity]],' + json.dumps(layout) + "]]",
    "a number of no rows": lambda layout: json.dumps(["l", [["v", 7], layout]]),
    "a size in text": lambda layout: json.dumps(layout).replace("[4]", '["4"]'),
    "a list as a name": lambda layout: json.dumps(["d", [[["x", []], layout]]]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_another_node_has_stored_makes_no_objects_and_ends_no_training(
    origin: Origin, place: Place, nodes: Any, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    def pack(block: RowBlock) -> bytes:
        text = LAYOUTS[layout](json.loads(block.layout)).encode()
        return packed(dataclasses.replace(block, layout=text))

    packed = RowBlock.pack
    monkeypatch.setattr(RowBlock, "pack", pack)
    make(origin, place)
    nodes("trainer")
    made.clear()
    rows, _, stats = epoch(origin.urls, place, Net().eval())
    assert made == []
    assert (stats.feature_rows_read, stats.feature_rows_computed) == (0, SAMPLES)
    nodes("other")
    assert are_equal(rows, epoch(origin.urls, None, Net().eval())[0])


def test_bytes_of_samples_are_not_read_where_their_rows_are_there(
    origin: Origin, place: Place, nodes: Any, tmp_path: Path
) -> None:
    make(origin, place)
    nodes("trainer")
    module: Any = Features(Net().eval(), check=False)  # a check reads one
    rows, _, _ = epoch(origin.urls, place, module)
    for path in (tmp_path / "trainer" / "shards").rglob("data"):  # damage is found only if it is read
        path.write_bytes(bytes(path.stat().st_size))
    again, _, stats = epoch(origin.urls, None, module)
    assert stats.feature_rows_read == SAMPLES
    assert stats.checksum_failures == 0
    assert are_equal(rows, again)


def test_rows_that_go_are_fetched_again_or_computed(
    origin: Origin, place: Place, nodes: Any, tmp_path: Path
) -> None:
    make(origin, place)
    nodes("trainer")
    module = Net().eval()
    rows, _, _ = epoch(origin.urls, place, module)
    for where, computed in (None, SAMPLES), (place, 0):
        close_stores()
        shutil.rmtree(tmp_path / "trainer" / "columns")
        # Rows of a batch that was complete before its shard's columns had a name.
        for of_calls in (tmp_path / "trainer").rglob("rows.db*"):
            of_calls.unlink()
        again, _, stats = epoch(origin.urls, where, module)
        assert stats.feature_rows_computed == computed
        assert are_equal(rows, again)


def test_rows_are_fetched_though_the_columns_go_while_another_process_fetches_them(
    origin: Origin, place: Place, nodes: Any, tmp_path: Path
) -> None:
    fingerprint = make(origin, place).fingerprint
    nodes("trainer")
    store = open_store(RowPlace(""))
    assert store is not None
    assert store.columns is not None
    name = name_of(checksums_in(origin.paths[0]))
    held = FileLock.acquire(store.columns.asked(bytes.fromhex(fingerprint), name), create=True)
    assert held is not None
    shared = SharedColumns(opened(place)[0], Counters())
    try:
        shared._is_patient = False
        shared.await_rows(store, fingerprint, {name: shard_of(origin.urls[0], None)})
        time.sleep(0.5)  # now it waits
        shutil.rmtree(tmp_path / "trainer" / "columns" / name.hex())
        (fetch,) = shared._fetches.values()
        fetch.result(60)
    finally:
        held.close()
        shared.close()
    assert sum(rows.rows for rows in columns_by_fingerprint(tmp_path / "trainer")) == COUNTS[0]


def test_makers_of_some_rows_each_have_all_together(origin: Origin, place: Place, nodes: Any) -> None:
    recipe = make(origin, place)
    fingerprint = bytes.fromhex(recipe.fingerprint)
    checksums, (tier, _) = checksums_in(origin.paths[0]), opened(place)
    name = name_of(checksums)
    path = Path(place.url, object_name(name, fingerprint, 0))
    block = RowBlock.unpack(path.read_bytes())
    rows = [(number, checksums[number], bytes(row)) for number, _, row in block.items()]
    path.unlink()
    written = []
    for some in (rows[:30], rows[20:60], rows[10:50], rows[55:]):
        store_rows(tier, fingerprint, name, block.layout, some)
        written.append(path.stat().st_mtime_ns)
    assert RowBlock.unpack(path.read_bytes()).pack() == block.pack()
    assert written[1] == written[2] < written[3]  # what has nothing new isn't stored


def test_a_resumed_training_has_the_batches_of_one_that_computes(
    origin: Origin, place: Place, nodes: Any
) -> None:
    make(origin, place)

    def second_half(place: Place | None) -> list[list[str]]:
        module = Net().eval()
        options: dict[str, Any] = {"batch_size": 2, "num_workers": 1, "output": "dict", "with_keys": True}
        cache = streamload.Cache() if place is None else streamload.Cache(shared=place.url)
        shards = streamload.Shards(text_key=None)
        found = []
        state: Any = None
        for stop in (3, None):
            with flat.make_loader(
                origin.urls, features={"f": module}, cache=cache, shards=shards, **options
            ) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                for batch in itertools.islice(loader, stop):
                    module(batch)
                    found.append(list(batch["__key__"]))
                state = loader.state_dict()
        return found

    nodes("trainer")
    read = second_half(place)
    nodes("other")
    assert read == second_half(None)


def test_why_knows_what_another_node_has_made(
    origin: Origin,
    place: Place,
    nodes: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, other = make(origin, place).fingerprint, make(origin, place, "Parts").fingerprint
    nodes("trainer")
    capsys.readouterr()
    for given in (["show", one[:9]], ["why", one[:9], other[:9]]):
        arguments = ["streamload", "features", *given, "--shared-cache", place.url, "--json"]
        monkeypatch.setattr(sys, "argv", arguments)
        with contextlib.suppress(SystemExit):
            main()
    decoder, out = json.JSONDecoder(), capsys.readouterr().out
    shown, end = decoder.raw_decode(out)
    compared = json.loads(out[end:])
    assert shown["parts"]["class"] == "Net"
    assert {"part": "class", "a": "Net", "b": "Parts"} in compared["differences"]


def command(origin: Origin, place: Place, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "streamload", "features", "make", *origin.urls, "--shared-cache", place.url),
        *("--workers", "1", "--batch-size", "16", "--json", *more),
    ]


def environ(tmp_path: Path, node: str) -> dict[str, str]:
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "STREAMLOAD_CACHE_DIR": str(tmp_path / node)}


@pytest.mark.deep
def test_two_makers_split_the_shards(tmp_path: Path, place: Place) -> None:
    origin = Origin(tmp_path / "many", (66,) * 6, options=IMAGES)
    with contextlib.closing(origin):
        given = command(origin, place, "--module", f"{HERE}:Slow")
        makers = [
            subprocess.Popen(given, env=environ(tmp_path, node), stdout=subprocess.PIPE, text=True)
            for node in ("one", "two")
        ]
        reports = [json.loads(maker.communicate(timeout=120)[0]) for maker in makers]
    assert [maker.returncode for maker in makers] == [0, 0]
    assert sum(report["made"] for report in reports) == 6
    assert sum(report["computed"] for report in reports) == 6 * 66
    assert all(report["held"] == 6 for report in reports)


@pytest.mark.deep
def test_a_maker_that_was_killed_is_continued(origin: Origin, place: Place, tmp_path: Path) -> None:
    given = command(origin, place, "--module", f"{HERE}:Slow")
    maker = subprocess.Popen(given, env=environ(tmp_path, "maker"), stdout=subprocess.DEVNULL)
    index = f"prepared/*/{origin.shard(0).digest[:16]}*/index"
    while not list(Path(place.url).glob(index)) and maker.poll() is None:
        time.sleep(0.05)
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    done = subprocess.run(
        given, env=environ(tmp_path, "maker"), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["held"], report["shards"]) == (2, 2)
    assert report["made"] <= 1
    assert report["computed"] <= COUNTS[1]


def test_warm_makes_rows_of_local_files_for_the_node(tmp_path: Path, nodes: Any) -> None:
    paths = [str(path) for path in write_shards(tmp_path / "files", COUNTS, options=IMAGES)]
    report = warm(paths, prepare=make_recipe(NamedFeatures(f"{HERE}:Net")))
    assert (report.shards_complete, report.failures) == (2, {})
    nodes("maker")
    _, _, stats = epoch(paths, None, Net().eval())
    assert (stats.feature_rows_read, stats.feature_rows_computed) == (SAMPLES, 0)


def test_rows_that_warm_computes_are_in_the_cache_dir_that_it_fills(tmp_path: Path, nodes: Any) -> None:
    paths = [str(path) for path in write_shards(tmp_path / "files", COUNTS, options=IMAGES)]
    own = str(tmp_path / "own")
    recipe = recipe_of(None, f"{HERE}:Net", own)
    assert warm(paths, cache_dir=own, prepare=recipe).failures == {}
    close_stores()
    with open_catalog(tmp_path / "own" / "rows") as catalog:
        assert [of.rows for of in catalog.fingerprints()] == [SAMPLES]
    assert not (tmp_path / "maker" / "rows").exists()
    assert pickle.loads(pickle.dumps(recipe)).fingerprint == recipe.fingerprint  # of a node with its own


@pytest.mark.deep
@pytest.mark.parametrize("how", ["daemon", pytest.param("warm", marks=pytest.mark.deep)])
def test_commands_that_fill_caches_make_rows(
    origin: Origin, place: Place, tmp_path: Path, nodes: Any, how: str
) -> None:
    more = {"daemon": ["--once", "--notices", "none", "--listen", "none"], "warm": ["--write-back"]}[how]
    given = [sys.executable, "-m", "streamload", how, *origin.urls, "--shared-cache", place.url]
    done = subprocess.run(
        [*given, "--features", f"{HERE}:Net", *more],
        env=environ(tmp_path, "maker"), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    nodes("trainer")
    _, _, stats = epoch(origin.urls, place, Net().eval())
    assert stats.feature_rows_read >= SAMPLES - 16 * len(COUNTS)


@pytest.mark.parametrize(("name", "why"), [("texts", 'inputs="text"'), ("variants", "variants=2")])
def test_features_without_one_row_a_sample_are_refused(name: str, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        make_recipe(NamedFeatures(f"{HERE}:{name}", tokenizer=f"{HERE}:texts"))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Ragged", "tensor of rows has one for each"),
        ("Records", f"the results have a {HERE}:Row in them: other nodes read tensors"),
    ],
)
def test_a_module_that_cannot_be_cached_fails_each_shard_with_its_reason(
    origin: Origin, place: Place, name: str, why: str
) -> None:
    recipe = make_recipe(NamedFeatures(f"{HERE}:{name}"), shared=streamload_shared(place))
    options = ServiceOptions(
        *(tuple(origin.urls),), prepare=recipe, into="shared", once=True, notices="none", listen="none",
        shared_cache=place.url,
    )  # fmt: skip
    with Service(options) as service:
        status = service.run()
    assert len(status.failed) == len(COUNTS)
    assert [said for said in status.failed.values() if why not in said] == []


def test_a_task_of_ray_fails_with_the_reason_of_its_module(origin: Origin, place: Place) -> None:
    recipe = make_recipe(NamedFeatures(f"{HERE}:Ragged"))
    tier, _ = opened(place)
    tier.objects.write("probes/1", b"here")
    job = Job(shared=streamload_shared(place), sign="probes/1", rest_seconds=0.0)
    shard = prepared_form(shard_of(origin.urls[0], None), recipe.name)
    try:
        found = bring(own_version(), pickle.dumps(job), pickle.dumps((shard, recipe)))
    finally:
        ray_task._drop_carriers()  # a process of Ray keeps them
    assert "64 keys" in found["why"]
    assert "trouble" not in found


def streamload_shared(place: Place) -> Any:
    from streamload.cache.shared.sharing import SharedOptions

    return SharedOptions(place.url, place.options)


@pytest.mark.deep
def test_nodes_of_a_ray_cluster_make_rows(origin: Origin, place: Place, tmp_path: Path, nodes: Any) -> None:
    pytest.importorskip("ray")
    where = environ(tmp_path, "cluster")
    with RayCluster({"PYTHONPATH": where["PYTHONPATH"]}) as cluster:
        cluster.add_node({"STREAMLOAD_CACHE_DIR": where["STREAMLOAD_CACHE_DIR"]})
        done = subprocess.run(
            command(origin, place, "--module", f"{HERE}:Net", "--ray", cluster.address),
            env=environ(tmp_path, "driver"), capture_output=True, text=True, timeout=150, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert json.loads(done.stdout)["made"] == 2
    nodes("trainer")
    _, _, stats = epoch(origin.urls, place, Net().eval())
    assert stats.feature_rows_read >= SAMPLES - 16 * len(COUNTS)
