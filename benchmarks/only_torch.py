"""Only torch, imported, and children forked from that: what scale.py compares with.

Says on its standard output that all are there, and ends when its standard input does.
"""

import json
import os
import sys
import time

import torch  # noqa: F401


def main() -> None:
    children = []
    for _ in range(int(sys.argv[1])):
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
