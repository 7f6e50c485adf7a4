"""`Images(decode="device")` has the batches, states and counts of "host" (tests/fuzzing/decoders.py)."""

import io
import json
import logging
import random
import tarfile

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

import streamload
from streamload.cache.shard_copy import ReadMemory
from streamload.daemon.warm import warm
from streamload.derived.prepare.preparation import Preparation
from streamload.device import feed_for
from streamload.errors import DecodeError, OptionError
from streamload.loader import worker_config
from streamload.pixels import files, rank
from streamload.pixels.decoders import HostDecoder
from streamload.pixels.decoding import DeviceDecoding
from streamload.pixels.segments import size_for_device
from streamload.transforms.decode import jpeg_size
from streamload.transforms.plan import Flip, Grey, ImagePlan, KeepRatio, RandomCrop, ShortSide, clip_plan
from streamload.worker import loop
from tests.pixels import damage
from tests.support import flat
from tests.support.extension_contract import ids


def encoded(rng, kind="JPEG", mode="RGB", **options):
    side = rng.integers(30, 330, 2)
    waves = np.add.outer(np.arange(side[0]) * 0.07, np.arange(side[1]) * 0.11)
    levels = 120 + 90 * np.sin(waves[..., None] * rng.uniform(0.3, 2, 3)) + rng.integers(0, 9, (*side, 3))
    buffer = io.BytesIO()
    Image.fromarray(levels.astype(np.uint8)).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def orientation():
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif.tobytes()


KINDS = {
    "baseline": {},
    "best": {"quality": 97, "subsampling": 0},
    "gray": {"mode": "L"},
    "progressive": {"progressive": True},
    "turned": {"exif": orientation()},
    "cmyk": {"mode": "CMYK"},
    "rgb": {"keep_rgb": True},
    "png": {"kind": "PNG"},
    "webp": {"kind": "WEBP"},
}
DAMAGE = {
    "half": lambda file: file[: len(file) // 2],
    "half with an end": lambda file: file[: len(file) // 2] + b"\xff\xd9",
    "endless": lambda file: file[:-2],
    "text": lambda file: b"not an image",
    "empty": lambda file: b"",
    "noise": lambda file: file[: len(file) // 2] + bytes(range(200)) + file[len(file) // 2 + 200 :],
    "long": lambda file: encoded_long(),
}


def encoded_long():
    buffer = io.BytesIO()
    Image.new("RGB", (3000, 1)).save(buffer, "JPEG")
    return buffer.getvalue()


def add_sample(tar, key, **members):
    for extension, data in members.items():
        info = tarfile.TarInfo(f"{key}.{extension}")
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Three shards of all kinds of images, with as many damaged ones in the last one."""
    folder, rng = tmp_path_factory.mktemp("shards"), np.random.default_rng(3)
    for shard in range(3):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for index in range(18):
                kind = list(KINDS)[index % len(KINDS)] if index % 3 else "baseline"
                file = encoded(rng, **KINDS[kind])
                if shard == 2 and index % 2:
                    file = DAMAGE[list(DAMAGE)[index // 2 % len(DAMAGE)]](encoded(rng))
                members = {"jpg": file, "txt": f"{kind} {shard} {index}".encode(), "cls": b"%d" % index}
                add_sample(tar, f"{shard}{index:03d}", **members)
    return str(folder / "{0..2}.tar")


def make(shards, cache, decode="device", **options):
    chosen = {
        "batch_size": 7, "num_workers": 0, "output": "dict", "with_keys": True, "label_key": "cls",
        "max_bad_samples": None, "seed": 5, "cache_dir": cache, "cache_size": "1GB",
    }  # fmt: skip
    return flat.make_loader(shards, ids, decode=decode, **{**chosen, **options})


def same(batch, expected):
    assert list(batch) == list(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(batch[name], value), name
            assert batch[name].stride() == value.stride(), name
        else:
            assert batch[name] == value, name
    return True


def without_decoder(state):
    return {name: value for name, value in state.items() if name not in ("decoder", "checksum", "run")}


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2},
        {"dtype": "uint8"},
        {"device": "cpu"},
        {"train": False},
        {"train": False, "num_workers": 1, "dtype": "uint8", "device": "cpu"},
    ],
    ids=str,
)
@pytest.mark.sampled(2)
def test_batches_states_and_counts_are_those_of_the_host(shards, tmp_path, options):
    with make(shards, tmp_path, **options) as loader, make(shards, tmp_path, "host", **options) as host:
        for _ in range(2):
            pairs = zip(loader, host, strict=True)
            assert sum(same(batch, expected) for batch, expected in pairs) > 5
            assert without_decoder(loader.state_dict()) == without_decoder(host.state_dict())
        assert sorted(loader.skipped) == sorted(host.skipped)
        assert len(host.skipped) >= 5
        assert loader.stats().samples_skipped == host.stats().samples_skipped
        assert loader.state_dict()["decoder"] == HostDecoder().name
        assert "decoder" not in host.state_dict()


def test_parts_of_batches_and_other_sizes_of_batches_are_those_of_the_host(shards, tmp_path):
    options = {"microbatch": 3, "num_batches": 8, "num_workers": 1}
    with make(shards, tmp_path, **options) as loader, make(shards, tmp_path, "host", **options) as host:
        for number, (batch, expected) in enumerate(zip(loader, host, strict=True)):
            parts = zip(loader.microbatches(batch), host.microbatches(expected), strict=True)
            for part, expected_part in parts:
                assert torch.equal(part["image"], expected_part["image"])
            if number == 3:
                assert loader.set_batch_size(5) == host.set_batch_size(5)


def test_a_sample_whose_text_has_no_feature_row_leaves_no_image(shards, tmp_path):
    class Length(torch.nn.Module):
        def forward(self, texts):
            return texts.float().sum(dim=1)

    def features():
        return {"sum": streamload.Features(Length().eval(), inputs="text", store={})}

    options = {"train": False}
    with (
        make(shards, tmp_path, features=features(), **options) as loader,
        make(shards, tmp_path, "host", features=features(), **options) as host,
    ):
        for batch, expected in zip(loader, host, strict=True):
            assert torch.equal(batch["image"], expected["image"])
            assert batch["__key__"] == expected["__key__"]


@pytest.mark.parametrize(
    "plan",
    [
        ImagePlan(
            (40, 70), RandomCrop((0.1, 0.9)), colour=(Flip(0.5), Grey(0.3, "torch"), Grey(0.2, "python"))
        ),
        ImagePlan((64, 64), KeepRatio((64, 64), 1.0), "bilinear", fill=(9, 8, 7)),
        ImagePlan((48, 48), ShortSide(50), statistics=None, rounds_down=True),
        ImagePlan((48, 48), ShortSide(50), on_tensors=True),
    ],
    ids=lambda plan: type(plan.fit).__name__,
)
@pytest.mark.sampled(2)
def test_a_plan_of_any_kind_gives_the_same_images(shards, tmp_path, monkeypatch, plan):
    monkeypatch.setattr(worker_config, "clip_plan", lambda train: plan)
    with make(shards, tmp_path) as loader, make(shards, tmp_path, "host") as host:
        assert all(same(batch, expected) for batch, expected in zip(loader, host, strict=True))


class Refusing(HostDecoder):
    """A decoder that fails for some files."""

    name = "one that fails"

    def __init__(self, most_pixels, fails):
        super().__init__(most_pixels)
        self.name, self._fails = "one that fails", fails

    def decode(self, files):
        return [
            DecodeError("planted") if self._fails(bytes(file)) else pixels
            for file, pixels in zip(files, super().decode(files), strict=True)
        ]


def plant(monkeypatch, fails):
    monkeypatch.setattr(rank, "decoder_for", lambda device, most_pixels: Refusing(most_pixels, fails))


def test_what_the_devices_decoder_fails_at_is_decoded_by_the_rank(shards, tmp_path, monkeypatch):
    plant(monkeypatch, lambda file: len(file) % 3 == 0)
    with make(shards, tmp_path) as loader, make(shards, tmp_path, "host") as host:
        assert all(same(batch, expected) for batch, expected in zip(loader, host, strict=True))
        numbers = loader._run.parts.metrics()
        assert 0.1 < numbers["decode.by_rank_share"] < 0.5
        assert 0.2 < numbers["decode.by_workers_share"] < 0.6


def fails_where_libjpeg_warns(file):
    try:
        simplejpeg.decode_jpeg(file, "RGB")
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(1, 12))])
def test_images_damaged_at_random_are_skipped_and_replaced_as_by_the_host(tmp_path, monkeypatch, seed):
    rng = random.Random(seed)
    for shard in range(3):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for index in range(120):
                is_sound = rng.random() < 0.2
                file = rng.choice(damage.sound()) if is_sound else damage.damaged(rng)
                add_sample(
                    tar, f"{shard}{index:03d}", jpg=file, txt=b"%d %d" % (shard, index), cls=b"%d" % index
                )
    plant(monkeypatch, fails_where_libjpeg_warns)
    monkeypatch.setattr(worker_config, "clip_plan", lambda train: clip_plan(train, size=24))
    for train in (True, False):
        options = {"train": train, "num_workers": seed % 3, "max_bad_samples": None}
        with (
            make(str(tmp_path / "{0..2}.tar"), tmp_path / "cache", **options) as loader,
            make(str(tmp_path / "{0..2}.tar"), tmp_path / "cache", "host", **options) as host,
        ):
            assert all(same(batch, expected) for batch, expected in zip(loader, host, strict=True))
            assert without_decoder(loader.state_dict()) == without_decoder(host.state_dict())
            if not (train and options["num_workers"]):  # in training, workers are ahead of the last step
                assert sorted(loader.skipped) == sorted(host.skipped)
                counts, of_host = loader.stats(), host.stats()
                assert counts.samples_skipped == of_host.samples_skipped
                assert counts.samples_replaced == of_host.samples_replaced
                damaged = counts.samples_replaced if train else counts.samples_skipped
                assert sum(damaged.values()) > 50
            numbers = loader._run.parts.metrics()
            assert numbers["decode.by_rank_share"] > 0.05 < numbers["decode.by_workers_share"]


@pytest.mark.parametrize("most_bytes", [1, 10_000])
def test_images_are_the_same_however_many_samples_are_read_at_a_time(
    shards, tmp_path, monkeypatch, most_bytes
):
    monkeypatch.setattr(loop, "_READ_AHEAD_WITHOUT_DECODING_BYTES", most_bytes)
    with make(shards, tmp_path) as loader, make(shards, tmp_path, "host") as host:
        assert all(same(batch, expected) for batch, expected in zip(loader, host, strict=True))


@pytest.mark.parametrize(
    ("decode", "has_features", "expected"), [("device", False, 1), ("device", True, 7), ("host", False, 7)]
)
def test_samples_are_read_a_few_at_a_time_only_where_nothing_is_decoded(
    shards, tmp_path, monkeypatch, decode, has_features, expected
):
    features = {"means": streamload.Features(Means().eval(), images=True)} if has_features else None
    reads, reset, take = [], ReadMemory.reset, ReadMemory.take

    def counted(self, size_bytes):
        reads[-1] += 1
        return take(self, size_bytes)

    monkeypatch.setattr(loop, "_READ_AHEAD_WITHOUT_DECODING_BYTES", 1)
    monkeypatch.setattr(
        ReadMemory, "reset", lambda self, most_bytes: (reads.append(0), reset(self, most_bytes))
    )
    monkeypatch.setattr(ReadMemory, "take", counted)
    with make(shards, tmp_path, decode, features=features, train=False) as loader:
        next(iter(loader))
    assert max(reads) == expected


def test_what_a_decoder_says_it_refuses_is_decoded_by_workers(shards, tmp_path, monkeypatch):
    def size_of_some(file, most_pixels):
        return "planted" if len(file) % 2 else size_for_device(file, most_pixels)

    monkeypatch.setattr(files, "size_for_device", size_of_some)
    plant(monkeypatch, lambda file: len(file) % 2)  # none comes
    with make(shards, tmp_path) as loader, make(shards, tmp_path, "host") as host:
        assert all(same(batch, expected) for batch, expected in zip(loader, host, strict=True))
        assert loader._run.parts.metrics()["decode.by_rank_share"] == 0


def test_what_no_decoder_takes_although_it_looked_sound_is_an_error(shards, tmp_path, monkeypatch):
    def size_of_any(file, most_pixels):
        return jpeg_size(file, most_pixels) or "no JPEG"

    monkeypatch.setattr(files, "size_for_device", size_of_any)
    with make(shards, tmp_path, train=False) as loader, pytest.raises(DecodeError, match="Please report"):
        list(loader)


@pytest.mark.parametrize("decodes", [("device", "host"), ("host", "device"), ("device", "device")])
def test_a_run_goes_on_with_another_decoder(shards, tmp_path, decodes):
    before, after = decodes
    with make(shards, tmp_path, "host") as loader:
        expected = list(loader)
    with make(shards, tmp_path, before, num_workers=1) as loader:
        iterator = iter(loader)
        assert all(same(next(iterator), batch) for batch in expected[:3])
        state = json.loads(json.dumps(loader.state_dict()))
    with make(shards, tmp_path, after) as loader:
        loader.load_state_dict(state)
        assert all(same(batch, other) for batch, other in zip(loader, expected[3:], strict=True))


@pytest.mark.parametrize("decodes", [("device", "host"), ("host", "device"), ("device", "device")])
def test_another_decoder_is_said(shards, tmp_path, monkeypatch, caplog, decodes):
    before, after = decodes
    plant(monkeypatch, lambda file: False)
    with make(shards, tmp_path, before) as loader:
        next(iter(loader))
        state = loader.state_dict()
    caplog.clear()
    with make(shards, tmp_path, after) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict().get("decoder") == (state.get("decoder") if after == "device" else None)
        next(iter(loader))
    said = [record.message for record in caplog.records if "from here on" in record.message]
    assert len(said) == (before != after)
    assert all("one that fails" in line and HostDecoder().name in line for line in said)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"map_sample": dict, "label_key": None}, "map_sample="),
        ({"prepare": "raw-256"}, "prepare='raw-256' leaves no JPEG.*jpeg-256-q90"),
        ({"patches": streamload.Patches()}, "patches="),
        ({"compile": False, "preprocess": abs}, "compile=False"),
        ({"preprocess": abs}, "can't be compiled"),
        ({"decode": "gpu"}, "decode='gpu'; expected"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_cannot_do_is_refused(shards, tmp_path, options, message):
    tokenizer = None if "map_sample" in options else ids
    with pytest.raises(OptionError, match=message):
        flat.make_loader(shards, tokenizer, **{"decode": "device", **options})


class Means(torch.nn.Module):
    def forward(self, inputs):
        images = inputs["image"] if isinstance(inputs, dict) else inputs
        return images.mean(dim=(2, 3))


@pytest.mark.parametrize("first", ["device", "host"])
@pytest.mark.parametrize(
    "made_by",
    [{"images": True}, {"images": True, "variants": 2}, {"images": False}, {"inputs": "sample"}],
    ids=str,
)
@pytest.mark.sampled(3)
def test_rows_of_images_are_those_of_workers_and_used_by_both(shards, tmp_path, made_by, first):
    options = {"num_workers": 1, "microbatch": 3}

    def batches_and_rows(decode):
        features = {"means": streamload.Features(Means().eval(), **made_by)}
        with make(shards, tmp_path, decode, features=features, **options) as loader:
            pairs = [(batch, features["means"](batch)) for batch in loader]
            return pairs, loader.stats()

    second = {"device": "host", "host": "device"}[first]
    (pairs, counted), (other_pairs, of_other) = batches_and_rows(first), batches_and_rows(second)
    for (batch, rows), (other, other_rows) in zip(pairs, other_pairs, strict=True):
        assert torch.equal(rows, other_rows)
        assert ("image" in batch) == (made_by.get("images") is True)
        if "image" in batch:
            assert torch.equal(batch["image"], other["image"])
    assert counted.feature_rows_computed > 0 == of_other.feature_rows_computed


@pytest.mark.parametrize("prepare", ["raw", "jpeg-48-q90"])
def test_prepared_rows_are_decoded_as_their_form_says(shards, tmp_path, monkeypatch, prepare):
    monkeypatch.setattr(worker_config, "clip_plan", lambda train: clip_plan(train, size=40))
    paths = [shards.replace("{0..2}", str(number)) for number in range(3)]
    for prepared in (paths[:1], paths):
        warm(prepared, cache_dir=tmp_path, cache_size="1GB", prepare=Preparation.parse(prepare))
        with (
            make(shards, tmp_path, prepare=prepare) as loader,
            make(shards, tmp_path, "host", prepare=prepare) as host,
        ):
            assert all(same(batch, expected) for batch, expected in zip(loader, host, strict=True))
            assert loader.stats().samples_unprepared == host.stats().samples_unprepared
            share = loader._run.parts.metrics()["decode.by_workers_share"]
    assert share == 1 if prepare == "raw" else 0 < share < 1  # all are prepared: pixels, or JPEGs


def test_auto_prepares_nothing_where_the_device_decodes(shards, tmp_path, caplog):
    caplog.set_level(logging.INFO, "streamload")
    with make(shards, tmp_path, prepare="auto") as loader, make(shards, tmp_path, "host") as host:
        assert all(same(batch, expected) for batch, expected in zip(loader, host, strict=True))
    assert "prepare: auto chose images as they are: the device decodes them" in caplog.messages


@pytest.mark.parametrize("size", [16, 64, 224])
def test_a_limit_of_memory_holds_for_files(shards, tmp_path, monkeypatch, size):
    """Small images take less than their files, which workers decode then."""
    monkeypatch.setattr(worker_config, "clip_plan", lambda train: clip_plan(train, size=size))
    options = {"num_workers": 1}
    row_bytes = 3 * size * size + 64
    limit = {"image": 2 * 7 * row_bytes}
    with (
        make(shards, tmp_path, memory=limit, **options) as loader,
        make(shards, tmp_path, "host", **options) as host,
    ):
        for batch, expected in zip(loader, host, strict=True):
            assert same(batch, expected)
            assert loader.stats().ready_image_bytes <= 2 * 7 * row_bytes
        share = loader._run.parts.metrics()["decode.by_workers_share"]
        assert share == 1 if size == 16 else 0 < share < 1
    with pytest.raises(OptionError, match=f"give at least {7 * row_bytes}"):
        next(iter(make(shards, tmp_path, memory={"image": 7 * row_bytes - 1}, **options)))


def test_a_device_without_a_decoder_is_an_error(shards, tmp_path):
    with make(shards, tmp_path, device="meta") as loader, pytest.raises(OptionError, match="decode='host'"):
        next(iter(loader))


def test_where_the_rank_decodes_on_the_cpu_it_says_so(shards, tmp_path, caplog):
    with make(shards, tmp_path) as loader:
        next(iter(loader))
    said = [record for record in caplog.records if "without a device" in record.message]
    assert [record.levelno for record in said] == [logging.WARNING]


def test_choices_are_the_same_behind_the_workers():
    rng = random.Random(0)
    for _ in range(200):
        steps = rng.randrange(6)
        choices = rank.Choices(
            rng.choice([None, rank.Box(*(rng.randint(1, 9999) for _ in range(4)))]),
            tuple(rng.random() < 0.5 for _ in range(steps)),
            rng.getrandbits(64),
            rng.randrange(99),
        )
        row = torch.tensor([rank.packed(rng.getrandbits(30), choices)], dtype=torch.int64)
        assert rank.unpacked(row.tolist()[0], steps) == choices


def test_only_a_loader_that_asks_for_it_has_the_extension():
    decoding = streamload.make_loader("unread.tar", images=streamload.Images(decode="device"))
    assert decoding.options.extensions == (DeviceDecoding(),)
    assert streamload.make_loader("unread.tar").options.extensions == ()


def test_the_feed_makes_images_before_it_moves_a_batch():
    feed = feed_for(
        torch.device("cpu"),
        clip_plan(True).statistics,
        make_images=lambda values: {**values, "image": values["x"]},
    )
    levels = torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)
    image = feed.send({"x": levels})()["image"]
    assert image.dtype == torch.float32
    assert image.min() > 1
