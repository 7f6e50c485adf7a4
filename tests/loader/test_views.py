"""What preprocess= returns beside one tensor: several views, tiles, dicts, nothing."""

import io
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close
from torch.utils.data import default_collate

from tests.support.flat import make_loader

COUNT = 20


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    path = tmp_path_factory.mktemp("views") / "0.tar"
    with tarfile.open(path, "w") as tar:
        for number in range(COUNT):
            picture = io.BytesIO()
            Image.new("RGB", (16 + number, 16), (number, 2 * number, 3 * number)).save(picture, "PNG")
            for name, payload in (("png", picture.getvalue()), ("txt", b"%d" % number)):
                info = tarfile.TarInfo(f"{number:02d}.{name}")
                info.size = len(payload)
                tar.addfile(info, io.BytesIO(payload))
    return str(path)


def pixels(image, side=8):
    return torch.from_numpy(np.array(image.resize((side, side)))).permute(2, 0, 1)


def crops(image):
    """Two large views and a small one, as multi-crop of DINO makes them; no tensors and a number, too."""
    return [pixels(image), pixels(image, 12).flip(0), pixels(image, 4).numpy(), image.width]


def views_by_name(image):
    return {"large": pixels(image), "mask": np.full((4, 4), image.width), "width": image.width}


def make(shard, tmp_path, preprocess, **options):
    chosen = {"batch_size": 8, "num_workers": 0, "train": False, "output": "dict", **options}
    return make_loader(shard, preprocess=preprocess, cache_dir=tmp_path, **chosen)


def collated(shard, preprocess, first, stop):
    with tarfile.open(shard) as tar:
        files = [tar.extractfile(f"{number:02d}.png").read() for number in range(first, stop)]
    return default_collate([preprocess(Image.open(io.BytesIO(file)).convert("RGB")) for file in files])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("preprocess", [crops, views_by_name])
def test_views_and_dicts_are_stacked_as_by_torch(preprocess, device, workers, shard, tmp_path):
    with make(shard, tmp_path, preprocess, num_workers=workers, device=device) as loader:
        for _ in range(2):  # so that memory is used again
            for number, batch in enumerate(loader):
                expected = collated(shard, preprocess, 8 * number, min(COUNT, 8 * number + 8))
                assert_close(batch["image"], expected, rtol=0, atol=0)
                assert list(batch) == ["image", "text"]
        assert loader.stats().fresh_tensors == 0


@pytest.mark.parametrize("preprocess", [crops, views_by_name])
def test_microbatches_cut_each_view(preprocess, shard, tmp_path):
    with make(shard, tmp_path, preprocess, output="tuple", microbatch=3) as loader:
        batch = next(iter(loader))
        parts = [part[0] for part in loader.microbatches(batch)]
    sizes = [len((part if isinstance(part, list) else list(part.values()))[0]) for part in parts]
    assert sizes == [3, 3, 2]
    keys = range(4) if preprocess is crops else ("large", "mask", "width")
    assert_close([torch.cat([part[key] for part in parts]) for key in keys], [batch[0][key] for key in keys])


def test_tiles_that_differ_in_number_are_a_list_for_each_sample(shard, tmp_path):
    def tiles(image):
        return [pixels(image)] * (1 + image.width % 3)

    with make(shard, tmp_path, tiles, num_workers=1) as loader:
        batch = next(iter(loader))
    assert [len(tiles_of_sample) for tiles_of_sample in batch["image"]] == [
        1 + (16 + n) % 3 for n in range(8)
    ]


def test_views_of_several_shapes_are_an_error_that_names_the_view(shard, tmp_path):
    def uneven(image):
        return [pixels(image), pixels(image, image.width)]

    with (
        make(shard, tmp_path, uneven) as loader,
        pytest.raises(ValueError, match=r"as image\[1\] uint8\[3, 16, 16\] for"),
    ):
        next(iter(loader))


def test_dicts_of_several_keys_are_an_error_that_names_both(shard, tmp_path):
    def uneven(image):
        return {"a": pixels(image)} if image.width % 2 else {"b": pixels(image)}

    with (
        make(shard, tmp_path, uneven) as loader,
        pytest.raises(ValueError, match=r"a dict of 'b' .*a dict of 'a'"),
    ):
        next(iter(loader))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("map_sample", [None, dict])
def test_a_preprocess_that_returns_nothing_is_refused(map_sample, workers, shard, tmp_path):
    with (
        make(shard, tmp_path, lambda image: None, num_workers=workers, map_sample=map_sample) as loader,
        pytest.raises(TypeError, match=r"preprocess= returned None.*return"),
    ):
        next(iter(loader))
