"""The fingerprint of open_clip's own transforms and tokenizers, in the environment that has them."""

import pytest

from benchmarks.torchvision_stub import define_torchvision_schemas
from streamload.loader.fingerprint import rows_fingerprint
from streamload.transforms import kernel
from tests.support import flat

define_torchvision_schemas()
open_clip = pytest.importorskip(
    "open_clip", reason="open_clip is not in this environment; `make pytest-openclip` runs these tests"
)


def fingerprint(**options):
    return rows_fingerprint(flat.make_loader("a.tar", **options).options)


def transform(size=224, **augmentations):
    return open_clip.image_transform(
        size, is_train=True, aug_cfg={"scale": (0.5, 1.0), **augmentations}, mean=(0.5,) * 3, std=(0.5,) * 3
    )


def test_open_clips_transforms_are_known_by_what_they_do():
    before = fingerprint(preprocess=transform())
    assert before["preprocess"] == "compiled"
    assert fingerprint(preprocess=transform()) == fingerprint(preprocess=transform(), compile=False) == before
    assert fingerprint(preprocess=transform(192))["preprocess.size"] == "(192, 192)"


@pytest.mark.filterwarnings("ignore:Unused augmentation cfg items")
@pytest.mark.skipif(kernel.why_not() != "", reason=kernel.why_not())
def test_functions_within_a_compiled_transform_count():
    jitter = fingerprint(preprocess=transform(color_jitter=(0.4, 0.4, 0.4, 0.1), color_jitter_prob=0.8))
    assert jitter["preprocess.given"] == "a function"
    same = fingerprint(preprocess=transform(color_jitter=(0.4, 0.4, 0.4, 0.1), color_jitter_prob=0.8))
    assert same == jitter
    other = fingerprint(preprocess=transform(color_jitter=(0.4, 0.4, 0.3, 0.1), color_jitter_prob=0.8))
    assert {name for name in other if other[name] != jitter[name]} == {
        name for name in other if name.startswith("preprocess.given (")
    }


def test_tokenizers_are_told_apart():
    kinds = {
        fingerprint(tokenizer=open_clip.SimpleTokenizer(context_length=length))["tokenizer"]
        for length in (77, 77, 64)
    }
    assert len(kinds) == 2
    drawn = open_clip.SimpleTokenizer(reduction_mask="shuffle")
    assert fingerprint(tokenizer=drawn)["tokenizer"] not in (*kinds, "unknown")
