"""Stored rows are checked where their module is built: right ones pass, wrong ones are never returned."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import streamload
from streamload.derived.proof.rounding import JudgedRows, RowComparison, arithmetic_epsilon
from streamload.derived.store import row_store
from streamload.derived.store.catalog import open_catalog
from streamload.errors import FeatureMismatch, FeatureNotCacheable

RESULTS = {
    "features": lambda model, x: model.features(x),
    "normed": lambda model, x: functional.normalize(model.features(x), dim=-1),
    "log-softmax": lambda model, x: functional.log_softmax(model.head(model.features(x)), -1),
    "codes": lambda model, x: model.head(model.tokens(x)).argmax(-1),
    "top-k": lambda model, x: model.head(model.features(x)).topk(5),
}
SETUPS = {
    "float32": (torch.float32, False),
    "float16": (torch.float16, False),
    "bfloat16": (torch.bfloat16, False),
    "autocast": (torch.float32, True),
}


class Tower(nn.Module):
    """A small transformer of patches, with random weights."""

    def __init__(self, result: str = "features"):
        super().__init__()
        torch.manual_seed(0)
        self.patch = nn.Conv2d(3, 64, 8, 8)
        self.block = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.head = nn.Linear(64, 256)
        self.result = result

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        tokens: torch.Tensor = self.block(self.patch(x).flatten(2).transpose(1, 2))
        return tokens

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens(x).mean(1)

    def forward(self, x: torch.Tensor) -> Any:
        return RESULTS[self.result](self, x)


def comparison(
    setup: str, result: str, rows: int
) -> tuple[Callable[[Any], list[torch.Tensor]], torch.Tensor, float]:
    """What computes, its input, and the epsilon of its arithmetic."""
    dtype, is_autocast = SETUPS[setup]
    model = Tower(result).eval().to(dtype)
    x = torch.rand(rows, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(dtype)

    def compute(x: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            value = model(x)
        return list(value) if isinstance(value, tuple) else [value]

    settings = ("", "torch.bfloat16" if is_autocast else "", "highest", False)
    return compute, x, arithmetic_epsilon(model, x, settings, "cpu")


@pytest.mark.parametrize(("setup", "result"), list(itertools.product(SETUPS, RESULTS)))
def test_right_rows_of_batches_of_any_size_pass(setup: str, result: str) -> None:
    for rows in (8, 11, 32):
        compute, x, epsilon = comparison(setup, result, rows)
        among = compute(x)
        count = 8 if result in ("codes", "top-k") else 1
        for first in range(0, 8, count):
            chosen = slice(first, first + count)
            sample = JudgedRows(x[chosen], [leaf[chosen] for leaf in among])
            assert RowComparison(compute, epsilon, rows, among).difference([sample]) is None


@pytest.mark.parametrize("setup", ["float32", "float16"])
def test_rows_that_are_nearly_alike_are_judged_by_their_own_norm(setup: str) -> None:
    """Blank pages: what tells the rows of a batch apart is no larger than what rounding does."""
    for seed in range(8):
        dtype, _ = SETUPS[setup]
        torch.manual_seed(seed)
        layers = [layer for _ in range(6) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
        model = nn.Sequential(nn.Conv2d(3, 8, 3), *layers).eval().to(dtype)
        x = (0.5 + 1e-3 * torch.randn(16, 3, 24, 24)).to(dtype)

        def compute(x: torch.Tensor, model: nn.Module = model) -> list[torch.Tensor]:
            with torch.no_grad():
                return [functional.normalize(model(x).mean((2, 3)).float(), dim=-1)]

        among = compute(x)
        epsilon = arithmetic_epsilon(model, x, ("", "", "highest", False), "cpu")
        rows = RowComparison(compute, epsilon, 16, among)
        for place in range(4):
            chosen = slice(place, place + 1)
            assert rows.difference([JudgedRows(x[chosen], [among[0][chosen]])]) is None
            assert rows.difference([JudgedRows(x[chosen], [among[0][chosen] * 1.01])]) is not None


EDITS = {
    "a factor": lambda leaf: leaf * 1.01,
    "a shift": lambda leaf: leaf + 0.01 * leaf.float().norm(dim=-1, keepdim=True) / leaf.shape[-1] ** 0.5,
    "another direction": lambda leaf: leaf.roll(1, -1),
}


@pytest.mark.parametrize(
    ("setup", "result", "edit"),
    list(itertools.product(SETUPS, ("features", "normed", "log-softmax"), EDITS)),
)
def test_an_edit_of_all_rows_by_a_hundredth_of_their_norm_is_found(
    setup: str, result: str, edit: str
) -> None:
    compute, x, epsilon = comparison(setup, result, 8)
    edited = [EDITS[edit](compute(x)[0]).to(compute(x)[0].dtype)]
    rows = RowComparison(compute, epsilon, 8, edited)
    count = 8 if rows.is_coarse else 1
    difference = rows.difference([JudgedRows(x[:count], [edited[0][:count]])])
    assert difference is not None
    assert difference.distance > difference.allowed


def test_other_codes_shapes_and_places_that_are_not_finite_are_differences() -> None:
    compute, x, epsilon = comparison("float32", "codes", 8)
    (codes,) = compute(x)
    rows = RowComparison(compute, epsilon, 8)
    assert rows.difference([JudgedRows(x, [codes.roll(1, -1)])]) is not None
    assert rows.difference([JudgedRows(x, [codes.to(torch.int32)])]) is not None
    assert rows.difference([JudgedRows(x, [codes[:, 1:]])]) is not None

    def with_nan(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.where(x > 0.5, torch.nan, x)]

    value = torch.tensor([[0.2, 0.7, 0.1]])
    same = RowComparison(with_nan, 1e-7, 1)
    assert same.difference([JudgedRows(value, with_nan(value))]) is None
    assert same.difference([JudgedRows(value, [value])]) is not None


def test_ids_are_compared_with_as_many_rows_as_the_call_had() -> None:
    """No float can be moved: the distance between alone and among others is the scale."""

    def compute(ids: torch.Tensor) -> list[torch.Tensor]:
        return [ids.float() * (1 + 0.01 * (len(ids) > 1))]

    ids = torch.arange(6).reshape(2, 3) + 1
    sample = JudgedRows(ids[:1], [compute(ids)[0][:1]], lambda count: ids[:1].repeat(count, 1))
    assert RowComparison(compute, 1e-7, 2).difference([sample]) is None
    edited = JudgedRows(ids[:1], [sample.leaves[0] * 1.05], sample.repeated)
    assert RowComparison(compute, 1e-7, 2).difference([edited]) is not None


def test_a_comparison_draws_from_no_generator_of_the_users() -> None:
    def compute(x: torch.Tensor) -> list[torch.Tensor]:
        return [x + torch.rand(1)]

    torch.manual_seed(3)
    value, after = compute(torch.ones(2, 2)), torch.get_rng_state()
    torch.manual_seed(3)
    assert RowComparison(compute, 1e-7, 2).difference([JudgedRows(torch.ones(2, 2), value)]) is None
    assert RowComparison(compute, 1e-7, 2).difference([JudgedRows(torch.ones(2, 2), [value[0] + 0.5])])
    torch.rand(1)
    assert torch.equal(torch.get_rng_state(), after)


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of the rows."""
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("streamload.cache.memory.PLACE", tmp_path)
    yield tmp_path / "cache" / "rows"
    row_store.close_stores()


X = torch.rand(300, 4, generator=torch.Generator().manual_seed(1))


@streamload.cache_module
class Scaled(nn.Module):
    """Its results depend on what no fingerprint has: an attribute of a module of the standard library."""

    calls = 0

    def __init__(self, *, is_whole: bool = False):
        super().__init__()
        self.is_whole = is_whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sys.counted_calls = getattr(sys, "counted_calls", 0) + 1  # type: ignore[attr-defined]
        value = x * getattr(sys, "hidden_factor", 1.0)
        return (value * 1000).long() if self.is_whole else value


_CHILD_SECONDS = 60


def in_another_process(act: Callable[[], Any], factor: float = 1.0) -> Any:
    """What a process returns that has proved nothing, or the text of its error; and its calls of forward."""
    here, there = multiprocessing.get_context("fork").Pipe(duplex=False)

    def run() -> None:
        sys.hidden_factor, sys.counted_calls = factor, 0  # type: ignore[attr-defined]
        try:
            value = act()
        except streamload.StreamloadError as error:
            value = f"{type(error).__name__}: {error}"
        row_store.close_stores()
        there.send((value, sys.counted_calls))  # type: ignore[attr-defined]

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    there.close()  # so that a child that dies is an EOFError here
    has_answer = here.poll(_CHILD_SECONDS)
    value = here.recv() if has_answer else None
    process.join(_CHILD_SECONDS if has_answer else 0)
    if process.is_alive():
        os.kill(process.pid, signal.SIGUSR1)  # prints its stacks
        process.join(1)
        process.kill()
        process.join()
        pytest.fail(f"a process {'does not end' if has_answer else 'has no answer'} for {_CHILD_SECONDS} s")
    return value


def built(**arguments: Any) -> Any:
    module = Scaled(**arguments).eval()
    assert module.training is False
    assert list(module.parameters()) == []
    return module


def called(keys: int = 4, times: int = 1, **arguments: Any) -> list[float]:
    module = built(**arguments)
    return [module(X[:keys], cache_key=list(range(keys))).double().sum().item() for _ in range(times)]


@streamload.cache_module
class Opened(nn.Module):
    """Reads the file that its argument names, and one that it doesn't."""

    def __init__(self, folder: str):
        super().__init__()
        self.folder = folder

    def forward(self, path: str) -> torch.Tensor:
        sys.counted_calls = getattr(sys, "counted_calls", 0) + 1  # type: ignore[attr-defined]
        scale = float((Path(self.folder) / "scale.txt").read_text())
        return torch.tensor([scale * len(Path(path).read_bytes()) if "\0" not in path else 0.0])


@pytest.mark.usefixtures("rows")
def test_a_file_that_an_argument_names_is_no_read_of_the_code_and_another_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scale.txt").write_text("2")
    names = ["a.txt", str(tmp_path / "b.txt")]
    for number, name in enumerate(names):
        Path(name).write_text("x" * (number + 1))

    def values(*paths: str) -> list[float]:
        module = Opened(str(tmp_path)).eval()
        return [module(path, cache_key=path).item() for path in paths]

    assert in_another_process(lambda: values(*names))[0] == [2.0, 4.0]
    Path("a.txt").write_text("xxx")  # it would have another key
    stored, calls = in_another_process(lambda: values(names[1]))
    assert stored == [4.0]
    assert calls <= 1  # a check: a row that is computed takes two
    assert in_another_process(lambda: values("\0"))[0] == [0.0]
    Path("scale.txt").write_text("3")
    assert in_another_process(lambda: values(*names))[0] == [9.0, 6.0]


TRUE = X[:4].double().sum().item()


@pytest.mark.usefixtures("rows")
def test_a_wrong_row_is_not_returned_once_and_right_ones_are_stored_by_the_next_run() -> None:
    ((first,), _) = in_another_process(called)
    assert first == pytest.approx(TRUE)
    stopped, _ = in_another_process(called, 2.0)
    assert stopped.startswith("FeatureMismatch: the row of key")
    assert "where rounding explains" in stopped
    for calls in (1, 0):
        (values, computed) = in_another_process(lambda: called(times=3), 2.0)
        assert values == pytest.approx([2 * TRUE] * 3)
        assert (computed > 1) == bool(calls)


def test_a_verdict_goes_with_its_rows(rows: Path) -> None:
    in_another_process(called)
    assert "FeatureMismatch" in in_another_process(called, 2.0)[0]
    with open_catalog(rows, writable=True) as catalog:
        assert catalog.change("DELETE FROM rows WHERE used NOT NULL AND ?", [(True,)]) == 4
    for _ in range(3):
        values, _ = in_another_process(lambda: called(times=2), 2.0)
        assert values == pytest.approx([2 * TRUE] * 2)


@pytest.mark.usefixtures("rows")
def test_rows_that_a_process_stored_itself_are_not_computed_again_by_any_object_of_the_module() -> None:
    def read_often() -> int:
        called()
        before: int = sys.counted_calls  # type: ignore[attr-defined]
        called(times=400)
        return sys.counted_calls - before  # type: ignore[attr-defined,no-any-return]

    assert in_another_process(read_often)[0] == 0


@pytest.mark.usefixtures("rows")
def test_a_process_computes_the_first_row_of_others_again_and_then_one_in_a_hundred_at_most() -> None:
    def one_by_one() -> int:
        module = built()
        for number in range(300):
            module(X[number : number + 1], cache_key=number)
        return 300

    in_another_process(one_by_one)
    _, calls = in_another_process(one_by_one)
    assert 1 <= calls <= 1 + 300 // 100


@pytest.mark.usefixtures("rows")
def test_the_processes_of_a_run_on_a_node_share_the_verdict_of_the_first_row() -> None:
    in_another_process(called)
    assert in_another_process(called)[1] == 1
    assert in_another_process(called)[1] == 0


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(("factor", "expected"), [(1.0, (12, 8)), (2.0, (7, 8 * (1 + 4 + 12)))])
def test_whole_numbers_are_judged_by_eight_rows_together(factor: float, expected: tuple[int, int]) -> None:
    def one_by_one() -> int:
        """How many rows came before an error."""
        module = built(is_whole=True)
        for number in range(12):
            try:
                module(X[number : number + 1], cache_key=[number])
            except FeatureMismatch:
                return number
        return 12

    assert in_another_process(one_by_one)[0] == 12
    assert in_another_process(one_by_one, factor) == expected


@pytest.mark.usefixtures("rows")
def test_a_module_that_mixes_rows_of_whole_numbers_is_refused_and_one_that_does_not_is_not() -> None:
    @streamload.cache_module
    class Mixing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x > x.mean(0)).long()

    with pytest.raises(FeatureNotCacheable, match="mixes the rows of a batch"):
        Mixing().eval()(X[:16], cache_key=list(range(16)))
    assert Scaled(is_whole=True).eval()(X[:16], cache_key=list(range(16))).shape == (16, 4)


TRAINING = """
    import shutil, sys
    from pathlib import Path
    import torch
    from torch import nn
    import streamload

    with open("started.txt", "a") as file:
        file.write("x")
    shutil.rmtree("run", ignore_errors=True)
    Path("run").mkdir()
    RUN = Path("run")

    @streamload.cache_module(cache_path="features")
    class Extractor(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            nn.init.ones_(self.linear.weight)
            nn.init.zeros_(self.linear.bias)
        def forward(self, x):
            assert RUN.is_dir()
            return self.linear(x) * float(Path("factor.txt").read_text())

    if __name__ == "__main__":
        model = Extractor().eval()
        (RUN / "checkpoint").write_text("hours")
        for _ in range(3):
            value = model(torch.ones(2, 4), cache_key=["a", "b"]).sum().item()
        print(value, streamload.cache_info(model).builds, (RUN / "checkpoint").exists())
"""


def test_no_line_of_the_training_script_runs_twice_and_an_edited_file_is_other_rows(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAINING))

    def run(factor: float) -> str:
        (tmp_path / "factor.txt").write_text(str(factor))
        command = [sys.executable, "train.py"]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert [run(1) for _ in range(3)] == ["32.0 1 True", "32.0 1 True", "32.0 0 True"]
    assert run(2) == "64.0 1 True"  # its rows aren't there: the module is built to compute them
    assert run(1) == "32.0 0 True"  # those of before are there still
    assert (tmp_path / "started.txt").read_text() == "x" * 5
