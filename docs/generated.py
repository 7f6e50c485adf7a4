"""Reference pages, generated from the code when the site is built.

A page in docs/reference holds a title, an introduction and a place, `<!-- generated: NAME -->` to
`<!-- /generated -->`, which Sphinx reads as what the function of that name returns. Nothing that is generated
is committed.
"""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import typer

import streamload
from streamload import Features, Patches, errors, metrics
from streamload.aspects import image_sizes
from streamload.cli import app
from streamload.integrations.conversations import Conversations
from streamload.loader import Loader, Source, make_loader
from streamload.loader.groups import GROUPS
from streamload.options import options
from streamload.weights.sample import complexity

MARK = re.compile(r"^<!-- generated: (\w+) -->\n.*?^<!-- /generated -->$", re.MULTILINE | re.DOTALL)
_PAGE = re.compile(r"\bdocs/([\w/-]+)\.md\b")
_VARIABLE = re.compile(r"(?<!`)\b(STREAMLOAD_[A-Z_]+)\b")


def arguments() -> str:
    """The arguments of make_loader, and those of its groups."""
    parts = ["## make_loader", _summary(make_loader), *_described(make_loader, "Args")]
    for group in (*GROUPS.values(), Patches, image_sizes, Features, Conversations, complexity):
        parts += [f"## {group.__name__}", _summary(group), *_described(group, "Args")]
    return "\n\n".join(parts)


_OF_A_LOADER = (
    "set_epoch",
    "state_dict",
    "load_state_dict",
    "set_weights",
    "leave_out",
    "set_batch_size",
    "report",
    "report_eval",
    "info",
    "info_of",
    "microbatches",
    "stats",
    "verdict",
    "on_alert",
    "metrics",
    "record",
    "serve_metrics",
    "trace",
    "skipped",
    "close",
    "num_batches",
    "num_samples",
    "world_size",
    "device",
    "place_on",
    "as_dataset",
)
"""What a training uses; the other public names are for the epoch and for torch."""


def loader() -> str:
    """The methods and attributes of a Loader, gather_state, show, and a Source's fields."""
    parts = ["## Loader", _summary(Loader)]
    for name in _OF_A_LOADER:
        member = inspect.getattr_static(Loader, name)
        called = name if isinstance(member, property) else f"{name}{_parameters(member)}"
        parts += [f"### `{called}`", _markdown(inspect.getdoc(member))]
    for function in (streamload.gather_state, streamload.show):
        name = function.__name__
        parts += [f"## {name}", f"`{name}{_parameters(function)}`", _markdown(inspect.getdoc(function))]
    parts += ["## Source", _summary(Source), *_described(Source, "Attributes")]
    return "\n\n".join(parts)


def variables() -> str:
    """A row for each option that has a variable."""
    head = ["variable", "argument", "default", "meaning"]
    return _table(head, [list(_variable_row(option)) for option in options()])


def _variable_row(option: Any) -> tuple[str, str, str, str]:
    group, _, field = option.argument.rpartition(".")
    argument = f"`{group.capitalize()}({field}=…)`" if group else f"`{field}`" if field else "–"
    default = _default_cache_dir() if option.name == "cache_dir" else f"`{option.default}`"
    return f"`{option.variable}`", argument, default, _markdown(option.help)


def _default_cache_dir() -> str:
    return (
        "`~/.cache/streamload`, or `/var/tmp/streamload-<uid>` if the home is on a network or in memory, "
        "or can't be written"
    )


def commands() -> str:
    """Every command of `streamload`, with its arguments and options."""
    root = typer.main.get_command(app)
    return "\n\n".join(_command(root, "streamload"))


def _command(command: Any, path: str) -> Iterator[str]:
    context = typer.Context(command, info_name=path)
    if hasattr(command, "commands"):
        for name, child in sorted(command.commands.items()):
            yield from _command(child, f"{path} {name}")
        return
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    yield f"## {path}\n\n```text\n{usage}\n```"
    yield _markdown(inspect.cleandoc(command.help or ""))
    records = [record for one in command.params if (record := one.get_help_record(context))]
    if records:
        yield _table(["", "meaning"], [[f"`{name}`", _markdown(said)] for name, said in records])


def stats() -> str:
    """Each field of a Snapshot, which `Loader.stats()` returns."""
    longer = _section(metrics.Snapshot, "Attributes")
    rows = []
    for field in dataclasses.fields(metrics.Snapshot):
        name = field.name.replace("seconds_to_first_batch", "first_batch_ns")
        counter = metrics.ROWS.get(name) or metrics.ROWS.get(name.replace("_seconds", "_ns"))
        said = [longer.get(field.name)] if counter is None else [counter.help, *_extremes(counter)]
        rows.append([f"`{field.name}`", "; ".join(_markdown(one).rstrip(".") for one in said if one)])
    causes = [[f"`{cause}`", _markdown(why)] for cause, why in metrics.CAUSES.items()]
    head = "## Causes\n\nThe keys of `samples_skipped` and `samples_replaced`."
    return "\n\n".join([_table(["field", "meaning"], rows), head, _table(["cause", "meaning"], causes)])


def _extremes(metric: Any) -> list[str]:
    """What values near 0, and near the maximum, mean."""
    return [
        f"{which} {meaning}" for which, meaning in (("near 0:", metric.low), ("near", metric.high)) if meaning
    ]


def exported() -> str:
    """Each metric that is published beside a run, and exported."""
    rows = []
    for metric in (*metrics.METRICS, *metrics.GIVEN):
        labels = "".join(f", `{label}`" for label in metric.labels).removeprefix(", ")
        said = [metric.help, *_extremes(metric)]
        rows.append([f"`{metric.name}`", metric.kind, labels, "; ".join(_markdown(one) for one in said)])
    return _table(["metric", "kind", "labels", "meaning"], rows)


def error_tree() -> str:
    """The tree of errors: of each its builtin base, and what it means."""
    rows = [
        [f"{'&nbsp;' * 4 * depth}`{name}`", builtin, said] for depth, name, builtin, said in _error_rows()
    ]
    return _table(["error", "is also", "meaning"], rows)


def _error_rows() -> Iterator[tuple[int, str, str, str]]:
    def below(error: type, depth: int) -> Iterator[tuple[int, str, str, str]]:
        builtins = [base.__name__ for base in error.__bases__ if base.__module__ == "builtins"]
        also = ", ".join(f"`{name}`" for name in builtins if name != "Exception")
        yield depth, error.__name__, also, _markdown(inspect.getdoc(error))
        for child in error.__subclasses__():
            if child.__module__ == errors.__name__:
                yield from below(child, depth + 1)

    return below(errors.StreamloadError, 0)


PARTS: dict[str, Callable[[], str]] = {
    "arguments": arguments,
    "loader": loader,
    "variables": variables,
    "commands": commands,
    "stats": stats,
    "metrics": exported,
    "errors": error_tree,
}


def setup(sphinx: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    sphinx.connect("source-read", _fill)
    return {"parallel_read_safe": True}


def _fill(_: Any, name: str, source: list[str]) -> None:
    up = "../" * name.count("/")
    source[0] = MARK.sub(lambda found: PARTS[found[1]]().replace("](/", f"]({up}"), source[0])


# Docstrings


def _described(of: Any, section: str) -> Iterator[str]:
    """A heading, a type with the default, and a paragraph for each argument that the docstring describes."""
    signature = inspect.signature(of).parameters
    for names, said in _section(of, section).items():
        parameter = signature[names.split(", ")[0]]
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        typed = f"`{parameter.name}: {parameter.annotation}"
        default = "`, required" if parameter.default is parameter.empty else f" = {_shown(parameter)}`"
        yield f"### `{names}`\n\n{typed}{default}\n\n{_markdown(said[0].upper() + said[1:])}"


def _shown(parameter: inspect.Parameter) -> str:
    """Its default; of a group only the name."""
    group = type(parameter.default)
    return f"{group.__name__}()" if group in GROUPS.values() else repr(parameter.default)


def _summary(of: Any) -> str:
    """The docstring up to its first section."""
    return _markdown(re.split(r"\n\n[A-Z][a-z]+:\n", inspect.getdoc(of) or "")[0])


def _section(of: Any, title: str) -> dict[str, str]:
    """The entries of a Google-style section of a docstring, by name."""
    found = re.search(rf"^{title}:\n((?:    .*\n?|\n)*)", inspect.getdoc(of) or "", re.MULTILINE)
    entries = re.split(r"\n(?=\S)", textwrap.dedent(found[1]).strip()) if found else []
    split = (entry.partition(": ") for entry in entries)
    return {name.strip(): " ".join(said.split()) for name, _, said in split}


def _markdown(text: str | None) -> str:
    """Text of a docstring as Markdown: sections are bold, pages are links, variables are code."""
    text = re.sub(
        r"^(Args|Returns|Raises|Attributes|Yields):\n((?:    .*\n?|\n)*)",
        lambda found: f"**{found[1]}**\n\n{_entries(found[2])}\n\n",
        text or "",
        flags=re.MULTILINE,
    )
    text = _PAGE.sub(lambda found: f"[{found[1].rpartition('/')[2].replace('-', ' ')}](/{found[1]}.md)", text)
    return _VARIABLE.sub(r"`\1`", text.replace("``", "`"))


def _entries(text: str) -> str:
    entries = re.split(r"\n(?=\S)", textwrap.dedent(text).strip())
    return "\n".join(f"- {' '.join(entry.split())}" for entry in entries)


def _parameters(of: Any) -> str:
    """The parameters of a function without `self` and what it returns."""
    parameters = [one for one in inspect.signature(of).parameters.values() if one.name != "self"]
    return f"({', '.join(str(one) for one in parameters)})".replace("'", "")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = (" | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) for line in lines)
    return "\n".join(f"| {line} |" for line in cells)
