"""Images of several sizes, in cells of one size, `Images(sizes=…)`: aspect-ratio buckets.

`sizes.py` has the sizes and which is the best one of an image, `cells.py` the rows of a block put together by
size, `images.py` the transform to a size, `rank.py` the extension.
"""

from streamload.aspects.sizes import image_sizes

__all__ = ["image_sizes"]
