"""torch's private names stand in one module, which names the one that a torch lacks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from streamload import torch_internals

PACKAGE = Path(torch_internals.__file__).parent
PRIVATE = re.compile(
    r"torch(\.\w+)*\._(?!_)|\._iterator\b|_MultiProcessingDataLoaderIter|_shutdown_workers|_try_get_data"
    r"|_next_data|_worker_pids|profiler\._"
)


def test_a_missing_name_is_refused_with_the_version_of_torch() -> None:
    for name in ("torch._C._nn._gone", "torch.utils.data.dataloader.DataLoader._gone"):
        with pytest.raises(ImportError, match=rf"torch {re.escape(torch.__version__)} has no {name}"):
            torch_internals.require((name,))


def test_all_names_are_there() -> None:
    torch_internals.require()


def test_no_other_module_uses_torchs_private_names() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "torch_internals.py"
        for line in path.read_text().splitlines()
        if PRIVATE.search(line)
    ]
    assert found == []
