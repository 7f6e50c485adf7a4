"""Images as patches, each in its own aspect and resolution: timm's NaFlex, `Images(patches=…)`.

`options.py` has the arguments, `grid.py` the patches of an image, `compile.py` and
`plan.py` the transform as data, `execute.py` and `images.py` its patches in a batch's memory.
"""
