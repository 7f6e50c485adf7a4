"""A loader with the factories of timm's NaFlex transforms: timm's own batches, and a model that trains.

These run in the environment that has open_clip, and timm with it.
"""

import functools
import io
import warnings

import pytest
import torch
from PIL import Image

from benchmarks.torchvision_stub import define_torchvision_schemas
from streamload import Images, Patches
from streamload.order.hashing import sample_seed
from streamload.testing.shards import read_oracle, write_shards
from streamload.transforms import kernel
from streamload.transforms.augment import SeededGenerators
from tests.support import flat

define_torchvision_schemas()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    timm_data = pytest.importorskip(
        "timm.data", reason="timm is not in this environment; `make pytest-openclip` runs these tests"
    )
    from timm.data.naflex_dataset import NaFlexCollator
    from timm.data.naflex_transforms import Patchify
    from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

TRAINING = functools.partial(
    timm_data.create_transform,
    (3, 224, 224),
    is_training=True,
    naflex=True,
    scale=(0.4, 1.0),
    color_jitter=None,
)
FACTORIES = {
    "compiled": functools.partial(TRAINING, interpolation="random"),
    "partly as given": functools.partial(TRAINING, color_jitter=0.4, interpolation="bicubic"),
    "as given": functools.partial(TRAINING, re_prob=0.9, re_mode="pixel", interpolation="bicubic"),
}


def batches(paths, cache, factory, **options):
    images = Images(patches=Patches(16, (9, 49)))
    with flat.make_loader(
        [str(path) for path in paths],
        batch_size=4,
        num_workers=1,
        seed=5,
        shuffle=0,
        lanes=1,
        preprocess=factory,
        images=images,
        output="dict",
        with_keys=True,
        cache_dir=cache,
        **options,
    ) as loader:
        yield from loader


@pytest.mark.parametrize("name", FACTORIES)
def test_a_loader_makes_the_batches_of_timms_collator(name, tmp_path):
    if kernel.why_not():
        pytest.skip(kernel.why_not())
    (path,) = paths = write_shards(tmp_path / "data", [16], seed=7)
    files = {
        key: next(data for ext, data in members.items() if ext != "txt") for key, members in read_oracle(path)
    }
    numbers = {key: number for number, key in enumerate(files)}
    for batch in batches(paths, tmp_path / "cache", FACTORIES[name]):
        ours, made = batch["image"], []
        transform = FACTORIES[name](max_seq_len=ours["seq_len"], patch_size=(16, 16))
        with SeededGenerators() as generators:
            for key in batch["__key__"]:
                generators.seed(sample_seed(5, 0, 0, 0, numbers[key]))
                image = Image.open(io.BytesIO(files[key])).convert("RGB")
                made.append((Patchify((16, 16))(transform(image)), 0))
        theirs = NaFlexCollator(ours["seq_len"])(made)[0]
        assert ours.keys() == theirs.keys()
        assert ours["seq_len"] == theirs["seq_len"]
        for value in ("patches", "patch_coord", "patch_valid"):
            assert ours[value].dtype == theirs[value].dtype
            assert torch.equal(ours[value], theirs[value]), value


def test_a_naflex_vit_trains_on_the_batches(tmp_path):
    paths = write_shards(tmp_path / "data", [16], seed=8)
    torch.manual_seed(0)
    config = NaFlexVitCfg(patch_size=16, embed_dim=32, depth=1, num_heads=2, pos_embed_grid_size=(7, 7))
    model = NaFlexVit(config, num_classes=8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    lengths = set()
    for batch in batches(paths, tmp_path / "cache", FACTORIES["compiled"], num_batches=6):
        image = batch["image"]
        lengths.add(image.pop("seq_len"))
        loss = torch.nn.functional.cross_entropy(model(image), torch.arange(4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert torch.isfinite(loss)
    assert lengths == {9, 49}
