"""Build, check and try what is published: `make release` runs this in .venv-release.

    release.py build [URL]          the sdist and the wheels of HEAD, into dist/
    release.py check                what is in them, by the tools of the trade and by our own rules
    release.py try VERSION...       install the wheel in clean environments of these versions of Python
    release.py tag TAG              does a tag name the version, and has the changelog its changes?

URL is that of the repository's files (readme.py). The C code is compiled by zig, which has the headers and
libraries of every glibc: so wheels for old systems and for another processor need no container.

`try` takes the newest and the oldest dependencies that the wheel allows, from where pip is configured to find
them. TORCH, a requirement with any options of pip, names another build of torch than the index's own.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import readme

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
MACHINES = {"x86_64": 62, "aarch64": 183}
"""Processors, and their numbers in ELF headers."""
GLIBC = (2, 17)
EXTENSIONS = ("_avx2", "_before")
OLDEST_UP_TO = (3, 12)
"""The oldest dependencies have wheels up to this Python."""


def run(*command: str | Path, **options: object) -> str:
    """Run a command to its good end, and return what it printed."""
    done = subprocess.run(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"{shlex.join(map(str, command))} failed:\n{done.stdout}")
    return done.stdout


def tag_of(machine: str) -> str:
    """The platform in the name of a processor's wheel."""
    return f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"


def build(url: str) -> None:
    """Build the sdist of HEAD, and all wheels from the sdist."""
    shutil.rmtree(DIST, ignore_errors=True)
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.mkdir()
        run("bash", "-o", "pipefail", "-c", 'git archive HEAD | tar x -C "$0"', source, cwd=ROOT)
        readme.rewrite(source, url)
        run(*command, "--sdist", source)
        (sdist,) = DIST.glob("*.tar.gz")
        for machine in MACHINES:
            unpacked = Path(folder) / machine
            unpacked.mkdir()
            run("tar", "xzf", sdist, "-C", unpacked, "--strip-components=1")
            target = f"{machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
            zig = f"{shlex.quote(sys.executable)} -m ziglang cc -target {target}"
            compiler = {"CC": zig, "LDSHARED": f"{zig} -shared", "CFLAGS": "-g0", "LDFLAGS": "-Wl,-s"}
            platform = f"-C--build-option=--plat-name={tag_of(machine)}"
            environ = os.environ | compiler | {
                "STREAMLOAD_REQUIRE_KERNEL": "1", "_PYTHON_HOST_PLATFORM": f"linux-{machine}"
            }  # fmt: skip
            run(*command, "--wheel", platform, unpacked, env=environ)
            print(f"built for {machine}", flush=True)


def check() -> None:
    """Check all of dist/."""
    for machine in MACHINES:
        (wheel,) = DIST.glob(f"*-{tag_of(machine)}.whl")
        for problem in problems(wheel, machine):
            sys.exit(f"{wheel.name}: {problem}")
        shown = " ".join(run(sys.executable, "-m", "auditwheel", "show", wheel).split())
        found = re.search(rf'platform tag: "manylinux_(\d+)_(\d+)_{machine}"', shown)
        if not found or tuple(map(int, found.groups())) > GLIBC:
            sys.exit(f"{wheel.name} isn't {tag_of(machine)}: {shown}")
        run(sys.executable, "-m", "abi3audit", "--strict", wheel)
        run(sys.executable, "-m", "check_wheel_contents", wheel)
        print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, {found[0]}")
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir())
    (sdist,) = DIST.glob("*.tar.gz")
    print(f"{sdist.name}: {sdist.stat().st_size:,} bytes")


def problems(wheel: Path, machine: str) -> Iterator[str]:
    """What is wrong with a wheel's files: no tool knows which extensions it must have."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for name in EXTENSIONS:
            path = f"streamload/transforms/{name}.abi3.so"
            if path not in names:
                yield f"{path} is missing"
                continue
            magic, number = struct.unpack("<4s14xH", archive.read(path)[:20].ljust(20, b"\0"))
            if magic != b"\x7fELF" or number != MACHINES[machine]:
                yield f"{path} isn't for {machine}: {magic!r}, machine {number}"
        if "streamload/py.typed" not in names:
            yield "py.typed is missing"
        yield from (f"{name} is for building alone" for name in names if name.endswith((".c", ".h")))


def try_out(versions: list[str]) -> None:
    """Install the wheel of this processor for each Python and run trial.py there; print each result."""
    (wheel,) = DIST.glob(f"*-{tag_of(os.uname().machine)}.whl")
    cells = {}
    for version in versions:
        python = interpreter(version)
        for choice in ("newest", "oldest"):
            if python is None:
                cells[version, choice] = f"not run: no python{version} on the path"
            elif choice == "oldest" and tuple(map(int, version.split("."))) > OLDEST_UP_TO:
                cells[version, choice] = "not run: the oldest numpy has no wheel for it"
            else:
                try:
                    cells[version, choice] = f"passed: {tried(wheel, python, choice)}"
                except SystemExit as exc:
                    cells[version, choice] = f"failed: {exc}"
            print(f"Python {version}, {choice}: {cells[version, choice]}", flush=True)
    if any(result.startswith("failed") for result in cells.values()):
        sys.exit("The wheel doesn't work everywhere")
    if not any(result.startswith("passed") for result in cells.values()):
        sys.exit("The wheel was tried in no environment")


def tried(wheel: Path, python: str, choice: str) -> str:
    """Try the wheel in an environment that exists only for that."""
    with tempfile.TemporaryDirectory(prefix="streamload-trial-") as folder:
        environ = {
            key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")
        }
        environ |= {"HOME": folder, "STREAMLOAD_CACHE_DIR": f"{folder}/cache"}
        run(python, "-m", "venv", f"{folder}/venv")
        inside = f"{folder}/venv/bin/python"
        pip = (inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        pins = Path(folder) / "constraints.txt"
        pins.write_text("\n".join(oldest(wheel)) if choice == "oldest" else "")
        if torch := shlex.split(os.environ.get("TORCH", "")):
            run(*pip, "--constraint", pins, *torch)
        run(*pip, "--constraint", pins, wheel)
        trial = shutil.copy(ROOT / ".ci" / "trial.py", folder)
        return run(inside, "-W", "error", trial, cwd=folder, env=environ).strip()


def oldest(wheel: Path) -> list[str]:
    """Pins of all dependencies to the oldest version that the wheel's metadata allows."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(path).decode())
    required = [entry for entry in metadata.get_all("Requires-Dist", []) if "extra ==" not in entry]
    return [entry.replace(">=", "==") for entry in required]


def interpreter(version: str) -> str | None:
    """The command of a Python on the path that runs: a shim of pyenv may be there and fail."""
    command = f"python{version}"
    works = shutil.which(command) and not subprocess.run([command, "-c", ""], capture_output=True).returncode
    return command if works else None


def tag(name: str) -> None:
    """Check a tag. As long as nothing was published the changelog may have all under [Unreleased]."""
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    sections = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if name != f"v{version}":
        sys.exit(f"The tag is {name}, but pyproject.toml has version {version}: expected v{version}")
    if version not in sections and sections != ["Unreleased"]:
        sys.exit(f"CHANGELOG.md has no section [{version}]: give [Unreleased] that name, and a date")
    print(f"{name} is version {version}")


if __name__ == "__main__":
    action, *rest = sys.argv[1:]
    match action:
        case "build":
            build(rest[0] if rest else "")
        case "check":
            check()
        case "try":
            try_out(rest)
        case "tag":
            tag(rest[0])
        case _:
            sys.exit(__doc__)
