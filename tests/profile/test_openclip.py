"""The floor's ids are those of open_clip's tokenizer."""

import random

import numpy as np
import pytest
import simplejpeg

from benchmarks.torchvision_stub import define_torchvision_schemas
from streamload.errors import OptionError
from streamload.profile import floor
from streamload.profile.measures import tokenizer_of


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
    batch = floor.FloorBatch(1, "uint8", tokenizer)
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
