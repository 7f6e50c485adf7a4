"""A run that builds no module has rows computed again by a process of its own."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from streamload.derived.proof.builds import Generators
from streamload.derived.proof.fingerprint import torch_settings
from streamload.derived.proof.lazy import pending_instance, pending_of
from streamload.derived.proof.module_proof import describe
from streamload.derived.proof.rebuilding import Script
from streamload.derived.proof.row_check import CannotCheck, RowCheck, Rows, remade

SCRIPT = """
from __future__ import annotations
import sys
import functools
import torch
from torch import nn
from streamload import cache_info, cache_module

SCALE = 2.0
TABLE = {"shift": 1.0}
TABLE["more"] = 2.0
def unused():
    return loader
def helper(x):
    return x * SCALE + TABLE["more"]
try:
    import numpy as np
except ImportError:
    np = None
@functools.singledispatch
def by_type(x):
    return x
@by_type.register
def _(x: torch.Tensor):
    return x + 3
loader = 1 / 0
raise SystemExit("so does this")
class Extractor(nn.Module):
    def forward(self, x, loader=None):
        return helper(by_type(x)) + np.float32(0)
for loader in ():
    SCALE = 5.0
if __name__ == "__main__":
    SCALE = 7.0
"""


def test_of_a_script_only_the_statements_run_that_a_class_needs(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    script = Script(str(path), None)
    assert torch.equal(script.Extractor()(torch.ones(2)), torch.full((2,), 10.0))
    assert not {"loader", "sys", "unused", "cache_info"} & set(vars(script))
    with pytest.raises(AttributeError, match=r"train.py defines no Missing"):
        script.Missing  # noqa: B018


def test_its_bytecode_is_that_of_the_whole_script(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    whole = {
        value.co_name: value.co_code
        for value in compile(SCRIPT, str(path), "exec", dont_inherit=True).co_consts
        if hasattr(value, "co_code")
    }
    script = Script(str(path), None)
    assert script.helper.__code__.co_code == whole["helper"]
    forward = next(
        value
        for outer in compile(SCRIPT, str(path), "exec", dont_inherit=True).co_consts
        if getattr(outer, "co_name", "") == "Extractor"
        for value in outer.co_consts
        if getattr(value, "co_name", "") == "forward"
    )
    assert script.Extractor.forward.__code__.co_code == forward.co_code


PROJECT = """
import os
import resource
import torch
from torch import nn
from streamload import cache_module

@cache_module(cache_path=None)
class Tells(nn.Module):
    def forward(self, x):
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        hidden = os.environ["CUDA_VISIBLE_DEVICES"] == os.environ["HIP_VISIBLE_DEVICES"] == ""
        return x * torch.tensor([os.nice(0) >= 10, limit > 0, hidden, torch.get_num_threads() == 1])
"""


def made(cls: Any) -> Any:
    module, _ = pending_instance(cls, (), {}, Generators())
    return remade(module, pending_of(module), describe(cls, (), {}).parts, "cpu", torch_settings("cpu"))


def test_the_process_that_checks_is_niced_and_bounded_and_sees_no_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its module tells whether it is, and only then returns what is stored."""
    (tmp_path / "told_by_a_check.py").write_text(PROJECT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("streamload.cache.memory.PLACE", tmp_path)
    import told_by_a_check  # type: ignore[import-not-found]

    x = torch.arange(4.0).reshape(1, 4) + 1
    model = nn.Identity()
    is_alive = weakref.ref(model)
    at_exit = functools.partial(lambda model, verdict: None, model)
    check = RowCheck(made(told_by_a_check.Tells), Rows((x,), {}, 1, [x]), "f", None, at_exit)
    del model, at_exit
    check.wait(120)
    assert is_alive() is None
    assert check.verdict is not None
    assert (check.verdict.is_same, check.verdict.reason) == (True, "")
    again = RowCheck(made(told_by_a_check.Tells), Rows((x,), {}, 1, [x]), "f", None, lambda verdict: None)
    again.wait(120)  # the verdict of the node, which is younger than this process
    assert again.verdict is not None
    assert again.verdict.began > 0


LARGE = """
from torch import nn
from streamload import cache_module

WORDS = {f"a word of many {number}": number for number in range(30_000)}

@cache_module(cache_path=None)
class Knows(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = WORDS
    def forward(self, x):
        return x.sum((1, 2), keepdim=True) + len(self.words)
"""


def test_rows_and_descriptions_larger_than_a_channel_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large_in_a_check.py").write_text(LARGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("streamload.cache.memory.PLACE", tmp_path)
    import large_in_a_check  # type: ignore[import-not-found]

    x = torch.ones(2, 512, 1024)
    stored = x.sum((1, 2), keepdim=True) + 30_000
    check = RowCheck(
        made(large_in_a_check.Knows), Rows((x,), {}, 2, [stored]), "g", None, lambda verdict: None
    )
    check.wait(120)
    assert check.verdict is not None
    assert (check.verdict.is_same, check.verdict.reason) == (True, "")


def test_a_class_that_no_process_could_find_is_not_checked() -> None:
    from streamload import cache_module

    @cache_module(cache_path=None)
    class Local(torch.nn.Module):
        pass

    with pytest.raises(CannotCheck, match="defined inside a function"):
        made(Local)


TRAINING = """
    import sys
    import torch
    from pathlib import Path
    from torch import nn
    from streamload import cache_info, cache_module

    @cache_module(cache_path="features")
    class Extractor(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            nn.init.ones_(self.linear.weight)
            nn.init.zeros_(self.linear.bias)
        def forward(self, x):
            return self.linear(x) * float(Path("factor.txt").read_text())

    model = Extractor().eval()
    x = torch.ones(2, 4)
    print(model(x, cache_key=["a", "b"]).sum().item(), cache_info(model).builds)
"""


@pytest.mark.deep
def test_a_file_that_forward_reads_is_noticed_by_a_run_that_builds_nothing_of_these_rows_alone(
    tmp_path: Path,
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for directory in (here, elsewhere):
        directory.mkdir()
        (directory / "train.py").write_text(textwrap.dedent(TRAINING))

    def run(directory: Path, factor: float) -> tuple[list[float], str]:
        (directory / "factor.txt").write_text(str(factor))
        ended = subprocess.run(
            [sys.executable, "train.py"], cwd=directory, capture_output=True, text=True, check=True
        )
        return [float(word) for word in ended.stdout.split()], ended.stderr

    assert run(here, 1)[0] == [32, 1]
    assert run(here, 1)[0] == [32, 0]  # another process has built it as well
    values, said = run(here, 2)
    assert values == [32, 0]
    assert "the row of key 'a' of Extractor isn't what it computes now" in said
    assert run(here, 2)[0] == [64, 1]  # none of these rows is read any more
    assert [run(elsewhere, 1)[0] for _ in range(2)] == [[32, 1], [32, 0]]
    values, said = run(elsewhere, 1)
    assert values == [32, 0]
    assert "isn't what it computes" not in said  # as rows of this name elsewhere aren't


IN_TURN = """
    import time
    import torch
    from streamload.errors import FeatureMismatch
    from train import model, x

    refused, ends = set(), time.monotonic() + 120
    while len(refused) < 2 and time.monotonic() < ends:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            try:
                model(x, cache_key=["a", "b"])
            except FeatureMismatch:
                refused.add(precision)
        time.sleep(0.1)
    print(*sorted(refused))
"""


@pytest.mark.deep
def test_rows_of_two_fingerprints_that_are_read_in_turn_are_both_checked(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAINING))
    (tmp_path / "in_turn.py").write_text(textwrap.dedent(IN_TURN))

    def run(factor: float) -> str:
        (tmp_path / "factor.txt").write_text(str(factor))
        command = [sys.executable, "in_turn.py"]
        if factor == 1:  # no row is refused: it ends after a few calls
            command = [sys.executable, "-c", textwrap.dedent(IN_TURN).replace("+ 120", "+ 1")]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return ended.stdout.splitlines()[-1]

    assert [run(1) for _ in range(2)] == ["", ""]
    assert run(2) == "high highest"
