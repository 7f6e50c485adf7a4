"""Decisions of several ranks: all take the same one, or all end with an error that says why.

Real ranks in processes of their own, on gloo, with different numbers of workers; what they yielded is
compared with one rank that has it all, resumed from their states and replayed from their log.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

import streamload
from streamload.errors import PolicyError, RankFailed
from streamload.mixing import Replay
from streamload.steering import Decided, Summary
from tests.mixing.test_steering import STEPS, Failing, Seesaw, losses, make, place, rows_of, train

__all__ = ["place"]
RANKS = 3


def in_ranks(train_rank: Callable[[int, Path, Path], None], place: Path, tmp_path: Path) -> list[int | None]:
    """Run a function on three ranks; returns how their processes ended."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(train_rank, rank, place, tmp_path)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]


def _rank(train_rank: Callable[[int, Path, Path], None], rank: int, place: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=rank, world_size=RANKS
    )
    train_rank(rank, place, tmp_path)
    os._exit(0)  # gloo waits for a peer that has gone


def of_ranks(place: Path, rank: int, **options: Any) -> streamload.Loader:
    return make(place, rank, batch_size=4, rank=rank, world_size=RANKS, **options)


def alike(rank: int, place: Path, tmp_path: Path) -> None:
    """All report all; their states are gathered after each step."""
    found, states = [], []
    with of_ranks(place, rank, mixing=Seesaw(), decisions=tmp_path / "log") as loader:
        for batch in loader:
            found.append(rows_of(batch))
            loader.report(loss=losses(batch["__key__"]), alignment=losses(batch["__url__"]))
            states.append((loader.state_dict(), streamload.gather_state(loader)))
    (tmp_path / f"{rank}.pickle").write_bytes(pickle.dumps((found, states)))


def together(tmp_path: Path) -> tuple[list[Any], list[list[Any]]]:
    """The rows of each step of all ranks, and by rank the states after it."""
    found = [pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(RANKS)]
    rows = [list(itertools.chain(*parts)) for parts in zip(*[rows for rows, _ in found], strict=True)]
    return rows, [states for _, states in found]


def test_ranks_decide_as_one_that_has_all_rows_and_resume_as_one(place: Path, tmp_path: Path) -> None:
    assert in_ranks(alike, place, tmp_path) == [0] * RANKS
    rows, states = together(tmp_path)
    alone, _ = train(make(place, mixing=Seesaw(), decisions=tmp_path / "alone"))
    assert rows == alone
    assert (tmp_path / "log").read_bytes() == (tmp_path / "alone").read_bytes()
    for step in range(1, STEPS):
        own = [states[rank][step - 1][0] for rank in range(RANKS)]
        gathered = states[1][step - 1][1]
        assert len(json.dumps(gathered)) < len(json.dumps(own[0])) + 500
        state = own if step % 2 else gathered
        assert rows[:step] + train(make(place, mixing=Seesaw()), state)[0] == alone


def test_a_state_without_the_reports_of_other_ranks_says_so(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert in_ranks(alike, place, tmp_path) == [0] * RANKS
    _, states = together(tmp_path)
    train(make(place, mixing=Seesaw()), states[0][3][0], stop=4)
    assert "the reports of 2 ranks from before the resume aren't in its state" in caplog.text


def unlike(rank: int, place: Path, tmp_path: Path) -> None:
    """Rank 1 reports late, rank 2 reports nonsense, and then nothing."""
    found: list[Any] = []
    with of_ranks(place, rank, mixing=Seesaw(), decisions=tmp_path / "log") as loader:
        infos = []
        for step, batch in enumerate(loader):
            found.append(rows_of(batch))
            infos.append((loader.info, losses(batch["__key__"])))
            if rank == 1 and step:
                loader.report(loss=infos[-2][1], batch=infos[-2][0])
            elif rank == 2 and step < 7:
                loader.report(loss=infos[-1][1] * float("nan"))
            elif rank == 0:
                loader.report(loss=infos[-1][1])
    broken = of_ranks(place, rank, mixing=Failing(lambda: 1 // 0))
    try:
        for step, _ in enumerate(broken):
            last = step
    except PolicyError as exc:
        found.append((last, str(exc)))
    (tmp_path / f"{rank}.pickle").write_bytes(pickle.dumps((found, [])))


@pytest.mark.deep
def test_ranks_that_report_late_nonsense_or_nothing_take_the_same_decisions(
    place: Path, tmp_path: Path
) -> None:
    assert in_ranks(unlike, place, tmp_path) == [0] * RANKS
    *rows, failed = together(tmp_path)[0]
    assert train(make(place, mixing=Replay(tmp_path / "log")))[0] == rows
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [sum(source["bad"] for source in line["sources"]) for line in lines[1:]] == [12, 12, 4, 0]
    assert [sum(source["reported"] for source in line["sources"]) for line in lines[1:]] == [20, 24, 24, 24]
    message = "mixing=Failing, at step 6 of the run: ZeroDivisionError: integer division or modulo by zero"
    for step, text in zip(failed[::2], failed[1::2], strict=True):
        assert step == 5
        assert text.endswith(message)


class Deadly(Seesaw):
    """Its process is killed in the second decision."""

    def decide(self, summary: Summary, memory: Any) -> Decided:
        if summary.step == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().decide(summary, memory)


def with_the_first_killed(rank: int, place: Path, tmp_path: Path) -> None:
    end(rank, tmp_path, of_ranks(place, rank, mixing=Deadly()))


def with_another_killed(rank: int, place: Path, tmp_path: Path) -> None:
    end(rank, tmp_path, of_ranks(place, rank, mixing=Seesaw()), dies_after=6 if rank == 1 else None)


def with_another_failed(rank: int, place: Path, tmp_path: Path) -> None:
    """Rank 1 ends with an error while the others wait for it in a decision, and stays alive."""
    options = {"map_sample": refused, "on_error": "raise"} if rank == 1 else {}
    end(rank, tmp_path, of_ranks(place, rank, mixing=Seesaw(), **options))
    torch.distributed.distributed_c10d._get_default_store().wait(["ended/0", "ended/2"])


def refused(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["__key__"].endswith("5"):
        raise ValueError("not this one")
    return {"key": sample["__key__"]}


def end(rank: int, tmp_path: Path, loader: streamload.Loader, dies_after: int | None = None) -> None:
    steps, ended = 0, ""
    try:
        for _ in loader:
            steps += 1
            if steps == dies_after:
                os.kill(os.getpid(), signal.SIGKILL)
    except RankFailed as exc:
        ended = str(exc)
    except Exception as exc:
        ended = f"own: {exc}"
    (tmp_path / f"{rank}.json").write_text(json.dumps([steps, ended]))
    torch.distributed.distributed_c10d._get_default_store().set(f"ended/{rank}", "1")


@pytest.mark.parametrize(
    ("train_rank", "gone", "match"),
    [
        (with_the_first_killed, 0, "agreed on the weights at step 6 of the run, as rank 0 decided"),
        (with_another_killed, 1, "agreed on the weights at step 6 of the run"),
    ],
)
def test_a_rank_that_is_killed_in_a_decision_ends_the_others(
    train_rank: Callable[[int, Path, Path], None], gone: int, match: str, place: Path, tmp_path: Path
) -> None:
    codes = in_ranks(train_rank, place, tmp_path)
    assert codes[gone] == -signal.SIGKILL
    for rank in {0, 1, 2} - {gone}:
        steps, ended = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (codes[rank], steps) == (0, 6)
        assert match in ended


def test_a_rank_that_fails_elsewhere_ends_those_that_wait_for_it_in_a_decision(
    place: Path, tmp_path: Path
) -> None:
    in_ranks(with_another_failed, place, tmp_path)
    assert json.loads((tmp_path / "1.json").read_text())[1].startswith("own: rank 1 of 3: ")
    for rank in (0, 2):
        assert "rank 1 of 3 has failed: " in json.loads((tmp_path / f"{rank}.json").read_text())[1]
