"""A deterministic simulation of the shipped modules: a seed says who runs, who dies, what the origin does.

    engine.py    tasks of which one runs at a time, the simulated clock, kills and stops
    threads.py   Thread, Condition and Event for simulated tasks
    system.py    the calls of the operating system as points where another task may go on
    disk.py      what the files take, and who made them
    world.py     shards, their origin with its faults, and what readers have to get
    job.py       one process that fills and reads, from the shipped modules
    story.py     one seed: jobs, faults, and what must hold during and after it
    planted.py   bugs to be found
    campaign.py  many seeds, in several processes

`python -m tests.simulation --seeds 0:10000 --jobs 2` from the root of the repository; see CONTRIBUTING.md.
"""
