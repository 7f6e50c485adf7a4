"""curl and aws commands in pipes that are fetched directly, without running them (step A).

``pipe:curl -sfL https://…`` is a GET, ``pipe:aws s3 cp s3://… -`` an object. Fetched directly, they resume
after failures, have a known size, and are checked. This requires that we support every word of the command
and that no configuration changes its meaning; otherwise bash runs it. Opens nothing, and never raises.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from streamload.urls.command_environment import command_environment
from streamload.urls.redaction import FOR_ALL_HOSTS

_BLANKS = " \t\n"
_TEXT = re.compile(r"[\t\x20-\x7e]*")
_PIECE = re.compile(
    r"""(?P<plain>[A-Za-z0-9_@%+=:,./-]+)  # no special meaning after the command's name
    |'(?P<single>[^']*)'
    |"(?P<double>[^"$`\\]*)"
    |(?P<blank>[ \t]+)""",
    re.VERBOSE,
)

NO_COMMAND = "it is not a single curl or aws command in plain words"


@dataclass(frozen=True, slots=True)
class CommandRequest:
    """Request of a supported command.

    Attributes:
        program: "curl" or "aws".
        url: curl: http(s), without user and password; aws: s3.
        headers: curl: for every host, also after redirects.
        own_headers: curl: for the URL's own host, since they may be credentials.
        redirects: curl: how many are followed at most.
        storage_options: aws: for fsspec.
        named_by_url: whether URL and endpoint identify the bytes. Headers other than credentials may select
            others, and so may a profile.
    """

    program: str
    url: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    own_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    redirects: int = 0
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    named_by_url: bool = True


@dataclass(frozen=True, slots=True)
class Opaque:
    """A command that has to be run, and why. The reason contains none of its values."""

    program: str
    reason: str


class _Unsupported(Exception):
    """A word of a command that isn't supported."""


def parse_command(command: str) -> CommandRequest | Opaque:
    """Return what a command requests, or why it has to be run.

    Args:
        command: of a pipe, without ``pipe:``.
    """
    words = plain_words(command)
    program = _PROGRAMS.get(words[0]) if words else None
    if words is None or program is None:
        return Opaque("", NO_COMMAND)
    try:
        request = _curl(words[1:]) if program == "curl" else _aws(words[1:])
    except _Unsupported as exc:
        return Opaque(program, str(exc))
    secure, reads_config = request.url.startswith("https:"), not words[1].startswith("-q")
    obstacle = command_environment(program, secure=secure, reads_config=reads_config).obstacle
    return request if obstacle is None else Opaque(program, obstacle)


_PROGRAMS = {name: name.rpartition("/")[2] for name in ("curl", "/usr/bin/curl", "aws", "/usr/bin/aws")}
_PROGRAMS["/usr/local/bin/aws"] = "aws"

_SECONDS = re.compile(r"\d{1,7}(\.\d{1,6})?")
_NUMBER = re.compile(r"\d{1,6}")
_ANY = re.compile(r"[\x20-\x7e]+")
_HTTP = re.compile(
    r"(?P<scheme>https?://)"
    r"(?:(?P<user>(?:[\w.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+:(?:[\w.~!$&'()*+,;=:-]|%[0-9A-Fa-f]{2})*)@)?"
    r"(?P<place>[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?(?::(?:\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}))?"
    r"(?:[/?](?:[\w.~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*)?)",
    re.ASCII,
)
_DOTS = re.compile(r"/\.{1,2}(?=[/?]|$)|%2e", re.IGNORECASE)  # curl and urllib3 may differ on these
_HEADER = re.compile(r"([A-Za-z0-9!#$%&'*+.^_`|~-]+):[ \t]*([\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?)[ \t]*")

# Flags that change neither the bytes nor their authenticity: output on stderr, connection details, whether
# the page of an error is written (here an error is always raised).
_CURL_FLAGS = frozenset({
    "basic", "disable", "fail", "fail-with-body", "globoff", "http1.1", "http2", "location", "no-buffer",
    "no-keepalive", "no-progress-meter", "progress-bar", "retry-all-errors", "retry-connrefused",
    "show-error", "silent", "tcp-nodelay", "tlsv1.2", "verbose",
})  # fmt: skip
# Options with a value, and its syntax. Retries and timeouts are parsed, but ours apply.
_CURL_VALUES = {
    "connect-timeout": _SECONDS,
    "cookie": re.compile(r"[!-~]+=[ -~]*"),  # without '=' it is a file
    "header": _HEADER,
    "keepalive-time": _NUMBER,
    "max-redirs": _NUMBER,
    "max-time": _SECONDS,
    "oauth2-bearer": re.compile(r"[!-~]+"),
    "output": re.compile("-"),
    "referer": re.compile(r"[!-:<-~]+"),  # ';auto' has a meaning
    "request": re.compile("GET"),
    "retry": _NUMBER,
    "retry-delay": _SECONDS,
    "retry-max-time": _SECONDS,
    "speed-limit": _NUMBER,
    "speed-time": _NUMBER,
    "url": _HTTP,
    "user": re.compile(r"[^:]+:[ -~]*"),  # without ':' curl asks for the password
    "user-agent": re.compile(r"[!-~](?:[ -~]*[!-~])?"),
}
_CURL_SHORT = {
    "#": "progress-bar", "A": "user-agent", "H": "header", "L": "location", "N": "no-buffer",
    "S": "show-error", "X": "request", "Y": "speed-limit", "b": "cookie", "e": "referer", "f": "fail",
    "g": "globoff", "m": "max-time", "o": "output", "q": "disable", "s": "silent", "u": "user",
    "v": "verbose", "y": "speed-time",
}  # fmt: skip
_CURL_REDIRECTS = 50

# Headers that select a part or an encoding of the body: not allowed from the user.
_NOT_OURS = frozenset({
    "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect",
    "host", "if-match", "if-modified-since", "if-none-match", "if-range", "if-unmodified-since",
    "keep-alive", "proxy-authorization", "proxy-connection", "range", "te", "trailer",
    "transfer-encoding", "upgrade",
})  # fmt: skip
_CHOOSE_NOTHING = frozenset({"authorization", "user-agent"})


def _curl(words: list[str]) -> CommandRequest:
    options: dict[str, str] = {}
    headers: dict[str, tuple[str, str]] = {}  # names as given and values, by name in lower case
    for name, value in _curl_options(iter(words)):
        if name == "header":
            header = _HEADER.fullmatch(value)
            if header is None:
                raise _Unsupported("the value of --header isn't plain")
            _add(headers, header[1], header[2])
        elif name in _CURL_VALUES and name in options:
            raise _Unsupported("several URLs" if name == "url" else f"--{name} is given twice")
        else:
            options[name] = value
    if "url" not in options:
        raise _Unsupported("it has no URL")
    match = _HTTP.fullmatch(options["url"])
    if match is None or _DOTS.search(match["place"]):
        raise _Unsupported("its URL isn't a plain http(s) one")
    user = unquote(match["user"]) if match["user"] else options.get("user")
    if match["user"] and "user" in options:
        raise _Unsupported("it names a user twice")
    if user is not None:
        if not _ANY.fullmatch(user):
            raise _Unsupported("the user isn't plain ASCII")
        _add(headers, "Authorization", f"Basic {base64.b64encode(user.encode()).decode()}")
    if "cookie" in options and "location" in options:
        raise _Unsupported("which hosts get the cookies of -b with -L depends on curl's version")
    if "oauth2-bearer" in options:
        _add(headers, "Authorization", f"Bearer {options['oauth2-bearer']}")
    for option, name in (("cookie", "Cookie"), ("user-agent", "User-Agent"), ("referer", "Referer")):
        if option in options:
            _add(headers, name, options[option])
    named_by_url = headers.keys() <= _CHOOSE_NOTHING
    headers.setdefault("user-agent", ("User-Agent", "curl/8 (streamload)"))  # some servers check for it
    headers.setdefault("accept", ("Accept", "*/*"))
    return CommandRequest(
        "curl",
        match["scheme"] + match["place"],
        headers=dict(header for name, header in headers.items() if name in FOR_ALL_HOSTS),
        own_headers=dict(header for name, header in headers.items() if name not in FOR_ALL_HOSTS),
        redirects=int(options.get("max-redirs", _CURL_REDIRECTS)) if "location" in options else 0,
        named_by_url=named_by_url,
    )


def _curl_options(words: Iterator[str]) -> Iterator[tuple[str, str]]:
    """Yield each option's long name and value, parsed as curl does; a URL as "url"."""
    for word in words:
        if not word.startswith("-"):
            yield "url", word
        elif word.startswith("--"):
            name = word[2:]
            if name not in _CURL_VALUES and name not in _CURL_FLAGS:
                raise _Unsupported(_unknown_option(word))
            yield name, _value(name, "", words) if name in _CURL_VALUES else ""
        else:
            yield from _curl_letters(word[1:], words)


def _curl_letters(letters: str, words: Iterator[str]) -> Iterator[tuple[str, str]]:
    if not letters:
        raise _Unsupported("it has a lone '-'")
    while letters:
        name = _CURL_SHORT.get(letters[0])
        if name is None:
            raise _Unsupported(_unknown_option(f"-{letters[0]}"))
        letters = letters[1:]
        if name in _CURL_VALUES:
            yield name, _value(name, letters, words)
            return
        yield name, ""


def _value(name: str, attached: str, words: Iterator[str]) -> str:
    value = attached or next(words, "")
    if not _CURL_VALUES[name].fullmatch(value):
        problem = (
            "its URL isn't a plain http(s) one" if name == "url" else f"the value of --{name} isn't plain"
        )
        raise _Unsupported(problem)
    return value


def _add(headers: dict[str, tuple[str, str]], name: str, value: str) -> None:
    """Add a header, whose name in lower case isn't among them yet."""
    if name.lower() in _NOT_OURS or name.lower() in headers:
        raise _Unsupported(f"the header {name[:40]} is given twice, or isn't supported")
    headers[name.lower()] = (name, value)


_BUCKET_AND_KEY = re.compile(
    r"s3://[a-z0-9][a-z0-9.-]+[a-z0-9](?:/[A-Za-z0-9_=+@:,!'() .-]*[A-Za-z0-9_=+@:,!'().-])+"
)
_AWS_FLAGS = frozenset({"no-sign-request", "debug"})
_CP_FLAGS = frozenset({"quiet", "only-show-errors", "no-progress"})
_AWS_VALUES = {
    "cli-connect-timeout": _NUMBER,
    "cli-read-timeout": _NUMBER,
    "endpoint-url": re.compile(r"https?://[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?(?::\d{1,5})?/?", re.ASCII),
    "profile": re.compile(r"\w[\w.@+-]*", re.ASCII),
    "region": re.compile(r"[a-z0-9][a-z0-9-]*"),
}


def _aws(words: list[str]) -> CommandRequest:
    places: list[str] = []
    values_by_name: dict[str, str] = {}
    remaining = iter(words)
    for word in remaining:
        if word == "-" or not word.startswith("-"):
            places.append(word)
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        if name in _AWS_VALUES:
            value = value if equals else next(remaining, "")
            if not _AWS_VALUES[name].fullmatch(value):
                raise _Unsupported(f"the value of --{name} isn't plain")
            if name in values_by_name:
                raise _Unsupported(f"--{name} is given twice")
        elif equals or not (name in _AWS_FLAGS or (name in _CP_FLAGS and places[:2] == ["s3", "cp"])):
            raise _Unsupported(_unknown_option(word))
        values_by_name[name] = value
    if len(places) != 4 or places[:2] != ["s3", "cp"] or places[3] != "-":
        raise _Unsupported("it isn't 's3 cp s3://bucket/key -'")
    if not _BUCKET_AND_KEY.fullmatch(places[2]) or re.search(r"/\.{1,2}(/|$)", places[2]):
        raise _Unsupported("its URL isn't a plain s3 one")
    # Without credentials aws fails; don't fall back to anonymous access.
    options: dict[str, Any] = {"anon": "no-sign-request" in values_by_name}
    if "endpoint-url" in values_by_name:
        options["endpoint_url"] = values_by_name["endpoint-url"]
    if "region" in values_by_name:
        options["client_kwargs"] = {"region_name": values_by_name["region"]}
    if "profile" in values_by_name:
        options["profile"] = values_by_name["profile"]
    one_service = "endpoint-url" in values_by_name or not (
        "profile" in values_by_name or command_environment("aws").names_endpoint
    )
    return CommandRequest("aws", places[2], storage_options=options, named_by_url=one_service)


def _unknown_option(word: str) -> str:
    """Return a reason that names the option, without a value attached to it."""
    name = re.match(r"--[a-z][a-z0-9.-]{0,30}(?==|$)|-[A-Za-z0-9#:](?=$)", word)
    return f"{name[0]} isn't a supported option" if name else "an option isn't supported"


def plain_words(command: str) -> list[str] | None:
    """Return the words of one simple command as bash would split them; None if that isn't certain.

    Supports only a small part of bash on purpose: plain words, and quotes around plain text. Anything that
    could be an expansion, a pattern, an operator, an escape, a comment or a second line gives None.
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
