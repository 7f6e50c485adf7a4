"""The journal of a run, by which any of its batches is made again: an extension, in a room of its own.

A run that has `Order(journal=folder)` appends to one file a rank (`files`): what its shards gave, marks to
seek from, what was decided, and of each step a digest of its samples and its worst rows (`recorder`).
`history` reads that as a tree of attempts, and `walk` computes the order again from a mark on; then an
ordinary loader makes the batch (`loader/past.py`), and a `witness` tells where its rows are from.
"""
