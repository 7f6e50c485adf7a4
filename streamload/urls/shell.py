"""The words of a shell command, where each of them means itself (step A). Pure.

A small part of what bash reads, on purpose: whatever could be more than a word to it (an expansion, a
pattern, an operator, an escape, a comment, a second line) isn't read at all, so that nothing is read
otherwise than by bash.
"""

from __future__ import annotations

import re

_BLANKS = " \t\n"
_TEXT = re.compile(r"[\t\x20-\x7e]*")
_PIECE = re.compile(
    r"""(?P<plain>[A-Za-z0-9_@%+=:,./-]+)  # of no meaning to bash behind a command's name
    |'(?P<single>[^']*)'
    |"(?P<double>[^"$`\\]*)"
    |(?P<blank>[ \t]+)""",
    re.VERBOSE,
)


def plain_words(command: str) -> list[str] | None:
    """Return the words of one simple command as bash would hand them over; None where that isn't certain.

    Quotes are taken off; ``$``, backquotes and backslashes are not understood inside double quotes either.
    """
    text = command.strip(_BLANKS)
    if not text or not _TEXT.fullmatch(text):
        return None
    words: list[str] = []
    word: str | None = None
    position = 0
    while position < len(text):
        match = _PIECE.match(text, position)
        if match is None:
            return None
        position = match.end()
        kind = match.lastgroup or ""
        if kind != "blank":
            word = (word or "") + match[kind]
        elif word is not None:
            words.append(word)
            word = None
    return words if word is None else [*words, word]
