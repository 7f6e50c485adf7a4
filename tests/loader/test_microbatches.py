"""Parts of a step's batch: consecutive rows, cut to their longest; a step by parts has the same gradients."""

import itertools
import json

import numpy as np
import pytest
import torch
import torch.multiprocessing

from streamload import Batches, Images, Order, Patches
from streamload.batching.microbatches import Microbatches, cut_of
from streamload.batching.padding import RowWidths
from streamload.errors import OptionError
from streamload.extension import Yielded
from streamload.testing.shards import write_shards
from tests.batching.test_padding import words
from tests.batching.test_part_size import LIMIT, Device
from tests.support import flat


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    directory = tmp_path_factory.mktemp("captioned")
    write_shards(directory, [32, 32], seed=3)
    return f"{directory}/{{00000..00001}}.tar"


def make(shards, place, tokenizer=words, **options):
    options = {"batch_size": 16, "num_workers": 0, "output": "dict", "cache_dir": place, **options}
    return flat.make_loader(shards, tokenizer, **options)


def longest(microbatch=5, **options):
    return Batches(text_padding="longest", text_pad_multiple=1, microbatch=microbatch, **options)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("output", ["tuple", "dict", "hf"])
@pytest.mark.parametrize("with_keys", [False, True])
def test_parts_are_consecutive_rows_in_the_form_of_the_batch(shards, tmp_path, workers, output, with_keys):
    options = {"num_workers": workers, "output": output, "with_keys": with_keys, "batches": longest()}
    with make(shards, tmp_path, **options) as loader:
        for batch in loader:
            parts = list(loader.microbatches(batch))
            assert [part.rows for part in parts] == [slice(0, 5), slice(5, 10), slice(10, 15), slice(15, 16)]
            assert [part.fraction for part in parts] == [5 / 16] * 3 + [1 / 16]
            assert [part.is_last for part in parts] == [False] * 3 + [True]
            for part in parts:
                assert len(part) == len(batch)
                if output == "tuple":
                    assert isinstance(part, tuple)
                    (images, ids), (whole, all_ids) = part[:2], batch[:2]
                    keys, all_keys = (part[2], batch[2]) if with_keys else ({}, {})
                else:
                    assert list(part) == list(batch)
                    names = ("image", "text") if output == "dict" else ("pixel_values", "input_ids")
                    (images, ids), (whole, all_ids) = ([of[name] for name in names] for of in (part, batch))
                    keys, all_keys = (part, batch) if with_keys else ({}, {})
                    mask = part["text_valid" if output == "dict" else "attention_mask"]
                    assert mask.tolist() == (ids == 7).tolist()
                assert images.data_ptr() == whole[part.rows].data_ptr()  # views
                assert ids.data_ptr() == all_ids[part.rows].data_ptr()
                assert ids.tolist() == all_ids[part.rows, : ids.shape[1]].tolist()
                assert not all_ids[part.rows, ids.shape[1] :].any()
                assert ids.shape[1] == min(8 * -(-int((ids == 7).sum(1).max()) // 8), all_ids.shape[1])
                if with_keys:
                    assert keys["__key__"] == all_keys["__key__"][part.rows]


def test_without_microbatch_a_batch_is_one_part(shards, tmp_path):
    with make(shards, tmp_path) as loader:
        batch = next(iter(loader))
        (part,) = loader.microbatches(batch)
        assert (part.rows, part.fraction, part.is_last) == (slice(0, 16), 1.0, True)
        assert part["text"].tolist() == batch["text"].tolist()


def test_the_gradients_of_a_step_by_parts_are_those_of_the_whole_batch(shards, tmp_path):
    """With captions padded to the batch's longest, the part's longest, or the tokenizer's length."""
    torch.manual_seed(5)
    embedding = torch.nn.Embedding(8, 6, padding_idx=0, dtype=torch.float64)
    tower = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 224 * 224, 6, dtype=torch.float64))
    parameters = [*embedding.parameters(), *tower.parameters()]

    def gradients(loader, batch, parts):
        for parameter in parameters:
            parameter.grad = None
        for part in parts:
            texts = embedding(part["text"]).sum(1) / (part["text"] != 0).sum(1, keepdim=True)
            loss = (tower(part["image"].double()) * texts).sum(1).tanh().mean()
            (loss * getattr(part, "fraction", 1.0)).backward()
        return [parameter.grad.clone() for parameter in parameters]

    found = []
    for batches in (Batches(), Batches(microbatch=3), longest(3), longest(16)):
        with make(shards, tmp_path, batches=batches, num_batches=1) as loader:
            (batch,) = loader
            found.append(gradients(loader, batch, loader.microbatches(batch)))
    found.append(gradients(None, batch, [batch]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("workers", [0, 2])
def test_parts_of_patches_are_cut_to_their_longest(shards, tmp_path, workers):
    images = Images(patches=Patches(8, (40, 64)))
    options = {"num_workers": workers, "images": images, "batches": Batches(microbatch=4)}
    with make(shards, tmp_path, **options) as loader:
        for batch in loader:
            whole = batch["image"]
            for part in loader.microbatches(batch):
                image, rows = part["image"], part.rows
                length = image["seq_len"]
                most = int(whole["patch_valid"][rows].sum(1).max())
                assert length == min(-(-most // 8) * 8, whole["seq_len"])
                for name in ("patches", "patch_coord", "patch_valid"):
                    assert torch.equal(image[name], whole[name][rows, :length])
                assert part["text"].shape == (4, 20)


def test_with_buckets_the_parts_of_all_ranks_have_the_same_shapes(shards, tmp_path):
    batches = longest(2, bucketing="step")
    ranks = [
        make(shards, tmp_path, batches=batches, batch_size=8, order=Order(rank=rank, world_size=2, groups=1))
        for rank in range(2)
    ]
    steps = 0
    for both in zip(*ranks, strict=True):
        parts = [list(loader.microbatches(batch)) for loader, batch in zip(ranks, both, strict=True)]
        first, second = ([part["text"].shape for part in own] for own in parts)
        assert first == second
        assert len(first) == 4
        steps += 1
    for loader in ranks:
        loader.close()
    assert steps == 4


def test_given_bounds_decide_the_widths_of_parts():
    bounds = np.array([[3, 40], [12, 8], [1, 1], [30, 64]], np.int32)
    widths = RowWidths(bounds, (32, 64), (True, True), ("text", "text_valid"), False)
    yielded = Yielded(0, 4, (), widths, "abcd")
    patches = {"patches": torch.zeros(4, 64, 12), "patch_valid": torch.ones(4, 64), "seq_len": 64}
    batch = {"image": patches, "text": torch.arange(128).view(4, 32), "text_valid": torch.ones(4, 32)}
    shapes = [
        (
            part["text"].shape,
            part["text_valid"].shape,
            part["image"]["patches"].shape,
            part["image"]["seq_len"],
        )
        for part in Microbatches(batch, yielded, 2)
    ]
    assert shapes == [((2, 16), (2, 16), (2, 40, 12), 40), ((2, 32), (2, 32), (2, 64, 12), 64)]
    assert patches["seq_len"] == 64


def test_captions_padded_on_the_left_are_cut_there():
    widths = RowWidths(np.array([[3, 0], [9, 0]], np.int32), (32, 0), (True, False), ("[0]",), True)
    batch = (torch.arange(64).view(2, 32),)
    parts = Microbatches(batch, Yielded(0, 2, ("[0]",), widths, "ab"), 1)
    assert [part[0].tolist() for part in parts] == [[list(range(24, 32))], [list(range(48, 64))]]


def test_there_are_few_shapes():
    full = (256, 1024)
    rows = np.array(list(itertools.product(range(1, 257, 5), range(1, 1025, 7))), np.int32)
    for varies in ((True, True), (True, False), (False, True)):
        bounds = np.where(varies, rows, full).astype(np.int32)
        yielded = Yielded(0, len(rows), (), RowWidths(bounds, full, varies, (), False), ())
        cuts = [cut_of(yielded, row, row + 1) for row in range(len(rows))]
        assert len({(cut.tokens, cut.patches) for cut in cuts}) <= 32
        assert all(
            cut.tokens >= row[0] and cut.patches >= row[1] for cut, row in zip(cuts, bounds, strict=True)
        )


def test_what_is_not_a_batch_of_the_loader_or_has_other_rows_is_refused(shards, tmp_path):
    with make(shards, tmp_path, batches=Batches(microbatch=4)) as loader:
        batch = next(iter(loader))
        with pytest.raises(OptionError, match=r"as this loader yielded it.*give make_loader device="):
            loader.microbatches({name: value.clone() for name, value in batch.items()})
        batch["packed"] = torch.zeros(1, 99)
        with pytest.raises(OptionError, match=r"packed \[1, 99\] hasn't 16"):
            next(iter(loader.microbatches(batch)))
        del batch["packed"]
        assert len(list(loader.microbatches({**batch}))) == 4  # its tensors, in a dict of one's own


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
@pytest.mark.parametrize("by", ["parts", "loader"])
def test_an_out_of_memory_error_names_step_shape_and_the_largest_samples(shards, tmp_path, error, by):
    def train(loader):
        for step, batch in enumerate(loader):
            if by == "loader":
                use(loader.microbatches(batch), step)
            else:
                with loader.microbatches(batch) as parts:
                    use(parts, step)

    def use(parts, step):
        for part in parts:
            if step == 1 and part.rows.start == 5:
                keys.extend(part["__key__"])
                widths.append(part["text"].shape[1])
                sizes.extend((part["text"] == 7).sum(1).tolist())
                raise error

    keys, sizes, widths = [], [], []
    error.__notes__ = []
    loader = make(shards, tmp_path, batches=longest(), with_keys=True)
    with pytest.raises(type(error)) as raised, loader:
        train(loader)
    dearest = [keys[place] for place in sorted(range(5), key=lambda place: -sizes[place])[:4]]
    assert raised.value is error
    assert error.__notes__ == [
        f"in step 1, a microbatch of rows 5–9 of 16, {widths[0]} tokens; its largest samples: "
        + ", ".join(map(repr, dearest))
    ]


@pytest.mark.parametrize("in_part", [True, False])
def test_another_error_and_one_between_steps_have_no_note(shards, tmp_path, in_part):
    def train(loader):
        for part in loader.microbatches(next(iter(loader))):
            if in_part and part.is_last:
                raise ValueError("of the training")
        raise MemoryError

    loader = make(shards, tmp_path, batches=longest())
    with pytest.raises((ValueError, MemoryError)) as raised, loader:
        train(loader)
    assert isinstance(raised.value, ValueError) is in_part
    assert not getattr(raised.value, "__notes__", [])


@pytest.mark.parametrize("workers", [0, 2])
def test_auto_finds_the_rows_that_a_device_has_room_for(shards, tmp_path, monkeypatch, workers):
    """On a simulated device, with the loader's own batches."""
    simulated = Device(LIMIT // 50, 0, LIMIT / 40, LIMIT / 80, 0.0, 0.01, 1)
    monkeypatch.setattr("streamload.batching.microbatches.memory_of", lambda device: simulated)
    batches = Batches(microbatch="auto")
    sizes = []
    with make(shards, tmp_path, batches=batches, batch_size=48, num_batches=8, num_workers=workers) as loader:
        for batch in loader:
            sizes.append([])
            for part in loader.microbatches(batch):
                rows = len(part["text"])
                simulated.compute(rows, 1.0, is_first=part.rows.start == 0)
                sizes[-1].append(rows)
            simulated.update()
    assert all(sum(step) == 48 for step in sizes)
    assert sizes[0][:4] == [1, 2, 4, 8]
    assert len({max(step) for step in sizes[6:]}) == 1
    assert 20 <= max(sizes[2]) <= 26


def auto_of_two_ranks(rank, shards, place):
    """Rank 1's device has less room, and from step 20 on still less."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place}/rendezvous", rank=rank, world_size=2
    )
    row = LIMIT / (40 if rank == 0 else 12)
    simulated = Device(LIMIT // 50, 0, row, row / 2, 0.0, 0.01, seed=rank)
    options = {"batches": longest("auto"), "order": Order(rank=rank, world_size=2), "num_batches": 70}
    sizes = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("streamload.batching.microbatches.memory_of", lambda device: simulated)
        with make(shards, place / f"cache-{rank}", batch_size=12, **options) as loader:
            for step, batch in enumerate(loader):
                sizes.append([])
                for part in loader.microbatches(batch):
                    rows, width = part["text"].shape
                    if rank == 1 and step >= 20:
                        simulated.linear = row * 1.1
                    simulated.compute(rows, width / 20, is_first=part.rows.start == 0)
                    sizes[-1].append(rows)
                simulated.update()
    (place / f"{rank}.json").write_text(json.dumps(sizes))
    torch.distributed.destroy_process_group()


def test_auto_has_the_same_parts_on_all_ranks_those_of_the_one_with_the_least_room(shards, tmp_path):
    """Ranks that agreed at different times would wait for each other; one that decided alone would differ."""
    torch.multiprocessing.start_processes(
        auto_of_two_ranks, (shards, tmp_path), nprocs=2, start_method="fork"
    )
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert all(sum(step) == 12 for step in first)
    assert 1 < max(map(max, first)) < 12  # rank 0 would have room for whole steps


def test_auto_without_a_device_whose_memory_can_be_read(shards, tmp_path):
    with pytest.raises(OptionError, match="of which torch tells the memory, as of CUDA's, and device=None"):
        make(shards, tmp_path, batches=Batches(microbatch="auto"))


@pytest.mark.parametrize("bucketing", ["step", 64])
@pytest.mark.parametrize("with_patches", [False, True])
def test_no_part_has_more_than_max_tokens_and_all_ranks_have_the_same_parts(
    shards, tmp_path, bucketing, with_patches
):
    images = Images(patches=Patches(8, (16, 40), max_ratio=0.5)) if with_patches else Images()
    most = 130
    batches = Batches(text_padding="longest", text_pad_multiple=4, bucketing=bucketing, max_tokens=most)
    options = {"batches": batches, "images": images, "batch_size": 12}
    first = make(shards, tmp_path, order=Order(rank=0, world_size=2, groups=1), **options)
    second = make(shards, tmp_path, order=Order(rank=1, world_size=2, groups=1), **options)
    rows = 0
    with first, second:
        for batch, other in zip(first, second, strict=True):
            parts = [list(loader.microbatches(own)) for loader, own in ((first, batch), (second, other))]
            shapes = [
                [
                    (part["text"].shape, part["image"]["patches"].shape if with_patches else None)
                    for part in own
                ]
                for own in parts
            ]
            assert shapes[0] == shapes[1]
            assert [part.rows for part in parts[0]] == [part.rows for part in parts[1]]
            for (count, ids), patches in shapes[0]:
                assert count * (ids + (patches[1] if patches else 0)) <= most
            rows += sum(len(part["text"]) for part in parts[0])
            assert len(parts[0]) > 1
    assert rows % 12 == 0
    assert rows


def test_max_tokens_that_cannot_hold(shards, tmp_path):
    with pytest.raises(OptionError, match=r"max_tokens= needs cost=, .* or bucketing="):
        Batches(text_padding="longest", max_tokens=100)
    small = Batches(text_padding="longest", bucketing="step", max_tokens=3)
    with pytest.raises(OptionError, match="max_tokens=3; expected at least"):
        list(make(shards, tmp_path, batches=small))
    several = Batches(text_padding="longest", bucketing="step", max_tokens=1000)
    with pytest.raises(OptionError, match="max_tokens= needs ranks that agree"):
        list(make(shards, tmp_path, batches=several, order=Order(rank=0, world_size=2, groups=2)))
