"""A tar becomes the same tar with its images prepared: what stays, what is noted, from where it is given."""

import io
import itertools
import logging
import tarfile
import threading
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import webdataset
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from streamload.cache.fill import Filled, fill
from streamload.cache.shard import prepared_form, shard_of
from streamload.cache.shard_view import ShardView
from streamload.cache.tier import Tier
from streamload.daemon.warm import warm
from streamload.derived.prepare import preparation
from streamload.derived.prepare.preparation import Preparation, growth, prepared_tar
from streamload.errors import OriginStopped, ShardCut, ShardFormatError
from streamload.origins.origin import OriginOptions, Version, open_origin
from streamload.shards.originals import Original
from streamload.shards.samples import ShardScanner, border
from streamload.shards.tar import NOTE
from streamload.testing.faults import Fault
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, read_oracle, write_shards

LARGE = ShardOptions(image_side=(20, 80), extra={"cls": b"7", "npy": bytes(700)})
RAW = Preparation(32)
JPEG = Preparation(32, 90)


def image(side, kind="JPEG"):
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(side).integers(0, 256, (side, side + 9, 3), np.uint8)).save(
        out, kind
    )
    return out.getvalue()


JPG, PNG, SMALL = image(50), image(40, "PNG"), image(10)


def tar_of(members, tar_format=tarfile.GNU_FORMAT, notes=()):
    """Of names and payloads; `notes` are of the members in order, None: none."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format, errors="surrogateescape") as tar:
        for (name, payload), note in itertools.zip_longest(members, notes):
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            info.pax_headers = {} if note is None else {NOTE: note}
            tar.addfile(info, io.BytesIO(payload))
    return out.getvalue()


def members_of(data):
    with tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape") as tar:
        return [(info.name, tar.extractfile(info).read()) for info in tar if info.isreg()]


def prepare(data, recipe=RAW, chunk_bytes=1000):
    chunks = (data[at : at + chunk_bytes] for at in range(0, len(data), chunk_bytes))
    return b"".join(prepared_tar(chunks, recipe, "it"))


def entries_of(data, **options):
    scanner = ShardScanner(**options)
    return scanner.feed(data) + scanner.finish()[0]


def as_known(entry):
    """What a run may choose a sample by."""
    images = list(entry.images.items())
    return entry.number, entry.key, entry.sizes, images, entry.width, entry.height, entry.caption_bytes


@pytest.mark.parametrize("recipe", [RAW, JPEG], ids=str)
def test_keys_order_and_other_members_are_kept(tmp_path, recipe):
    (path,) = write_shards(tmp_path, [30], options=LARGE)
    made = tmp_path / "prepared.tar"
    made.write_bytes(prepare(path.read_bytes(), recipe))
    before, after = read_oracle(path), read_oracle(made)
    assert [key for key, _ in after] == [key for key, _ in before]
    replaced = 0
    for (_, old), (_, new) in zip(before, after, strict=True):
        jpeg = old.pop("jpg")
        stored = recipe.prepare(jpeg)
        assert new.pop(recipe.extension if stored else "jpg") == (stored or jpeg)
        assert new == old
        replaced += stored is not None
    assert replaced > 10


@pytest.mark.parametrize("recipe", [RAW, JPEG], ids=str)
def test_growth_is_what_preparing_does_to_the_first_samples(tmp_path, recipe):
    (path,) = write_shards(tmp_path, [30], options=LARGE)
    data = path.read_bytes()
    stop = border(entries_of(data)[-1])
    whole = growth(data, recipe, 30)
    assert whole.factor * stop == pytest.approx(len(prepare(data, recipe)) - 1024)
    assert whole.sample_bytes * 30 == pytest.approx(stop)
    assert growth(data, recipe, 5) == growth(data[: len(data) // 2], recipe, 5)
    assert growth(data[:1000], recipe, 5) is None
    assert growth(b"", recipe, 5) is None


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset 0.2 closes nothing
def test_webdataset_reads_it(tmp_path):
    (path,) = write_shards(tmp_path, [5], options=ShardOptions(image_side=(40, 80)))
    made = tmp_path / "prepared.tar"
    made.write_bytes(prepare(path.read_bytes()))
    dataset = webdataset.WebDataset(
        f"pipe:cat {made}", shardshuffle=False
    )  # of a path it leaves the file open
    found = list(dataset.decode("rgb8").to_tuple("ppm", "txt"))
    assert len(found) == 5
    for (pixels, text), (_, members) in zip(found, read_oracle(path), strict=True):
        np.testing.assert_array_equal(pixels, RAW.pixels(members["jpg"]))
        assert text == members["txt"].decode()


NAMES = st.sampled_from(
    [
        "jpg",
        "JPG",
        "jpeg",
        "png",
        "webp",
        "ppm",
        "gif",
        "txt",
        "json",
        "a.jpg",
        "a.png",
        "left.ppm",
        "x y.jpg",
        "t\nx.jpg",
    ]
)
KEYS = st.sampled_from(
    ["a", "b", "d/c", "a", "ü", "\udcff", "n" * 200, "d/" * 60 + "e", "/abs", "d/", "__meta__/m"]
)
PAYLOADS = st.sampled_from([JPG, PNG, SMALL, b"", b"no image", JPG[:900], b"P6\n40 40\n255\n" + bytes(4800)])


@settings(max_examples=150)
@given(
    st.lists(st.tuples(KEYS, NAMES, PAYLOADS), max_size=12),
    st.sampled_from([RAW, JPEG]),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    st.sampled_from([1 << 20, 5000, 700]),
)
def test_a_run_knows_the_same_of_its_samples(members, recipe, tar_format, chunk_bytes):
    """Of samples with several images, with strange names, with members that belong to none, of equal keys."""
    data = tar_of([(f"{key}.{extension}", payload) for key, extension, payload in members], tar_format)
    made = prepare(data, recipe, chunk_bytes)
    assert made == prepare(data, recipe)
    compare(data, made, recipe)


def compare(data, made, recipe):
    """A prepared shard has the samples of the one that it was made of, with their images prepared."""
    before, after = entries_of(data), entries_of(made, prepared=True)
    assert [as_known(entry) for entry in after] == [as_known(entry) for entry in before]
    for old, new in zip(before, after, strict=True):
        extensions = [extension for extension, _, _ in old.members]
        assert [extension for extension, _, _ in new.members] == extensions
        for (extension, start, size), (_, at, length) in zip(old.members, new.members, strict=True):
            payload, stored = data[start : start + size], made[at : at + length]
            is_prepared = new.prepared is not None and new.prepared[0] == extension
            assert stored == (recipe.prepare(payload) if is_prepared else payload)
    members_of(made)  # and tarfile reads it


PLANTED = st.sampled_from(
    [None, "", "x", "1 2 3", "1 2 3 jpg", "1 2 3 png", "1 2 3 txt", "99 9 9 ppm", "7 7 7 left.jpg"]
)


@settings(max_examples=150)
@given(
    st.lists(st.tuples(KEYS, NAMES, PAYLOADS, PLANTED), min_size=1, max_size=8),
    st.sampled_from([RAW, JPEG]),
    st.sampled_from([1 << 20, 5000, 700, 100]),
    st.booleans(),
)
@example([("a", "jpg", JPG, None), ("__meta__/m", "jpg", JPG, "")], RAW, 5000, True)
def test_notes_that_a_source_has_already_say_nothing(members, recipe, chunk_bytes, is_let_through):
    named = [(f"{key}.{extension}", payload) for key, extension, payload, _ in members]
    data = tar_of(named, tarfile.PAX_FORMAT, [note for *_, note in members])
    with pytest.MonkeyPatch.context() as patched:
        if is_let_through:  # in the middle of headers, too
            patched.setattr(preparation, "_BUFFER_BYTES", 300)
        compare(data, prepare(data, recipe, chunk_bytes), recipe)


def test_a_source_may_be_a_prepared_shard():
    first = prepare(tar_of([("a.jpg", JPG), ("a.png", PNG), ("b.jpg", SMALL), ("b.txt", b"x")]))
    assert NOTE.encode() in first
    compare(first, prepare(first, JPEG), JPEG)


def test_a_nul_in_a_name_is_kept():
    members = [("a\0b.jpg", JPG), ("a\0b.txt", b"x")]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, payload in members:
            info = tarfile.TarInfo("x")
            info.size, info.pax_headers = len(payload), {"path": name}
            tar.addfile(info, io.BytesIO(payload))
    data = out.getvalue()
    (before,), (after,) = entries_of(data), entries_of(prepare(data), prepared=True)
    assert before.key == "a\0b"
    assert as_known(after) == as_known(before)
    assert after.prepared is not None


@pytest.mark.parametrize(
    ("members", "names"),
    [
        ([("a.png", PNG), ("a.jpg", JPG), ("a.txt", b"")], ["a.png", "a.ppm", "a.txt"]),
        ([("a.jpg", JPG), ("a.ppm", b"mine")], ["a.jpg", "a.ppm"]),
        ([("a.seg.png", PNG)], ["a.seg.ppm"]),
        ([("a.jpg", b"cut")], ["a.jpg"]),
        ([("a.gif", JPG)], ["a.gif"]),
        ([("a.txt", b"")], ["a.txt"]),
        ([("readme", b"part of no sample"), ("a.jpg", JPG), ("last", b"")], ["a.ppm"]),
        ([("readme", b""), ("a.txt", b""), ("a.jpg", JPG)], ["readme", "a.txt", "a.ppm"]),
    ],
    ids=lambda value: str([name for name, *_ in value]),
)
def test_which_image_is_prepared_and_what_it_is_called(members, names):
    assert [name for name, _ in members_of(prepare(tar_of(members)))] == names


def test_a_sample_that_takes_too_much_is_let_through(monkeypatch):
    monkeypatch.setattr(preparation, "_BUFFER_BYTES", 100_000)
    noise = np.random.default_rng(1).bytes(1_500_000)
    large = [("b.jpg", JPG), ("b.bin", noise), ("b.txt", b"it")]
    members = [("a.jpg", JPG), *large, ("c.jpg", JPG), ("loose", noise), ("d.jpg", JPG), ("e.jpg", JPG)]
    data = tar_of(members)
    for chunk_bytes in (1 << 21, 70_000, 513):
        made = prepare(data, chunk_bytes=chunk_bytes)
        before, after = entries_of(data), entries_of(made, prepared=True)
        assert [as_known(entry) for entry in after] == [as_known(entry) for entry in before]
        assert dict(members_of(made)).items() >= dict(large[1:]).items()
        assert after[0].prepared
        assert after[-1].prepared
        if chunk_bytes < 1 << 20:
            assert after[1].prepared is None
    tracemalloc.start()
    for _ in prepared_tar((data[at : at + 700] for at in range(0, len(data), 700)), RAW, "it"):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 700_000


@pytest.mark.parametrize("cut", [0, 100, 700, 5000])
def test_a_tar_that_is_cut_or_none_fails(cut):
    data = tar_of([("a.jpg", JPG), ("b.jpg", JPG)])
    with pytest.raises((ShardCut, ShardFormatError)):
        prepare(data[:cut])


def test_what_is_odd_about_a_tar_is_said(caplog):
    data = tar_of([("a.jpg", JPG)])
    stop = entries_of(data)[0].stop
    with caplog.at_level(logging.WARNING):
        made = prepare(data[: stop + -stop % 512])
    assert [name for name, _ in members_of(made)] == ["a.ppm"]
    assert "no end marker" in caplog.text


def test_notes_of_other_shards_say_nothing():
    """A shard that isn't to be prepared is read as the tar that it is."""
    made = prepare(tar_of([("a.jpg", JPG)]))
    (entry,) = entries_of(made)
    assert list(entry.sizes) == ["ppm"]
    assert entry.prepared is None


@pytest.mark.parametrize(
    "note", ["", "1 2 3", "1 2 3 ", "-1 2 3 jpg", "x 2 3 jpg", "1 2 ³ jpg", f"{10**15} 2 3 jpg"]
)
def test_a_note_that_cannot_be_read_fails(note):
    with pytest.raises(ShardFormatError):
        Original.parse(note)
    assert Original.parse("1 2 3 a b.jpg") == Original("a b.jpg", 1, 2, 3)


class Served:
    """A shard at a server, and its prepared form."""

    def __init__(self, server, tmp_path):
        (self.path,) = write_shards(tmp_path / "data", [40], options=LARGE)
        self.shard = shard_of(f"{server.url}/00000.tar", None)
        self.form = prepared_form(self.shard, RAW.name)
        self.whole = prepare(self.path.read_bytes())
        self.tier = Tier(tmp_path / "tier", 1 << 30)

    def origin(self, stop=None):
        quick = OriginOptions(attempts=2, backoff_seconds=0.01)
        return RAW.derive(open_origin(self.shard.url, None, quick, stop=stop))

    def fill(self, origin, stop=None):
        part = self.tier.claim(self.form.digest)
        return fill(
            part, self.form, lambda: origin, next_use=lambda: 0.0, stop=stop or threading.Event()
        ).result


@pytest.fixture
def served(tmp_path):
    (tmp_path / "data").mkdir()
    with ShardServer(tmp_path / "data") as server:
        served = Served(server, tmp_path)
        served.server = server
        yield served


def test_it_is_given_from_any_byte_under_the_version_of_the_shard(served):
    origin = served.origin()
    version = open_origin(served.shard.url).version()
    assert origin.version() == version
    for start in (0, 1, 511, 512, 100_000, len(served.whole) - 1, len(served.whole)):
        stream = origin.open(start, version)
        assert (b"".join(stream.chunks()), stream.version) == (served.whole[start:], version)
        stream.close()
    assert origin.read(1000, 5000, version) == served.whole[1000:5000]


class Halting:
    """An origin whose streams end by a stop after so many bytes."""

    def __init__(self, origin, stop_bytes):
        self.url, self._origin, self._left = origin.url, origin, stop_bytes

    def open(self, start=0, expected=None):
        stream = self._origin.open(start, expected)
        give = stream.chunks

        def chunks():
            for chunk in give():
                self._left -= len(chunk)
                if self._left < 0:
                    raise OriginStopped("enough")
                yield chunk

        stream.chunks = chunks
        return stream


def test_a_fill_that_was_stopped_is_taken_up(served):
    assert served.fill(Halting(served.origin(), len(served.whole) // 2)) is Filled.STOPPED
    (part,) = served.tier.parts(served.form.digest)
    assert 0 < (part / "data").stat().st_size < len(served.whole)
    assert served.fill(served.origin()) is Filled.PUBLISHED
    assert (served.tier.published(served.form.digest) / "data").read_bytes() == served.whole
    view = ShardView(served.tier, replace(served.shard, prepared=served.form))
    assert (view.count, view.ended, view.was_complete) == (40, True, True)
    assert [as_known(view.reader.entry(number)) for number in range(40)] == [
        as_known(entry) for entry in entries_of(served.path.read_bytes())
    ]
    view.close()
    assert served.tier.counts.snapshot().shards_taken_over == 1


def test_half_a_shard_publishes_nothing(served):
    served.server.misbehave("00000.tar", Fault(body=served.path.read_bytes()[:30_000]))
    assert served.fill(served.origin()) is Filled.GAVE_UP
    assert not served.tier.published(served.form.digest).exists()


def test_a_command_that_fails_at_its_end_publishes_nothing(served):
    url = f"pipe:cat {served.path}; false"
    form = prepared_form(shard_of(url, None), RAW.name)
    part = served.tier.claim(form.digest)
    origin = RAW.derive(open_origin(url, None, OriginOptions(attempts=1)))
    result = fill(part, form, lambda: origin, next_use=lambda: 0.0, stop=threading.Event()).result
    assert result is Filled.GAVE_UP


def test_both_forms_are_needed_alike_and_have_names_of_their_own(served):
    others = [prepared_form(served.shard, name) for name in ("raw-256-x", "raw-256-y")]
    assert len({served.shard.digest, *(form.digest for form in others)}) == 3
    assert {form.digest[:16] for form in others} == {served.shard.digest[:16]}
    assert all(len(form.digest) == 32 for form in others)


def test_warm_prepares_each_shard_once(tmp_path):
    paths = write_shards(tmp_path / "data", [6, 7, 8], options=LARGE)
    with ShardServer(tmp_path / "data") as server:
        urls = f"{server.url}/{{00000..00002}}.tar"
        report = warm(urls, cache_dir=tmp_path / "cache", cache_size="1GB", prepare=JPEG)
        assert (report.shards_complete, report.shards_found_complete, report.failures) == (3, 0, {})
        assert report.bytes_arrived == sum(path.stat().st_size for path in paths)
        report = warm(urls, cache_dir=tmp_path / "cache", cache_size="1GB", prepare=JPEG)
        assert (report.shards_complete, report.shards_found_complete, report.bytes_arrived) == (3, 3, 0)
    found = sorted(path.read_bytes() for path in tmp_path.glob("cache/shards/*/data"))
    assert found == sorted(prepare(path.read_bytes(), JPEG) for path in paths)


def test_warm_says_which_shard_could_not_be_prepared(tmp_path):
    write_shards(tmp_path, [5])
    (tmp_path / "bad.tar").write_bytes(b"<html>")
    urls = [str(tmp_path / "00000.tar"), str(tmp_path / "bad.tar")]
    report = warm(urls, cache_dir=tmp_path / "cache", cache_size="1GB", prepare=RAW)
    ((name, why),) = report.failures.items()
    assert report.shards_complete == 1
    assert name == f"{urls[1]}#{RAW.name}"
    assert "web page" in why


def test_the_version_of_a_prepared_shard_is_that_of_its_origin(served):
    assert served.fill(served.origin()) is Filled.PUBLISHED
    view = ShardView(served.tier, replace(served.shard, prepared=served.form))
    assert view._index.version == open_origin(served.shard.url).version() != Version()
    view.close()
