"""Environment variables and files that change what a curl or aws command does (step A).

Reads environment variables and aws's configuration, and checks which other files exist; changes nothing.
"""

from __future__ import annotations

import functools
import os
import pwd
import re
import shutil
import time
from pathlib import Path
from typing import NamedTuple

_SHELL = ("BASH_ENV", "BASHOPTS", "SHELLOPTS")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_CURLRC_PLACES = (".curlrc", "curlrc", ".config/curlrc", ".config/.curlrc")
_PLUGINS = re.compile(rb"^\s*\[\s*plugins\s*\]", re.MULTILINE)


class CommandEnvironment(NamedTuple):
    """Environment of a command.

    Attributes:
        obstacle: what may change the meaning of its flags; None: nothing.
        names_endpoint: whether aws's configuration may name the service.
    """

    obstacle: str | None
    names_endpoint: bool = False


def command_environment(
    program: str, *, secure: bool = False, reads_config: bool = True
) -> CommandEnvironment:
    """Return what affects a curl or aws command now; cached for a second.

    Args:
        program: "curl" or "aws".
        secure: the URL is https, so the certificates that curl trusts matter.
        reads_config: False for ``curl -q``.
    """
    return _look(program, secure, reads_config, int(time.monotonic()))


@functools.lru_cache(maxsize=8)
def _look(program: str, secure: bool, reads_config: bool, second: int) -> CommandEnvironment:
    obstacle = _shell_obstacle(program)
    if program == "aws":
        return CommandEnvironment(obstacle or _aws_obstacle(), b"endpoint_url" in _aws_config())
    return CommandEnvironment(obstacle or _curl_obstacle(secure, reads_config))


def _shell_obstacle(program: str) -> str | None:
    """Return what may change which program runs, or its proxy."""
    for name in (*_SHELL, f"BASH_FUNC_{program}%%"):
        if os.environ.get(name):
            return f"{name} is set"
    for name in _PROXIES:
        if os.environ.get(name):
            return f"the proxy {name} is set"
    return None


def _curl_obstacle(secure: bool, reads_config: bool) -> str | None:
    bundle = os.environ.get("CURL_CA_BUNDLE")
    if secure and bundle and bundle != os.environ.get("SSL_CERT_FILE"):
        return "CURL_CA_BUNDLE is set"
    if reads_config and _has_curlrc():
        return "there is a .curlrc"
    if _is_script("curl", os.environ.get("PATH", "")):
        return "the curl in PATH is a script"
    return None


def _aws_obstacle() -> str | None:
    """Return what changes the behaviour of aws, or of fsspec in its place."""
    if any(name.startswith("FSSPEC_") for name in os.environ):
        return "an FSSPEC_ variable is set"
    home = _home()
    if os.path.lexists(f"{home}/.config/fsspec"):
        return "there is a configuration of fsspec"
    if os.path.lexists(f"{home}/.aws/cli/alias"):
        return "there are aliases of aws"
    if _PLUGINS.search(_aws_config()):
        return "aws is configured with plugins"
    return None


def _has_curlrc() -> bool:
    """Check the locations of all versions of curl, and a few more: a false positive only costs speed."""
    folders = {os.environ.get(name, "") for name in ("CURL_HOME", "XDG_CONFIG_HOME")} | {_home(), _own_home()}
    folders.discard("")
    return any(os.path.lexists(f"{folder}/{place}") for folder in folders for place in _CURLRC_PLACES)


def _home() -> str:
    return os.environ.get("HOME") or _own_home()


@functools.lru_cache(maxsize=1)
def _own_home() -> str:
    """Return the home directory from the user database; "" for an unknown user, as in some containers."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return ""


def _is_script(program: str, path: str) -> bool:
    """Return whether the program in `path` is a wrapper script."""
    path_of_program = shutil.which(program, path=path)
    try:
        return path_of_program is not None and _start(path_of_program) == b"#!"
    except OSError:
        return True


def _start(path: str) -> bytes:
    with Path(path).open("rb") as file:
        return file.read(2)


def _aws_config() -> bytes:
    path = os.environ.get("AWS_CONFIG_FILE") or f"{_home()}/.aws/config"
    try:
        return Path(os.path.expanduser(path)).read_bytes()  # noqa: PTH111  (never raises)
    except (OSError, ValueError):
        return b""
