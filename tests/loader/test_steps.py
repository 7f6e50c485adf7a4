"""Loaders whose steps have several sizes: the table's rows and lengths on all ranks, resumed at each step."""

import json

import pytest

from streamload import Batches, Images, Order, Patches, Source
from streamload.cache.part import reserved_bytes
from streamload.errors import OptionError, StateMismatch
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, write_shards
from tests.support import flat

STEPS = [(16, 8), (64, 2), (16, 8), (64, 2), (64, 1)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    directory = tmp_path_factory.mktemp("stepped")
    write_shards(directory, [20] * 4, seed=2)
    return directory


def loader_of(shards, cache, workers=2, rank=0, ranks=1, **options):
    patches = Patches(16, seq_lens=(16, 64), steps=options.pop("steps", STEPS))
    return flat.make_loader(
        **{
            "urls": str(shards),
            "images": Images(patches=patches),
            "num_workers": workers,
            "cache_dir": cache,
            "seed": 4,
            "output": "dict",
            "with_keys": True,
            "order": Order(rank=rank, world_size=ranks),
            **options,
        }
    )


def shape_of(batch):
    image = batch["image"]
    assert image["patches"].shape[:2] == (len(batch["__key__"]), image["seq_len"])
    return image["seq_len"], len(batch["__key__"])


@pytest.mark.parametrize("workers", [0, 3])
def test_each_epoch_has_the_steps_of_the_table(shards, tmp_path, workers):
    with loader_of(shards, tmp_path, workers, num_batches=7) as loader:
        assert (loader.num_batches, loader.num_samples, len(loader), loader.batch_size) == (7, 31, 7, 8)
        epochs = [[shape_of(batch) for batch in loader] for _ in range(3)]
    for epoch, steps in enumerate(epochs):
        assert sorted(steps[:5]) == sorted(STEPS)
        assert steps[5:] == steps[:2]
        assert steps == loader.options.listed_steps.of_epoch(epoch)
    assert len({tuple(steps) for steps in epochs}) > 1


def test_by_default_an_epoch_has_each_step_once(shards, tmp_path):
    with loader_of(shards, tmp_path) as loader:
        assert (loader.num_batches, loader.num_samples) == (5, 21)
        assert len(list(loader)) == 5


def test_a_run_continues_exactly_after_each_step_on_any_workers(shards, tmp_path):
    def run(loader, epochs):
        for _ in range(epochs):
            for batch in loader:
                yield shape_of(batch), batch["__key__"], batch["image"]["patches"].sum().item()

    with loader_of(shards, tmp_path / "whole", num_batches=6) as loader:
        whole = [(each, json.loads(json.dumps(loader.state_dict()))) for each in run(loader, 2)]
    assert len(whole) == 12
    for cut in range(11):
        with loader_of(shards, tmp_path / "again", (cut + 1) % 3, num_batches=6) as loader:
            loader.load_state_dict(whole[cut][1])
            assert list(run(loader, 2 if cut < 5 else 1)) == [each for each, _ in whole[cut + 1 :]]


@pytest.mark.parametrize(("ranks", "groups"), [(2, 1), (2, 2), (4, 2)])
def test_all_ranks_have_equal_steps_and_share_the_samples(shards, tmp_path, ranks, groups):
    loaders = [
        loader_of(
            shards,
            tmp_path,
            workers=0,
            rank=rank,
            num_batches=10,
            order=Order(rank=rank, world_size=ranks, groups=groups),
        )
        for rank in range(ranks)
    ]
    seen = []
    for batches in zip(*loaders, strict=True):
        assert len({shape_of(batch) for batch in batches}) == 1
        keys = [key for batch in batches for key in batch["__key__"]]
        seen += keys
        assert len(set(seen)) == len(seen) or len(seen) > 80  # a pass has each sample once
    assert len(set(seen)) == 80
    for loader in loaders:
        loader.close()


def test_a_state_goes_on_with_another_number_of_ranks_at_the_next_step(shards, tmp_path):
    with loader_of(shards, tmp_path, workers=0) as loader:
        batches = iter(loader)
        first = [next(batches) for _ in range(2)]
        state = loader.state_dict()
    taken = sum(len(batch["__key__"]) for batch in first)
    loaders = [loader_of(shards, tmp_path, workers=0, rank=rank, ranks=2) for rank in (0, 1)]
    for loader in loaders:
        loader.load_state_dict(state)
    rest = list(zip(*loaders, strict=True))
    expected = loaders[0].options.listed_steps.remaining(0, taken, 2)
    assert [shape_of(batch) for batch, _ in rest] == [shape_of(batch) for _, batch in rest] == expected
    before = {key for batch in first for key in batch["__key__"]}
    assert not before & {key for pair in rest for batch in pair for key in batch["__key__"]}
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("steps", [[*STEPS, (16, 4)], [(16, 8), (64, 2), (64, 2), (16, 8), (64, 1)], None])
def test_other_steps_only_between_two_epochs(shards, tmp_path, steps):
    with loader_of(shards, tmp_path, workers=0) as loader:
        batches = iter(loader)
        next(batches)
        within = loader.state_dict()
        assert len(list(batches)) == 4
        between = loader.state_dict()
    with loader_of(shards, tmp_path, workers=0, steps=[list(step) for step in STEPS]) as loader:
        loader.load_state_dict(within)
        assert len(list(loader)) == 4
    options = {"num_samples": 40, "batch_size": 8} if steps is None else {}
    with loader_of(shards, tmp_path, workers=0, steps=steps, **options) as loader:
        with pytest.raises(StateMismatch, match=r"the middle of epoch 0, which has the steps of another"):
            loader.load_state_dict(within)
        loader.load_state_dict(between)
        assert len(list(loader)) == len(steps or range(5))
        state = loader.state_dict()
    with loader_of(shards, tmp_path, workers=0) as loader:
        loader.load_state_dict(state)
        assert sorted(map(shape_of, loader)) == sorted(STEPS)


def test_mixed_sources_keep_their_shares_and_take_new_weights_at_a_step(shards, tmp_path):
    sources = [
        Source([str(path) for path in sorted(shards.glob(f"0000[{places}].tar"))], weight=weight, name=name)
        for name, places, weight in (("a", "01", 3), ("b", "23", 1))
    ]
    with loader_of(shards, tmp_path, workers=0, urls=sources, num_batches=20) as loader:
        by_source = {"a": 0, "b": 0}
        batches = iter(loader)
        for number in range(20):
            if number == 10:
                half = dict(by_source)
                assert loader.set_weights({"a": 0}) == 10
            for url in next(batches)["__url__"]:
                by_source["a" if url[-5] in "01" else "b"] += 1
    assert abs(half["a"] - 3 * half["b"]) <= 4
    assert by_source["a"] == half["a"]


def test_where_the_cache_has_no_room_ranges_are_read_up_to_the_last_step(tmp_path):
    options = ShardOptions(padding_bytes=(18_000, 20_000))
    paths = write_shards(tmp_path / "data", [20] * 6, seed=5, options=options)
    room = int(2.1 * reserved_bytes(max(path.stat().st_size for path in paths)))
    with ShardServer(tmp_path / "data") as server:
        urls = f"{server.url}/{{00000..00005}}.tar"
        order = Order(rank=0, world_size=1, lanes=6)
        with loader_of(
            None, tmp_path / "cache", urls=urls, order=order, shuffle=40, cache_size=room
        ) as loader:
            shapes = [shape_of(batch) for _ in range(3) for batch in loader]
            assert sum(request.sent for request in server.log) > 1.2 * sum(p.stat().st_size for p in paths)
    table = loader.options.listed_steps
    assert shapes == [step for epoch in range(3) for step in table.of_epoch(epoch)]


def test_steps_of_any_size_are_cut_into_microbatches(shards, tmp_path):
    with loader_of(shards, tmp_path, workers=0, batches=Batches(microbatch=3)) as loader:
        for batch in loader:
            _, rows = shape_of(batch)
            parts = list(loader.microbatches(batch))
            assert len(parts) == -(-rows // 3)
            assert [key for part in parts for key in part["__key__"]] == batch["__key__"]
            assert sum(part.fraction for part in parts) == pytest.approx(1)


def test_an_evaluation_has_the_largest_length_and_the_batch_size(shards, tmp_path):
    options = {"train": False, "batch_size": 30, "order": Order()}
    with loader_of(shards, tmp_path, **options) as loader:
        assert [shape_of(batch) for batch in loader] == [(64, 30), (64, 30), (64, 20)]


@pytest.mark.parametrize(
    ("patches", "message"),
    [
        ({"steps": []}, r"steps=\[\]; expected at least one \(seq_len, rows\)"),
        ({"steps": [(17, 2)]}, r"each seq_len one of the seq_lens \(16, 64\)"),
        ({"steps": [(16, 0)]}, "steps=0; expected a whole number of at least 1"),
        ({"steps": [(16, 1)], "seq_len_probs": (1, 1)}, "seq_len_probs= or steps="),
    ],
)
def test_steps_that_cannot_be_are_refused(patches, message):
    with pytest.raises(OptionError, match=message):
        Patches(16, seq_lens=(16, 64), **patches)


@pytest.mark.parametrize("options", [{"num_samples": 100}, {"order": Order(endless=True)}])
def test_another_length_of_an_epoch_is_refused(shards, options):
    with pytest.raises(OptionError, match=r"Patches\(steps=…\) says what an epoch has"):
        loader_of(shards, None, **options)


def test_bucketing_is_for_steps_of_one_size(shards):
    patches = Patches(16, seq_lens=(16, 64), steps=STEPS, max_ratio=1.0)
    with pytest.raises(OptionError, match=r"not for those of Patches\(steps=…\)"):
        loader_of(shards, None, images=Images(patches=patches), batches=Batches(bucketing="step"))


def test_groups_that_do_not_divide_the_ranks_are_refused(shards, tmp_path):
    with (
        loader_of(shards, tmp_path, order=Order(rank=0, world_size=2, groups=4)) as loader,
        pytest.raises(OptionError, match="4 don't divide 2"),
    ):
        next(iter(loader))
