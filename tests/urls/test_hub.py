"""Repositories and buckets of the Hugging Face Hub in place of a list of shards, with its own library."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import streamload
from streamload.errors import OriginDenied, OriginNotFound, OriginUnavailable, UrlError
from streamload.testing.shards import read_oracle, write_shards
from streamload.urls import expand_urls
from tests.support.hub import Hub, serving

TARS = {f"train/{number:03d}.tar": b"" for number in range(12)}
MODULE = [sys.executable, "-m", "streamload"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_shards(tmp_path_factory.mktemp("shards"), [8, 8], seed=2)


@pytest.fixture
def hub(shards: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    data = {f"data/{path.name}": path.read_bytes() for path in shards}
    root = {f"in1k-train-{number}.tar": b"" for number in range(7)}
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no token"))
    with serving(
        {
            "datasets/org/plain": {**TARS, "README.md": b"", "train/sizes.json": b"{}"},
            "datasets/org/packed": {"b.tar.gz": b"", "a.tgz": b"", "notes.txt": b""},
            "datasets/org/tables": {**{f"data/{n}.parquet": b"" for n in range(6)}, "README.md": b""},
            "datasets/org/folders": {**TARS, "val/0.tar": b"", "extra/0.tar": b""},
            "datasets/org/names": {**root, "in1k-validation-0.tar": b"", "README.md": b""},
            "datasets/org/data": data,
            "datasets/org/gated": data,
            "datasets/org/private": data,
            "buckets/org/bucket": {**data, "database/0.tar": b""},
            "models/org/model": {"features.tar": b""},
        }
    ) as running:
        running.gated, running.private = {"datasets/org/gated"}, {"datasets/org/private"}
        yield running


def listed(hub: Hub, url: Any, **options: str) -> list[str]:
    return list(expand_urls(url, {"endpoint": hub.url, **options}))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("hf://datasets/org/plain", [f"hf://datasets/org/plain/{path}" for path in TARS]),
        ("hf://datasets/org/plain/", [f"hf://datasets/org/plain/{path}" for path in TARS]),
        ("hf://datasets/org/plain/train", [f"hf://datasets/org/plain/{path}" for path in TARS]),
        ("hf://datasets/org/plain@main", [f"hf://datasets/org/plain@main/{path}" for path in TARS]),
        (
            "hf://datasets/org/plain/train/00[0-2].tar",
            [f"hf://datasets/org/plain/train/00{n}.tar" for n in "012"],
        ),
        (
            "hf://datasets/org/plain/**/*1.tar",
            [f"hf://datasets/org/plain/train/{n}.tar" for n in ("001", "011")],
        ),
        ("hf://datasets/org/packed", [f"hf://datasets/org/packed/{name}" for name in ("a.tgz", "b.tar.gz")]),
        (
            "hf://datasets/org/folders/{val,extra}",
            [f"hf://datasets/org/folders/{n}/0.tar" for n in ("val", "extra")],
        ),
        (
            "hf://datasets/org/names/*train*.tar",
            [f"hf://datasets/org/names/in1k-train-{n}.tar" for n in range(7)],
        ),
        ("hf://buckets/org/bucket/data", [f"hf://buckets/org/bucket/data/0000{n}.tar" for n in "01"]),
        ("hf://org/model", ["hf://org/model/features.tar"]),
        (
            "hf://org/model::hf://datasets/org/packed/a.tgz",
            ["hf://org/model/features.tar", "hf://datasets/org/packed/a.tgz"],
        ),
        ("hf://datasets/org/plain/README.md", ["hf://datasets/org/plain/README.md"]),
    ],
)
def test_a_place_on_the_hub_stands_for_its_tars(hub: Hub, url: str, expected: list[str]) -> None:
    assert listed(hub, url) == expected


def test_a_pattern_of_tars_needs_no_listing(hub: Hub) -> None:
    assert len(listed(hub, "hf://datasets/org/none/{00..99}.tar")) == 100
    assert listed(hub, "hf://datasets/org/none/a.tar?token=1") == ["hf://datasets/org/none/a.tar?token=1"]
    assert hub.asked == []


def test_what_has_no_tar_says_what_it_has(hub: Hub) -> None:
    with pytest.raises(UrlError, match=r"found 6 \.parquet, 1 \.md; `streamload pack`"):
        listed(hub, "hf://datasets/org/tables")
    for url in ("hf://datasets/org/plain/test", "hf://datasets/org/plain/*.tar"):
        with pytest.raises(UrlError, match="no such folder, or nothing matches"):
            listed(hub, url)


@pytest.mark.parametrize("name", ["folders", "names"])
def test_several_splits_are_not_mixed_and_each_is_named(hub: Hub, name: str) -> None:
    with pytest.raises(UrlError, match="several splits") as caught:
        listed(hub, f"hf://datasets/org/{name}")
    parts = re.findall(r"(hf://\S+) \(([\d,]+) tars\)", str(caught.value))
    assert {"folders": 3, "names": 2}[name] == len(parts)
    for place, count in parts:
        assert len(listed(hub, place)) == int(count)


def test_a_repository_that_is_denied_or_missing_says_what_to_do(hub: Hub) -> None:
    for name in ("private", "none"):
        with pytest.raises(
            OriginDenied, match=rf"accept its terms at {hub.url}/datasets/org/{name};.* HF_TOKEN"
        ):
            listed(hub, f"hf://datasets/org/{name}")
    assert len(listed(hub, "hf://datasets/org/private", token=hub.token)) == 2
    with pytest.raises(OriginNotFound, match="Repository not found"):
        listed(hub, "hf://datasets/org/none", token=hub.token)
    with pytest.raises(OriginNotFound, match="Expected hf://datasets/org/name"):
        listed(hub, "hf://datasets")


def test_a_hub_that_is_away_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OriginUnavailable, match="can't be listed"):
        expand_urls("hf://datasets/org/name", {"endpoint": "http://127.0.0.1:9"})


@pytest.mark.parametrize(
    "url", ["hf://datasets/org/data", "hf://datasets/org/gated", "hf://buckets/org/bucket/data"]
)
def test_a_loader_reads_them(hub: Hub, shards: list[Path], tmp_path: Path, url: str) -> None:
    with streamload.make_loader(
        url,
        batch_size=4,
        num_workers=0,
        cache_dir=tmp_path,
        shards=streamload.Shards(storage_options={"endpoint": hub.url, "token": hub.token}),
        workers=streamload.Workers(map_sample=dict, collate=list),
    ) as loader:
        read = Counter(sample["txt"] for batch in loader for sample in batch)
    assert read == Counter(sample["txt"] for path in shards for _, sample in read_oracle(path))


def test_a_gated_set_ends_a_run_and_says_where_its_terms_are(hub: Hub, tmp_path: Path) -> None:
    options = streamload.Shards(storage_options={"endpoint": hub.url, "token": "hf_other"})
    with streamload.make_loader(
        "hf://datasets/org/gated",
        batch_size=4,
        num_workers=0,
        cache_dir=tmp_path,
        shards=options,
        workers=streamload.Workers(map_sample=dict, collate=list),
    ) as loader:
        terms = rf"403.*accept its terms at {hub.url}/datasets/org/gated;.* HF_TOKEN"
        with pytest.raises(streamload.errors.StreamloadError, match=terms) as caught:
            list(loader)
    assert "hf_other" not in str(caught.value)


def test_the_command_line_reads_the_hub_that_the_environment_names(hub: Hub, tmp_path: Path) -> None:
    done = subprocess.run(
        [*MODULE, "warm", "hf://datasets/org/gated", "--cache-dir", str(tmp_path), "--json"],
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["shards_complete"] == 2
