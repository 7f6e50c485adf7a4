"""Expansion of URL patterns to the list of shards (step A).

Reads the environment variables ``WDS_*``, lists local folders and the Hugging Face Hub's; opens no shard.
Same rules as webdataset and the braceexpand library, with more care for shell commands.
"""

from __future__ import annotations

import glob
import os
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from streamload.errors import UrlError
from streamload.urls.checks import check
from streamload.urls.identity import compression, is_local, local_path
from streamload.urls.listing import Node, NumberNode, TextNode, UrlList, chained, joined
from streamload.urls.redaction import redact, redact_text

MAX_URLS = 4_000_000

_MAGIC = re.compile(r"[*?\[]")
_DEEPEST = 50
_MOST_DIGITS = 20
_SHOWN_CHARACTERS = 300
_SOURCES = re.compile(r"::(?![0-9A-Fa-f:.]*\])")  # not the '::' of http://[::1]/
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_NUMBERS = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.-?(\d+))?")
_MEANT_AS_RANGE = re.compile(r"[\w-]*\s*\.\.[\w.-]*|\d+\s*[-:…]\s*\d+")
_ALPHABET = string.ascii_uppercase + string.ascii_lowercase


Urls = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Iterator[str | os.PathLike[str]]


class Exact(str):
    """A path that exists as it is spelled: nothing in it is a pattern."""


def expand_urls(urls: Urls, storage_options: Mapping[str, Any] | None = None) -> UrlList:
    """Return the shards of a pattern, or of a list of patterns, in order.

    ``{000..123}`` and ``{a,b}`` expand as in a shell (numbers keep their zeros), ``::`` separates sources and
    ``${X}`` is the environment variable ``WDS_X``. In a ``pipe:`` command, ``${X}`` without a WDS_X is left
    to the shell, and so are braces that contain neither a range nor a list of words.

    A local folder stands for its ``*.tar`` files, and a local path with ``*``, ``?`` or ``[…]`` for the files
    that match; both are sorted by name. A ``Path`` that exists is one path, whatever its name has.
    ``hf://datasets/org/name`` stands for its tars (hub.py).

    The cost of a range doesn't depend on its length: its URLs are created on use. Of URLs that differ only
    in a number in their path, the first and the last are checked (see `UrlList.kinds`).

    Args:
        urls: a list that is already expanded is returned unchanged.
        storage_options: of fsspec, for listing folders of the Hub.

    Raises:
        UrlError: no URL at all, a brace or variable that can't be resolved, or a URL that can't be opened.
        OriginError: a folder of the Hub can't be listed.
    """
    if isinstance(urls, UrlList):
        return urls
    patterns = patterns_of(urls)
    nodes: list[Node] = []
    count = 0
    for node in _expanded(patterns, storage_options):
        nodes.append(node)
        count += len(node)
        if count > MAX_URLS:
            shown = _shown(patterns[-1])
            raise UrlError(f"more than {MAX_URLS:,} URLs up to {shown!r}: is a range too long?")
    if not nodes:
        raise UrlError("the list of URLs is empty: give at least one shard")
    result = UrlList(chained(nodes))
    valid_places: set[str] = set()
    for url in result.kinds():
        check(url, valid_places)
    return result


def split_sources(urls: Urls) -> list[str]:
    """Return the parts between ``::`` of a pattern or a list of patterns, with their braces."""
    return [source for pattern in patterns_of(urls) for source in _sources(pattern)]


def patterns_of(urls: object) -> list[str]:
    """Return the patterns of an argument: one string or path, or an ordered collection of them.

    Raises:
        UrlError: it is or contains something else.
    """
    if isinstance(urls, (str, os.PathLike)):
        urls = [urls]
    if not isinstance(urls, (Sequence, Iterator)) or isinstance(urls, (bytes, bytearray)):
        raise UrlError(
            f"urls is a {type(urls).__name__}: give a string, a path, or a list of them; in place of a "
            f"webdataset pipeline, the URLs that it was built from"
        )
    patterns = []
    for pattern in urls:
        if isinstance(pattern, (bytes, bytearray)) or not isinstance(pattern, (str, os.PathLike)):
            raise UrlError(f"a URL is a string or a path, not {type(pattern).__name__}")
        is_exact = isinstance(pattern, os.PathLike) and os.path.exists(pattern)  # noqa: PTH110  (never raises)
        patterns.append(Exact(os.fsdecode(pattern)) if is_exact else os.fsdecode(pattern))
    return patterns


def _sources(pattern: str) -> list[str]:
    return [pattern] if isinstance(pattern, Exact) else _SOURCES.split(pattern)


def _expanded(patterns: Sequence[str], storage_options: Mapping[str, Any] | None = None) -> Iterator[Node]:
    """Expand each source of each pattern."""
    for pattern in patterns:
        for source in _sources(pattern):
            if isinstance(source, Exact):
                yield _listed(TextNode((str(source),)))
                continue
            node = _Braces(_with_variables(source)).expand()
            if source.startswith("hf://"):
                from streamload.urls.hub import expanded

                node = expanded(source, node, storage_options)
            yield _listed(node) if _may_be_several(source) else node


def _may_be_several(source: str) -> bool:
    """Return whether a source may name a local folder, or a glob."""
    if not source.strip() or source.startswith("-") or "\0" in source or not is_local(source):
        return False
    return bool(_MAGIC.search(source)) or source.endswith("/") or ("{" not in source and _is_folder(source))


def _listed(node: Node) -> Node:
    """Replace folders and globs by the files that they contain or match."""
    paths: list[str] = []
    for path in node:
        if _is_folder(path):
            shards = _in_folder(local_path(path))
            if not shards:
                raise UrlError(f"no *.tar file in the folder {redact_text(path)!r}")
        elif _MAGIC.search(path) and not local_path(path).exists():
            shards = sorted(glob.glob(str(local_path(path))))  # noqa: PTH207  (absolute pattern)
            if not shards:
                raise UrlError(f"no file matches {redact_text(path)!r}")
        else:
            shards = [path]
        paths += shards
    return TextNode(tuple(paths))


def _in_folder(folder: Path) -> list[str]:
    """Return the shards of a folder: all *.tar files, or if there are none, all compressed ones."""
    files = sorted(str(file) for file in folder.iterdir())
    return [file for file in files if file.endswith(".tar")] or [file for file in files if compression(file)]


def _is_folder(path: str) -> bool:
    try:
        return local_path(path).is_dir()
    except (OSError, ValueError):  # not a path: `check` reports it
        return False


def _with_variables(source: str) -> str:
    """Replace ``${X}`` by the value of ``WDS_X``, recursively up to ten levels as in webdataset."""

    def value(match: re.Match[str]) -> str:
        name = f"WDS_{match.group(1)}"
        if name in os.environ:
            return os.environ[name]
        if source.startswith("pipe:"):
            return match.group(0)
        raise UrlError(f"{match.group(0)} in {_shown(source)!r}: the environment variable {name} is not set")

    for _ in range(10):
        before, source = source, _VARIABLE.sub(value, source)
        if source == before:
            break
    return source


class _Braces:
    """Brace expansion of one pattern, which may be a shell command."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.shell = pattern.startswith("pipe:")

    def expand(self) -> Node:
        return self._expand(self.pattern, 0)

    def _expand(self, text: str, depth: int) -> Node:
        """Expand a text. The number of results is checked before any is created."""
        if depth > _DEEPEST:
            raise UrlError(f"braces nested more than {_DEEPEST} deep in {_shown(self.pattern)!r}")
        parts: list[Node] = []
        literal, position = "", 0
        while position < len(text):
            char = text[position]
            if char == "\\" and position + 1 < len(text):
                literal += text[position : position + 2] if self.shell else text[position + 1]
                position += 2
            elif char == "{":
                stop = self._closing(text, position)
                inner = text[position + 1 : stop]
                if self.shell and literal.endswith("$"):  # ${VAR:-{a,b}} is the shell's
                    literal, position = literal + text[position : stop + 1], stop + 1
                    continue
                choices = self._choices(inner, depth)
                if choices is None:  # literal braces, around text that may have others
                    parts += [_one(literal + "{"), self._expand(inner, depth + 1), _one("}")]
                else:
                    parts += [_one(literal), choices]
                literal, position = "", stop + 1
            elif char == "}":
                raise self._unbalanced()
            else:
                literal += char
                position += 1
        parts.append(_one(literal))
        count = 1
        for part in parts:
            count = self._bounded(count * len(part))
        return joined(parts)

    def _closing(self, text: str, start: int) -> int:
        depth, position = 0, start
        while position < len(text):
            if text[position] == "\\":
                position += 1
            elif text[position] in "{}":
                depth += 1 if text[position] == "{" else -1
                if depth == 0:
                    return position
            position += 1
        raise self._unbalanced()

    def _choices(self, inner: str, depth: int) -> Node | None:
        """Return the alternatives of ``{inner}``, or None if the braces are literal."""
        if numbers := _NUMBERS.fullmatch(inner):
            return self._numbers(*numbers.groups())
        if letters := _LETTERS.fullmatch(inner):
            return _letters(*letters.groups())
        if self.shell and re.search(r"\s", inner):
            return None  # awk '{print $1, $2}', { a; b; }
        choices = _split_list(inner)
        if len(choices) > 1:
            nodes = [self._expand(choice, depth + 1) for choice in choices]
            self._bounded(sum(len(choice) for choice in nodes))
            return chained(nodes)
        if _MEANT_AS_RANGE.fullmatch(inner):
            raise UrlError(f"{{{inner}}} in {_shown(self.pattern)!r} is no range: write {{0000..0123}}")
        return None

    def _numbers(self, first: str, last: str, step: str | None) -> Node:
        if max(len(first), len(last), len(step or "")) > _MOST_DIGITS:
            raise UrlError(f"a number of more than {_MOST_DIGITS} digits in {_shown(self.pattern)!r}")
        start, stop, stride = int(first), int(last), int(step or 1) or 1
        padded = any(re.match(r"-?0\d", number) for number in (first, last))
        width = max(len(first), len(last)) if padded else 0
        numbers = range(start, stop + 1, stride) if start < stop else range(start, stop - 1, -stride)
        self._bounded(abs(stop - start) // stride + 1)  # len() fails for a huge range
        return NumberNode(numbers, width)

    def _bounded(self, count: int) -> int:
        if count > MAX_URLS:
            raise UrlError(f"more than {MAX_URLS:,} URLs in {_shown(self.pattern)!r}: is a range too long?")
        return count

    def _unbalanced(self) -> UrlError:
        return UrlError(
            f"an unbalanced brace in {_shown(self.pattern)!r}: write \\{{ or \\}} for a literal one"
        )


def _one(text: str) -> Node:
    return TextNode((text,))


def _shown(pattern: str) -> str:
    """Return a pattern for an error message, without the secrets of any of its URLs."""
    sources = (source.partition("pipe:") for source in _SOURCES.split(pattern))
    text = "::".join(
        redact_text(before) + (redact(pipe + command) if pipe else "") for before, pipe, command in sources
    )
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _letters(first: str, last: str, step: str | None) -> Node:
    start, stop, stride = _ALPHABET.index(first), _ALPHABET.index(last), int(step or 1) or 1
    order = range(start, stop + 1, stride) if start < stop else range(start, stop - 1, -stride)
    return TextNode(tuple(_ALPHABET[place] for place in order))


def _split_list(inner: str) -> list[str]:
    """Split at commas outside inner braces."""
    choices, depth, begin, position = [], 0, 0, 0
    while position < len(inner):
        char = inner[position]
        if char == "\\":
            position += 1
        elif char in "{}":
            depth += 1 if char == "{" else -1
        elif char == "," and depth == 0:
            choices.append(inner[begin:position])
            begin = position + 1
        position += 1
    return [*choices, inner[begin:]]
