"""`streamload version`."""


def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    print(installed("streamload"))
