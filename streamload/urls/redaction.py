"""What of a URL, a command or its output may be shown in a log, an error or a file name."""

from __future__ import annotations

import re

HIDDEN = "***"

_WORD = r"(?:'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|[^\s'\"|;&<>\\])+"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,20})(:/+)([^\s'\"|;<>`]*)")
_WEB = frozenset(("http", "https", "ftp", "ssh", "sftp"))
_USUAL = _WEB | {"s3", "gs", "gcs", "hf", "az", "abfs"}  # known for what they are with one slash, too
_FLAGS = "[#0-9aBfgGiIjJklLMnNOpqRsSvVZ]*"  # curl's short options that have no value
_LETTERS = f"{_FLAGS}[HUubE]"  # up to one with a secret's value
_OPTION = re.compile(
    rf"(?<![^\s'\"])(-[A-Za-z#]*[HUubE]['\"]?\s+|-{_LETTERS}|--(?:(?:proxy-)?header|(?:proxy-)?user|cookie"
    r"|(?:proxy-)?cert|tlspassword|oauth2-bearer|auth|(?:[\w-]{1,40}[-_])?(?:pass(?:word|wd|phrase)?|token|secret"
    r"|(?:api|access|account|secret)[-_]?key))"
    rf"['\"]?(?:\s+|=))({_WORD})"
)
_CURL = re.compile(rf"\bcurl(?:\s+{_WORD})+")
_BODY = re.compile(  # what only curl has by these names
    rf"(?<![^\s'\"])(-{_FLAGS}[dF]['\"]?\s*|--(?:data(?:-[a-z]+)?|url-query|json|form(?:-string)?)['\"]?(?:\s+|=))"
    rf"({_WORD})"
)
_QUOTED_BODY = re.compile(rf"(?<!\S)((['\"])-{_FLAGS}[dF])(?:(?!\2).)+")
_OWN_OPTION = re.compile(  # letters that mean something harmless elsewhere
    r"(\bopenssl\s(?:[^|;&\n]{0,300}?\s)?-[kK]\s+|\bsshpass\s(?:[^|;&\n]{0,100}?\s)?-p\s*"
    rf"|\b(?:https?|xhs?)\s(?:[^|;&\n]{{0,300}}?\s)?-a\s*|\bpass:)({_WORD})"
)
_QUOTED_OPTION = re.compile(rf"(?<!\S)((['\"])-{_LETTERS})(?:(?!\2).)+")
_VALUE = re.compile(
    rf"(\b[\w-]{{0,80}}(?:secret|token|password|passwd|passphrase|credential|signature|(?:api|access|account)_?key|auth|sas)[\w-]{{0,80}}=)({_WORD})",
    re.IGNORECASE,
)
_HEADER = re.compile(
    r"(\b[\w-]{0,80}(?:authorization|cookie|token|api-?key|secret|credential)[\w-]{0,80}\s*:\s*)([^\r\n'\"]+)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(bearer|basic)(\s+)[\w.~+/=-]{6,}", re.IGNORECASE)
_NO_PORT = re.compile(r"^[^\[\]]*:(?!\d*$)")


def redact(url: str) -> str:
    """Return a URL as it may be shown: no user, password, query or fragment; a pipe without header values."""
    if url.startswith("pipe:"):
        return redact_text(url)
    match = _URL.match(url)
    if match is None or match.group(1).lower() == "file":
        return url
    return _bare(match.group(1), match.group(2), url[match.end(2) :])


def redact_text(text: str) -> str:
    """Return free text, as a command or what it wrote to stderr, without what could be a secret."""
    text = _URL.sub(lambda match: _bare(*match.groups()), text)
    text = _QUOTED_OPTION.sub(rf"\1{HIDDEN}", text)
    text = _OPTION.sub(lambda match: f"{match.group(1)}{HIDDEN}", text)
    text = _OWN_OPTION.sub(lambda match: f"{match.group(1)}{HIDDEN}", text)
    text = _CURL.sub(_without_bodies, text)
    text = _VALUE.sub(lambda match: f"{match.group(1)}{HIDDEN}", text)
    text = _HEADER.sub(lambda match: f"{match.group(1)}{HIDDEN}", text)
    return _BEARER.sub(rf"\1\2{HIDDEN}", text)


def _without_bodies(command: re.Match[str]) -> str:
    """A command of curl without what it sends."""
    text = _QUOTED_BODY.sub(rf"\1{HIDDEN}", command.group())
    return _BODY.sub(lambda match: f"{match.group(1)}{HIDDEN}", text)


def _bare(scheme: str, slashes: str, rest: str) -> str:
    """A URL without user, query and fragment; only in http does ``#`` or an ``@`` alone mean that."""
    if slashes == ":/" and scheme.lower() not in _USUAL:
        return f"{scheme}{slashes}{rest}"
    web = scheme.lower() in _WEB
    location = re.split(r"[?#]" if web else r"\?", rest, maxsplit=1)[0]
    host, slash, path = location.partition("/")
    user, _, bare = host.rpartition("@")
    if web and _NO_PORT.search(bare):  # a password with a slash in it, say: no telling what is what
        return f"{scheme}{slashes}{HIDDEN}"
    return f"{scheme}{slashes}{bare if web or ':' in user else host}{slash}{path}"
