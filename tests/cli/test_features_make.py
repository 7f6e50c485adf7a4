"""`streamload features make`: what it computes is what a training finds."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from streamload.testing.shards import ShardOptions, write_shards
from tests.support.commands import run_forked

_MODULE = """
import torch
from torch import nn
import streamload

@streamload.cache_module
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(192, 4)

    def forward(self, images):
        return self.project(images.flatten(1))

def small(image):
    return torch.tensor(list(image.resize((8, 8)).tobytes())).reshape(8, 8, 3).permute(2, 0, 1) / 255

def half():
    return streamload.Features(Net().eval(), preprocess=small, dtype=torch.float16)

def tokenize(texts):
    return torch.tensor([[len(text), ord(text[0])] for text in texts])

class Texts(nn.Module):
    def forward(self, ids):
        return ids.float() * 2

def texts():
    return streamload.Features(Texts(), inputs="text")

plain = nn.Sequential(nn.Flatten(), nn.Linear(192, 2, bias=False))
nothing = 3
"""

_TRAINING = """
import json, sys
import streamload
import mine

made = {"Net": lambda: mine.Net().eval(), "half": mine.half, "texts": mine.texts}[sys.argv[2]]()
options = {"preprocess": mine.small, "num_workers": 1, "output": "dict", "batch_size": 3, "seed": 5}
batches = streamload.Batches(features={"f": made})
with streamload.make_loader(sys.argv[1], mine.tokenize, batches=batches, **options) as loader:
    for batch in loader:
        made(batch)
    print(json.dumps([loader.stats().feature_rows_read, loader.stats().feature_rows_computed]))
"""


class Project:
    """A user's directory, with shards."""

    def __init__(self, root: Path):
        self.root = root
        self.data = root / "data"
        write_shards(self.data, [7, 8], options=ShardOptions(image_side=(16, 30)))
        (root / "mine.py").write_text(_MODULE)
        (root / "training.py").write_text(_TRAINING)
        self.environ = {
            "STREAMLOAD_CACHE_DIR": str(root / "cache"),
            "STREAMLOAD_CACHE_SIZE": "1GB",
            "OMP_NUM_THREADS": "1",
        }

    def make(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.features("make", "--workers", "1", *arguments)

    def features(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["features", name, str(self.data), *arguments]
        return run_forked(command, folder=self.root, environ=self.environ)

    def train(self, name: str) -> Any:
        command = [sys.executable, "training.py", str(self.data), name]
        environ = {**os.environ, **self.environ}
        done = subprocess.run(
            command, cwd=self.root, env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("half", ()),
        pytest.param("texts", ("--tokenizer", "mine:tokenize"), marks=pytest.mark.deep),
    ],
)
def test_what_was_made_ahead_is_found_by_a_training(
    project: Project, name: str, options: tuple[str, ...]
) -> None:
    done = project.make("--module", f"mine:{name}", "--batch-size", "4", "--json", *options)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["computed"] > 0
    assert said["computed"] == 15 or name == "texts"  # equal texts have one row
    assert said["computed"] + said["found"] == said["samples"] == 15
    assert said["skipped"] == said["not_stored"] == 0
    assert project.train(name) == [15, 0]


def test_features_of_texts_need_no_image_that_can_be_decoded(project: Project) -> None:
    with tarfile.open(project.data / "00002.tar", "w") as shard:
        for name, data in (("a.jpg", b"no image"), ("a.txt", b"a caption")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            shard.addfile(member, io.BytesIO(data))
    done = project.make("--module", "mine:texts", "--tokenizer", "mine:tokenize", "--json")
    said = json.loads(done.stdout)
    assert (said["samples"], said["skipped"]) == (16, 0)


def test_a_check_on_request_computes_rows_again_and_refuses_those_that_differ(project: Project) -> None:
    """The difference is one that no fingerprint has: an attribute of a module of the standard library."""
    source = (project.root / "mine.py").read_text()
    source = source.replace("self.project(images", "getattr(sys, 'hidden', 1) * self.project(images")
    (project.root / "mine.py").write_text("import sys\n" + source)
    name = ("--module", "mine:Net", "--preprocess", "mine:small")
    assert project.make(*name).returncode == 0
    done = project.features("check", *name, "--json")
    said = json.loads(done.stdout)
    assert (said["samples"], said["rows"]) == (15, 15)
    assert said["checked"] >= 2
    (project.root / "other.py").write_text("import sys\nsys.hidden = 2\nfrom mine import Net, small\n")
    done = project.features("check", "--module", "other:Net", "--preprocess", "other:small")
    assert done.returncode == 1
    assert "isn't what it computes now from the same input (a distance of" in done.stderr


def test_a_second_call_computes_what_is_missing(project: Project) -> None:
    name = ("--module", "mine:Net", "--preprocess", "mine:small")
    assert project.make(*name).returncode == 0
    write_shards(project.root / "more", [4], seed=3, options=ShardOptions(image_side=(16, 30)))
    os.replace(project.root / "more" / "00000.tar", project.data / "00002.tar")
    done = project.make(*name)
    assert "19 samples: 4 features were computed, 15 were there" in done.stdout


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mine:missing", "can't be imported"),
        ("nowhere:Net", "can't be imported"),
        ("mine", "can't be imported"),
        ("mine:nothing", "expected a module"),
    ],
)
def test_what_is_no_module_is_named(project: Project, name: str, why: str) -> None:
    done = project.make("--module", name)
    assert done.returncode == 2
    assert why in done.stderr
    assert len(done.stderr.splitlines()) == 1
