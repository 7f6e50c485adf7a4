"""The rules of docs/reference/shared-cache-upkeep.md, on a folder and on S3, beside trainings."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest

import streamload
from streamload import Cache
from streamload.cache.shared.objects import OBJECT_LIMIT_BYTES
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, read_oracle, write_shards
from tests.support.s3 import S3Server
from tests.support.sharing import running_s3

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "shared-cache-upkeep.md").read_text()
COUNTS = [12, 15, 9, 14]
ALL = [f"{number:05d}.tar" for number in range(len(COUNTS))]
DAY = 86_400


def block(language: str, heading: str) -> str:
    """The first block of code in a section of the page."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    blocks = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 1
    return str(blocks[0])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    write_shards(tmp_path / "data", COUNTS, options=ShardOptions(padding_bytes=(20_000, 60_000)))
    with ShardServer(tmp_path / "data") as server:
        yield server


class Node:
    """Trainings on new nodes, each with an empty cache of its own, behind one shared cache."""

    def __init__(self, server: ShardServer, tmp_path: Path, shared: str, options: dict[str, Any] | None):
        self._server, self._folder, self._number = server, tmp_path, 0
        self._shared, self._options = shared, options
        paths = sorted((tmp_path / "data").glob("*.tar"))
        self._expected = Counter(key for path in paths for key, _ in read_oracle(path))

    def train(self, after: int = 0, act: Callable[[], None] | None = None) -> list[str]:
        """Evaluate all shards, with an act after some batches; return what the origin was asked for."""
        self._number += 1
        asked = len(self._server.log)
        cache = Cache(shared=self._shared, shared_options=self._options, write_back=True)
        batches = streamload.Batches(with_keys=True)
        url = f"{self._server.url}/{{00000..{len(COUNTS) - 1:05d}}}.tar"
        keys: Counter[str] = Counter()
        with streamload.make_loader(
            url, batch_size=4, num_workers=0, train=False, preprocess=_size, cache=cache,
            cache_dir=self._folder / f"node-{self._number}", batches=batches, output="dict",
        ) as loader:  # fmt: skip
            for number, batch in enumerate(loader):
                keys.update(batch["__key__"])
                if act is not None and number == after:
                    act()
            deadline = time.monotonic() + 60
            while act is None and not self.is_whole() and time.monotonic() < deadline:
                time.sleep(0.05)  # shards are stored in the background
        assert keys == self._expected
        return sorted({request.path for request in self._server.log[asked:]})

    def is_whole(self) -> bool:
        """True if the shared cache has an index and the bytes of each shard."""
        raise NotImplementedError


def _size(image: Any) -> int:
    return int(image.width)


class FolderNode(Node):
    def is_whole(self) -> bool:
        folders = list(Path(self._shared, "shards").glob("*"))
        kinds = [sorted(path.suffix for path in folder.iterdir()) for folder in folders]
        return kinds == [["", ".tar"]] * len(COUNTS)


def test_find_takes_indexes_first_and_trainings_go_on(server: ShardServer, tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    node = FolderNode(server, tmp_path, str(tier), None)
    commands = block("bash", "A folder").replace("/shared/tier", str(tier))

    def files(kind: str) -> int:
        return len(list(tier.glob(f"shards/*/{kind}")))

    def age(days: float) -> None:
        for path in (tier / "shards").rglob("*"):
            os.utime(path, (time.time() - days * DAY,) * 2)

    def find() -> None:
        subprocess.run(["bash", "-c", commands], check=False, capture_output=True)

    assert node.train() == ALL
    assert (files("index"), files("*.tar")) == (len(COUNTS), len(COUNTS))
    age(29.5)
    find()
    assert node.train() == []
    age(30.5)
    find()
    assert (files("index"), files("*.tar")) == (0, len(COUNTS))
    assert node.train() == ALL  # and stored anew, bytes and all
    assert (files("index"), files("*.tar")) == (len(COUNTS), len(COUNTS))
    assert max(path.stat().st_mtime for path in tier.glob("shards/*/*.tar")) > time.time() - DAY
    for days in (30.5, 32.5):  # under a training that reads
        age(days)
        node.train(1, find)
        node.train()
        assert node.train() == []
    age(32.5)
    find()
    assert not [path for path in (tier / "shards").rglob("*") if path.is_file()]
    age(1)
    find()
    assert not list((tier / "shards").iterdir())
    assert (tier / "streamload.json").exists()
    assert node.train() == ALL
    assert node.train() == []


class S3Node(Node):
    """On S3, with rules that this class carries out: moto takes them, forgets sizes, and deletes nothing."""

    def __init__(self, server: ShardServer, tmp_path: Path, s3: S3Server):
        super().__init__(server, tmp_path, "s3://bucket/tier", s3.storage_options)
        session = botocore.session.get_session()
        keys = {"aws_access_key_id": s3.key, "aws_secret_access_key": s3.secret}
        self._client = session.create_client("s3", s3.region, endpoint_url=s3.endpoint, **keys)
        text = block("json", "S3")
        assert str(OBJECT_LIMIT_BYTES + 1) in text  # the largest index is below
        rules = json.loads(text.replace(str(OBJECT_LIMIT_BYTES + 1), "100000"))  # as the tars here are small
        self._client.put_bucket_lifecycle_configuration(Bucket="bucket", LifecycleConfiguration=rules)
        kept = self._client.get_bucket_lifecycle_configuration(Bucket="bucket")["Rules"]
        self._rules = rules["Rules"]
        assert [rule["ID"] for rule in kept] == [rule["ID"] for rule in self._rules]

    def objects(self) -> dict[str, int]:
        """The sizes of all objects by name."""
        listed = self._client.list_objects_v2(Bucket="bucket").get("Contents", [])
        return {entry["Key"]: entry["Size"] for entry in listed}

    def is_whole(self) -> bool:
        names = [name for name in self.objects() if name.startswith("tier/shards/")]
        return len(names) == 2 * len(COUNTS)

    def expire(self, days: int) -> None:
        """Delete what the bucket's rules delete of objects that are so many days old."""
        for rule in self._rules:
            limits = rule["Filter"].get("And", rule["Filter"])
            if rule.get("Expiration", {}).get("Days", days + 1) > days:
                continue
            for name, size in self.objects().items():
                if name.startswith(limits["Prefix"]) and size < limits.get("ObjectSizeLessThan", size + 1):
                    self._client.delete_object(Bucket="bucket", Key=name)


def test_rules_of_s3_take_indexes_first_and_trainings_go_on(server: ShardServer, tmp_path: Path) -> None:
    with running_s3() as s3:
        node = S3Node(server, tmp_path, s3)
        assert node.train() == ALL
        node.expire(29)
        assert node.train() == []
        node.expire(30)
        left = [name for name in node.objects() if name.startswith("tier/shards/")]
        assert len(left) == len(COUNTS)
        assert all(name.endswith(".tar") for name in left)
        assert node.train() == ALL
        for days in (30, 32):
            node.train(1, lambda days=days: node.expire(days))  # type: ignore[misc]
            node.train()
            assert node.train() == []
        node.expire(32)
        assert [name for name in node.objects() if name.startswith("tier/shards/")] == []
        assert node.train() == ALL


def test_an_index_whose_tar_is_gone_costs_a_request_and_is_replaced(
    server: ShardServer, tmp_path: Path
) -> None:
    tier = tmp_path / "tier"
    node = FolderNode(server, tmp_path, str(tier), None)
    assert node.train() == ALL
    next(tier.glob("shards/*/*.tar")).unlink()
    assert len(node.train()) == 1
    assert node.train() == []
