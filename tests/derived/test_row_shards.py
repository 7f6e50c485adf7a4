"""Derived shards of rows: made whole ahead of a training, read in place of computing, never a wrong row."""

from __future__ import annotations

import contextlib
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

import numpy as np
import pytest
import torch
from torch import nn
from xxhash import xxh3_64_intdigest

import streamload
from streamload import Features
from streamload.cache.shard import shard_of
from streamload.cli.options import recipe_of
from streamload.daemon import ray_task
from streamload.daemon.options import ServiceOptions
from streamload.daemon.ray_task import Job, bring, own_version
from streamload.daemon.service import Service
from streamload.daemon.warm import warm
from streamload.derived.store import shard as row_shard
from streamload.derived.store.catalog import open_catalog
from streamload.derived.store.row_store import close_stores
from streamload.derived.store.shard import RowShardWriter, rows_form
from streamload.errors import FeatureMismatch, OptionError
from streamload.features.named import NamedFeatures
from streamload.features.recipe import FeatureRecipe
from streamload.loader.feature_recipe import make_recipe
from streamload.origins.origin import open_origin
from streamload.testing.shards import ShardOptions, write_shards
from tests.support import flat
from tests.support.ray_cluster import RayCluster
from tests.support.s3 import S3Server
from tests.support.sharing import Origin, Place, opened, place_of, running_s3

COUNTS = (7, 8)
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
    recipe = make_recipe(NamedFeatures(f"{HERE}:{name}", batch_size=4))
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


def derived(root: Path) -> list[Path]:
    """The data of the derived shards in the tier of a node."""
    found = []
    for path in (root / "shards").rglob("data"):
        with contextlib.suppress(tarfile.ReadError), tarfile.open(path) as tar:
            found += [path] if "leaf-0.npy" in tar.getnames() else []
    return found


def forget_rows(tmp_path: Path) -> None:
    """Remove the rows that the trainer has stored itself."""
    close_stores()
    shutil.rmtree(tmp_path / "trainer" / "rows")


def are_equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.allclose(some[key], others[key]) for key in some)


def test_a_derived_shard_is_read_by_tarfile_and_numpy_alone(origin: Origin, place: Place) -> None:
    recipe = make(origin, place, "Parts")
    tier, _ = opened(place)
    form = rows_form(origin.shard(0), recipe.fingerprint)
    held = tier.look(form)
    assert held is not None
    data = Path(place.url, tier._name(form, held.data)).read_bytes()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        files = {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
    about, keys = json.loads(files["rows.json"]), json.loads(files["rows.keys.json"])
    arrays = {name: np.load(io.BytesIO(files[name])) for name in files if name.endswith(".npy")}
    described = {leaf["path"]: (arrays[leaf["file"]], leaf["dtype"]) for leaf in about["leaves"]}
    half, both, mask = (described[path] for path in ("['half']", "['both'][0]", "['both'][1]"))
    assert (half[0].shape, half[0].dtype, mask[0].dtype) == ((7, 3, 2, 2), np.float16, bool)
    assert (both[1], both[0].dtype) == ("bfloat16", np.uint16)
    assert about["fingerprint"] == recipe.fingerprint
    assert about["parts"]["class"] == "Parts"
    assert about["source"]["url"] == origin.urls[0]
    assert about["source"]["size"]
    with tarfile.open(origin.paths[0]) as tar:
        payloads: dict[str, bytes] = {}
        for member in tar:
            key = member.name.partition(".")[0]
            payloads[key] = payloads.get(key, b"") + tar.extractfile(member).read()  # type: ignore[union-attr]
    assert keys == list(payloads)
    assert arrays["rows.samples.npy"].tolist() == [xxh3_64_intdigest(payloads[key]) for key in keys]
    leaves = [arrays[leaf["file"]] for leaf in about["leaves"]]
    rows = [b"".join(leaf[at].tobytes() for leaf in leaves) for at in range(len(keys))]
    assert arrays["rows.checksums.npy"].tolist() == [xxh3_64_intdigest(row) for row in rows]


def test_rows_of_a_module_that_computing_changes_are_in_no_derived_shard(origin: Origin) -> None:
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
    assert (stats.feature_rows_read, stats.feature_rows_computed) == (SAMPLES, 0)
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
        image = next(name for name in old.getnames() if name.endswith((".jpg", ".png", ".webp")))
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
    assert (stats.feature_rows_read, stats.feature_rows_computed) == (SAMPLES - 1, 1)
    nodes("other")
    assert are_equal(rows, epoch(origin.urls, None, Net().eval())[0])


def test_rows_of_other_weights_are_not_used(origin: Origin, place: Place, nodes: Any) -> None:
    make(origin, place)
    nodes("trainer")
    _, _, stats = epoch(origin.urls, place, Net(seed=1).eval())
    assert (stats.feature_rows_read, stats.feature_rows_computed) == (0, SAMPLES)


@pytest.mark.parametrize("damage", ["flip", "cut", "head"])
def test_damaged_rows_are_computed_and_counted(
    origin: Origin, place: Place, nodes: Any, tmp_path: Path, damage: str
) -> None:
    make(origin, place)
    nodes("trainer")
    module = Net().eval()
    rows, _, _ = epoch(origin.urls, place, module)
    forget_rows(tmp_path)  # those of canaries
    for path in derived(tmp_path / "trainer"):
        data = bytearray(path.read_bytes())
        at = data.rindex(b"\x93NUMPY") + 128 if damage != "head" else 600
        data[at] ^= 1
        path.write_bytes(data[:at] if damage == "cut" else data)
    again, _, stats = epoch(origin.urls, None, module)
    lost = {"flip": len(COUNTS), "cut": SAMPLES, "head": SAMPLES}[damage]
    assert stats.feature_rows_computed == lost
    assert stats.feature_rows_damaged == (0 if damage == "head" else lost)
    assert are_equal(rows, again)


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
    write = RowShardWriter.chunks

    def chunks(writer: RowShardWriter, about: Any) -> Iterator[bytes]:
        head, *others = write(writer, about)
        said = json.loads(head[512:].rstrip(b"\0"))
        text = json.dumps({**said, "layout": "here"}).replace('"here"', LAYOUTS[layout](said["layout"]))
        yield from (row_shard._member("rows.json", text.encode()), *others)

    monkeypatch.setattr(RowShardWriter, "chunks", chunks)
    make(origin, place)
    nodes("trainer")
    made.clear()
    rows, _, stats = epoch(origin.urls, place, Net().eval())
    assert made == []
    assert (stats.feature_rows_read, stats.feature_rows_computed) == (0, SAMPLES)
    nodes("other")
    assert are_equal(rows, epoch(origin.urls, None, Net().eval())[0])


HEADS = {
    "of an archive": lambda data: b"PK\x03\x04" + data[4:],
    "of two dimensions": lambda data: _head_of(data, len(data) // 8 - 16, 1),
    "of more rows than any memory": lambda data: _head_of(data, 10**15),
    "that ends in the middle": lambda data: data[:40].replace(b"{", b"("),
}


def _head_of(data: bytes, *shape: int) -> bytes:
    return row_shard.npy_head(np.dtype("<u8"), shape) + data[128:]


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_of_numbers_that_numpy_cannot_read_ends_no_training(
    origin: Origin, place: Place, nodes: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    numbers = row_shard._numbers
    monkeypatch.setattr(row_shard, "_numbers", lambda values: HEADS[kind](numbers(values)))
    make(origin, place)
    monkeypatch.undo()
    nodes("trainer")
    _, _, stats = epoch(origin.urls, place, Net().eval())
    assert (stats.feature_rows_read, stats.feature_rows_computed) == (0, SAMPLES)


def test_a_head_without_end_is_refused_before_it_is_read(
    origin: Origin, place: Place, nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_shard, "_MOST_HEAD_BYTES", 1000)  # of a head of 1,400 bytes
    make(origin, place)
    nodes("trainer")
    _, _, stats = epoch(origin.urls, place, Net().eval())
    assert (stats.feature_rows_read, stats.feature_rows_computed) == (0, SAMPLES)


def test_bytes_of_samples_are_not_read_where_derived_shards_have_their_rows(
    origin: Origin, place: Place, nodes: Any, tmp_path: Path
) -> None:
    make(origin, place)
    nodes("trainer")
    module: Any = Features(Net().eval(), check=False)  # a check reads one
    rows, _, _ = epoch(origin.urls, place, module)
    forget_rows(tmp_path)  # those of canaries
    forms = derived(tmp_path / "trainer")
    for path in (tmp_path / "trainer" / "shards").rglob("data"):
        if path not in forms:  # what was damaged is found only if it is read
            path.write_bytes(bytes(path.stat().st_size))
    again, _, stats = epoch(origin.urls, None, module)
    assert stats.feature_rows_read == SAMPLES
    assert stats.checksum_failures == 0
    assert are_equal(rows, again)


def test_a_derived_shard_that_goes_is_fetched_again_or_computed(
    origin: Origin, place: Place, nodes: Any, tmp_path: Path
) -> None:
    make(origin, place)
    nodes("trainer")
    module = Net().eval()
    rows, _, _ = epoch(origin.urls, place, module)
    forget_rows(tmp_path)  # those of canaries
    for path in derived(tmp_path / "trainer"):
        (path.parent).rename(tmp_path / path.parent.name)
    without, _, stats = epoch(origin.urls, None, module)
    assert stats.feature_rows_computed == SAMPLES
    forget_rows(tmp_path)
    again, _, stats = epoch(origin.urls, place, module)
    assert stats.feature_rows_computed == 0
    assert are_equal(rows, without)
    assert are_equal(rows, again)
    assert derived(tmp_path / "trainer")


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


def command(origin: Origin, place: Place, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "streamload", "features", "make", *origin.urls, "--shared-cache", place.url),
        *("--workers", "1", "--batch-size", "2", "--json", *more),
    ]


def environ(tmp_path: Path, node: str) -> dict[str, str]:
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "STREAMLOAD_CACHE_DIR": str(tmp_path / node)}


@pytest.mark.deep
def test_two_makers_split_the_shards(tmp_path: Path, place: Place) -> None:
    origin = Origin(tmp_path / "many", (6, 6, 6, 6, 6, 6), options=IMAGES)
    with contextlib.closing(origin):
        given = command(origin, place, "--module", f"{HERE}:Slow")
        makers = [
            subprocess.Popen(given, env=environ(tmp_path, node), stdout=subprocess.PIPE, text=True)
            for node in ("one", "two")
        ]
        reports = [json.loads(maker.communicate(timeout=120)[0]) for maker in makers]
    assert [maker.returncode for maker in makers] == [0, 0]
    assert sum(report["made"] for report in reports) == 6
    assert sum(report["computed"] for report in reports) == 36
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


def test_warm_makes_derived_shards_of_local_files_for_the_node(tmp_path: Path, nodes: Any) -> None:
    paths = [str(path) for path in write_shards(tmp_path / "files", COUNTS, options=IMAGES)]
    report = warm(paths, prepare=make_recipe(NamedFeatures(f"{HERE}:Net")))
    assert (report.shards_complete, report.failures) == (2, {})
    (tmp_path / "maker" / "rows").rename(tmp_path / "rows of the maker")
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
def test_commands_that_fill_caches_make_derived_shards(
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
    assert (stats.feature_rows_read, stats.feature_rows_computed) == (SAMPLES, 0)


@pytest.mark.parametrize(("name", "why"), [("texts", 'inputs="text"'), ("variants", "variants=2")])
def test_features_without_one_row_a_sample_are_refused(name: str, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        make_recipe(NamedFeatures(f"{HERE}:{name}", tokenizer=f"{HERE}:texts"))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Ragged", "tensor of rows has one for each"),
        ("Records", f"the results have a {HERE}:Row in them: derived shards hold tensors"),
    ],
)
def test_a_module_that_cannot_be_cached_fails_each_shard_with_its_reason(
    origin: Origin, place: Place, name: str, why: str
) -> None:
    recipe = make_recipe(NamedFeatures(f"{HERE}:{name}"))
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
    shard = rows_form(shard_of(origin.urls[0], None), recipe.fingerprint)
    try:
        found = bring(own_version(), pickle.dumps(job), pickle.dumps((shard, recipe)))
    finally:
        ray_task._drop_carriers()  # a process of Ray keeps them
    assert "7 keys" in found["why"]
    assert "trouble" not in found


def streamload_shared(place: Place) -> Any:
    from streamload.cache.shared.sharing import SharedOptions

    return SharedOptions(place.url, place.options)


@pytest.mark.deep
def test_nodes_of_a_ray_cluster_make_derived_shards(
    origin: Origin, place: Place, tmp_path: Path, nodes: Any
) -> None:
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
    assert (stats.feature_rows_read, stats.feature_rows_computed) == (SAMPLES, 0)
