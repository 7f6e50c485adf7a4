"""Tables in Markdown, numbers as they stand there, and their places on a page."""

import re
from collections.abc import Sequence
from typing import Any

Result = dict[str, Any]


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


def when(result: Result) -> str:
    """The day, and the commit where one is known, of what was measured."""
    return f"{result['date']} at {result['commit']}" if result.get("commit") else str(result["date"])
