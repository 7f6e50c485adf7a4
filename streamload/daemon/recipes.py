"""The recipes by which a daemon derives shards from others: its user's own, or those that runs request."""

from __future__ import annotations

from collections.abc import Callable

from streamload.origins.origin import Recipe

MakeRecipe = Callable[[str], Recipe]
"""Parses a recipe such as "raw-256" (preparation.py); raises OptionError."""


class Recipes:
    """The recipes of one daemon. Thread-safe: its own thread adds them, and threads that fill use them.

    Args:
        given: for all shards, whatever runs request.
        make: parses a recipe that a run requests; None: requests are ignored.
    """

    def __init__(self, given: Recipe | None = None, make: MakeRecipe | None = None):
        self.given = given
        self._make = make
        self._named = {} if given is None else {given.name: given}
        self._requested: dict[str, Recipe] = {}

    def __repr__(self) -> str:
        return f"<Recipes {sorted(self._named)}>"

    def __getitem__(self, name: str) -> Recipe:
        """The recipe of a task (`Shard.recipe`)."""
        return self._named[name]

    def add(self, recipe: Recipe) -> None:
        """Add one under its name."""
        self._named[recipe.name] = recipe

    def asked(self, text: str) -> Recipe | None:
        """The recipe for the shards of a run that requests `text`; None: they stay as they are.

        Raises:
            OptionError: the text is not a recipe.
        """
        if self.given is not None or self._make is None or not text:
            return self.given
        if text not in self._requested:
            self._requested[text] = self._make(text)
            self.add(self._requested[text])
        return self._requested[text]
