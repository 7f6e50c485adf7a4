"""What cells that are planned over all ranks gain beside those that each rank packs from a buffer of its own.

Question: documents and mixtures for vision-language models differ a hundredfold in length. How full are the
cells, and how long do all ranks wait for the slowest?

Command: python -m benchmarks.packing

Computed from drawn lengths; only the planning is timed. 64 ranks with one cell each. A cell takes its tokens
+ tokens² ÷ 60,000 of each sample (attention) + 0.0875 for each patch of the vision tower. A step takes as
long as its slowest rank. "useful" is the tokens that are trained on in that time, first fit = 1.

- "streamload": blocks of 16 steps (batching/packing.py), by tokens, patches and what a sample takes.
- "first fit": grain's FirstFitPackIterDataset as torchtitan uses it: 8 open cells a rank, by tokens.
- "knapsacks": nanoVLM's rule: a buffer of 128 cells a rank, the longest first into the least filled of
  ⌈tokens ÷ budget⌉ + 5 cells, at most 18 images for each 8,192 tokens of a cell.
- "two budgets": Molmo 2's rule: of a buffer of 32 samples the subset that fills a cell best, by tokens and
  images, found by dynamic programming over tokens in steps of 256.

The other rules are written anew from their descriptions and sources of August 2026, for the same lengths.

Result: results/packing.json
"""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import turns
from benchmarks.turns import Row
from streamload.batching.packing import pack

RANKS, STEPS, QUICK_STEPS, BLOCK = 64, 48, 16, 16
OPEN_CELLS, BUFFERED_CELLS, SPARE_CELLS, MOST_IMAGES = 8, 128, 5, 18
BUFFERED_SAMPLES, TOKENS_OF_A_STEP, IMAGES_OF_A_CELL = 32, 256, 24
ATTENTION, PATCH = 60_000, 0.0875
Whole = npt.NDArray[np.int64]
Sample = tuple[int, int, int]
"""Tokens with those of images, patches, and images."""
Packer = Callable[[Iterator[Sample], int], Iterator[list[Sample]]]


def main() -> None:
    given = turns.arguments(__doc__, rounds=3, names=["computed"])
    steps = QUICK_STEPS if given.quick else STEPS
    rows: list[Row] = []
    for round_ in range(given.rounds):
        for kind, (lengths, *budgets) in KINDS.items():
            cells, seconds = planned(lengths, round_, steps, np.array(budgets))
            figures = {**measured(cells, budgets[0]), "planning_us": seconds * 1e6}
            rows.append({"label": f"{kind}; streamload", "round": round_, **figures})
            for name, packer in PEERS.items():
                figures = measured(by_rank(packer, lengths, round_, steps, budgets[0]), budgets[0])
                rows.append({"label": f"{kind}; {name}", "round": round_, **figures})
    turns.write(given, "packing", content(given, rows, steps))


def mixture(seed: int) -> Iterator[Sample]:
    """Texts alone, one image, two to eight: 12, 73 and 15 %."""
    drawn = random.Random(seed)
    while True:
        kind = drawn.random()
        images = 0 if kind < 0.12 else 1 if kind < 0.85 else drawn.randint(2, 8)
        image = sum(min(4096, max(64, int(drawn.lognormvariate(6.21, 0.8)))) for _ in range(images))
        tokens = image + max(4, int(drawn.lognormvariate(4.79, 1.1)))
        if tokens <= 8192:
            yield tokens, 4 * image, images


def documents(seed: int) -> Iterator[Sample]:
    """Heavy tails as in OBELICS: 815 tokens of text on average, 1 to 30 images of 64 to 1,024 tokens."""
    drawn = np.random.default_rng(seed)
    while True:
        images = min(30, int(drawn.geometric(0.4)))
        image = int(np.clip(drawn.lognormal(5.4, 0.6, images), 64, 1024).sum())
        tokens = image + max(8, int(drawn.lognormal(6.0, 1.2)))
        if tokens <= 16_384:
            yield tokens, 4 * image, images


KINDS: dict[str, tuple[Callable[[int], Iterator[Sample]], int, int]] = {
    "mixture": (mixture, 8192, 28_672),
    "documents": (documents, 16_384, 32_768),
}
"""Lengths, and the budgets of a cell: tokens and patches."""


def first_fit(samples: Iterator[Sample], budget: int) -> Iterator[list[Sample]]:
    open_: list[list[Sample]] = []
    for sample in samples:
        fitting = (cell for cell in open_ if tokens_of(cell) + sample[0] <= budget)
        if (cell := next(fitting, None)) is not None:
            cell.append(sample)
            continue
        if len(open_) == OPEN_CELLS:
            yield open_.pop(0)
        open_.append([sample])


def knapsacks(samples: Iterator[Sample], budget: int) -> Iterator[list[Sample]]:
    drawn = random.Random(0)
    while True:
        buffer: list[Sample] = []
        while tokens_of(buffer) < budget * BUFFERED_CELLS:
            buffer += itertools.islice(samples, 16)
        cells: list[list[Sample]] = [[] for _ in range(-(-tokens_of(buffer) // budget) + SPARE_CELLS)]
        loads, images = [0] * len(cells), [0] * len(cells)
        for sample in sorted(buffer, reverse=True):
            order = sorted(range(len(cells)), key=loads.__getitem__)
            place = next((p for p in order if loads[p] + sample[0] <= budget
                          and images[p] + sample[2] <= MOST_IMAGES * budget // 8192), None)  # fmt: skip
            if place is None:
                place = len(cells)
                cells, loads, images = [*cells, []], [*loads, 0], [*images, 0]
            cells[place].append(sample)
            loads[place] += sample[0]
            images[place] += sample[2]
        drawn.shuffle(cells)
        yield from filter(None, cells)


def two_budgets(samples: Iterator[Sample], budget: int) -> Iterator[list[Sample]]:
    buffer: list[Sample] = []
    while True:
        buffer += itertools.islice(samples, BUFFERED_SAMPLES - len(buffer))
        best: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {(0, 0): (0, ())}
        for place, (tokens, _, images) in enumerate(buffer):
            needed = -(-tokens // TOKENS_OF_A_STEP)
            for (used, held), (total, chosen) in list(best.items()):
                both = used + needed, held + images
                if both[0] * TOKENS_OF_A_STEP > budget or both[1] > max(
                    IMAGES_OF_A_CELL * budget // 8192, images
                ):
                    continue
                if best.get(both, (-1,))[0] < total + tokens:
                    best[both] = total + tokens, (*chosen, place)
        places = set(max(best.values())[1])
        yield [buffer[place] for place in sorted(places)]
        buffer = [sample for place, sample in enumerate(buffer) if place not in places]


PEERS: dict[str, Packer] = {"first fit": first_fit, "knapsacks": knapsacks, "two budgets": two_budgets}


def by_rank(
    packer: Packer, lengths: Callable[[int], Iterator[Sample]], round_: int, steps: int, budget: int
) -> list[list[list[Sample]]]:
    """The cells of each step, where each rank packs its own samples."""
    ranks = [packer(lengths(1000 * round_ + rank), budget) for rank in range(RANKS)]
    return [[next(rank) for rank in ranks] for _ in range(steps)]


def planned(lengths: Callable[[int], Iterator[Sample]], round_: int, steps: int, budgets: Whole
            ) -> tuple[list[list[list[Sample]]], float]:  # fmt: skip
    """The same by blocks of steps that are planned for all ranks, and seconds of CPU a sample."""
    stream, cells, seconds, known = lengths(1000 * round_), [], 0.0, list[Sample]()
    for block in range(steps // BLOCK):
        while tokens_of(known) < 1.05 * BLOCK * RANKS * budgets[0]:
            known += itertools.islice(stream, 4096)
        costs = np.array(known)[:, :2]
        costs = costs[(costs <= budgets).all(axis=1)]  # the peers have no budget of patches: none exceeds it
        began = time.process_time()
        packed = pack(costs, taken(costs), BLOCK, RANKS, budgets, block, is_end=False)
        seconds += time.process_time() - began
        fits = [sample for sample in known if sample[1] <= budgets[1]]
        of_block: list[list[Sample]] = [[] for _ in range(BLOCK * RANKS)]
        for sample, cell in zip(fits, packed.cell.tolist(), strict=False):
            of_block[cell].append(sample)
        cells += [of_block[begin : begin + RANKS] for begin in range(0, len(of_block), RANKS)]
        known = fits[packed.taken :]
    return cells, seconds / sum(len(cell) for step in cells for cell in step)


def tokens_of(samples: list[Sample]) -> int:
    return sum(tokens for tokens, *_ in samples)


def taken(costs: Whole) -> npt.NDArray[np.float64]:
    """What samples take."""
    times: npt.NDArray[np.float64] = costs[:, 0] * (1 + costs[:, 0] / ATTENTION) + PATCH * costs[:, 1]
    return times


def measured(cells: list[list[list[Sample]]], budget: int) -> Row:
    """How full cells are, the slowest rank ÷ the mean, and tokens a unit of the slowest ranks' time."""
    takes = np.array([[taken(np.array(cell)[:, :2]).sum() for cell in step] for step in cells])
    tokens = np.array([[tokens_of(cell) for cell in step] for step in cells])
    return {
        "filled": float(tokens.mean() / budget),
        "slowest": float(takes.max(axis=1).sum() / takes.mean(axis=1).sum()),
        "useful": float(tokens.sum() / takes.max(axis=1).sum() / RANKS),
    }


def content(given: Any, rows: list[Row], steps: int) -> Row:
    medians = turns.medians(rows)
    ratios = {
        label: turns.ratio(medians, "useful", label, f"{label.partition('; ')[0]}; first fit")
        for label in medians
    }
    return {
        "settings": {"ranks": RANKS, "steps": steps, "steps of a block": BLOCK},
        "seeds": list(range(given.rounds)),
        "rounds": rows,
        "medians": medians,
        "ratios": {"useful, × first fit": ratios},
        "targets": [
            turns.target(f"{kind}: {claim}", medians[f"{kind}; streamload"][metric], at_most=most)
            for claim, metric, most in (
                ("slowest rank ÷ mean", "slowest", 1.02), ("planning, µs a sample", "planning_us", 3),
            )
            for kind in KINDS
        ],
    }  # fmt: skip


if __name__ == "__main__":
    main()
