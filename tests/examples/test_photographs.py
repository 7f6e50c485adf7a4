"""Shards of photographs: decodable, distinct, the same for a seed, and of ImageNet's sizes."""

import hashlib
import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from examples import photograph_shards
from examples.photograph_shards import PHOTOGRAPHS, Photograph, picture, write_photograph_shards
from streamload.errors import OptionError


def read(paths):
    """name → bytes of all members, in order."""
    found = []
    for path in paths:
        with tarfile.open(path) as tar:
            found += [(member.name, tar.extractfile(member).read()) for member in tar]
    return found


def test_shards_hold_every_sample_once_and_sizes_json_counts_them(tmp_path):
    paths = write_photograph_shards(tmp_path, samples=25, samples_per_shard=10)
    assert [path.name for path in paths] == ["00000.tar", "00001.tar", "00002.tar"]
    assert json.loads((tmp_path / "sizes.json").read_text()) == {
        "00000.tar": 10,
        "00001.tar": 10,
        "00002.tar": 5,
    }
    names = [name for name, _ in read(paths)]
    assert names == [f"{number:08d}.{extension}" for number in range(25) for extension in ("jpg", "txt")]


def test_the_bytes_depend_on_the_seed_alone(tmp_path):
    one = read(write_photograph_shards(tmp_path / "one", 12, 5, seed=3, threads=1))
    other = read(write_photograph_shards(tmp_path / "other", 12, 12, seed=3, threads=4))
    assert one == other
    assert one != read(write_photograph_shards(tmp_path / "seed", 12, 5, seed=4))


def test_pictures_are_distinct_photographs_of_varied_size():
    pictures = [picture(number) for number in range(150)]
    assert len({hashlib.sha256(made.jpeg).digest() for made in pictures}) == 150
    sizes = set()
    for made in pictures:
        with Image.open(io.BytesIO(made.jpeg)) as image:
            image.load()
            assert image.format == "JPEG"
            sizes.add(image.size)
    assert len(sizes) > 100
    assert 90_000 < np.mean([len(made.jpeg) for made in pictures]) < 130_000


def test_captions_name_what_is_seen_in_few_words():
    captions = [picture(number).caption for number in range(400)]
    assert all(any(photograph.words in caption for photograph in PHOTOGRAPHS) for caption in captions)
    assert all(any(photograph.words in caption for caption in captions) for photograph in PHOTOGRAPHS)
    words = {word for caption in captions for word in caption.replace(",", "").split()}
    assert len(words) < 50


@pytest.mark.parametrize(("samples", "samples_per_shard"), [(0, 1), (1, 0)])
def test_no_samples_fails(tmp_path, samples, samples_per_shard):
    with pytest.raises(OptionError, match="at least 1"):
        write_photograph_shards(tmp_path, samples, samples_per_shard)


def test_a_missing_wheel_fails_saying_what_to_install(monkeypatch):
    monkeypatch.setattr(photograph_shards, "PHOTOGRAPHS", (Photograph("nothing", "no-such-wheel", "x.png"),))
    with pytest.raises(OptionError, match=r"pip install 'streamload\[demo\]'"):
        picture(0)
