"""The transform of a CLIP training as one step (part of I): pixels → an image's place in a uint8 batch.

What open_clip's own default does on Pillow images, up to the normalising (normalise.py).
"""

from __future__ import annotations

import torch

from streamload.transforms.augment import CLIP_RATIO, CLIP_SCALE, RandomBox
from streamload.transforms.decode import Pixels
from streamload.transforms.resize import resize_and_crop_centre, resize_box


class DefaultTransform:
    """In training, a random box of most of the image, resized; in evaluation, the middle of it, resized.

    About 600 µs for 500×375 → 224 px. Deterministic in (pixels, seed); one thread at a time.

    Args:
        train: whether to draw boxes.
        size: height and width of the result.
        scale: least and largest share of the area that a box has.
        ratio: least and largest width / height of a box.
    """

    def __init__(
        self,
        train: bool,
        size: int = 224,
        scale: tuple[float, float] = CLIP_SCALE,
        ratio: tuple[float, float] = CLIP_RATIO,
    ) -> None:
        self.train = train
        self.size = size
        self._boxes = RandomBox(scale, ratio)

    def __call__(self, pixels: Pixels, destination: torch.Tensor, seed: int = 0) -> None:
        """Transform an image into its place.

        Args:
            pixels: uint8[H, W, 3], writable.
            destination: uint8[3, size, size]; channels last saves 90 µs.
            seed: uint64 of the sample and pass. torchvision draws the same boxes with torch seeded by it.
        """
        if self.train:
            height, width = pixels.shape[:2]
            box = self._boxes.draw(height, width, seed)
            image = resize_box(pixels, box, self.size, self.size)
        else:
            image = resize_and_crop_centre(pixels, self.size)
        destination.copy_(image)
