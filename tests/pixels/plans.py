"""Random plans and images, for tests that compare ways to run them."""

import io
import random

import numpy as np
from PIL import Image

from streamload.transforms.plan import (
    Flip,
    Grey,
    ImagePlan,
    KeepRatio,
    PlannedTransform,
    RandomCrop,
    ShortSide,
    Squash,
)
from tests.support.photographs import photograph

SIDES = [1, 2, 7, 24, 64, 97, 224]


def a_plan(draw):
    """A plan without functions as given."""
    size = draw.choice(SIDES), draw.choice(SIDES)
    kind = draw.choice(["crop", "crop", "short", "ratio", "squash"])
    fit = {
        "crop": RandomCrop(draw.choice([(0.9, 1.0), (0.05, 1.0), (0.01, 0.1)]), (3 / 4, 4 / 3)),
        "short": ShortSide(draw.choice(SIDES)),
        "ratio": KeepRatio(size, draw.choice([0.0, 1.0])),
        "squash": Squash(size),
    }[kind]
    colour = (Flip(draw.choice([0.5, 1.0])), Grey(0.5, "torch"), Grey(0.5, "python"), Grey(1.0, None))
    return ImagePlan(
        size,
        fit,
        by=draw.choice(["bicubic", "bilinear"]),
        fill=(1, 127, 255),
        colour=tuple(step for step in colour if draw.random() < 0.3),
        rounds_down=kind == "squash",
        on_tensors=kind == "squash" and draw.random() < 0.5,
    )


def an_image(draw):
    """uint8[H, W, 3]: noise of black, white and all between, or a photograph."""
    height, width = (int(2 ** draw.uniform(0, 9)) for _ in range(2))
    if draw.random() < 0.3:
        return photograph(width, height, draw.randrange(5)).copy()
    rng = np.random.default_rng(draw.randrange(1 << 30))
    levels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return np.where(rng.random(levels.shape) < 0.5, levels // 128 * 255, levels).astype(np.uint8)


def jpeg(pixels, **options):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", **options)
    return file.getvalue()


def cases(count, seed=0):
    """Plans, each with some images and the choices for them."""
    draw = random.Random(seed)
    for _ in range(count):
        plan = a_plan(draw)
        images = [an_image(draw) for _ in range(draw.randint(1, 6))]
        transform = PlannedTransform(plan)
        yield plan, images, [transform.draw(*image.shape[:2], draw.getrandbits(64)) for image in images]
