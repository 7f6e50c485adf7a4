"""Shards with hard links, read in every way: each sample has the bytes that `tarfile` extracts."""

import io
import tarfile

import pytest

from streamload.cache.shard import shard_of
from streamload.cache.shard_view import ShardView
from streamload.daemon.warm import warm
from streamload.derived.prepare.preparation import Preparation, prepared_tar
from streamload.features.recipe import entries_of
from streamload.shards.index import IndexReader
from streamload.shards.local import index_local
from streamload.shards.samples import ShardScanner
from streamload.testing.shards import read_oracle, write_shards
from tests.cache.test_verify import damages
from tests.facts.test_shard_facts import assert_true, opened, read_range
from tests.fuzzing.tars import payloads, read_back, scan
from tests.support import tiers
from tests.support.flat import make_loader
from tests.support.tiers import SAMPLES, Filled, flip


def write_linked(directory, counts, **options):
    """Shards as `write_shards` writes them, packed again with hard links to captions and images."""
    paths = write_shards(directory, counts, **options)
    for path in paths:
        samples = read_oracle(path)
        first = samples[0][0]
        with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
            for number, (key, members) in enumerate(samples):
                for extension, payload in members.items():
                    info = tarfile.TarInfo(f"{key}.{extension}")
                    is_linked = extension == "txt" or (extension == "jpg" and number % 3 == 0)
                    if number and (is_linked or (path is paths[-1] and number % 3 == 0)):
                        info.type, info.linkname = tarfile.LNKTYPE, f"{first}.{extension}"
                    else:
                        info.size = len(payload)
                    tar.addfile(info, io.BytesIO(payload) if info.size else None)
    return paths


@pytest.fixture
def filled(tmp_path, monkeypatch):
    monkeypatch.setattr(tiers, "write_shards", write_linked)
    filled = Filled(tmp_path)
    yield filled
    filled.close()


def entries_in(directory):
    with IndexReader(directory) as reader:
        return reader.entries(range(reader.count))


def test_every_sample_comes_from_a_file_and_from_a_server(tmp_path, filled):
    for urls in ([str(path) for path in filled.paths], filled.urls):
        with make_loader(urls, num_workers=0, batch_size=6, train=False, output="dict", with_keys=True,
                         cache_dir=tmp_path / "c") as loader:  # fmt: skip
            found = [pair for batch in loader for pair in zip(batch["__key__"], batch["text"], strict=True)]
            assert not any(loader.stats().samples_skipped.values())
        expected = [
            (key, members["txt"].decode()) for path in filled.paths for key, members in read_oracle(path)
        ]
        assert found == expected


def test_a_takeover_an_index_without_data_and_a_local_index_have_the_same_entries(filled):
    whole = entries_in(filled.shard(0))
    assert all(entry.checksum is not None for entry in whole)
    assert filled.is_whole(0)
    filled.orphan(1)
    assert warm(filled.urls, cache_dir=filled.root, cache_size="1GB").shards_complete == 4
    assert filled.is_whole(1)
    assert entries_in(filled.index_only(0)) == whole
    local = [entry for entries in index_local(filled.paths[0]) for entry in entries]
    assert local == [entry._replace(checksum=None) for entry in whole]


def test_an_orphan_with_a_damaged_header_is_filled_again(filled):
    flip(filled.orphan(1) / "data", 3)
    assert warm(filled.urls, cache_dir=filled.root, cache_size="1GB").shards_complete == 4
    assert filled.is_whole(1)


@pytest.mark.parametrize("place", [1, 3], ids=["some links", "samples of links alone"])
def test_samples_without_data_are_read_from_the_origin(place, filled):
    filled.index_only(place)
    shard = shard_of(filled.urls[place], None)
    view = ShardView(filled.tier, shard, fetch=read_range)
    assert len(view.ranges(range(SAMPLES))) > SAMPLES
    for number, (key, members) in enumerate(read_oracle(filled.paths[place])):
        entry, read = view.read(number)
        assert (entry.key, {ext: bytes(payload) for ext, payload in read.items()}) == (key, members)
    view.close()


@pytest.mark.parametrize("kind", ["published", "index-only"])
def test_facts_are_those_of_the_tar(filled, kind):
    if kind == "index-only":
        filled.index_only(1)
    with opened(filled.tier, filled.urls, fetch=read_range) as cache:
        assert_true(filled, 1, cache)


def test_a_flipped_byte_of_a_target_damages_the_samples_that_link_to_it(filled):
    (entry, *_) = entries_in(filled.shard(0))
    start = next(at for extension, at, _ in entry.members if extension == "txt")
    assert damages(filled.tier) == []
    flip(filled.shard(0) / "data", start)
    (damage,) = damages(filled.tier)
    assert f"and {SAMPLES - 1} more of {SAMPLES}" in damage.cause


@pytest.mark.parametrize("recipe", ["raw", "jpeg-16-q90"])
def test_a_prepared_shard_links_to_prepared_images(filled, recipe):
    data = filled.paths[0].read_bytes()
    made = b"".join(prepared_tar([data], Preparation.parse(recipe), "it"))
    before = scan(data, ShardScanner(read_back=read_back(data)), 512).entries
    after = scan(made, ShardScanner(read_back=read_back(made), prepared=True), 512).entries
    as_known = [(e.key, e.sizes, e.images, e.width, e.height, e.caption_bytes) for e in before]
    assert as_known == [(e.key, e.sizes, e.images, e.width, e.height, e.caption_bytes) for e in after]
    first, linked = payloads(made, after[0]), payloads(made, after[3])
    assert (linked["jpg"], linked["txt"]) == (first["jpg"], first["txt"])
    assert after[3].prepared == after[0].prepared is not None


def test_rows_made_while_a_shard_arrives_leave_samples_with_links_to_the_training(filled):
    data = filled.paths[0].read_bytes()
    samples = [sample for _, sample in entries_of([data], "it", is_prepared=False)]
    assert [sample.key for sample in samples if sample is not None] == [read_oracle(filled.paths[0])[0][0]]
