"""Records of a module's builds, which predict the next build without running it.

A record is used only if builds in different processes agreed, the files and variables that they read are
unchanged, and random initialisation plays no part. Otherwise the module is built.
"""

from __future__ import annotations

import hashlib
import json
import marshal
import os
import random
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from streamload.derived.proof.code import Describer, has_code
from streamload.derived.proof.reads import FileIdentity, digests_of, identity_of

_KEPT = 8
_NAME = uuid.uuid4().hex


def _process() -> str:
    return f"{_NAME} {os.getpid()}"


@dataclass(frozen=True)
class Build:
    """Outcome of a module's build."""

    generators: dict[str, str]  # digest of each random generator's state before the build
    draws: list[str]  # generators that the build drew from
    is_closed: bool  # whether all reads are known: no network, no other process
    files: dict[str, FileIdentity]  # files that were read, by path
    variables: dict[str, str | None]
    """Environment variables that were read: a digest of each value; None: unset."""
    parts: dict[str, Any]  # of the fingerprint
    origins: dict[str, str]  # project classes by "module:qualname", with their names in the code
    device: str  # of the module when built
    process: str = field(default_factory=_process)  # that built it

    def still_holds(self) -> bool:
        """True if files, variables and the classes' code are unchanged."""
        if not self.is_closed or self.variables != digests_of(self.variables):
            return False
        if any(identity_of(path) != identity for path, identity in self.files.items()):
            return False
        describer = Describer()
        for origin, name in self.origins.items():
            module, _, qualname = origin.partition(":")
            holder: Any = sys.modules.get("__main__" if module == "__mp_main__" else module)
            for step in qualname.split("."):
                holder = getattr(holder, step, None)
            if not isinstance(holder, type):
                return False
            describer.reach(holder, name)
        patches = self.parts.get("patches", {})
        if any(patches.get(place) != described for place, described in describer.patches().items()):
            return False
        return has_code(self.parts["code"], describer.code)


def read_builds(data: bytes | None) -> list[Build]:
    """Parse the result of `with_latest`; an empty list if it is corrupt."""
    try:
        return [Build(**record) for record in json.loads(data or b"[]")]
    except (ValueError, TypeError):
        return []


def with_latest(data: bytes | None, latest: Build) -> bytes:
    """Add a record to the records, replacing an earlier one of the same process; JSON."""
    builds = [build for build in read_builds(data) if build.process != latest.process]
    return json.dumps([asdict(build) for build in [*builds, latest][-_KEPT:]]).encode()


def believed(
    builds: Sequence[Build], generators: Mapping[str, str], *, has_weights: bool = False
) -> Build | None:
    """The build that the next one will equal, if that is known.

    Args:
        builds: earlier builds with the same recipe.
        generators: digests of the random generators' states now, as in `Build`.
        has_weights: all weights come from known files, so one build is enough and chance plays no part.
    """
    drawn = {name for build in builds for name in build.draws}
    needed = 1 if has_weights else 2
    # different initial states of every generator that any build drew from
    are_apart = all(len({build.generators[name] for build in builds}) > 1 for name in drawn)
    if not has_weights and drawn and not (_agree(builds, needed) and are_apart):
        builds = [
            build for build in builds if all(build.generators[name] == generators[name] for name in drawn)
        ]
    return builds[-1] if _agree(builds, needed) and builds[-1].still_holds() else None


def _agree(builds: Sequence[Build], needed: int) -> bool:
    """True if enough processes have built the module with the same outcome."""
    are_enough = len({build.process for build in builds}) >= needed
    return are_enough and all(build.parts == builds[0].parts for build in builds)


class Generators:
    """Snapshot of the states of the random generators of Python, numpy and torch."""

    def __init__(self) -> None:
        twister: Any = np.random.get_state(legacy=False)
        self._states = (random.getstate(), twister, torch.get_rng_state())
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]

    def restore(self) -> None:
        """Restore the snapshot."""
        python, twister, cpu = self._states
        random.setstate(python)
        np.random.set_state(twister)
        torch.set_rng_state(cpu)
        if self._cuda and len(self._cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(self._cuda)

    def were_used(self) -> bool:
        """True if anything has drawn random numbers since; about 20 µs."""
        return self._contents != Generators()._contents

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the states by generator, 32 hexadecimal digits."""
        return {
            name: hashlib.blake2b(content, digest_size=16).hexdigest()
            for name, content in self._contents.items()
        }

    @property
    def _contents(self) -> dict[str, bytes]:
        python, twister, cpu = self._states
        state = twister["state"]
        return {
            "python": marshal.dumps(python, 2),
            "numpy": state["key"].tobytes() + b"%d %d" % (state["pos"], twister["has_gauss"]),
            "torch": cpu.numpy().tobytes(),
            "cuda": b"".join(states.numpy().tobytes() for states in self._cuda),
        }
