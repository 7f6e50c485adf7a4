"""A Slurm of several nodes on this machine, of Debian's packages, for this user's batch scripts."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

_COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
_SECONDS = 60.0
_GPUS = 8
_WITH_DISK = 'mount -t tmpfs -o mode=0777 disk "$0" && exec "$@"'

needs_slurm = pytest.mark.skipif(
    any(shutil.which(command) is None for command in _COMMANDS),
    reason="Slurm is missing: install munge, slurmctld, slurmd and slurm-client (`make test` tries to)",
)


class Slurm:
    """A controller and nodes, each with more processors and GPUs than it has; a context manager.

    The first node has the machine's own name, so that what scripts connect to is found.

    Args:
        place: a folder for all of it.
        nodes: of them.
        disk: a folder where each node has another disk; None: they have none of their own.
    """

    def __init__(self, place: Path, nodes: int = 2, disk: Path | None = None):
        self._place, self._disk = place, disk
        self.nodes = [socket.gethostname(), *(f"{socket.gethostname()}-{n}" for n in range(1, nodes))]
        self._configuration = place / "slurm.conf"
        self._servers: list[subprocess.Popen[bytes]] = []
        self._configure()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, *command: str | Path, environ: Mapping[str, str]) -> str:
        """Submit a script with `sbatch`; return its job's number."""
        done = self._run("sbatch", "--parsable", *map(str, command), environ=environ)
        return done.partition(";")[0].strip()

    def signal(self, job: str, name: str) -> None:
        """Send a signal to the steps of a job."""
        self._run("scancel", f"--signal={name}", job)

    def states(self, job: str) -> set[str]:
        """The states of a job's tasks that aren't forgotten yet."""
        shown = self._run("scontrol", "show", "job", job)
        return {word[9:] for word in shown.split() if word.startswith("JobState=")}

    def close(self) -> None:
        """End all servers. Idempotent."""
        for server in reversed(self._servers):
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(10.0)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        self._servers.clear()

    def _run(self, *command: str, environ: Mapping[str, str] | None = None) -> str:
        variables = {**os.environ, **(environ or {}), "SLURM_CONF": str(self._configuration)}
        done = subprocess.run(
            command, cwd=self._place, env=variables, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _configure(self) -> None:
        place, (control, *ports) = self._place, _free_ports(1 + len(self.nodes))
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (place / name).mkdir(parents=True)
        for number in range(_GPUS):
            (place / f"gpu{number}").touch()
        names, user = ",".join(self.nodes), "root" if os.geteuid() == 0 else os.environ.get("USER", "nobody")
        (place / "gres.conf").write_text(f"NodeName={names} Name=gpu File={place}/gpu[0-{_GPUS - 1}]\n")
        hardware = f"CPUs=256 RealMemory=1000000 Gres=gpu:{_GPUS} State=UNKNOWN"
        numbers = ",".join(map(str, ports))
        where = f"NodeAddr=127.0.0.1 NodeHostname={self.nodes[0]} Port={numbers}"
        lines = [
            "ClusterName=tests",
            f"SlurmctldHost={self.nodes[0]}(127.0.0.1)",
            f"SlurmctldPort={control}",
            f"SlurmUser={user}",
            f"SlurmdUser={user}",
            "AuthType=auth/munge",
            f"AuthInfo=socket={place}/munge.socket",
            f"SlurmctldPidFile={place}/slurmctld.pid",
            f"SlurmdPidFile={place}/slurmd-%n.pid",
            f"SlurmdSpoolDir={place}/spool-%n",
            f"StateSaveLocation={place}/state",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "MpiDefault=none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "SlurmdParameters=config_overrides",
            "SchedulerParameters=batch_sched_delay=0,sched_min_interval=0",
            "ReturnToService=2",
            "GresTypes=gpu",
            f"NodeName={names} {where} {hardware}",
            f"PartitionName=cpu Nodes={names} Default=YES State=UP",
            f"PartitionName=gpu Nodes={names} State=UP",
        ]
        self._configuration.write_text("\n".join(lines) + "\n")
        key = place / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)

    def _start(self) -> None:
        place = self._place
        socket_path = place / "munge.socket"
        munged = ["munged", "--foreground", "--force", f"--socket={socket_path}", f"--seed-file={place}/seed"]
        self._serve(*munged, f"--key-file={place}/munge.key", f"--pid-file={place}/munged.pid")
        _until(socket_path.exists)
        self._serve("slurmctld", "-D", "-c", "-f", str(self._configuration))
        for node in self.nodes:
            command = ["slurmd", "-D", "-N", node, "-f", str(self._configuration)]
            if self._disk is not None:
                command = ["unshare", "--mount", "sh", "-c", _WITH_DISK, str(self._disk), *command]
            self._serve(*command)
        _until(self._are_idle)

    def _are_idle(self) -> bool:
        variables = {**os.environ, "SLURM_CONF": str(self._configuration)}
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--partition=cpu", "--format=%T"],
            env=variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout.split() == ["idle"] * len(self.nodes)

    def _serve(self, *command: str) -> None:
        with (self._place / "servers.log").open("ab") as log:
            self._servers.append(subprocess.Popen(command, cwd=self._place, stdout=log, stderr=log))


def _until(holds: object) -> None:
    deadline = time.monotonic() + _SECONDS
    assert callable(holds)
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
