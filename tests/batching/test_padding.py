"""Captions cut to the longest of their batch: the ids that a tokenizer's own padding="longest" has."""

import copy
import io
import pickle

import pytest
import torch
from PIL import Image
from webdataset import TarWriter

import streamload
from streamload import Batches, Shards
from streamload.batches.tokenize import adapt_tokenizer
from streamload.batching.padding import cut_to_longest, widths_of
from streamload.errors import OptionError
from streamload.testing.shards import write_shards
from tests.batches.test_tokenize import of_transformers

CAPTIONS = ["a cat", "two cats and a very long dog", "", "dog dog dog"]
SEEDS = [1, 2, 3, 4]


class Wrapping:
    """As open_clip's HFTokenizer: ids alone, of a tokenizer that it holds."""

    def __init__(self, inner, strips=False, clips=False):
        self.tokenizer, self.strips, self.clips = inner, strips, clips

    def __call__(self, captions):
        if self.clips:
            rows = self.tokenizer(captions, padding=False)["input_ids"]
            return torch.tensor([row[:9] + [0] * (9 - len(row[:9])) + [3] for row in rows])
        options = {"max_length": 10, "padding": "max_length", "truncation": True, "return_tensors": "pt"}
        ids = self.tokenizer(captions, **options).input_ids
        return torch.where(ids == 8, 0, ids) if self.strips else ids


def expected(tokenizer, **options):
    return tokenizer(CAPTIONS, padding="longest", truncation=True, return_tensors="pt", **options)


@pytest.mark.parametrize("side", ["right", "left"])
def test_ids_and_masks_are_those_of_the_tokenizers_own_longest(side):
    tokenizer = of_transformers(model_max_length=12, padding_side=side)
    texts = adapt_tokenizer(tokenizer, finds_padding=True)(CAPTIONS, SEEDS)
    assert texts.ids.shape == (4, 12)
    own, cut = expected(tokenizer), cut_to_longest(texts, 1)
    assert cut.ids.tolist() == own.input_ids.tolist()
    assert cut.valid.tolist() == own.attention_mask.bool().tolist()
    assert {name: value.tolist() for name, value in cut.others.items()} == {
        name: value.tolist() for name, value in own.items() if name != "input_ids"
    }
    assert cut.ids.is_contiguous()


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("multiple", "width"), [(1, 7), (2, 8), (4, 8), (8, 8), (5, 10), (9, 9), (13, 12)])
def test_the_width_is_a_multiple_and_at_most_the_tokenizers_length(side, multiple, width):
    tokenizer = of_transformers(model_max_length=12, padding_side=side)
    texts = adapt_tokenizer(tokenizer, finds_padding=True)(CAPTIONS, SEEDS)
    cut = cut_to_longest(texts, multiple)
    assert cut.ids.shape == cut.valid.shape == cut.others["attention_mask"].shape == (4, width)
    assert cut.ids[cut.valid].tolist() == texts.ids[texts.valid].tolist()


def test_a_batch_of_captions_without_ids_keeps_a_column():
    texts = adapt_tokenizer(of_transformers(model_max_length=12), finds_padding=True)(["", ""], [1, 2])
    assert cut_to_longest(texts, 1).ids.tolist() == [[0], [0]]


def test_a_mask_that_the_tokenizer_does_not_give_by_default_is_not_in_the_batch():
    tokenizer = of_transformers(model_max_length=12, model_input_names=["input_ids"])
    texts = adapt_tokenizer(tokenizer, finds_padding=True)(CAPTIONS, SEEDS)
    assert texts.others == {}
    assert texts.valid.sum(1).tolist() == [2, 7, 0, 3]


@pytest.mark.parametrize(
    "copied", [lambda one: one, lambda one: pickle.loads(pickle.dumps(one)), copy.deepcopy]
)
def test_a_tokenizer_that_holds_one_of_transformers_is_asked_for_its_mask(copied):
    inner = of_transformers(eos_token="dog")  # which "dog dog dog" has
    inner.pad_token = "dog"
    wrapping = Wrapping(inner)
    tokenizer = copied(adapt_tokenizer(wrapping, finds_padding=True))
    texts = tokenizer(CAPTIONS, SEEDS)
    assert texts.ids.tolist() == wrapping(CAPTIONS).tolist()
    assert texts.valid.sum(1).tolist() == [2, 7, 0, 3]
    assert cut_to_longest(texts, 1).ids.tolist() == wrapping(CAPTIONS)[:, :7].tolist()
    assert wrapping.tokenizer is inner  # the user's own is as it was


def test_what_such_a_tokenizer_strips_is_padding():
    tokenizer = adapt_tokenizer(Wrapping(of_transformers(), strips=True), finds_padding=True)
    texts = tokenizer(CAPTIONS, SEEDS)
    assert texts.valid.tolist()[1] == [True] * 5 + [False] + [True] + [False] * 3
    assert cut_to_longest(texts, 1).ids.shape == (4, 7)


def test_ids_that_are_not_those_of_the_inner_tokenizer_are_refused():
    with pytest.raises(
        OptionError, match="nothing says for certain which ids of tokenizer Wrapping are padd"
    ):
        adapt_tokenizer(Wrapping(of_transformers(), clips=True), finds_padding=True)(CAPTIONS, SEEDS)


def test_a_function_says_what_is_padding_by_a_mask_or_an_id_of_its_own():
    def ids(captions):
        return [[3 + len(word) for word in (caption.split() + [""] * 9)[:9]] for caption in captions]

    def masked(captions):
        return {
            "input_ids": ids(captions),
            "attention_mask": [[int(i > 3) for i in row] for row in ids(captions)],
        }

    def declared(captions):
        return ids(captions)

    declared.pad_token_id = 3
    for tokenizer in (masked, declared):
        texts = adapt_tokenizer(tokenizer, finds_padding=True)(CAPTIONS, SEEDS)
        assert texts.valid.sum(1).tolist() == [2, 7, 0, 3]
        assert cut_to_longest(texts, 1).ids.tolist() == [row[:7] for row in ids(CAPTIONS)]
    for unclear in (lambda captions: ids(captions), declared):
        declared.eos_token_id = 3
        with pytest.raises(
            OptionError, match=r"return a dict of input_ids and attention_mask.* or give it a pad"
        ):
            adapt_tokenizer(unclear, finds_padding=True)(CAPTIONS, SEEDS)


def test_the_widths_of_rows_are_counted_from_the_side_that_is_not_padded():
    right = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    for valid, pads_left in ((right, False), (right.flip(1), True)):
        widths = widths_of({}, valid)
        assert widths.bounds.tolist() == [[2, 0], [3, 0], [0, 0], [4, 0]]
        assert widths.pads_left is pads_left
    patches = widths_of({"patch_valid": right[:, :2]}, None, 77)
    assert (patches.full, patches.varies) == ((77, 2), (False, True))
    assert patches.bounds.tolist() == [[77, 2], [77, 1], [77, 0], [77, 2]]
    assert widths_of({}, None, 77) is None


def test_padding_that_is_not_known_is_refused_when_the_loader_is_made():
    longest = Batches(text_padding="longest")
    with pytest.raises(OptionError, match="nothing says for certain"):
        streamload.make_loader("a.tar", lambda captions: [[1, 2]] * len(captions), batches=longest)
    for given in ({}, {"shards": Shards(text_key=None)}):
        with pytest.raises(OptionError, match='text_padding="longest" is for ids: give a tokenizer'):
            streamload.make_loader("a.tar", batches=longest, **given)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    directory = tmp_path_factory.mktemp("captioned")
    write_shards(directory, [32, 32], seed=3)
    return f"{directory}/{{00000..00001}}.tar"


def words(captions):
    """A tokenizer with as many ids as a caption's last number says, and as many other values."""
    count = [1 + int(("0" + "".join(filter(str.isdigit, caption)))[-1]) for caption in captions]
    rows = [[7] * each + [0] * (20 - each) for each in count]
    mask = [[1] * each + [0] * (20 - each) for each in count]
    return {"input_ids": rows, "attention_mask": mask, "count": count}


def batches(shards, place, workers, padding, output):
    with streamload.make_loader(
        shards,
        words,
        batch_size=8,
        num_workers=workers,
        output=output,
        cache_dir=place,
        batches=Batches(with_keys=True, text_padding=padding, text_pad_multiple=2),
    ) as loader:
        return list(loader)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("output", ["tuple", "dict", "hf"])
@pytest.mark.sampled(3)
def test_batches_have_the_same_ids_in_fewer_columns(shards, tmp_path, workers, output):
    fixed, cut = (batches(shards, tmp_path, workers, padding, output) for padding in ("max", "longest"))
    widths = set()
    for whole, batch in zip(fixed, cut, strict=True):
        if output == "tuple":
            assert len(batch) == len(whole)
            (_, full, keys), (_, ids, cut_keys) = whole, batch
            assert keys == cut_keys
        else:
            name = {"dict": "text", "hf": "input_ids"}[output]
            full, ids = whole[name], batch[name]
            assert batch.keys() - whole.keys() == ({"text_valid"} if output == "dict" else set())
            mask = batch["text_valid" if output == "dict" else "attention_mask"]
            assert mask.tolist() == (ids == 7).tolist()
            assert whole["__key__"] == batch["__key__"]
        width = int((full == 7).sum(1).max())
        assert ids.shape == (8, width + width % 2)
        assert full[:, : ids.shape[1]].tolist() == ids.tolist()
        assert not full[:, ids.shape[1] :].any()
        widths.add(ids.shape[1])
    assert len(fixed) == 8
    assert max(widths) <= 10


@pytest.fixture(scope="module")
def captioned(tmp_path_factory):
    """Shards whose captions have one to nine known words."""
    directory = tmp_path_factory.mktemp("worded")
    known = ("a", "cat", "two", "cats", "and", "very", "long", "dog", "dog")
    for name in ("0", "1"):
        with TarWriter(str(directory / f"{name}.tar")) as tar:
            for place in range(16):
                caption = " ".join(known[: 1 + (5 * place + int(name)) % 9])
                tar.write({"__key__": f"{name}{place:02}", "png": png(place), "txt": caption})
    return f"{directory}/{{0..1}}.tar"


def png(place):
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (place, 0, 0)).save(file, "PNG")
    return file.getvalue()


def captions_of(shards, place, tokenizer, padding="longest", **options):
    batches = Batches(with_keys=True, text_padding=padding, text_pad_multiple=1, **options)
    with streamload.make_loader(
        shards, tokenizer, batch_size=8, num_workers=0, output="hf", cache_dir=place,
        batches=batches,
    ) as loader:  # fmt: skip
        for batch in loader:
            yield loader, batch


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("padding", ["longest", "max"])
def test_labels_and_lengths_are_those_of_transformers_own_collator(captioned, tmp_path, side, padding):
    from transformers import DataCollatorForLanguageModeling

    tokenizer = of_transformers(model_max_length=12, padding_side=side)
    plain = dict(zip(*keys_and_texts(captioned, tmp_path), strict=True))
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    columns = {"text_columns": ("labels", "length")}
    widths = set()
    for _, batch in captions_of(captioned, tmp_path, tokenizer, padding, **columns):
        texts = [plain[key] for key in batch["__key__"]]
        own = tokenizer(texts, truncation=True, return_length=True)
        lengths = own.pop("length")
        if padding == "max":
            own = tokenizer(texts, padding="max_length", max_length=12)
        expected = collate([dict(zip(own, row, strict=True)) for row in zip(*own.values(), strict=True)])
        for name in ("input_ids", "attention_mask", "labels"):
            assert batch[name].tolist() == expected[name].tolist()
        assert batch["length"].tolist() == lengths
        widths.add(batch["labels"].shape[1])
    assert widths == ({12} if padding == "max" else widths - {12})


def keys_and_texts(shards, place):
    with streamload.make_loader(
        shards,
        batch_size=32,
        num_workers=0,
        output="dict",
        batches=streamload.Batches(with_keys=True),
        cache_dir=place,
    ) as loader:
        (batch,) = loader
    return batch["__key__"], batch["text"]


def test_an_end_that_is_also_the_padding_stays_a_label(captioned, tmp_path):
    tokenizer = of_transformers(model_max_length=12, eos_token="[PAD]")  # the collator would leave it out

    def ended(captions):
        return tokenizer(
            [caption + "[PAD]" for caption in captions],
            padding="max_length", max_length=12, return_tensors="pt",
        )  # fmt: skip

    ((_, batch), *_) = captions_of(captioned, tmp_path, ended, text_columns=["labels"])
    lasts = batch["attention_mask"].sum(1, keepdim=True) - 1
    assert not batch["labels"].gather(1, lasts).any()  # 0 is [PAD]
    assert ((batch["labels"] == -100) == (batch["attention_mask"] == 0)).all()


def test_a_language_model_trains_on_labels_by_parts_as_on_the_whole(captioned, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=10, n_positions=16, n_embd=8, n_layer=1, n_head=1)
    model = GPT2LMHeadModel(config).eval()
    tokenizer = of_transformers(model_max_length=12)
    names = ("input_ids", "attention_mask", "labels")
    found = captions_of(captioned, tmp_path, tokenizer, text_columns=["labels"], microbatch=3)
    for loader, batch in found:
        whole = model(**{name: batch[name] for name in names}).loss
        kept = (batch["labels"][:, 1:] != -100).sum()
        by_parts = 0.0
        for part in loader.microbatches(batch):
            assert part["labels"].shape == part["input_ids"].shape
            loss = model(**{name: part[name] for name in names}).loss
            own = (part["labels"][:, 1:] != -100).sum()
            by_parts += (loss * own / kept).item() if own else 0.0
        assert by_parts == pytest.approx(whole.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output": "dict"}, r"text_columns=\('labels',\) is for output=\"hf\""),
        ({"shards": Shards(label_key="cls")}, "label_key= makes labels, too"),
        ({"tokenizer": lambda captions: [[1, 2]] * len(captions)}, "nothing says for certain"),
        ({"tokenizer": None, "shards": Shards(text_key=None)}, "is for ids: give a tokenizer"),
        (
            {"tokenizer": lambda captions: {**words(captions), "labels": [[0]] * len(captions)}},
            "returned labels itself: leave it out",
        ),
    ],
)
def test_columns_that_cannot_be_made_are_refused(options, message):
    given = {"tokenizer": words, "output": "hf", "batches": Batches(text_columns=("labels",)), **options}
    with pytest.raises(OptionError, match=message):
        streamload.make_loader("a.tar", **given)
    with pytest.raises(OptionError, match=r"text_columns='labels'; expected some of \['labels', 'length'\]"):
        Batches(text_columns="labels")
