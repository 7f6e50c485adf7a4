"""How well the samples of an epoch are mixed: measures of the order in which they come, whoever made it.

An order is an `Epoch`: which sample stands at which place of which global batch. Nothing here knows how it
came about, so every loader, and a full permutation, is measured alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_STEPS = 8
_FEW_SAMPLES = 2
_DIGITS = 5


@dataclass(frozen=True)
class Epoch:
    """The global batches of an epoch.

    Attributes:
        shards: int[steps, batch], the shard of each sample; in a batch the ranks' parts follow each other.
        samples: int[steps, batch], its number in the shard.
    """

    shards: NDArray[np.int64]
    samples: NDArray[np.int64]


def measures(first: Epoch, later: Epoch, sizes: Sequence[int], ranks: int) -> dict[str, float]:
    """All measures of a run: of a later epoch, except where one says otherwise.

    Args:
        first: the first epoch of the run.
        later: the one after it.
        sizes: the samples of each shard.
        ranks: which part of a global batch is a rank's.

    Returns:
        pairs, worst_pairs: of the pairs of two samples in a global batch, the share of those of one shard: in
            the mean, and in the worst batch of both epochs.
        rank_pairs, worst_rank_pairs: the same within the batch of a rank.
        first_epoch_pairs, first_epoch_rank_pairs: `pairs` and `rank_pairs` of the first epoch.
        first_pairs: `pairs` of the very first batch.
        shards_in_1, shards_in_8: how many shards the samples of a global batch, and of 8 in a row (or of all
            batches, if they are fewer), come from.
        rank_shards_in_1: the same of a rank's batch.
        gap: between the numbers of two samples of one shard that come one after the other, the median.
        span: from the first to the last sample of a shard, as a share of the epoch; the median of the shards.
        spread: the standard deviation of a shard's samples over the epoch × √12, the median of the shards:
            1 if they are spread evenly over all of it, x if evenly over a share x of it.
        again: pairs of samples that share a global batch in both epochs, × what chance would make of them.
        place_correlation, first_epoch_place_correlation: of a sample's place in its shard with that in the
            epoch: 1 if samples come as they lie in shards that are read side by side.
        unseen, doubled: samples that the later epoch never gave, and gave once more than needed, of all.
    """
    count = len(sizes)
    counts, first_counts = shards_in_batches(later.shards, count), shards_in_batches(first.shards, count)
    by_rank, first_by_rank = (
        shards_in_batches(epoch.shards.reshape(epoch.shards.shape[0] * ranks, -1), count)
        for epoch in (later, first)
    )
    pairs, first_pairs = _pair_share(counts), _pair_share(first_counts)
    rank_pairs, first_rank_pairs = _pair_share(by_rank), _pair_share(first_by_rank)
    steps = min(_STEPS, len(counts))
    in_8 = counts[: len(counts) // steps * steps].reshape(-1, steps, count).any(axis=1)
    gap, span, spread = _within_shards(later, count)
    offsets = np.cumsum([0, *sizes])[:-1]
    numbers, first_numbers = (offsets[epoch.shards] + epoch.samples for epoch in (later, first))
    seen = np.unique(numbers).size
    found = {
        "pairs": pairs.mean(),
        "worst_pairs": max(pairs.max(), first_pairs.max()),
        "rank_pairs": rank_pairs.mean(),
        "worst_rank_pairs": max(rank_pairs.max(), first_rank_pairs.max()),
        "first_epoch_pairs": first_pairs.mean(),
        "first_epoch_rank_pairs": first_rank_pairs.mean(),
        "first_pairs": first_pairs[0],
        "shards_in_1": (counts > 0).sum(axis=1).mean(),
        "shards_in_8": in_8.sum(axis=1).mean(),
        "rank_shards_in_1": (by_rank > 0).sum(axis=1).mean(),
        "gap": gap,
        "span": span,
        "spread": spread,
        "again": together_again(first_numbers, numbers, sum(sizes)),
        "place_correlation": place_correlation(later, sizes),
        "first_epoch_place_correlation": place_correlation(first, sizes),
        "unseen": 1 - seen / sum(sizes),
        "doubled": (numbers.size - seen) / sum(sizes),
    }
    return {name: round(float(value), _DIGITS) for name, value in found.items()}


def place_correlation(epoch: Epoch, sizes: Sequence[int]) -> float:
    """Pearson's correlation of the places of samples in their shards with those in an epoch."""
    places = epoch.samples.ravel() / np.asarray(sizes)[epoch.shards.ravel()]
    return float(np.corrcoef(np.arange(places.size), places)[0, 1])


def together_again(one: NDArray[np.int64], other: NDArray[np.int64], count: int) -> float:
    """Pairs of samples in one batch in both epochs, × the number that two independent orders would have.

    Args:
        one: int[steps, batch], the samples of the batches of an epoch, each numbered below `count`.
        other: those of another epoch.
        count: how many samples there are; one that an epoch doesn't give is left out.
    """
    batches = []
    for epoch in (one, other):
        batch = np.full(count, -1, np.int64)
        batch[epoch] = np.arange(len(epoch))[:, None]
        batches.append(batch)
    in_both = (batches[0] >= 0) & (batches[1] >= 0)
    first, second = batches[0][in_both], batches[1][in_both]
    together = _pairs(np.unique(first * len(other) + second, return_counts=True)[1]).sum()
    chance = _pairs(np.bincount(first)).sum() * _pairs(np.bincount(second)).sum() / _pairs(first.size)
    return float(together / chance)


def shards_in_batches(shards: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Count the samples of each shard in each batch: int[batches, shards]."""
    batches = len(shards)
    places = np.arange(batches)[:, None] * count + shards
    return np.bincount(places.ravel(), minlength=batches * count).reshape(batches, count)


def _pair_share(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Of each batch, the share of its pairs that are of one shard."""
    share: NDArray[np.float64] = _pairs(counts).sum(axis=1) / _pairs(counts.sum(axis=1))
    return share


def _pairs(count: NDArray[np.int64] | int) -> NDArray[np.int64]:
    count = np.asarray(count, np.int64)
    return count * (count - 1) // 2


def _within_shards(epoch: Epoch, count: int) -> tuple[float, float, float]:
    """`gap`, `span` and `spread` of `measures`."""
    steps, batch = epoch.shards.shape
    order = np.argsort(epoch.shards.ravel(), kind="stable")
    shards, samples = epoch.shards.ravel()[order], epoch.samples.ravel()[order]
    same = shards[1:] == shards[:-1]
    gap = np.abs(np.diff(samples.astype(np.int64)))[same]
    when = (order // batch + 0.5) / steps
    starts = np.flatnonzero(np.concatenate([[True], ~same]))
    here = np.bincount(shards, minlength=count)
    here = here[here > 0]
    mean = np.add.reduceat(when, starts) / here
    deviation = np.sqrt(np.maximum(np.add.reduceat(when**2, starts) / here - mean**2, 0))
    span = np.maximum.reduceat(when, starts) - np.minimum.reduceat(when, starts)
    enough = here >= _FEW_SAMPLES
    return (
        float(np.median(gap)),
        float(np.median(span[enough])),
        float(np.median(np.sqrt(12) * deviation[enough])),
    )
