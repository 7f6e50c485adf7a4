"""NaFlex batches and captions of several lengths as OpenCLIP's development version trains on them.

No package has that version. What its training code reads of a batch is written down here as assertions; the
values are held to timm, whose collator and transforms it uses, in the environment that has timm.
"""

from __future__ import annotations

import argparse
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image

from benchmarks.torchvision_stub import define_torchvision_schemas
from streamload.errors import OptionError
from streamload.integrations import openclip
from streamload.testing.shards import ShardOptions, read_oracle, write_shards
from streamload.transforms import kernel
from tests.integrations.test_install import (
    OF_DEVELOPMENT,
    args_for,
    data_module,
    png,
    tokenize,
    write_shard,
)

define_torchvision_schemas()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    timm_data = pytest.importorskip(
        "timm.data", reason="timm is not in this environment; `make pytest-openclip` runs these tests"
    )
    from timm.data.naflex_dataset import NaFlexCollator, calculate_naflex_batch_size
    from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

FLAGS = {
    "naflex_seq_lens": [9, 36],
    "naflex_max_tokens_per_batch": 72,
    "naflex_batch_divisor": 2,
    "naflex_loss_scale": "linear",
    "length_bucketing": False,
    "variable_text": False,
    "text_pad_multiple": None,
}


@dataclass(frozen=True)
class Config:
    """What OpenCLIP's NaFlex configuration has."""

    train_patch_sizes: tuple[tuple[int, int], ...] = ((16, 16),)
    train_seq_lens: tuple[int, ...] = (9, 36)
    train_seq_len_probs: tuple[float, ...] | None = None
    train_num_image_tokens: int | None = None
    max_tokens_per_batch: int = 72
    batch_divisor: int = 2
    eval_patch_size: tuple[int, int] = (16, 16)
    eval_seq_len: int = 36

    @property
    def eval_config(self) -> tuple[tuple[int, int], int]:
        return self.eval_patch_size, self.eval_seq_len


class Factory:
    """Transforms of timm for a number of patches, as --aug-cfg use_timm=True naflex=True makes them."""

    def __init__(self, is_train: bool) -> None:
        self.options = {"scale": (0.9, 1.0), "color_jitter": None} if is_train else {"patchify": True}
        self.options["is_training"] = is_train
        name = "is_naflex_transform_factory" if is_train else "is_naflex_eval_transform_factory"
        setattr(self, name, True)

    def __call__(self, max_seq_len: int, patch_size: tuple[int, int]) -> Any:
        return timm_data.create_transform(
            (3, 224, 224),
            naflex=True,
            interpolation="bicubic",
            max_seq_len=max_seq_len,
            patch_size=patch_size,
            **self.options,
        )


class ByteTokenizer:
    """A byte an id, as OpenCLIP's tokenizers that can leave out padding."""

    context_length = 40
    pad_token_id = 256

    def __call__(self, captions: str | list[str], pad: bool = True) -> list[torch.Tensor]:
        assert not pad
        captions = [captions] if isinstance(captions, str) else captions
        return [torch.tensor([*caption.encode()[: self.context_length - 1], 257]) for caption in captions]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """90 samples."""
    directory = tmp_path_factory.mktemp("naflex")
    return write_shards(directory, [40, 50], seed=7, options=ShardOptions(image_side=(20, 150)))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "cache"))
    module = data_module(development=True)
    uninstall = openclip.install(module)
    yield module
    uninstall()


def arguments(shards: list[Path], **given: Any) -> argparse.Namespace:
    urls = str(shards[0].parent)
    sizes = {"train_num_samples": 60, "val_num_samples": 90, "batch_size": 8, "workers": 2, "seed": 3}
    fixed = {**OF_DEVELOPMENT, **FLAGS, "use_naflex": True, "train_data": urls, "val_data": urls, **sizes}
    return args_for(**{**fixed, **given})


def data_of(module: ModuleType, args: argparse.Namespace, is_train: bool, **given: Any) -> Any:
    options = {"tokenizer": tokenize, "naflex_data_config": Config(), **given}
    return module.get_wds_dataset(args, Factory(is_train), is_train=is_train, **options)


def check_batch(batch: Any, rows: int, seq_len: int, text: tuple[int, torch.dtype]) -> None:
    """What OpenCLIP's training reads: nothing else, nested like this."""
    assert list(batch) == ["image", "text"]
    image = batch["image"]
    assert list(image) == ["patches", "patch_coord", "patch_valid", "seq_len"]
    assert type(image["seq_len"]) is int
    assert image["seq_len"] == seq_len
    forms = {name: (tuple(image[name].shape), image[name].dtype) for name in list(image)[:3]}
    assert forms == {
        "patches": ((rows, seq_len, 16 * 16 * 3), torch.float32),
        "patch_coord": ((rows, seq_len, 2), torch.int64),
        "patch_valid": ((rows, seq_len), torch.bool),
    }
    assert (batch["text"].shape, batch["text"].dtype) == ((rows, text[0]), text[1])


def rows_of(seq_len: int, budget: int, divisor: int, text_tokens: int = 0) -> int:
    return calculate_naflex_batch_size(budget, seq_len + text_tokens, divisor=divisor, rounding="floor")


def test_a_training_has_the_rows_that_the_budget_has_room_for_and_what_is_left(
    module: ModuleType, shards: list[Path]
) -> None:
    data = data_of(module, arguments(shards), True)
    steps = []
    for epoch in (0, 1):
        data.set_epoch(epoch)
        batches = list(data.dataloader)
        assert len(batches) == data.dataloader.num_batches
        for batch in batches:
            rows = len(batch["text"])
            check_batch(batch, rows, batch["image"]["seq_len"], (2, torch.int64))
            steps.append((epoch, batch["image"]["seq_len"], rows))
    assert (rows_of(9, 72, 2), rows_of(36, 72, 2)) == (8, 2)
    for epoch in (0, 1):
        own = [step[1:] for step in steps if step[0] == epoch]
        less = [step for step in own if step not in ((9, 8), (36, 2))]
        assert len(less) <= 1 + (data.dataloader.num_batches % 2)  # the last one, and its repetition
        assert {seq_len for seq_len, _ in own} == {9, 36}
    assert data.dataloader.num_batches % 2 == 0
    assert data.dataloader.num_samples - 60 in (0, 1, 2, 8)  # of one more step, so that workers have as many


def test_a_budget_of_tokens_makes_epochs_of_so_many(module: ModuleType, shards: list[Path]) -> None:
    config = Config(train_num_image_tokens=700)
    args = arguments(shards, train_num_samples=None, workers=0)
    loader = data_of(module, args, True, naflex_data_config=config).dataloader
    tokens = [batch["image"]["seq_len"] * len(batch["text"]) for batch in loader]
    assert len(tokens) == loader.num_batches
    assert 700 <= sum(tokens) < 700 + 36
    assert all(each <= 72 for each in tokens)
    with pytest.raises(OptionError, match="--train-num-samples or --naflex-num-train-image-tokens"):
        data_of(module, arguments(shards), True, naflex_data_config=config)


def test_ranks_have_equal_steps_and_different_samples(module: ModuleType, shards: list[Path]) -> None:
    sides = [
        data_of(module, arguments(shards, rank=rank, world_size=2, workers=0), True).dataloader
        for rank in (0, 1)
    ]
    assert sides[0].num_batches == sides[1].num_batches
    assert sides[0].num_samples == 60  # 30 a rank
    taken = []
    for ours, theirs in zip(*sides, strict=True):
        assert ours["image"]["patches"].shape == theirs["image"]["patches"].shape
        taken += [*ours["image"]["patches"].flatten(1).sum(1), *theirs["image"]["patches"].flatten(1).sum(1)]
    assert len({each.item() for each in taken}) == len(taken) == 60


def test_lengths_come_by_their_probabilities(module: ModuleType, shards: list[Path]) -> None:
    config = Config(train_seq_lens=(36, 9), train_seq_len_probs=(0.0, 1.0))
    batches = list(data_of(module, arguments(shards), True, naflex_data_config=config).dataloader)
    assert {batch["image"]["seq_len"] for batch in batches} == {9}


def test_an_evaluation_has_timms_batches_of_the_largest_length(
    module: ModuleType, shards: list[Path]
) -> None:
    if kernel.why_not():
        pytest.skip(kernel.why_not())
    data = data_of(module, arguments(shards, batch_size=32), False)
    assert (data.dataloader.num_batches, data.dataloader.num_samples) == (3, 90)
    batches = list(data.dataloader)
    transform = Factory(False)(max_seq_len=36, patch_size=(16, 16))
    made = [
        (transform(Image.open(io.BytesIO(members["jpg"])).convert("RGB")), 0)
        for path in shards
        for _, members in read_oracle(path)
    ]
    for number, batch in enumerate(batches):
        rows = made[32 * number : 32 * (number + 1)]
        check_batch(batch, len(rows), 36, (2, torch.int64))
        theirs, _ = NaFlexCollator(36)(rows)
        assert list(theirs) == list(batch["image"])
        for name, value in theirs.items():
            ours = batch["image"][name]
            assert torch.equal(ours, value) if isinstance(value, torch.Tensor) else ours == value
    assert sum(len(batch["text"]) for batch in batches) == 90


@pytest.mark.parametrize("is_train", [True, False])
@pytest.mark.parametrize(("multiple", "use_naflex"), [(None, True), (8, True), (16, False)])
def test_captions_of_several_lengths_are_padded_to_the_longest_of_their_batch(
    module: ModuleType, shards: list[Path], is_train: bool, multiple: int | None, use_naflex: bool
) -> None:
    args = arguments(shards, variable_text=True, text_pad_multiple=multiple, use_naflex=use_naflex)
    options: dict[str, Any] = {"tokenizer": ByteTokenizer()}
    if use_naflex:
        data = data_of(module, args, is_train, **options)
    else:
        data = module.get_wds_dataset(args, lambda _: torch.zeros(2), is_train=is_train, **options)
    for batch in data.dataloader:
        assert list(batch) == ["image", "text", "text_valid"]
        text, valid = batch["text"], batch["text_valid"]
        assert (text.dtype, valid.dtype, valid.shape) == (torch.int64, torch.bool, text.shape)
        assert torch.equal(valid, text != 256)
        longest = int(valid.sum(1).max())
        assert text.shape[1] == min(-(-longest // (multiple or 1)) * (multiple or 1), 40)
        assert (text.flip(1)[:, 0] != 256).any() or multiple
        assert all((row[own] == 257).sum() == 1 for row, own in zip(text, valid, strict=True))


def test_captions_of_genlip_count_as_tokens_of_a_row(module: ModuleType, shards: list[Path]) -> None:
    config = Config(max_tokens_per_batch=300)
    args = arguments(shards, genlip=True, workers=0)
    data = data_of(module, args, True, tokenizer=ByteTokenizer(), naflex_data_config=config)
    steps = {(batch["image"]["seq_len"], len(batch["text"])) for batch in data.dataloader}
    assert {(seq_len, rows_of(seq_len, 300, 2, 40)) for seq_len in (9, 36)} <= steps


def test_a_tokenizer_that_ends_captions_with_padding_is_refused(
    module: ModuleType, shards: list[Path]
) -> None:
    args = arguments(shards, variable_text=True)
    tokenizer = ByteTokenizer()
    tokenizer.pad_token_id = 257
    with pytest.raises(OptionError, match="ByteTokenizer ends captions with its pad_token_id 257"):
        data_of(module, args, True, tokenizer=tokenizer)
    for missing in ("pad_token_id", "context_length"):
        tokenizer = ByteTokenizer()
        setattr(tokenizer, missing, None)
        with pytest.raises(OptionError, match=f"need a tokenizer with a {missing}; ByteTokenizer has none"):
            data_of(module, args, True, tokenizer=tokenizer)


def test_length_bucketing_puts_captions_of_about_the_same_length_together(
    module: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "captions").mkdir()
    samples = [{"txt": b"x" * (1 + number * 17 % 37), "png": png(2)} for number in range(128)]
    for shard in range(2):
        write_shard(tmp_path / "captions" / f"{shard}.tar", samples[shard::2])
    shares = {}
    for is_bucketed in (False, True):
        args = arguments([tmp_path / "captions" / "0.tar"], variable_text=True, use_naflex=False)
        args.length_bucketing, args.bucket_pool, args.train_num_samples = is_bucketed, 64, 256
        options = {"is_train": True, "tokenizer": ByteTokenizer()}
        loader = module.get_wds_dataset(args, lambda _: torch.zeros(2), **options).dataloader
        batches = list(loader)
        assert len(batches) == loader.num_batches == 32
        assert all(list(batch) == ["image", "text", "text_valid"] for batch in batches)
        assert all(batch["text"].shape[0] == 8 for batch in batches)
        lengths = [length for batch in batches for length in batch["text_valid"].sum(1).tolist()]
        passes = [sorted(lengths[place : place + 128]) for place in (0, 128)]
        assert passes[0] == passes[1] == sorted(2 + number * 17 % 37 for number in range(128))
        shares[is_bucketed] = sum(lengths) / sum(batch["text"].numel() for batch in batches)
    assert shares[True] > 1.2 * shares[False]


def test_length_bucketing_is_accepted_where_it_changes_nothing(
    module: ModuleType, shards: list[Path]
) -> None:
    args = arguments(shards, length_bucketing=True, variable_text=False)
    assert len(list(data_of(module, args, True).dataloader))
    args = arguments(shards, length_bucketing=True, variable_text=True)
    assert len(list(data_of(module, args, False, tokenizer=ByteTokenizer()).dataloader)) == 12
    with pytest.raises(OptionError, match="--length-bucketing with --use-naflex"):
        data_of(module, args, True, tokenizer=ByteTokenizer())


def test_what_cannot_be_made_names_its_flag(module: ModuleType, shards: list[Path]) -> None:
    several = Config(train_patch_sizes=((16, 16), (32, 32)))
    with pytest.raises(OptionError, match="several of OpenCLIP's --naflex-patch-sizes: give one of 16 32"):
        data_of(module, arguments(shards), True, naflex_data_config=several)
    with pytest.raises(OptionError, match="--use-naflex: OpenCLIP gave no naflex_data_config"):
        data_of(module, arguments(shards), True, naflex_data_config=None)
    with pytest.raises(OptionError, match="--use-naflex is for transforms by --aug-cfg use_timm=True naflex"):
        module.get_wds_dataset(
            arguments(shards), lambda _: None, is_train=True, tokenizer=tokenize, naflex_data_config=Config()
        )


def test_a_naflex_vit_trains_on_batches_whose_loss_is_scaled_by_their_rows(
    module: ModuleType, shards: list[Path]
) -> None:
    torch.manual_seed(0)
    model = NaFlexVit(
        NaFlexVitCfg(patch_size=16, embed_dim=32, depth=1, num_heads=2, pos_embed_grid_size=(6, 6))
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    args = arguments(shards)
    scales = set()
    for batch in data_of(module, args, True).dataloader:
        image = {name: value for name, value in batch["image"].items() if name != "seq_len"}
        features = model(image)
        scales.add(len(features) / args.batch_size)
        loss = features.square().mean() * len(features) / args.batch_size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert torch.isfinite(loss)
    assert {1.0, 0.25} <= scales
