"""Where batches go that a framework places."""

import pytest
import torch

from streamload.loader.destination import AUTO, Destination
from streamload.loader.groups import Order


@pytest.mark.parametrize(
    ("given", "expected"), [(AUTO, "meta"), (None, "meta"), (torch.device("cpu"), "cpu")], ids=str
)
def test_the_device_of_a_framework_holds_unless_one_is_named(given, expected):
    destination = Destination(given, Order())
    destination.place("meta")
    assert destination.expected() == torch.device(expected)
