"""The topology of a run: rank, node, and how many there are.

Read by the rank at first use and passed to the workers. Sources are arguments, torch.distributed, if its
process group is initialised (torch is never imported here), and the launcher's environment variables. There
is no communication.
"""

import hashlib
import logging
import os
import re
import secrets
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from streamload.errors import OptionError

_log = logging.getLogger("streamload")


@dataclass(frozen=True, slots=True)
class Topology:
    """The position of a rank in a run.

    Attributes:
        rank, world_size: among all ranks of the run.
        local_rank, local_world_size: among the ranks of its node.
        node, nodes: of its node.
        source: "argument", "torch.distributed", "torchrun", "Slurm", "Open MPI", "PMI", or "alone" if there
            is none.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    nodes: int = 1
    source: str = "alone"

    def __post_init__(self) -> None:
        for index, count in (("rank", "world_size"), ("local_rank", "local_world_size"), ("node", "nodes")):
            number, total = getattr(self, index), getattr(self, count)
            if not 0 <= number < total:
                raise OptionError(
                    f"{index}={number} with {count}={total} ({self.source}); expected 0 ≤ {index} < {count}"
                )
        for part in ("local_world_size", "nodes"):
            if getattr(self, part) > self.world_size:
                raise OptionError(
                    f"{part}={getattr(self, part)} with world_size={self.world_size} ({self.source}); "
                    f"expected at most one for each rank"
                )


class _Launcher(NamedTuple):
    """The environment variables of a launcher; "" if it has none for a value."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    node: str = ""
    nodes: str = ""


# The first whose `world_size` is set is used; torchrun comes first because it may run under the others.
# Slurm counts only inside `srun`: a batch script has SLURM_NTASKS, too, but is one process.
_LAUNCHERS = (
    _Launcher(
        "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"
    ),
    _Launcher(
        "Slurm",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_NODEID",
        "SLURM_STEP_NUM_NODES",
    ),
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)

_READ_LATER = (
    "; or ask for a loader's length, state and batches once torch.distributed is initialised (Lightning does "
    "that in fit()), or give Order(rank=…, world_size=…)"
)


def read_topology(
    rank: int | None = None, world_size: int | None = None, environ: Mapping[str, str] | None = None
) -> Topology:
    """Find this process's topology.

    Rank and world size are those of `read_rank`. The node comes from the launcher's variables, where these
    don't contradict that rank. Without a number of ranks per node, all are assumed to be on one node: results
    are right, but each further node reads all of the data.

    Args:
        rank: given with `world_size`, or neither.
        world_size: number of ranks that share the data.
        environ: the variables; by default those of the process.

    Raises:
        OptionError: contradictory values, or values that are not whole numbers; of variables only where
            neither arguments nor torch.distributed have the rank.
    """
    environ = os.environ if environ is None else environ
    rank, world_size, source = read_rank(rank, world_size, environ)
    on_one_node = Topology(rank, world_size, rank, world_size, source=source)
    launcher = _launcher_of(rank, world_size, source, environ)
    if launcher is None:
        return on_one_node
    try:
        return Topology(rank, world_size, *_read_node(launcher, rank, world_size, environ), source=source)
    except OptionError as exc:
        if launcher.name == source:
            raise
        _log.warning(
            f"{exc}. This is rank {rank} by {source}: all {world_size} ranks are assumed to be on one node"
        )
        return on_one_node


def read_rank(
    rank: int | None = None, world_size: int | None = None, environ: Mapping[str, str] | None = None
) -> tuple[int, int, str]:
    """Find this process's rank, the number of ranks, and the source of both.

    Arguments take precedence over torch.distributed (if initialised), which takes precedence over the
    launcher's variables.

    Args:
        rank: given with `world_size`, or neither.
        world_size: number of ranks that share the data.
        environ: the variables; by default those of the process.

    Raises:
        OptionError: one value without the other, or one that is not a whole number.
    """
    environ = os.environ if environ is None else environ
    if (rank is None) != (world_size is None):
        raise OptionError(f"rank={rank} with world_size={world_size}; expected both, or neither")
    if rank is not None and world_size is not None:
        return _whole("rank", rank), _whole("world_size", world_size), "argument"
    return _from_torch() or _from_launcher(environ) or (0, 1, "alone")


class RunAttempt(NamedTuple):
    """The identity of a run, which its states keep, and how often one of its states was loaded."""

    run: str
    attempt: int

    @classmethod
    def launched(cls, reads: str, environ: Mapping[str, str] | None = None) -> "RunAttempt":
        """The attempt of a launch that loads no state: a restart has the same run and a later attempt.

        Only variables that name one job identify it: torchrun's default id "none" doesn't, nor do an address
        and a port, which the next job may have. Without a name it is a new run.

        Args:
            reads: identifies what the run reads, and in which order.
            environ: the variables; by default those of the process.
        """
        environ = os.environ if environ is None else environ
        job = [environ.get(name, "") for name in _JOB]
        if job[0] == "none":
            job[0] = ""
        if not job[0] and not job[1]:
            return cls(secrets.token_hex(8), 1)
        run = hashlib.blake2b(repr([*job, reads]).encode(), digest_size=8).hexdigest()
        return cls(run, 1 + _restarts(environ))

    @classmethod
    def parse(cls, run: object, attempt: object) -> "RunAttempt":
        """Read a run and an attempt.

        Raises:
            ValueError: they aren't one.
        """
        is_run = isinstance(run, str) and re.fullmatch(r"[0-9a-f]{16}", run)
        if not is_run or type(attempt) is not int or not 0 < attempt <= _MOST_ATTEMPTS:
            raise ValueError(f"{run!r:.40}, {attempt!r:.40} is no attempt of a run")
        return cls(str(run), attempt)

    def next(self, environ: Mapping[str, str] | None = None) -> "RunAttempt":
        """The attempt that begins when a state of this one is loaded; a launch may load one several times."""
        restarts = _restarts(os.environ if environ is None else environ)
        return self._replace(attempt=min(self.attempt + 1 + restarts, _MOST_ATTEMPTS))

    def is_after(self, other: "RunAttempt | None") -> bool:
        """True if this is a later attempt of the same run."""
        return other is not None and self.run == other.run and self.attempt > other.attempt


_JOB = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_CLUSTER_NAME", "SLURM_STEP_ID")
_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
_MOST_RESTARTS = 1 << 12
_MOST_ATTEMPTS = (1 << 31) - 1


def _restarts(environ: Mapping[str, str]) -> int:
    """How often the launchers have restarted a job: a number that grows with each restart."""
    restarts = 0
    for name in _RESTARTS:
        text = environ.get(name, "")
        restarts = restarts * _MOST_RESTARTS + (min(int(text), _MOST_RESTARTS - 1) if text.isdecimal() else 0)
    return restarts


_started: Counter[str] = Counter()
"""Number of runs that this process has begun, by launch and shards."""
_LAUNCHED_BY = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)


def run_name(here: Topology, reads: str) -> str:
    """Return a unique name for the run that begins now, the same in all ranks that one process launched.

    These share their parent process and the number of runs over the same shards that they have begun. If that
    can't be found out, each rank has its own run.

    Args:
        here: this rank.
        reads: identifies the list of shards, as `UrlList.fingerprint` does.
    """
    parent = os.getppid()
    if here.local_world_size == 1 or not parent:
        return secrets.token_hex(16)
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
        parent_start = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return secrets.token_hex(16)
    launch = [os.environ.get(name, "") for name in _LAUNCHED_BY]
    launch_facts = repr([here.world_size, here.node, namespace, parent, parent_start, launch, reads])
    run = hashlib.blake2b(launch_facts.encode(), digest_size=12).hexdigest()
    _started[run] += 1
    return f"{run}{_started[run]:08x}"


def _from_torch() -> tuple[int, int, str] | None:
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size(), "torch.distributed"


def _from_launcher(environ: Mapping[str, str]) -> tuple[int, int, str] | None:
    for launcher in _LAUNCHERS:
        world_size = _number(launcher.world_size, environ)
        if world_size is None:
            continue
        rank = _number(launcher.rank, environ)
        if rank is None:
            raise OptionError(
                f"{launcher.world_size} is set and {launcher.rank} is not; set both, or neither{_READ_LATER}"
            )
        return rank, world_size, launcher.name
    rank = _number("RANK", environ)
    if rank is not None:
        raise OptionError(
            f"RANK={rank} without WORLD_SIZE; set both (torchrun does), or neither{_READ_LATER}"
        )
    return None


def _launcher_of(rank: int, world_size: int, source: str, environ: Mapping[str, str]) -> _Launcher | None:
    """Return the launcher whose variables describe this rank; None if there are none, or of another rank."""
    for launcher in _LAUNCHERS:
        if launcher.name == source:
            return launcher
    for launcher in _LAUNCHERS:
        variables = (launcher.rank, launcher.world_size, launcher.local_world_size)
        values = [environ.get(variable, "").strip() for variable in variables]
        if any(values):
            is_same = values[0] in ("", str(rank)) and values[1] in ("", str(world_size))
            return launcher if is_same else None
    return None


def _read_node(
    launcher: _Launcher, rank: int, world_size: int, environ: Mapping[str, str]
) -> tuple[int, int, int, int]:
    """Return local rank and local world size, node and nodes, by a launcher's variables."""
    node, nodes = _number(launcher.node, environ), _number(launcher.nodes, environ)
    local_rank = _number(launcher.local_rank, environ)
    if launcher.name == "Slurm":
        local_world_size = _slurm_tasks(environ.get(launcher.local_world_size, ""), node or 0)
    else:
        local_world_size = _number(launcher.local_world_size, environ)
    if local_world_size is None:
        if local_rank not in (None, rank):
            _log.warning(
                f"rank {rank} with {launcher.local_rank}={local_rank} means several nodes, but "
                f"{launcher.local_world_size} is not set: all {world_size} ranks are assumed to be on one. "
                "Set it, or each node reads all of the data."
            )
        return rank, world_size, 0, 1
    if node is None or nodes is None:
        nodes = -(-world_size // max(1, local_world_size))
        node, guess = _node(rank, local_rank, max(1, local_world_size), nodes)
        local_rank = guess if local_rank is None else local_rank
    elif local_rank is None:
        raise OptionError(
            f"{launcher.local_world_size} is set and {launcher.local_rank} is not; set both, or neither"
        )
    return local_rank, local_world_size, node, nodes


def _node(rank: int, local_rank: int | None, local_world_size: int, nodes: int) -> tuple[int, int]:
    """Return node and local rank, for ranks assigned in blocks by node or, if only that fits, in turn."""
    node, local = divmod(rank, local_world_size)
    if local_rank in (None, local):
        return node, local
    in_turn, node = divmod(rank, nodes)
    if local_rank == in_turn:
        return node, in_turn
    raise OptionError(
        f"rank {rank} can't be local rank {local_rank} on {nodes} nodes of {local_world_size}; "
        "expected ranks in blocks by node, or in turn"
    )


def _slurm_tasks(text: str, node: int) -> int | None:
    """Return the number of tasks on a node from Slurm's list: "4(x2),3" means 4, 4 and 3."""
    counts: list[int] = []
    for part in filter(None, text.replace(" ", "").split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise OptionError(
                f'SLURM_STEP_TASKS_PER_NODE={text!r} is invalid; expected a list such as "4(x2),3"'
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else None


def _number(variable: str, environ: Mapping[str, str]) -> int | None:
    """Return a variable's number; None if it isn't set."""
    text = environ.get(variable, "").strip() if variable else ""
    return _whole(variable, text) if text else None


def _whole(name: str, value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise OptionError(f"{name}={value!r} is not a whole number") from None
