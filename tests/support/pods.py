"""Pods of deploy/kubernetes as hosts of a switch (networks.py): the commands of the manifests as they stand.

A pod is a process in mounts of its own, where its volumes are empty folders, with the user, the variables and
the command that its manifest says, and no capabilities but one: to read the Python of these tests, which can
be in root's home. Linux only, as root.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.support.kills import Child, Stage
from tests.support.networks import Switch, why_no_network

MANIFESTS = Path(__file__).parents[2] / "deploy" / "kubernetes"
_POD_INDEX = "metadata.labels['apps.kubernetes.io/pod-index']"
_NEW_ROOT = """
set -e
root=$1 user=$2
shift 2
mount --make-rprivate /
mount -t tmpfs pod "$root"
for each in /*; do
    if [ -L "$each" ]; then cp -P "$each" "$root$each"
    elif [ -d "$each" ]; then mkdir "$root$each" && mount --rbind "$each" "$root$each"; fi
done
while [ "$1" != -- ]; do
    mkdir -p "$root$1"
    mount -t tmpfs -o mode=0777 volume "$root$1"
    shift
done
shift
left=-all,+dac_read_search
exec chroot "$root" setpriv --reuid="$user" --regid="$user" --clear-groups --no-new-privs \
    --bounding-set="$left" --inh-caps="$left" --ambient-caps="$left" -- "$@"
"""
"""Mounts: all of the machine's, and the pod's volumes above it."""


def why_no_pods() -> str:
    """Why pods can't be had here; empty if they can."""
    tools = [tool for tool in ("setpriv", "unshare", "chroot") if shutil.which(tool) is None]
    return f"{tools[0]} isn't installed" if tools else why_no_network()


def manifests(name: str) -> dict[str, dict[str, Any]]:
    """The objects of a file, by their kinds."""
    objects = list(yaml.safe_load_all((MANIFESTS / name).read_text()))
    return {each["kind"]: each for each in objects}


def environ_of(container: Mapping[str, Any], ordinal: int) -> dict[str, str]:
    """A container's variables in the pod of that ordinal."""
    found = {}
    for variable in container["env"]:
        source = variable.get("valueFrom")
        assert source in (None, {"fieldRef": {"fieldPath": _POD_INDEX}})
        found[variable["name"]] = str(ordinal) if source else variable["value"]
    return found


def command_of(container: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    """A container's command, as the kubelet fills in its variables."""
    return [
        re.sub(r"\$\(([A-Z_]+)\)", lambda match: environ[match[1]], word) for word in container["command"]
    ]


def start_pod(
    switch: Switch,
    host: int,
    template: Mapping[str, Any],
    place: Path,
    *,
    ordinal: int = 0,
    environ: Mapping[str, str],
) -> Child:
    """Start a pod, in the switch's process; its result is its exit code and what it said. SIGTERM ends it.

    Args:
        host: its number on the switch.
        template: of a StatefulSet or a Job.
        place: a folder of its own.
        ordinal: of the pod.
        environ: what the cluster adds to its variables.
    """
    (container,) = template["spec"]["containers"]
    variables = environ_of(container, ordinal)
    command = command_of(container, variables)
    assert command[0] == "streamload"
    volumes = [mount["mountPath"] for mount in container["volumeMounts"] if mount["mountPath"] != "/tmp"]
    user = str(template["spec"]["securityContext"]["runAsUser"])

    def run(stage: Stage) -> tuple[int, str]:
        switch.join(host)
        place.mkdir(parents=True)
        root = place / "root"
        root.mkdir()
        words = ["unshare", "--mount", "bash", "-c", _NEW_ROOT, "pod", str(root), user, *volumes, "--"]
        with (
            (place / "log").open("w+") as log,
            subprocess.Popen(
                [*words, str(Path(sys.executable).with_name("streamload")), *command[1:]],
                cwd="/",
                env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/", **environ, **variables},
                stdout=log,
                stderr=log,
            ) as process,
        ):
            signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM))
            stage.enter("running")
            process.wait()
            return process.returncode, (place / "log").read_text()

    return Child(run, limit_seconds=150.0)
