"""Tokenizers of several kinds give int64[N, L] for a batch; what can't be that is said clearly."""

import os
import pickle
import random

import numpy as np
import pytest
import torch

import streamload
from streamload.batches.tokenize import Texts, adapt_tokenizer

CAPTIONS = ["a cat", "two cats and a very long dog", ""]
SEEDS = [11, 12, 13]


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def lengths(captions):
    """A tokenizer of our own: the lengths of the first four words, 0 where there is none."""
    return [[len(word) for word in (caption.split() + [""] * 4)[:4]] for caption in captions]


def of_transformers(**options):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "a", "cat", "two", "cats", "and", "very", "long", "dog"]
    model = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="[PAD]", unk_token="[UNK]", **options)


@pytest.mark.parametrize(
    "kind",
    [
        lambda ids: ids,
        torch.tensor,
        np.array,
        lambda ids: np.array(ids, np.int32),
        lambda ids: [np.array(row) for row in ids],
        tuple,
    ],
)
def test_any_function_from_strings_to_ids_is_a_tokenizer(kind):
    texts = adapt_tokenizer(lambda captions: kind(lengths(captions)))(CAPTIONS, SEEDS)
    assert isinstance(texts, Texts)
    assert texts.ids.dtype == torch.int64
    assert texts.ids.tolist() == [[1, 3, 0, 0], [3, 4, 3, 1], [0, 0, 0, 0]]


def test_a_processor_of_transformers_stands_for_its_tokenizer():
    from transformers import CLIPImageProcessor, VisionTextDualEncoderProcessor

    tokenizer = of_transformers()
    processor = VisionTextDualEncoderProcessor(CLIPImageProcessor(), tokenizer)
    assert streamload.make_loader("a.tar", processor).options.tokenizer is tokenizer
    assert streamload.make_loader("a.tar", lengths).options.tokenizer is lengths


def test_the_function_is_called_once_for_a_batch():
    calls = []
    adapt_tokenizer(lambda captions: calls.append(captions) or lengths(captions))(CAPTIONS, SEEDS)
    assert calls == [CAPTIONS]


def test_no_mask_is_made_up_and_all_that_the_tokenizer_gives_is_kept():
    assert adapt_tokenizer(lengths)(CAPTIONS, SEEDS).others == {}
    given = {"input_ids": lengths(CAPTIONS), "token_type_ids": [[0] * 4] * 3, "share": [0.5, 0.25, 0.0]}
    texts = adapt_tokenizer(lambda captions: given)(CAPTIONS, SEEDS)
    assert texts.ids.tolist() == lengths(CAPTIONS)
    assert {name: each.tolist() for name, each in texts.others.items()} == {
        "token_type_ids": [[0] * 4] * 3,
        "share": [0.5, 0.25, 0.0],
    }
    for wrong in ([1, 2], 7):
        with pytest.raises(ValueError, match=r"returned special .* for 3 captions; expected a row for each"):
            adapt_tokenizer(lambda captions, wrong=wrong: {**given, "special": wrong})(CAPTIONS, SEEDS)


@pytest.mark.parametrize("draw", [random.random, np.random.random_sample, lambda: torch.rand(()).item()])
def test_what_a_tokenizer_draws_depends_on_the_sample_alone(draw):
    def drawing(captions):
        return [[int(1e9 * draw()) if len(caption) > 3 else 0, len(caption)] for caption in captions]

    generators = random.getstate(), torch.get_rng_state()
    alone = {}
    for caption, seed in zip(CAPTIONS, SEEDS, strict=True):
        alone[seed] = adapt_tokenizer(drawing)([caption], [seed]).ids.tolist()[0]
    for seeds in (SEEDS, SEEDS[::-1], SEEDS[1:]):
        tokenizer = adapt_tokenizer(drawing)
        for _ in range(2):
            rows = tokenizer([CAPTIONS[SEEDS.index(seed)] for seed in seeds], seeds).ids.tolist()
            assert rows == [alone[seed] for seed in seeds]
    drawn = [adapt_tokenizer(drawing)(["a long one"], [seed << 32 | seed]).ids.tolist() for seed in range(9)]
    assert len({ids for ((ids, _),) in drawn}) == 9
    assert random.getstate() == generators[0]
    assert torch.equal(torch.get_rng_state(), generators[1])


def test_no_tokenizer_is_none():
    assert adapt_tokenizer(None) is None


@pytest.mark.parametrize("tokenizer", ["openai/clip", 7, object()])
def test_what_cannot_be_called_fails(tokenizer):
    with pytest.raises(TypeError, match=f"tokenizer is a {type(tokenizer).__name__}; expected"):
        adapt_tokenizer(tokenizer)


@pytest.mark.parametrize(
    "result",
    [
        None,
        "ids",
        [[1.5, 2.0]] * 3,
        torch.zeros(3, 4),
        [["a"]] * 3,
        torch.ones(3, 4, dtype=torch.bool),
        {"ids": [[1]]},
        [None] * 3,
    ],
)
def test_a_result_that_is_not_integers_fails(result):
    def mine(captions):
        return result

    with pytest.raises(
        TypeError, match=r"tokenizer mine returned a .*; expected integer ids of shape \[N, L\]"
    ):
        adapt_tokenizer(mine)(CAPTIONS, SEEDS)


@pytest.mark.parametrize(
    "result", [[1, 2, 3], [[[1]]] * 3, [[1, 2]] * 2, torch.zeros(1, 4, dtype=torch.int64), []]
)
def test_a_result_of_another_shape_fails(result):
    with pytest.raises(
        (ValueError, TypeError), match=r"for 3 captions; expected \[3, L\]|expected integer ids"
    ):
        adapt_tokenizer(lambda captions: result)(CAPTIONS, SEEDS)


def test_rows_of_several_lengths_fail():
    with pytest.raises(ValueError, match="several lengths"):
        adapt_tokenizer(lambda captions: [[1] * (1 + len(caption)) for caption in captions])(CAPTIONS, SEEDS)


def test_batches_of_several_lengths_fail():
    tokenizer = adapt_tokenizer(lambda captions: [[1] * max(map(len, captions))] * len(captions))
    tokenizer(["four", "abc"], [1, 2])
    tokenizer(["abc", "four"], [1, 2])
    with pytest.raises(ValueError, match="rows of 3 ids after rows of 4"):
        tokenizer(["abc"], [1])


def test_the_tokenizers_own_errors_are_left_as_they_are():
    def fails(captions):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        adapt_tokenizer(fails)(CAPTIONS, SEEDS)


def test_a_tokenizer_of_transformers_pads_and_truncates_to_its_length_and_gives_its_mask():
    texts = adapt_tokenizer(of_transformers(model_max_length=5))(CAPTIONS, SEEDS)
    assert texts.ids.tolist() == [[2, 3, 0, 0, 0], [4, 5, 6, 2, 7], [0, 0, 0, 0, 0]]
    assert texts.others["attention_mask"].tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize("options", [{}, {"model_max_length": 131_072}])
def test_a_tokenizer_of_transformers_without_a_sane_length_gives_77(options):
    assert adapt_tokenizer(of_transformers(**options))(CAPTIONS, SEEDS).ids.shape == (3, 77)


def test_a_batch_gives_the_ids_of_its_captions_one_by_one():
    tokenizer = adapt_tokenizer(of_transformers(model_max_length=5))
    one_by_one = torch.cat([tokenizer([caption], [7]).ids for caption in CAPTIONS])
    assert torch.equal(tokenizer(CAPTIONS, SEEDS).ids, one_by_one)


def test_an_adapted_tokenizer_can_be_sent_to_a_worker():
    tokenizer = pickle.loads(pickle.dumps(adapt_tokenizer(of_transformers(model_max_length=5))))
    assert tokenizer(CAPTIONS, SEEDS).ids.shape == (3, 5)
    assert pickle.loads(pickle.dumps(adapt_tokenizer(lengths)))(CAPTIONS, SEEDS).ids.shape == (3, 4)


def test_a_fast_tokenizer_of_transformers_is_told_to_use_no_threads(monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    adapt_tokenizer(of_transformers())
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


def test_what_the_user_said_about_the_threads_of_tokenizers_stands(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    adapt_tokenizer(of_transformers())
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


def test_other_tokenizers_change_nothing_about_threads(monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    adapt_tokenizer(lengths)(CAPTIONS, SEEDS)
    assert "TOKENIZERS_PARALLELISM" not in os.environ
