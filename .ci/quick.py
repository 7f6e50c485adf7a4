"""The tests of `make quick`, one file a line: those of a room, or those of what changed since a commit.

Usage: python .ci/quick.py BASE [ROOM]

A changed test counts, and each test file that imports a changed module or helper by its name. Most trainings
as a whole (tests/loader/) import make_loader alone, and are left to `make test`.
"""

import re
import subprocess
import sys
from pathlib import Path

TESTS = sorted(path for path in Path("tests").glob("*/test_*.py") if "openclip" not in str(path))


def main() -> None:
    """Print the test files."""
    base, room = (*sys.argv[1:], "")[:2]
    found = of_room(room) if room else of_changes(changed(base))
    print(*found, sep="\n")


def of_room(room: str) -> list[Path]:
    """The test files of a room: those of its folder."""
    files = [path for path in TESTS if path.parent.name == room]
    if not files:
        rooms = sorted({path.parent.name for path in TESTS})
        raise SystemExit(f"no tests of {room!r}; rooms are: {', '.join(rooms)}")
    return files


def changed(base: str) -> list[str]:
    """Paths that differ from where the branch left `base`, and those that git doesn't know yet."""
    since = _git("merge-base", base, "HEAD")[0]
    return _git("diff", "--name-only", since) + _git("ls-files", "--others", "--exclude-standard")


def of_changes(paths: list[str]) -> list[Path]:
    """The test files among changed paths, and those that import a changed module or helper."""
    modules = [
        Path(path).with_suffix("").parts for path in paths if path.startswith(("streamload/", "tests/"))
    ]
    imports = [_import_of(".".join(parts[:-1]), parts[-1]) for parts in modules]
    return [
        test for test in TESTS if str(test) in paths or any(one.search(test.read_text()) for one in imports)
    ]


def _import_of(package: str, name: str) -> re.Pattern[str]:
    dotted = re.escape(f"{package}.{name}")
    return re.compile(rf"\b{dotted}\b|from {re.escape(package)} import .*\b{name}\b")


def _git(*command: str) -> list[str]:
    answer = subprocess.run(["git", *command], check=False, stdout=subprocess.PIPE, text=True)
    if answer.returncode:
        raise SystemExit(
            f"git {command[0]} fails here, as it says above, so what changed isn't known; "
            f"`make quick ROOM=cache` needs no git"
        )
    return answer.stdout.splitlines()


if __name__ == "__main__":
    main()
