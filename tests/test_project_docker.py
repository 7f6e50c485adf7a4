"""The image and the compose file without an engine: the Dockerfile's steps in a fresh directory, then the
services' commands with a real S3 server.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import s3fs
import yaml
from moto.server import ThreadedMotoServer
from tiers import until

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
PINNED = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
SYSTEM_COMMANDS = {"apt-get", "rm", "useradd", "install"}


def steps():
    """(instruction, rest) of each line; comments left out, continued lines joined."""
    text = re.sub(r"\\\n", " ", DOCKERFILE.read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(line.split(" ", 1)) for line in lines]


def copies():
    """(source, target) of each COPY."""
    for instruction, rest in steps():
        if instruction == "COPY":
            *sources, target = rest.split()
            yield from ((source, target) for source in sources)


def run_steps():
    return [rest for instruction, rest in steps() if instruction == "RUN"]


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """A directory as the image's WORKDIR is after all steps, and the environment that they installed into.

    The environment sees the libraries of this one, behind its own, so that only streamload is installed anew.
    """
    root = tmp_path_factory.mktemp("image")
    app, environment = root / "app", root / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=120)
    own = environment / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (own / "parent.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    pip = environment / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec {environment}/bin/python -m pip "$@"\n')
    pip.chmod(0o755)
    app.mkdir()
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environ |= {
        "PATH": f"{environment}/bin:{os.environ['PATH']}",
        "PIP_FORCE_REINSTALL": "",
        "HOME": str(root),
    }
    for instruction, rest in steps():
        if instruction == "COPY":
            *sources, target = rest.split()
            for source in sources:
                copy(ROOT / source, app / target)
        elif instruction == "RUN" and rest.startswith("pip "):
            command = rest.replace("pip install", "pip install --no-deps --no-build-isolation --quiet")
            subprocess.run(["bash", "-ec", command], cwd=app, env=environ, check=True, timeout=170)
    return app, environ


def copy(source, target):
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def test_every_file_that_is_copied_is_in_the_repository_and_not_ignored():
    kept = [
        line[1:]
        for line in (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
        if line[0] == "!"
    ]
    for source, _ in copies():
        assert (ROOT / source).exists(), source
        assert source in kept


def test_each_step_is_a_command_that_the_replay_runs_or_that_only_changes_the_system():
    for command in run_steps():
        assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0
        if not command.startswith("pip "):
            assert {part.split()[0] for part in command.split("&&")} <= SYSTEM_COMMANDS, command


def test_the_image_runs_as_a_user_who_owns_the_cache():
    instructions = dict(steps())
    user = instructions["USER"]
    made = next(command for command in run_steps() if "useradd" in command)
    assert shlex.split(made)[shlex.split(made).index("&&") - 1] == user
    assert f"-o {user}" in made
    assert instructions["VOLUME"] in made.split()
    assert instructions["ENV"] == f"STREAMLOAD_CACHE_DIR={instructions['VOLUME']}"


def test_the_python_of_the_image_is_one_that_the_package_supports():
    _, minor = re.fullmatch(r"python:(3)\.(\d+)-slim", dict(steps())["FROM"]).groups()
    assert int(minor) >= 10


def test_the_image_has_the_whole_package_and_its_command_works(image, tmp_path):
    app, environ = image
    command = json.loads(dict(steps())["CMD"])
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environ | {"STREAMLOAD_CACHE_DIR": str(tmp_path / "cache"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"streamload {version('streamload')}" in " ".join(done.stdout.split())
    where = subprocess.run(
        ["python", "-c", "import streamload; print(streamload.__file__)"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    installed = Path(where.stdout.strip()).parent
    assert str(installed).startswith(str(app.parent / "venv"))
    expected = {
        path.relative_to(ROOT / "streamload")
        for path in (ROOT / "streamload").rglob("*.py*")
        if path.suffix != ".pyc"
    }
    assert expected <= {path.relative_to(installed) for path in installed.rglob("*")}


def test_compose_names_what_exists():
    services = COMPOSE["services"]
    for service in services.values():
        if "build" in service:
            context = (ROOT / "docker" / service["build"]["context"]).resolve()
            assert context == ROOT
            assert (context / service["build"]["dockerfile"]).samefile(DOCKERFILE)
            if service["command"][0] != "streamload":
                assert service["command"][0] == "python"
                assert f"docker/{service['command'][1]}" in dict(copies())
        for volume in service.get("volumes", ()):
            name, _, target = volume.partition(":")
            if name.startswith("."):
                assert (ROOT / "docker" / name).is_file()
                continue
            assert name in COMPOSE["volumes"]
            assert target == dict(steps())["VOLUME"]
        assert set(service.get("depends_on", ())) <= set(services)
    assert services["store"]["image"] == f"motoserver/moto:{PINNED['moto']}"
    assert services["train"]["environment"]["AWS_ENDPOINT_URL"].startswith("http://store:")


def test_prometheus_asks_each_daemon_where_it_listens():
    (job,) = yaml.safe_load((ROOT / "docker" / "prometheus.yml").read_text())["scrape_configs"]
    (asked,) = job["static_configs"]
    daemons = {name: service for name, service in COMPOSE["services"].items() if name.startswith("daemon")}
    assert len(daemons) == 2
    expected = []
    for name, service in daemons.items():
        listen = service["command"][service["command"].index("--listen") + 1]
        expected.append(f"{name}:{listen.rpartition(':')[2]}")
    assert asked["targets"] == expected


def test_the_services_commands_fill_a_store_and_train_from_it_with_daemons_beside(image, tmp_path):
    app, environ = image
    services = COMPOSE["services"]
    store = ThreadedMotoServer(port=0, verbose=False)
    store.start()
    daemons = []
    try:
        host, port = store.get_host_and_port()
        endpoint = f"http://{host}:{port}"

        def environment(name):
            own = {"AWS_ENDPOINT_URL": endpoint, "STREAMLOAD_CACHE_DIR": str(tmp_path / name)}
            return environ | services[name]["environment"] | own

        def run(name, *more):
            command = [*services[name]["command"], *more]
            done = subprocess.run(
                command, cwd=app, env=environment(name), capture_output=True, text=True, timeout=170
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        assert "96 samples in 4 shards at s3://shards" in run(
            "shards", "--samples", "96", "--samples-per-shard", "24"
        )
        for name in ("daemon-1", "daemon-2"):
            *command, listen = services[name]["command"]
            command += [listen.replace("0.0.0.0", "127.0.0.1").rpartition(":")[0] + ":0"]
            daemons.append(subprocess.Popen(command, cwd=app, env=environment(name)))
        printed = run("train", "--batch-size", "16")
        assert len(re.findall(r"loss [\d.]+", printed)) == 2
        second = re.findall(r"origin +([\d,]+) requests", printed)[1]
        assert int(second) == 0

        files = s3fs.S3FileSystem(
            key="anything", secret="anything", endpoint_url=endpoint, skip_instance_cache=True
        )
        near = services["train"]["environment"]["STREAMLOAD_SHARED_CACHE"]

        def held():
            files.invalidate_cache()
            return [path for path in files.find(near) if path.endswith("/index")]

        until(lambda: time.sleep(0.2) or len(held()) == 4)
        for daemon in daemons:
            assert daemon.poll() is None
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(60) == 0
        assert not [path for path in files.find(near) if "/leases/" in path]
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()
        store.stop()
