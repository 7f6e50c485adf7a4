"""A row is found by the same code, arguments, weights and settings only, and a wrong one is found out."""

import contextlib
import copy
import importlib
import itertools
import logging
import multiprocessing
import os
import shutil
import socket
import sys
import textwrap
import threading
import types
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import streamload
from streamload import cache_info, cache_module
from streamload.derived.proof import builds, code, module_proof, project_code
from streamload.derived.proof.code import Describer
from streamload.derived.proof.fingerprint import Fingerprint, differences
from streamload.derived.store import row_store
from streamload.derived.store.catalog import open_catalog
from streamload.errors import FeatureMismatch, FeatureNotCacheable

SOURCE = '''
import enum
import functools
import torch
from torch import nn
from streamload import cache_module

SCALE = 2.0
TABLE = {"shift": 1.0, "names": ["a", "b"]}

class Mode(enum.Enum):
    FAST = 1
    SLOW = 2

def helper(x):
    """Doc of the helper."""
    return deeper(x) * SCALE

def deeper(x):
    return x + TABLE["shift"]

def make(factor):
    def by(x):
        return x * factor
    return by

BY = make(1.0)

class Inner(nn.Module):
    def forward(self, x):
        return x.relu()

class Base(nn.Module):
    bias = 0.5
    def shift(self, x):
        return x + self.bias

@cache_module()
class Extractor(Base):
    """Doc."""
    def __init__(self, width=4, act="relu", mode=Mode.FAST, step=None, path="weights.pt"):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.linear = nn.Linear(4, width)
        with torch.no_grad():
            self.linear.weight.copy_(torch.randn(width, 4, generator=generator))
            self.linear.bias.zero_()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("hidden", torch.zeros(1), persistent=False)
        self.inner = Inner()
        self.factor = 1.0
        self.factors = [1.0, {"x": 1.0}]
        self.step = step
        self.offset = torch.zeros(1)

    def forward(self, x, scale=1):
        y = self.inner(self.shift(self.linear(x - self.mean.to(x.dtype))))
        y = helper(y) * self.factor * self.factors[0] + self.hidden + self.offset
        if self.step is not None:
            y = self.step(y)
        return BY(y) * scale
'''
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(5))
KEYS = ["a", "b"]
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "cache"))
    yield
    row_store.close_stores()
    for name in [name for name in sys.modules if name.startswith("made_")]:
        del sys.modules[name]


def module_of(source):
    """A module of that source, as another process would import it."""
    made = types.ModuleType(f"made_{next(_numbers)}")
    sys.modules[made.__name__] = made
    exec(compile(source, f"{made.__name__}.py", "exec"), vars(made))
    return made


def extractor(source=SOURCE, *args, **kwargs):
    return module_of(source).Extractor(*args, **kwargs)


def is_hit(module, **kwargs):
    before = cache_info(module)
    with contextlib.suppress(RuntimeError):  # of another dtype than the input's
        module(X, cache_key=KEYS, **kwargs)
    after = cache_info(module)
    assert after.mismatches == before.mismatches
    return after.hits == before.hits + 2


def edited(old, new):
    assert SOURCE.count(old) >= 1, old
    return lambda: extractor(SOURCE.replace(old, new))


def changed(change, *args, **kwargs):
    def make():
        module = extractor(SOURCE, *args, **kwargs)
        with torch.no_grad():
            change(module)
        return module

    return make


CHANGES = {
    "code of forward": edited("self.mean.to(x.dtype))))", "self.mean.to(x.dtype) * 2)))"),
    "code of a helper": edited("return deeper(x) * SCALE", "return deeper(x) / SCALE"),
    "code of a helper's helper": edited('return x + TABLE["shift"]', 'return x - TABLE["shift"]'),
    "a global number": edited("SCALE = 2.0", "SCALE = 3.0"),
    "inside a global dict": edited('{"shift": 1.0', '{"shift": 2.0'),
    "a global's key": edited('["a", "b"]', '["a", "c"]'),
    "the order of a global dict": edited(
        '{"shift": 1.0, "names": ["a", "b"]}', '{"names": ["a", "b"], "shift": 1.0}'
    ),
    "the content of a closure": edited("BY = make(1.0)", "BY = make(1.5)"),
    "the code of a closure": edited("return x * factor", "return x * factor * 2"),
    "the code of a base": edited("return x + self.bias", "return x - self.bias"),
    "an attribute of a base class": edited("bias = 0.5", "bias = 0.25"),
    "the code of a child": edited("return x.relu()", "return x.sigmoid()"),
    "code of __init__": edited("self.factor = 1.0", "self.factor = 1.25"),
    "a default argument of forward": edited(
        "def forward(self, x, scale=1):", "def forward(self, x, scale=2):"
    ),
    "a default argument of __init__": edited("width=4", "width=5"),
    "an enum's value": edited("FAST = 1", "FAST = 3"),
    "an argument": lambda: extractor(SOURCE, 5),
    "a text argument": lambda: extractor(SOURCE, act="gelu"),
    "an enum argument": lambda: extractor(SOURCE, mode=module_of(SOURCE).Mode.SLOW),
    "a function argument": lambda: extractor(SOURCE, step=torch.tanh),
    "a lambda argument": lambda: extractor(SOURCE, step=lambda x: x + 1),
    "another lambda": lambda: extractor(SOURCE, step=lambda x: x + 2),
    "a path argument": lambda: extractor(SOURCE, path="other.pt"),
    "a weight": changed(lambda module: module.linear.weight.mul_(2)),
    "one element of a weight": changed(lambda module: module.linear.weight.view(-1)[3:4].add_(1)),
    "a weight through .data": changed(lambda module: module.linear.weight.data.mul_(2)),
    "a weight replaced": changed(
        lambda module: setattr(module.linear, "weight", nn.Parameter(torch.ones(4, 4)))
    ),
    "weights swapped": changed(
        lambda module: module.linear.weight.copy_(module.linear.weight.flip(0).clone())
    ),
    "a buffer": changed(lambda module: module.mean.add_(1)),
    "a buffer that isn't saved": changed(lambda module: module.hidden.add_(1)),
    "a buffer through .data": changed(lambda module: module.mean.data.add_(1)),
    "a child replaced": changed(lambda module: setattr(module, "inner", nn.Identity())),
    "a child's hook": changed(lambda module: module.inner.register_forward_hook(lambda *args: args[2] * 2)),
    "an attribute": changed(lambda module: setattr(module, "factor", 3.0)),
    "an attribute in place": changed(lambda module: module.factors.__setitem__(0, 3.0)),
    "deep in an attribute": changed(lambda module: module.factors[1].__setitem__("x", 3.0)),
    "a tensor that is no buffer": changed(lambda module: module.offset.add_(1)),
    "double": changed(lambda module: module.double()),
    "half": changed(lambda module: module.to(torch.bfloat16)),
    "eval": changed(lambda module: module.eval()),
    "eval of a child": changed(lambda module: module.inner.eval()),
    "weights loaded": changed(
        lambda module: module.load_state_dict({**module.state_dict(), "mean": torch.ones(4)})
    ),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.sampled(8)
def test_a_change_is_another_row(what):
    assert not is_hit(extractor())
    assert is_hit(extractor())
    assert not is_hit(CHANGES[what]())
    assert is_hit(extractor())


LATER = dict(
    {
        "a weight": lambda module: module.linear.weight.mul_(2),
        "a weight through .data": lambda module: module.linear.weight.data.mul_(2),
        "a weight through numpy": lambda module: module.linear.weight.detach().numpy().__imul__(2),
        "a buffer": lambda module: module.mean.add_(1),
        "a parameter's storage": lambda module: setattr(module.linear.weight, "data", torch.ones(4, 4)),
        "a child": lambda module: setattr(module, "inner", nn.Identity()),
        "an attribute": lambda module: setattr(module, "factor", 3.0),
        "an attribute in place": lambda module: module.factors.__setitem__(0, 3.0),
        "a tensor that is no buffer": lambda module: module.offset.add_(1),
        "a flag of a child": lambda module: module.inner.eval(),
        "a dtype": lambda module: module.bfloat16(),
    }.items()
)


@pytest.mark.parametrize("what", LATER)
@pytest.mark.sampled(4)
def test_a_change_between_two_calls_is_another_row(what):
    module = extractor()
    assert not is_hit(module)
    assert is_hit(module)
    with torch.no_grad():
        LATER[what](module)
    assert not is_hit(module)
    fresh = extractor()
    assert is_hit(fresh)


def test_each_of_many_states_in_a_row_has_rows_of_its_own():
    module = extractor()
    for factor in range(1, 40):
        with torch.no_grad():
            module.linear.weight.fill_(factor / 8)
        assert torch.equal(module(X, cache_key=KEYS), module(X).detach())


def test_a_hook_in_place_of_another_is_another_row():
    module = extractor()
    hook = module.inner.register_forward_hook(lambda *args: args[2] * 2)
    assert not is_hit(module)
    assert is_hit(module)
    hook.remove()
    module.inner.register_forward_hook(lambda *args: args[2] * 3)
    assert not is_hit(module)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_settings_of_torch_are_other_rows(dtype):
    module = extractor()
    assert not is_hit(module)
    with torch.autocast("cpu", dtype=dtype):
        assert not is_hit(module)
        assert is_hit(module)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert not is_hit(module)
    finally:
        torch.set_float32_matmul_precision(before)
    assert is_hit(module)
    assert not is_hit(module, scale=3)


def moved(module):
    del sys.modules[module.__module__]
    return module


NO_CHANGES = {
    "the same again": lambda: extractor(),
    "a comment": edited(
        "    return deeper(x) * SCALE", "    # says what it does\n    return deeper(x) * SCALE"
    ),
    "a docstring": edited('"""Doc of the helper."""', '"""Another text."""'),
    "no docstring": edited('    """Doc."""\n', ""),
    "a class's docstring": edited('"""Doc."""', '"""Another."""'),
    "lines above": lambda: extractor("\n\n# above\n" + SOURCE),
    "spaces": edited("return deeper(x) * SCALE", "return (deeper( x )\n        *  SCALE)"),
    "an annotation": edited("def deeper(x):", "def deeper(x: torch.Tensor) -> torch.Tensor:"),
    "other code in the file": lambda: extractor(SOURCE + "\nOTHER = 3\ndef unused(x):\n    return x\n"),
    "an unused global": edited("class Mode", "UNUSED = object()\n\nclass Mode"),
    "a default said": lambda: extractor(SOURCE, 4),
    "a default named": lambda: extractor(SOURCE, width=4, act="relu", step=None),
    "options of the cache": edited(
        "@cache_module()", '@cache_module(cache_name="other", on_mismatch="recompute")'
    ),
    "eval and back": changed(lambda module: module.eval().train()),
    "double and back": changed(lambda module: module.float()),
    "a weight written as it was": changed(lambda module: module.linear.weight.mul_(1)),
    "a state loaded as it was": changed(
        lambda module: module.load_state_dict(copy.deepcopy(module.state_dict()))
    ),
    "no gradient": changed(lambda module: module.requires_grad_(False)),
    "a copy": lambda: copy.deepcopy(extractor()),
    "a deleted source": lambda: moved(extractor()),
    "another directory": lambda: (os.chdir("/"), extractor())[1],
}


@pytest.mark.parametrize("what", NO_CHANGES)
@pytest.mark.sampled(5)
def test_no_change_is_the_same_row(what, monkeypatch):
    monkeypatch.chdir(os.getcwd())
    assert not is_hit(extractor())
    assert is_hit(NO_CHANGES[what]())


def test_the_parts_that_differ_are_named():
    one, other = extractor(), extractor(SOURCE.replace("SCALE = 2.0", "SCALE = 3.0"), 5)
    found = []
    for module in (one, other):
        module(X, cache_key=KEYS)
        store = row_store.open_store(module._streamload_options.place)
        found.append(module_proof.proof_of(module).fingerprint(store))
    names = differences(found[0].parts, found[1].parts)
    assert "arguments.width" in names
    assert "code.helper" in names
    assert "weights" in names
    assert "code.deeper" not in names
    assert Fingerprint.of(found[0].parts) == found[0]


def test_what_cannot_be_described_is_an_error_that_names_it():
    class Takes(nn.Module):
        def __init__(self, what):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x)

    takes = cache_module()(Takes)
    for what in (open, (one for one in ()), iter([1])):  # a builtin is known
        module = takes(what)
        if what is open:
            module(X, cache_key=KEYS)
            continue
        with pytest.raises(FeatureNotCacheable, match=r"Takes\(what=\) is a .*cache_module\(version="):
            module(X, cache_key=KEYS)
        assert cache_module(version="1")(Takes)(what)(X, cache_key=KEYS).shape == (2, 4)


def test_a_state_that_c_code_hides_is_none_that_can_be_described():
    class Hides(np.random.RandomState):
        pass

    class Shows:
        def __init__(self):
            self.inner = {"a": Hides}

    Describer().value(Shows(), "it")
    for value in (Hides(3), np.random.default_rng(3), torch.Generator(), threading.Lock()):
        with pytest.raises(FeatureNotCacheable, match="of which nothing tells when it changes"):
            Describer().value(value, "it")


def test_an_attribute_that_cannot_be_described_is_an_error_that_names_it():
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = nn.Identity()
            self.child.source = iter([1])

        def forward(self, x):
            return x

    with pytest.raises(FeatureNotCacheable, match=r"Holds.child.source is a builtins.list_iterator"):
        cache_module()(Holds)()(X, cache_key=KEYS)


def test_a_version_stands_for_code_and_weights():
    one = extractor(SOURCE.replace("cache_module()", 'cache_module(version="1")'))
    assert not is_hit(one)
    assert is_hit(one)
    lazy = extractor(
        SOURCE.replace("cache_module()", 'cache_module(version="1")').replace("SCALE = 2", "SCALE = 9")
    )
    lazy(X[:1], cache_key=["new"])  # is built for it
    assert is_hit(lazy)  # the user's word: nothing is compared
    another = extractor(SOURCE.replace("cache_module()", 'cache_module(version="2")'))
    assert not is_hit(another)


def test_wrong_keys_are_found():
    module = extractor()
    module(X, cache_key=KEYS)
    with pytest.raises(FeatureMismatch, match=r"'[ab]' was computed from another input"):
        module(X.flip(0), cache_key=KEYS)
    with pytest.raises(FeatureMismatch, match="'c' is given for two different inputs"):
        module(X, cache_key=["c", "c"])
    assert cache_info(module).mismatches == 1


def test_random_inputs_are_found():
    module = extractor()
    torch.manual_seed(0)
    module(X + torch.randn_like(X), cache_key=KEYS)
    with pytest.raises(FeatureMismatch, match="something random comes before the module"):
        module(X + torch.randn_like(X), cache_key=KEYS)  # in the second epoch


def test_rows_of_other_inputs_are_computed_again_where_that_is_wanted():
    module = extractor(SOURCE.replace("cache_module()", 'cache_module(on_mismatch="recompute")'))
    first = module(X, cache_key=KEYS)
    for given in (X + 1, X + 2, X):
        assert torch.equal(module(given, cache_key=KEYS), module(given))
    assert torch.equal(module(X, cache_key=KEYS), first)
    assert cache_info(module).mismatches == 3


def test_forward_that_changes_its_module_is_not_stored(caplog):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x + self.calls

    module = cache_module()(Counts)()
    with caplog.at_level(logging.WARNING):
        assert torch.equal(module(X[:1], cache_key=["a"]), X[:1] + 2)
    assert "aren't stored, as computing changes it, or something did since: attributes" in caplog.text
    assert torch.equal(module(X[:1], cache_key=["a"]), X[:1] + 3)
    assert cache_info(module).stored == 0


def test_what_the_first_computation_completes_is_known_in_later_runs(run):
    run.write(
        SOURCE.replace(
            "    def forward(self, x, scale=1):\n",
            "    def forward(self, x, scale=1):\n        self.table = torch.ones(3)\n",
        )
    )
    results = [run() for _ in range(3)]
    assert [one[:3] for one in results[:2]] == [FIRST, BUILT]  # a row is computed to complete it
    assert results[2][:3] == LAZY


def test_code_that_is_replaced_while_it_runs_is_not_stored_as_the_old():
    made = module_of(SOURCE)
    module = made.Extractor()
    module(X, cache_key=KEYS)
    made.SCALE = 5.0
    module(X, cache_key=["c", "d"])
    fresh = extractor()
    assert cache_info(fresh).hits == 0
    fresh(X, cache_key=["c", "d"])
    assert cache_info(fresh).hits == 0


class Runs:
    """Runs of a training, each in a process of its own with generators of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.source = SOURCE

    def write(self, source):
        self.source = source

    def __call__(self, before=torch.seed, after=lambda module: None, keys=KEYS, **arguments):
        """Hits, computed rows and builds, and a sum over the result; or the error."""
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=self._run, args=(there, before, after, keys, arguments))
        process.start()
        there.close()
        found = here.recv()
        process.join()
        here.close()
        return found

    def _run(self, there, before, after, keys, arguments):
        torch.set_num_threads(1)
        try:
            before()
            module = extractor(self.source, **arguments)
            after(module)
            result = module(X, cache_key=keys)
            info = cache_info(module)
            found = [info.hits, info.rows_computed, info.builds]
            module(X, cache_key=["c", "d"])  # from here on it is built
            there.send((*found, result.double().sum().item()))
        except Exception as exc:
            there.send(repr(exc))


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    return Runs(folder)


FIRST, BUILT, LAZY = (0, 2, 1), (2, 0, 1), (2, 0, 0)


def test_from_the_third_run_on_nothing_is_built(run):
    results = [run() for _ in range(4)]
    assert [one[:3] for one in results] == [FIRST, BUILT, LAZY, LAZY]
    assert len({one[3] for one in results}) == 1
    assert run(after=lambda module: module.eval())[:3] == FIRST  # another recipe
    run.write(SOURCE.replace("SCALE = 2.0", "SCALE = 3.0"))
    assert run()[:3] == FIRST
    run.write(SOURCE)
    assert run()[:3] == LAZY


UNSEEDED = SOURCE.replace("generator = torch.Generator().manual_seed(0)", "generator = None")


def test_an_unseeded_module_is_never_served(run):
    run.write(UNSEEDED)
    results = [run() for _ in range(4)]
    assert [one[:3] for one in results] == [FIRST] * 4
    assert len({one[3] for one in results}) == 4


def test_a_seeded_module_is_served_for_its_seed_only(run):
    run.write(UNSEEDED)
    seeded = [run(before=lambda: torch.manual_seed(0)) for _ in range(3)]
    assert [one[:3] for one in seeded] == [FIRST, BUILT, LAZY]
    other = run(before=lambda: torch.manual_seed(1))
    assert other[:3] == FIRST
    assert other[3] != seeded[0][3]
    assert run(before=lambda: torch.manual_seed(0))[:3] == LAZY


LOADING = SOURCE.replace("self.linear.bias.zero_()", "self.linear.bias.copy_(torch.load(path))")


def test_other_weights_in_a_file_are_seen_before_the_module_is_built(run):
    run.write(LOADING)
    path = str(run.folder / "weights.pt")
    torch.save(torch.zeros(4), path)
    assert [run(path=path)[:3] for _ in range(3)] == [FIRST, BUILT, LAZY]
    os.utime(path)
    assert run(path=path)[:3] == BUILT  # who knows? it is built, and is the same
    torch.save(torch.ones(4), path)
    assert run(path=path)[:3] == FIRST


def test_a_named_file_of_weights_makes_one_build_enough(run):
    path = str(run.folder / "weights.pt")
    run.write(LOADING.replace("cache_module()", f"cache_module(weights={path!r})"))
    torch.save(torch.zeros(4), path)
    assert [run(path=path)[:3] for _ in range(2)] == [FIRST, LAZY]
    torch.save(torch.ones(4), path)
    assert run(path=path)[:3] == FIRST


def test_a_build_that_asks_the_network_is_never_believed(run, monkeypatch):
    monkeypatch.setattr(
        module_proof, "asked", lambda: socket.socket().connect_ex(("127.0.0.1", 9)), raising=False
    )
    asking = "from streamload.derived.proof import module_proof; module_proof.asked()"
    run.write(SOURCE.replace("        self.factor = 1.0\n", f"        self.factor = 1.0\n        {asking}\n"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        assert [run()[:3] for _ in range(3)] == [FIRST, BUILT, BUILT]


def by(expression):
    """The source with an `__init__` that takes a factor from somewhere."""
    return SOURCE.replace("import enum", "import enum, os, sys").replace(
        "self.factor = 1.0", f"self.factor = float({expression})"
    )


@pytest.mark.parametrize("read", ['os.environ.get("FACTOR", "1")', 'os.getenv("FACTOR", "1")'])
def test_a_build_is_believed_while_the_variables_that_it_read_are_the_same(run, read):
    run.write(by(read))
    assert [run()[:3] for _ in range(3)] == [FIRST, BUILT, LAZY]
    assert run(before=lambda: os.environ.update(OTHER="2"))[:3] == LAZY
    others = [run(before=lambda: os.environ.update(FACTOR="2")) for _ in range(2)]
    assert [one[:3] for one in others] == [FIRST, BUILT]
    assert others[0][3] == others[1][3] != run()[3]
    assert type(os.environ).__module__ == "os"  # noted no longer than a build takes


def test_values_of_variables_are_not_stored(run):
    run.write(by('len(os.environ["SECRET"])'))
    run(before=lambda: os.environ.update(SECRET="s3cr3t-value"))
    stored = [path.read_bytes() for path in (run.folder.parent / "cache").rglob("*") if path.is_file()]
    assert any(b"SECRET" in data for data in stored)
    assert not any(b"s3cr3t-value" in data for data in stored)


def test_a_build_by_what_nothing_tells_is_found_out(run):
    """What is served before the build can't be taken back, but it is said."""
    run.write(by("getattr(sys, 'factor', 1)"))
    assert [run(keys=keys)[:3] for keys in (KEYS, KEYS, KEYS)] == [FIRST, BUILT, LAZY]
    found = run(before=lambda: setattr(sys, "factor", 2), keys=["a", "b"], after=lambda module: None)
    assert found[:3] == LAZY  # "c" and "d" are there, too
    with open_catalog(row_store.RowPlace("").root, writable=True) as catalog:
        keys = catalog.connection.execute(
            "SELECT key FROM rows WHERE used NOT NULL ORDER BY key LIMIT -1 OFFSET 2"
        )
        assert catalog.change("DELETE FROM rows WHERE key = ?", keys) == 2
    found = run(before=lambda: setattr(sys, "factor", 2))
    assert "FeatureMismatch" in found
    assert "Extractor was built otherwise than twice before (attributes.factor)" in found


def test_records_that_cannot_be_read_are_none():
    for data in (None, b"", b"{", b"[3]", b'[{"process": 1}]'):
        assert builds.read_builds(data) == []


def test_a_large_module_is_sampled_and_looked_at_whole_before_rows_are_stored():
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1024, 1024))

        def forward(self, x):
            return x @ self.weight[:4, :4]

    module = cache_module()(Large)()
    module(X, cache_key=KEYS)
    module(X, cache_key=KEYS)
    module.weight.data.mul_(2)  # a sample sees it
    assert torch.equal(module(X, cache_key=KEYS), module(X).detach())
    module.weight.data[0, 0] = 7.0  # one element, which no sample need see
    made = module(X, cache_key=["c", "d"])
    assert torch.equal(made, module(X).detach())
    again = cache_module()(Large)()
    again.weight.data.mul_(2)
    assert torch.equal(again(X, cache_key=["c", "d"]), again(X).detach())


def test_a_library_that_is_patched_between_two_calls_is_noticed_before_rows_are_stored(monkeypatch):
    class Gelu(nn.Module):
        def forward(self, x):
            return nn.functional.gelu(x)

    module = cache_module()(Gelu)()
    module(X, cache_key=KEYS)
    for expected, new in ((lambda x: x * 3, ["c", "d"]), (nn.functional.gelu, ["e", "f"])):
        monkeypatch.setattr(nn.functional, "gelu", expected)
        assert torch.equal(module(X, cache_key=new), expected(X))
        cache_info(module)  # what it computed is stored, if it is as it was
        for keys in (KEYS, ["c", "d"], new):
            assert torch.equal(module(X, cache_key=keys), expected(X))


def test_packages_count_by_version_and_the_project_by_code():
    describer = Describer()
    describer.reach(module_of(SOURCE).Extractor, "it")
    assert describer.code["package torch"] == torch.__version__
    assert {
        "Extractor",
        "Extractor.forward",
        "Base",
        "helper",
        "deeper",
        "Inner",
        "make.<locals>.by",
        "by",
    } & set(describer.code) >= {"Extractor", "Extractor.forward", "Base", "helper", "deeper", "Inner", "by"}
    assert not any("cache_module" in name for name in describer.code)


def test_a_function_of_another_file_is_followed(tmp_path, monkeypatch):
    (tmp_path / "made_elsewhere.py").write_text("RATE = 1.0\ndef rate(x):\n    return x * RATE\n")
    monkeypatch.syspath_prepend(tmp_path)
    source = SOURCE.replace("import enum\n", "import enum\nimport made_elsewhere\n").replace(
        "return deeper(x) * SCALE", "return made_elsewhere.rate(deeper(x)) * SCALE"
    )
    assert not is_hit(extractor(source))
    assert is_hit(extractor(source))
    sys.modules["made_elsewhere"].RATE = 2.0
    assert not is_hit(extractor(source))
    inside = (
        textwrap.dedent(source)
        .replace("import enum\nimport made_elsewhere\n", "import enum\n")
        .replace(
            "    return made_elsewhere.rate", "    import made_elsewhere\n    return made_elsewhere.rate"
        )
    )
    assert not is_hit(extractor(inside))
    assert is_hit(extractor(inside))
    sys.modules["made_elsewhere"].RATE = 3.0
    assert not is_hit(extractor(inside))


def test_streamload_itself_counts_by_version_and_commit_from_any_directory(tmp_path, monkeypatch):
    """A checkout that is the current directory hides where streamload was installed from."""
    about = tmp_path / "streamload-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: streamload\nVersion: 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for origin in (
        "",
        '{"url": "file:///x", "dir_info": {"editable": true}}',
        '{"vcs_info": {"commit_id": "1"}}',
    ):
        (about / "direct_url.json").write_text(origin)
        for cached in (project_code.direct_url, code._version):
            cached.cache_clear()
        importlib.invalidate_caches()
        found.append(code._version("streamload"))
    for cached in (project_code.direct_url, code._version):
        cached.cache_clear()
    assert found[0] == found[1] == streamload.__version__
    assert found[2].startswith(f"{streamload.__version__} ")


def test_a_package_that_was_installed_from_a_folder_counts_by_its_code(tmp_path, monkeypatch):
    site = tmp_path / "site-packages"
    (site / "made_package-1.0.dist-info").mkdir(parents=True)
    (site / "made_package-1.0.dist-info" / "METADATA").write_text("Name: made_package\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(project_code, "_INSTALLED", (str(site),))
    source = SOURCE.replace("import enum\n", "import enum\nimport made_package\n").replace(
        "return deeper(x) * SCALE", "return made_package.by(deeper(x)) * SCALE"
    )
    for origin, is_followed in ((None, False), ('{"url": "file:///x", "dir_info": {}}', True)):
        if origin is not None:
            (site / "made_package-1.0.dist-info" / "direct_url.json").write_text(origin)
        found = []
        for rate in (1.0, 2.0):
            for cached in (project_code._package, project_code.direct_url, code._version):
                cached.cache_clear()
            sys.modules.pop("made_package", None)
            shutil.rmtree(site / "__pycache__", ignore_errors=True)
            (site / "made_package.py").write_text(f"def by(x):\n    return x * {rate}\n")
            importlib.invalidate_caches()
            describer = Describer()
            describer.reach(module_of(source).helper, "it")
            found.append(describer.code)
        assert (found[0] != found[1]) is is_followed
        assert ("package made_package" in found[0]) is not is_followed
    for cached in (project_code._package, project_code.direct_url, code._version):
        cached.cache_clear()
    del sys.modules["made_package"]
