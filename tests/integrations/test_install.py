"""streamload under a training by OpenCLIP's conventions, without open_clip: both shapes of its data module.

This is beside webdataset 1.x; beside 0.2.86, and with open_clip itself, see tests/openclip.
"""

import argparse
import io
import json
import random
import re
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image

from streamload.errors import NoValidSamples, OptionError
from streamload.integrations import openclip
from streamload.integrations.openclip.arguments import take_own
from streamload.steering.progress import Progress
from streamload.steering.schedule import Schedule
from streamload.testing.shards import write_shards

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


def write_shard(path: Path, samples: list[dict[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for number, members in enumerate(samples):
            for extension, data in members.items():
                info = tarfile.TarInfo(f"{path.stem}-{number}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


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


def test_batches_keep_their_form_where_it_is_installed_twice(shards: str) -> None:
    module = data_module()
    openclip.install(module)
    openclip.install(module, compile=False)
    assert all(isinstance(batch, tuple) for batch in validate(module, args_for(val_data=shards)))


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
        ({"genlap": True, "use_naflex": True}, "--genlap"),
        ({"naflex_mixture": "a,b", "bucket_size": 3}, "--bucket-size, --naflex-mixture"),
        ({"json_text_key": "a", "json_text_key_probs": [1.0, 2.0]}, "--json-text-key-probs"),
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
    validate(module, args_for(development=True, val_data=shards), audio_config=None)
    with pytest.raises(OptionError, match="audio_config"):
        validate(module, args_for(development=True, val_data=shards), audio_config={"rate": 16})


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
        ([], {}, []),
        (["--streamload-as-given", "--lr", "1"], {"compile": False}, ["--lr", "1"]),
        (
            ["--logs", "x", "--streamload-shared-cache", "s3://b/c", "--lr=1"],
            {"shared_cache": "s3://b/c"},
            ["--logs", "x", "--lr=1"],
        ),
        (["--streamload-shared-cache=/mnt/nfs", "x"], {"shared_cache": "/mnt/nfs"}, ["x"]),
        (["--streamload-prepare", "raw-256", "--", "-x"], {"prepare": "raw-256"}, ["--", "-x"]),
        (["--streamload-prepare=jpeg-256-q90"], {"prepare": "jpeg-256-q90"}, []),
        (["--streamload-prepare=raw"], {"prepare": "raw"}, []),
        (["--streamload-prepare", "auto"], {"prepare": "auto"}, []),
        (
            ["--streamload-moved", "http://a:1/?x=1", "/b", "--lr", "--streamload-moved", "c", "d"],
            {"moved": [["http://a:1/?x=1", "/b"], ["c", "d"]]},
            ["--lr"],
        ),
        (["--streamload-legacy-main"], {"legacy_main": True}, []),
        (["--streamload-device", "none"], {"device": "none"}, []),
    ],
)
def test_our_flags_are_taken_out_of_a_command_line(
    words: list[str], own: dict[str, Any], left: list[str]
) -> None:
    given: dict[str, Any] = dict.fromkeys(("shared_cache", "prepare", "decode", "moved", "mixing", "device"))
    given |= {"compile": True, "decode": "host", "legacy_main": False, "journal": True}
    assert take_own(words) == (argparse.Namespace(**(given | own)), left)


def test_a_schedule_of_weights_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "weights.json").write_text('{"20": {"0": 1, "1": 3}}')
    for words in (["--streamload-mixing", f"schedule={tmp_path}/weights.json"],
                  [f"--streamload-mixing=schedule={tmp_path}/weights.json"]):  # fmt: skip
        own, left = take_own([*words, "--lr"])
        assert (own.mixing, left) == (Schedule({20: {"0": 1, "1": 3}}), ["--lr"])


def test_progress_is_a_policy_that_decides_every_200_steps_or_as_often_as_it_is_told() -> None:
    for words, policy in (
        (["--streamload-mixing", "progress"], Progress()),
        (["--streamload-mixing=progress=20"], Progress(every=20)),
    ):
        own, left = take_own([*words, "--lr"])
        assert (own.mixing, left) == (policy, ["--lr"])


def test_progress_needs_a_training_whose_losses_can_be_reported() -> None:
    module = data_module()
    original = module.get_wds_dataset
    with pytest.raises(OptionError, match=r"--streamload-mixing progress: .*no create_loss.*schedule=FILE"):
        openclip.install(module, mixing=Progress())
    assert module.get_wds_dataset is original


@pytest.mark.parametrize("workers", [0, 2])
def test_weights_follow_a_schedule_and_one_source_alone_has_none(tmp_path: Path, workers: int) -> None:
    for name in "ab":
        write_shards(tmp_path / name, [60])
    module = data_module()
    uninstall = openclip.install(module, mixing=Schedule({10: {"0": 1, "1": 3}}))
    options = {"preprocess_img": lambda image: image.size, "is_train": True}
    given = {**NOTHING, **SIZES, "dataset_resampled": False, "dataset_type": "webdataset", "workers": workers}
    try:
        urls = f"{tmp_path}/a/00000.tar::{tmp_path}/b/00000.tar"
        args = argparse.Namespace(**(given | {"train_data": urls, "train_num_samples": 320}))
        batches = module.get_wds_dataset(args, **options).dataloader
        shares = [batches.loader.info.source.float().mean().item() for _ in batches]
        args.train_data = f"{tmp_path}/a/00000.tar"
        with pytest.raises(OptionError, match="--streamload-mixing is for several sources"):
            module.get_wds_dataset(args, **options)
    finally:
        uninstall()
    assert shares[:20] == [0.5] * 20  # it counts from the next decision step
    assert shares[20:] == [0.75] * 60


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--streamload-prepare=raw-"], "--streamload-prepare: .*is not a recipe for prepared images"),
        (["--streamload-prepare"], "--streamload-prepare: "),
        (["--streamload-shared-cache", "pipe:x"], "--streamload-shared-cache: "),
        (["--streamload-as-given=1"], "--streamload-as-given: "),
        (["--streamload-moved", "a"], "--streamload-moved: "),
        (["--streamload-mixing=progress=often"], "expected schedule=FILE, progress or progress=STEPS"),
        (["--streamload-mixing=progress=0"], "every=0"),
        (["--streamload-mixing", "exp3"], "expected schedule=FILE, progress or"),
        (["--streamload-mixing=schedule=/no/such"], "holds no schedule"),
        (["--streamload-moves", "a"], "unrecognized arguments: --streamload-moves"),
        (["--streamload-save-steps", "5"], "a state newer than them.*--train-num-samples"),
    ],
)
def test_a_flag_of_ours_that_cannot_be_used_is_named(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        take_own(words)
    assert stopped.value.code == 2
    assert re.search(says, " ".join(capsys.readouterr().err.split()))


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
    openclip.main(["--logs", "here", "--streamload-as-given"])
    assert taken == [(["--logs", "here", "--", "x"], True), (["--logs", "here"], True)]


def test_help_shows_our_flags_before_those_of_open_clip(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, training = data_module("open_clip_train.data"), ModuleType("open_clip_train.main")
    training.main = lambda arguments: print("open_clip's", arguments)  # type: ignore[attr-defined]
    for module in (ModuleType("open_clip_train"), data, training):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    openclip.main(["--help"])
    said = capsys.readouterr().out
    flags = ["as-given", "shared-cache URL", "prepare RECIPE", "moved OLD NEW", "legacy-main"]
    assert all(f"--streamload-{flag}" in said for flag in flags)
    assert said.endswith("open_clip's ['--help']\n")


def test_the_second_entry_point_of_the_development_version_runs_on_our_loader(
    shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """legacy_main has its own data module, whose function knows no naflex_data_config and gives dicts."""
    data, legacy = (
        data_module("open_clip_train.data", development=True),
        ModuleType("open_clip_train.legacy_data"),
    )
    legacy.get_wds_dataset_legacy = data_module().get_wds_dataset  # type: ignore[attr-defined]
    original = legacy.get_wds_dataset_legacy
    entry, seen = ModuleType("open_clip_train.legacy_main"), []

    def run(arguments: list[str]) -> None:
        args = args_for(development=True, val_data=shards, max_image_pixels=2 * 6)
        loader = legacy.get_wds_dataset_legacy(args, width_of, is_train=False, tokenizer=tokenize)
        seen.extend(loader.dataloader)

    entry.main = run  # type: ignore[attr-defined]
    for module in (ModuleType("open_clip_train"), data, legacy, entry):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    openclip.install(data)()
    assert legacy.get_wds_dataset_legacy is original
    openclip.main(["--streamload-legacy-main"])
    assert [sorted(batch) for batch in seen] == [["image", "text"]] * 2
    # It doesn't heed --max-image-pixels, and leaves the empty caption out.
    assert [n for batch in seen for n in batch["image"].flatten().tolist()] == [1, 2, 4, 5, 6, 7, 8]


CAPTIONS = [b"a", b"", b" \n", b"b", b"\xff\xfe"]


@pytest.mark.parametrize(
    ("development", "flags", "expected"),
    [
        (False, {}, ["a", "", " \n", "b"]),
        (True, {}, ["a", "b"]),
        (True, {"text_key": "caption;txt"}, ["A", "B"]),
        (True, {"json_text_key": "caption"}, ["x", "y"]),
        (True, {"json_text_key": "caption;alt"}, ["x", "2", "y"]),
        (True, {"json_text_key": " alt ;; caption"}, ["1", "2", "y"]),
        (True, {"json_text_key": "caption;alt", "json_text_key_probs": [0.0, 1.0]}, ["1", "2", "y"]),
        (True, {"json_text_key": "caption;alt", "json_text_key_probs": [0.0, 0.0]}, ["x", "2", "y"]),
    ],
)
def test_empty_and_blank_captions_are_used_or_left_out_as_by_the_version_that_runs(
    development: bool,
    flags: dict[str, Any],
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As FilterNonEmptyText of the development version: empty, blank, null, missing and undecodable ones."""
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "cache"))
    fields: list[Any] = ["x", "", " ", "y", None]
    more: list[Any] = ["1", "2", 3, "", ["5"]]
    metas = [{"caption": field, "alt": alt} for field, alt in zip(fields, more, strict=True)]
    samples = [
        {"png": png(n), "txt": text, "caption": text.upper(), "json": json.dumps(meta).encode()}
        for n, (text, meta) in enumerate(zip(CAPTIONS, metas, strict=True), 1)
    ]
    write_shard(tmp_path / "0.tar", samples)
    module = data_module(development=development)
    openclip.install(module)
    given = {"development": development, "batch_size": 3, "train_num_samples": 6, **flags}
    for is_train in (False, True):
        args = args_for(train_data=str(tmp_path / "0.tar"), val_data=str(tmp_path / "0.tar"), **given)
        data = module.get_wds_dataset(args, width_of, is_train=is_train)
        texts = [batch["text"] if development else batch[1] for batch in data.dataloader]
        if is_train:
            assert [len(own) for own in texts] == [3, 3]
            assert {text for own in texts for text in own} <= set(expected)
        else:
            assert [text for own in texts for text in own] == expected


def test_any_number_of_bad_samples_and_missing_shards_is_gone_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first shards are missing, then two thirds of the samples are bad: in training and in evaluation."""
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "cache"))
    for shard in range(12):
        bad = range(4) if shard % 3 else ()
        images = [b"\xff\xd8 no image" if n in bad else png(shard + 1) for n in range(4)]
        write_shard(tmp_path / f"{shard:02d}.tar", [{"png": image, "txt": b"x"} for image in images])
    urls = f"{tmp_path}/{{90..93}}.tar::{tmp_path}/{{00..11}}.tar"
    module = data_module()
    openclip.install(module)
    args = args_for(train_data=urls, val_data=urls, train_num_samples=96)
    for is_train, expected in ((True, 96), (False, 16)):
        data = module.get_wds_dataset(args, width_of, is_train=is_train)
        widths = [n for images, _ in data.dataloader for n in images.flatten().tolist()]
        assert len(widths) == expected
        assert set(widths) == {1, 4, 7, 10}


def test_errors_name_flags(shards: str) -> None:
    module = data_module()
    openclip.install(module)
    args = args_for(train_data=shards, train_num_samples=8, train_data_upsampling_factors="1::2")
    with pytest.raises(OptionError, match=r"^--train-data-upsampling-factors has 2 factors for"):
        module.get_wds_dataset(args, width_of, is_train=True)
    with pytest.raises(OptionError, match=r"^--batch-size 0; expected"):
        module.get_wds_dataset(args_for(val_data=shards, batch_size=0), width_of, is_train=False)
    data = module.get_wds_dataset(args_for(val_data=f"{shards}.gone", workers=1), width_of, is_train=False)
    with pytest.raises(NoValidSamples, match="Check the URLs"):
        list(data.dataloader)


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_without_what_is_needed_are_told_of_by_flags(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "cache"))
    write_shard(tmp_path / "0.tar", [{"png": png(1), "json": b"{}"}])
    for development, said in (
        (
            False,
            r"\(png, json\).*Check the images \(jpg, png, jpeg or webp\), the captions \(txt\)[^.]* keep",
        ),
        (True, r"\(png, json\).*Check --image-key, --text-key[^.]* keep"),
    ):
        module = data_module(development=development)
        openclip.install(module)
        args = args_for(development=development, val_data=str(tmp_path / "0.tar"), workers=workers)
        with pytest.raises(NoValidSamples, match=said):
            list(module.get_wds_dataset(args, width_of, is_train=False).dataloader)


class Wrapped:
    """A loader of somebody's around ours."""

    def __init__(self, dataloader: Any):
        self.dataloader = dataloader

    def __iter__(self) -> Any:
        return iter(self.dataloader)


def test_what_scripts_do_with_a_data_set_of_open_clip_can_be_done_with_ours(shards: str) -> None:
    """No args.rank, something around the data loader, the epoch set by either way, no sampler."""
    module = data_module()
    openclip.install(module)
    args = args_for(train_data=shards, train_num_samples=8)
    del args.rank
    orders = []
    for by_shared in (False, True):
        data = module.get_wds_dataset(args, width_of, is_train=True, epoch=2)
        assert data.sampler is None
        assert data.shared_epoch.get_value() == 2
        data.dataloader = Wrapped(data.dataloader)
        if by_shared:
            data.shared_epoch.set_value(5)
        else:
            data.set_epoch(5)
        assert data.shared_epoch.get_value() == 5
        orders.append([n for images, _ in data.dataloader for n in images.flatten().tolist()])
    assert orders[0] == orders[1]
    other = module.get_wds_dataset(args, width_of, is_train=True, epoch=4)
    assert [n for images, _ in other.dataloader for n in images.flatten().tolist()] != orders[0]


def test_without_a_rank_in_the_arguments_the_launchers_counts(
    shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = data_module()
    openclip.install(module)
    args = args_for(train_data=shards, train_num_samples=8, world_size=2, batch_size=2)
    del args.rank
    with pytest.raises(OptionError, match=r"world_size=2 and no rank, but .* has 1 ranks"):
        module.get_wds_dataset(args, width_of, is_train=True)
    seen = []
    for rank in ("0", "1"):
        for name, value in (
            ("RANK", rank),
            ("WORLD_SIZE", "2"),
            ("LOCAL_RANK", rank),
            ("LOCAL_WORLD_SIZE", "2"),
        ):
            monkeypatch.setenv(name, value)
        data = module.get_wds_dataset(args, width_of, is_train=True)
        seen += [n for images, _ in data.dataloader for n in images.flatten().tolist()]
    assert sorted(seen) == [1, 2, 3, 4, 5, 6, 7, 8]


def extracted(meta: Any, fields: list[str], weights: list[float] | None) -> str:
    """As JsonCaptionExtractor of open_clip_train.data at 89fb801, with its `_weighted_order`."""
    order = fields
    if weights is not None:
        padded = [*weights, *[0.0] * (len(fields) - len(weights))]
        positive = [[field, weight] for field, weight in zip(fields, padded, strict=True) if weight > 0]
        order = []
        while positive:
            place = random.choices(range(len(positive)), weights=[weight for _, weight in positive], k=1)[0]
            order.append(positive.pop(place)[0])
        order += [field for field, weight in zip(fields, padded, strict=True) if weight <= 0]
    for field in order if isinstance(meta, dict) else []:
        caption = meta.get(field)
        if isinstance(caption, str) and caption.strip():
            return caption.strip()
    return ""


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(2, 20))]
)
def test_captions_of_json_are_those_that_the_development_version_draws(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "cache"))
    draw = random.Random(seed)
    random.seed(seed)
    metas: list[Any] = []
    for number in range(60):
        texts = [f"{number} {field}" for field in "abcd"]
        kinds = [draw.choice([text, text, text, "", " ", None, 3, [text]]) for text in texts]
        metas.append({name: kind for name, kind in zip("abcd", kinds, strict=True) if draw.random() < 0.8})
    metas += [[], "text", None]
    contents = [*(json.dumps(meta).encode() for meta in metas), b"{cut", b"\xff"]
    samples = [{"png": png(n), "json": content} for n, content in enumerate(contents, 1)]
    write_shard(tmp_path / "0.tar", samples)
    fields = draw.sample("abcd", draw.randrange(1, 5))
    weights = [draw.choice([0.0, 0.3, 1.0]) for _ in range(draw.randrange(1, len(fields) + 1))]
    given: dict[str, Any] = {"json_text_key": ";".join(fields), "batch_size": 4, "train_num_samples": 40}
    for probs in (None, weights):
        module = data_module(development=True)
        openclip.install(module)
        args = args_for(
            development=True, train_data=str(tmp_path / "0.tar"), val_data=str(tmp_path / "0.tar"),
            json_text_key_probs=probs, **given,
        )  # fmt: skip
        theirs = [{extracted(meta, fields, probs) for _ in range(60)} - {""} for meta in metas]
        data = module.get_wds_dataset(args, width_of, is_train=False)
        ours = [text for batch in data.dataloader for text in batch["text"]]
        assert len(ours) == sum(map(bool, theirs))
        assert all(text in own for text, own in zip(ours, filter(None, theirs), strict=True))
        data = module.get_wds_dataset(args, width_of, is_train=True)
        assert {text for batch in data.dataloader for text in batch["text"]} <= set().union(*theirs)
