"""The readable parts of a fingerprint, as they are noted beside its rows. It starts without torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from streamload.derived.store.sealed import unseal
from streamload.errors import CacheCorrupt

NOTE = b"parts"
"""Before a fingerprint: the key of its note."""
SETTINGS = ("torch", "autocast", "float32_matmul_precision", "allow_tf32", "default_dtype")
"""Values of `fingerprint.torch_settings`, in its order."""


def digest_of_parts(parts: Mapping[str, Any]) -> bytes:
    """The 16 bytes of the fingerprint that has these parts."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def read_parts(key: bytes, data: bytes) -> dict[str, Any]:
    """The parts that a stored note holds.

    Raises:
        CacheCorrupt: it isn't what was written, or isn't of the fingerprint in its key.
    """
    try:
        parts = json.loads(bytes(unseal(key, data).body))
    except (ValueError, RecursionError) as exc:
        raise CacheCorrupt(f"the note {key.hex()} can't be read: {exc}") from exc
    if not isinstance(parts, dict) or NOTE + digest_of_parts(parts) != key:
        raise CacheCorrupt(f"the note {key.hex()} is of another fingerprint")
    return parts


def kind_of(parts: Mapping[str, Any] | None) -> str:
    """Parts in which modules of one label may differ and be in use at once; "": the parts aren't known."""
    if parts is None:
        return ""
    return json.dumps({name: parts.get(name) for name in ("arguments", "inputs")}, sort_keys=True)


def flat(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The values of parts by name, such as "arguments.width", "code.Extractor.forward", "settings.torch"."""
    settings = parts.get("settings")
    if isinstance(settings, list) and len(settings) == len(SETTINGS):
        parts = {**parts, "settings": dict(zip(SETTINGS, settings, strict=True))}
    return dict(_leaves(parts, ()))


def _leaves(parts: Mapping[str, Any], inside: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name, value in parts.items():
        path = (*inside, name) if name else inside  # "" is a module itself, among those in it
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path)
        else:
            yield ".".join(path), value


def compared(first_parts: Mapping[str, Any], second_parts: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The parts in which two fingerprints differ, each with both values; None of what one hasn't."""
    first, second = flat(first_parts), flat(second_parts)
    both = ((name, first.get(name), second.get(name)) for name in sorted({*first, *second}))
    return [(name, before, after) for name, before, after in both if before != after]
