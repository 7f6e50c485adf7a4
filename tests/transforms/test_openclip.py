"""The default transforms and the tokenizer adapter held to open_clip's own, on Pillow images.

These run in the environment that has open_clip (`make pytest-openclip`).
"""

import pickle
import random
import warnings

import pytest
import torch
from PIL import Image

from benchmarks.torchvision_stub import define_torchvision_schemas
from streamload.batches.simple_tokenizer import CachingTokenizer, is_simple_tokenizer
from streamload.batches.tokenize import adapt_tokenizer
from streamload.batching.padding import cut_to_longest
from streamload.transforms import kernel
from streamload.transforms.augment import Draws, RandomBox, SeededGenerators
from streamload.transforms.normalise import OPENAI_MEAN, OPENAI_STD, normalise_into
from streamload.transforms.plan import PlannedTransform, clip_plan
from tests.support.photographs import SIZES, photograph, transformed

define_torchvision_schemas()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    open_clip = pytest.importorskip(
        "open_clip", reason="open_clip is not in this environment; `make pytest-openclip` runs these tests"
    )
    from open_clip.tokenizer import SimpleTokenizer
    from open_clip.transform import image_transform
    from torchvision.transforms import RandomResizedCrop

CAPTIONS = ["a cat", "", "Two cats, & a VERY long dog!!?! 🐈", "word " * 200, "naïve café <b>l&amp;r</b>"]


def levels_of(normalised):
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (OPENAI_MEAN, OPENAI_STD))
    return ((normalised * std + mean) * 255).round().int()


@pytest.mark.parametrize(("width", "height"), [*SIZES, (1, 1), (1000, 2), (2, 1000), (403, 301)])
@pytest.mark.parametrize(
    ("scale", "ratio"),
    [
        ((0.9, 1.0), (3 / 4, 4 / 3)),
        ((0.08, 1.0), (0.5, 1.5)),
        ((0.0, 1.0), (0.2, 5.0)),
        ((0.5, 0.5), (1.0, 1.0)),
    ],
)
def test_boxes_are_torchvisions_for_the_same_seed(width, height, scale, ratio):
    image = Image.new("RGB", (width, height))
    boxes, draws = RandomBox(scale, ratio), Draws()
    for seed in (0, 1, 2**32 - 1, 2**40 + 17, 2**64 - 1, *range(100, 200)):
        torch.manual_seed(seed)
        expected = RandomResizedCrop.get_params(image, list(scale), list(ratio))
        draws.seed(seed)
        assert boxes.draw(height, width, draws) == tuple(expected)
        assert draws.torch_rand() == torch.rand(1).item()


def assert_open_clips(image, expected):
    """To the bit, or within two levels where our kernel can't be used."""
    if kernel.why_not():
        assert (levels_of(image) - levels_of(expected)).abs().max() <= 2
    else:
        assert torch.equal(image, expected)


def test_the_training_transform_is_open_clips():
    ours, theirs = PlannedTransform(clip_plan(train=True)), image_transform(224, is_train=True)
    levels, image = torch.zeros(3, 224, 224, dtype=torch.uint8), torch.zeros(3, 224, 224)
    values = beyond = 0
    for number in range(36):
        pixels = photograph(*SIZES[number % len(SIZES)], which=number % 5)
        seed = 977 * number
        transformed(ours, pixels, levels, seed)
        normalise_into(levels, image)
        with SeededGenerators() as generators:
            generators.seed(seed)
            expected = theirs(Image.fromarray(pixels))
        assert_open_clips(image, expected)
        apart = (levels_of(image) - levels_of(expected)).abs()
        values += apart.numel()
        beyond += int((apart > 1).sum())
    assert beyond <= 3 * values / 1e6


@pytest.mark.parametrize(("width", "height"), [*SIZES, (301, 224), (1000, 130), (130, 1000)])
def test_the_evaluation_transform_is_open_clips(width, height):
    pixels = photograph(width, height, 0)
    levels, image = torch.zeros(3, 224, 224, dtype=torch.uint8), torch.zeros(3, 224, 224)
    transformed(PlannedTransform(clip_plan(train=False)), pixels, levels)
    normalise_into(levels, image)
    expected = image_transform(224, is_train=False)(Image.fromarray(pixels))
    assert_open_clips(image, expected)
    assert ((levels_of(image) - levels_of(expected)).abs() > 1).sum() <= 3


def test_normalising_is_torchvisions_to_the_bit():
    pixels = photograph(224, 224, 1)
    image = torch.zeros(3, 224, 224)
    normalise_into(torch.from_numpy(pixels).permute(2, 0, 1), image)
    expected = image_transform(224, is_train=False)(Image.fromarray(pixels))
    assert torch.equal(image, expected)


def test_the_tokenizer_gives_its_own_ids_in_one_call_for_a_batch():
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    texts = adapt_tokenizer(tokenizer)(CAPTIONS, range(len(CAPTIONS)))
    assert texts.ids.dtype == torch.int64
    assert torch.equal(texts.ids, torch.cat([tokenizer(caption) for caption in CAPTIONS]))
    assert texts.others == {}


@pytest.mark.parametrize("mask", ["simple", "random", "shuffle"])
def test_the_words_that_a_reduction_mask_keeps_depend_on_the_sample_alone(mask):
    captions = ["short", " ".join(f"word{n}" for n in range(60)), " ".join(f"{n}th" for n in range(60))]
    whole = adapt_tokenizer(SimpleTokenizer(context_length=20, reduction_mask=mask))(captions, [5, 6, 7]).ids
    for place, (caption, seed) in enumerate(zip(captions, [5, 6, 7], strict=True)):
        alone = adapt_tokenizer(SimpleTokenizer(context_length=20, reduction_mask=mask))(
            [caption], [seed]
        ).ids
        assert torch.equal(alone[0], whole[place])
    other = adapt_tokenizer(SimpleTokenizer(context_length=20, reduction_mask=mask))(captions, [8, 9, 10]).ids
    assert [torch.equal(*rows) for rows in zip(whole, other, strict=True)] == [True, False, False]


def test_the_schemas_may_be_defined_again():
    define_torchvision_schemas()
    define_torchvision_schemas()


PIECES = [
    *[
        "a",
        "photo",
        "of",
        "two",
        "cats",
        "don't",
        "we'll",
        "it's",
        "I'm",
        "12",
        "3.50",
        "$5",
        "#tag",
        "@me",
        "e-mail",
        "x_y",
        "<b>bold</b>",
        "ok!!!",
        "???",
    ],
    *[
        "&amp;",
        "&lt;3",
        "&amp;amp;",
        "&nbsp;",
        "&#39;s",
        "&",
        "R&D",
        "\t",
        "\n",
        "\r\n",
        "\x0b",
        "\x1c",
        "\x1f",
        "\x00",
    ],
    *[
        "\x1b[31mred\x1b[0m",
        "\x7f",
        "\x85",
        "\u00a0",
        "\u2028",
        "\u200b",
        "\ufeff",
        "\u3000",
        "ﬁne",
        "ｆｕｌｌ",
        "“quoted”",
    ],
    *[
        "naïve",
        "cafÃ©",
        "â€œmojibakeâ€\x9d",
        "İstanbul",
        "ﬀ",
        "Straße",
        "ΣΊΣΥΦΟΣ",
        "日本語のキャプション",
        "한국어",
        "עברית",
    ],
    *[
        "🐈",
        "👩‍👩‍👧",
        "🇩🇪",
        "e\u0301",
        "\u0130",
        "½",
        "²",
        "Ⅷ",
        "٣",
        "<start_of_text>",
        "<END_OF_TEXT>",
        "'S",
        "'Ll",
        "''",
        "w" * 90,
    ],
]


def captions_at_random(count):
    rng = random.Random(5)
    for _ in range(count):
        joint = rng.choice([" ", " ", " ", "", "  ", " \t"])
        yield joint.join(rng.choices(PIECES, k=rng.choice([0, 1, 3, 8, 20, 90])))


@pytest.mark.parametrize("count", [1000, pytest.param(4000, marks=pytest.mark.deep)])
@pytest.mark.parametrize("clean", ["lower", "whitespace", "canonicalize"])
def test_ids_are_simple_tokenizers_own(clean, count):
    tokenizer, plain = SimpleTokenizer(clean=clean), SimpleTokenizer(clean=clean)
    ours = adapt_tokenizer(tokenizer)
    captions = list(captions_at_random(count))
    for start in range(0, len(captions), 50):
        batch = captions[start : start + 50]
        differing = (ours(batch, range(50)).ids != plain(batch)).any(1).nonzero().flatten().tolist()
        assert not differing, [batch[place] for place in differing]


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr("streamload.batches.simple_tokenizer._WORDS", 10)
    remembering = CachingTokenizer(SimpleTokenizer())
    plain = SimpleTokenizer()
    for number in range(50):
        captions = [f"word{number} and word{number + 1}", "x" * 100]
        assert torch.equal(remembering(captions), plain(captions))
        assert len(remembering._ids) <= 10
    assert "x" * 100 not in remembering._ids


class Changed(SimpleTokenizer):
    def encode(self, text):
        return [7]


def test_only_a_tokenizer_that_is_known_is_replaced():
    assert is_simple_tokenizer(SimpleTokenizer())
    assert not is_simple_tokenizer(Changed())
    assert not is_simple_tokenizer(SimpleTokenizer(reduction_mask="simple"))
    assert not is_simple_tokenizer(SimpleTokenizer(additional_special_tokens=["<a b>"]))
    assert not is_simple_tokenizer(SimpleTokenizer)
    own = SimpleTokenizer()
    own.encode = lambda text: [7]
    assert not is_simple_tokenizer(own)
    assert adapt_tokenizer(own)(["a"], [1]).ids[0, 1] == 7
    copied = pickle.loads(pickle.dumps(CachingTokenizer(SimpleTokenizer())))
    assert torch.equal(copied(["a photo"]), SimpleTokenizer()(["a photo"]))


@pytest.mark.parametrize("reduction", ["", "simple", "random", "shuffle"])
def test_the_padding_of_the_simple_tokenizer_is_what_follows_its_last_end_token(reduction):
    """ "!" has the id of the padding, and a caption may name the end token."""
    captions = [*CAPTIONS, "!", "wow!!!?!", "a <end_of_text> b", "!<end_of_text>!"]
    own = SimpleTokenizer(context_length=20, reduction_mask=reduction)
    texts = adapt_tokenizer(own, finds_padding=True)(captions, range(len(captions)))
    assert texts.ids.shape == texts.valid.shape == (len(captions), 20)
    for ids, valid in zip(texts.ids.tolist(), texts.valid.tolist(), strict=True):
        count = sum(valid)
        assert valid == [True] * count + [False] * (20 - count)
        assert ids[count - 1] == own.eot_token_id
        assert not any(ids[count:])
    few = adapt_tokenizer(own, finds_padding=True)(["a cat", "wow!!!?!"], [1, 2])
    cut = cut_to_longest(few, 1)
    assert cut.ids.shape[1] < 20
    assert cut.ids.tolist() == few.ids[:, : cut.ids.shape[1]].tolist()


@pytest.mark.parametrize("strips", [False, True])
def test_the_padding_of_the_hf_tokenizer_is_that_of_the_one_within_it(tmp_path, strips):
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "cat", "two", "cats", "and", "long", "dog"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    captions = ["a cat", "", "two cats and a long long dog"]
    own = open_clip.tokenizer.HFTokenizer(str(tmp_path), context_length=12, strip_sep_token=strips)
    texts = adapt_tokenizer(own, finds_padding=True)(captions, [1, 2, 3])
    assert texts.ids.tolist() == own(captions).tolist()
    assert texts.valid.tolist() == (texts.ids != 0).tolist()  # as OpenCLIP's main branch says
    most = int(texts.valid.sum(1).max())
    assert 0 < most < 12
    assert cut_to_longest(texts, 1).ids.tolist() == texts.ids[:, :most].tolist()
