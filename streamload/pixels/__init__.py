"""Images decoded and transformed on a device instead of in workers: `Images(decode="device")`.

`decoders.py` turns files into pixels, by the device's engine (`engine.py`) or on the CPU, and `headers.py`
says which of them; `resample.py` crops and resizes images of unlike size together, `colour.py` has the colour
steps, and `pipeline.py` runs it all.
"""
