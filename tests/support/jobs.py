"""A small training as a job on nodes (nodes.py), and the global batches that it must have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed

from streamload import Workers
from tests.support import flat
from tests.support.kills import Child, Stage
from tests.support.networks import Switch
from tests.support.nodes import RankPlace

GROUPS = 4
ROWS = 24
"""Of a global batch."""
FIRST_HOST = 2

__all__ = ["FIRST_HOST", "GROUPS", "ROWS", "expected_batches", "in_switch", "join", "make", "together"]


def _key_of(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"]}


def make(urls: str, disk: Path, ranks: int, **options: Any) -> Any:
    """The loader of one rank, whose batches have the keys of their samples."""
    defaults = {"lanes": 1, "shuffle": 0, "ahead": "1KB", "num_workers": 0, "cache_size": "100MB"}
    defaults |= {"groups": GROUPS} | options
    return flat.make_loader(
        urls,
        workers=Workers(map_sample=_key_of, multiprocessing_context="fork"),
        cache_dir=disk,
        batch_size=ROWS // ranks,
        **defaults,
    )


def expected_batches(urls: str, place: Path, samples: int, **options: Any) -> list[list[str]]:
    """The global batches, sorted, by one process."""
    with make(urls, place / "alone", 1, num_samples=samples, **options) as loader:
        return [sorted(batch["key"]) for batch in loader]


def together(by_rank: list[list[list[str]]]) -> list[list[str]]:
    """The global batches, sorted, from those of the ranks."""
    return [sorted(key for rows in step for key in rows) for step in zip(*by_rank, strict=True)]


def join(place: RankPlace, first_host: int) -> None:
    """Join the ranks, by a store on the first node."""
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://192.0.2.{first_host}:29500",
        rank=place.rank,
        world_size=place.node.nodes * place.node.ranks,
    )


def in_switch(work: Callable[[Switch], Any], limit_seconds: float = 160.0) -> Any:
    """What a function returns in a process of its own that has a switch."""

    def alone(stage: Stage) -> Any:
        return work(Switch())

    with Child(alone, limit_seconds=limit_seconds) as child:
        return child.finish(limit_seconds)
