"""The oracle: what batches, states and cache directories were at one commit, and whether they still are.

`python -m tests.oracle replay` compares the running code with the record (`tests/oracle/__main__.py`). It
uses streamload by its public names alone, so it outlives any rearrangement of the package.
"""
