"""A cached module returns what the module as given returns, and computes each row once."""

import collections
import copy
import dataclasses
import datetime
import importlib
import math
import pickle
import threading
import uuid
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn

import streamload
from streamload import CacheLevel, cache_info, cache_module
from streamload.derived.calls import module_call
from streamload.derived.proof.code import Describer
from streamload.derived.proof.module_proof import proof_of
from streamload.derived.store import row_store
from streamload.errors import FeatureMismatch, FeatureNotCacheable, OptionError
from streamload.integrations import torch_module_cache

HALF = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool]


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    """Each test has rows of its own, and leaves nothing open."""
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "cache"))
    yield
    row_store.close_stores()
    torch_module_cache.enable_global_cache()
    torch_module_cache.disable_inference_mode()


class Plain(nn.Module):
    """The module as given: counts the rows that it computes."""

    def __init__(self, width=3, dtype=torch.float32):
        super(Plain, self).__init__()  # noqa: UP008 — the old form has to work
        self.linear = nn.Linear(10, width, dtype=dtype)

    def forward(self, x):
        return self.linear(x)


Cached = cache_module()(Plain)


class Out(NamedTuple):
    pooled: torch.Tensor
    tokens: torch.Tensor


@dataclasses.dataclass
class Record:
    pooled: torch.Tensor
    rest: dict
    nothing: None = None


def seeded(cls, *args, **kwargs):
    torch.manual_seed(0)
    return cls(*args, **kwargs)


def computed(module):
    return cache_info(module).rows_computed


def keys(count, start=0):
    return [f"key {at}" for at in range(start, start + count)]


X = torch.randn(8, 10, generator=torch.Generator().manual_seed(1))


def test_rows_equal_those_of_the_module_as_given():
    with torch.no_grad():
        expected = seeded(Plain)(X)
    module = seeded(Cached)
    first, second = module(X, cache_key=keys(8)), module(X, cache_key=keys(8))
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    assert computed(module) == 8
    assert not second.requires_grad
    assert second.dtype == expected.dtype


def test_only_missing_rows_are_computed():
    module = seeded(Cached)
    first = module(X[:4], cache_key=keys(4))
    seen = []
    module.linear.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    module = seeded(Cached)  # without the hook, which counts as another module
    both = module(X, cache_key=keys(8))
    assert torch.equal(both[:4], first)
    assert computed(module) == 8
    assert cache_info(module).hits == 4


@settings(max_examples=30, deadline=None)
@given(calls=st.lists(st.lists(st.integers(0, 12), max_size=9), max_size=6))
def test_any_mix_of_hits_misses_and_repeated_keys_is_in_order(calls):
    inputs = torch.arange(13.0)[:, None] * torch.ones(10)
    module = seeded(Cached, width=4)
    computed_rows = {}
    for some in calls:
        made = module(inputs[some] if some else inputs[:0], cache_key=some)
        assert made.shape == (len(some), 4)
        for key, row in zip(some, made, strict=True):
            assert torch.equal(row, computed_rows.setdefault(key, row))


def test_the_calls_of_the_readme_run_unchanged(tmp_path):
    from streamload.integrations.torch_module_cache import (
        CacheLevel,
        cache_module,
        clear_disk_caches,
        clear_memory_caches,
        enable_inference_mode,
    )

    @cache_module()
    class MyModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(10, 3)

        def forward(self, x):
            return self.linear(x)

    x = torch.randn(1, 10)
    model = MyModel()
    output1 = model(x, cache_key="key1")
    output2 = model(x, cache_key="key1")
    assert torch.equal(output1, output2)
    cache_keys = [f"key_{i}" for i in range(10)]
    assert model(torch.randn(10, 10), cache_key=cache_keys).shape == (10, 3)

    @cache_module()
    class FeatureExtractor(nn.Module):
        def __init__(self):
            super().__init__()
            self.vit = nn.Sequential(nn.Linear(10, 768), nn.Dropout(0.5))
            self.vit.eval()

        def forward(self, x):
            with torch.no_grad():
                features = self.vit(x)
            return features  # noqa: RET504 — as it stands there

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.feature_extractor = FeatureExtractor()
            self.classifier = nn.Linear(768, 10)

        def forward(self, x, cache_key=None):
            features = self.feature_extractor(x, cache_key=cache_key)
            return self.classifier(features)

    classifier = Classifier()
    loss = classifier(torch.randn(4, 10), cache_key=["a", "b", "c", "d"]).sum()
    loss.backward()
    assert classifier.classifier.weight.grad is not None

    @cache_module(cache_name="feature_processor")
    class FeatureProcessor(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(10, 256)

        def forward(self, x):
            return self.linear(x)

    class CachedDataset(torch.utils.data.Dataset):
        def __init__(self):
            self.processor = FeatureProcessor()
            self.data, self.labels = torch.randn(4, 10), torch.arange(4)

        def __len__(self):
            return 4

        def __getitem__(self, idx):
            raw_data = self.data[idx]
            processed_data = self.processor(raw_data, cache_key=f"sample_{idx}")
            return processed_data, self.labels[idx]

    dataset = CachedDataset()
    for _ in range(2):
        assert [row.shape for row, _ in torch.utils.data.DataLoader(dataset, batch_size=2)] == [(2, 256)] * 2

    @cache_module(
        cache_path=str(tmp_path / "cache2"),
        cache_name="my_model_cache",
        cache_level=CacheLevel.MEMORY,
        safe_load=False,
        max_memory_cache_size_mb=None,
    )
    class Other(MyModel):
        pass

    other = Other()
    assert torch.equal(other(x, cache_key="k"), other(x, cache_key="k"))
    clear_memory_caches()
    clear_memory_caches(cache_name="my_model_cache")
    clear_disk_caches(cache_name="my_model_cache")
    assert torch_module_cache.list_cache_entries(str(tmp_path / "cache2")) == {}
    assert len(torch_module_cache.list_cache_entries()["feature_processor"]) == 4
    clear_disk_caches()
    assert torch_module_cache.list_cache_entries() == {}
    enable_inference_mode()
    model = MyModel()
    assert torch.equal(model(x), model.linear(x))


def test_the_article_s_parameters_work():
    @cache_module(cache_level=CacheLevel.MEMORY, max_memory_cache_size_mb=64)
    class Processor(Plain):
        pass

    processor = seeded(Processor)
    assert torch.equal(processor(X[0], cache_key=1), processor(X[0], cache_key=1))
    assert computed(processor) == 1


def test_without_parentheses_and_around_a_class_that_has_a_name():
    @cache_module
    class Bare(nn.Module):
        def forward(self, x):
            return x + 1

    assert torch.equal(Bare()(X, cache_key=keys(8)), X + 1)
    assert type(seeded(Plain)(X)) is torch.Tensor
    assert not hasattr(Plain, "_streamload_options")
    with pytest.raises(TypeError, match="cache_key"):
        Plain()(X, cache_key="a")


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_dtype_comes_back_as_it_was(dtype):
    class To(nn.Module):
        def forward(self, x):
            return (x * 100).to(dtype), x[:, :0].to(dtype), x[:, 0].to(dtype)

    module = cache_module()(To)()
    given = X.to(torch.complex64) if dtype.is_complex else X
    first, second = module(given, cache_key=keys(8)), module(given, cache_key=keys(8))
    for expected, one, other in zip(To()(given), first, second, strict=True):
        assert torch.equal(one, expected)
        assert torch.equal(other, expected)
        assert other.dtype == dtype
    assert computed(module) == 8


class Tree(nn.Module):
    def forward(self, x, kind="dict"):
        pooled, tokens = x[:, 0], x[:, 1:].reshape(-1, 3, 3)
        return {
            "dict": {"pooled": pooled, "layers": (tokens, [pooled, None])},
            "named": Out(pooled, tokens),
            "data": Record(pooled, {"tokens": tokens}),
            "order": collections.OrderedDict(pooled=pooled, tokens=tokens.numpy()),
        }[kind]


def same(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other) and one.dtype == other.dtype
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return same(vars(one), vars(other)) if dataclasses.is_dataclass(one) else one == other


@pytest.mark.parametrize("kind", ["dict", "named", "data", "order"])
def test_results_keep_their_structure(kind):
    module = cache_module()(Tree)()
    expected = Tree()(X, kind=kind)
    assert same(module(X[:5], kind=kind, cache_key=keys(5)), Tree()(X[:5], kind=kind))
    assert same(module(X, kind=kind, cache_key=keys(8)), expected)
    assert same(module(X, kind=kind, cache_key=keys(8)), expected)
    order = [3, 0, 7, 3]
    assert same(
        module(X[order], kind=kind, cache_key=[keys(8)[at] for at in order]), Tree()(X[order], kind=kind)
    )


def test_an_output_of_transformers_comes_from_rows_before_the_module_is_built():
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    class Encoder(Plain):
        def forward(self, x):
            pooled = self.linear(x)
            return BaseModelOutputWithPooling(
                last_hidden_state=pooled[:, None], pooler_output=pooled, hidden_states=(x, pooled)
            )

    decorated = cache_module(version="1")(Encoder)
    expected = seeded(decorated)(X, cache_key=keys(8))
    module = decorated()
    found = module(X, cache_key=keys(8))
    assert type(found) is BaseModelOutputWithPooling
    assert "not built" in repr(module)
    assert same(found.to_tuple(), expected.to_tuple())
    assert same(found["hidden_states"], seeded(Encoder)(X).hidden_states)
    assert found.attentions is None


def test_a_whole_result_may_hold_numbers_and_text():
    class Whole(nn.Module):
        def forward(self, x):
            return {"mean": x.mean().item(), "shape": list(x.shape), "name": "x", "is": True, 3: None, "x": x}

    module = cache_module()(Whole)()
    assert same(module(X, cache_key="all"), Whole()(X))
    assert same(module(X, cache_key="all"), Whole()(X))
    assert computed(module) == 1


def test_what_cannot_be_stored_is_an_error_that_says_what_to_do():
    class Odd(nn.Module):
        def __init__(self, what):
            super().__init__()
            self.what = what

        def forward(self, x):
            return {"set": {1}, "sparse": x.to_sparse(), "scalar": x.sum(), "number": 1.5}[self.what]

    module = cache_module()(Odd)
    for what, words in (
        ("set", "set, which can't be stored"),
        ("sparse", "make it dense"),
        ("scalar", r"has shape \[\] for 8 keys"),
        ("number", "give such a call one key"),
    ):
        with pytest.raises(FeatureNotCacheable, match=words):
            module(what)(X, cache_key=keys(8))


def test_keys_of_different_types_are_different_rows():
    module = cache_module()(Counting)()
    some = [1, "1", True, 1.0, b"1", (1,), ("1",), (1, (2,)), (1, 2), "", None, Path("1"), uuid.UUID(int=1)]
    some += [datetime.date(2024, 1, 1), (), -1, 2**70]
    given = torch.arange(float(len(some)))[:, None].expand(-1, 10)
    made = module(given, cache_key=some)
    assert torch.equal(made[:, 0], given[:, 0])
    again = module(given, cache_key=some)
    assert torch.equal(again, made)
    assert cache_info(module).hits == len(some) - 1  # None is no key


class Counting(nn.Module):
    def forward(self, x):
        return x.clone()


@pytest.mark.parametrize(
    "some",
    [
        list(range(8)),
        torch.arange(8),
        np.arange(8),
        range(8),
        tuple(range(8)),
        [np.int64(at) for at in range(8)],
    ],
    ids=lambda some: type(some).__name__,
)
def test_keys_may_be_given_in_any_sequence(some):
    module = cache_module()(Counting)()
    module(X, cache_key=list(range(8)))
    assert torch.equal(module(X, cache_key=some), X)
    assert cache_info(module).hits == 8


def test_a_tuple_that_is_no_batch_is_one_key():
    module = cache_module()(Counting)()
    assert torch.equal(module(X, cache_key=("shard", 3)), X)
    assert torch.equal(module(X, cache_key=("shard", 3)), X)
    assert cache_info(module).rows_computed == 1
    pair = X[:2]
    assert torch.equal(module(pair, cache_key=("a", "b")), pair)
    assert cache_info(module).rows_computed == 3


@pytest.mark.parametrize("key", [object(), {1: 2}, {1}, [object()], torch.zeros(2, 2), [["nested"]]])
def test_a_key_of_no_stable_kind_fails(key):
    with pytest.raises(OptionError, match=r"cache_key|keys for an input"):
        Cached()(X[:1], cache_key=key)


def test_keys_that_are_too_many_or_too_few_fail():
    with pytest.raises(OptionError, match=r"3 keys for an input of shape \[8, 10\]"):
        Cached()(X, cache_key=keys(3))


def test_no_keys_give_an_empty_result():
    assert Cached()(X[:0], cache_key=[]).shape == (0, 3)


def test_without_a_key_the_module_is_as_given():
    module = seeded(Cached)
    module(X).sum().backward()
    assert module.linear.weight.grad is not None
    assert torch.equal(module(X), seeded(Plain)(X))
    assert cache_info(module).stored == 0


def test_a_key_by_position_is_not_lost():
    class Declares(nn.Module):
        def forward(self, x, cache_key=None):
            assert cache_key is None
            return x + 1

    module = cache_module()(Declares)()
    module(X, keys(8))
    assert torch.equal(module(X, keys(8)), X + 1)
    assert cache_info(module).hits == 8
    with pytest.raises(TypeError):
        Cached()(X, "key")


def test_other_arguments_count():
    class Scales(nn.Module):
        def forward(self, x, by=1.0, mask=None):
            return x * by if mask is None else x * by * mask

    module = cache_module()(Scales)()
    for _ in range(2):
        assert torch.equal(module(X, cache_key=keys(8)), X)
        assert torch.equal(module(X, by=2.0, cache_key=keys(8)), 2 * X)
        assert torch.equal(module(X, 3.0, cache_key=keys(8)), 3 * X)
    row_wise = torch.arange(8.0)[:, None]
    assert torch.equal(module(X[:4], mask=row_wise[:4], cache_key=keys(4, 100)), X[:4] * row_wise[:4])
    assert torch.equal(module(X, mask=row_wise, cache_key=keys(8, 100)), X * row_wise)


def test_inputs_may_be_texts_images_or_nothing():
    class Reads(nn.Module):
        def forward(self, x):
            if isinstance(x, Image.Image):
                return torch.from_numpy(np.asarray(x).copy())
            return torch.tensor([[len(text)] for text in x])

    module = cache_module()(Reads)()
    texts = ["a", "bb", "ccc"]
    assert module(texts, cache_key=keys(3)).tolist() == [[1], [2], [3]]
    assert module(None, cache_key=keys(3)).tolist() == [[1], [2], [3]]
    with pytest.raises(FeatureMismatch, match="from another input"):
        module(["x", "yy", "zzz"], cache_key=keys(3))
    image = Image.new("RGB", (4, 3), (1, 2, 3))
    for _ in range(2):
        assert module(image, cache_key="image").shape == (3, 4, 3)
    with pytest.raises(FeatureMismatch, match="'image' was computed from another input"):
        module(Image.new("RGB", (4, 3), (9, 2, 3)), cache_key="image")


def test_one_input_with_the_key_of_another_is_found_where_it_is_compared(monkeypatch):
    module = seeded(Cached)
    for _ in range(3):
        module(X[0], cache_key="one")
    assert cache_info(module).hits >= 1
    monkeypatch.setattr(module_call._places, "getrandbits", lambda bits: 0)  # now
    with pytest.raises(FeatureMismatch, match="'one' was computed from another input"):
        module(X[1], cache_key="one")


def test_editing_a_result_in_place_changes_no_row():
    module = seeded(Cached)
    expected = module(X, cache_key=keys(8)).clone()
    for _ in range(3):
        module(X, cache_key=keys(8)).zero_()
    assert torch.equal(module(X, cache_key=keys(8)), expected)
    one = module(X[0], cache_key="one").clone()
    module(X[0], cache_key="one").zero_()
    assert torch.equal(module(X[0], cache_key="one"), one)


def test_a_gradient_for_one_of_two_inputs_is_refused():
    class Adds(nn.Module):
        def forward(self, x, other):
            return x + other

    with pytest.raises(FeatureNotCacheable, match="requires a gradient"):
        cache_module()(Adds)()(X, torch.ones(8, 10, requires_grad=True), cache_key=keys(8))


def test_rows_of_a_part_in_another_mode_are_others():
    module = seeded(Cached).eval()
    module(X, cache_key=keys(8))
    module.linear.train()
    module(X, cache_key=keys(8))
    assert computed(module) == 16


def test_a_gradient_for_the_input_is_refused():
    with pytest.raises(FeatureNotCacheable, match="requires a gradient"):
        Cached()(X.clone().requires_grad_(), cache_key=keys(8))
    with torch.no_grad():
        Cached()(X.clone().requires_grad_(), cache_key=keys(8))


@pytest.mark.parametrize(
    "layer", [nn.Dropout(0.5), nn.BatchNorm1d(10), nn.RNN(10, 4, 2, dropout=0.1, batch_first=True)], ids=repr
)
def test_a_module_in_train_mode_whose_results_vary_is_refused(layer):
    class Varies(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = copy.deepcopy(layer)

        def forward(self, x):
            return self.layer(x[:, None])[0] if isinstance(self.layer, nn.RNN) else self.layer(x)

    module = cache_module(version="1")(Varies)()
    with pytest.raises(FeatureNotCacheable, match=r"in train mode: .* call .eval\(\)"):
        module(X, cache_key=keys(8))
    module.eval()
    module(X, cache_key=keys(8))
    module.train()
    with pytest.raises(FeatureNotCacheable, match="in train mode"):
        module(X, cache_key=keys(8, 100))


def test_a_module_that_draws_is_refused_unless_its_draws_do_not_matter():
    class Draws(nn.Module):
        def __init__(self, by):
            super().__init__()
            self.by = by

        def forward(self, x):
            return x + self.by * torch.randn_like(x)

    draws = cache_module()(Draws)
    with pytest.raises(FeatureNotCacheable, match="draws random numbers"):
        draws(1.0)(X, cache_key=keys(8))
    state = torch.get_rng_state()
    assert torch.equal(draws(0.0)(X[:1], cache_key=keys(1)), X[:1])
    torch.set_rng_state(state)


def test_a_module_that_mixes_rows_is_refused():
    class Mixes(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    module = cache_module()(Mixes)()
    with pytest.raises(FeatureNotCacheable, match="mixes the rows"):
        module(X, cache_key=keys(8))
    assert torch.equal(module(X, cache_key="whole batch"), X - X.mean(0))


def test_an_error_of_the_module_comes_as_it_is_and_nothing_is_stored():
    class Fails(nn.Module):
        def forward(self, x):
            if x.sum() > 0:
                raise torch.OutOfMemoryError("out of memory")
            return x

    module = cache_module()(Fails)()
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        module(torch.ones(8, 10), cache_key=keys(8))
    assert cache_info(module).stored == 0
    assert torch.equal(module(torch.zeros(8, 10), cache_key=keys(8)), torch.zeros(8, 10))


def test_an_error_while_building_comes_as_it_is_each_time():
    class Broken(nn.Module):
        def __init__(self, fails):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            if fails:
                raise RuntimeError("no weights here")

    module = cache_module()(Broken)([1])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no weights here"):
            module(X, cache_key="a")
    with pytest.raises(TypeError):
        cache_module()(Broken)()


def test_a_sharded_or_missing_weight_is_refused():
    with torch.device("meta"):
        module = Cached(dtype=torch.float32)
        module.linear  # noqa: B018 — builds it
    with pytest.raises(FeatureNotCacheable, match="meta tensor"):
        module(X, cache_key=keys(8))


def test_it_is_not_built_until_something_needs_it():
    module = seeded(Cached)
    assert repr(module) == "Plain(not built yet)"
    assert isinstance(module, nn.Module)
    assert isinstance(module, Plain)
    assert module.training
    assert not module.eval().training
    assert module.half() is module
    assert "not built" in repr(module)
    assert module.linear.weight.dtype == torch.float16
    assert not module.linear.training


def test_what_is_asked_before_the_build_holds_after_it():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Cached()

    torch.manual_seed(0)
    parent = Parent()
    parent.eval()
    parent.double()
    parent.inner.requires_grad_(False)
    assert "not built" in repr(parent.inner)
    expected = seeded(Plain).double().eval()
    state = parent.state_dict()
    assert list(state) == ["inner.linear.weight", "inner.linear.bias"]
    assert torch.equal(state["inner.linear.weight"], expected.linear.weight)
    assert not any(parameter.requires_grad for parameter in parent.parameters())
    assert not parent.inner.linear.training


def test_hooks_and_load_state_dict_before_the_build():
    other = seeded(Plain)
    nn.init.ones_(other.linear.weight)
    module = Cached()
    module.load_state_dict(other.state_dict())
    expected = other(X).detach()
    assert torch.equal(module(X, cache_key=keys(8)), expected)
    hooked = seeded(Cached)
    hooked.register_forward_hook(double)
    with torch.no_grad():
        assert torch.equal(hooked(X, cache_key=keys(8)), 2 * seeded(Plain)(X))
        assert torch.equal(hooked(X, cache_key=keys(8)), 2 * seeded(Plain)(X))


def double(module, args, result):
    return 2 * result


def test_building_later_draws_the_same_weights_and_disturbs_no_draw():
    torch.manual_seed(3)
    plain, after = Plain(), torch.rand(3)
    torch.manual_seed(3)
    module = Cached()
    first = torch.rand(3)
    assert torch.equal(module.linear.weight, plain.linear.weight)
    torch.manual_seed(3)
    again = Cached()
    assert torch.equal(torch.rand(3), first)
    again.linear  # noqa: B018
    torch.manual_seed(3)
    assert not torch.equal(first, after)  # a module that isn't built draws nothing


@pytest.mark.parametrize("is_built", [False, True])
@pytest.mark.parametrize(
    "twin", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"]
)
@pytest.mark.sampled(2)
def test_copies_and_pickles_are_the_same_module(twin, is_built):
    module = seeded(Cached)
    module.eval()
    expected = module(X, cache_key=keys(8))
    if not is_built:
        module = seeded(Cached)
        module.eval()
    other = twin(module)
    assert type(other) is type(module)
    assert torch.equal(other(X, cache_key=keys(8)), expected)
    assert torch.equal(other(X), module(X))
    moved = seeded(Cached)
    moved.double()
    assert twin(moved).linear.weight.dtype == torch.float64


def test_subclasses_work_and_are_lazy():
    class Sub(Cached):
        def __init__(self, extra):
            super().__init__()
            self.extra = nn.Linear(3, extra)

        def forward(self, x):
            return self.extra(super().forward(x))

    module = seeded(Sub, 5)
    assert "not built" in repr(module)
    assert module(X, cache_key=keys(8)).shape == (8, 5)
    assert torch.equal(module(X, cache_key=keys(8)), module(X))


def test_both_forms_of_super_work():
    @cache_module()
    class Old(nn.Module):
        def __init__(self):
            super(Old, self).__init__()  # noqa: UP008
            self.linear = nn.Linear(10, 2)

        def train(self, mode=True):
            super(Old, self).train(mode)  # noqa: UP008
            return self

        def forward(self, x):
            return self.linear(x)

        @property
        def me(self):
            return __class__

    @cache_module()
    class New(Old):
        def __init__(self):
            super().__init__()
            self.other = nn.Linear(2, 2)

        def forward(self, x):
            return self.other(super().forward(x))

    assert Old().me is Old
    for cls in (Old, New):
        module = cls()
        module.eval()
        assert torch.equal(module(X, cache_key=keys(8)), module(X))


def test_threads_build_once_and_get_equal_rows():
    built = []

    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            built.append(1)
            self.linear = nn.Linear(10, 3)

        def forward(self, x):
            return self.linear(x)

    module = cache_module(version="1")(Slow)()
    found = []
    threads = [threading.Thread(target=lambda: found.append(module(X, cache_key=keys(8)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert len(found) == 8
    assert all(torch.allclose(one, found[0]) for one in found)


def test_switches_turn_caching_off_and_back_on():
    module = seeded(Cached)
    module(X, cache_key=keys(8))
    torch_module_cache.disable_global_cache()
    assert not torch_module_cache.is_global_cache_enabled()
    assert module(X, cache_key=keys(8)).requires_grad
    torch_module_cache.enable_inference_mode()
    assert torch_module_cache.is_inference_mode()
    assert "not built" not in repr(Cached())
    torch_module_cache.disable_inference_mode()
    assert not torch_module_cache.is_global_cache_enabled()  # as it was before
    torch_module_cache.enable_global_cache()
    assert torch_module_cache.is_global_cache_enabled()
    assert cache_info(module).hits == 0
    module(X, cache_key=keys(8))
    assert cache_info(module).hits == 8


def test_one_that_was_made_in_inference_mode_is_cached_after_it():
    torch_module_cache.enable_inference_mode()
    module = seeded(Cached)
    torch_module_cache.disable_inference_mode()
    module(X, cache_key=keys(8))
    lazy = seeded(Cached)
    lazy(X, cache_key=keys(8))
    assert cache_info(module).hits == 8


def test_without_a_path_nothing_is_stored(tmp_path):
    module = cache_module(cache_path=None)(Plain)()
    module(X, cache_key=keys(8))
    assert not (tmp_path / "cache").exists()
    assert cache_info(module).stored == 0


def test_rows_can_be_listed_measured_and_cleared_by_name(tmp_path):
    where = str(tmp_path / "here")
    one = cache_module(where, "one")(Plain)()
    two = cache_module(where, "two/../..")(Plain)()
    one(X, cache_key=keys(8))
    two(X[:3], cache_key=keys(3, 100))
    listed = torch_module_cache.list_cache_entries(where)
    assert {name: len(some) for name, some in listed.items()} == {"one": 8, "two/../..": 3}
    assert (
        0 < torch_module_cache.get_cache_size(where, "two/../..") < torch_module_cache.get_cache_size(where)
    )
    foreign = tmp_path / "here" / "notes.txt"
    foreign.write_text("mine")
    (tmp_path / "here" / "rows" / "link").symlink_to(foreign)
    torch_module_cache.clear_cache(where, "one")
    assert list(torch_module_cache.list_cache_entries(where)) == ["two/../.."]
    torch_module_cache.clear_cache(where)
    assert torch_module_cache.list_cache_entries(where) == {}
    assert foreign.read_text() == "mine"
    assert (tmp_path / "here" / "rows" / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"]
    assert torch_module_cache.get_cache_size(str(tmp_path / "nowhere")) == 0
    assert torch_module_cache.list_cache_entries(str(tmp_path / "nowhere")) == {}
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache_path": 3}, "cache_path=3"),
        ({"cache_level": "disk"}, "cache_level='disk'; expected one of"),
        ({"max_memory_cache_size_mb": 0}, "more than 0"),
        ({"cache_size": "many"}, "cache_size='many'"),
        ({"on_mismatch": "ignore"}, "on_mismatch='ignore'"),
    ],
)
def test_an_option_that_cannot_be_used_fails(options, words):
    with pytest.raises(OptionError, match=words):
        cache_module(**options)


def test_only_modules_can_be_decorated():
    with pytest.raises(TypeError, match=r"decorates a class of torch\.nn\.Module"):
        cache_module()(dict)
    with pytest.raises(TypeError, match="no module that cache_module decorates"):
        cache_info(nn.Linear(1, 1))


def test_the_public_names_are_the_same_objects():
    assert streamload.cache_module is torch_module_cache.cache_module.func
    assert streamload.CacheLevel is torch_module_cache.CacheLevel


def test_the_modules_of_the_original_are_imported_by_their_names():
    from streamload.integrations.torch_module_cache.utils.cache_utils import clear_cache, get_cache_size

    decorator = importlib.import_module("streamload.integrations.torch_module_cache.decorator")
    assert decorator.CacheLevel is streamload.CacheLevel
    assert decorator.cache_module is torch_module_cache.cache_module
    assert get_cache_size() == 0
    clear_cache()


def test_a_key_with_another_input_is_computed_again_and_logged_under_the_names_of_the_original(caplog):
    from streamload.integrations.torch_module_cache import cache_module as decorate

    for decorated in (decorate, decorate()):

        @decorated
        class Doubles(nn.Module):
            def forward(self, x):
                return x * 2

        module, x = Doubles(), torch.ones(2, 4)
        assert torch.equal(module(x, cache_key="a"), x * 2)
        assert torch.equal(module(x + 1, cache_key="a"), (x + 1) * 2)
    assert "were computed from other inputs" in caplog.text


def test_sizes_in_results_come_back():
    @cache_module
    class Shapes(nn.Module):
        def forward(self, x):
            return {"shape": x.shape, "sum": x.sum()}

    module, x = Shapes(), torch.ones(2, 4)
    module(x, cache_key="a")
    result = module(x, cache_key="a")
    assert cache_info(module).hits == 1
    assert type(result["shape"]) is torch.Size
    assert result["shape"] == (2, 4)


@cache_module
class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


@pytest.fixture
def group(tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrap", [nn.DataParallel, nn.parallel.DistributedDataParallel])
def test_a_module_in_a_wrapper_of_several_devices_has_rows(wrap, group):
    @cache_module
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = wrap(nn.Linear(4, 4))

        def forward(self, x):
            return self.child(x)

    x = torch.ones(2, 4)
    for module in (wrap(Wrapped().eval()), Holds().eval()):
        hits = cache_info(Wrapped).hits
        with torch.no_grad():
            first, again = (module(x, cache_key=["a", "b"]) for _ in range(2))
        assert torch.equal(first, again)
        assert cache_info(Wrapped).hits == hits + 2


class Configuration:
    def __init__(self):
        for number in range(40):
            setattr(self, f"width_{number}", number)


@cache_module
class Configured(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.config = nn.Linear(4, 4), Configuration()

    def forward(self, x):
        return self.linear(x)


def test_a_hit_of_a_built_module_describes_no_configuration_object(monkeypatch):
    module, x = Configured().eval(), torch.ones(1, 4)
    module.state_dict()
    for _ in range(3):
        module(x, cache_key="a")
    proof_of(module).looks.due = math.inf  # a look at all of it isn't due
    monkeypatch.setattr(Describer, "value", None)
    hits = cache_info(module).hits
    module(x, cache_key="a")
    assert cache_info(module).hits == hits + 1


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_module_that_fsdp_has_sharded_is_refused(is_whole, group):
    from torch.distributed.fsdp import fully_shard  # a second of imports, for those who need it

    module = Wrapped().eval()
    fully_shard(module if is_whole else module.linear)
    with pytest.raises(FeatureNotCacheable, match="keep it out of FSDP"), torch.no_grad():
        module(torch.ones(2, 4), cache_key=["a", "b"])
