"""Verdict on what limits a training now, and advice. Pure: figures in, a value and a sentence out."""

from __future__ import annotations

import math

from streamload.metrics.counters import format_bytes
from streamload.metrics.findings import Limit, Verdict
from streamload.observe.figures import Figures

LITTLE = 0.05
"""A training that waits less than this share of its time isn't limited by data."""
_FEWEST_SECONDS, _FEWEST_BATCHES = 1.0, 3
_MOST = 0.5
"""A cause has to explain this share of the wait, or of the workers' time that isn't spent on bytes."""
_BUSY = 0.4
"""Workers that are busy for less than this share of their time aren't why the training waits."""
_WORK = ("decode", "resize", "tokenize", "collate")

_IDLE_SECONDS = 1e-3
"""A loop that takes less time than this between two batches has no training step in it."""
ONLY_DATA = "data is the only work of this loop, which has no training step"

_NO_FASTER = "A faster loader wouldn't make the training faster"
CONSUMER = f"{_NO_FASTER}; fewer workers would be enough."
_FEWER = _NO_FASTER + "; {} of the {} workers would be enough (num_workers=)."
_BUSIEST = 0.8
"""Workers that are busy for a larger share of their time may be late now and then."""
ON_HOST = (
    "Batches are in host memory: if your step copies them to the device, give make_loader "
    'device="auto", which does it ahead of the step.'
)
_FILL = (
    "Fill the cache before the training: streamload warm URLS{}. It can be interrupted and continued, and "
    "needs no GPU."
)
FILL = _FILL.format("")
FASTER_DISK = (
    "Put the cache on a faster disk (STREAMLOAD_CACHE_DIR), or in memory where the data fits "
    "(STREAMLOAD_CACHE=memory)."
)
_LESS_SHUFFLE = "A smaller shuffle= lets samples go earlier."
_SMALLER = "Prepared shards (Images(prepare=…)) have a fraction of the bytes."
_LATER = "Later epochs read them prepared."
_FAILING = "See the log for the origin's errors; more connections make it worse."
_PICKLED = (
    "Return tensors, not lists or objects: they are passed on without a copy. Give tokenizer=, so that "
    "captions come as ids."
)
_COPY = "Give device= to make_loader, so that copies overlap with the steps; images then come as uint8."
_COMPILED = "A transform that is compiled costs less than one that runs as given."
_CHEAPER = {
    "decode": "Prepared images (Images(prepare=…)) are smaller, and decoded in a fraction of the time.",
    "resize": "Prepared images (Images(prepare=…)) are smaller, and cost less.",
    "tokenize": "A fast tokenizer, such as transformers' PreTrainedTokenizerFast, costs less.",
    "collate": "Return fewer or smaller values of each sample.",
}
_PREPARE_AHEAD = (
    "{:.0%} of the images weren't prepared: the log's first lines say why, and streamload warm URLS{} "
    "prepares them ahead."
)
_AUTO = "auto"
"""The choice of prepare= that names no recipe."""
_FUNCTION = "It runs once for each sample: do less in it, or leave images and captions to streamload."
_FEATURES = "Make them ahead: streamload features make."
_SEE_LOG = "See that rank's log, or `streamload top` on its node."
_NOTHING = "Look at stats() after some minutes, or run streamload bench."


def judge(figures: Figures) -> Verdict:
    """The verdict on these figures."""
    limit, evidence, advice = _decide(figures)
    if is_only_data(figures.seconds, figures.wait, figures.counted.batches_yielded):
        evidence = f"{ONLY_DATA}; {evidence}"
    gain, counted = _gain(figures.wait), figures.counted
    return Verdict(limit, figures.seconds, figures.wait, evidence, advice, gain, counted)


def _gain(wait: float) -> float:
    """The training's speed without this share of its time, in relation to that with it."""
    return 1.0 / (1.0 - wait) if wait < 1.0 else math.inf


def is_only_data(seconds: float, wait: float, batches: int) -> bool:
    """True if a loop spent next to no time outside `next`, given the share of its time that it waited."""
    is_waiting = wait >= LITTLE and batches >= _FEWEST_BATCHES
    return is_waiting and seconds * (1.0 - wait) < _IDLE_SECONDS * batches


def _decide(figures: Figures) -> tuple[Limit, str, str]:
    counted, is_stuck = figures.counted, figures.waiting_seconds >= _FEWEST_SECONDS
    if figures.seconds < _FEWEST_SECONDS or (counted.batches_yielded < _FEWEST_BATCHES and not is_stuck):
        few = "too few batches were taken to tell" if counted.batches_yielded else "no batch was taken yet"
        return "unclear", few, _NOTHING
    if figures.wait < LITTLE:
        return _not_waiting(figures)
    waited = counted.data_wait_seconds
    copied, received = counted.device_seconds, figures.rank_hand_over_seconds
    if copied >= _MOST * waited:
        return "device copy", f"{copied / waited:.0%} of that for batches on their way to the device", _COPY
    blocked, work = counted.blocked_wait_seconds / waited, _shares(figures)
    if counted.feature_compute_seconds >= _MOST * waited:
        share = min(1.0, counted.feature_compute_seconds / waited)
        return "features", f"{share:.0%} of that to compute features in this process", _FEATURES
    if received >= _MOST * waited:
        return (
            "hand-over",
            f"{received / waited:.0%} of that to receive batches in this process and give them their form",
            _PICKLED,
        )
    if blocked >= _MOST:
        return _bytes(figures)
    if blocked > 1 - _MOST - 0.2 or not work:
        return _unclear(figures)
    limit = max(work, key=lambda name: work[name])
    if work[limit] < _MOST * sum(work.values()) or sum(work.values()) < _BUSY:
        return _unclear(figures)
    return _of_workers(limit, work[limit], figures)


def _not_waiting(figures: Figures) -> tuple[Limit, str, str]:
    slowest = figures.slowest
    if slowest is not None and slowest.wait >= max(LITTLE, 2 * figures.wait):
        evidence = f"{slowest} waits {slowest.wait:.0%} of the time, and all ranks wait for it"
        return "another rank", evidence, _SEE_LOG
    computed_seconds = figures.counted.feature_compute_seconds
    if computed_seconds >= _MOST * figures.seconds:
        evidence = f"features were computed {computed_seconds / figures.seconds:.0%} of the time"
        return "training", evidence, _FEATURES
    advice = _fewer_workers(figures)
    return "training", "data is never late", f"{advice} {ON_HOST}" if figures.machine.is_on_host else advice


def _fewer_workers(figures: Figures) -> str:
    """Advice where data is never late: the workers that would do for the work that these did."""
    workers, work_share = figures.machine.workers, sum(_shares(figures).values())
    enough = max(1, math.ceil(workers * work_share / _BUSIEST))
    return _FEWER.format(enough, workers) if enough < workers else f"{_NO_FASTER}."


def _shares(figures: Figures) -> dict[Limit, float]:
    """The shares of the workers' time by what limits it, but bytes."""
    shares: dict[Limit, float] = {
        "disk": figures.share("read", "features"),
        "CPU": figures.share(*_WORK),
        "hand-over": max(0.0, figures.share("hand-over")),
    }
    return {limit: share for limit, share in shares.items() if share > 0}


def _bytes(figures: Figures) -> tuple[Limit, str, str]:
    """Workers lack bytes."""
    counted = figures.counted
    busy = f"workers waited {figures.share('bytes', 'shuffle'):.0%} of their time for bytes"
    if not figures.machine.workers:
        busy = f"{counted.blocked_wait_seconds / counted.data_wait_seconds:.0%} of that for bytes"
    busy += _slowest_shard(figures)
    if counted.shared_wait_seconds >= _MOST * counted.data_wait_seconds:
        waited = f"{counted.shared_wait_seconds:.0f} s"
        busy += f", fills waited {waited} for other nodes' fills, which the log names"
    if counted.shuffle_wait_seconds > counted.bytes_wait_seconds:
        evidence = f"the window of shuffle= holds back most samples that arrive ({busy})"
        fill = _FILL.format(_prepare_option(figures))
        return "shuffle", evidence, _LESS_SHUFFLE if figures.machine.is_local else f"{_LESS_SHUFFLE} {fill}"
    if figures.machine.is_local and figures.machine.prepare and counted.origin_bytes:
        option = _prepare_option(figures)
        ahead = f" streamload warm URLS{option} prepares them ahead." if option else ""
        return "CPU", f"local shards are prepared as they are read ({busy})", _LATER + ahead
    if figures.machine.is_local:
        return "disk", f"local shards are read too slowly ({busy})", FASTER_DISK
    failures = ""
    if counted.origin_retries or counted.origin_outages:
        failures = f", {counted.origin_retries:,} requests were retried"
    sender, arrived = "the origin", counted.origin_bytes
    if counted.shared_bytes > arrived:
        sender, arrived = "the shared cache", counted.shared_bytes
    rate = arrived / figures.seconds
    rates = "bytes don't arrive"
    if arrived:
        rates = f"{sender} gives {format_bytes(rate)}/s"
        if figures.wait < 0.99:
            rates += f" where {format_bytes(rate / (1 - figures.wait))}/s are needed"
        rates += ", and fills prepare them" if figures.machine.prepare else ""
    evidence = f"{rates} ({busy}{failures})"
    fill = _FILL.format(_prepare_option(figures)) + ("" if figures.machine.prepare else f" {_SMALLER}")
    is_failing = counted.origin_retries > 0.1 * max(1, counted.origin_requests)
    return "origin", evidence, _FAILING if is_failing else fill


def _slowest_shard(figures: Figures) -> str:
    """The shard that most of the wait was for, in a part of a sentence; "": there is none."""
    shard = max(figures.shard_waits, key=figures.shard_waits.__getitem__, default=None)
    if shard is None or figures.shard_waits[shard] < _MOST * figures.counted.data_wait_seconds:
        return ""
    share = min(1.0, figures.shard_waits[shard] / figures.counted.data_wait_seconds)
    return f", {share:.0%} of the wait was for {figures.machine.shard_name(shard)}"


def _prepare_option(figures: Figures) -> str:
    """Arguments with which `streamload warm` prepares as the training does."""
    prepare = figures.machine.prepare
    return f" --prepare {prepare}" if prepare not in ("", _AUTO) else ""


def _of_workers(limit: Limit, share: float, figures: Figures) -> tuple[Limit, str, str]:
    machine = figures.machine
    processes = f"the {machine.workers} workers" if machine.workers else "the training's process"
    time_of = "their time" if machine.workers else "the wait"
    if limit == "disk":
        return limit, f"{processes} spent {share:.0%} of {time_of} reading from the cache", FASTER_DISK
    if limit == "hand-over":
        return limit, f"{processes} spent {share:.0%} of {time_of} passing batches on", _PICKLED
    stages = {stage: figures.share(stage) for stage in _WORK}
    most = max(stages, key=lambda stage: stages[stage])
    function = machine.functions.get(most)
    on = f"on {most}" if function is None else f"in your {function}"
    evidence = f"{processes} spent {share:.0%} of {time_of} making batches, most of it {on}"
    more = ""
    if machine.workers < machine.cores - 1:
        enough = max(1, machine.workers) * _gain(figures.wait)
        would_do = f"{math.ceil(enough)} would do, " if enough < machine.cores else ""
        more = f"More workers: {would_do}{machine.cores} cores can be used (num_workers=). "
    return limit, evidence, (more + _cheaper(most, figures)).rstrip() or _NOTHING


def _cheaper(stage: str, figures: Figures) -> str:
    """Advice that makes a stage cheaper, other than what the training has already."""
    function = figures.machine.functions.get(stage)
    if function == "map_sample=":
        return _FUNCTION
    as_given = f"{_COMPILED} " if function == "preprocess=" else ""
    if stage not in ("decode", "resize") or not figures.machine.prepare:
        return as_given + _CHEAPER[stage]
    counted = figures.counted
    if counted.samples_unprepared and (option := _prepare_option(figures)):
        share = min(1.0, counted.samples_unprepared / max(1, counted.samples_yielded))
        return _PREPARE_AHEAD.format(share, option)
    return as_given


def _unclear(figures: Figures) -> tuple[Limit, str, str]:
    shares = {stage: figures.share(stage) for stage in ("bytes", "shuffle")}
    shares |= {str(limit): share for limit, share in _shares(figures).items()}
    shown = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.01)
    spent = f"workers' time went into {shown}" if shown else "workers were starting, or had nothing to do"
    return "unclear", f"no single cause ({spent})", _NOTHING
