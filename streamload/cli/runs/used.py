"""`streamload runs used`: in which steps a run used a sample, or a shard."""


def used() -> None:
    """."""
