"""`streamload.show`: the pixels that a transform made, with the captions, keys and labels of their own rows.

How it shows that it works: samples are read by `tarfile` and decoded by Pillow; what is shown has to be those
pixels, for every form of a batch. A browser opens the page. What isn't a batch is an error.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import streamload
from streamload.errors import OptionError
from streamload.testing.shards import ShardOptions, read_oracle, write_shards
from tests.support import browser

MEAN, STD = (0.2, 0.5, 0.7), (0.3, 0.2, 0.1)
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SIDE = 224


def normalised(levels: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """uint8[..., 3, H, W] as a transform makes floats of it."""
    columns = [torch.tensor(numbers).view(3, 1, 1) for numbers in (mean, std)]
    return (levels / 255 - columns[0]) / columns[1]


def own(image: Image.Image) -> torch.Tensor:
    """A transform of which nothing is known."""
    return normalised(torch.from_numpy(np.array(image)).permute(2, 0, 1), MEAN, STD)


def tokenizer(captions: list[str]) -> torch.Tensor:
    return torch.tensor([list(caption.encode()[:60].ljust(64, b"\0")) for caption in captions])


class Decoder:
    """A tokenizer with the way back."""

    def __call__(self, captions: list[str]) -> torch.Tensor:
        return tokenizer(captions)

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shown")
    write_shards(folder, [12], options=ShardOptions(image_side=(SIDE, SIDE), extra={"cls": b"7"}))
    return folder


@pytest.fixture(scope="module")
def samples(shards: Path) -> dict[str, tuple[np.ndarray, str]]:
    """By key the pixels, uint8[H, W, 3], and the caption."""
    return {
        key: (np.array(Image.open(io.BytesIO(members["jpg"]))), members["txt"].decode())
        for key, members in read_oracle(shards / "00000.tar")
    }


def batch_of(folder: Path, cache: Path, tokenize: Any = None, **options: Any) -> tuple[Any, Any]:
    loader = streamload.make_loader(
        str(folder),
        tokenize,
        batch_size=8,
        train=False,  # the whole image, as it has the size that is cut out
        num_workers=0,
        cache_dir=cache,
        batches=streamload.Batches(with_keys=True),
        **options,
    )
    with loader:
        return next(iter(loader)), loader


def check(shown: Any, samples: dict[str, tuple[np.ndarray, str]], rows: int = 8) -> None:
    """Each row is the picture and the caption of the sample of its key."""
    assert len(shown.rows) == rows
    for values, picture in shown.rows:
        pixels, caption = samples[values["key"]]
        assert np.abs(picture.astype(int) - pixels).max() <= 1
        assert caption.startswith(values["caption"])
        assert len(values["caption"]) > 20
        assert values["shard"].endswith("00000.tar")


@pytest.mark.parametrize("output", ["tuple", "dict", "hf"])
def test_each_row_of_a_batch_has_its_own_pixels_caption_and_key(
    output: Any, shards: Path, tmp_path: Path, samples: dict[str, Any]
) -> None:
    options = {"output": output, "shards": streamload.Shards(label_key="cls")}
    batch, loader = batch_of(shards, tmp_path, Decoder(), **options)
    shown = streamload.show(batch, loader)
    check(shown, samples)
    assert {values["label"] for values, _ in shown.rows} == {7}
    assert shown.note == "8 of 8 rows, 224 × 224 pixels, restored by the mean and std of the transform"
    check(streamload.show(batch, tokenizer=Decoder(), rows=3), samples, rows=3)


@pytest.mark.deep
def test_the_statistics_are_those_of_the_loaders_own_transform(
    shards: Path, tmp_path: Path, samples: dict[str, Any]
) -> None:
    from transformers import CLIPImageProcessor

    processor = CLIPImageProcessor(image_mean=MEAN, image_std=STD)
    batch, loader = batch_of(shards, tmp_path, preprocess=processor)
    for given in (loader, processor):
        check(streamload.show(batch, given), samples)
    pixels = streamload.show(batch).rows[0][1]  # CLIP's, which are others
    assert np.abs(pixels.astype(int) - streamload.show(batch, loader).rows[0][1]).max() > 20


def test_captions_are_words_or_ids_and_a_transform_that_is_not_known_needs_its_numbers(
    shards: Path, tmp_path: Path, samples: dict[str, Any]
) -> None:
    batch, loader = batch_of(shards, tmp_path, preprocess=own)
    check(streamload.show(batch, loader, mean=MEAN, std=STD), samples)
    assert "each spread over its own range" in streamload.show(batch, loader).note
    ids = streamload.show((batch[0], tokenizer(["ab" * 20, *["a"] * 7])), loader)
    assert ids.rows[0][0]["caption"] == f"ids {' '.join(['97 98'] * 12)} …"
    assert ids.rows[1][0]["caption"] == "ids 97"
    with pytest.raises(OptionError, match="has no decode"):
        streamload.show(batch, loader, tokenizer=tokenizer)


def test_the_note_says_by_which_numbers_pixels_were_restored() -> None:
    levels = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    floats = normalised(levels, *CLIP)
    for images, loader, said in (
        (levels, None, "bytes as they are"),
        (floats, None, "restored by CLIP's mean and std, as no loader or mean= was given"),
        (floats.bfloat16(), None, "restored by CLIP's mean"),
        (levels.float(), lambda image: image, "each spread over its own range, as the transform isn't known"),
        ([image.numpy() for image in levels], None, "bytes as they are"),
        ([Image.fromarray(image.permute(1, 2, 0).numpy()) for image in levels], None, "bytes as they are"),
    ):
        batch = (images, ["a"] * 4) if isinstance(images, list) else images
        shown = streamload.show(batch, loader)
        assert said in shown.note, shown.note
        largest = 3 if getattr(images, "dtype", None) == torch.bfloat16 else 1
        if "spread" not in said:
            for (_, picture), image in zip(shown.rows, levels, strict=True):
                difference = picture.astype(int) - image.permute(1, 2, 0).numpy()
                assert np.abs(difference).max() <= largest
    grey = streamload.show(torch.full((1, 1, 4, 4), 9, dtype=torch.uint8))
    assert (grey.rows[0][1] == 9).all()
    assert grey.rows[0][1].shape == (4, 4, 3)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"ids": torch.zeros(2, 77, dtype=torch.long)}, "a dict with ids: int64[2, 77]"),
        ({"image": torch.zeros(2, 196, 768)}, "image: float32[2, 196, 768]"),
        ((torch.zeros(2, 77), ["a", "b"]), "a tuple with 0: float32[2, 77], 1: 2 strings"),
        (torch.zeros(0, 3, 8, 8), "float32[0, 3, 8, 8]"),
        ([], "a list with nothing"),
        ("a.tar", "a str"),
        (None, "a NoneType"),
        (["a cat", "a dog"], "was given 2 strings"),
        ({"image": {"seq_len": 4}}, "a dict with image: a dict with seq_len: a int"),
        (streamload.make_loader("a.tar", batch_size=2, num_workers=0), "a Loader"),
    ],
)
def test_what_is_no_batch_of_images_is_an_error_that_says_what_it_was(batch: Any, said: str) -> None:
    with pytest.raises(OptionError, match=re.escape(said)) as raised:
        streamload.show(batch)
    assert "expected a batch as a loader yields it" in str(raised.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mean": MEAN}, "expected three numbers each, or neither"),
        ({"mean": (0.5,), "std": (0.5,)}, "expected three numbers each, or neither"),
        ({"mean": 0.5, "std": 0.5}, r"mean=0\.5, std=0\.5.*; expected three numbers each"),
        ({"rows": 0}, "rows=0; expected a whole number of at least 1"),
        ({"rows": "3"}, "rows='3'; expected a whole number"),
    ],
)
def test_statistics_and_rows_of_another_form_are_an_error(options: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        streamload.show(torch.zeros(1, 3, 4, 4), **options)


@pytest.mark.parametrize("transform", [None, lambda image: image])
def test_pixels_that_are_no_numbers_are_reported_on_their_row(transform: Any) -> None:
    images = torch.zeros(4, 3, 8, 8)
    images[1] = float("nan")
    images[2, 0, 0] = float("inf")
    images[3, :, 0] = torch.tensor([-float("inf"), 0.0, 0.5, 1.0] * 2)
    shown = streamload.show(images, transform)  # a warning would be an error here
    said = [values.get("NaN or infinite") for values, _ in shown.rows]
    assert said == [None, *(f"{count} values, drawn black or white" for count in (192, 8, 6))]
    pictures = [picture for _, picture in shown.rows]
    assert (pictures[1] == 0).all()
    assert (pictures[2][0, :, 0] == 255).all()
    assert (pictures[3][0, [0, 4]] == 0).all()


def test_several_captions_of_a_row_are_all_shown_and_none_is_none() -> None:
    images = torch.zeros(2, 3, 8, 8)
    for texts, expected in (
        ([["a", "b"], ["c"]], ["a | b", "c"]),
        (["a", None], ["a", "None"]),
        (torch.tensor([[[1, 2, 0, 0], [3, 0, 0, 0]]] * 2), ["ids 1 2 | ids 3"] * 2),
    ):
        shown = streamload.show({"image": images, "text": texts})
        assert [values["caption"] for values, _ in shown.rows] == expected
        assert len(shown._repr_html_()) > 1000


def test_patches_are_put_together_into_their_images(
    shards: Path, tmp_path: Path, samples: dict[str, Any]
) -> None:
    patches = streamload.Patches(16, seq_lens=(256,), max_ratio=1.0)  # 196 of them are the whole image
    for output in ("tuple", "dict"):
        images = streamload.Images(patches=patches)
        batch, loader = batch_of(shards, tmp_path, output=output, images=images)
        shown = streamload.show(batch, loader, rows=5)
        check(shown, samples, rows=5)
        assert shown.note.startswith("5 of 8 rows, 224 × 224 pixels, restored by the mean")
    wide = {"patches": torch.arange(24.0).view(2, 1, 12).repeat(1, 2, 1)}  # 2 × 2 pixels each
    wide["patch_coord"] = torch.tensor([[[0, 0], [0, 1]], [[1, 0], [0, 0]]])
    wide["patch_valid"] = torch.ones(2, 2, dtype=torch.bool)
    shown = streamload.show({"image": wide})
    assert [picture.shape for _, picture in shown.rows] == [(2, 4, 3), (4, 2, 3)]
    assert shown.note.startswith("2 of 2 rows, 2 sizes")


@browser.needs_browser
def test_a_saved_page_has_every_picture_in_its_own_size_and_hostile_captions_as_text(tmp_path: Path) -> None:
    captions = ["<script>alert(1)</script>", "a</div>b", "https://host/a?X-Amz-Signature=c0ffee"]
    keys = {"__key__": ["<b>", "k1", "k2"], "__url__": ["https://h/a.tar?sig=c0ffee"] * 3}
    shown = streamload.show((torch.rand(3, 3, 40, 60).mul(255).byte(), captions[:3], keys))
    shown.save(tmp_path / "batch.html")
    with pytest.raises(OptionError, match=r"expected a name with \.html"):
        shown.save(tmp_path / "batch.png")
    look = """return JSON.stringify({sizes:[...document.images].map(i=>[i.naturalWidth,i.naturalHeight]),
      scripts:document.querySelectorAll('main script').length,
      cells:document.querySelectorAll('.streamload-rows>div').length,
      fetched:performance.getEntriesByType('resource').filter(r=>!r.name.startsWith('data:')).length})"""
    seen = json.loads(browser.evaluated(tmp_path / "batch.html", look))
    assert seen == {"sizes": [[60, 40]] * 3, "scripts": 0, "cells": 3, "fetched": 0}
    assert "sig=c0ffee" not in shown._repr_html_()


def test_it_needs_no_ipython_and_no_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", None)
    shown = streamload.show(np.zeros((2, 3, 5, 5), np.uint8))
    assert repr(shown).startswith("<2 of 2 rows, 5 × 5 pixels, bytes as they are;")
