"""Ranks of torch.distributed, killed at once and restarted from their last states, in one journal."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed
from torch.multiprocessing.spawn import start_processes

import streamload
from streamload.journal.history import RunHistory
from streamload.loader.past import MakeLoaders, steps_from
from streamload.loader.registered import by_rank, extensions_of
from streamload.testing.shards import ShardOptions, write_shards
from tests.support import flat


def make(folder: Path, ranks: int, **options: object) -> streamload.Loader:
    return flat.make_loader(
        str(folder / "shards"),
        batch_size=12 // ranks,
        num_workers=0,
        num_batches=30,
        shuffle=50,
        lanes=3,
        cache_dir=folder / "cache",
        with_keys=True,
        output="dict",
        journal=folder / "journal",
        **options,
    )


def train(rank: int, ranks: int, folder: Path, attempt: int) -> None:
    """Train until it is killed, and note each step and its state."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store-{attempt}", rank=rank, world_size=ranks
    )
    with make(folder, ranks) as loader, (folder / f"keys-{attempt}-{rank}").open("a") as keys:
        state = folder / f"state-{rank}"
        if state.is_file():
            loader.load_state_dict(json.loads(state.read_text()))
        for _ in range(4):
            for batch in loader:
                keys.write(json.dumps([loader.info.run_step, batch["__key__"]]) + "\n")
                keys.flush()
                if loader.info.run_step % 10 == 4:
                    torch.distributed.barrier()
                    state.with_suffix(".part").write_text(json.dumps(loader.state_dict()))
                    state.with_suffix(".part").replace(state)
                    torch.distributed.barrier()
                time.sleep(0.01)
    torch.distributed.destroy_process_group()


def seen(folder: Path, attempt: int, rank: int) -> dict[int, list[str]]:
    lines = (folder / f"keys-{attempt}-{rank}").read_text().splitlines()
    return {step: keys for step, keys in map(json.loads, lines) if keys}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.deep)])
def test_ranks_that_are_killed_go_on_in_another_segment_and_all_steps_are_made_again(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamload.journal.recorder._FLUSH_STEPS", 8)  # forked processes have it, too
    monkeypatch.setattr("streamload.journal.recorder.MARK_STEPS", 7)
    write_shards(tmp_path / "shards", [20, 31, 2, 17, 40, 9], options=ShardOptions(image_side=(6, 12)))
    for attempt, is_killed in ((0, True), (1, False)):
        context = start_processes(
            train, (ranks, tmp_path, attempt), nprocs=ranks, join=False, start_method="fork"
        )
        last = tmp_path / f"keys-{attempt}-{ranks - 1}"
        while is_killed and not (last.is_file() and len(last.read_text().splitlines()) > 40):
            time.sleep(0.02)
        for process in context.processes if is_killed else ():
            os.kill(process.pid, signal.SIGKILL)
        while not is_killed and not context.join():
            pass
        for process in context.processes:
            process.join()
    assert sorted(path.name for path in (tmp_path / "journal").glob("*.journal")) == [
        f"rank-{rank:05d}.journal" for rank in range(ranks)
    ]
    history = RunHistory(tmp_path / "journal")
    first, second = history.segments
    assert [list(history.of_rank(rank)) for rank in range(ranks)] == [[first.name, second.name]] * ranks
    killed_at = min(max(seen(tmp_path, 0, rank)) for rank in range(ranks))
    assert killed_at - 8 - 2 <= first.stop <= killed_at + 2
    assert second.parent == (first.name, second.first)
    assert second.stop in (120, 150)  # three epochs after that of the state
    with make(tmp_path, ranks, rank=0, world_size=ranks) as loader:
        options = loader.options
    makers = MakeLoaders(streamload.Loader, extensions_of, by_rank())
    for attempt, segment in enumerate((first, second)):
        for rank in range(ranks):
            expected = seen(tmp_path, attempt, rank)
            layout = (rank, ranks, 12 // ranks)
            past = steps_from(history, segment.first, options, makers, layout, segment.name)
            count = 0
            for step in itertools.islice(past, segment.stop - segment.first):
                assert step.batch["__key__"] == expected[step.step]
                count += 1
            assert count == segment.stop - segment.first
