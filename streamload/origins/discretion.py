"""Takes the secrets of a URL out of an error about it, and out of its whole chain of causes (step F)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from streamload.errors import StreamloadError
from streamload.urls import scrub


@contextlib.contextmanager
def discreet(secrets: Callable[[], Sequence[str]]) -> Iterator[None]:
    """Take secrets out of whatever error is raised within: no handler or traceback shows one.

    An error of ours loses them from its message; a foreign one in its chain that holds any is cut off.

    Args:
        secrets: called where there is an error.
    """
    try:
        yield
    except Exception as exc:
        _clean(exc, secrets(), set())
        raise


def _clean(error: BaseException, secrets: Sequence[str], seen: set[int]) -> bool:
    """Clean an error and its chain; whether it holds none any more."""
    seen.add(id(error))
    if isinstance(error, StreamloadError):
        error.args = tuple(scrub(arg, secrets) if isinstance(arg, str) else arg for arg in error.args)
    for name in ("__cause__", "__context__"):
        other = getattr(error, name)
        if other is not None and id(other) not in seen and not _clean(other, secrets, seen):
            setattr(error, name, None)
    said = f"{error} {error!r}"
    return isinstance(error, StreamloadError) or scrub(said, secrets) == said
