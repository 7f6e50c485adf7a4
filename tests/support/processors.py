"""transformers' image processors held to their plans on photographs, for tests in both environments."""

import torch
from PIL import Image

from streamload.transforms.plan import PlannedTransform
from streamload.transforms.processors import plan_of
from streamload.transforms.resize import Place
from tests.support.photographs import SIZES, photograph

NAMES = ("Bit", "Blip", "ChineseCLIP", "CLIP", "DeiT", "Siglip", "ViT")
SIZED = {
    "Bit": {"size": {"shortest_edge": 256}},
    "ChineseCLIP": {"size": {"height": 227, "width": 250}},
    "CLIP": {"size": {"shortest_edge": 99}, "crop_size": {"height": 96, "width": 61}},
}
"""What isn't as by default: so that there is something to cut off on both sides, oddly and evenly."""


def assert_exact(processor, photographs):
    """Compare the plan of a processor with itself on so many photographs."""
    plan = plan_of(processor)
    transform = PlannedTransform(plan, as_bytes=False)
    for number in range(photographs):
        pixels = photograph(*SIZES[number % len(SIZES)], which=number % 5).copy()
        expected = processor(Image.fromarray(pixels), return_tensors="pt")["pixel_values"][0]
        ours = torch.empty(3, *plan.size, dtype=expected.dtype)
        transform.put(pixels, transform.draw(*pixels.shape[:2], 0))(
            out=Place.of(ours[None] if plan.statistics is None else ours)
        )
        assert torch.equal(ours, expected), number
    return plan
