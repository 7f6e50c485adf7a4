"""Shards(join=…): a run has the batches of one whose shards have the rows in a JSON member."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import random
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

import streamload
from streamload import Join
from streamload.errors import NoValidSamples, OptionError, SampleError, StateMismatch
from streamload.testing.server import ShardServer
from streamload.testing.shards import read_oracle, write_shards
from tests.support import flat
from tests.support.turns import third

Row = dict[str, Any]
COUNTS = [13, 9, 14]
FORMATS = ("parquet", "npz", "csv", "jsonl")
BATCH = 4


def write_file(path: Path, rows: Sequence[Row]) -> Path:
    """Write rows in the format that the name says."""
    names = list(rows[0])
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".npz":
        np.savez(path, **{name: np.array([row[name] for row in rows]) for name in names})
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, names)
            table.writeheader()
            table.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_tar(path: Path, samples: Sequence[tuple[str, Mapping[str, bytes]]]) -> None:
    with tarfile.open(path, "w") as tar:
        for key, members in samples:
            for extension, payload in members.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(payload)
                tar.addfile(info, io.BytesIO(payload))


class Data(NamedTuple):
    """Shards, files of rows for some of their samples, and twins of the shards that have these."""

    shards: str
    twins: str
    folder: Path
    rows: Mapping[str, Row]  # by sample key


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[Data]:
    """Of three shares of samples without a row; in the second, some captions are null."""
    root = tmp_path_factory.mktemp("joined")
    paths = write_shards(root / "shards", COUNTS, seed=3)
    samples = {path: read_oracle(path) for path in paths}
    for path, of_shard in samples.items():
        for place, (_, members) in enumerate(of_shard):
            if place % 3 == 2:
                del members["txt"]
        write_tar(path, of_shard)
    return [_data(root, paths, samples, which) for which in range(3)]


def _data(root: Path, paths: Sequence[Path], samples: Mapping[Path, Any], which: int) -> Data:
    rng, folder = random.Random(which), root / str(which)
    folder.mkdir()
    rows: dict[str, Row] = {}
    for path in paths:
        twins = []
        for key, members in samples[path]:
            place = len(rows)
            caption = None if which == 1 and place % 5 == 4 else f"caption {place}, “{key}”,\nof {which}"
            row = {"caption": caption, "label": rng.randrange(1000), "score": place / 10}
            has_row = rng.random() >= (0, 0.3, 0.7)[which]
            if has_row:
                rows[key] = {**row, "digest": json.loads(members["json"])["digest"], "key": key}
            twins.append((key, {**members, **({"row.json": json.dumps(row).encode()} if has_row else {})}))
        (folder / "twins").mkdir(exist_ok=True)
        write_tar(folder / "twins" / path.name, twins)
    mixed = list(rows.values())
    mixed += [{**row, "key": f"other {row['key']}", "digest": f"other {row['key']}"} for row in mixed[:5]]
    rng.shuffle(mixed)
    for suffix in FORMATS:
        if which != 1 or suffix in ("parquet", "jsonl"):  # the others have no null
            write_file(folder / f"rows.{suffix}", mixed)
    return Data(str(root / "shards"), str(folder / "twins"), folder, rows)


def size(image: Any) -> torch.Tensor:
    return torch.tensor([float(side) for side in image.size])


def of_row(sample: dict[str, Any]) -> Row:
    row = json.loads(sample["joined" if "joined" in sample else "row.json"])
    return {"caption": str(row["caption"]), "label": int(row["label"]), "bytes": len(sample["jpg"])}


def above(entry: streamload.Entry) -> bool:
    return entry.facts["score"] > 0.4


def has_row(entry: streamload.Entry) -> bool:
    return "row.json" in entry.sizes


def tokenized(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[len(caption), *caption.encode()[8:11].ljust(3)] for caption in captions])


class Case(NamedTuple):
    """A random configuration."""

    which: int
    suffix: str
    on: str
    options: dict[str, Any]
    ranks: tuple[int, int]  # of the run, and of the resumed one
    workers: tuple[int, int]
    cut: int


def case_of(seed: int) -> Case:
    rng = random.Random(seed)
    which = rng.randrange(3)
    suffix = FORMATS[seed % 4] if which != 1 else ("parquet", "jsonl")[seed % 2]
    options: dict[str, Any] = {"seed": seed, "train": rng.random() < 0.7}
    if rng.random() < 0.2:
        options |= {"map_sample": of_row}
    else:
        options |= {"text_key": rng.choice(("joined:caption", "joined:caption", "joined:caption;txt"))}
        options |= {"preprocess": size, "tokenizer": rng.choice((None, tokenized))}
        if rng.random() < 0.4:
            options |= {"label_key": "joined:label"}
        if which != 1 and rng.random() < 0.3:
            options |= {"facts": {"score": "joined:score"}, "keep": above}
    if options["train"]:
        options |= {"shuffle": rng.choice((0, 7, 100)), "num_batches": rng.choice((None, None, 6))}
    workers = (0, 2) if seed % 8 == 0 else (0, 0)
    ranks = (rng.choice((1, 2)), rng.choice((1, 2))) if options["train"] else (1, 1)
    return Case(which, suffix, rng.choice(("key", "json:digest")), options, ranks, workers, rng.randrange(3))


def batches_of(
    loaders: Sequence[streamload.Loader], states: list[list[Any]] | None = None
) -> Iterator[dict[str, list[Any]]]:
    """The global batches of ranks in this process."""
    for parts in itertools.zip_longest(*loaders):
        joined: dict[str, list[Any]] = {}
        for part in parts:
            for name, rows in part.items():
                joined.setdefault(name, []).extend(rows.tolist() if isinstance(rows, torch.Tensor) else rows)
        del joined["__url__"]
        if states is not None:
            states.append([loader.state_dict() for loader in loaders])
        yield joined


def make(urls: str, cache: Path, ranks: int, workers: int, **options: Any) -> list[streamload.Loader]:
    defaults = {
        "output": "dict",
        "with_keys": True,
        "groups": 1,
        "cache_size": "1GB",
        "max_bad_samples": None,
    }
    if not options.get("train", True):
        del defaults["groups"]
    return [
        flat.make_loader(
            urls,
            batch_size=BATCH // ranks,
            num_workers=workers,
            cache_dir=cache,
            rank=rank,
            world_size=ranks,
            **{**defaults, **options},
        )
        for rank in range(ranks)
    ]


def check(data: Sequence[Data], tmp_path: Path, case: Case) -> int:
    """Compare a run, and one that goes on after a state of it, with the twin's; returns the samples."""
    of_data, options = data[case.which], dict(case.options)
    twin = dict(options)
    for name in ("text_key", "label_key"):
        if name in twin:
            twin[name] = twin[name].replace("joined:", "row.json:")
    if "facts" in twin:
        twin["facts"] = {"score": "row.json:score"}
        if ";" in twin["text_key"]:
            options.pop("keep"), options.pop("facts"), twin.pop("keep"), twin.pop("facts")
    if "map_sample" in twin:
        twin |= {"keep": has_row}
    expected = list(batches_of(make(of_data.twins, tmp_path / "twin", 1, 0, **twin)))
    join: Any = of_data.folder / f"rows.{case.suffix}"
    columns = ("score", "caption", "label") if case.cut else None
    options |= {"join": join if case.on == "key" and columns is None else Join(join, case.on, columns)}
    states: list[list[Any]] = []
    first = make(of_data.shards, tmp_path / "joined", case.ranks[0], case.workers[0], **options)
    assert list(batches_of(first, states)) == expected
    cut = min(case.cut, len(states) - 1)
    resumed = make(of_data.shards, tmp_path / "joined", case.ranks[1], case.workers[1], **options)
    for loader in resumed:
        loader.load_state_dict(json.loads(json.dumps(states[cut])))
    if cut < len(states) - 1:
        assert list(batches_of(resumed)) == expected[cut + 1 :]
    for loader in (*first, *resumed):
        loader.close()
    return sum(len(batch["__key__"]) for batch in expected)


def check_group(data: Sequence[Data], tmp_path: Path, seeds: range) -> None:
    assert min(check(data, tmp_path / str(seed), case_of(seed)) for seed in seeds) > 0


def test_batches_are_those_of_shards_that_have_the_rows(data, tmp_path):
    check_group(data, tmp_path, range(12))


@pytest.mark.deep
@pytest.mark.parametrize("first", third(range(12, 348, 14)))
def test_more_batches_are_those_of_shards_that_have_the_rows(data, tmp_path, first):
    check_group(data, tmp_path, range(first, first + 14))


def run(data: Data, tmp_path: Path, join: Any, **options: Any) -> tuple[list[str], Any]:
    """The captions of an evaluation, and its counters."""
    defaults = {"train": False, "text_key": "joined:caption", "preprocess": size, "join": join}
    (loader,) = make(data.shards, tmp_path / "cache", 1, 0, **{**defaults, **options})
    with loader:
        captions = [caption for batch in loader for caption in batch["text"]]
        return captions, loader.stats()


def test_samples_without_a_row_are_counted_or_an_error(data, tmp_path):
    for on in ("key", "json:digest"):
        join = Join(data[2].folder / "rows.csv", on)
        captions, stats = run(data[2], tmp_path, join)
        assert sorted(captions) == sorted(row["caption"] for row in data[2].rows.values())
        assert stats.samples_left_out == {"join": sum(COUNTS) - len(captions)}
        assert stats.samples_skipped["missing"] == 0
        with pytest.raises(SampleError, match=r"has no row in join='.*rows\.csv'"):
            run(data[2], tmp_path, join, on_error="raise")
    assert (
        run(data[0], tmp_path, data[0].folder / "rows.npz", on_error="raise")[1].samples_left_out["join"] == 0
    )
    numbers = write_file(tmp_path / "other.jsonl", [{"key": "x", "caption": "y"}])
    with pytest.raises(NoValidSamples, match="join and keep"):
        run(data[0], tmp_path, numbers)


def test_captions_that_are_no_text_are_counted_as_of_json(data, tmp_path):
    rows = [
        {**row, "caption": 7 if place % 2 else row["caption"]}
        for place, row in enumerate(data[0].rows.values())
    ]
    captions, stats = run(data[0], tmp_path, write_file(tmp_path / "rows.jsonl", rows))
    assert captions == [row["caption"] for row in rows[::2]]
    assert stats.samples_skipped["caption"] == len(rows) // 2


def test_a_changed_file_is_read_anew_and_a_resume_with_it_is_told(data, tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    rows = [*data[0].rows.values()]

    def loader(**options: Any) -> streamload.Loader:
        options = {"text_key": "joined:caption", "preprocess": size, "join": path, **options}
        return make(data[0].shards, tmp_path / "cache", 1, 0, **options)[0]

    def cut() -> dict[str, Any]:
        with loader() as first:
            next(iter(first))
            return json.loads(json.dumps(first.state_dict()))

    write_file(path, rows)
    state = cut()
    write_file(path, [{**row, "caption": f"new {row['caption']}"} for row in rows])
    with loader() as resumed:
        resumed.load_state_dict(state)
        assert "join was" in caplog.text
        assert all(caption.startswith("new ") for batch in resumed for caption in batch["text"])
    with loader(strict=True) as resumed, pytest.raises(StateMismatch, match="join was"):
        resumed.load_state_dict(state)
    write_file(path, rows[:-1])
    with loader() as resumed, pytest.raises(StateMismatch, match="join=key"):
        resumed.load_state_dict(state)
    with loader(join=None, text_key="json:digest") as resumed, pytest.raises(StateMismatch):
        resumed.load_state_dict(state)
    write_file(path, rows)
    os.utime(path, ns=(1, 1))
    caplog.clear()
    with loader(strict=True) as resumed:  # the same rows at another time
        resumed.load_state_dict(state)
    assert not caplog.text


def test_uids_of_a_list_may_be_in_rows(data, tmp_path):
    keys = sorted(data[0].rows)
    rows = [{**row, "uid": f"{place:032x}"} for place, row in enumerate(data[0].rows.values())]
    np.save(tmp_path / "uids.npy", np.array([row["uid"] for row in rows[::3]]))
    options = {"keep": tmp_path / "uids.npy", "keep_key": "joined:uid"}
    captions, stats = run(data[0], tmp_path, write_file(tmp_path / "rows.jsonl", rows), **options)
    assert captions == [row["caption"] for row in rows[::3]]
    assert stats.samples_left_out == {"keep": len(keys) - len(captions), "join": 0}
    with pytest.raises(OptionError, match="no column 'uid'"):
        run(data[0], tmp_path, data[0].folder / "rows.csv", **options)
    with pytest.raises(OptionError, match="keep_key='joined:uid' needs the file"):
        run(data[0], tmp_path, None, **options | {"text_key": "txt"})


@pytest.mark.parametrize("is_other_tokenizer", [False, True])
def test_steps_that_are_planned_by_captions_go_on_with_the_same_ones(data, tmp_path, is_other_tokenizer):
    """Within a block, others would be planned into other steps: samples would be lost, and come twice."""
    within = "within a block of bucketing=, cost= or sizes=, .* the same of them, captions, tokenizer"
    path = tmp_path / "rows.jsonl"

    def loader(length: int, is_new: bool) -> streamload.Loader:
        rows = [
            {**row, "caption": "x" * ((place * length) % 11 + 1)}
            for place, row in enumerate(data[0].rows.values())
        ]
        write_file(path, rows)
        tokenizer = Spelled(4 if is_new and is_other_tokenizer else 11)
        options = {"text_key": "joined:caption", "preprocess": size, "join": path, "tokenizer": tokenizer}
        return make(data[0].shards, tmp_path, 1, 0, bucketing=16, text_padding="longest", **options)[0]

    with loader(3, is_new=False) as first:
        rows, states = [], []
        for batch in first:
            rows += batch["__key__"]
            states.append(json.loads(json.dumps(first.state_dict())))
    refused = 0
    for cut, state in enumerate(states[:-1], 1):
        with loader(3 if is_other_tokenizer else 5, is_new=True) as resumed:
            try:
                resumed.load_state_dict(state)
            except StateMismatch as exc:
                refused += re.search(within, str(exc)) is not None
            else:
                later = [key for batch in resumed for key in batch["__key__"]]
                assert len({*rows[: cut * BATCH], *later}) == len(rows[: cut * BATCH]) + len(later)
    assert 0 < refused < len(states) - 1
    with loader(3, is_new=False) as resumed:
        resumed.load_state_dict(states[4])
        assert [key for batch in resumed for key in batch["__key__"]] == rows[5 * BATCH :]


class Both(torch.nn.Module):
    def forward(self, sample: dict[str, torch.Tensor]) -> torch.Tensor:
        return sample["image"] + sample["text"].sum(1, keepdim=True)


class Texts(torch.nn.Module):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.float() * 2


class Images(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images / 2


def spelled(captions: list[str]) -> torch.Tensor:
    return torch.tensor([list(caption.encode()[:12].ljust(12, b"\0")) for caption in captions])


class Spelled:
    """A tokenizer of a length."""

    pad_token_id = 0

    def __init__(self, length: int):
        self.length = length

    def __call__(self, captions: list[str]) -> torch.Tensor:
        ids = [list(caption.encode()[: self.length]) for caption in captions]
        return torch.tensor([row + [0] * (self.length - len(row)) for row in ids])


def scored(sample: dict[str, Any]) -> float:
    return json.loads(sample["joined"])["score"]


def scored_twice(sample: dict[str, Any]) -> tuple[float, float]:
    return 2 * scored(sample), 3 * scored(sample)


@pytest.mark.parametrize(("on", "are_local"), [("key", True), ("key", False), ("json:digest", False)])
def test_rows_of_features_and_facts_are_never_those_of_a_file_before(data, tmp_path, on, are_local):
    """Local shards have no checksums in their indexes. What doesn't read the file isn't made again."""
    path, stored = tmp_path / "rows.jsonl", []
    with ShardServer(data[0].shards) as server:
        for prefix in ("a", "other b", "a"):
            rows = {
                key: {**row, "caption": f"{prefix} {place}", "score": place * len(prefix)}
                for place, (key, row) in enumerate(data[0].rows.items())
            }
            write_file(path, [*rows.values()])
            facts: dict[str, Mapping[str, float]] = {}
            both = streamload.Features(Both(), inputs="sample", images=True)
            texts = streamload.Features(Texts(), inputs="text")
            images = streamload.Features(Images())
            (loader,) = make(
                data[0].shards if are_local else f"{server.url}/{{00000..00002}}.tar",
                *(tmp_path / "cache", 1, 0),
                join=Join(path, on),
                text_key="joined:caption",
                tokenizer=spelled,
                preprocess=size,
                features={"b": both, "t": texts, "i": images},
                facts={
                    "score": "joined:score",
                    "tokens": "tokens",
                    "called": (scored, "1"),
                    ("double", "triple"): (scored_twice, "1"),
                },
                keep=lambda entry, facts=facts: bool(facts.setdefault(entry.key, entry.facts)),
                train=False,
            )
            with loader:
                for batch in itertools.chain(loader, loader):
                    captions = [rows[key]["caption"] for key in batch["__key__"]]
                    assert torch.equal(batch["text"], spelled(captions))
                    assert torch.equal(texts(batch), 2.0 * batch["text"])
                    assert torch.equal(images(batch), batch["image"] / 2)
                    assert torch.equal(both(batch), batch["image"] + batch["text"].sum(1, keepdim=True))
                stored.append(loader.stats().feature_rows_stored)
            assert facts.keys() == rows.keys()
            for key, row in rows.items():
                assert facts[key]["score"] == facts[key]["called"] == row["score"]
                assert (facts[key]["double"], facts[key]["triple"]) == (2 * row["score"], 3 * row["score"])
                assert facts[key]["tokens"] == min(12, len(row["caption"]))
    assert stored == [3 * sum(COUNTS), 2 * sum(COUNTS), 0]


def test_the_json_member_of_a_large_sample_is_read(tmp_path):
    (path,) = write_shards(tmp_path / "shards", [1])
    ((key, members),) = read_oracle(path)
    write_tar(path, [(key, {**members, "bin": bytes(65 << 20)})])
    rows = [{"digest": json.loads(members["json"])["digest"], "caption": "new"}]
    join = Join(write_file(tmp_path / "rows.jsonl", rows), "json:digest")
    (loader,) = make(
        str(path), tmp_path, 1, 0, text_key="joined:caption", join=join, preprocess=size, train=False
    )
    with loader:
        assert [caption for batch in loader for caption in batch["text"]] == ["new"]


def test_what_cant_be_used_is_refused(data, tmp_path):
    path = data[0].folder / "rows.csv"
    for match, options in {
        "needs the file": lambda: {"text_key": "joined:caption"},
        "fact 'joined:score' needs": lambda: {"facts": {"score": "joined:score"}},
        "can't be in a joined row": lambda: {"image_key": "joined:image", "join": path},
        "ends in one of": lambda: {"join": tmp_path / "rows.txt"},
        "json:<field>": lambda: {"join": Join(path, "txt")},
        "no column caption2; it has": lambda: {"join": Join(path, columns=["caption2"])},
        "json:digest;json:index'; expected": lambda: {"join": Join(path, "json:digest;json:index")},
        'on=.joined:caption.; expected "key"': lambda: {"join": Join(path, "joined:caption")},
        "'joined:capton;txt': .* no column 'capton'; it has 'caption,": lambda: {
            "join": path,
            "text_key": "joined:capton;txt",
        },
        "'joined:scor': .* no column 'scor'": lambda: {"join": path, "facts": {"s": "joined:scor"}},
        "no column absent; it has": lambda: {"join": Join(path, "json:absent")},
        "list of column names": lambda: {"join": Join(path, columns="caption")},
    }.items():
        with pytest.raises(OptionError, match=match):
            flat.make_loader(data[0].shards, cache_dir=tmp_path, **options())
    with pytest.raises(FileNotFoundError):
        flat.make_loader(data[0].shards, cache_dir=tmp_path, join=tmp_path / "absent.csv")
