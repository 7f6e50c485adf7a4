"""Columns: what was computed of a shard's samples by one definition, a file each, in `columns/` of a tier.

`column.py` has rows of one size, `unlike.py` rows of several sizes, `columns.py` the columns of a directory.
It knows neither what computes a row nor what proves it, and starts without torch.
"""
