"""Images decoded and transformed on a device instead of in workers: `Images(decode="device")`.

`segments.py` says which files a worker leaves to the device, `files.py` puts them into batches, and `rank.py`
makes images of these. `decoders.py` turns files into pixels, by the device's engine (`engine.py`) or on the
CPU; `resample.py` crops and resizes images of unlike size together, `colour.py` has the colour steps, and
`pipeline.py` runs it all. `auto.py` chooses where for `Images(decode="auto")`.
"""
