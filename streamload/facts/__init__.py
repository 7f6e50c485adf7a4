"""Facts of samples, `Shards(facts=…)`: numbers that are computed once and stored beside a shard's index.

`recipes.py` has the columns and what options say of them, `tables.py` values from tables of the user's;
`shard_facts.py` gives a process the values of a shard, `column_file.py` stores them in the format of
shards/facts.py; `repeats.py` repeats samples by them (`repeat=`).
"""
