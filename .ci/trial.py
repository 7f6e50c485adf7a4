"""Use an installed streamload as its users do: release.py runs this in clean environments.

python -W error trial.py
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import subprocess
import sys

import torch
from torch import nn

import streamload
from streamload.testing.shards import write_shards
from streamload.transforms import kernel


class Tower(nn.Module):
    """A frozen encoder: float32[N, 3, 224, 224] → float32[N, 8]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Conv2d(3, 8, 32, stride=32)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Encode images."""
        return self.project(images).mean((2, 3))


def lengths(texts: list[str]) -> torch.Tensor:
    """A tokenizer."""
    return torch.tensor([[len(text)] * 8 for text in texts])


def readme() -> None:
    """The README's lines, on shards of this disk."""
    seen = 0
    with streamload.make_loader("shards/{00000..00001}.tar", lengths, batch_size=16, num_workers=2) as loader:
        for images, texts in loader:
            assert images.shape[1:] == (3, 224, 224)
            assert len(images) == len(texts)
            seen += len(images)
    assert seen == 64, seen


def cached_module() -> None:
    """A module whose results are stored by key."""
    tower = streamload.cache_module(cache_path="features")(Tower)().eval()
    images, keys = torch.rand(4, 3, 224, 224), list("abcd")
    assert torch.equal(tower(images, cache_key=keys), tower(images, cache_key=keys))
    assert streamload.cache_info(tower).hits == 4


def feature_column() -> None:
    """A feature in the loader's batches: computed in the first pass, read in the second."""
    tower = streamload.cache_module(cache_path="features")(Tower)().eval()
    given = {"output": "dict", "batches": streamload.Batches(features={"tower": tower})}
    with streamload.make_loader("shards", batch_size=16, num_workers=2, **given) as loader:
        for _ in range(2):
            assert sum(len(tower(batch)) for batch in loader) == 64
        assert loader.stats().feature_rows_read == 64


def command_line() -> None:
    """The command, and what doctor says of the kernel."""

    def streamload_(*arguments: str) -> str:
        command = [sys.executable, "-W", "error", "-m", "streamload", *arguments]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout

    assert "doctor" in streamload_("--help")
    assert importlib.metadata.version("streamload") in streamload_("--version")
    found = json.dumps(json.loads(streamload_("doctor", "--json")))
    assert f"by its own kernel, with {kernel.VECTORS}" in found, found
    streamload_("pack", "--help")


def extra_of_s3() -> None:
    """What needs s3fs says how to install it, before anything is requested."""
    assert importlib.util.find_spec("s3fs") is None
    cache, message = streamload.Cache(shared="s3://near/tier"), ""
    try:
        with streamload.make_loader("s3://bucket/0.tar", batch_size=2, num_workers=1, cache=cache) as loader:
            next(iter(loader))
    except streamload.errors.OptionError as exc:
        message = str(exc)
    assert "pip install 'streamload[s3]'" in message, message


def needed_by(name: str) -> set[str]:
    """A package and all that it needs, as far as it is installed; names with dashes."""
    needed, todo = set(), [name]
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            requirements = importlib.metadata.requires(name) or []
            if name not in needed:
                todo += [re.match(r"[\w.-]+", text)[0] for text in requirements if "extra ==" not in text]
            needed.add(name)
    return needed


def sizes() -> str:
    """What the installation takes: torch with its libraries for GPUs, and all else."""
    megabytes, counts, of_torch = [0.0, 0.0], [0, 0], needed_by("torch")
    for distribution in importlib.metadata.distributions():
        is_other = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower() not in of_torch
        counts[is_other] += 1
        for file in distribution.files or []:
            if (path := file.locate()).is_file():  # type: ignore[union-attr]
                megabytes[is_other] += path.stat().st_size / 1e6  # type: ignore[union-attr]
    return (
        f"torch and what it needs: {counts[0]} packages, {megabytes[0]:,.0f} MB; "
        f"all else: {counts[1]}, {megabytes[1]:,.1f} MB"
    )


def main() -> None:
    """Do all of that, and print the versions and what they take."""
    write_shards("shards", [32, 32])
    readme()
    cached_module()
    feature_column()
    command_line()
    extra_of_s3()
    names = ("torch", "numpy", "pillow", "webdataset")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    print(f"Python {platform.python_version()}, {versions}. {sizes()}")


if __name__ == "__main__":
    main()
