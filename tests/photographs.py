"""Photographs of any size, and what is made of them, for tests that compare pixels."""

import functools

import numpy as np
from PIL import Image

from streamload.batches.assembly import BatchAssembly
from streamload.batches.images import ImageAssembly
from streamload.shards.keys import KeySpec
from streamload.transforms.plan import clip_plan
from streamload.transforms.resize import Place

SIZES = [
    (500, 375),
    (375, 500),
    (640, 480),
    (512, 512),
    (300, 451),
    (256, 900),
    (900, 256),
    (224, 224),
    (150, 100),
]


@functools.cache
def photograph(width, height, which=0):
    """One of five, `which`, as uint8 [height, width, 3]; to be copied before it is written to."""
    from skimage import data
    from sklearn.datasets import load_sample_images

    source = [data.astronaut(), data.chelsea(), data.coffee(), *load_sample_images().images][which]
    return np.array(Image.fromarray(source).resize((width, height), Image.Resampling.LANCZOS))


def transformed(transform, pixels, destination, seed=0):
    """An image by a plan, with what is drawn for it from `seed`, into its place."""
    transform.put(pixels, transform.draw(*pixels.shape[:2], seed))(out=Place.of(destination[None]))


def clip_examples(as_bytes=True, preparation=None):
    """What CLIP is trained on, of `jpg` and `txt` members, with the captions as they are."""
    return BatchAssembly(
        image=KeySpec.parse("jpg").choose,
        text=KeySpec.parse("txt").choose,
        images=ImageAssembly(clip_plan(train=True), as_bytes, preparation),
    )
