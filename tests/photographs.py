"""Photographs of any size, for tests that compare pixels."""

import functools

import numpy as np
from PIL import Image

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
    transform(pixels, destination[None], transform.draw(*pixels.shape[:2], seed))
