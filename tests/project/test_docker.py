"""The image and the compose file without an engine: the Dockerfile's steps in a fresh directory, then the
services' commands with a real S3 server.
"""

import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib.metadata import requires, version
from pathlib import Path

import pytest
import s3fs
import yaml
from moto.server import ThreadedMotoServer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.tiers import until

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
COMPOSE = yaml.load((ROOT / "docker" / "compose.yaml").read_text(), yaml.CSafeLoader)
REQUIREMENTS = [ROOT / "docker" / name for name in ("requirements.txt", "requirements-torch.txt")]
PIN = re.compile(r"^([\w.-]+)==([\w.]+)", re.MULTILINE)
PINNED = dict(PIN.findall((ROOT / "constraints.txt").read_text()))
SYSTEM_COMMANDS = {"apt-get", "rm", "useradd", "install", "python"}
COMPILERS = {"gcc", "g++", "clang", "build-essential", "libc6-dev", "make"}
NOBODY = 65534


def stages():
    """Of each stage its (instruction, rest) lines, FROM first; comments left out, continued lines joined."""
    text = re.sub(r"\\\n", " ", DOCKERFILE.read_text())
    found = [[]]
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            if line.startswith("FROM "):
                found.append([])
            found[-1].append(tuple(line.split(" ", 1)))
    return found


(HEAD, BUILD, LAST) = stages()


def copies(stage):
    """(source, target) of each COPY out of the repository."""
    for instruction, rest in stage:
        if instruction == "COPY" and not rest.startswith("--from"):
            *sources, target = rest.split()
            yield from ((source, target) for source in sources)


def run_steps(*stages):
    return [rest for stage in stages for instruction, rest in stage if instruction == "RUN"]


def as_nobody(command):
    """A command as a user who isn't root runs it; as whoever runs the tests, where that isn't root.

    It may still read what others may not: the Python of these tests can be in root's home.
    """
    if os.getuid():
        return command
    who = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    return ["setpriv", *who, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search", *command]


def own_folder(path):
    """A folder as `install -d -o 1000 -m 0700` makes the image's cache."""
    path.mkdir(mode=0o700)
    if not os.getuid():
        os.chown(path, NOBODY, NOBODY)
    return path


@pytest.fixture
def place():
    """A folder that other users reach, too."""
    with tempfile.TemporaryDirectory(prefix="streamload-docker-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(scope="module")
def image():
    """A directory as the image's WORKDIR is after all steps, and the environment that they installed into.

    The environment sees the libraries of this one, behind its own, so that only streamload is installed anew.
    """
    with tempfile.TemporaryDirectory(prefix="streamload-image-") as folder:
        root = Path(folder)
        root.chmod(0o755)
        yield replay(root)


def replay(root):
    build, app, environment = root / "build", root / "app", root / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=120)
    own = environment / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (own / "parent.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    pip = environment / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec {environment}/bin/python -m pip "$@"\n')
    pip.chmod(0o755)
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environ |= {
        "PATH": f"{environment}/bin:{os.environ['PATH']}",
        "PIP_FORCE_REINSTALL": "",
        "HOME": str(own_folder(root / "home")),
    }
    for stage, directory in ((BUILD, build), (LAST, app)):
        directory.mkdir()
        for source, target in copies(stage):
            copy(ROOT / source, directory / target if target != "./" else directory / Path(source).name)
        for command in run_steps(stage):
            if command.startswith("pip ") and command.endswith(" ."):
                subprocess.run(
                    ["bash", "-ec", f"{command} --quiet"], cwd=directory, env=environ, check=True, timeout=170
                )
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
    sources = [source for stage in (BUILD, LAST) for source, _ in copies(stage)]
    assert sorted(sources) == sorted(kept)
    for source in sources:
        assert (ROOT / source).exists(), source


def test_each_step_is_a_command_that_the_replay_runs_or_that_only_changes_the_system():
    for command in run_steps(BUILD, LAST):
        assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0
        if not command.startswith("pip "):
            assert {part.split()[0] for part in command.split("&&")} <= SYSTEM_COMMANDS, command


def test_the_image_runs_as_a_user_who_owns_the_cache():
    instructions = dict(LAST)
    user = instructions["USER"]
    assert int(user) > 0  # by its number: a kubelet that is asked for runAsNonRoot needs it
    made = next(command for command in run_steps(LAST) if "useradd" in command)
    assert f"--uid {user} " in made
    assert f"-o {user}" in made
    assert instructions["VOLUME"] in made.split()
    assert LAST.index(("ENV", f"STREAMLOAD_CACHE_DIR={instructions['VOLUME']}"))


def test_the_image_has_no_compiler_and_what_was_built_is_where_its_command_is_found():
    installed = set(re.findall(r"[\w.+-]+", " ".join(run_steps(LAST))))
    assert not installed & COMPILERS
    assert set(" ".join(run_steps(BUILD)).split()) & COMPILERS
    assert [rest for instruction, rest in LAST if instruction == "COPY" and "--from" in rest] == [
        "--from=build /opt/streamload /opt/streamload"
    ]
    assert "python -m venv /opt/streamload" in run_steps(BUILD)
    for stage in (BUILD, LAST):
        assert ("ENV", "PATH=/opt/streamload/bin:$PATH") in stage


def test_images_can_be_named_by_digest_and_the_python_is_one_that_the_package_supports():
    ((instruction, default),) = HEAD
    assert instruction == "ARG"
    assert [stage[0][1].split()[0] for stage in (BUILD, LAST)] == ["${PYTHON_IMAGE}"] * 2
    minor = re.fullmatch(r"PYTHON_IMAGE=python:3\.(\d+)-slim", default)[1]
    assert int(minor) >= 10
    hashes = runpy.run_path(str(ROOT / ".ci" / "hashes.py"))
    assert hashes["PYTHON"] == f"3.{minor}"
    arguments = COMPOSE["x-streamload"]["build"]["args"]
    assert arguments == {name: f"${{{name}:-{value}}}" for name, value in build_arguments().items()}
    for service in COMPOSE["services"].values():
        assert service["image"] == "streamload" or re.fullmatch(r"\$\{[A-Z]+_IMAGE:-.+\}", service["image"])


def build_arguments():
    """The ARGs with their defaults."""
    found = [rest.split("=", 1) for stage in stages() for instruction, rest in stage if instruction == "ARG"]
    return {name: shlex.split(value)[0] for name, value in found}


def test_all_that_pip_installs_is_held_to_a_hash_and_nothing_comes_with_it():
    installs = [command for command in run_steps(BUILD, LAST) if "pip" in command.split()]
    assert len(installs) == 3
    for command in installs:
        command = command.replace("${TORCH}", build_arguments()["TORCH"])
        assert "--no-deps" in command.split()
        assert "--require-hashes" in command.split() or command.split()[-2:] == ["--no-build-isolation", "."]
    for path in REQUIREMENTS:
        for requirement in re.split(r"\n(?=\S)", path.read_text().partition("\n")[2].strip()):
            _, *hashes = requirement.split(" --hash=")
            assert PIN.match(requirement), requirement
            assert hashes, requirement
            assert all(re.fullmatch(r"sha256:[0-9a-f]{64}[\s\\]*", one) for one in hashes), requirement


def test_the_images_requirements_are_the_pinned_ones_and_lack_nothing():
    found = {
        canonicalize_name(name): version
        for path in REQUIREMENTS
        for name, version in PIN.findall(path.read_text())
    }
    pinned = {canonicalize_name(name): version for name, version in PINNED.items()}
    assert {name: pinned[name] for name in found if name in pinned} == {
        name: version for name, version in found.items() if name in pinned
    }
    of_torch = {canonicalize_name(name) for name, _ in PIN.findall(REQUIREMENTS[1].read_text())}
    assert "torch" in of_torch
    assert found.keys() - pinned.keys() <= of_torch
    environment = {"python_version": "3.13", "python_full_version": "3.13.0", "sys_platform": "linux"}
    todo, needed = [("streamload", ("demo", "s3"))], set()
    while todo:
        name, extras = todo.pop()
        for text in requires(name) or ():
            one = Requirement(text)
            marks = [environment | {"extra": extra} for extra in ("", *extras)]
            if one.marker is None or any(one.marker.evaluate(mark) for mark in marks):
                if canonicalize_name(one.name) not in needed:
                    todo.append((one.name, one.extras))
                needed.add(canonicalize_name(one.name))
    assert needed <= found.keys() | {"streamload"}
    assert "setuptools" in found  # which builds streamload, without isolation


@pytest.mark.deep
def test_the_image_has_the_whole_package_and_its_command_works(image, place):
    app, environ = image
    command = json.loads(dict(LAST)["CMD"])
    done = subprocess.run(
        as_nobody(command),
        cwd=place,
        env=environ | {"STREAMLOAD_CACHE_DIR": str(own_folder(place / "cache")), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"streamload {version('streamload')}" in " ".join(done.stdout.split())
    where = subprocess.run(
        as_nobody(["python", "-c", "import streamload; print(streamload.__file__)"]),
        cwd=place,
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
                assert f"docker/{service['command'][1]}" in dict(copies(LAST))
        for volume in service.get("volumes", ()):
            name, _, target = volume.partition(":")
            if name.startswith("."):
                assert (ROOT / "docker" / name).is_file()
                continue
            assert name in COMPOSE["volumes"]
            assert target == dict(LAST)["VOLUME"]
        assert set(service.get("depends_on", ())) <= set(services)
    assert services["store"]["image"] == f"${{STORE_IMAGE:-motoserver/moto:{PINNED['moto']}}}"
    assert services["train"]["environment"]["AWS_ENDPOINT_URL"].startswith("http://store:")


def test_the_command_in_compose_starts_all_that_its_comment_names():
    head = (ROOT / "docker" / "compose.yaml").read_text().partition("name:")[0]
    (named,) = re.findall(r"compose\.yaml up .* (\w[\w-]*)\n", head)
    started, todo = set(), [named]
    while todo:
        name = todo.pop()
        started.add(name)
        todo += COMPOSE["services"][name].get("depends_on", ())
    assert started == set(COMPOSE["services"])


def test_prometheus_asks_the_trainer_and_each_daemon_where_they_listen():
    (job,) = config("prometheus.yml")["scrape_configs"]
    (asked,) = job["static_configs"]
    expected = []
    for name, service in COMPOSE["services"].items():
        command = service.get("command", [])
        listen = command[command.index("--listen") + 1] if "--listen" in command else None
        listen = listen or service.get("environment", {}).get("STREAMLOAD_METRICS")
        if listen is not None:
            address, _, port = listen.rpartition(":")
            assert address == "0.0.0.0"  # from other containers
            expected.append(f"{name}:{port}")
    assert len(expected) == 3
    assert sorted(asked["targets"]) == sorted(expected)


def config(name):
    return yaml.safe_load((ROOT / "docker" / name).read_text())


def mounts(service):
    """What is mounted where in a service, but volumes of compose's own."""
    volumes = [volume.split(":") for volume in COMPOSE["services"][service].get("volumes", ())]
    return {target: source for source, target, *_ in volumes if source.startswith(".")}


def test_alerts_go_from_prometheus_to_alertmanager_and_series_to_grafana():
    mounted = {name: mounts(name) for name in ("prometheus", "alertmanager", "grafana")}
    rules = {f"/etc/prometheus/{name}" for name in config("prometheus.yml")["rule_files"]}
    assert rules == mounted["prometheus"].keys() - {"/etc/prometheus/prometheus.yml"}
    (managers,) = config("prometheus.yml")["alerting"]["alertmanagers"]
    assert managers["static_configs"] == [{"targets": ["alertmanager:9093"]}]
    (source,) = config("grafana/datasource.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = config("grafana/boards.yml")["providers"]
    folder = provider["options"]["path"]
    (board,) = (target for target in mounted["grafana"] if target.startswith(f"{folder}/"))
    assert COMPOSE["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == board
    receivers = {receiver["name"] for receiver in config("alertmanager.yml")["receivers"]}
    assert config("alertmanager.yml")["route"]["receiver"] in receivers


def test_files_that_are_mounted_can_be_read_and_volumes_written_by_the_images_own_user():
    for name, service in COMPOSE["services"].items():
        for source in mounts(name).values():
            assert (ROOT / "docker" / source).stat().st_mode & 0o044 == 0o044
        for volume in service.get("volumes", ()):
            source, target, *flags = volume.split(":")
            if source.startswith("."):
                assert flags == ["ro"]
            else:  # an empty named volume takes the owner and mode of the image's folder
                assert service["image"] == "streamload"
                assert target == dict(LAST)["VOLUME"]
                assert f"install -d -o {dict(LAST)['USER']}" in " ".join(run_steps(LAST))
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), (name, port)


def test_no_service_waits_for_one_that_waits_for_it_or_for_an_end_that_never_comes():
    services = COMPOSE["services"]
    started = []
    while len(started) < len(services):
        ready = [
            name
            for name, service in services.items()
            if name not in started and set(service.get("depends_on", ())) <= set(started)
        ]
        assert ready, f"a circle among {services.keys() - set(started)}"
        started += ready
    for service in services.values():
        for name, how in service.get("depends_on", {}).items():
            if how["condition"] == "service_completed_successfully":
                assert services[name]["command"][0] == "python"  # it ends by itself
            if how["condition"] == "service_healthy":
                assert "healthcheck" in services[name]


@pytest.mark.deep
def test_the_services_commands_fill_a_store_and_train_from_it_with_daemons_beside(image, place):
    app, environ = image
    services = COMPOSE["services"]
    store = ThreadedMotoServer(port=0, verbose=False)
    store.start()
    daemons = []
    try:
        host, port = store.get_host_and_port()
        endpoint = f"http://{host}:{port}"

        def environment(name):
            cache = place / name if (place / name).exists() else own_folder(place / name)
            own = {"AWS_ENDPOINT_URL": endpoint, "STREAMLOAD_CACHE_DIR": str(cache)}
            if "STREAMLOAD_METRICS" in services[name]["environment"]:
                own["STREAMLOAD_METRICS"] = "127.0.0.1:0"
            return environ | services[name]["environment"] | own

        def run(name, *more):
            command = [*services[name]["command"], *more]
            done = subprocess.run(
                as_nobody(command),
                cwd=app,
                env=environment(name),
                capture_output=True,
                text=True,
                timeout=170,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        assert "96 samples in 4 shards at s3://shards" in run(
            "shards", "--samples", "96", "--samples-per-shard", "24"
        )
        for name in ("daemon-1", "daemon-2"):
            *command, listen = services[name]["command"]
            command += [listen.replace("0.0.0.0", "127.0.0.1").rpartition(":")[0] + ":0"]
            daemons.append(subprocess.Popen(as_nobody(command), cwd=app, env=environment(name)))
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
