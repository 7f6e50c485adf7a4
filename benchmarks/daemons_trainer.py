"""One training of daemons.py: an epoch of photographs with a step of a fixed time, and what it waited for.

It says on its standard output that it is ready, begins when it is told to by a line of its input, and then
says how long that took, a digest of each batch, and what its loader counted.
"""

import json
import sys
import time

import xxhash

from benchmarks.contenders.job import versions
from benchmarks.contenders.workload import WordTokenizer
from tests.support import flat

COUNTED = (
    "origin_bytes",
    "shared_bytes",
    "shared_hits",
    "shared_misses",
    "shared_stored",
    "shared_errors",
    "shared_waits",
    "shared_wait_seconds",
    "bytes_wait_seconds",
)


def main() -> None:
    job = json.loads(sys.argv[1])
    digests = []
    with flat.make_loader(job["urls"], WordTokenizer(), **job["loader"]) as loader:
        print("ready", flush=True)
        sys.stdin.readline()
        began = time.monotonic()
        for images, texts in loader:
            digest = xxhash.xxh3_64(images.numpy())
            digest.update(texts.numpy())
            digests.append(digest.hexdigest())
            time.sleep(job["step_seconds"])
        seconds = time.monotonic() - began
        stats = loader.stats()
    counted = stats.as_dict()
    said = {
        "seconds": seconds,
        "waited_share": stats.data_wait_seconds / seconds,
        "first_batch_seconds": stats.seconds_to_first_batch,
        "images": stats.samples_yielded,
        "digests": digests,
        "versions": versions("streamload", "torch"),
        **{name: counted[name] for name in COUNTED},
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
