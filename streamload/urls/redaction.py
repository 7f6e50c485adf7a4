"""Redaction: what of a URL, a command or its output may be shown in a log, an error or a file name (step A).

Of a command only its program, its first host and its first tar name are shown. Foreign text is shown
without the secrets of the URL, matched literally, and without anything that looks like a secret.
"""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from streamload.errors import StreamloadError

HIDDEN = "***"
FOR_ALL_HOSTS = frozenset({"accept", "accept-language", "referer", "user-agent"})
"""Headers that are no credentials, so other hosts may see them. (After a redirect curl sends all but two.)"""

_WORD = r"(?:'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|[^\s'\"|;&<>\\])+"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,20})(:/+)([^\s'\"|;<>`]*)")
_WEB = frozenset(("http", "https", "ftp", "ssh", "sftp"))
_BUCKETS = frozenset(
    ("s3", "s3a", "gs", "gcs")
)  # have no port, so a colon before the path belongs to a password
_CONTAINERS = frozenset(("abfs", "abfss", "adl", "az", "wasb", "wasbs"))  # container@account
_FILES = frozenset(("file", "local", "memory"))
_USUAL = _WEB | _BUCKETS | {"hf", "az", "abfs"}  # recognised with one slash, too
_LETTERS = "[#0-9aBfgGiIjJklLMnNOpqRsSvVZ]*[HUubE]"  # curl's short options up to one with a secret value
_OPTION = re.compile(
    rf"(?<![^\s'\"])(-[A-Za-z#]*[HUubE]['\"]?\s+|-{_LETTERS}|--(?:(?:proxy-)?header|(?:proxy-)?user|cookie"
    r"|(?:proxy-)?cert|tlspassword|oauth2-bearer|auth|(?:[\w-]{1,40}[-_])?(?:pass(?:word|wd|phrase)?|token|secret"
    r"|(?:api|access|account|secret)[-_]?key))"
    rf"['\"]?(?:\s+|=))({_WORD})"
)
_QUOTED_OPTION = re.compile(rf"(?<!\S)((['\"])-{_LETTERS})(?:(?!\2).)+")
_USER = re.compile(r"(?<![^\s'\"=,(])[^\s/:@'\"]{1,80}:(?!//)[^\s@'\"]{1,200}@(?=[\w\[])")
_QUERY = re.compile(r"([^\s?'\"]\?)[^\s'\"?]*=[^\s'\"]*")
_ECHO = re.compile(r"((?:^|[\r\n])[<>] ?[\w-]{1,80}:)[^\r\n]*")  # headers printed by curl -v
_VALUE = re.compile(
    rf"(\b[\w.-]{{0,80}}(?:secret|token|password|passwd|passphrase|credential|signature"
    rf"|(?:api|access|account)_?key|auth|sas)[\w.-]{{0,80}}=)({_WORD})",
    re.IGNORECASE,
)
_HEADER = re.compile(
    r"(\b[\w-]{0,80}(?:authorization|cookie|token|api-?key|secret|credential)[\w-]{0,80}\s*:\s*)([^\r\n'\"]+)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(bearer|basic)(\s+)[\w.~+/=-]{6,}", re.IGNORECASE)
_PARAMETER = re.compile(
    r"(;[^;/=?#]{0,80}(?:secret|token|pass|credential|sig|key|auth|sas|session)[^;/=?#]{0,80}=)([^;/?#]+)",
    re.IGNORECASE,
)
_ENCODED_QUERY = re.compile(r"%(?:25)*3F([^/=]{0,80}(?:=|%(?:25)*3D).*)", re.IGNORECASE)
_NO_PORT = re.compile(r"^[^\[\]]*:(?!\d*$)")

_PROGRAM = re.compile(
    r"\s*(?:[A-Za-z_]\w*=(?:'[^']*'|\"[^\"$`\\]*\"|[\w@%+:,./~=*-])*\s+)*"  # plain variable assignments
    r"(?:[\w.~+-]*/)*([A-Za-z0-9][\w.+-]{0,39})(?=[\s;|]|$)"
)
_HOST = re.compile(r"[\w.-]+(?::\d{1,5})?|\[[0-9A-Fa-f:.]+\](?::\d{1,5})?", re.ASCII)
_TAR = re.compile(r"(?<![\w.%+,~-])([\w.%+,~-]{1,200}?\.tar(?:\.\w{1,8})?)(?![\w.%+~-])")

_SHORTEST = 4
_SHORTEST_OF_QUERY = 6
"""Shorter values are not treated as secrets: they occur anywhere."""
_NO_SECRETS = frozenset(("bearer", "basic", "digest", "token", "true", "false", "none", "null"))
_SECRET_OPTION = re.compile(
    r"key|secret|token|pass|credential|connection_string|sas|auth|cookie", re.IGNORECASE
)


def redact(url: str) -> str:
    """Return a URL without user, password, query and fragment; of a pipe only program, host and tar."""
    if url.startswith("pipe:"):
        return f"pipe:{_of_command(url.removeprefix('pipe:'))}"
    match = _URL.match(url)
    if match is None or match.group(1).lower() == "file":
        return url
    return _bare(match.group(1), match.group(2), url[match.end(2) :])


def redact_text(text: str) -> str:
    """Return text, as from a command or library, without what looks like a secret."""
    text = _URL.sub(lambda match: _bare(*match.groups()), text)
    text = _USER.sub(f"{HIDDEN}@", text)
    text = _QUERY.sub(rf"\1{HIDDEN}", text)
    text = _ECHO.sub(rf"\1 {HIDDEN}", text)
    text = _QUOTED_OPTION.sub(rf"\1{HIDDEN}", text)
    text = _OPTION.sub(lambda match: f"{match.group(1)}{HIDDEN}", text)
    text = _VALUE.sub(lambda match: f"{match.group(1)}{HIDDEN}", text)
    text = _HEADER.sub(lambda match: f"{match.group(1)}{HIDDEN}", text)
    return _BEARER.sub(rf"\1\2{HIDDEN}", text)


def scrub(text: str, secrets: Iterable[str]) -> str:
    """Return text without these secrets, and without what looks like one.

    Args:
        secrets: from `secrets_of`.
    """
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return redact_text(text)


def secrets_of(url: str, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """Return the secrets in a URL and its options, the longest first.

    In a command, any value of an option or variable and any text after a colon counts as one.
    """
    if url.startswith("pipe:"):
        candidates = set(_values(url.removeprefix("pipe:")))
    else:
        candidates = set(_of_url(url.partition(":")[2].lstrip("/")))
    candidates.update(_of_options(storage_options or {}))
    candidates |= {unquote(secret) for secret in candidates}
    candidates |= {
        base64.b64encode(secret.encode("utf-8", "replace")).decode() for secret in candidates if ":" in secret
    }
    shown = redact(url)
    return sorted(
        (s for s in candidates if len(s) >= _SHORTEST and s not in shown), key=lambda s: (-len(s), s)
    )


@contextlib.contextmanager
def scrubbed_errors(secrets: Callable[[], Sequence[str]]) -> Iterator[None]:
    """Scrub secrets from any error raised inside, so that no handler or traceback shows one.

    Our errors lose them from their message; a foreign error that shows one is cut from the chain of causes.

    Args:
        secrets: called only when an error was raised.
    """
    try:
        yield
    except Exception as exc:
        _scrub_chain(exc, secrets(), set())
        raise


def _scrub_chain(error: BaseException, secrets: Sequence[str], visited: set[int]) -> bool:
    """Scrub an error and its causes. Return False if the error still shows a secret."""
    visited.add(id(error))
    if isinstance(error, StreamloadError):
        error.args = tuple(scrub(arg, secrets) if isinstance(arg, str) else arg for arg in error.args)
    for name in ("__cause__", "__context__"):
        other = getattr(error, name)
        if other is not None and id(other) not in visited and not _scrub_chain(other, secrets, visited):
            setattr(error, name, None)
    text = f"{error} {error!r}"
    return isinstance(error, StreamloadError) or scrub(text, secrets) == text


def _of_command(command: str) -> str:
    """Return the program, host and tar of a command. Idempotent."""
    program = _PROGRAM.match(command)
    words = [program[1] if program else "command"]
    for match in _URL.finditer(command):
        host = re.split(r"[/?#\\]", match[3], maxsplit=1)[0].rpartition("@")[2]
        if match[2] == "://" and _HOST.fullmatch(host):
            words.append(f"{match[1]}://{host}")
            break
    tar = _TAR.search(command)
    return " ".join([*words, *([tar[1]] if tar else [])])


def _of_url(address: str) -> Iterator[str]:
    """Yield the secrets in a URL after its scheme: user, password, parameters, query values, fragment."""
    location, _, query = address.partition("?")
    first = location.partition("/")[0]
    if "@" in first or (":" in first and "@" in location):  # a password with a slash
        user = first.rpartition("@")[0] if "@" in first else location.rpartition("@")[0]
        yield user
        yield from user.split(":", 1)
    yield from (match[2] for match in _PARAMETER.finditer(location))
    encoded = _ENCODED_QUERY.search(location)
    if encoded is not None:
        query = f"{unquote(unquote(encoded[1]))}&{query}"
    query, _, fragment = query.partition("#")
    values = [part.partition("=")[2] for part in query.split("&")]
    yield from (value for value in (*values, fragment) if len(value) >= _SHORTEST_OF_QUERY)


def _values(command: str) -> Iterator[str]:
    """Yield possible secrets among the words of a command."""
    words = [re.sub(r"['\"\\]", "", word) for word in re.findall(_WORD, command)]
    before = ""
    for word in words:
        is_value = before.startswith("-") and not word.startswith("-")
        before = word
        if "://" in word and not re.search(r"\A-|\s", word):
            yield from _of_url(word.partition("://")[2])
            continue
        candidates = [word] if is_value else []
        if "?" in word or "@" in word:
            candidates += _of_url(word)
        candidates += [value for sign in "=:" if (value := word.partition(sign)[2])]
        if re.match("-[A-Za-z]..", word):
            candidates.append(word[2:])
        for value in candidates:
            for piece in (value, *re.split(r"[:=@\s;,&?{}\[\]()]+", value)):
                is_number = piece.isdecimal() and len(piece) < _SHORTEST_OF_QUERY
                if not is_number and piece.lower() not in _NO_SECRETS and not piece.endswith(".tar"):
                    yield piece.strip()


def _of_options(options: Mapping[str, Any], is_secret: bool = False) -> Iterator[str]:
    """Yield the values of options whose names suggest secrets, and of all headers."""
    for name, value in options.items():
        hides = is_secret or name == "headers" or _SECRET_OPTION.search(str(name)) is not None
        if isinstance(value, Mapping):
            yield from _of_options(value, hides)
        elif isinstance(value, str) and hides and value.lower() not in _NO_SECRETS:
            yield from (value, value.rpartition(" ")[2])


def _bare(scheme: str, slashes: str, address: str) -> str:
    """Return a URL without user, query, fragment and secret parameters. ``#`` counts only in http."""
    kind = scheme.lower()
    if slashes == ":/" and kind not in _USUAL:
        return f"{scheme}{slashes}{address}"
    web = kind in _WEB
    location = re.split(r"[?#]" if web else r"\?", address, maxsplit=1)[0]
    host, slash, path = location.partition("/")
    user, _, bare = host.rpartition("@")
    path = _ENCODED_QUERY.sub("", _PARAMETER.sub(rf"\1{HIDDEN}", path))
    if web and _NO_PORT.search(bare):  # ambiguous, e.g. a password with a slash
        return f"{scheme}{slashes}{HIDDEN}"
    if "@" in path and (":" in bare if kind in _BUCKETS else not web and _NO_PORT.search(bare)):
        return f"{scheme}{slashes}{path.rpartition('@')[2]}"
    is_place = kind in _CONTAINERS | _FILES and ":" not in user
    return f"{scheme}{slashes}{host if is_place else bare}{slash}{path}"
