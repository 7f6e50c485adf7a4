"""Only torch, imported: what scale.py compares with.

Command: python -m benchmarks.only_torch CHILDREN [--loader]

Children forked from it do nothing; with --loader they are the workers of a DataLoader that has nothing to
give. Says on its standard output when all are there, and ends when its standard input does.
"""

import json
import os
import sys
import time
from collections.abc import Iterator

import torch  # noqa: F401
from torch.utils.data import DataLoader, IterableDataset


class Nothing(IterableDataset[None]):
    def __iter__(self) -> Iterator[None]:
        return iter(())


def main() -> None:
    count = int(sys.argv[1])
    if "--loader" in sys.argv:
        loader = DataLoader(Nothing(), batch_size=None, num_workers=count, persistent_workers=count > 0)
        list(loader)
        count = 0
    children = []
    for _ in range(count):
        child = os.fork()
        if not child:
            sys.stdin.read()
            os._exit(0)
        children.append(child)
    print(json.dumps(["ready", time.monotonic()]), flush=True)
    sys.stdin.read()
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
