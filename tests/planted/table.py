"""The table of planted bugs: one file of plants a room or a few, and where each is planted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PLANTS = Path(__file__).parent / "plants"


@dataclass(frozen=True, slots=True)
class Plant:
    """A bug as somebody could make it.

    Args:
        name: Its name, as `python -m tests.planted` takes it.
        file: The module, below `streamload/`.
        old: The text that it replaces, which is in the module once.
        new: The text in its place.
        harm: What goes wrong with it.
        test: The id of the test that fails with it; empty: none is known.
        is_deep: True if only `make deep` runs that test.
        same: Why it changes nothing that anybody could notice, instead of a test.
    """

    name: str
    file: str
    old: str
    new: str
    harm: str
    test: str = ""
    is_deep: bool = False
    same: str = ""

    @property
    def room(self) -> str:
        """The folder of its module."""
        return str(Path(self.file).parent)

    def planted(self, text: str) -> str:
        """The text of its module with the bug in it.

        Raises:
            LookupError: What it replaces isn't in the module, or more than once.
        """
        count = text.count(self.old)
        if count != 1:
            raise LookupError(f"{self.name}: streamload/{self.file} has {self.old!r} {count} times, not once")
        return text.replace(self.old, self.new)


def read_plants() -> list[Plant]:
    """All plants, in the order of their files."""
    texts = [path.read_text() for path in sorted(PLANTS.glob("*.yaml"))]
    rows = [row for text in texts for row in yaml.load(text, yaml.CSafeLoader)]
    return [Plant(**{**row, "is_deep": row.get("is_deep", False)}) for row in rows]
