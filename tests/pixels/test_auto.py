"""`Images(decode="auto")`: measured in the first steps, one choice for all ranks, resumed exactly."""

import json
import logging
import pickle
import re
import types

import pytest
import torch
import torch.multiprocessing

import streamload
from streamload.errors import OptionError, StateMismatch
from streamload.extension import Event
from streamload.loader.state import sealed
from streamload.metrics import Snapshot
from streamload.pixels import auto, rank
from streamload.pixels.auto import DecoderChoice, DecodingLoad, choose, why_no_engine
from streamload.pixels.decoders import HostDecoder
from streamload.pixels.decoding import decoding_by
from streamload.pixels.files import FileImages
from streamload.testing.shards import write_shards
from streamload.transforms.plan import clip_plan
from tests.support import flat
from tests.support.extension_contract import ids

BUSY = DecodingLoad("", 0.4, 0.9)
FIRST, LAST = 2, 4
AHEAD = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("auto")
    return [str(path) for path in write_shards(directory, [24, 30, 26], seed=6)]


class Inverting(HostDecoder):
    """The CPU's decoder, whose pixels can be told from those of workers."""

    def __init__(self, most_pixels):
        super().__init__(most_pixels)
        self.name = "one that inverts"

    def decode(self, files):
        return [255 - pixels for pixels in super().decode(files)]


@pytest.fixture
def engine(monkeypatch):
    """An engine on the CPU, and a training whose workers can't keep up."""
    plant(monkeypatch, BUSY)
    return monkeypatch


def plant(monkeypatch, measured):
    monkeypatch.setattr(auto, "FIRST_STEP", FIRST)
    monkeypatch.setattr(auto, "LAST_STEP", LAST)
    monkeypatch.setattr(rank, "decoder_for", lambda device, most_pixels: Inverting(most_pixels))
    monkeypatch.setattr(DecoderChoice, "_measured", lambda self, *began: measured)


def make(data, cache, decode="auto", **options):
    chosen = {"batch_size": 5, "num_workers": 1, "output": "dict", "with_keys": True, "seed": 5, "groups": 1}
    chosen |= {"prefetch_factor": AHEAD, "num_batches": 14, "cache_dir": cache, "cache_size": "1GB"}
    return flat.make_loader(data, ids, decode=decode, **{**chosen, **options})


def run(loader, number=None):
    """The batches of the next epoch, and the states after each."""
    batches, states = [], []
    for batch in loader:
        batches.append(batch)
        states.append(json.loads(json.dumps(loader.state_dict())))
        if len(batches) == number:
            break
    return batches, states


def are_equal(batches, others):
    assert [batch["__key__"] for batch in batches] == [batch["__key__"] for batch in others]
    return [torch.equal(batch["image"], other["image"]) for batch, other in zip(batches, others, strict=True)]


@pytest.mark.parametrize(
    ("by_rank", "decode", "reason"),
    [
        ([BUSY], "device", r"40% of its time, and images took 90% of the workers' \(rank 0,"),
        ([DecodingLoad("", 0.01, 0.9), BUSY], "device", r"\(rank 1,"),
        ([DecodingLoad("", 0.04, 0.9)], "host", "4% of its time"),
        ([DecodingLoad("", 0.9, 0.3)], "host", "images took 30%"),
        ([BUSY, DecodingLoad("it is an abacus", 0.4, 0.9)], "host", "rank 1 has no decoder.*abacus"),
    ],
)
def test_the_slowest_rank_decides_if_all_have_an_engine(by_rank, decode, reason):
    chosen, why = choose(by_rank)
    assert chosen == decode
    assert re.search(reason, why)


def test_a_device_without_an_engine_is_known():
    assert why_no_engine(None) == why_no_engine(torch.device("cpu")) == "batches are in host memory"
    assert "decode='host'" in why_no_engine(torch.device("meta"))


def test_an_engine_whose_library_fails_is_none(monkeypatch):
    def fails(device):
        raise RuntimeError("no such backend")

    monkeypatch.setattr(auto, "decoder_for", fails)
    assert why_no_engine(torch.device("meta")) == "RuntimeError: no such backend"


def test_shares_are_of_the_steps_between_the_first_and_the_last(monkeypatch):
    seconds, counted, sent = [100.0], [Snapshot(data_wait_seconds=7.0, decode_seconds=50.0)], []

    def send(value):
        sent.append(value)
        return Event(60, "decode", value)

    run = types.SimpleNamespace(
        options=types.SimpleNamespace(num_workers=2),
        can_agree=True,
        stats=lambda: counted[0],
        agree=lambda subject, value, decide: value,
        send=send,
    )
    choice = DecoderChoice(run, clock=lambda: seconds[0])
    choice.start_epoch(0)
    for _ in range(auto.FIRST_STEP):
        choice.before_batch()
        choice.took()
    choice.before_batch()
    seconds[0], counted[0] = 110.0, Snapshot(data_wait_seconds=9.0, decode_seconds=60.0, resize_seconds=3.0)
    for _ in range(auto.LAST_STEP - auto.FIRST_STEP):
        assert not sent
        choice.took()
        choice.before_batch()
    assert sent == [DecodingLoad("batches are in host memory", 0.2, 13 / 20)]
    choice.took()
    choice.before_batch()
    assert len(sent) == 1


def test_steps_of_short_epochs_are_measured_together_without_the_time_between(monkeypatch):
    seconds, waited, sent = [100.0], [5.0], []
    run = types.SimpleNamespace(
        options=types.SimpleNamespace(num_workers=1),
        can_agree=True,
        stats=lambda: Snapshot(data_wait_seconds=waited[0]),
        agree=lambda subject, value, decide: value,
        send=lambda value: sent.append(value) or Event(60, "decode", value),
    )
    choice = DecoderChoice(run, clock=lambda: seconds[0])
    for _ in range(auto.LAST_STEP // 12):
        assert not sent
        choice.start_epoch(0)
        for _ in range(12):
            choice.before_batch()
            seconds[0], waited[0] = seconds[0] + 1.0, waited[0] + 0.25
            choice.took()
        seconds[0], waited[0] = seconds[0] + 100.0, waited[0] + 50.0  # an evaluation
    choice.start_epoch(0)
    choice.before_batch()
    assert sent == [DecodingLoad("batches are in host memory", 0.25, 0.0)]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_decode_until_the_choice_and_the_device_after_it(data, tmp_path, engine, workers, caplog):
    caplog.set_level(logging.INFO, "streamload")
    with (
        make(data, tmp_path, num_workers=workers) as loader,
        make(data, tmp_path, "host", num_workers=workers) as host,
        make(data, tmp_path, "device", num_workers=workers) as device,
    ):
        for epoch in range(2):
            (batches, states), (by_host, _), (by_device, _) = run(loader), run(host), run(device)
            of_host, of_device = are_equal(batches, by_host), are_equal(batches, by_device)
            turn = of_device.index(True)
            assert of_host == [True] * turn + [False] * (14 - turn)
            assert of_device == [False] * turn + [True] * (14 - turn)
            assert turn == 0 if epoch else LAST <= turn <= LAST + AHEAD * workers + 1
            decoders = [state.get("decoder") for state in states]
            assert decoders == [None] * turn + ["one that inverts"] * (14 - turn)
            assert ["decode" in state for state in states] == [
                bool(epoch) or number >= LAST for number in range(14)
            ]
    lines = [line for line in caplog.messages if line.startswith("decode: auto chose")]
    assert lines == [f"decode: auto chose device: {choose([BUSY])[1]}"]


def test_a_run_resumes_exactly_before_between_and_after_its_choice(data, tmp_path, engine, caplog):
    with make(data, tmp_path) as loader:
        batches, states = run(loader)
        (next_epoch, _) = run(loader)
    positions = [state.get("decode", [None])[0] for state in states]
    chosen = positions[-1]
    assert set(positions[LAST:]) == {chosen}
    engine.setattr(DecoderChoice, "_measured", lambda self, *began: DecodingLoad("", 0.0, 0.9))
    caplog.clear()
    for number in range(LAST, 14):
        with make(data, tmp_path, num_workers=number % 3) as loader:
            loader.load_state_dict(states[number])
            assert loader.state_dict()["decode"] == states[number]["decode"]
            assert all(are_equal(run(loader)[0], batches[number + 1 :] or next_epoch))
    assert not [line for line in caplog.messages if "auto chose" in line or "from here on" in line]


def test_workers_that_keep_up_go_on(data, tmp_path, monkeypatch):
    plant(monkeypatch, DecodingLoad("", 0.0, 0.9))
    with make(data, tmp_path) as loader, make(data, tmp_path, "host") as host:
        (batches, states), (expected, _) = run(loader), run(host)
        assert all(are_equal(batches, expected))
        assert states[-1]["decode"][1]["decode"] == "host"
        assert "decoder" not in states[-1]


def test_without_an_engine_workers_go_on_and_the_log_says_why(data, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(auto, "FIRST_STEP", FIRST)
    monkeypatch.setattr(auto, "LAST_STEP", LAST)
    caplog.set_level(logging.INFO, "streamload")
    with make(data, tmp_path) as loader, make(data, tmp_path, "host") as host:
        assert all(are_equal(run(loader)[0], run(host)[0]))
    reason = "rank 0 has no decoder on its device: batches are in host memory"
    assert f"decode: auto chose host: {reason}" in caplog.messages


@pytest.mark.parametrize("compiles", [True, False])
def test_an_evaluation_stays_in_the_workers(data, tmp_path, engine, compiles):
    options = {"train": False, "num_batches": None, "groups": None, "batch_size": 2, "compile": compiles}
    with make(data, tmp_path, **options) as loader, make(data, tmp_path, "host", **options) as host:
        assert all(are_equal(run(loader)[0], run(host)[0]))
        assert "decode" not in loader.state_dict()


@pytest.mark.parametrize("knows_its_end", [False, True])
def test_it_is_chosen_in_the_last_step_whether_or_not_a_rank_knows_that_it_is(
    data, tmp_path, engine, knows_its_end
):
    """Else ranks that know wouldn't be asked, and others would wait for them."""
    with make(data, tmp_path, "host", num_batches=None) as loader:
        run(loader)  # from then on the cache has all shards
    with make(data, tmp_path, num_batches=None, batch_size=20) as loader:
        if knows_its_end:
            assert len(loader) == LAST
        assert len(run(loader)[0]) == LAST
        assert "decode" in loader.state_dict()


def test_a_state_of_another_decoder_is_said_and_a_damaged_choice_fails(data, tmp_path, engine, caplog):
    with make(data, tmp_path, "device") as loader:
        (_, states) = run(loader, 2)
    with make(data, tmp_path) as loader:
        loader.load_state_dict(states[-1])
        run(loader, 1)
        assert sum("from here on" in line for line in caplog.messages) == 1
        for damaged in ("device", [1], [-1, {"decode": "device"}], [3, {"decode": "abacus"}], [3, {}], 4):
            with pytest.raises(StateMismatch, match="as decode"):
                loader.load_state_dict(sealed({**states[-1], "decode": damaged}))


def test_ranks_that_nothing_joins_are_refused(data, tmp_path):
    with (
        make(data, tmp_path, rank=0, world_size=2) as loader,
        pytest.raises(OptionError, match=r"one choice for all ranks.*decode='device' or 'host'"),
    ):
        next(iter(loader))


def test_in_another_process_both_parts_have_one_switch():
    decoding = decoding_by("auto")
    options = types.SimpleNamespace(train=True, workers=streamload.Workers(memory={"image": "1GB"}))
    images = decoding.image_maker(options, clip_plan(train=True))
    assert images == FileImages(clip_plan(train=True), is_bounded=True)
    images, decoding = pickle.loads(pickle.dumps((images, decoding)))
    assert decoding == decoding_by("auto") != decoding_by("device")
    part = decoding.in_worker(None)
    part.apply(Event(0, "decode", {"decode": "device"}))
    assert images.switch.is_on
    part.start_epoch()
    assert not images.switch.is_on
    assert decoding_by("device").in_worker(None) is None


def of_two_ranks(rank_, data, place, measured_by_rank):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place}/rendezvous", rank=rank_, world_size=2
    )
    with pytest.MonkeyPatch.context() as patched:
        plant(patched, measured_by_rank[rank_])
        options = {"rank": rank_, "world_size": 2, "num_workers": rank_}
        with make(data, place / f"{rank_}", **options) as loader:
            _, states = run(loader)
        if "decoder" in states[-1]:  # resumed where only some of the ranks' workers have the choice
            with make(data, place / f"{rank_}", **options) as resumed:
                resumed.load_state_dict(states[LAST])
                assert [state.get("decoder") for state in run(resumed)[1]] == [
                    state.get("decoder") for state in states[LAST + 1 :]
                ]
    told = [states[-1]["decode"], [state.get("decoder") for state in states]]
    (place / f"{rank_}.json").write_text(json.dumps(told))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("second", "decode"), [(BUSY, "device"), (DecodingLoad("it is an abacus", 0.4, 0.9), "host")]
)
def test_two_ranks_go_on_at_the_same_step(data, tmp_path, second, decode):
    measured_by_rank = [DecodingLoad("", 0.0, 0.9), second]
    torch.multiprocessing.start_processes(
        of_two_ranks, (data, tmp_path, measured_by_rank), nprocs=2, start_method="fork"
    )
    told, others = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2))
    assert told == others
    (position, value), decoders = told
    assert value["decode"] == decode
    turn = decoders.index("one that inverts") if decode == "device" else 14
    assert turn == 14 or turn * 10 == position
    assert decoders == [None] * turn + ["one that inverts"] * (14 - turn)
