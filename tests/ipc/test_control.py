"""Memory between a rank and its workers: batches without a copy, orders without a tear."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from streamload.ipc import ControlBlock, own_empty, shared_empty
from streamload.ipc.control import SharedJson


@pytest.mark.parametrize("empty", [own_empty, shared_empty])
@pytest.mark.parametrize("shape", [(2, 3, 5), (0, 4), (7,)])
def test_a_tensor_has_the_shape_and_type_that_was_asked_for(empty: object, shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.uint8, torch.int64):
        tensor = empty(shape, dtype)  # type: ignore[operator]
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        tensor.fill_(3)
        assert (tensor == 3).all()


def test_shared_memory_goes_with_its_last_tensor() -> None:
    def held() -> int:
        maps = Path("/proc/self/maps").read_text()
        return maps.count("/memfd:streamload")

    before = held()
    tensor = shared_empty((1 << 20,), torch.uint8)
    part = tensor[100:200]
    del tensor
    assert held() == before + 1
    del part
    assert held() == before


def send(queue: multiprocessing.Queue[torch.Tensor]) -> None:
    tensor = shared_empty((3, 4), torch.float32)
    tensor.copy_(torch.arange(12).view(3, 4))
    queue.put(tensor[:2])
    time.sleep(1)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.deep)])
def test_a_tensor_travels_to_another_process(method: str) -> None:
    context = torch.multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=send, args=(queue,))
    process.start()
    received = queue.get(timeout=60)
    assert received.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    process.join()
    assert received.sum() == 28  # it outlives its sender
    queue.close()
    queue.join_thread()


def test_an_order_is_read_whole_while_others_are_given() -> None:
    control = ControlBlock(1)
    control.order.write({"epoch": 0, "text": "0" * 1000})
    stop = threading.Event()
    torn: list[dict[str, object]] = []

    def read() -> None:
        while not stop.is_set():
            order = control.order.read()
            if order["text"] != str(order["epoch"])[-1] * 1000:
                torn.append(order)

    reader = threading.Thread(target=read)
    reader.start()
    for epoch in range(3000):
        control.order.write({"epoch": epoch, "text": str(epoch)[-1] * 1000})
    stop.set()
    reader.join()
    assert not torn


def writes_half_and_is_killed(outcome: Path) -> None:
    note = SharedJson()
    note._generation.array[0] += 1
    multiprocessing.get_context("fork").Process(target=read_until_told, args=(note, outcome)).start()
    os.kill(os.getpid(), signal.SIGKILL)


def read_until_told(note: SharedJson, outcome: Path) -> None:
    signal.alarm(60)  # nobody else would end it
    try:
        note.read()
    except EOFError as exc:
        outcome.with_suffix(".part").write_text(str(exc))
        outcome.with_suffix(".part").rename(outcome)


def test_a_writer_that_is_killed_while_it_writes_is_not_waited_for(tmp_path: Path) -> None:
    outcome = tmp_path / "outcome"
    writer = multiprocessing.get_context("spawn").Process(target=writes_half_and_is_killed, args=(outcome,))
    writer.start()
    writer.join()
    deadline = time.monotonic() + 40
    while not outcome.exists():
        assert time.monotonic() < deadline, "it is waited for"
        time.sleep(0.01)
    assert "was killed" in outcome.read_text()


def test_a_board_that_is_made_in_inference_mode_is_of_use_outside() -> None:
    with torch.inference_mode():
        control = ControlBlock(1)
        control.order.write({"epoch": 1})
    control.order.write({"epoch": 2})
    control.order.withdraw()
    control.want(True)
    assert control.order.read()["epoch"] == 2


class WrittenMeanwhile(SharedJson):
    """Gets other values while it is read."""

    later: dict[str, int] | None = None

    @property
    def generation(self) -> int:
        found = super().generation
        if self.later is not None:
            values, self.later = self.later, None
            self.write(values)
        return found


def test_an_order_that_comes_while_another_is_read_is_read_with_its_own_generation() -> None:
    text = WrittenMeanwhile()
    text.write({"step": 1})
    text.later = {"step": 2}
    assert text.read() == {"step": 2, "generation": text.generation}


def test_a_withdrawn_order_is_seen_by_its_generation() -> None:
    control = ControlBlock(1)
    control.order.write({"epoch": 1})
    generation = control.order.read()["generation"]
    assert control.order.generation == generation
    control.order.withdraw()
    assert control.order.generation != generation


def test_an_order_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        ControlBlock(1).order.write({"text": "x" * (65 << 20)})


def test_who_waits_is_known_to_the_workers() -> None:
    control = ControlBlock(1)
    assert control.wanted_seconds() == 0
    control.want(True)
    assert control.wanted_seconds() > 0
    control.want(False)
    assert control.wanted_seconds() == 0
