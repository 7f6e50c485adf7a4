"""By which recipes a daemon prepares what it brings: its user's own, or those that runs ask for."""

from __future__ import annotations

from collections.abc import Callable

from streamload.derived.prepared import Recipe

MakeRecipe = Callable[[str], Recipe]
"""Makes a recipe of its text, "raw-256" (preparation.py); OptionError: it is none."""


class Recipes:
    """The recipes of one daemon. Thread-safe: they are made by its own thread, and used by those that fill.

    Args:
        given: by which all is prepared, whatever runs ask for.
        make: makes those that runs ask for; None: what they ask for isn't prepared.
    """

    def __init__(self, given: Recipe | None = None, make: MakeRecipe | None = None):
        self.given = given
        self._make = make
        self._named = {} if given is None else {given.name: given}
        self._asked: dict[str, Recipe] = {}

    def __repr__(self) -> str:
        return f"<Recipes {sorted(self._named)}>"

    def __getitem__(self, name: str) -> Recipe:
        """The recipe of a task (`Shard.recipe`)."""
        return self._named[name]

    def add(self, recipe: Recipe) -> None:
        """Know one more by its name."""
        self._named[recipe.name] = recipe

    def asked(self, text: str) -> Recipe | None:
        """By which the shards of a run are prepared that asks for a recipe; None: they stay as they are.

        Raises:
            OptionError: it asks for what is no recipe.
        """
        if self.given is not None or self._make is None or not text:
            return self.given
        if text not in self._asked:
            self._asked[text] = self._make(text)
            self.add(self._asked[text])
        return self._asked[text]
