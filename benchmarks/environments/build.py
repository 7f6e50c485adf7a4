"""Builds the peers' environments: .venv-peers/NAME from the pins of NAME.txt beside this file.

Command: python -m benchmarks.environments.build [NAME ...]

An environment is a child of the one that runs this: it sees all that it has, torch among it, behind what it
has itself, and adds only what it lacks or needs in another version. Its stamp, written last, says what it was
made from: a finished one isn't made again, an interrupted or outdated one is made from nothing.
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".venv-peers"
FOLDER = Path(__file__).parent
"""Where the pins stand."""
_STAMP = ".ready"
_FFMPEG = re.compile(r"(lib(?:av|sw)[a-z]+)-[0-9a-f]+(\.so\.\d+)\.[\d.]+")
"""A library of FFmpeg as a wheel has it: its name with a hash, and with its whole version."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default all: {', '.join(names())}")
    parser.add_argument("--into", type=Path, default=PEERS, help="default .venv-peers")
    given = parser.parse_args()
    if unknown := set(given.names) - set(names()):
        parser.error(f"no environment is called {', '.join(sorted(unknown))}; there are {', '.join(names())}")
    return build_all(given.names or names(), given.into)


def build_all(wanted: Sequence[str], into: Path) -> int:
    """Build what isn't there; 1 where one could not be built, which doesn't keep the others from it."""
    failed = 0
    for name in wanted:
        if is_ready(name, into):
            continue
        try:
            build(name, into)
        except subprocess.CalledProcessError as error:
            print(f"{name} could not be built: {_reason(error.stderr)}", file=sys.stderr, flush=True)
            failed = 1
    return failed


def names() -> list[str]:
    """The peers that have an environment."""
    return sorted(path.stem for path in FOLDER.glob("*.txt"))


def python_of(name: str, into: Path = PEERS) -> Path:
    """The interpreter of a peer."""
    return into / name / "bin/python"


def is_ready(name: str, into: Path = PEERS) -> bool:
    """Whether an environment is there, whole, made from the pins of now, and its parent there."""
    stamp = into / name / _STAMP
    if not stamp.is_file():
        return False
    pins, parent = stamp.read_text().splitlines()
    return pins == _pins(name) and Path(parent).is_dir()


def build(name: str, into: Path) -> None:
    """Make one from nothing.

    Raises:
        subprocess.CalledProcessError: with what pip said.
    """
    print(f"building {into / name}", file=sys.stderr, flush=True)
    shutil.rmtree(into / name, ignore_errors=True)
    _checked(sys.executable, "-m", "venv", "--without-pip", into / name)
    python = python_of(name, into)
    own = _checked(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    parent = sysconfig.get_path("purelib")
    Path(own, "parent.pth").write_text(f"import site; site.addsitedir({parent!r})\n")
    _checked(python, "-m", "pip", "install", "--quiet", "--requirement", _requirements(name))
    if name == "spdl":
        lend_ffmpeg(Path(own))
        _checked(python, "-c", "import av, spdl.io.utils; spdl.io.utils.get_ffmpeg_versions()")
    (into / name / _STAMP).write_text(f"{_pins(name)}\n{parent}\n")


def lend_ffmpeg(packages: Path) -> None:
    """Put FFmpeg's libraries where SPDL's look for them before they ask the system: beside themselves.

    SPDL brings none. PyAV's wheel does, under names with hashes; `import av` loads what they need in turn.
    """
    for library in (packages / "av.libs").iterdir():
        if found := _FFMPEG.fullmatch(library.name):
            (packages / "spdl" / "io" / "lib" / "".join(found.groups())).symlink_to(library)


def _requirements(name: str) -> Path:
    return FOLDER / f"{name}.txt"


def _pins(name: str) -> str:
    return hashlib.sha256(_requirements(name).read_bytes()).hexdigest()


def _checked(*command: str | Path) -> str:
    """What a command says; its errors go with the exception."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _reason(said: str) -> str:
    """pip's last error, which a hint may follow, or the end of a traceback."""
    lines = said.splitlines() or ["no reason was given"]
    return ([line for line in lines if line.startswith("ERROR")] or lines)[-1]


if __name__ == "__main__":
    sys.exit(main())
