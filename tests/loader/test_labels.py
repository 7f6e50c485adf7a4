"""Labels, the image beside map_sample=, and batches made by collate=."""

import io
import json
import logging
import random
import tarfile
from itertools import chain

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

import streamload
from streamload.batches.fields import read_label, read_score
from streamload.errors import LabelError, NoValidSamples, OptionError, StateMismatch
from tests.support import flat
from tests.support.photographs import photograph

COUNT = 24
UNREADABLE = {3: b"cat", 7: b"", 11: b"1e3"}
UNLABELLED = {5, 6}


def jpeg(number):
    buffer = io.BytesIO()
    Image.fromarray(photograph(60 + number, 90 - number, which=number % 5)).save(buffer, "JPEG")
    return buffer.getvalue()


def write(path, members):
    with tarfile.open(path, "w") as tar:
        for name, payload in members:
            member = tarfile.TarInfo(name)
            member.size = len(payload)
            tar.addfile(member, io.BytesIO(payload))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Of `jpg`, `cls` and `json`, as ImageNet is mostly packed; the labels are 100, 101, …"""
    directory = tmp_path_factory.mktemp("labelled")
    for shard in range(2):
        members = []
        for number in range(shard * COUNT // 2, (shard + 1) * COUNT // 2):
            said = {"label": str(100 + number), "caption": f"picture {number}"}
            members += [(f"{number:04d}.jpg", jpeg(number)), (f"{number:04d}.cls", b"%d\n" % (100 + number))]
            members += [(f"{number:04d}.json", json.dumps(said).encode())]
        write(directory / f"{shard}.tar", members)
    return f"{directory}/{{0..1}}.tar"


@pytest.fixture(scope="module")
def bad_shard(tmp_path_factory):
    path = tmp_path_factory.mktemp("bad") / "0.tar"
    members = []
    for number in range(COUNT):
        members.append((f"{number:04d}.jpg", jpeg(number)))
        if number not in UNLABELLED:
            members.append((f"{number:04d}.cls", UNREADABLE.get(number, b"%d" % number)))
    write(path, members)
    return str(path)


def make(shards, tmp_path, **options):
    options = {"batch_size": 8, "num_workers": 0, "train": False, "cache_dir": tmp_path, **options}
    return flat.make_loader(shards, **options)


def batches(shards, tmp_path, **options):
    with make(shards, tmp_path, **options) as loader:
        return list(loader)


def numbers(captions):
    """A tokenizer of one word, the last."""
    return torch.tensor([[int(caption.split()[-1])] for caption in captions])


def test_labels_stand_in_place_of_captions_or_behind_them(shards, tmp_path):
    first, *_ = batches(shards, tmp_path, text_key=None, label_key="cls")
    images, labels = first
    assert images.shape == (8, 3, 224, 224)
    assert (labels.tolist(), labels.dtype) == (list(range(100, 108)), torch.int64)
    (images_too, texts, as_before), *_ = batches(
        shards, tmp_path, text_key="json:caption", label_key="json:label"
    )
    assert texts == [f"picture {number}" for number in range(8)]
    assert_close([images_too, as_before], [images, labels], rtol=0, atol=0)
    (alone,), *_ = batches(shards, tmp_path, text_key=None)
    assert_close(alone, images, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"output": "dict", "text_key": None}, ["image", "label"]),
        ({"output": "dict", "text_key": "json:caption"}, ["image", "text", "label"]),
        ({"output": "hf", "text_key": None}, ["pixel_values", "labels"]),
        (
            {"output": "hf", "text_key": "json:caption", "tokenizer": numbers},
            ["pixel_values", "input_ids", "labels"],
        ),
    ],
)
def test_dicts_have_the_names_of_what_was_asked_for(options, names, shards, tmp_path):
    options = {"label_key": "txt;cls", "with_keys": True, "num_workers": 1, **options}
    batch, *_ = batches(shards, tmp_path, **options)
    assert list(batch) == [*names, "__key__", "__url__"]
    assert batch[names[-1]].tolist() == [100 + int(key) for key in batch["__key__"]]


def test_samples_without_a_label_are_missing_and_unreadable_labels_a_cause_of_their_own(bad_shard, tmp_path):
    options = {"text_key": None, "label_key": "cls", "with_keys": True, "max_bad_samples": None}
    with make(bad_shard, tmp_path, **options) as loader:
        labels = torch.cat([labels for _, labels, _ in loader]).tolist()
        skipped = loader.stats().samples_skipped
    assert labels == [n for n in range(COUNT) if n not in UNREADABLE and n not in UNLABELLED]
    assert {cause: count for cause, count in skipped.items() if count} == {"missing": 2, "label": 3}
    assert [sample.key for sample in loader.skipped] == [f"{number:04d}" for number in UNREADABLE]
    assert "label is b'cat'; expected a whole number" in loader.skipped[0].message


@pytest.mark.parametrize(
    ("data", "field", "label"),
    [
        (b"7", None, 7),
        (memoryview(b" -12\r\n"), None, -12),
        (b"9223372036854775807", None, 2**63 - 1),
        (b'{"label": 7}', "label", 7),
        (b'{"label": "007"}', "label", 7),
        (b"7.0", None, 7),
        (b'{"label": 7.0}', "label", 7),
        (b'{"label": "-7.00"}', "label", -7),
    ],
)
def test_a_label_is_a_whole_number(data, field, label):
    assert read_label(data, field) == label


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (data, None)
        for data in (b"", b"7 8", b"7.5", b"7.05", b"1_0", b"\xd9\xa7", b"9223372036854775808", b"0x1")
    ]
    + [
        (json.dumps({"label": value}).encode(), "label")
        for value in (None, True, 7.5, 1e300, [7], "a", "\ud800")
    ]
    + [(b'{"label": 18446744073709551616}', "label"), (b'{"other": 7}', "label")]
    + [(data, "label") for data in (b"[7]", b"7", b"\xff")],
)
def test_anything_else_is_no_label(data, field):
    with pytest.raises(LabelError):
        read_label(data, field)


@pytest.mark.parametrize(
    ("data", "field", "score"),
    [
        (b"0.25\n", None, 0.25),
        (memoryview(b"7"), None, 7.0),
        (b'{"s": -1e3}', "s", -1e3),
        (b'{"s": "0.5"}', "s", 0.5),
    ],
)
def test_a_score_is_a_finite_number(data, field, score):
    assert read_score(data, field) == score


@pytest.mark.parametrize("value", ["NaN", "1e999", "true", "null", "[1]", '"x"', '"inf"'])
def test_anything_else_is_no_score(value):
    with pytest.raises(LabelError, match="finite number"):
        read_score(b'{"s": %s}' % value.encode(), "s")


@pytest.mark.parametrize("workers", [0, 2])
def test_labels_are_floats_where_that_is_asked_for(workers, tmp_path):
    scores = [0.5 * number for number in range(8)]
    members = [[(f"{n}.jpg", jpeg(n)), (f"{n}.cls", str(score).encode())] for n, score in enumerate(scores)]
    write(tmp_path / "0.tar", chain(*members))
    options = {"text_key": None, "label_key": "cls", "label_type": "float", "num_workers": workers}
    [(_, labels)] = batches(str(tmp_path / "0.tar"), tmp_path, **options)
    assert (labels.dtype, labels.tolist()) == (torch.float32, scores)


def test_where_no_sample_has_a_caption_the_error_says_how_to_do_without(shards, tmp_path):
    with pytest.raises(NoValidSamples, match="text_key \\(None: there are no captions\\)"):
        batches(shards, tmp_path, label_key="cls")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"label_key": 7}, "label_key=7"),
        ({"text_key": None, "tokenizer": numbers}, "tokenizer= can't be combined"),
        ({"output": "hf"}, "text_key=None"),
        ({"map_sample": dict, "label_key": "cls"}, "label_key= can't be combined"),
        ({"collate": dict}, "collate= makes batches of the examples of map_sample="),
        ({"map_sample": dict, "collate": {}}, "collate is a dict"),
        ({"collate_fn": dict}, "collate="),
    ],
)
def test_arguments_that_have_nothing_to_do_with_each_other_are_refused(options, said, shards, tmp_path):
    with pytest.raises(OptionError, match=said):
        make(shards, tmp_path, **options)


def test_a_state_knows_by_what_samples_are_chosen(shards, tmp_path):
    options = {"train": True, "text_key": None, "label_key": "cls", "batch_size": 4, "num_batches": 4}
    with make(shards, tmp_path, **options) as loader:
        batches = iter(loader)
        next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = [labels.tolist() for _, labels in batches]
    with make(shards, tmp_path, **options) as loader:
        loader.load_state_dict(state)
        assert [labels.tolist() for _, labels in loader] == rest
    for other in ({"label_key": "json:label"}, {"label_key": None}):
        loader = make(shards, tmp_path, **{**options, **other})
        with loader, pytest.raises(StateMismatch, match="label_key"):
            loader.load_state_dict(state)


def labelled(sample):
    return {"image": sample["image"], "label": int(sample["cls"])}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("compiled", [True, False])
def test_map_sample_has_the_image_that_preprocess_makes(workers, compiled, shards, tmp_path):
    def small(image):
        return torch.from_numpy(np.array(image.resize((20, 16)))).permute(2, 0, 1)

    preprocess = processor() if compiled else small
    options = {"preprocess": preprocess, "num_workers": workers}
    expected = batches(shards, tmp_path, text_key=None, label_key="cls", **options)
    found = batches(shards, tmp_path, map_sample=labelled, **options)
    for batch, (images, labels) in zip(found, expected, strict=True):
        assert_close([batch["image"], batch["label"]], [images, labels], rtol=0, atol=0)


@pytest.fixture
def some_without_images(tmp_path):
    members = []
    for number in range(12):
        members += [(f"{number:04d}.jpg", jpeg(number))] if number % 3 else []
        members += [(f"{number:04d}.json", json.dumps({"number": number}).encode())]
    write(tmp_path / "some.tar", members)
    return str(tmp_path / "some.tar")


def with_or_without(sample):
    return {"number": json.loads(sample["json"])["number"], "image": sample.get("image")}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("compiled", [True, False])
def test_samples_without_an_image_come_without_it(workers, compiled, some_without_images, tmp_path):
    preprocess = processor() if compiled else (lambda image: torch.from_numpy(np.array(image.resize((8, 8)))))
    options = {
        "preprocess": preprocess,
        "map_sample": with_or_without,
        "num_workers": workers,
        "batch_size": 5,
    }
    with make(some_without_images, tmp_path, collate=lambda rows: {"rows": rows}, **options) as loader:
        rows = [row for batch in loader for row in batch["rows"]]
        assert not any(loader.stats().samples_skipped.values())
    assert [row["number"] for row in rows] == list(range(12))
    assert [row["image"] is None for row in rows] == [number % 3 == 0 for number in range(12)]
    assert [batch["number"].tolist() for batch in batches(some_without_images, tmp_path, **options)] == [
        list(range(5)), list(range(5, 10)), [10, 11]
    ]  # fmt: skip


def test_no_image_is_decoded_with_image_key_none(some_without_images, tmp_path):
    options = {"preprocess": processor(), "map_sample": with_or_without, "image_key": None}
    first, _ = batches(some_without_images, tmp_path, **options)
    assert first["image"] == [None] * 8


def processor():
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, "ViTImageProcessorPil", None) or transformers.ViTImageProcessor
    return kind(size={"height": 32, "width": 40})


def test_the_image_may_be_changed_kept_within_the_batch_or_left_away(shards, tmp_path):
    kept = []

    def several(sample):
        image = sample["image"]
        kept.append(image)
        before = kept[max(0, len(kept) - 2)] if len(kept) % 8 != 1 else image
        return {"mean": image.mean(), "flipped": image.flip(-1), "parts": [image, before], "as": image}

    options = {"preprocess": processor(), "num_workers": 1}
    plain = batches(shards, tmp_path, text_key=None, **options)
    with make(shards, tmp_path, map_sample=several, **options) as loader:
        epochs = chain(loader, loader, loader)  # so that memory is used again
        for batch, (images,) in zip(epochs, plain * 3, strict=True):
            assert_close(batch["as"], images, rtol=0, atol=0)
            assert_close(batch["flipped"], images.flip(-1), rtol=0, atol=0)
            assert_close(batch["mean"], images.mean((1, 2, 3)))
            for place, (image, before) in enumerate(batch["parts"]):
                assert_close([image, before], [images[place], images[max(0, place - 1)]], rtol=0, atol=0)
            del batch, image, before


def test_the_image_lies_in_the_batch_and_is_not_copied(shards, tmp_path):
    places = []

    def seen(sample):
        places.append(sample["image"].data_ptr())
        return {"image": sample["image"]}

    [batch] = batches(shards, tmp_path, map_sample=seen, preprocess=processor(), batch_size=COUNT)
    assert places == [image.data_ptr() for image in batch["image"]]


def test_levels_are_given_to_map_sample_where_they_are_asked_for(shards, tmp_path):
    options = {"preprocess": processor(), "dtype": "uint8"}
    expected = batches(shards, tmp_path, text_key=None, label_key="cls", **options)
    for device in (None, "cpu"):
        found = batches(shards, tmp_path, map_sample=labelled, device=device, **options)
        for batch, (images, _) in zip(found, expected, strict=True):
            assert batch["image"].dtype == torch.uint8
            assert_close(batch["image"], images, rtol=0, atol=0)


def test_a_function_that_fails_leaves_the_batch_as_it_was(bad_shard, tmp_path):
    def strict(sample):
        if sample["__key__"] in ("0002", "0009"):
            raise streamload.errors.SampleError("not this one")
        return {"image": sample["image"], "key": int(sample["__key__"])}

    options = {"preprocess": processor(), "batch_size": 6}
    plain = torch.cat([images for (images,) in batches(bad_shard, tmp_path, text_key=None, **options)])
    found = batches(bad_shard, tmp_path, map_sample=strict, **options)
    keys = [number for number in range(COUNT) if number not in (2, 9)]
    assert torch.cat([batch["key"] for batch in found]).tolist() == keys
    assert_close(torch.cat([batch["image"] for batch in found]), plain[keys], rtol=0, atol=0)


def test_what_is_drawn_for_the_crop_is_not_drawn_again_by_the_functions_behind_it(shards, tmp_path):
    def draw(image):
        return torch.tensor([random.random(), torch.rand(()).item()], dtype=torch.float64)

    def drawn(sample):
        return {"first": sample["image"], "then": draw(None)}

    def collate(examples):
        values = {name: torch.stack([example[name] for example in examples]) for name in ("first", "then")}
        return {**values, "last": draw(None).expand(len(examples), 2)}

    options = {"preprocess": draw, "map_sample": drawn, "collate": collate, "train": True, "batch_size": 6}
    runs = [batches(shards, tmp_path, num_workers=workers, **options) for workers in (0, 2)]
    for one, other in zip(*runs, strict=True):
        assert_close(one, other, rtol=0, atol=0)
    shown = torch.cat([batch[name].flatten() for batch in runs[0] for name in ("first", "then")])
    assert len(set(shown.tolist())) == 4 * COUNT
    assert len({batch["last"][0, 0].item() for batch in runs[0]} - set(shown.tolist())) == len(runs[0])


def test_collate_makes_the_batch_in_the_worker_and_its_tensors_travel_in_slots(shards, tmp_path):
    def mixed(examples):
        images = torch.stack([example["image"] for example in examples])
        return {
            "images": images.lerp(images.flip(0), 0.5),
            "labels": [example["label"] for example in examples],
        }

    options = {"map_sample": labelled, "preprocess": processor(), "num_workers": 1, "with_keys": True}
    plain = batches(shards, tmp_path, **options)
    with make(shards, tmp_path, collate=mixed, **options) as loader:
        found = [{**batch, "images": batch["images"].clone()} for batch in chain(loader, loader)]
        assert loader.stats().fresh_tensors == 0
    for batch, expected in zip(found, plain * 2, strict=True):
        images = expected["image"]
        assert_close(batch["images"], images.lerp(images.flip(0), 0.5), rtol=0, atol=0)
        assert batch["labels"] == expected["label"].tolist()
        assert batch["__key__"] == expected["__key__"]


@pytest.mark.parametrize("with_keys", [False, True])
def test_collate_may_give_a_tuple(with_keys, shards, tmp_path):
    def pair(examples):
        return torch.stack([example["image"] for example in examples]), [e["label"] for e in examples]

    options = {"map_sample": labelled, "preprocess": processor(), "num_workers": 1}
    (images, labels, *extra), *_ = batches(shards, tmp_path, collate=pair, with_keys=with_keys, **options)
    assert (images.shape, labels) == ((8, 3, 32, 40), list(range(100, 108)))
    assert [list(each) for each in extra] == [["__key__", "__url__"]] * with_keys


def test_a_collate_that_gives_neither_is_an_error_that_names_the_samples(shards, tmp_path, caplog):
    options = {"map_sample": labelled, "preprocess": processor(), "collate": len}
    with (
        caplog.at_level(logging.ERROR, "streamload"),
        pytest.raises(TypeError, match="returned a int") as raised,
    ):
        batches(shards, tmp_path, **options)
    assert "'0000', '0001'" in "".join(getattr(raised.value, "__notes__", [caplog.text]))
