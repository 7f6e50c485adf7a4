"""Print the figures of the package's shape: what may only fall, by the code of today.

Usage: python .ci/house.py. The kernel is all modules that the contract "The kernel imports no extension" in
pyproject.toml doesn't list. Two runs of a plain batch are traced, which takes some seconds.
"""

import ast
import inspect
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import streamload  # noqa: E402
from benchmarks import provenance  # noqa: E402
from streamload.worker.messages import Batch, EpochStart, WorkerConfig  # noqa: E402
from tests.project.test_house import traced  # noqa: E402


def listed(name: str) -> str:
    """The text of a list of that contract."""
    text = (ROOT / "pyproject.toml").read_text()
    contract = text[text.index('name = "The kernel imports no extension"') :]
    return re.search(rf"^{name} = \[\n(.*?)^\]", contract, re.MULTILINE | re.DOTALL)[1]


def matching(name: str) -> re.Pattern[str]:
    """Matches the modules of a list."""
    patterns = re.findall(r'"([\w.*]+)"', listed(name))
    return re.compile("|".join(re.escape(each).replace(r"\*\*", r"[\w.]+") for each in patterns))


def rooms() -> Iterator[str]:
    """The rooms of each group of features."""
    for group in re.split(r"^ *# ", listed("protected_modules"), flags=re.MULTILINE)[1:]:
        title, _, modules = group.partition("\n")
        names = sorted(set(re.findall(r'"streamload\.(\w+)', modules)))
        yield f"{title}: {', '.join(names)}"


def names_of(node: ast.ClassDef) -> set[str]:
    """The names of a class's members, with those that it sets on its instances."""
    names = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            names.add(each.id)
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            names.add(each.attr)
    return names


def protocols() -> dict[str, int]:
    """The Protocols, and how many classes are one: by their bases, or as they have all of its names.

    Those of `__call__` alone are types of functions, and don't count.
    """
    own, bases = {}, {}
    for path in (ROOT / "streamload").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
                own[node.name] = names_of(node)

    def ancestors(name: str) -> set[str]:
        return {name}.union(*(ancestors(base) for base in bases.get(name, ()) if base != name))

    members = {name: set().union(*(own.get(each, set()) for each in ancestors(name))) for name in own}
    found = {name for name, of_class in bases.items() if "Protocol" in of_class and own[name] != {"__call__"}}
    public = {name: {each for each in own[name] if not each.startswith("__")} for name in found}
    return {
        name: sum(name in ancestors(other) or public[name] <= members[other] for other in own.keys() - found)
        for name in sorted(found)
    }


def main() -> None:
    """Print a figure a line."""
    graph = grimp.build_graph("streamload")
    features, no_kernel = matching("protected_modules"), matching("allowed_importers")
    kernel = {module for module in graph.modules if not no_kernel.fullmatch(module)}
    into = [
        (a, b) for a in kernel for b in graph.find_modules_directly_imported_by(a) if features.fullmatch(b)
    ]
    lines, classes = {}, defaultdict(set)
    for path in (ROOT / "streamload").rglob("*.py"):
        text = path.read_text()
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        lines[module] = text.count("\n")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                classes[node.name].add(module)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        runs = [traced(Path(folder)) for folder in (first, second)]
    batch = min(runs, key=lambda run: len(run["cold"]))
    names = subprocess.run(
        [sys.executable, ROOT / ".ci" / "names.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    signature = inspect.signature(streamload.make_loader)
    parameters = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    aged = provenance.old(provenance.read_all())
    several = sorted(name for name, modules in classes.items() if len(modules) > 1)
    by_protocol = protocols()
    single = [name for name, count in by_protocol.items() if count <= 1]
    room = "".join(path.read_text() for path in (ROOT / "streamload" / "extension").glob("*.py"))
    walks = " / ".join(str(number) for number in batch["walk"])
    for figure, value in {
        "imports from the kernel into features": len(into),
        "modules that a plain batch runs, warm / cold": f"{len(batch['warm'])} / {len(batch['cold'])}",
        "modules that a plain loader imports / their lines": f"{len(batch['imported'])} / "
        f"{sum(lines.get(module, 0) for module in batch['imported']):,}",
        "lines of the package; of the kernel": f"{sum(lines.values()):,}; "
        f"{sum(lines[module] for module in kernel if module in lines):,} in {len(kernel)} modules",
        "names that say nothing": names.stdout.strip(),
        "fields of Batch / EpochStart / WorkerConfig": " / ".join(
            str(len(inspect.signature(message).parameters)) for message in (Batch, EpochStart, WorkerConfig)
        ),
        "functions / calls / deepest stack of a warm batch": walks,
        "Protocols; with one implementation": f"{len(by_protocol)}; {len(single)} {' '.join(single)}",
        "lines with Any in the contract of extensions": sum(
            bool(re.search(r"\bAny\b", line)) for line in room.splitlines()
        ),
        "class names in several modules": f"{len(several)} {' '.join(several)}",
        "rooms of features": "; ".join(rooms()),
        "parameters of make_loader": len(parameters),
        "names at the top level": len(streamload.__all__),
        "results to measure again, for want of a commit": " ".join(sorted(provenance.TO_MEASURE_AGAIN)),
        f"results older than {provenance.MOST_COMMITS} commits": " ".join(
            f"{name} ({age})" for name, age in sorted(aged.items(), key=lambda item: -item[1])
        ),
    }.items():
        print(f"{figure}: {value}")


main()
