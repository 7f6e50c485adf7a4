"""Values of samples become values of a batch in memory that the caller gives."""

import numpy as np
import pytest
import torch

from streamload.batches.collate import collate


class Memory:
    """Gives memory and remembers it."""

    def __init__(self):
        self.given = []

    def __call__(self, shape, dtype):
        self.given.append(torch.full(tuple(shape), 1, dtype=dtype))
        return self.given[-1]


def joined(*values, memory=None):
    return collate([{"x": value} for value in values], memory or Memory())["x"]


def test_tensors_of_one_shape_are_stacked_in_the_given_memory():
    memory = Memory()
    batch = joined(torch.arange(6).view(2, 3), torch.arange(6, 12).view(2, 3), memory=memory)
    assert batch.tolist() == torch.arange(12).view(2, 2, 3).tolist()
    assert batch.data_ptr() == memory.given[0].data_ptr()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.bool, torch.float64])
def test_tensors_keep_their_dtype_and_any_strides(dtype):
    values = [torch.arange(12).view(3, 4).t().to(dtype), torch.zeros(4, 3, dtype=dtype)]
    batch = joined(*values)
    assert batch.dtype == dtype
    assert torch.equal(batch, torch.stack(values))


def test_tensors_with_gradients_are_stacked_without():
    assert not joined(torch.ones(2, requires_grad=True), torch.ones(2)).requires_grad


def test_tensors_of_several_shapes_or_dtypes_are_a_list():
    values = [torch.zeros(2), torch.zeros(3)]
    assert joined(*values) == values
    assert isinstance(joined(torch.zeros(2), torch.zeros(2, dtype=torch.int64)), list)
    assert isinstance(joined(torch.zeros(2), None), list)


def test_arrays_of_one_shape_are_stacked_whatever_their_strides():
    values = [np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::-1], np.ones((2, 3), np.float32)]
    memory = Memory()
    batch = joined(*values, memory=memory)
    assert batch.dtype == torch.float32
    np.testing.assert_array_equal(batch.numpy(), np.stack(values))
    assert batch.data_ptr() == memory.given[0].data_ptr()


@pytest.mark.parametrize("value", [np.array("a"), np.array([object()]), np.zeros(2, ">f4"), np.str_("a")])
def test_arrays_that_no_tensor_can_hold_are_a_list(value):
    assert isinstance(joined(value, value), list)


def test_arrays_of_several_shapes_or_dtypes_are_a_list():
    assert isinstance(joined(np.zeros(2), np.zeros(3)), list)
    assert isinstance(joined(np.zeros(2, np.int64), np.full(2, 0.5, np.float32)), list)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2, 2**62], torch.int64),
        ([1.5, 2.5], torch.float64),
        ([1, 2.5], torch.float64),
        ([True, False], torch.bool),
        ([np.float32(1.5), np.float32(2)], torch.float32),
        ([np.int64(1), np.int64(2)], torch.int64),
    ],
)
def test_numbers_become_a_tensor(values, dtype):
    batch = joined(*values)
    assert batch.dtype == dtype
    assert batch.tolist() == values


@pytest.mark.parametrize(
    "values",
    [
        ["a", "b"],
        [b"a", b"b"],
        [None, None],
        [{"a": 1}, {"a": 2}],
        [(1, 2), (3, 4)],
        [1, "a"],
        [1, None],
        [True, 2],
        [2**70, 1],
    ],
)
def test_all_else_is_a_list(values):
    assert joined(*values) == values


def test_each_key_is_joined_on_its_own():
    batch = collate([{"id": 1, "text": "a"}, {"text": "b", "id": 2}], Memory())
    assert batch["id"].tolist() == [1, 2]
    assert batch["text"] == ["a", "b"]


def test_samples_with_different_keys_fail():
    with pytest.raises(ValueError, match=r"keys \['a', 'b'\], another one \['a'\]"):
        collate([{"a": 1}, {"a": 1, "b": 2}], Memory())
