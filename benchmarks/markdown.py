"""Tables in Markdown, numbers as they stand there, and their places on a page.

A figure within a sentence stands between `<!-- = PATH | FORMAT -->` and `<!-- /= -->`. The path leads into
the results: `warm → medians → streamload → images_per_second`; FORMAT is Python's, such as `.2f`. Paths and
numbers may be combined from left to right with ×, ÷, + and −. A mark may not begin a line: Markdown would
take the line for HTML. Nor may it stand in a table, because of its `|`.
"""

import operator
import re
from collections.abc import Sequence
from typing import Any

Result = dict[str, Any]

FIGURE = re.compile(r"(?<=[^\n])(<!-- = (.+?) -->)[^<]*(<!-- /= -->)")
_SIGN = re.compile(r" ([×÷+−]) (?=[a-z_]+ → |[\d.]+(?:e\d+)?(?: [×÷+−] |$))")
"""A sign between two terms. One before anything else belongs to a label: `100 × 100, batches of 64`."""
_OPERATIONS = {"×": operator.mul, "÷": operator.truediv, "+": operator.add, "−": operator.sub}


def with_figures(page: str, results: dict[str, Result]) -> str:
    """The page with each figure of its sentences written anew; KeyError for a path that leads nowhere."""
    return FIGURE.sub(lambda found: f"{found[1]}{figure(found[2], results)}{found[3]}", page)


def figure(expression: str, results: dict[str, Result]) -> str:
    """The value of an expression, formatted."""
    terms, _, form = expression.partition(" | ")
    first, *rest = _SIGN.split(terms)
    value = _value(first, results)
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        value = _OPERATIONS[sign](value, _value(term, results))
    return format(value, form)


def figure_sources(page: str) -> set[str]:
    """The results that a page's figures come from."""
    expressions = [found[2].partition(" | ")[0] for found in FIGURE.finditer(page)]
    terms = [term for expression in expressions for term in _SIGN.split(expression)]
    return {term.partition(" → ")[0] for term in terms if " → " in term}


def _value(term: str, results: dict[str, Result]) -> Any:
    """A number, or what lies at the end of a path."""
    if " → " not in term:
        return float(term)
    value: Any = results
    for step in term.split(" → "):
        value = value[int(step) if isinstance(value, list) else step]
    return value


def filled(page: str, tables: dict[str, str]) -> str:
    """The page with the tables that are there put into their places."""
    for name, table in tables.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        page = place.sub(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", page)
    return page


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(result: Result, label: str, metric: str, digits: int = 2) -> str:
    """The median, and the least and most of the rounds."""
    values = [row[metric] for row in result["rounds"] if row["label"] == label]
    return (
        f"{result['medians'][label][metric]:.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"
    )


def number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value / 1e6:,.0f} MB" if value >= 1e6 else f"{value:.2f}".rstrip("0").rstrip(".")
