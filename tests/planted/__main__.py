"""Plant bugs by hand: each must be found by its test, which passes without it.

Usage:
    python -m tests.planted [NAME …] [--jobs 2]          these, or all of them
    python -m tests.planted NAME … --find TESTS …        look for the test that finds one, and record it
"""

from __future__ import annotations

import argparse
import re
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.planted.overlay import Overlay
from tests.planted.table import PLANTS, Plant, read_plants


def main() -> int:
    """Run the plants that are named; the number of those that weren't found."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--find", nargs="+", default=[], metavar="TESTS")
    arguments = parser.parse_args()
    plants = [plant for plant in read_plants() if not arguments.names or plant.name in arguments.names]
    if unknown := set(arguments.names) - {plant.name for plant in plants}:
        parser.error(f"there is no plant {', '.join(sorted(unknown))}")
    work = Work(arguments.find)
    with ThreadPoolExecutor(arguments.jobs, initializer=work.open) as pool:
        missed = [
            plant for plant, is_found in zip(plants, pool.map(work.on, plants), strict=True) if not is_found
        ]
    work.close()
    print(f"{len(plants) - len(missed)} of {len(plants)} plants are found")
    return bool(missed)


class Work:
    """What each thread does, on a copy of the project of its own."""

    def __init__(self, find: Sequence[str]):
        self._find = find
        self._own = threading.local()
        self._overlays: list[Overlay] = []
        self._sound: set[str] = set()  # tests that pass without a bug
        self._recording = threading.Lock()

    def open(self) -> None:
        """Make the copy of a thread."""
        self._own.overlay = Overlay()
        self._overlays.append(self._own.overlay)

    def close(self) -> None:
        """Remove all copies."""
        for overlay in self._overlays:
            overlay.close()

    def on(self, plant: Plant) -> bool:
        """Plant one bug; whether it is found, or can't be."""
        if plant.same and not self._find:
            print(f"{plant.name}: the same ({plant.same})", flush=True)
            return True
        overlay: Overlay = self._own.overlay
        options = [] if plant.is_deep else ["-m", "not deep"]
        test = overlay.kills(plant, self._find or [plant.test], *options) if self._find or plant.test else ""
        if test and test not in self._sound:
            if overlay.run([test])["status"]:
                print(f"{plant.name}: {test} fails without the bug, too", flush=True)
                return False
            self._sound.add(test)
        if test and self._find:
            with self._recording:
                record(plant.name, test)
        print(f"{plant.name}: {test or 'not found: ' + plant.harm}", flush=True)
        return bool(test)


def record(name: str, test: str) -> None:
    """Write the test that finds a plant into the table."""
    for path in PLANTS.glob("*.yaml"):
        text = path.read_text()
        block = re.search(rf"^- name: {re.escape(name)}\n(?:  .*\n)+", text, re.MULTILINE)
        if block is not None:
            lines = [line for line in block[0].splitlines() if not line.startswith("  test: ")]
            fresh = "\n".join([*lines, f"  test: {quoted(test)}"]) + "\n"
            path.write_text(text[: block.start()] + fresh + text[block.end() :])
            return
    raise LookupError(name)


def quoted(text: str) -> str:
    """A string for YAML: in quotes where it needs them."""
    return text if re.fullmatch(r"[\w./:-]+", text) else "'" + text.replace("'", "''") + "'"


if __name__ == "__main__":
    sys.exit(main())
