"""streamload with batches of bytes in the training process, as a device gets them.

What ships gives bytes only where a GPU normalises them: what is made of samples is told so here, before the
workers are forked.
"""

import dataclasses

from benchmarks.contenders import streamload_
from benchmarks.contenders.workload import Job
from streamload.loader import recipe
from streamload.loader.options import LoaderOptions
from streamload.transforms.examples import Examples

_shipped = recipe._examples


def _as_bytes(options: LoaderOptions) -> Examples:
    return dataclasses.replace(_shipped(options), as_bytes=True)


def main() -> None:
    recipe._examples = _as_bytes
    streamload_.run(Job.from_argument(), multiprocessing_context="fork").print()


if __name__ == "__main__":
    main()
