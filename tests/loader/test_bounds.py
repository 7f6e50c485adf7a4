"""Several nodes with bucketing: equal steps, rows and padded shapes on all ranks, by what they agree on."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

import streamload
from streamload import Batches, Images, Order, Patches
from streamload.errors import RankFailed
from streamload.testing.shards import ShardOptions, read_oracle, write_shards

LENGTH, STEPS, CUT, MOST = 64, 14, 5, 200


def tokenize(texts: Sequence[str]) -> dict[str, torch.Tensor]:
    """Ids of many lengths, most of them short."""
    ids = torch.zeros(len(texts), LENGTH, dtype=torch.long)
    for row, text in zip(ids, texts, strict=True):
        row[: 1 + (sum(map(ord, text)) % 61) ** 2 // 61] = 1
    return {"input_ids": ids, "attention_mask": ids.clone()}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Uneven shards, in which one image in fifty can't be decoded."""
    directory = tmp_path_factory.mktemp("nodes") / "data"
    counts = [30, 17, 41, 24, 20, 60, 35, 50]
    for path in write_shards(directory, counts, options=ShardOptions(image_side=(8, 40))):
        whole = path.read_bytes()
        for place, (_, members) in enumerate(read_oracle(path)):
            if place % 50 == 7:
                image = members["jpg"]
                whole = whole.replace(image, image[:8] + bytes(len(image) - 8))
        path.write_bytes(whole)
    return directory


def loader_of(data: Path, cache: Path, rank: int, ranks: int, groups: int, **options: Any) -> Any:
    bucketing = options.pop("bucketing")
    patches = Patches(8, seq_lens=(16, 30), max_ratio=1.0)
    return streamload.make_loader(
        str(data), tokenize, batch_size=16 // ranks, seed=5, output="dict", cache_dir=cache,
        cache_size="1GB", images=Images(patches=patches),
        batches=Batches(
            with_keys=True, text_padding="longest", text_pad_multiple=4, bucketing=bucketing, max_tokens=MOST
        ),
        order=Order(num_batches=STEPS, rank=rank, world_size=ranks, groups=groups), **options,
    )  # fmt: skip


def note(loader: Any, batch: Any) -> dict[str, Any]:
    parts = list(loader.microbatches(batch))
    assert all(part["text"].numel() + part["image"]["patch_valid"].numel() <= MOST for part in parts)
    assert batch["text"].shape == batch["text_valid"].shape
    return {
        "keys": batch["__key__"],
        "shape": [*batch["text"].shape, *batch["image"]["patches"].shape],
        "needed": int(batch["text_valid"].sum(1).max()),
        "parts": [[*part["text"].shape, *part["image"]["patches"].shape] for part in parts],
    }


def joined(rank: int, place: Path, name: str, ranks: int) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place}/{name}", rank=rank, world_size=ranks
    )


def node(rank: int, data: Path, place: Path, ranks: int, groups: int, bucketing: Any, workers: int) -> None:
    """One rank: all steps; then those after a cut again, from the state of all, with an empty cache."""
    joined(rank, place, "rendezvous", ranks)
    layout = {"bucketing": bucketing, "num_workers": workers}
    with loader_of(data, place / f"cache-{rank}", rank, ranks, groups, **layout) as loader:
        whole, state = [], None
        for number, batch in enumerate(loader):
            whole.append(note(loader, batch))
            if number == CUT:
                state = streamload.gather_state(loader)
    with loader_of(data, place / f"again-{rank}", rank, ranks, groups, **layout) as loader:
        loader.load_state_dict(state)
        rest = [note(loader, batch) for batch in loader]
    (place / f"{rank}.json").write_text(json.dumps([whole, rest]))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "groups", "bucketing", "workers"),
    [(2, 2, 64, 0), (4, 2, 64, 1), (4, 4, 64, 0), (2, 2, "step", 1), (2, 4, 64, 0)],
)
@pytest.mark.sampled(2)
def test_steps_have_equal_rows_shapes_and_parts_on_all_nodes(
    data: Path, tmp_path: Path, ranks: int, groups: int, bucketing: Any, workers: int
) -> None:
    given = (data, tmp_path, ranks, groups, bucketing, workers)
    torch.multiprocessing.start_processes(node, given, nprocs=ranks, start_method="fork")
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    widths = set()
    for steps in zip(*(whole for whole, _ in found), strict=True):
        for name in ("shape", "parts"):
            assert all(step[name] == steps[0][name] for step in steps)
        assert all(step["needed"] <= step["shape"][1] for step in steps)
        widths.add(steps[0]["shape"][1])
    assert len(found[0][0]) == STEPS
    assert len(widths) > (1 if bucketing == "step" else 3)
    for whole, rest in found:
        assert rest == whole[CUT + 1 :]
    seen = [key for whole, _ in found for step in whole for key in step["keys"]]
    assert len(set(seen)) > 0.9 * len(seen)  # the bad ones are replaced


def lonely(rank: int, data: Path, place: Path) -> None:
    """Rank 1 ends by an error before it takes a step of a block; rank 0 hears of it where it waits."""
    joined(rank, place, "lonely", 2)
    with loader_of(data, place / f"cache-{rank}", rank, 2, 2, bucketing=64, num_workers=0) as loader:
        batches = iter(loader)
        next(batches)
        if rank:
            looks = []
            monitor = loader._run.epoch._monitor
            monitor.close()
            monitor._reported_wait_seconds = 0.0  # on a busy machine it may have said that it waits
            monitor._ranks.is_read = looks.append
            monitor.fail(RuntimeError("its disk is gone"))
            assert looks == []  # nobody waits for it as far as it knows, so it waits for no answer
            while not (place / "heard").exists():
                time.sleep(0.05)
        else:
            with pytest.raises(RankFailed, match="rank 1 of 2 has failed: RuntimeError: its disk is gone"):
                next(batches)
            (place / "heard").touch()
    torch.distributed.destroy_process_group()


def test_a_rank_that_fails_is_no_hang_of_the_others(data: Path, tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(lonely, (data, tmp_path), nprocs=2, start_method="fork")
