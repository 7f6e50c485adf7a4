"""The types and parsers of option values: sizes, shares of a disk, switches, choices, directories.

Each parser takes a value or its text, and the option's name for errors.
"""

import contextlib
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from streamload.errors import OptionError

_Choice = TypeVar("_Choice", bound=str)

_MIN_FREE_BYTES = 1_000_000_000
_MIN_FREE_SHARE = 0.02
_MAX_FREE_SHARE = 0.2

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGTP", start=1)
    for suffix, base in (("", 1000), ("B", 1000), ("I", 1024), ("IB", 1024))
}
_SIZE = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*")
_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")
_SWITCH = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The limit of a tier: a number of bytes, or a share of the disk.

    Exactly one of the two fields is set. A share is of the free bytes plus those that the tier holds, so that
    it is the same for an empty tier and for a full one.
    """

    size_bytes: int | None = None
    share: float | None = None

    def limit_bytes(self, free_bytes: int, held_bytes: int) -> int:
        """The limit in bytes on a disk with `free_bytes` free, for a tier that holds `held_bytes`."""
        if self.size_bytes is not None:
            return self.size_bytes
        return int((free_bytes + held_bytes) * (self.share or 0.0))

    def __str__(self) -> str:
        return f"{self.size_bytes} bytes" if self.size_bytes is not None else f"{100 * (self.share or 0):g}%"


@dataclass(frozen=True, slots=True)
class FreeDisk:
    """Space that a tier leaves free on its disk, for any limit: a number of bytes, or a share of the disk.

    With neither it is the default: the larger of 1 GB and 2 % of the disk, but at most a fifth of the bytes
    that are free or the tier's, so that a small disk can be used, too.
    """

    size_bytes: int | None = None
    share: float | None = None

    def floor_bytes(self, total_bytes: int, available_bytes: int) -> int:
        """The bytes to leave free on a disk of `total_bytes`, with `available_bytes` free or the tier's."""
        if self.size_bytes is not None:
            return self.size_bytes
        if self.share is not None:
            return int(total_bytes * self.share)
        floor = max(_MIN_FREE_BYTES, int(total_bytes * _MIN_FREE_SHARE))
        return min(floor, int(available_bytes * _MAX_FREE_SHARE))

    def __str__(self) -> str:
        if self.size_bytes is not None:
            return f"{self.size_bytes} bytes"
        return "1 GB or 2% of the disk" if self.share is None else f"{100 * self.share:g}%"


def parse_size(value: object, name: str = "size") -> int:
    """Bytes from an int or from text such as "500GB" (1000s), "1.5 TiB" (1024s) or "4_000_000".

    Raises:
        OptionError: not a positive size.
    """
    allowed = 'expected bytes such as 4000000, "500GB" (thousands) or "1.5TiB" (1024s), over 0 and under 8EiB'
    if isinstance(value, int) and not isinstance(value, bool):
        number: float = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)) and match[2].upper() in _UNITS:
        number = float(re.sub("[_,]", "", match[1])) * _UNITS[match[2].upper()]
    else:
        raise OptionError(f"{name}={value!r} is not a size; {allowed}")
    if not 1 <= number < 2**63:
        raise OptionError(f"{name}={value!r} is not a size; {allowed}")
    return math.floor(number)


def parse_cache_size(value: object, name: str = "cache_size", total: str = "the disk") -> CacheSize:
    """The limit of a tier from bytes, text with a unit, or a percentage of the disk ("80%").

    Args:
        value: the value or its text.
        name: of the option, for errors.
        total: what a percentage is of, for errors.

    Raises:
        OptionError: neither a positive size nor a percentage in (0, 100].
    """
    if isinstance(value, str) and (match := _SHARE.fullmatch(value)):
        percent = float(match[1])
        if not 0 < percent <= 100:
            raise OptionError(
                f"{name}={value!r} is not a share of {total}; expected more than 0% and up to 100%"
            )
        return CacheSize(share=percent / 100)
    if isinstance(value, str) and "%" in value:
        raise OptionError(f'{name}={value!r} is not a share of {total}; expected a percentage such as "80%"')
    return CacheSize(size_bytes=parse_size(value, name))


def parse_free_disk(value: object, name: str = "free_disk") -> FreeDisk:
    """Space to leave free on the disk, from bytes (0: none), text with a unit, or a percentage ("5%").

    Raises:
        OptionError: none of these.
    """
    if value in (0, "0") and not isinstance(value, bool):
        return FreeDisk(size_bytes=0)
    size = parse_cache_size(value, name)
    return FreeDisk(size.size_bytes, size.share)


def parse_choice(value: object, allowed: tuple[_Choice, ...], name: str) -> _Choice:
    """One of the allowed values.

    Raises:
        OptionError: another value.
    """
    for choice in allowed:
        if value == choice:
            return choice
    raise OptionError(f"{name}={value!r}; expected one of {', '.join(map(repr, allowed))}")


def parse_folder(value: object, name: str) -> str | None:
    """A URL or path as text; None for an empty one.

    Raises:
        OptionError: another type.
    """
    if value is None or value == "":
        return None
    if not isinstance(value, (str, os.PathLike)) or isinstance(path := os.fspath(value), bytes):
        raise OptionError(f"{name} is a {type(value).__name__}; expected a URL or a path")
    return str(path)


def parse_switch(value: object, name: str) -> bool:
    """A switch: "1", "true", "yes" or "on", or their opposites.

    Raises:
        OptionError: another value.
    """
    if isinstance(value, str) and value.lower() in _SWITCH:
        return _SWITCH[value.lower()]
    if value is None or isinstance(value, bool):
        return bool(value)
    raise OptionError(f"{name}={value!r}; expected 1 or 0")


def parse_seconds(value: object, name: str) -> float:
    """A number of seconds, 0 or more.

    Raises:
        OptionError: not a finite number, or a negative one.
    """
    with contextlib.suppress(ValueError):
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            number = float(value)
            if 0 <= number < math.inf:
                return number
    raise OptionError(f"{name}={value!r} is not a number of seconds; expected one such as 60, or 0")


def parse_count(value: object, name: str) -> int:
    """A whole number of at least 1.

    Raises:
        OptionError: not a whole number, or a smaller one.
    """
    with contextlib.suppress(ValueError):
        if isinstance(value, str | int) and not isinstance(value, bool) and (number := int(value)) >= 1:
            return number
    raise OptionError(f"{name}={value!r}; expected a whole number of at least 1")


def listen_at(listen: str, name: str = "listen") -> tuple[str, int]:
    """Address and port of "127.0.0.1:9433" or "[::1]:9433".

    Raises:
        OptionError: the value has another form.
    """
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise OptionError(f'{name}={listen!r} is no address and port; expected "127.0.0.1:9433"')
    return host.strip("[]"), int(port)


def parse_listen(value: object, name: str) -> str:
    """An address and port, as `listen_at` takes them apart.

    Raises:
        OptionError: the value has another form.
    """
    listen_at(str(value), name)
    return str(value)


def parse_directory(value: object, name: str) -> Path:
    """An absolute path on a local disk; `~` is expanded.

    Raises:
        OptionError: not a path, or a URL; or it is relative to a home or folder that doesn't exist.
    """
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise OptionError(f"{name}={value!r} is not a directory; expected a path on a local disk")
    text = os.fspath(value)
    if isinstance(text, bytes) or "://" in text or "\0" in text:
        raise OptionError(f"{name}={value!r} is not a directory; expected a path on a local disk")
    try:
        path = Path(text).expanduser()
        return path if path.is_absolute() else Path.cwd() / path
    except RuntimeError:
        raise OptionError(
            f"{name}={value!r}: there is no such home directory; give an absolute path"
        ) from None
    except OSError as exc:
        raise OptionError(
            f"{name}={value!r}: the current directory can't be used ({exc.strerror}); give an absolute path"
        ) from None


def at_least(least: int, /, **values: int | None) -> None:
    """Refuse numbers below `least`; None passes.

    Raises:
        OptionError: it names the argument.
    """
    for name, value in values.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise OptionError(f"{name}={value!r}; expected a whole number of at least {least}")
