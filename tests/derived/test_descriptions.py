"""Each ordinary edit of code and values changes its description, and what changes no result changes none."""

from __future__ import annotations

import itertools
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from streamload import cache_info, cache_module
from streamload.derived.proof import code
from streamload.derived.proof.code import Describer
from streamload.derived.proof.fingerprint import built_parts
from streamload.derived.store import row_store
from streamload.facts.recipes import read_facts

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def no_modules_are_left() -> Iterator[None]:
    yield
    for name in [name for name in sys.modules if name.startswith("described_")]:
        del sys.modules[name]


def module_of(source: str, name: str = "") -> types.ModuleType:
    """A module of the project, as another process would import it."""
    made = types.ModuleType(name or f"described_{next(_numbers)}")
    sys.modules[made.__name__] = made
    exec(compile(textwrap.dedent(source), f"{made.__name__}.py", "exec"), vars(made))
    return made


def described(value: Any) -> list[Any]:
    describer = Describer()
    return [describer.value(value, "it"), describer.arranged_code]


STEPS = """
    import collections
    import functools
    import torch

    class Double:
        def __call__(self, x):
            return x * 2
    def other():
        class Double:
            def __call__(self, x):
                return x - 2
        return Double
    Other = other()
    Other.__qualname__ = "Double"

    def times(factor):
        return lambda x: x * factor
    def both(first, second):
        return lambda x: second(first(x))
    def run(steps):
        def step(x):
            for one in steps:
                x = one(x)
            return x
        return step

    add, double = (lambda x: x + 1), (lambda x: x * 2)
    lambdas = {"add": add, "double": double}
    three, four = times(3), times(4)
    deep = both(both(add, double), add)

    class Chain(torch.nn.Module):
        def __init__(self, *steps):
            super().__init__()
            self.steps = steps
        def forward(self, x):
            return run(self.steps)(x)
    class Step(torch.nn.Module):
        def __init__(self, by):
            super().__init__()
            self.by = by
        def forward(self, x):
            return self.by(x)

    value = VALUE
"""


def step(expression: str) -> Callable[[], Any]:
    """A value made in a module that has the steps above."""
    return lambda: module_of(STEPS.replace("VALUE", expression)).value


ORDERS = {
    "lambdas in a list": ("[add, double, double]", "[add, add, double]"),
    "lambdas in a tuple": ("(add, double)", "(double, add)"),
    "lambdas in a deque": ("collections.deque([add, double])", "collections.deque([double, add])"),
    "lambdas as values of a dict": ('{"a": add, "b": double}', '{"a": double, "b": add}'),
    "the order of a dict": ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}'),
    "the order of a dict of steps": ('{"a": add, "b": double}', '{"b": double, "a": add}'),
    "the order of an ordered dict": (
        'collections.OrderedDict({"a": 1, "b": 2})',
        'collections.OrderedDict({"b": 2, "a": 1})',
    ),
    "closures of one function": ("[three, four, four]", "[three, three, four]"),
    "closures around functions": ("both(add, double)", "both(double, add)"),
    "closures around closures": ("both(both(add, double), add)", "both(both(double, add), add)"),
    "closures three deep": (
        "both(both(both(add, double), add), add)",
        "both(both(both(double, add), add), add)",
    ),
    "closures in two places": (
        "[both(both(add, double), add), both(both(double, add), add)]",
        "[both(both(double, add), add), both(both(add, double), add)]",
    ),
    "classes of one name": ("[Double, Other, Other]", "[Double, Double, Other]"),
    "objects of classes of one name": ("[Double(), Other()]", "[Other(), Double()]"),
    "a list in a closure": ("run([add, double, double])", "run([add, add, double])"),
    "a partial's function": (
        "functools.partial(run, [add, double])",
        "functools.partial(run, [double, add])",
    ),
    "a partial's keyword": (
        "functools.partial(run, steps=[add, double])",
        "functools.partial(run, steps=[double, add])",
    ),
    "modules in a Sequential": (
        "torch.nn.Sequential(Step(add), Step(double))",
        "torch.nn.Sequential(Step(double), Step(add))",
    ),
    "steps of a module": ("Chain(add, double, double)", "Chain(add, add, double)"),
    "layers of a Sequential": (
        "torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())",
        "torch.nn.Sequential(torch.nn.Tanh(), torch.nn.ReLU())",
    ),
    "which of two lambdas": ("add", "double"),
    "the number of steps": ("[add, double]", "[add, double, double]"),
    "a function for its result": ("[times]", "[three]"),
    "bound methods": ("Double().__call__", "Other().__call__"),
}


@pytest.mark.parametrize("what", ORDERS)
def test_the_order_of_what_shares_a_name_counts(what: str) -> None:
    before, after = (step(expression) for expression in ORDERS[what])
    assert described(before()) == described(before())
    assert described(before()) != described(after())


SOURCE = """
    import functools

    SCALE = 2.0
    def helper(x):
        return x * SCALE

    class Meta(type):
        FACTOR = 3
        def scale(cls, x):
            return x * cls.FACTOR
    class Made(metaclass=Meta):
        def __call__(self, x):
            return type(self).scale(x)

    @functools.singledispatch
    def by_type(x):
        return x
    @by_type.register
    def _(x: int):
        return x + 1

    class ByType:
        @functools.singledispatchmethod
        def by(self, x):
            return x
        @by.register
        def _(self, x: int):
            return x + 2

    @functools.lru_cache
    def kept(x):
        return x + 3

    def wrapping(function):
        @functools.wraps(function)
        def wrapper(x):
            return function(x) + 4
        return wrapper
    @wrapping
    def wrapped(x):
        return x * 5

    def default(x, by=6, *, more=(7, 8)):
        return x + by + sum(more)
    def even(n):
        return n == 0 or odd(n - 1)
    def odd(n):
        return n != 0 and even(n - 1)
    class Slots:
        __slots__ = ("a",)
        def __init__(self):
            self.a = 9
    slots = Slots()
    generator = [x + 10 for x in range(3)]
    async_like = {"key": ("value", 11)}
"""
EDITS = {
    "a global of a helper": ("helper", "SCALE = 2.0", "SCALE = 3.0"),
    "an attribute of a metaclass": ("Made()", "FACTOR = 3", "FACTOR = 4"),
    "a method of a metaclass": ("Made()", "x * cls.FACTOR", "x + cls.FACTOR"),
    "what is registered for a type": ("by_type", "return x + 1", "return x + 2"),
    "the type for which it is": ("by_type", "def _(x: int)", "def _(x: str)"),
    "what a method has registered": ("ByType()", "return x + 2", "return x + 3"),
    "what lru_cache wraps": ("kept", "return x + 3", "return x + 4"),
    "a decorator": ("wrapped", "function(x) + 4", "function(x) + 5"),
    "what is decorated": ("wrapped", "x * 5", "x * 6"),
    "a default": ("default", "by=6", "by=7"),
    "a keyword's default": ("default", "more=(7, 8)", "more=(8, 7)"),
    "one of two that call each other": ("even", "n != 0", "n != 1"),
    "the other of two that call each other": ("odd", "n == 0", "n == 1"),
    "what a slot holds": ("slots", "self.a = 9", "self.a = 10"),
    "an element": ("generator", "x + 10", "x + 11"),
    "deep in a container": ("async_like", "11", "12"),
}


@pytest.mark.parametrize("what", EDITS)
def test_an_edit_counts(what: str) -> None:
    expression, old, new = EDITS[what]
    assert SOURCE.count(old) == 1

    def made(source: str) -> list[Any]:
        return described(eval(expression, vars(module_of(source))))

    assert made(SOURCE) == made(SOURCE)
    assert made(SOURCE) != made(SOURCE.replace(old, new))


USES = {
    "a module that is held": "import described_config\ndef use(x, c=described_config): return x * c.SCALE",
    "an alias": (
        "import described_config\nalias = described_config\n"
        "def use(x):\n    c = alias\n    return x * c.SCALE"
    ),
    "a module that is passed": (
        "import described_config\ndef scale(config): return config.SCALE\n"
        "def use(x): return x * scale(described_config)"
    ),
    "getattr": 'import described_config\ndef use(x): return x * getattr(described_config, "SCALE")',
    "an attribute that is read": "import described_config\ndef use(x): return x * described_config.SCALE",
    "a late import": "def use(x):\n    import described_config as c\n    return x * c.SCALE",
    "a late import of a name": "def use(x):\n    from described_config import SCALE\n    return x * SCALE",
    "a dict of modules": (
        "import described_config\nALL = {'c': described_config}\ndef use(x): return x * ALL['c'].SCALE"
    ),
    "a nested value": "import described_config\ndef use(x, c=described_config): return x * c.TABLE['a'][1]",
    "a function of it": "import described_config\ndef use(x, c=described_config): return c.scaled(x)",
}
CONFIG = "SCALE = 2.0\nTABLE = {'a': [1, 2]}\ndef scaled(x):\n    return x * SCALE\n"


@pytest.mark.parametrize("what", USES)
@pytest.mark.parametrize("is_set_at_run_time", [False, True])
def test_values_of_a_module_count(what: str, is_set_at_run_time: bool) -> None:
    def made(**values: Any) -> list[Any]:
        config = module_of(CONFIG, "described_config")
        use = module_of(USES[what]).use
        vars(config).update(values if is_set_at_run_time else {})
        if values and not is_set_at_run_time:
            config = module_of(CONFIG.replace("2.0", "3.0").replace("[1, 2]", "[1, 3]"), "described_config")
            use = module_of(USES[what]).use
        return described(use)

    assert made() == made()
    assert made() != made(SCALE=3.0, TABLE={"a": [1, 3]})


SAME = {
    "a comment": (CONFIG, "# of a run\n" + CONFIG),
    "lines": (CONFIG, "\n\n\n" + CONFIG),
    "an import that nothing uses": (CONFIG, "import json\n" + CONFIG),
    "a docstring": (CONFIG, CONFIG.replace("scaled(x):", 'scaled(x):\n    """Text."""')),
    "an annotation": (CONFIG, CONFIG.replace("scaled(x):", "scaled(x: float) -> float:")),
}


@pytest.mark.parametrize("what", SAME)
@pytest.mark.parametrize("use", ["a module that is held", "an attribute that is read", "a function of it"])
def test_a_module_that_says_the_same_is_the_same(what: str, use: str) -> None:
    def made(config: str) -> list[Any]:
        module_of(config, "described_config")
        return described(module_of(USES[use]).use)

    before, after = SAME[what]
    assert made(before) == made(after)


def test_what_has_no_order_has_none_in_its_description() -> None:
    functions = [step(expression)() for expression in ("add", "double", "three", "four")]
    assert described(set(functions)) == described(set(functions[2:]) | set(functions[:2]))
    assert described(set(functions)) != described(set(functions[1:]))


def test_code_is_described_alike_wherever_it_is_reached_first() -> None:
    made = module_of(SOURCE)
    one, other = Describer(), Describer()
    for name in ("even", "odd", "helper"):
        one.value(vars(made)[name], name)
    for name in ("helper", "odd", "even"):
        other.value(vars(made)[name], name)
    assert one.arranged_code == other.arranged_code


def test_a_module_of_many_classes_is_digested_in_time_that_grows_as_they_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the number of digests."""
    of = code.digest_of
    digested: list[Any] = []
    monkeypatch.setattr(code, "digest_of", lambda described: digested.append(None) or of(described))

    def count(classes: int) -> int:
        source = "from torch import nn\n" + "".join(
            f"class L{number}(nn.Module):\n"
            f"    def __init__(self):\n        super().__init__()\n        self.by = lambda x: x + {number}\n"
            for number in range(classes)
        )
        made = vars(module_of(source))
        digested.clear()
        built_parts(nn.Sequential(*(made[f"L{number}"]() for number in range(classes))), Describer())
        return len(digested)

    assert count(40) <= 2.5 * count(20)


def test_a_function_given_in_a_call_counts_with_its_code(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path))

    @cache_module
    class Pools(nn.Module):
        def forward(self, x: torch.Tensor, pool: Any = None) -> torch.Tensor:
            return pool(x)

    x = torch.arange(8.0).reshape(2, 4)
    made = module_of(STEPS.replace("VALUE", "None"))
    module = Pools()
    try:
        for pool in (made.add, made.double, made.three, made.four, made.Double(), made.Other()):
            before = cache_info(module).hits
            assert torch.equal(module(x, pool=pool, cache_key=["a", "b"]), pool(x))
            assert cache_info(module).hits == before
            assert torch.equal(module(x, pool=pool, cache_key=["a", "b"]), pool(x))
            assert cache_info(module).hits == before + 2
    finally:
        row_store.close_stores()


def test_facts_by_functions_of_one_name_are_other_facts() -> None:
    def digest(expression: str) -> str:
        return read_facts({"f": step(expression)()}, "jpg", None, None)["f"].digest

    assert digest("both(add, double)") == digest("both(add, double)")
    assert len({digest(one) for pair in ORDERS.values() for one in pair if one.startswith("both")}) == 6


class Scaled(nn.Module):
    def __init__(self, factor: float = 2.0):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        nn.init.constant_(self.linear.weight, 0.5)
        nn.init.zeros_(self.linear.bias)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.factor + torch.arange(4.0)


class Shifted(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.factor - torch.arange(4.0)


X = torch.arange(8.0).reshape(2, 4)
FORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "script": torch.jit.script,
    "trace": lambda module: torch.jit.trace(module, X),
    "compile": lambda module: torch.compile(module, backend="eager"),  # type: ignore[dict-item]
    "int8 weights": lambda module: torch.ao.quantization.quantize_dynamic(module, {nn.Linear}),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("form", FORMS)
def test_children_in_another_form_count_with_weights_code_and_constants(form: str) -> None:
    def made(module: nn.Module, weight: float = 0.5) -> list[Any]:
        nn.init.constant_(module.linear.weight, weight)
        return described(nn.Sequential(FORMS[form](module.eval())))

    assert made(Scaled()) == made(Scaled())
    others = [made(Scaled(), 0.25), made(Scaled(3.0)), made(Shifted())]
    assert all(other != made(Scaled()) for other in others)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("form", ["script", "trace", "compile"])
def test_a_module_with_a_child_in_another_form_has_rows(form: str, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path))

    @cache_module
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = FORMS[form](Scaled().eval())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.child(x)

    try:
        module = Holds().eval()
        computed, read = (module(X, cache_key=["a", "b"]) for _ in range(2))
        assert torch.equal(computed, read)
        assert cache_info(module).hits == 2
    finally:
        row_store.close_stores()
