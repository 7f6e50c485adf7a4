"""open_clip's data on simulated devices, as a program: `python on_device.py URLS` prints JSON.

The copies of what its training loop does with a batch: for each precision, for a rank with another device,
with --streamload-device none, and for the development version's NaFlex dicts.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))
from benchmarks.torchvision_stub import define_torchvision_schemas
from tests.support import simulated_device

define_torchvision_schemas()
DEVICE = simulated_device.install(2)
PRECISIONS = ("amp", "amp_bf16", "bf16", "fp16", "pure_bf16", "pure_fp16", "fp32")


def copies_of_naflex(folder: Path) -> list[str]:
    """What the development version's loop does with each dict: all of it goes to the device."""
    from streamload.integrations import openclip
    from tests.integrations.test_install import data_module
    from tests.integrations.test_openclip_naflex import arguments, check_batch, data_of

    module = data_module(development=True)
    openclip.install(module)
    DEVICE.copies.clear()
    data = data_of(module, arguments(sorted(folder.glob("*.tar")), device="npu:1"), True)
    for batch in data.dataloader:
        image = batch["image"]
        rows, seq_len = image["patch_valid"].shape
        check_batch(batch, rows, seq_len, (2, torch.int64))
        moved = {
            name: image[name].to("npu:1", torch.bfloat16 if name == "patches" else None, non_blocking=True)
            for name in ("patches", "patch_coord", "patch_valid")
        }
        moved["text"] = batch["text"].to("npu:1", non_blocking=True)
        assert {str(tensor.device) for tensor in moved.values()} == {"npu:1"}
    data.dataloader.loader.close()
    return [
        f"{copy['thread'].partition('_')[0]} {copy['dtype']} {copy['pinned']} {copy['target']}"
        for copy in DEVICE.copied()
        if len(copy["shape"]) > 1
    ]


def main() -> None:
    import open_clip
    import open_clip_train.data
    import open_clip_train.main

    import streamload.integrations.openclip

    plain = open_clip_train.data.get_wds_dataset
    preprocess = open_clip.image_transform(64, is_train=True)
    tokenizer = open_clip.SimpleTokenizer(context_length=16)

    def copies_of_an_epoch(data: Any, precision: str, device: str) -> list[str]:
        """What open_clip's loop does with each batch, with the batches that --accum-freq 4 keeps."""
        DEVICE.copies.clear()
        dtype, kept = open_clip.get_input_dtype(precision), []
        for images, texts in data.dataloader:
            images = images.to(device=torch.device(device), dtype=dtype, non_blocking=True)
            texts = texts.to(device=torch.device(device), non_blocking=True)
            kept = [*kept[-3:], (images, texts)]
        for images, texts in kept:
            assert (images.dtype, images.shape, texts.shape) == (
                dtype or torch.float32,
                (32, 3, 64, 64),
                (32, 16),
            )
            assert {str(images.device), str(texts.device)} == {device}
        data.dataloader.loader.close()
        return sorted(
            f"{copy['thread'].partition('_')[0]} {copy['dtype']} {copy['pinned']} {copy['target']}"
            for copy in DEVICE.copied()
            if copy["shape"][0] == 32
        )

    def data_of(rank: int, ranks: int) -> Any:
        args = SimpleNamespace(
            train_data=sys.argv[1], dataset_resampled=False, train_num_samples=32 * 4 * ranks,
            val_num_samples=None, train_data_upsampling_factors=None, seed=1, batch_size=32, workers=1,
            world_size=ranks, rank=rank, device=f"npu:{rank}",
        )  # fmt: skip
        get = open_clip_train.data.get_wds_dataset
        return get(args, preprocess, is_train=True, tokenizer=tokenizer)

    found = {}
    for device in ([], ["--streamload-device", "none"]):
        open_clip_train.data.get_wds_dataset = plain
        open_clip_train.main.main = lambda _: None
        streamload.integrations.openclip.main([*device, "--device", "npu"])  # installs
        name = " ".join(device)
        for precision in PRECISIONS if not device else PRECISIONS[:1]:
            found[f"{name} {precision}".strip()] = copies_of_an_epoch(data_of(0, 1), precision, "npu:0")
        found[f"{name} rank 1".strip()] = copies_of_an_epoch(data_of(1, 2), "amp", "npu:1")
    found["naflex"] = copies_of_naflex(Path(sys.argv[1]).parent)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
