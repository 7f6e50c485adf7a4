"""What it costs that each node plans its own blocks, and that all nodes go by the widest row of any.

Question: with `Batches(bucketing=16_384)` on several nodes, how much of what the ranks compute is useful,
beside one plan for all? What would it be if nodes took their cells in orders of their own?

Command: python -m benchmarks.bucket_groups

Computed, not timed, from the lengths of buckets.py: 8 ranks × 64 rows in 1 to 8 groups, each of which plans
its own share of the samples by the modules that ship (order/buckets.py). A step takes as long as its slowest
rank.

- "agreed": a row has room for the widest row in its place on any rank (batching/bounds.py): equal shapes.
- "like cells": all groups take the same cell of their block at a step, and ranks have their group's shapes.
- "cells of its own": each group takes its cells in an order of its own.

"useful" is the share of what the slowest ranks compute that isn't padding; "× one plan", × that of one group.

Result: results/bucket_groups.json
"""

from typing import Any

import numpy as np

from benchmarks import turns
from benchmarks.buckets import RANKS, ROWS, Costs, web
from benchmarks.turns import Row
from streamload.batching.cells import cells, dealt

SAMPLES, QUICK_SAMPLES, BLOCK, QUICK_BLOCK = 200_000, 20_000, 16_384, 2048
GROUPS = (1, 2, 4, 8)
WAYS = ("agreed", "like cells", "cells of its own")
AT_LEAST = 0.95


def main() -> None:
    given = turns.arguments(__doc__, rounds=3, names=["simulated"])
    samples, block = (QUICK_SAMPLES, QUICK_BLOCK) if given.quick else (SAMPLES, BLOCK)
    rows: list[Row] = []
    for round_ in range(given.rounds):
        both = web(samples, round_)
        for kind, costs in (("captions", both * (1, 0)), ("captions and images", both)):
            for groups in GROUPS:
                for way in WAYS:
                    padding, useful = measured(costs, groups, block, way)
                    label = f"{kind}; {groups} groups; {way}"
                    rows.append({"label": label, "round": round_, "padding": padding, "useful": useful})
    turns.write(given, "bucket_groups", content(given, rows, block))


def measured(costs: Costs, groups: int, block: int, way: str) -> tuple[float, float]:
    """The share of padding, and the useful share of what the slowest ranks compute."""
    ranks, steps = RANKS // groups, block // (RANKS * ROWS)
    size = ranks * ROWS * steps
    shares = [costs[group::groups] for group in range(groups)]
    done = slowest = useful = 0.0
    for begin in range(0, min(map(len, shares)) - size + 1, size):
        blocks = [share[begin : begin + size] for share in shares]
        turns_of = [begin + (group if way == WAYS[2] else 0) for group in range(groups)]
        plans = [cells(own, steps, key) for own, key in zip(blocks, turns_of, strict=True)]
        for step in range(steps):
            taken = [own[plan[step]] for own, plan in zip(blocks, plans, strict=True)]
            sizes = np.full(ranks, ROWS)
            room = np.stack([dealt(own, sizes, 0)[1] for own in taken for _ in range(ranks)])
            if way == WAYS[0]:
                room = np.broadcast_to(room.max(axis=0), room.shape)
            computed = room.max(axis=1).sum(axis=1) * ROWS
            done += float(computed.sum())
            slowest += float(computed.max()) * RANKS
            useful += float(sum(own.sum() for own in taken))
    return 1 - useful / done, useful / slowest


def content(given: Any, rows: list[Row], block: int) -> Row:
    medians = turns.medians(rows)
    ratios = {}
    for label in medians:
        kind, _, way = label.split("; ")
        ratios[label] = turns.ratio(medians, "useful", label, f"{kind}; 1 groups; {way}")
    return {
        "settings": {"ranks": RANKS, "rows": ROWS, "block": block},
        "seeds": list(range(given.rounds)),
        "rounds": rows,
        "medians": medians,
        "ratios": {"useful, × one plan": ratios},
        "targets": [
            turns.target(f"{kind}; 4 nodes that agree: useful, × one plan for all",
                         ratios[f"{kind}; 4 groups; agreed"], at_least=AT_LEAST)
            for kind in ("captions", "captions and images")
        ],
    }  # fmt: skip


if __name__ == "__main__":
    main()
