"""The contract of extensions: weights of rows, and one whose workers go by events in mid-epoch."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.multiprocessing
from torch import nn

import streamload
from streamload import Source, complexity
from streamload.aspects.rank import SizedImages
from streamload.batching import Measured, SizeDecided
from streamload.batching.bounds import AgreedLengths, PaddedRows
from streamload.batching.buckets import Bucketing, Buckets
from streamload.batching.equal_costs import EqualCosts
from streamload.batching.in_flight import InFlight, MemoryLimits
from streamload.batching.modalities import RowsOfModalities
from streamload.batching.packed_cells import PackedCells
from streamload.batching.padding import RowLengths
from streamload.batching.retry import RetriedSteps
from streamload.daemon.publication import PlanPublication
from streamload.derived.store.row_store import close_stores
from streamload.errors import OptionError, StateMismatch
from streamload.extension import (
    BatchInfo,
    BatchRows,
    Event,
    Extension,
    RankPart,
    Run,
    WorkerPart,
    WorkerProcess,
)
from streamload.extension.rank import INFO_FIELDS
from streamload.features import RowFeatures, StoredFeatures
from streamload.join import JoinedRows
from streamload.journal.leave_out import LeftOutSamples
from streamload.journal.recorder import Journal
from streamload.journal.witness import Witness, Witnessed
from streamload.loader.loader import Loader
from streamload.mixing import Summary
from streamload.mixing.batch_size import BatchSizes
from streamload.mixing.decisions import Mixing
from streamload.observe.exposition import exposition
from streamload.order.steps import StepTable
from streamload.patches.rank import PatchedImages
from streamload.pixels.decoding import DeviceDecoding
from streamload.shards.samples import Entry, Sample
from streamload.testing.extension import ExtensionContract
from streamload.testing.resume import Layout
from streamload.testing.shards import read_oracle, write_shards
from streamload.weights import RowWeights
from tests.batching.test_part_size import LIMIT, Device
from tests.support import flat
from tests.support.extension_contract import FeatureContract


class TestRowWeights(FeatureContract):
    asked = MappingProxyType({"sample_weight": complexity(1, 0)})
    kinds = (RowWeights,)
    adds = ("weight",)
    state_keys = ("mean_weight",)
    damaged = ([1, 2], ["complexity", 0], ["complexity", "much"], "x", ["complexity", math.inf])
    options = MappingProxyType({"num_samples": 50})


class LeavesOut(Extension):
    """For what the contract asks of an extension that leaves samples out."""

    name = "join"

    def keep(self, entry: Entry) -> bool:
        return has_number_in_two_of_three(entry)


class TestJoinedRows(FeatureContract):
    extension = LeavesOut()
    kinds = (JoinedRows,)
    options = MappingProxyType({"cache_size": "1GB"})

    @pytest.fixture(autouse=True)
    def _with_file(self, tmp_path):
        """Rows for two of three samples."""
        path = tmp_path / "rows.jsonl"
        rows = [{"key": f"{shard:05d}{place:06d}"} for shard in range(3) for place in range(20) if place % 3]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        type(self).asked = MappingProxyType({"join": path})

    def make(self, urls: Any, *, is_extended: bool = True, **layout: Any) -> Loader:
        same = {} if is_extended else {"keep": has_number_in_two_of_three}
        return super().make(urls, is_extended=is_extended, **layout, **same)

    def test_what_it_keeps_depends_on_the_sample_alone(self, tmp_path):
        entries = [Entry(0, f"00001{place:06d}", (), 0, 0, 0, None) for place in range(20)]
        for extension in self.forms(tmp_path):
            unpickled = pickle.loads(pickle.dumps(extension))
            for entry in reversed(entries):
                assert extension.keep(entry) == unpickled.keep(entry) == has_number_in_two_of_three(entry)

    def test_a_state_without_it_loads_and_one_with_it_where_it_is_not_used(self, tmp_path):
        """It decides on the samples, so neither loads."""
        urls, cache = self.write_data(tmp_path / "shards"), tmp_path / "cache"
        with (
            self.make(urls, cache_dir=cache) as extended,
            self.make(urls, is_extended=False, cache_dir=cache) as plain,
        ):
            for loader, other in itertools.permutations((extended, plain)):
                next(iter(loader))
                with pytest.raises(StateMismatch, match="join=key"):
                    other.load_state_dict(loader.state_dict())


def has_number_in_two_of_three(entry: Entry) -> bool:
    return int(entry.key[-6:]) % 3 > 0


def equal_weights(summary: Summary) -> dict[str, float] | None:
    """Decides twice, and remembers nothing."""
    return {source.name: 1.0 for source in summary.sources} if summary.step < 8 else None


class TestMixing(FeatureContract):
    asked = MappingProxyType({"mixing": equal_weights})
    kinds = (Mixing,)
    state_keys = ("steering", "reports")
    damaged = (3, {"steps": -1}, "x", {"0.0": {"sums": "x"}})


class SameSize:
    """Is asked every other step, and leaves the size as it is."""

    every = 2

    def decide(self, measured: Measured, memory: Any) -> SizeDecided:
        return SizeDecided(None, (memory or 0) + 1, "as it is")


class TestBatchSizes(FeatureContract):
    asked = MappingProxyType({"batch_policy": SameSize()})
    kinds = (BatchSizes,)
    state_keys = ("batch_policy", "step_times")
    damaged = (3, {"steps": 1, "decided": 2, "memory": None}, {"0": [1]}, {"0": [1, 1, 1, "x"]})


def masked_ids(captions: list[str]) -> dict[str, torch.Tensor]:
    """Ids of several lengths, padded to 16, with a mask."""
    valid = torch.tensor([[place < 4 + len(caption) % 9 for place in range(16)] for caption in captions])
    texts = [list(caption.encode()[:16].ljust(16)) for caption in captions]
    return {"input_ids": torch.tensor(texts) * valid, "attention_mask": valid.long()}


class TestRowLengths(FeatureContract):
    asked = MappingProxyType({"text_padding": "longest", "text_pad_multiple": 1})
    kinds = (PaddedRows, RowLengths)
    adds = ("text_valid",)
    ranks = 1  # each cuts its rows to their own longest one
    tokenizer = staticmethod(masked_ids)

    def check_batches(self, batches: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> None:
        for batch, expected in zip(batches, plain, strict=True):
            width = batch["text"].shape[1]
            assert torch.equal(batch["text"], expected["text"][:, :width])
            assert not expected["text"][:, width:].any()
            assert batch["text_valid"].any(0).all()
            assert batch["__key__"] == expected["__key__"]


class TestBuckets(FeatureContract):
    blocks = (0, 1, 2, 4, 5)  # steps at which they begin, and the end of the epoch: the first are smaller
    asked = MappingProxyType({"bucketing": 20})
    kinds = (Bucketing, Buckets)
    ranks = 1  # each cuts its rows to their own longest one
    state_keys = ("blocks", "blocks_from")
    damaged = ("x", [1], {"steps": 2})
    options = MappingProxyType({"text_padding": "longest", "text_pad_multiple": 1})
    tokenizer = staticmethod(masked_ids)

    def check_batches(self, batches: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> None:
        """The samples of each block are the same, in other steps."""
        assert [len(batch["text"]) for batch in batches] == [len(batch["text"]) for batch in plain]
        assert [batch["__key__"] for batch in batches] != [batch["__key__"] for batch in plain]
        for begin, end in itertools.pairwise(self.blocks):
            assert by_key(batches[begin:end]) == by_key(plain[begin:end])

    def test_a_state_without_it_loads_and_one_with_it_where_it_is_not_used(self, tmp_path):
        """Between two blocks: the samples of the next one are the same."""
        urls, cache = self.write_data(tmp_path / "shards"), tmp_path / "cache"
        with (
            self.make(urls, cache_dir=cache) as extended,
            self.make(urls, is_extended=False, cache_dir=cache) as plain,
        ):
            batches = iter(extended)
            list(itertools.islice(batches, self.blocks[2] + 1))
            with pytest.raises(StateMismatch, match="within a block"):
                plain.load_state_dict(extended.state_dict())
            list(itertools.islice(batches, 1))
            plain_batches = iter(plain)
            list(itertools.islice(plain_batches, self.blocks[2]))
            with_it, without = extended.state_dict(), plain.state_dict()
            left = by_key(list(plain_batches))
            extended.load_state_dict(without)
            assert by_key(list(extended)) == left
            plain.load_state_dict(json.loads(json.dumps(with_it)))
            last = by_key(list(plain))
            assert last
            assert last == {key: left[key] for key in last}


def by_key(batches: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """The valid ids of each sample."""
    return {
        key: text[valid].tolist()
        for batch in batches
        for key, text, valid in zip(batch["__key__"], batch["text"], batch["text_valid"], strict=True)
    }


class AgreedLengthsContract(TestBuckets):
    """In a rank of two, each of which plans the blocks of its own group; torch.distributed joins them."""

    __test__ = False
    blocks = (0, 1, 2, 4, 6)
    asked = MappingProxyType({"bucketing": 40})
    kinds = (Bucketing, Buckets, AgreedLengths)
    options = MappingProxyType({**TestBuckets.options, "num_samples": 120})

    def __init__(self, rank: int, urls: str):
        self._rank, self._urls = rank, urls

    def write_data(self, folder: Path) -> str:
        """The shards of both ranks."""
        return self._urls

    def make(self, urls: Any, **layout: Any) -> Loader:
        """The loader of this rank, which is the only one of its process."""
        return super().make(urls, **{**layout, "groups": 2, "rank": self._rank, "world_size": 2})


def run_in_rank(rank: int, name: str, folder: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    getattr(AgreedLengthsContract(rank, str(folder / "shards")), name)(folder / str(rank))
    torch.distributed.barrier()  # a rank that ends while another still connects fails it
    torch.distributed.destroy_process_group()


class TestAgreedLengths:
    @pytest.mark.parametrize("name", [name for name in dir(AgreedLengthsContract) if name.startswith("test")])
    def test_in_two_ranks(self, name, tmp_path):
        write_shards(tmp_path / "shards", [20, 14, 16, 20], seed=5)
        torch.multiprocessing.start_processes(run_in_rank, (name, tmp_path), nprocs=2, start_method="fork")


class TestEqualCosts(TestBuckets):
    asked = MappingProxyType({"cost": "width"})
    kinds = (EqualCosts,)


class TestPackedCells(TestBuckets):
    blocks = (0, 1, 2, 4, 7)
    asked = MappingProxyType({"cost": "width", "max_tokens": 300})
    kinds = (PackedCells,)
    state_keys = ("blocks", "blocks_from", "cells", "table")

    def check_batches(self, batches: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> None:
        """Samples are as in other batches; how many a batch has is its own affair."""
        samples, rows = by_key(batches), by_key(plain)
        assert {key: rows[key] for key in samples if key in rows} == {
            key: ids for key, ids in samples.items() if key in rows
        }
        assert sum(len(batch["text"]) for batch in batches) == len(samples) > len(batches)

    def test_a_state_without_it_loads_and_one_with_it_where_it_is_not_used(self, tmp_path):
        """Between two epochs: within one, steps count cells or samples to its end."""
        urls, cache = self.write_data(tmp_path / "shards"), tmp_path / "cache"
        with (
            self.make(urls, cache_dir=cache) as extended,
            self.make(urls, is_extended=False, cache_dir=cache) as plain,
        ):
            for loader, other in ((extended, plain), (plain, extended)):
                next(iter(loader))
                with pytest.raises(StateMismatch, match="cells by budgets"):
                    other.load_state_dict(loader.state_dict())
                list(loader)
                other.load_state_dict(loader.state_dict())
                assert list(other)


class TestSizedImages(TestBuckets):
    asked = MappingProxyType({"sizes": [(16, 16), (24, 12), (12, 24)]})
    kinds = (SizedImages,)
    adds = ("original_size", "crop_top_left", "target_size")
    options = MappingProxyType({**TestBuckets.options, "preprocess": None})


class TestRetriedSteps(FeatureContract):
    """Its state has a key once a part ran out of memory (tests/batching/test_retry.py)."""

    asked = MappingProxyType({"microbatch": "auto"})
    kinds = (RetriedSteps,)

    @pytest.fixture(autouse=True)
    def simulated_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = Device(LIMIT // 50, 0, LIMIT / 40, 0, 0, 0, 1)
        monkeypatch.setattr("streamload.batching.microbatches.memory_of", lambda _: device)


class TestInFlight(FeatureContract):
    asked = MappingProxyType({"memory": {"text": 1000}})  # three batches of 10 rows of 4 ids
    kinds = (MemoryLimits, InFlight)
    layout = Layout(1, 2)


class Sums(nn.Module):
    """A module whose rows are stored."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images * self.weight


SUMS = Sums().eval()


class LoaderOfResults(Loader):
    """Its batches have what the module returns in place of FeatureRows."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield {**batch, "sums": batch["sums"].result()} if "sums" in batch else batch


class TestRowFeatures(FeatureContract):
    asked = MappingProxyType({"features": {"sums": SUMS}})
    kinds = (StoredFeatures, RowFeatures)
    adds = ("sums",)
    options = MappingProxyType({"seed": 3})

    @pytest.fixture(autouse=True)
    def rows_of_the_test(self, tmp_path, monkeypatch):
        monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "rows"))
        close_stores()
        yield
        close_stores()

    def make(self, urls: Any, **options: Any) -> Loader:
        return LoaderOfResults(super().make(urls, **options).options)

    def check_batches(self, batches: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> None:
        """Of the images themselves batches have none."""
        images = [expected.pop("image") for expected in plain]
        super().check_batches(batches, plain)
        for batch, image in zip(batches, images, strict=True):
            assert torch.equal(batch["sums"], 2 * image)


class TestPatchedImages(FeatureContract):
    asked = MappingProxyType({"patches": streamload.Patches(seq_lens=(4, 9))})
    kinds = (PatchedImages, PaddedRows, RowLengths)
    options = MappingProxyType({"preprocess": None})

    def check_batches(self, batches: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> None:
        assert {batch["image"]["seq_len"] for batch in batches} == {4, 9}
        images = [batch.pop("image") for batch in (*batches, *plain)]
        assert all(len(image["patches"]) == len(plain[0]["text"]) for image in images[: len(batches)])
        super().check_batches(batches, plain)


class TestLeftOutSamples(FeatureContract):
    """Of a file whose samples the data hasn't (tests/journal/test_leave_out.py has others)."""

    kinds = (LeftOutSamples,)
    state_keys = ("leave_out",)
    damaged = (
        3,
        {"a": 1},
        [3],
        [[0, "file", 1]],
        [[0, "file", 1, 3]],
        [[-1, "call", 1, "0"]],
        [[0, "x", 1, "0"]],
    )

    @pytest.fixture(autouse=True)
    def file_of_the_test(self, tmp_path):
        (tmp_path / "left_out").write_text("of no shard\n")
        self.asked = {"leave_out": tmp_path / "left_out"}

    def test_a_state_without_it_loads_and_one_with_it_where_it_is_not_used(self, tmp_path):
        """A run may begin to use it, and can't go on without it: the samples would come again."""
        urls, cache = self.write_data(tmp_path / "shards"), tmp_path / "cache"
        with (
            self.make(urls, cache_dir=cache) as extended,
            self.make(urls, is_extended=False, cache_dir=cache) as plain,
        ):
            for loader in (extended, plain):
                next(iter(loader))
            with pytest.raises(StateMismatch, match=r"give Shards\(leave_out=FILE\)"):
                plain.load_state_dict(extended.state_dict())
            for loader in (extended, plain):
                loader.load_state_dict(plain.state_dict())
            assert next(iter(extended))["__key__"] == next(iter(plain))["__key__"]


class TestDeviceDecoding(FeatureContract):
    """On the host its images are those of workers, to the bit."""

    asked = MappingProxyType({"decode": "device"})
    kinds = (DeviceDecoding,)
    ranks = 1  # the threads that decode in this process end with a fork
    state_keys = ("decoder",)
    options = MappingProxyType({"preprocess": None})


class TestRowsOfModalities(FeatureContract):
    asked = MappingProxyType({})
    kinds = (RowsOfModalities,)
    adds = ("image_rows", "text_rows")
    ranks = 1  # its values are places in the batch of a rank
    options = MappingProxyType({"num_samples": 50})

    def make(self, urls: Any, *, is_extended: bool = True, **options: Any) -> Loader:
        """Of two sources, of which the second has only texts with the extension."""
        modality = "text" if is_extended else "image-text"
        sources = [Source(urls, name="pairs"), Source(urls, name="texts", modality=modality)]
        return super().make(sources, is_extended=is_extended, **options)

    def check_batches(self, batches: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> None:
        for batch, expected in zip(batches, plain, strict=True):
            assert torch.equal(batch["text"], expected["text"])
            assert torch.equal(batch["image"], expected["image"][batch["image_rows"]])
            assert batch["__key__"] == expected["__key__"]
            assert 0 < len(batch["image"]) < len(batch["text"])

    def test_a_state_without_it_loads_and_one_with_it_where_it_is_not_used(self, tmp_path):
        """Neither does: which samples are used follows from the members that they need."""
        urls, cache = self.write_data(tmp_path / "shards"), tmp_path / "cache"
        with (
            self.make(urls, cache_dir=cache) as extended,
            self.make(urls, is_extended=False, cache_dir=cache) as plain,
        ):
            for loader, other in ((extended, plain), (plain, extended)):
                with pytest.raises(StateMismatch, match="another choice of image_key"):
                    loader.load_state_dict(other.state_dict())


class TestJournal(FeatureContract):
    kinds = (Journal, LeftOutSamples)
    state_keys = ("journal", "leave_out")
    damaged = ("x", 3, {"segment": "a"}, {"segment": "a", "step": "much"}, {"segment": "a", "step": -1})
    options = MappingProxyType({"num_samples": 50})

    @pytest.fixture(autouse=True)
    def folder_of_the_test(self, tmp_path):
        self.asked = {"journal": str(tmp_path / "journal")}


def noted(seen: Witnessed) -> None:
    assert all(row.key and row.url for row in seen.rows)


class TestWitness(FeatureContract):
    kinds = (Witness,)
    asked = MappingProxyType({"extensions": (Witness(noted),)})
    options = MappingProxyType({"num_samples": 50})


class TestPlanPublication(FeatureContract):
    kinds = (PlanPublication,)

    @pytest.fixture(autouse=True)
    def shared_cache_of_the_test(self, tmp_path):
        self.asked = {"shared_cache": str(tmp_path / "shared")}


def test_each_extension_of_streamload_runs_the_suite():
    classes = dict(
        found
        for path in Path(streamload.__file__).parent.rglob("*.py")
        if path.parent.name != "testing"
        for found in re.findall(r"^class (\w+)\((\w+)\):", path.read_text(), re.MULTILINE)
    )
    extensions = {name for name in classes if "Extension" in (classes[name], classes.get(classes[name]))}
    assert extensions == {kind.__name__ for suite in suites(FeatureContract) for kind in suite.kinds}


def suites(suite: type[FeatureContract]) -> list[type[FeatureContract]]:
    below = suite.__subclasses__()
    return [*below, *(deeper for each in below for deeper in suites(each))]


LIMITS = (1984, 2500, 3000, 3200, 3300, 3400)
"""Of bytes; the images have 981 to 3332."""


class LargeInWorker(WorkerPart):
    """Tells which images have more bytes than a limit, which events set."""

    def start_epoch(self) -> None:
        self._limit = 0

    def apply(self, event: Event) -> None:
        self._limit = event.value

    def finish(self, values: dict[str, Any], rows: BatchRows) -> bytes:
        are_large = np.empty(len(rows), np.bool_)
        for shard in rows.by_shard():
            are_large[shard.places] = shard.facts(["image_bytes"])["image_bytes"] > self._limit
        return are_large.tobytes()


class LargeInRank(RankPart):
    """Sets limits: from the first batch on, and a higher one after the second."""

    def __init__(self, run: Run):
        self._run = run
        self._count = 0
        self._events: list[Event] = []

    def start_epoch(self, start: int) -> Sequence[Event]:
        if not start:
            self._events = [event._replace(position=0) for event in self._events[-1:]]
        return self._events

    def yielded(self, part: bytes, values: Mapping[str, Any]) -> dict[str, Any]:
        self._are_large = np.frombuffer(part, np.bool_)
        self._count += int(self._are_large.sum())
        if self._count >= 10 * (1 + len(self._events)):
            self._events.append(self._run.send(LIMITS[len(self._events)]))
        return {}

    def values(self, info: Any) -> dict[str, Any]:
        return {"is_large": torch.from_numpy(self._are_large.copy())}

    def state(self, position: int) -> dict[str, Any]:
        return {"large": {"count": self._count, "events": [list(event) for event in self._events]}}

    def load(self, state: Mapping[str, Any]) -> None:
        try:
            saved = state.get("large", {"count": 0, "events": []})
            count, events = int(saved["count"]), [Event(*event) for event in saved["events"]]
        except (TypeError, ValueError, KeyError):
            raise StateMismatch("not the state of large images") from None
        self._count, self._events = count, events


@dataclass(frozen=True)
class Large(Extension):
    name = "large"

    def in_worker(self, process: WorkerProcess) -> LargeInWorker:
        return LargeInWorker()

    def in_rank(self, run: Run) -> LargeInRank:
        return LargeInRank(run)


class TestEventsInMidEpoch(ExtensionContract):
    extension = Large()
    ranks = 1  # it goes by the images of its own rank
    adds = ("is_large",)
    state_keys = ("large",)
    damaged = (3, {"count": 1}, {"count": 1, "events": [1]})
    layout = Layout(1, 1)  # its worker is ahead of the batches that were yielded
    layouts = (Layout(1, 1),)

    def test_an_event_holds_from_its_step_on_in_a_worker_that_is_ahead(self, tmp_path):
        urls = self.write_data(tmp_path / "shards")
        sizes = {
            key: len(members["jpg"])
            for path in Path(urls).glob("*.tar")
            for key, members in read_oracle(path)
        }
        with self.make(urls, cache_dir=tmp_path / "cache", num_workers=1) as loader:
            batches = list(loader)
            events = [Event(*event) for event in loader.state_dict()["large"]["events"]]
        positions = [event.position for event in events]
        assert len(set(positions)) > 1
        assert positions == sorted(positions)
        assert 10 < positions[0] < 50  # not at once: the worker was ahead
        for step, batch in enumerate(batches):
            limit = max([event.value for event in events if event.position <= 10 * step], default=0)
            assert batch["is_large"].tolist() == [sizes[key] > limit for key in batch["__key__"]]


@dataclass(frozen=True)
class EachOther(Extension):
    """Leaves out each other sample."""

    name = "each_other"

    def keep(self, entry: Entry) -> bool:
        return int(entry.key) % 2 == 0


def is_of_first_shard(entry: Entry) -> bool:
    return entry.key < "00001"


def test_an_extension_leaves_out_samples_beside_the_users_function(tmp_path):
    write_shards(tmp_path / "shards", [20, 14], seed=5)

    def keys(*extensions: Extension, **shards: Any) -> set[str]:
        with streamload.make_loader(
            str(tmp_path / "shards"),
            batch_size=5,
            num_workers=2,
            train=False,
            output="dict",
            cache_dir=tmp_path / "cache",
            shards=streamload.Shards(**shards),
            batches=streamload.Batches(with_keys=True, extensions=extensions),
        ) as loader:
            return {key for batch in loader for key in batch["__key__"]}

    everything, first = keys(), keys(keep=is_of_first_shard)
    assert 0 < len(first) < len(everything)
    assert keys(EachOther()) == {key for key in everything if int(key) % 2 == 0}
    assert keys(EachOther(), keep=is_of_first_shard) == {key for key in first if int(key) % 2 == 0}


class CountedInRank(RankPart):
    """Counts rows from the first epoch's start on."""

    def __init__(self, by: int):
        self._by = by
        self._rows = 0

    def start_epoch(self, start: int) -> list[Event]:
        self._batches = 0
        return []

    def yielded(self, part: bytes, values: dict[str, Any]) -> Mapping[str, Any]:
        self._batches += 1
        self._rows += self._by * len(values["image"])
        return {}

    def metrics(self) -> Mapping[str, float]:
        return {"batches": self._batches}

    def state(self, position: int) -> Mapping[str, Any]:
        return {"counted": self._rows}

    def load(self, state: Mapping[str, Any]) -> None:
        self._rows = state.get("counted", 0)


@dataclass(frozen=True)
class Counted(Extension):
    """Is made anew with each run, from one that doesn't count as unlike it, nor can be compared."""

    by: int = field(default=0, compare=False)
    table: Any = None

    name = "counted"

    def in_run(self, options: Any, config: Any, plain: Any) -> Extension:
        return replace(self, by=1)

    def in_rank(self, run: Run) -> RankPart | None:
        return CountedInRank(self.by)


@dataclass(frozen=True)
class AlsoCounted(Counted):
    name = "also_counted"

    def in_rank(self, run: Run) -> None:
        return None


def test_a_part_made_anew_for_a_run_goes_on_with_its_state(tmp_path, caplog):
    write_shards(tmp_path / "shards", [40])
    array = np.arange(3)

    def new_loader() -> Loader:
        return streamload.make_loader(
            str(tmp_path / "shards"),
            batch_size=5,
            num_workers=0,
            output="dict",
            cache_dir=tmp_path / "cache",
            batches=streamload.Batches(
                extensions=[Counted(table=array), AlsoCounted(table=array), EachOther()]
            ),
        )

    with new_loader() as loader:
        batches = iter(loader)
        next(batches)
        next(batches)
        state = loader.state_dict()
    with new_loader() as resumed:
        resumed.load_state_dict(state)
        next(iter(resumed))
        counted = [state["counted"], resumed.state_dict()["counted"]]
        resumed.close()
        next(iter(resumed))
        counted.append(resumed.state_dict()["counted"])
    assert counted == [10, 15, 20]
    assert "counted" not in caplog.text


def test_what_keep_cannot_be_is_refused():
    class Three(Extension):
        name = "three"
        keep = 3

    with pytest.raises(OptionError, match="keep of the extension 'three' is 3"):
        streamload.make_loader("shards", batches=streamload.Batches(extensions=[Three()]))


class NamelessExtension(Extension):
    """Has everything but a name."""


@pytest.mark.parametrize(
    ("extensions", "says"),
    [
        ([NamelessExtension()], "has no name: give its class one"),
        (EachOther(), "expected a list: put it in brackets"),
    ],
)
def test_what_extensions_cannot_be_is_refused(extensions: Any, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        streamload.make_loader("shards", batches=streamload.Batches(extensions=extensions))


class ReturningInRank(RankPart):
    """Returns what its extension says from `yielded`, and adds one value."""

    def __init__(self, fields: Any) -> None:
        self._fields = fields

    def yielded(self, part: bytes, values: dict[str, Any]) -> Any:
        return self._fields

    def values(self, info: Any) -> dict[str, Any]:
        return {"extra": torch.zeros(info.rows)}


@dataclass(frozen=True)
class Returning(Extension):
    fields: Any
    name = "returning"

    def in_rank(self, run: Run) -> ReturningInRank:
        return ReturningInRank(self.fields)


class AlsoReturning(Returning):
    name = "also_returning"


@pytest.mark.parametrize(
    ("extensions", "says"),
    [
        ([Returning(None)], "yielded.. of the extension 'returning' returned None"),
        (
            [Returning({"aspect": 1})],
            r"returned {'aspect': 1}; expected {}.*values of batches go into values",
        ),
        ([Returning({}), AlsoReturning({})], r"'also_returning' and one before it both add \['extra'\]"),
    ],
)
def test_mistakes_in_a_rank_part_name_the_extension(tmp_path: Path, extensions: Any, says: str) -> None:
    write_shards(tmp_path / "shards", [8])
    with (
        flat.make_loader(
            str(tmp_path / "shards"),
            batch_size=4,
            num_workers=0,
            extensions=extensions,
            cache_dir=tmp_path / "c",
        ) as loader,
        pytest.raises(OptionError, match=says),
    ):
        next(iter(loader))


def test_the_fields_that_yielded_may_return_are_those_of_the_info() -> None:
    """All but those that the loader itself gives, and the widths, which microbatches take."""
    taken = set(inspect.signature(BatchInfo).parameters)
    assert taken - INFO_FIELDS == {"yielded", "sources", "seats", "shapes", "device"}
    assert INFO_FIELDS - taken == {"widths"}


class NewCaptions(EachOther):
    """Leaves out a caption that is as long as that of the sample before: what `keep` must not do."""

    before: ClassVar[list[int]] = []

    def keep(self, entry: Entry) -> bool:
        self.before.append(entry.number)
        return len(self.before) % 3 > 0


def test_the_suite_finds_a_keep_that_remembers(tmp_path: Path) -> None:
    class Suite(ExtensionContract):
        extension = NewCaptions()

    with pytest.raises(AssertionError, match="at its first call"):
        Suite().test_what_it_keeps_depends_on_the_sample_alone(tmp_path)


class Listing(Extension):
    """Lists five steps of 7 and of 3 rows for each epoch."""

    name = "listing"
    listed_steps = StepTable(((0, 7), (0, 3)), 5, 0)


class ImageMaking(Extension):
    name = "image_making"
    takes_preprocess = True


@pytest.mark.parametrize(
    ("extension", "options", "says"),
    [
        (
            Listing(),
            {"patches": streamload.Patches(seq_lens=(4, 9), steps=[(4, 5), (9, 2)])},
            "patches and listing both list the steps of an epoch: leave one out",
        ),
        (Listing(), {"num_batches": 4}, "num_batches=4, and an extension lists 5 steps for each epoch"),
        (ImageMaking(), {"decode": "device"}, "the extension 'image_making' can't be used with Images"),
        (EachOther(), {"batch_size": None}, "batch_size=None: batches are made here"),
    ],
)
def test_options_that_an_extension_can_not_be_used_with_fail(extension, options, says):
    with pytest.raises(OptionError, match=says):
        flat.make_loader("shards", extensions=[extension], **options)


@pytest.mark.parametrize("options", [{}, {"num_batches": 5}, {"batch_size": None}])
def test_an_extension_that_lists_steps_says_their_number_and_rows(options):
    loader = flat.make_loader("shards", extensions=[Listing()], **options)
    assert loader.num_batches == 5
    assert loader.batch_size == 7


class FailingInRank(RankPart):
    """Has a number, until there is nothing to divide by."""

    rows: ClassVar[int] = 1

    def metrics(self) -> Mapping[str, float]:
        return {"share": 1 / self.rows}


class Failing(Extension):
    name = "failing"

    def in_rank(self, run: Run) -> FailingInRank:
        return FailingInRank()


def test_an_error_in_metrics_is_logged_once_and_the_page_goes_on_without_them(tmp_path, caplog, monkeypatch):
    write_shards(tmp_path / "shards", [20])
    with streamload.make_loader(
        str(tmp_path / "shards"),
        batch_size=5,
        num_workers=0,
        cache_dir=tmp_path / "cache",
        batches=streamload.Batches(extensions=[Failing()]),
    ) as loader:
        batches = iter(loader)
        next(batches)
        before = exposition([loader.observer.page()])
        monkeypatch.setattr(FailingInRank, "rows", 0)
        loader.observer.tick(is_due=True)  # as next() does
        after = exposition([loader.observer.page()])
        assert len(list(batches)) == 3
    assert 'name="failing.share"' in before
    assert 'name="failing.share"' not in after
    assert "streamload_samples_total" in after
    (failure,) = [record for record in caplog.records if "'failing'" in record.getMessage()]
    assert failure.exc_info[0] is ZeroDivisionError


class EvenInWorker(WorkerPart):
    def excludes(self, sample: Sample) -> bool:
        return int(sample.key[-1]) % 2 == 1


class Even(Extension):
    name = "even"

    def in_worker(self, process: WorkerProcess) -> EvenInWorker:
        return EvenInWorker()


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_a_part_excludes_are_replaced_in_a_training_and_skipped_in_an_evaluation(
    workers: int, tmp_path: Path
) -> None:
    write_shards(tmp_path / "shards", [20, 15])
    keys = {}
    for train in (True, False):
        for extensions in ([], [Even()]):
            with flat.make_loader(
                str(tmp_path / "shards"),
                batch_size=5,
                num_workers=workers,
                cache_dir=tmp_path / "cache",
                train=train,
                output="dict",
                with_keys=True,
                extensions=extensions,
            ) as loader:
                keys[train, len(extensions)] = [key for batch in loader for key in batch["__key__"]]
                counted, skipped = loader.stats(), loader.skipped
    assert (counted.samples_skipped["left_out"], skipped) == (17, [])
    assert keys[False, 1] == [key for key in keys[False, 0] if int(key[-1]) % 2 == 0]
    for key, plain in zip(keys[True, 1], keys[True, 0], strict=True):
        assert int(key[-1]) % 2 == 0
        assert key == plain or int(plain[-1]) % 2 == 1
