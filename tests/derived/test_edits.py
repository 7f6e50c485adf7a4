"""The matrix of edits: what changes a result is found by the description or by the check.

Each kind of edit is tried in each place in which a function can stand, and what changes no result costs none.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import os
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as torch_module

from streamload import cache_info
from streamload.derived.proof.code import Describer
from streamload.derived.store import row_store
from streamload.errors import FeatureNotCacheable
from streamload.facts.recipes import read_facts

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def packages_are_as_they_were() -> Iterator[None]:
    gelu, forward, benchmark = functional.gelu, nn.Hardtanh.forward, torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.benchmark = benchmark
    functional.gelu, nn.Hardtanh.forward = gelu, forward  # type: ignore[method-assign]
    torch_module._global_forward_hooks.clear()
    for name in [name for name in sys.modules if name.startswith("edited_")]:
        del sys.modules[name]


def module_of(source: str, name: str = "", path: str = "") -> types.ModuleType:
    """A module of the project, as another process would import it."""
    made = types.ModuleType(name or f"edited_{next(_numbers)}")
    sys.modules[made.__name__] = made
    exec(compile(textwrap.dedent(source), path or f"{made.__name__}.py", "exec"), vars(made))
    return made


IMPORTS = """
import array
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import logging
import operator
import types
import typing
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
"""
PLACES = {
    "forward": """
        class Holder(nn.Module):
            def forward(self, x):
                return f(x)
        value = Holder()
    """,
    "a helper": """
        def helper(x):
            return f(x) + 1
        class Holder(nn.Module):
            def forward(self, x):
                return helper(x)
        value = Holder()
    """,
    "a base": """
        class Base(nn.Module):
            def step(self, x):
                return f(x)
        class Holder(Base):
            def forward(self, x):
                return self.step(x)
        value = Holder()
    """,
    "an attribute": """
        class Holder(nn.Module):
            def __init__(self, by):
                super().__init__()
                self.by = by
            def forward(self, x):
                return self.by(x)
        value = Holder(f)
    """,
    "a child of a Sequential": """
        class Step(nn.Module):
            def __init__(self, by):
                super().__init__()
                self.by = by
            def forward(self, x):
                return self.by(x)
        value = nn.Sequential(nn.Linear(2, 2, bias=False), Step(f))
        nn.init.ones_(value[0].weight)
    """,
    "a closure": """
        def around(by):
            return lambda x: by(x)
        class Holder(nn.Module):
            def __init__(self, by):
                super().__init__()
                self.by = by
            def forward(self, x):
                return self.by(x)
        value = Holder(around(f))
    """,
    "a default": """
        class Holder(nn.Module):
            def forward(self, x, by=f):
                return by(x)
        value = Holder()
    """,
    "a hook": """
        value = nn.Sequential(nn.Identity())
        value[0].register_forward_hook(lambda module, args, result: f(result))
    """,
    "an argument": "value = functools.partial(f)",
    "preprocess": "value = lambda image: f(image)",
    "a fact": "value = lambda sample: float(f(torch.ones(1)))",
}
CONFIG = "SCALE = 2.0\nTABLE = {'a': [1, 2]}\n"
EDITS = {
    "a lambda's code": ("f = lambda x: x + 1", "x + 1", "x + 2"),
    "a global": ("SCALE = 2.0\ndef f(x): return x * SCALE", "2.0", "3.0"),
    "a default value": ("def f(x, by=3): return x * by", "by=3", "by=4"),
    "the order of lambdas": (
        (
            "add, double = (lambda x: x + 1), (lambda x: x * 2)\nSTEPS = [add, double]\n"
            "def f(x):\n    for step in STEPS:\n        x = step(x)\n    return x"
        ),
        "[add, double]",
        "[double, add]",
    ),
    "the order of closures": (
        (
            "def times(k): return lambda x: x * k\ndef plus(k): return lambda x: x + k\n"
            "def chain(a, b): return lambda x: b(a(x))\nf = chain(times(2), plus(1))"
        ),
        "times(2), plus(1)",
        "plus(1), times(2)",
    ),
    "which of two closures": (
        "def times(k): return lambda x: x * k\na, b = times(2), times(3)\nf = a",
        "f = a",
        "f = b",
    ),
    "classes of one name": (
        (
            "class Step:\n    def __call__(self, x): return x + 1\nFirst = Step\n"
            "class Step:\n    def __call__(self, x): return x * 2\nf = First()"
        ),
        "f = First()",
        "f = Step()",
    ),
    "the order of a dict": (
        (
            "STEPS = {'a': 2.0, 'b': 3.0}\ndef f(x):\n    for by in STEPS.values():\n"
            "        x = (x + 1) * by\n    return x"
        ),
        "{'a': 2.0, 'b': 3.0}",
        "{'b': 3.0, 'a': 2.0}",
    ),
    "what is registered": (
        (
            "@functools.singledispatch\ndef by_type(x): return x\n@by_type.register\n"
            "def _(x: torch.Tensor): return x * 2\ndef f(x): return by_type(x)"
        ),
        "return x * 2",
        "return x * 3",
    ),
    "a metaclass": (
        (
            "class Meta(type):\n    K = 2\n    def scale(cls, x): return x * cls.K\n"
            "class Made(metaclass=Meta): pass\ndef f(x): return Made.scale(x)"
        ),
        "K = 2",
        "K = 3",
    ),
    "what a decorator wraps": (
        (
            "def doubled(function):\n    @functools.wraps(function)\n"
            "    def inner(x): return function(x) * 2\n    return inner\n@doubled\ndef f(x): return x + 1"
        ),
        "x + 1",
        "x + 2",
    ),
    "what lru_cache wraps": (
        "@functools.lru_cache\ndef factor(): return 2.0\ndef f(x): return x * factor()",
        "2.0",
        "3.0",
    ),
    "the state of what wraps": (
        (
            "class Wrapper:\n    def __init__(self, function, by):\n        self.by = by\n"
            "        functools.update_wrapper(self, function)\n"
            "    def __call__(self, x): return self.__wrapped__(x) * self.by\n"
            "f = Wrapper(lambda x: x + 1, by=2)"
        ),
        "by=2",
        "by=3",
    ),
    "the code of what wraps": (
        (
            "class Wrapper:\n    def __init__(self, function): functools.update_wrapper(self, function)\n"
            "    def __call__(self, x): return self.__wrapped__(x) * 2\nf = Wrapper(lambda x: x + 1)"
        ),
        "* 2",
        "* 3",
    ),
    "a method of a dict": (
        "scale = {'a': 2.0}.get\ndef f(x): return x * scale('a')",
        "2.0",
        "3.0",
    ),
    "a method of a pattern": (
        "import re\nmatch = re.compile('a').match\ndef f(x): return x * bool(match('ab'))",
        "'a'",
        "'b'",
    ),
    "flags": (
        (
            "import enum\nclass Parts(enum.Flag):\n    A = 1\n    B = 2\n    C = 4\n"
            "PARTS = Parts.A | Parts.B\ndef f(x): return x * PARTS.value"
        ),
        "Parts.A | Parts.B",
        "Parts.A | Parts.C",
    ),
    "a function of a library": (
        "def mine(x): return x * 2\nF.gelu = mine\ndef f(x): return F.gelu(x)",
        "x * 2",
        "x * 3",
    ),
    "a wrapped function of a library": (
        (
            "gelu = F.gelu\n@functools.wraps(gelu)\ndef mine(x): return x * 2\nF.gelu = mine\n"
            "def f(x): return F.gelu(x)"
        ),
        "x * 2",
        "x * 3",
    ),
    "a method of a library": (
        (
            "def forward(self, x): return x * 2\nnn.Hardtanh.forward = forward\n"
            "def f(x): return nn.Hardtanh()(x)"
        ),
        "x * 2",
        "x * 3",
    ),
    "a hook of all modules": (
        (
            "from torch.nn.modules.module import register_module_forward_hook\n"
            "def hook(module, args, result): return result * 2\nregister_module_forward_hook(hook)\n"
            "def f(x): return nn.functional.relu(x)"
        ),
        "result * 2",
        "result * 3",
    ),
    "an operator": (
        (
            "@torch.library.custom_op('edited::NAME', mutates_args=())\n"
            "def NAME(x: torch.Tensor) -> torch.Tensor: return x * 2\n"
            "def f(x): return torch.ops.edited.NAME(x)"
        ),
        "x * 2",
        "x * 3",
    ),
    "a module that is held": (
        "import edited_config\nc = edited_config\ndef f(x): return x * c.SCALE",
        "",
        "",
    ),
    "a module by getattr": ("import edited_config as c\ndef f(x): return x * getattr(c, 'SCALE')", "", ""),
    "a late import": ("def f(x):\n    from edited_config import SCALE\n    return x * SCALE", "", ""),
    "a late import of a module": ("def f(x):\n    import edited_config as c\n    return x * c.SCALE", "", ""),
    "a late import on the line": (
        "def f(x):\n    import edited_config; return edited_config.SCALE * x",
        "",
        "",
    ),
    "a nested value": ("import edited_config\ndef f(x): return x * edited_config.TABLE['a'][0]", "", ""),
    "an attribute of a partial": (
        "by = functools.partial(lambda x: x)\nby.scale = 2\ndef f(x): return by(x) * by.scale",
        "scale = 2",
        "scale = 3",
    ),
    "a subclass of partial": (
        (
            "class By(functools.partial):\n    def __call__(self, x): return super().__call__(x) * 2\n"
            "f = By(lambda x: x)"
        ),
        "* 2",
        "* 3",
    ),
    "the length of a deque": (
        (
            "last = collections.deque([1.0], maxlen=2)\ndef f(x):\n    last.append(2.0)\n"
            "    return x * len(last)"
        ),
        "maxlen=2",
        "maxlen=1",
    ),
    "the default of a defaultdict": (
        "scales = collections.defaultdict(lambda: 2.0)\ndef f(x): return x * scales['a']",
        "2.0",
        "3.0",
    ),
    "the default of a subclass of it": (
        (
            "class Scales(collections.defaultdict): pass\nscales = Scales(lambda: 2.0)\n"
            "def f(x): return x * scales['a']"
        ),
        "2.0",
        "3.0",
    ),
    "a slot of a list": (
        (
            "class Scales(list):\n    __slots__ = ('by',)\nscales = Scales([1])\nscales.by = 2\n"
            "def f(x): return x * scales.by"
        ),
        "by = 2",
        "by = 3",
    ),
    "a private slot": (
        (
            "class Scale:\n    __slots__ = ('__by',)\n    def __init__(self, by): self.__by = by\n"
            "    def __call__(self, x): return x * self.__by\nf = Scale(2)"
        ),
        "Scale(2)",
        "Scale(3)",
    ),
    "an attribute of a member of an enum": (
        "class Kind(enum.Enum):\n    A = 1\nKind.A.by = 2\ndef f(x): return x * Kind.A.by",
        "by = 2",
        "by = 3",
    ),
    "a list in an enum": (
        "class Kind(enum.Enum):\n    A = [2]\ndef f(x): return x * Kind.A.value[0]",
        "[2]",
        "[3]",
    ),
    "a subclass of Tensor": (
        (
            "class Scale(torch.Tensor):\n    by = 2\nscale = torch.ones(1).as_subclass(Scale)\n"
            "def f(x): return x * scale.by"
        ),
        "by = 2",
        "by = 3",
    ),
    "the mask of an array": (
        ("scales = np.ma.array([1.0, 2.0], mask=[False, True])\ndef f(x): return x * float(scales.sum())"),
        "[False, True]",
        "[True, False]",
    ),
    "a number of decimals": ("by = decimal.Decimal('2')\ndef f(x): return x * float(by)", "'2'", "'3'"),
    "a date": ("by = datetime.datetime(2, 1, 1)\ndef f(x): return x * by.year", "(2,", "(3,"),
    "a plain array": ("by = array.array('f', [2])\ndef f(x): return x * by[0]", "[2]", "[3]"),
    "a namespace that is passed": (
        "config = types.SimpleNamespace(by=2)\ndef f(x): return x * getattr(config, 'by')",
        "by=2",
        "by=3",
    ),
    "a getter": ("of = operator.itemgetter(0)\ndef f(x): return x * of([2, 3])", "(0)", "(1)"),
    "a method of a class of C": ("of = str.find\ndef f(x): return x * of('abca', 'a')", "find", "rfind"),
    "a frozen set of one's own": (
        "class Scales(frozenset): pass\nscales = Scales([2])\ndef f(x): return x * max(scales)",
        "[2]",
        "[3]",
    ),
    "a function that exec makes": (
        "made = {}\nexec('def by(x): return x * 2', made)\nf = made['by']",
        "* 2",
        "* 3",
    ),
    "the order of named children": (
        "f = nn.Sequential(collections.OrderedDict(a=nn.ReLU(), b=nn.Tanh()))",
        "a=nn.ReLU(), b=nn.Tanh()",
        "b=nn.Tanh(), a=nn.ReLU()",
    ),
    "the order of a ModuleDict": (
        (
            "steps = nn.ModuleDict({'a': nn.ReLU(), 'b': nn.Tanh()})\n"
            "def f(x): return [x := step(x) for step in steps.values()][-1]"
        ),
        "{'a': nn.ReLU(), 'b': nn.Tanh()}",
        "{'b': nn.Tanh(), 'a': nn.ReLU()}",
    ),
    "the keywords of a hook": (
        (
            "f = nn.Sequential(nn.ReLU())\ndef hook(module, args, *more): return more[-1] * len(more)\n"
            "f.register_forward_hook(hook, with_kwargs=False)"
        ),
        "False",
        "True",
    ),
    "a class that is parametrized": (
        (
            "class Layer(nn.Linear):\n    def forward(self, x): return super().forward(x) * 2\n"
            "f = Layer(1, 1)\nnn.init.ones_(f.weight)\nnn.init.ones_(f.bias)\n"
            "nn.utils.parametrizations.weight_norm(f)"
        ),
        "* 2",
        "* 3",
    ),
}
"""By kind the code before, and what is replaced in it by what; of a config module nothing, its values."""
UNCHANGED = {
    "the same": lambda source: source,
    "a comment": lambda source: f"# what it does\n{source}\n# the end\n",
    "lines above": lambda source: "\n\n\n" + source,
    "an unused import": lambda source: f"import json, math\n{source}",
    "an unused global": lambda source: f"UNUSED = object()\n{source}",
    "an unused function": lambda source: f"{source}\ndef unused(x): return x\n",
    "a docstring": lambda source: f'"""What it is."""\n{source}',
    "spaces": lambda source: source.replace("x * 2", "x  *  2").replace("x + 1", "(x + 1)"),
}
"""Edits that change no result."""
SHORT_PLACES = ("forward", "an attribute", "a fact")


def crossed(kinds: Any) -> list[Any]:
    """Each kind in each place: those in the first places are always tried, in turn; the others are deep."""
    every = list(itertools.product(kinds, PLACES))
    return [
        pytest.param(
            kind,
            place,
            marks=[] if place == SHORT_PLACES[list(kinds).index(kind) % 3] else [pytest.mark.deep],
        )
        for kind, place in every
    ]


def described(source: str, place: str, *, name: str = "", path: str = "") -> Any:
    """What a run knows of a value in that place."""
    made = module_of(f"{IMPORTS}{source}\n{textwrap.dedent(PLACES[place])}", name, path)
    value = made.value
    if place == "a fact":
        return read_facts({"f": value}, "jpg", None, None)["f"].digest
    describer = Describer()
    description = describer.value(value, "it")
    return json.dumps([description, describer.patches(), describer.arranged_code], sort_keys=True)


def of_kind(kind: str) -> tuple[str, str, Callable[[bool], None]]:
    """The code before and after an edit, and what sets the config module."""
    source, old, new = EDITS[kind]
    source = source.replace("NAME", f"op{next(_numbers)}" if "NAME" in source else "NAME")

    def configure(is_edited: bool) -> None:
        module_of(CONFIG.replace("2.0", "3.0").replace("[1", "[3") if is_edited else CONFIG, "edited_config")

    return source, source.replace(old, new) if old else source, configure


@pytest.mark.parametrize(("kind", "place"), crossed(EDITS))
@pytest.mark.filterwarnings("ignore::UserWarning")  # an operator is registered anew
def test_an_edit_is_another_description(kind: str, place: str) -> None:
    before, after, configure = of_kind(kind)
    configure(False)
    first = described(before, place)
    configure(True)
    assert described(after, place) != first


@pytest.mark.parametrize(("kind", "place"), crossed(UNCHANGED))
def test_what_changes_no_result_is_the_same_description(kind: str, place: str) -> None:
    source = "def times(k): return lambda x: x * 2 + k\ndef plus(x): return x + 1\nby = times(3)\n"
    source += "def f(x): return by(plus(x))\n"
    assert described(source, place) == described(UNCHANGED[kind](source), place)


SAME = {
    "what wraps": (
        "class Wrapper:\n    def __init__(self, function): functools.update_wrapper(self, function)\n"
        "    def __call__(self, x): return self.__wrapped__(x)\n@Wrapper\ndef f(x):\n    'DOC'\n    return x"
    ),
    "a partial that wraps": (
        "def by(x, k):\n    'DOC'\n    return x * k\n"
        "f = functools.update_wrapper(functools.partial(by, k=2), by)"
    ),
    "types of fields": (
        "class Kind: pass\n@dataclasses.dataclass\nclass Config:\n    'DOC'\n    kind: Kind = None\n"
        "config = Config()\ndef f(x): return x if config.kind is None else -x"
    ),
    "a logger by its module's name": (
        "def f(x):\n    logging.getLogger(__name__).debug('a step')\n    return x"
    ),
    "the environment": (
        "from os import environ\ndef f(x): return x * float(environ.get('NO_SUCH_VARIABLE', '1'))"
    ),
    "an enum of text": (
        "class Kind(str, enum.Enum):\n    'DOC'\n    A = 'a'\ndef f(x): return x * len(Kind.A.value)"
    ),
    "a protocol": (
        "class Steps(typing.Protocol):\n    def by(self): ...\nclass Scale(Steps):\n    'DOC'\n"
        "    def by(self): return 2\nscale = Scale()\ndef f(x): return x * scale.by()"
    ),
    "a generic class": (
        "T = typing.TypeVar('T')\nclass Scale(typing.Generic[T]):\n    'DOC'\n    by = 2\n"
        "scale = Scale[int]()\ndef f(x): return x * scale.by"
    ),
    "slots of nothing": (
        "class Marker:\n    __slots__ = ()\nmarker = Marker()\ndef f(x): return marker and x"
    ),
    "a mapped file": (
        "import tempfile\nwith tempfile.TemporaryFile() as file:\n"
        "    scales = np.memmap(file, 'f4', 'w+', shape=(2,))\n"
        "def f(x): return x * float(scales[0])"
    ),
}
"""Code that a renamed file, another docstring, variable or current directory must not change."""


@pytest.mark.parametrize("kind", SAME)
def test_what_a_renamed_file_and_a_docstring_change_in_an_object_is_no_part_of_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = described(SAME[kind], "forward", name="edited_before")
    monkeypatch.setenv("ANOTHER_VARIABLE", kind)
    monkeypatch.chdir(tmp_path)
    assert described(SAME[kind].replace("DOC", "what it is"), "forward", name="edited_after") == first


COUNTED = {
    "a wrapper's number": "    inner.calls += 1",
    "a wrapper's list": "    inner.times.append(0.5)",
    "another function's number": "    by.calls += 1",
    "a number of a weight": "    scale.calls += 1",
}
"""Lines of code that count calls where nothing that is computed is kept."""


@pytest.mark.parametrize("kind", COUNTED)
def test_what_counts_calls_in_attributes_of_functions_and_weights_is_no_part_of_a_description(
    kind: str,
) -> None:
    made = module_of(
        "import functools, torch\ndef by(x): return x\nby.calls = 0\n"
        "scale = torch.nn.Parameter(torch.ones(1))\nscale.calls = 0\n"
        "def counted(function):\n  @functools.wraps(function)\n  def inner(x):\n"
        f"{COUNTED[kind]}\n    return function(by(x)) * scale\n"
        "  inner.calls, inner.times = 0, []\n  return inner\n"
        "@counted\ndef f(x): return x\n"
    )
    first = Describer().value(made.f, "it")
    made.f(2)
    assert (made.f.calls or len(made.f.times) or made.by.calls or made.scale.calls) == 1
    assert Describer().value(made.f, "it") == first


def test_what_an_enum_keeps_once_it_is_used_is_no_part_of_it() -> None:
    made = module_of("import enum\nclass Use(enum.Flag):\n    A = 1\n    B = 2\nf = Use.A\n")
    first = Describer().value(made.f, "it")
    assert ~made.f == made.Use.B
    assert Describer().value(made.f, "it") == first


def test_a_sentinel_is_refused_as_nothing_tells_it_from_another() -> None:
    with pytest.raises(FeatureNotCacheable, match=r"it is a builtins\.object"):
        Describer().value(object(), "it")


def test_what_pickle_and_copy_leave_in_a_class_is_no_part_of_it() -> None:
    made = module_of("class Config:\n    by = 2\nf = Config()\n")
    first = Describer().value(made.f, "it")
    copy.copy(made.f)
    assert "__slotnames__" in vars(made.Config)
    assert Describer().value(made.f, "it") == first


@pytest.mark.parametrize("place", PLACES)
def test_a_renamed_and_moved_project_is_the_same_description(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "SCALE = 2.0\ndef f(x): return x * SCALE\n"
    first = described(source, place, name="edited_before", path="/home/a/before.py")
    monkeypatch.chdir(tmp_path)
    assert described(source, place, name="edited_after", path="/srv/b/project/after.py") == first


def test_a_path_that_a_project_makes_of_its_place_counts_as_files_there_may_differ() -> None:
    source = "from pathlib import Path\nHERE = Path(__file__).parent\ndef f(x): return x, HERE / 'weights'\n"

    def described_in(folder: str) -> Any:
        made = types.ModuleType(f"edited_{next(_numbers)}")
        made.__file__ = f"{folder}/steps.py"
        sys.modules[made.__name__] = made
        exec(source, vars(made))
        return Describer().value(made.f, "it")

    assert described_in("/home/a/project") != described_in("/srv/b/project")


def test_a_package_without_init_is_of_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "edited_package"
    package.mkdir()
    (package / "config.py").write_text("SCALE = 2.0")
    made = module_of("import edited_package.config\ndef f(x): return x * edited_package.config.SCALE\n")
    first = Describer().value(made.f, "it")
    vars(sys.modules["edited_package.config"])["SCALE"] = 3.0
    assert Describer().value(made.f, "it") != first


def test_which_child_stands_in_two_places_counts() -> None:
    def of(*children: nn.Module) -> Any:
        return Describer().value(nn.Sequential(*children), "it")

    first, second = nn.ReLU(), nn.Sigmoid()
    assert of(first, second, first) != of(first, second, second)
    assert of(first, second, first) == of(first, second, first)


def test_functions_of_c_are_described_without_what_cannot_be() -> None:
    import random

    made = module_of(
        "from numpy import sqrt\nfrom random import random\nfrom torch import relu\n"
        "f = [sqrt, random, relu, len]"
    )
    assert made.f[1] == random.random
    describer = Describer()
    describer.value(made.f, "it")
    assert set(describer.code) == {"package numpy", "package random", "package torch", "package builtins"}


UNSEEN = {
    "a file": (
        "float(Path('factor.txt').read_text())",
        lambda folder: (folder / "factor.txt").write_text("3"),
    ),
    "a file of JSON": (
        "json.loads(Path('factor.json').read_text())['by']",
        lambda folder: (folder / "factor.json").write_text('{"by": 3}'),
    ),
    "a variable": ("float(os.environ['FACTOR'])", lambda folder: os.environ.update(FACTOR="3")),
    "a variable by get": (
        "float(os.environ.get('FACTOR', '1'))",
        lambda folder: os.environ.update(FACTOR="3"),
    ),
    "a variable by getenv": ("float(os.getenv('FACTOR'))", lambda folder: os.environ.update(FACTOR="3")),
    "the command line": ("float(sys.argv[1])", lambda folder: sys.argv.__setitem__(1, "3")),
    "a global by its name": (
        "globals()['FAC' + 'TOR']",
        lambda folder: (folder / "edited_config.py").write_text("FACTOR = 3\n"),
    ),
    "eval": (
        "eval('FAC' + 'TOR')",
        lambda folder: (folder / "edited_config.py").write_text("FACTOR = 3\n"),
    ),
    "torch's switch": (
        "3 if torch.backends.cudnn.benchmark else 2",
        lambda folder: setattr(torch.backends.cudnn, "benchmark", True),
    ),
    "a variable by a name that is made": (
        "float(os.environ['FAC' + 'TOR'.lower().upper()])",
        lambda folder: os.environ.update(FACTOR="3"),
    ),
    "a module by its name": (
        "importlib.import_module('edited_' + 'config').FACTOR",
        lambda folder: (folder / "edited_config.py").write_text("FACTOR = 3\n"),
    ),
}
"""By kind, what a function reads that no description has, and what changes it."""
HOLDERS = {
    "forward": ("x * factor()", "None"),
    "an attribute": ("self.by(x)", "scaled"),
    "a child": ("self.child(x)", "scaled"),
    "what __init__ keeps": ("x * self.kept", "None"),
}
PROJECT = """
import importlib, json, os, sys
from pathlib import Path
import torch
from torch import nn
from streamload import cache_module
from edited_config import *

def factor():
    return READ
def scaled(x):
    return x * factor()
class Step(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by
    def forward(self, x):
        return self.by(x)
@cache_module(cache_path="features")
class Extractor(nn.Module):
    def __init__(self, by=None):
        super().__init__()
        self.by, self.child, self.kept = by, Step(by), factor()
    def forward(self, x):
        return FORWARD
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FACTOR", "2")
    monkeypatch.setattr(sys, "argv", ["train.py", "2"])
    (tmp_path / "edited_config.py").write_text("FACTOR = 2\n")
    (tmp_path / "factor.txt").write_text("2")
    (tmp_path / "factor.json").write_text('{"by": 2}')
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def computed(
    project: Path, read: str, holder: str, keys: Sequence[str] = ("a", "b")
) -> tuple[torch.Tensor, int]:
    """Results by keys of a process that has imported nothing of the project, and how many it computed."""
    forward, argument = HOLDERS[holder]
    (project / "edited_model.py").write_text(PROJECT.replace("READ", read).replace("FORWARD", forward))
    for name in [name for name in sys.modules if name.startswith("edited_")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    model = importlib.import_module("edited_model")
    module = model.Extractor(getattr(model, argument, None)).eval()
    try:
        return module(X, cache_key=list(keys)), cache_info(module).rows_computed
    finally:
        row_store.close_stores()


X = torch.arange(8.0).reshape(2, 4)


@pytest.mark.parametrize(
    ("kind", "holder"),
    [
        pytest.param(
            kind, holder, marks=[] if holder == "forward" or kind == "a file" else [pytest.mark.deep]
        )
        for kind, holder in itertools.product(UNSEEN, HOLDERS)
    ],
)
def test_what_code_reads_while_it_computes_is_another_fingerprint(
    kind: str, holder: str, project: Path
) -> None:
    read, change = UNSEEN[kind]
    first, _ = computed(project, read, holder)
    again, rows = computed(project, read, holder)
    assert torch.equal(first, X * 2)
    assert torch.equal(again, first)
    assert rows == 0
    change(project)
    changed, rows = computed(project, read, holder)
    assert torch.equal(changed, X * 3)
    assert rows == 2


def test_a_file_that_each_run_has_under_another_name_keeps_rows_while_its_content_is_the_same(
    project: Path,
) -> None:
    read = "float(Path(os.readlink('link')).read_text())"
    results = []
    for name, content in (("first", "2"), ("second", "2"), ("third", "3")):
        place = project / name / "factor.txt"
        place.parent.mkdir()
        place.write_text(content)
        (project / "link").unlink(missing_ok=True)
        (project / "link").symlink_to(place)
        value, rows = computed(project, read, "forward")
        results.append((torch.equal(value, X * int(content)), rows))
        place.unlink()
    assert results == [(True, 2), (True, 0), (True, 2)]


def test_variables_that_only_libraries_read_and_files_that_are_written_are_no_part_of_a_fingerprint(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = (
        "(Path('log.txt').open('a').close(), torch.hub.get_dir(), os.close(os.open('lock', os.O_RDWR | "
        "os.O_CREAT)), 2.0)[-1]"
    )
    first, _ = computed(project, read, "forward")
    monkeypatch.setenv("TORCH_HOME", str(project))
    monkeypatch.setenv("RANK", "1")
    for name in ("log.txt", "lock"):
        (project / name).write_text("another run's")
    again, rows = computed(project, read, "forward")
    assert torch.equal(again, first)
    assert rows == 0


def test_a_file_that_changes_while_a_process_runs_is_other_rows_from_then_on(project: Path) -> None:
    """Keys that are computed then are stored under what the file holds then."""
    computed(project, "float(Path('factor.txt').read_text())", "forward")
    module = sys.modules["edited_model"].Extractor().eval()
    try:
        assert torch.equal(module(X, cache_key=["a", "c"]), X * 2)
        (project / "factor.txt").write_text("3")
        module(X, cache_key=["d", "e"])
        assert torch.equal(module(X, cache_key=["d", "c"]), X * 3)
    finally:
        row_store.close_stores()
    (project / "factor.txt").write_text("2")
    again, rows = computed(project, "float(Path('factor.txt').read_text())", "forward", ["d", "e"])
    assert torch.equal(again, X * 2)
    assert rows == 2
