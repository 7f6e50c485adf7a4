"""Photographs of any size, and what is made of them, for tests that compare pixels."""

import functools
from importlib.metadata import distribution

import numpy as np
from PIL import Image

from streamload.batches.assembly import BatchAssembly
from streamload.batches.images import ImageAssembly, Resizing
from streamload.cache.selection import KeySpec
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


WHEELS = [
    *(("scikit-image", f"skimage/data/{name}.png") for name in ("astronaut", "chelsea", "coffee")),
    *(("scikit-learn", f"sklearn/datasets/images/{name}.jpg") for name in ("china", "flower")),
]


@functools.cache
def photograph(width, height, which=0):
    """One of five, `which`, as uint8 [height, width, 3]; to be copied before it is written to."""
    source = Image.fromarray(whole_photograph(*WHEELS[which]))
    return np.array(source.resize((width, height), Image.Resampling.LANCZOS))


def whole_photograph(wheel="scikit-image", path="skimage/data/astronaut.png"):
    """One from a wheel, as it is there: uint8 [height, width, 3].

    The wheels' own functions import SciPy: seconds, and 80 MB in each process that the tests fork.
    """
    with Image.open(distribution(wheel).locate_file(path)) as image:
        return np.array(image)


def transformed(transform, pixels, destination, seed=0):
    """An image by a plan, with what is drawn for it from `seed`, into its place."""
    transform.put(pixels, transform.draw(*pixels.shape[:2], seed))(out=Place.of(destination[None]))


def clip_examples(as_bytes=True, preparation=None):
    """What CLIP is trained on, of `jpg` and `txt` members, with the captions as they are."""
    resizing = None if preparation is None else Resizing(preparation.name, preparation.pixels)
    return BatchAssembly(
        image=KeySpec.parse("jpg").choose,
        text=KeySpec.parse("txt").choose,
        images=ImageAssembly(clip_plan(train=True), as_bytes, resizing),
    )
