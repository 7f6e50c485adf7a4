"""Making shards: `ShardWriter` for samples of any origin, and what `streamload pack` does.

sources.py lists a source, tables.py and arrow.py read rows, rows.py makes a sample of a row, making.py writes
the shards. No loader imports this room.
"""
