"""Every fault that a cache between an origin and a training meets, tried many times: what must hold, holds.

Question: when something goes wrong, is a sample ever lost, doubled or wrong; is anything left behind?

Command: make faults, or python -m tests.faults [--rows 1,3] [--count N] [--short]

Each row of docs/results/faults.md is a function that makes one attempt: shards from a seed, a fault, an
oracle that knows every sample. Letters say what must hold (oracle.py). An attempt passes if all letters of
its row do *and* the fault has happened, by the count of the server, of the kill, or of strace. Where
webdataset's `cache_dir` can do the same job, it meets the same faults, used as its documentation says
(peer.py).

Rows read with `readers.py`, which is what a worker of the loader does to get its bytes (claim, fill, follow,
read), without torch; rows about processes and policies use `make_loader` itself.

Result: benchmarks/results/faults.json; docs/results/faults.md has it as a table (benchmarks/reliability.py).
"""
