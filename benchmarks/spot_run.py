"""One run of the simulation, and what is read off it."""

from typing import Any

import numpy as np

from benchmarks.spot_setup import Setup
from benchmarks.spot_world import World

SAMPLE_SECONDS = 60.0
ASKED = ("small_gets", "small_puts", "shard_gets", "shard_puts")


def simulate(setup: Setup, from_seconds: float = 0.0) -> dict[str, Any]:
    """What happened from some time after the trainers' beginning on, by number and by the minute."""
    world = World(setup)
    world.begin()
    world.events.run(setup.head_start + from_seconds)
    before = _read(world)
    minutes, last = [], before
    while world.events.now < setup.head_start + setup.seconds and not world.is_over:
        world.events.run(
            min(world.events.now + SAMPLE_SECONDS, setup.head_start + setup.seconds), lambda: world.is_over
        )
        reading = _read(world)
        minutes.append(_minute(world, last, reading))
        last = reading
    seconds = last["now"] - before["now"]
    gone = {name: last[name] - before[name] for name in before}
    read_bytes = gone["opened"] * setup.shard_bytes
    had = len(world.had) * setup.shard_bytes
    return {
        "seconds": seconds,
        "waited_share": gone["waited"] / (len(world.groups) * seconds),
        "read_share": read_bytes / (setup.demand * seconds),
        "origin_share": gone["trainers_bytes"] / read_bytes if read_bytes else None,
        "read_bytes": last["opened"] * setup.shard_bytes,
        "egress_bytes": had + sum(world.wasted.values()),
        "egress_times": 1.0 + sum(world.wasted.values()) / had if had else None,
        "wasted_bytes": dict(sorted(world.wasted.items())),
        "asked_per_second": {name: gone[name] / seconds for name in ASKED},
        "most_asked_per_second": {name: max(minute[name] for minute in minutes) for name in ASKED},
        "refused_share": gone["refused"] / sum(gone[name] for name in ASKED),
        "requests_per_second": {
            what: count / world.events.now for what, count in sorted(world.asked.items())
        },
        "nodes": gone["node_hours"] * 3600 / seconds,
        "node_hours": gone["node_hours"],
        "nodes_begun": world.nodes_begun,
        "taken_over": world.taken_over,
        "minutes": minutes,
    }


def _read(world: World) -> dict[str, float]:
    now = world.events.now
    return {
        "now": now,
        "waited": sum(group.waited_until(now) for group in world.groups),
        "opened": sum(group.front for group in world.groups),
        "trainers_bytes": world.link.carried("trainers"),
        "daemons_bytes": world.link.carried("daemons"),
        "small_gets": world.small[0].asked,
        "small_puts": world.small[1].asked,
        "shard_gets": world.large[0].asked,
        "shard_puts": world.large[1].asked,
        "refused": sum(limit.refused for limit in (*world.small, *world.large)),
        "node_hours": world.node_hours(),
    }


def _minute(world: World, before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    seconds = after["now"] - before["now"]
    gone = {name: after[name] - before[name] for name in after}
    held = np.array([group.held_ahead for group in world.groups]) * world.setup.shard_seconds
    return {
        "at": after["now"] - world.setup.head_start,
        "nodes": len(world.nodes),
        "held_seconds": float(held.mean()),
        "held_seconds_worst": float(np.percentile(held, 1)),
        "waited_share": gone["waited"] / (len(world.groups) * seconds),
        "trainers_bytes_per_second": gone["trainers_bytes"] / seconds,
        "daemons_bytes_per_second": gone["daemons_bytes"] / seconds,
        **{name: gone[name] / seconds for name in ASKED},
    }
