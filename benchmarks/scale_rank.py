"""The rank that scale.py starts: makes a loader, iterates it for some batches, and waits to be let go.

Each line on its standard output is the name of a moment and when it was, in seconds of the monotonic clock;
the last is the versions.
"""

import json
import sys
import time
from typing import Any

import torch  # noqa: F401

from streamload import Workers
from tests.support import flat


def only_key(sample: dict[str, Any]) -> dict[str, Any]:
    """The least that a sample can become: nothing is decoded, so that there are no batches to speak of."""
    return {"key": sample["__key__"]}


def say(moment: str) -> None:
    print(json.dumps([moment, time.monotonic()]), flush=True)


def main() -> None:
    job = json.loads(sys.argv[1])
    say("torch")
    import streamload
    from benchmarks.contenders.job import versions

    streamload.make_loader  # noqa: B018  (imports what it needs)
    say("imported")
    print(json.dumps(["imported_cpu", time.process_time()]), flush=True)
    with flat.make_loader(job["urls"], workers=Workers(map_sample=only_key), **job["loader"]) as loader:
        say("made")
        batches = iter(loader)
        say("iterated")
        for number in range(job["batches"]):
            next(batches)
            if not number:
                say("first")
        say("read")
        sys.stdin.readline()
    print(json.dumps(["versions", versions("streamload", "torch", "numpy")]))


if __name__ == "__main__":
    main()
