"""The package as it is imported: quick, without torch, and with the names that it promises."""

import importlib
import subprocess
import sys

import pytest

import streamload


def modules_after(statement):
    script = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


def test_importing_streamload_imports_neither_torch_nor_numpy():
    assert not {"torch", "numpy", "fsspec"} & modules_after("import streamload, streamload.errors")


@pytest.mark.parametrize(
    "module",
    [
        "streamload.cache.tier",
        "streamload.cache.shard_cache",
        "streamload.prefetch.prefetcher",
        "streamload.order.group",
        "streamload.origins.origin",
        "streamload.shards.index",
        "streamload.steering",
        "streamload.options",
        "streamload.topology",
        "streamload.metrics",
    ],
)
def test_rooms_without_torch_do_not_import_it(module):
    assert "torch" not in modules_after(f"import {module}")


def test_public_names_are_sorted_and_all_there():
    assert streamload.__all__ == sorted(streamload.__all__)
    for name in streamload.__all__:
        assert getattr(streamload, name) is not None
        assert name in dir(streamload)


def test_the_top_level_is_what_a_training_needs():
    assert len(streamload.__all__) <= 27


def errors_of(module):
    return [
        value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Exception)
    ]


def test_an_error_can_be_made_again_from_its_message():
    for error in errors_of(streamload.errors):
        assert str(error("a message")) == "a message"


def test_a_name_that_is_not_there_fails():
    with pytest.raises(AttributeError, match="no attribute 'make_laoder'"):
        _ = streamload.make_laoder


def test_the_version_is_the_installed_one():
    assert streamload.__version__ == importlib.import_module("importlib.metadata").version("streamload")
