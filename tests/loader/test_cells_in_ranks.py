"""Cells in a training of several ranks, joined by gloo: equal steps, and the gradients of one process."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import streamload
from streamload import Batches, Order, Shards, Workers
from streamload.testing.shards import ShardOptions, write_shards

CELLS, STEPS, IDS = 8, 5, 32


def as_row(sample: dict[str, Any]) -> dict[str, Any]:
    """Ids and labels of 1 to 40 tokens, by the caption's bytes; a third are prompts."""
    ids = torch.tensor(list(sample["txt"])[:40] or [1]) % IDS
    return {"key": sample["__key__"], "ids": ids, "labels": torch.where(ids % 3 == 0, -100, (ids * 7) % IDS)}


def as_cell(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ids, labels = (torch.cat([row[name] for row in rows])[None] for name in ("ids", "labels"))
    return {"input_ids": ids, "labels": labels, "keys": [row["key"] for row in rows]}


def tokens(entry: streamload.Entry) -> float:
    return max(1, min(40, entry.caption_bytes))


def module() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Embedding(IDS, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, IDS)
    return nn.Sequential(*layers).double()


def train(urls: str, cache: Path, ranks: int, model: nn.Module) -> list[list[list[str]]]:
    """Add up the gradients of all steps; return the keys of this rank's cells in each."""
    steps = []
    loader = streamload.make_loader(
        urls,
        batch_size=CELLS // ranks,
        num_workers=1,
        cache_dir=cache,
        seed=3,
        shards=Shards(image_key=None, text_key=None),
        batches=Batches(cost=tokens, max_tokens=120),
        order=Order(num_batches=STEPS),
        workers=Workers(map_sample=as_row, collate=as_cell),
    )
    with loader:
        for batch in loader:
            parts = list(loader.microbatches(batch))
            steps.append([part["keys"] for part in parts])
            count = torch.tensor(float(sum((part["labels"] != -100).sum() for part in parts)))
            if ranks > 1:
                torch.distributed.all_reduce(count)
            for part in parts:
                logits = model(part["input_ids"]).transpose(1, 2)
                loss = cross_entropy(logits, part["labels"], reduction="sum") * ranks / count
                delays = contextlib.nullcontext() if ranks == 1 or part.is_last else model.no_sync()  # type: ignore[operator]
                with delays:
                    loss.backward()
    return steps


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    )


def in_rank(rank: int, ranks: int, urls: str, folder: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
    )
    model = nn.parallel.DistributedDataParallel(module())
    steps = train(urls, folder / "cache", ranks, model)
    torch.save((steps, gradients(model)), folder / f"{rank}.pt")
    torch.distributed.barrier()  # a rank that ends while another still connects fails it
    torch.distributed.destroy_process_group()


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_equal_steps_and_the_gradients_of_one_process(tmp_path: Path, ranks: int) -> None:
    options = ShardOptions(image_side=(8, 8))
    write_shards(tmp_path / "shards", [90, 70, 110], options=options)
    urls, model = str(tmp_path / "shards"), module()
    expected = train(urls, tmp_path / "cache", 1, model)
    torch.multiprocessing.start_processes(in_rank, (ranks, urls, tmp_path), nprocs=ranks, start_method="fork")
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    steps = [[cell for part in parts for cell in part] for parts in zip(*(f[0] for f in found), strict=True)]
    assert steps == expected
    assert len(steps) == STEPS
    assert len({len(cell) for step in steps for cell in step}) > 1
    for _, gradient in found:
        error = (gradient - gradients(model)).norm() / gradients(model).norm()
        assert error < 1e-12
