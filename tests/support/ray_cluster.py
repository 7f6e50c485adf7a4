"""A Ray cluster of several nodes on this machine, to lose nodes of and to add some; it ends with its parent.

Ray's own `ray.cluster_utils.Cluster`, in a process of its own that is steered through its standard input: the
process of a test holds nothing of Ray.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_STORE_BYTES = 80 << 20
"""Ray's least; nothing of ours is in it."""
_FEW = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_enable_metrics_collection": "false",
    "RAY_prestart_worker_first_driver": "0",
}


class RayCluster:
    """A head that runs no tasks; nodes are added to it. A context manager.

    Args:
        environ: set for all processes of the cluster, beside this one's environment.

    Attributes:
        address: what a driver joins it by.
    """

    def __init__(self, environ: Mapping[str, str] | None = None):
        path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ray_cluster"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **_FEW, **(environ or {})},
        )
        try:
            self.address: str = self._answer()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add_node(self, environ: Mapping[str, str] | None = None, cpus: int = 2) -> int:
        """Start a node, and wait until it has joined.

        Args:
            environ: set for the processes of the node.
            cpus: how many it says that it has.

        Returns:
            Its number, by which it can be lost.
        """
        number: int = self._ask("add", dict(environ or {}), cpus)
        return number

    def lose_node(self, number: int) -> list[int]:
        """Kill all processes of a node, as if its machine had gone: its raylet first, then what works there.

        Returns:
            Their process ids.
        """
        pids: list[int] = self._ask("lose", number)
        return pids

    def kill_raylet(self, number: int) -> int:
        """Kill the raylet of a node alone; its workers see it, and end in time. Returns its process id."""
        pid: int = self._ask("kill", number)
        return pid

    def close(self) -> None:
        """End all of it; idempotent."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()

    def _ask(self, what: str, *args: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, args]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("> "):
                answer = json.loads(line[2:])
                if isinstance(answer, dict):
                    raise RuntimeError(f"Ray's local cluster failed: {answer['error']}")
                return answer
        raise RuntimeError(f"the process of the Ray cluster ended with status {self._process.wait()}")


def main() -> None:
    """Do what the input says, until it ends."""
    place = tempfile.mkdtemp(prefix="sl-ray-", dir="/tmp")  # the path of a socket has to be short
    # Not just the nodes' `temp_dir`: Ray's Cluster also notes its address where Ray's own default is, which
    # may not be there yet, or hold that of a cluster which somebody uses.
    os.environ["RAY_TMPDIR"] = place
    (Path(place) / "ray").mkdir()
    try:
        _serve()
    except Exception as exc:
        _tell({"error": str(exc)})
        raise
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _serve() -> None:
    from ray.cluster_utils import Cluster

    common = {"object_store_memory": _STORE_BYTES, "include_dashboard": False}
    cluster = _started(lambda: Cluster(initialize_head=True, head_node_args={**common, "num_cpus": 0}))
    nodes: list[Any] = []
    try:
        _tell(cluster.address)
        for line in sys.stdin:
            what, args = json.loads(line)
            if what == "add":
                environ, cpus = args
                more = {**common, "num_cpus": cpus, "env_vars": environ}
                nodes.append(_started(functools.partial(cluster.add_node, **more)))
                _tell(len(nodes) - 1)
                continue
            (raylet,) = (info.process.pid for info in nodes[args[0]].all_processes["raylet"])
            below = _below(raylet) if what == "lose" else []
            for pid in [raylet, *below]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _tell([raylet, *below] if what == "lose" else raylet)
    finally:
        cluster.shutdown()


def _started(start: Callable[[], Any]) -> Any:
    """Start something of Ray's, once more where a busy machine didn't do it within Ray's 30 s."""
    try:
        return start()
    except Exception as exc:
        if "timed out during startup" not in str(exc):
            raise
        return start()


def _tell(answer: object) -> None:
    print("> " + json.dumps(answer), flush=True)


def _below(pid: int) -> list[int]:
    """The processes that a process has started, and what those have."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            for child in (task / "children").read_text().split():
                found += [int(child), *_below(int(child))]
    return found


if __name__ == "__main__":
    main()
