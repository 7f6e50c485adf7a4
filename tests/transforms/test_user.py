"""Users' transforms see Pillow images and global generators of the sample; nobody else notices."""

import io
import random

import numpy as np
import pytest
import torch
from PIL import Image

from streamload.errors import DecodeError
from streamload.transforms.augment import SeededGenerators
from streamload.transforms.plan import UserTransform
from tests.support.photographs import whole_photograph


def jpeg():
    buffer = io.BytesIO()
    Image.fromarray(whole_photograph()[:90, :120]).save(buffer, "JPEG")
    return buffer.getvalue()


def draws(image=None):
    return (random.random(), random.getrandbits(64), float(np.random.rand()), torch.rand(2).tolist())


def states():
    legacy = np.random.get_state()
    return (
        random.getstate(),
        legacy[0],
        legacy[1].tobytes(),
        legacy[2:],
        torch.get_rng_state().numpy().tobytes(),
    )


def result(transform, data, generators, seed):
    return transform(transform.decoded(data), generators, seed)


def test_the_function_gets_the_rgb_image_of_pillow():
    with SeededGenerators() as generators:
        image = result(UserTransform(lambda image: image), memoryview(jpeg()), generators, 1)
    expected = Image.open(io.BytesIO(jpeg())).convert("RGB")
    assert image.mode == "RGB"
    assert image.tobytes() == expected.tobytes()
    assert image.info == expected.info


def test_a_sample_draws_the_same_numbers_whatever_came_before_it():
    transform = UserTransform(draws)
    with SeededGenerators() as generators:
        alone = result(transform, jpeg(), generators, 2**64 - 5)
    draws()
    with SeededGenerators() as generators:
        others = [result(transform, jpeg(), generators, seed) for seed in range(5)]
        behind = result(transform, jpeg(), generators, 2**64 - 5)
    assert behind == alone
    assert len({str(drawn) for drawn in [alone, *others]}) == 6


def test_numpy_and_torch_do_not_draw_the_same_numbers():
    with SeededGenerators() as generators:
        generators.seed(0x1234_5678_9ABC_DEF0)
        legacy, ours = np.random.randint(0, 2**24, 8), torch.randint(0, 2**24, (8,)).numpy()
    assert not set(legacy.tolist()) & set(ours.tolist())


def test_torch_draws_as_if_seeded_with_the_samples_seed():
    seed = 0xFEDC_BA98_7654_3210
    with SeededGenerators() as generators:
        generators.seed(seed)
        drawn = torch.rand(5)
    assert torch.equal(drawn, torch.rand(5, generator=torch.Generator().manual_seed(seed)))


def test_the_generators_go_on_where_they_were():
    draws()
    before = states()
    with SeededGenerators() as generators:
        generators.seed(3)
        draws()
        assert states() != before
    assert states() == before


def test_the_generators_go_on_where_they_were_when_the_function_fails():
    before = states()

    def fails(image):
        draws()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), SeededGenerators() as generators:
        result(UserTransform(fails), jpeg(), generators, 3)
    assert states() == before


def test_an_image_that_cannot_be_decoded_fails_before_the_function_is_called():
    called = []
    with pytest.raises(DecodeError), SeededGenerators() as generators:
        result(UserTransform(called.append), jpeg()[:500], generators, 3)
    assert called == []
