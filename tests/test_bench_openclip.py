"""The floor's ids are those of open_clip's tokenizer; its own loader is measured where it is installed."""

import random

import numpy as np
import pytest
import simplejpeg

from streamload.bench import floor, measures, peers
from streamload.bench.job import Job, tokenizer_of
from streamload.errors import OptionError
from streamload.testing.shards import write_shards
from streamload.testing.torchvision_stub import define_torchvision_schemas


@pytest.fixture(autouse=True)
def importable():
    define_torchvision_schemas()


def test_plain_captions_get_the_ids_of_the_tokenizer():
    captions = [
        "a wide photo of a cat",
        "stained  tissue, top left",
        "",
        "word " * 90,
        "dog's 12.5 x",
        "a cat",
    ]
    tokenizer = tokenizer_of("ViT-B-32")
    batch = floor.Batch(1, "uint8", tokenizer)
    jpeg = simplejpeg.encode_jpeg(np.zeros((48, 64, 3), np.uint8))
    for caption in captions:
        batch.put(0, jpeg, caption, random.Random(1).random)
        assert batch.ids[0].tolist() == tokenizer([caption])[0].tolist()


def test_a_model_without_a_known_tokenizer_fails(monkeypatch):
    with pytest.raises(OptionError, match="--tokenizer=ViT-Z: open_clip has no such model"):
        tokenizer_of("ViT-Z")
    import open_clip

    monkeypatch.setattr(open_clip, "get_tokenizer", lambda model: str.split)
    with pytest.raises(OptionError, match="expected a model with open_clip's SimpleTokenizer"):
        tokenizer_of("ViT-B-32")


@pytest.mark.parametrize("name", ["open_clip", "webdataset"])
def test_a_peers_loader_gives_all_batches(name, tmp_path):
    row = measures.MEASURES[name](job_of(name, tmp_path, "ViT-B-32"))
    assert row["images"] == 6
    assert row["images_per_second"] > 0
    assert row["cpu_us_per_image"] >= 0


@pytest.mark.parametrize("loader", [peers.open_clip_loader, peers.webdataset_loader])
def test_without_a_tokenizer_no_peer_makes_ids(loader, tmp_path):
    _, texts = next(iter(loader(job_of("", tmp_path, None))))
    assert len(texts) == 2
    assert all(type(text) is str for text in texts)


def job_of(name, tmp_path, tokenizer):
    (path,) = write_shards(tmp_path / "data", [9], seed=61)
    return Job(
        name=name,
        urls=[str(path)],
        paths=[str(path)],
        tier=None,
        directory=str(tmp_path),
        workers=2,  # more than shards
        batch_size=2,
        samples=9,
        size_bytes=path.stat().st_size,
        seed=0,
        tokenizer=tokenizer,
        storage_options=None,
    )
