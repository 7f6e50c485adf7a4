"""Description of users' functions for the fingerprint of a run's rows: their code, and what they hold.

Imported only where a function runs as given: it uses the describer of cached modules.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from typing import Any

import numpy as np
import torch
import xxhash

from streamload.derived.proof.code import Describer
from streamload.errors import FeatureNotCacheable

logger = logging.getLogger("streamload")

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
"""Their state doesn't count: each sample seeds them (transforms/generators.py)."""
_MOST_VALUES = 20_000
"""A function that holds more, such as a list of captions, takes too long to describe."""
_MOST_BYTES = 1 << 28
"""The same for arrays, such as a file that is mapped: about 0.1 s of digesting."""
_PACKAGE = "package "


class _RowDescriber(Describer):
    """Describes a function that makes rows. Dicts count without their order."""

    orders_dicts = False

    def __init__(self) -> None:
        super().__init__()
        self._left, self._left_bytes = _MOST_VALUES, _MOST_BYTES

    def describe(self, value: Any, where: str) -> Any:
        """Describe a value; see Describer."""
        self._left -= 1
        if self._left < 0:
            raise FeatureNotCacheable(f"{where}: the function holds more than {_MOST_VALUES:,} values")
        if isinstance(value, _GENERATORS):
            return ["generator", type(value).__name__]
        if isinstance(value, torch.nn.Module) and next(value.parameters(), None) is not None:
            raise FeatureNotCacheable(f"{where} has weights, which a training may change")
        if isinstance(value, (torch.Tensor, np.ndarray)):
            self._left_bytes -= value.nbytes
            if self._left_bytes < 0:
                raise FeatureNotCacheable(f"{where}: the function holds arrays of over {_MOST_BYTES:,} bytes")
        return super().describe(value, where)


def described(function: Any, name: str) -> dict[str, str] | None:
    """Return a digest of a function, and the versions of the packages that it uses, by name.

    The digest is of bytecode, and so has the version of Python in its name: under another one it isn't
    compared.

    Args:
        function: of the user, or several.
        name: of the argument.

    Returns:
        None if nothing tells when the function changes.
    """
    describer = _RowDescriber()
    try:
        description = [describer.value(function, name), describer.arranged_code]
    except Exception as exc:  # of the user's objects, too, which are asked for what they hold
        logger.debug("%s= has no fingerprint: %s", name, exc)
        return None
    code = description[1]
    packages = {key: code.pop(key) for key in [*code] if key.startswith(_PACKAGE)}
    digest = xxhash.xxh3_64_hexdigest(json.dumps(description, sort_keys=True).encode())
    versions = {
        key.removeprefix(_PACKAGE): version.partition("+")[0]
        for key, version in packages.items()
        if not version.startswith("Python ")
    }
    return {**versions, f"{name} (by Python {sys.version_info[0]}.{sys.version_info[1]})": digest}
