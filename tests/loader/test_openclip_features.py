"""Features by the real open_clip: its tower on its own transforms."""

from pathlib import Path

import open_clip
import pytest
import torch

from streamload import Features
from streamload.errors import FeatureNotCacheable
from streamload.testing.shards import ShardOptions, write_shards
from tests.support import flat


@pytest.fixture
def clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.nn.Module, ...]:
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(tmp_path / "cache"))
    torch.manual_seed(0)
    return open_clip.create_model_and_transforms("RN50-quickgelu", force_image_size=64)


def test_the_tower_of_open_clip_has_rows_of_its_validation_images(
    clip: tuple[torch.nn.Module, ...], tmp_path: Path
) -> None:
    model, train, val = clip
    write_shards(tmp_path / "data", [6, 6], options=ShardOptions(image_side=(70, 90)))
    visual = Features(model.visual.eval(), preprocess=val, images=True)
    options = {"preprocess": val, "output": "dict", "train": False, "num_workers": 1, "batch_size": 4}
    with flat.make_loader(str(tmp_path / "data"), None, features={"clip": visual}, **options) as loader:
        for _ in range(2):
            for batch in loader:
                with torch.no_grad():
                    known = model.visual(batch["image"])
                torch.testing.assert_close(visual(batch), known, rtol=1e-3, atol=1e-4)
        assert loader.stats().feature_rows_computed == 12
    random = Features(model.visual.eval(), preprocess=train)
    options |= {"train": True, "num_batches": 2}
    with (
        flat.make_loader(str(tmp_path / "data"), None, features={"clip": random}, **options) as loader,
        pytest.raises(FeatureNotCacheable, match=r"'clip' are random.*variants=K"),
    ):
        iter(loader)
