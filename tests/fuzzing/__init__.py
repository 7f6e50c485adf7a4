"""Fuzzing of what reads bytes and names that others wrote: tars, indexes, URL patterns.

Each target is a module with `make(rng)`, which gives a case, and `check(case, rng)`, which raises if one of
its properties does not hold and else says in a word how the case ended. Run by `python -m tests.fuzzing`.
"""
