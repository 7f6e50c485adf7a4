"""Patterns of URLs, made beside what they stand for; and secrets, looked for in all that is shown.

What must hold: a pattern that is right stands for exactly the URLs that it was made of; any text at all gives
URLs that can be named, compared and shown, or a UrlError, within bounds; and a secret in a place for secrets
is in nothing that is shown.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from typing import NamedTuple

import braceexpand

from streamload import urls
from streamload.errors import UrlError
from streamload.urls import expand_urls

SECRET = "S3CRET-canary"

_BASES = (
    "/data/",
    "data/",
    "./",
    "s3://bucket/x/",
    "https://host/",
    "HTTP://Host:8080/a/",
    "file:///d/",
    "~/",
)
_WORDS = ("a", "b", "train", "00", "7", "x-y", "ä", ".", "/", "_1", "%20", r"\{", r"\,", "=", "@", "(1)")
_NUMBERS = ("0", "3", "9", "00", "03", "12", "010", "-1", "-02", "20")
_EDITS = ("{", "}", ",", "..", "\\", "::", "0", "-", "/", ":", "//", "$", "${", "~", "~nobody", "?", "#",
    "@", "[", "]",
          "|", " ", "\n", "\0", "\ud800", "\udcff", "é", "٣", "pipe:", "file:", "-o", "http://", "s3://",
          "{a,b}",
          "99999999999", "{0..9999999}", "\\")  # fmt: skip
_SECRET_URLS = (
    "https://me:{S}@host/a.tar", "https://{S}@host/a.tar", "https://host/a.tar?X-Amz-Signature={S}&y=1",
    "http://h:80/a.tar?token={S}", "https://host/a.tar#{S}", "s3://key:{S}@bucket/a.tar",
    "s3://key:x/{S}@bucket/a.tar",
    "s3://b/a.tar?sig={S}",
    "HTTPS://me:{S}@Host/a.tar", "hf://datasets/x/a.tar?token={S}", "gs://me:{S}@b/a.tar",
    "az://c/a.tar?sig={S}",
    "https://me:p@{S}@host/a.tar", "https://me:{S}@[::1]:80/a.tar", "webhdfs://me:{S}@host/a.tar",
    "abfs://me:{S}@account/a.tar?{S}", "ftp://me:{S}@host/a.tar",
)  # fmt: skip
_SECRET_COMMANDS = (
    "curl -H 'Authorization: Bearer {S}' {U}", 'curl -sH "X-Key: {S}" {U}', "curl -HX-Key:{S} {U}",
    "curl --header 'Private: {S}' {U}", "curl --header='P: {S}' {U}", "curl -u me:{S} {U}",
    "curl -ume:{S} {U}",
    "curl --user 'me:{S}' {U} | cat", "curl --oauth2-bearer {S} {U}", "curl -b id={S} {U}",
    "curl --cookie {S} {U}",
    "curl --proxy-user me:{S} {U}", "curl https://me:{S}@h/a.tar", "curl 'https://h/a.tar?sig={S}&x=1'",
    "wget --http-password={S} -qO- {U}", "AWS_SECRET_ACCESS_KEY={S} aws s3 cp s3://b/a.tar -",
    "env HF_TOKEN='{S}' hf download x", "mc --password {S} cat x/a.tar", "API_KEY=\"{S}\" get {U}",
    "curl -sd 'x={S}' {U}", "curl --json '[{S}]' {U}", "sshpass -p {S} ssh h cat a.tar", "http -a me:{S} {U}",
    "curl {U} | openssl enc -d -k {S}", "openssl enc -d -pass pass:{S}", "gpg --passphrase {S} -d a",
    "rclone cat --sftp-pass {S} r:a.tar", "az download --account-key {S} -n a.tar",
    "curl -x me:{S}@proxy:80 {U}", "curl me:{S}@h/a.tar", "curl 'h/a.tar?sig={S}&x=1'",
    "swift -K {S} get a.tar",
    "hadoop fs -Dfs.s3a.secret.key={S} -cat s3a://b/a.tar", "unzip -P {S} -p a.zip a.tar",
    "curl -fsSL -H \"Cookie: id={S}; x=1\" {U} | tar x", "azcopy cp 'https://x.net/c/a.tar?sv=1&sig={S}' -",
)  # fmt: skip


class Case(NamedTuple):
    """A pattern, or a list of them; what it stands for, where that is known; whether it holds a secret."""

    pattern: str | list[str]
    expected: list[str] | None = None
    has_secret: bool = False


def make(rng: random.Random) -> Case:
    """A pattern that is right, one that was damaged, one that stands for far too much, or a secret."""
    draw = rng.random()
    if draw < 0.4:
        return _right(rng)
    if draw < 0.7:
        return Case(_edited(_right(rng).pattern, rng))
    if draw < 0.72:
        return Case(_too_much(rng))
    return Case(_with_secret(rng), has_secret=True)


def check(case: Case, rng: random.Random) -> str:
    """Raise where a property doesn't hold; else how it ended."""
    try:
        found = expand_urls(case.pattern)
    except UrlError as exc:
        return _check_refusal(case, f"{exc} {exc!r}")
    assert case.expected is None or found == case.expected, f"{found} instead of {case.expected}"
    if isinstance(case.pattern, str):
        _check_braces(case.pattern, found)
    for url in found[:100]:
        shown = urls.redact(url)
        said = urls.scrub(f"curl: (22) {url} failed\n", urls.secrets_of(url))
        if not url.startswith("pipe:"):
            said += urls.redact_text(f"curl: (22) {url} failed\n")
        named = urls.basename(url)
        assert len(urls.digest(url)) == 32
        assert urls.digest(url) == urls.digest(url)
        assert urls.redact(shown) == shown, f"{shown!r} is shown as {urls.redact(shown)!r}"
        if urls.is_local(url):
            urls.local_path(url)
        if case.has_secret:
            assert SECRET not in shown, f"shown: {shown}"
            assert SECRET not in said, f"said: {said}"
            assert SECRET not in named, f"named: {named}"
    return "secret" if case.has_secret else "expanded"


def _check_refusal(case: Case, said: str) -> str:
    assert case.expected is None, f"refused: {said}"
    assert SECRET not in said or not case.has_secret, f"shown in the error: {said}"
    assert len(said) < 5000 + 20 * len(str(case.pattern)), "an endless message"
    return "secret refused" if case.has_secret else "refused"


def _check_braces(pattern: str, found: list[str]) -> None:
    """The library that webdataset uses has the same for a plain pattern of one source.

    But for a backslash before a backslash, which it takes away once for each braces around it.
    """
    if not re.search(r"::|pipe:|\$\{|\d{4}|\\\\", pattern):
        assert found == list(braceexpand.braceexpand(pattern)), f"braceexpand has it otherwise: {found}"


def _right(rng: random.Random) -> Case:
    sources = [_source(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    expected = [url for _, found in sources for url in found]
    texts = [text for text, _ in sources]
    return Case(texts if rng.random() < 0.3 else "::".join(texts), expected)


def _source(rng: random.Random) -> tuple[str, list[str]]:
    base = rng.choice(_BASES)
    text, found = _sequence(rng, depth=0)
    return f"{base}u{text}", [f"{base}u{rest}" for rest in found]


def _sequence(rng: random.Random, depth: int) -> tuple[str, list[str]]:
    """Some text with braces, and all that it stands for."""
    parts = [_part(rng, depth) for _ in range(rng.choice((1, 2, 3)))]
    text = "".join(part for part, _ in parts)
    if math.prod(len(found) for _, found in parts) > 400:
        return parts[0]
    return text, ["".join(chosen) for chosen in itertools.product(*(found for _, found in parts))]


def _part(rng: random.Random, depth: int) -> tuple[str, list[str]]:
    draw = rng.random()
    if draw < 0.5 or depth > 2:
        word = rng.choice(_WORDS)
        return word, [word.removeprefix("\\")]
    if draw < 0.7:
        first, last = rng.choice(_NUMBERS), rng.choice(_NUMBERS)
        step = rng.choice((None, None, "1", "2", "-3", "0"))
        text = f"{{{first}..{last}}}" if step is None else f"{{{first}..{last}..{step}}}"
        return text, _numbers(first, last, abs(int(step or 1)) or 1)
    if draw < 0.78:
        first, last = rng.choice("acfXZ"), rng.choice("acfXZ")
        return f"{{{first}..{last}}}", _letters(first, last)
    if draw < 0.84:
        return "{only}", ["{only}"]
    choices = [
        _sequence(rng, depth + 1) if rng.random() < 0.8 else ("", [""]) for _ in range(rng.choice((2, 3)))
    ]
    text = "{" + ",".join(choice for choice, _ in choices) + "}"
    return text, [one for _, found in choices for one in found]


def _numbers(first: str, last: str, step: int) -> list[str]:
    """As in a shell: both ends count, down or up; a zero in front of any end is the width of all."""
    start, stop = int(first), int(last)
    way = 1 if start < stop else -1
    padded = any(len(end.lstrip("-")) > 1 and end.lstrip("-").startswith("0") for end in (first, last))
    width = max(len(first), len(last)) if padded else 0
    found = []
    for number in range(start, stop + way, way * step):
        digits = str(abs(number)).rjust(width - (number < 0), "0")
        found.append("-" * (number < 0) + digits)
    return found


def _letters(first: str, last: str) -> list[str]:
    alphabet = "".join(map(chr, (*range(65, 91), *range(97, 123))))
    start, stop = alphabet.index(first), alphabet.index(last)
    return list(alphabet[start : stop + 1]) if start <= stop else list(alphabet[stop : start + 1])[::-1]


def _edited(pattern: str | list[str], rng: random.Random) -> str:
    text = pattern if isinstance(pattern, str) else "::".join(pattern)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(text) + 1)
        if rng.random() < 0.3:
            text = text[:at] + text[at + rng.choice((1, 1, 3)) :]
        else:
            text = text[: at * (rng.random() < 0.85)] + rng.choice(_EDITS) + text[at:]
    return text


def _too_much(rng: random.Random) -> str:
    """Short texts that would stand for more than fits anywhere, or that nest without end."""
    n = rng.choice((60, 500, 3000))
    return rng.choice((
        "/{0..9999}" * 3, "/x{{0..9999}{0..9999},b}", "/x{a,{b,{0..99999}{0..99999}}}", "/" + "{a,b}" * n,
        "/" + "{" * n, "/" + "{" * n + "}" * n, "/" + "{a," * n + "}" * n, "/{0.." + "9" * n + "}",
        "/{" + "0" * n + "..1}", "/{1..5.." + "9" * 5000 + "}", "/{" + "." * n + "!}", "/{a" + "," * n + "}",
        "/{-" + "9" * 19 + ".." + "9" * 19 + "}", "/" + "\\" * n, "~" * n,
        "pipe:" + "{" * n + " ; " + "}" * n,
    ))  # fmt: skip


def _with_secret(rng: random.Random) -> str:
    """A secret where secrets are, in a URL or command that is right or wrong elsewhere."""
    if rng.random() < 0.4:
        command = rng.choice(_SECRET_COMMANDS).replace(
            "{U}", rng.choice(("https://h/a.tar", "'https://h/{0..1}.tar'"))
        )
        text = "pipe:" + command.replace("{S}", SECRET)
        return text if rng.random() < 0.7 else text + rng.choice((" {", " }", "{0..}", "\0", " && false"))
    url = rng.choice(_SECRET_URLS).replace("{S}", SECRET)
    for _ in range(rng.choice((0, 1, 1, 2))):
        url = _wrong_elsewhere(url, rng)
    return url


def _wrong_elsewhere(url: str, rng: random.Random) -> str:
    scheme, _, rest = url.partition("://")
    # Elsewhere than in http a user alone is no secret, nor is what stands behind a "#".
    only_web = rest.lstrip("/").startswith(SECRET) or f"#{SECRET}" in rest
    unknown = scheme if only_web else "nosuch"
    option = "" if only_web else "-o"
    half = ":/" if scheme.lower() in ("http", "https", "s3", "gs") else "://"
    return rng.choice((
        url.replace("a.tar", "{0..2}.tar"), url.replace("a.tar", "{0..2.tar"), url.replace("a.tar",
        "0..2}.tar"),
        url.replace("a.tar", "{0-2}.tar"), url.replace("a.tar", "{0..999999999}.tar"),
        url.replace("a.tar", ""),
        f"/b.tar::{url}", f"{url}::", f"{{{url},/b.tar}}", f"{{{url}", f"s3://b/{{0..9999999}}::{url}",
        f"{unknown}://{rest}",
        f"{scheme}{half}{rest}", f"{scheme.upper()}://{rest}", f"{url}\r\nHost: x", url.replace("@host",
        "@ho st"),
        url.replace("host", "host:port"), url.replace("host", "[:"), f"${{MISSING}}{url}",
        f"simplecache::{url}",
        f"{option}{url}", f" {url}", url.replace("://", ":////"),
    ))  # fmt: skip
