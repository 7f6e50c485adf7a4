"""streamload under a training by OpenCLIP's conventions, without open_clip: both shapes of its data module.

This is beside webdataset 1.x; beside 0.2.86, and with open_clip itself, see tests/openclip.
"""

import argparse
import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image

from streamload.errors import OptionError
from streamload.integrations import openclip
from streamload.integrations.openclip.arguments import OwnArguments, take_own

SIZES = {"batch_size": 4, "workers": 0, "seed": 0, "world_size": 1, "rank": 0}
NOTHING = {"train_data": None, "train_num_samples": None, "val_data": None, "val_num_samples": None}
OF_DEVELOPMENT = {
    "text_key": "txt",
    "json_text_key": None,
    "json_text_key_probs": None,
    "image_key": "jpg;png;jpeg;webp",
    "max_image_pixels": 25_000_000,
    "use_naflex": False,
    "genlip": False,
    "bucket_pool": 2048,
}


def data_module(name: str = "data", *, development: bool = False) -> ModuleType:
    """A module with the signature that open_clip_train.data has in 3.3.0, or in its development version."""
    module = ModuleType(name)

    def released(
        args: Any,
        preprocess_img: Any,
        is_train: bool,
        epoch: int = 0,
        floor: bool = False,
        tokenizer: Any = None,
    ) -> None:
        raise NotImplementedError

    def developed(
        args: Any,
        preprocess_img: Any,
        is_train: bool,
        epoch: int = 0,
        floor: bool = False,
        tokenizer: Any = None,
        naflex_data_config: Any = None,
    ) -> None:
        raise NotImplementedError

    module.get_wds_dataset = developed if development else released  # type: ignore[attr-defined]
    return module


def args_for(*, development: bool = False, **given: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{
            **SIZES,
            **NOTHING,
            "dataset_resampled": False,
            "dataset_type": "webdataset",
            **(OF_DEVELOPMENT if development else {}),
            **given,
        }
    )


def tokenize(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[len(caption), 0] for caption in captions])


def width_of(image: Image.Image) -> torch.Tensor:
    return torch.tensor([image.width])


def png(width: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((2, width, 3), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Eight samples in two shards by webdataset's ShardWriter: widths 1 to 8, caption 3 is empty."""
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "cache"))
    with webdataset.ShardWriter(f"{tmp_path}/%d.tar", maxcount=5, verbose=0) as writer:
        for n in range(1, 9):
            sample = {"txt": "" if n == 3 else "x" * n, "json": {"caption": "y" * 2 * n}, "png": png(n)}
            writer.write({"__key__": f"{n}", **sample})
    return f"{tmp_path}/{{0..1}}.tar"


def validate(module: ModuleType, args: argparse.Namespace, **more: Any) -> list[Any]:
    data = module.get_wds_dataset(args, width_of, is_train=False, tokenizer=tokenize, **more)
    return list(data.dataloader)


def test_batches_are_tuples_under_the_released_version(shards: str) -> None:
    module = data_module()
    openclip.install(module)
    batches = validate(module, args_for(val_data=shards))
    assert [images.flatten().tolist() for images, _ in batches] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert [texts[:, 0].tolist() for _, texts in batches] == [[1, 2, 0, 4], [5, 6, 7, 8]]


def test_batches_are_dicts_of_image_and_text_under_the_development_version(shards: str) -> None:
    module = data_module(development=True)
    openclip.install(module)
    args = args_for(development=True, val_data=shards)
    batches = validate(module, args, naflex_data_config=None)
    assert all(sorted(batch) == ["image", "text"] for batch in batches)
    assert [batch["text"][:, 0].tolist() for batch in batches] == [[1, 2, 4, 5], [6, 7, 8]]


def test_the_development_versions_selection_of_samples_is_heeded(shards: str) -> None:
    module = data_module(development=True)
    openclip.install(module)
    args = args_for(development=True, val_data=shards, max_image_pixels=2 * 6, json_text_key="caption")
    batches = validate(module, args)
    assert [batch["image"].flatten().tolist() for batch in batches] == [[1, 2, 3, 4], [5, 6]]
    assert [batch["text"][:, 0].tolist() for batch in batches] == [[2, 4, 6, 8], [10, 12]]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"use_naflex": True}, "--use-naflex"),
        ({"genlip": True, "variable_text": True}, "--genlip, --variable-text"),
        ({"json_text_key": "a", "json_text_key_probs": [1.0]}, "--json-text-key-probs"),
        ({"json_text_key": "a;b"}, "several fields"),
    ],
)
def test_what_the_development_version_asks_beyond_that_is_an_error(
    shards: str, flags: dict[str, Any], named: str
) -> None:
    module = data_module(development=True)
    openclip.install(module)
    with pytest.raises(OptionError, match=named):
        validate(module, args_for(development=True, val_data=shards, **flags))


def test_an_unknown_argument_of_the_function_is_an_error_unless_it_is_none(shards: str) -> None:
    module = data_module(development=True)
    openclip.install(module)
    with pytest.raises(OptionError, match="naflex_data_config"):
        validate(module, args_for(development=True, val_data=shards), naflex_data_config={"patch": 16})


def test_an_epoch_goes_on_in_the_pass_where_the_last_one_stopped(shards: str) -> None:
    module = data_module()
    openclip.install(module)
    args = args_for(train_data=shards, train_num_samples=8, batch_size=5)
    data = module.get_wds_dataset(args, width_of, is_train=True, tokenizer=tokenize)
    assert (data.dataloader.num_batches, data.dataloader.num_samples) == (2, 10)
    seen: list[int] = []
    for epoch in (0, 1):
        data.set_epoch(epoch)
        seen += [width for images, _ in data.dataloader for width in images.flatten().tolist()]
    assert sorted(seen[:8]) == sorted(seen[8:16]) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(seen) == 2 * 10


@pytest.mark.parametrize(
    ("words", "own", "left"),
    [
        ([], (0, True), []),
        (
            ["--lr", "1", "--streamload-save-steps", "5", "--logs", "x"],
            (5, True),
            ["--lr", "1", "--logs", "x"],
        ),
        (["--streamload-save-steps=20"], (20, True), []),
        (["--streamload-as-given", "--lr", "1"], (0, False), ["--lr", "1"]),
        (["--streamload-shared-cache", "s3://b/c", "--lr=1"], (0, True, "s3://b/c"), ["--lr=1"]),
        (["--streamload-shared-cache=/mnt/nfs", "x"], (0, True, "/mnt/nfs"), ["x"]),
        (["--streamload-as-given=1"], (0, True), ["--streamload-as-given=1"]),
        (["--streamload-save-steps=20", "--streamload-save-steps", "0"], (0, True), []),
        (["--streamload-save-stepsize=20"], (0, True), ["--streamload-save-stepsize=20"]),
        (["--streamload-prepare", "raw-256", "--lr", "1"], (0, True, None, "raw-256"), ["--lr", "1"]),
        (["--streamload-prepare=jpeg-256-q90"], (0, True, None, "jpeg-256-q90"), []),
    ],
)
def test_our_flags_are_taken_out_of_a_command_line(
    words: list[str], own: tuple[Any, ...], left: list[str]
) -> None:
    assert take_own(words) == (OwnArguments(*own), left)


@pytest.mark.parametrize("words", [["=raw"], [""], ["", "--lr"]])
def test_our_flag_needs_a_recipe(words: list[str]) -> None:
    first, *others = words
    with pytest.raises(OptionError, match="is no recipe for prepared images"):
        take_own([f"--streamload-prepare{first}", *others])


@pytest.mark.parametrize("words", [["=-1"], ["=x"], ["="], ["", "1.5"], [""], ["", "--lr"]])
def test_our_flag_needs_a_number_of_steps(words: list[str]) -> None:
    first, *others = words
    with pytest.raises(
        OptionError, match=r"--streamload-save-steps '.*': it has to be a whole number from 0"
    ):
        take_own([f"--streamload-save-steps{first}", *others])
    with pytest.raises(OptionError, match="save_steps=-1"):
        openclip.install(data_module(), save_steps=-1)


def test_uninstalling_puts_the_original_back() -> None:
    module = data_module()
    original = module.get_wds_dataset
    uninstall = openclip.install(module)
    assert module.get_wds_dataset is not original
    uninstall()
    assert module.get_wds_dataset is original


def test_installing_without_open_clip_fails_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "open_clip_train", None)
    monkeypatch.setitem(sys.modules, "training", None)
    with pytest.raises(ImportError, match="open_clip_torch"):
        openclip.install()


@pytest.mark.parametrize("package", ["open_clip_train", "training"])
def test_the_command_hands_its_arguments_to_the_training_behind_a_dash_that_torchrun_needs(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun takes --logs for itself, unless a -- stands before the arguments."""
    taken: list[tuple[list[str], bool]] = []
    data, training = data_module(f"{package}.data"), ModuleType(f"{package}.main")
    original = data.get_wds_dataset

    def run(arguments: list[str]) -> None:
        taken.append((arguments, data.get_wds_dataset is not original))

    training.main = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "open_clip_train", None)
    for module in (ModuleType(package), data, training):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    openclip.main(["--", "--logs", "here", "--", "x"])
    openclip.main(["--logs", "here", "--streamload-save-steps", "5"])
    assert taken == [(["--logs", "here", "--", "x"], True), (["--logs", "here"], True)]
