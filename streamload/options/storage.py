"""Storage options as JSON, on a command line or in a file that may be written anew while it is in use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamload.errors import OptionError

_latest: dict[str, dict[str, Any]] = {}
"""The last contents of each file that this process has read again, by path."""


class FileOptions(dict[str, Any]):
    """Storage options from a file; where there is no such file, on another node, they stay as they are.

    Attributes:
        path: of the file.
    """

    path: str

    def __repr__(self) -> str:
        return f"<storage options of {self.path}>"

    @classmethod
    def read(cls, path: str, name: str = "storage_options") -> FileOptions:
        """Read the file.

        Args:
            path: of the file.
            name: of the option, for messages.

        Raises:
            OptionError: there is no such file, or it holds no JSON object.
        """
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else "it is no text"
            raise OptionError(f"{name} @{path} can't be read: {why}") from None
        options = cls(parse_options(text, f"{name} @{path}"))
        options.path = path
        return options

    def latest(self) -> FileOptions:
        """Return the last contents that this process has read."""
        return self._with(_latest.get(self.path, self))

    def read_again(self) -> FileOptions:
        """Return the contents of the file as they are now.

        Raises:
            OptionError: see `read`.
        """
        options = self.read(self.path)
        _latest[self.path] = dict(options)
        return options

    def _with(self, contents: Mapping[str, Any]) -> FileOptions:
        options = type(self)(contents)
        options.path = self.path
        return options


def parse_options(text: str, name: str) -> dict[str, Any]:
    """Parse storage options.

    Args:
        text: a JSON object.
        name: of the option, for messages.

    Raises:
        OptionError: it is none.
    """
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as exc:  # without its value: keys may be in it
        raise OptionError(f"{name} is not JSON: {exc}") from None
    if not isinstance(options, dict):
        raise OptionError(f"{name} is no JSON object such as " + '{"anon": true}')
    return options


def copy_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy, which can still be read again if it is of a file."""
    return options.latest() if isinstance(options, FileOptions) else dict(options or {})
