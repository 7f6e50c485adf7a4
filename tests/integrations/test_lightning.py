"""Lightning's own Trainer on loaders: fit, validation, limits, resuming, predicting; and Fabric."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import streamload
from streamload.testing.shards import write_shards
from tests.support import flat

COUNTS = [20, 30, 25]


@pytest.fixture(autouse=True)
def lightnings_advice() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def noting_model() -> Any:
    """Return a model that notes which samples it is trained and validated on, batch by batch.

    Lightning's imports take seconds, which each process that collects this file would spend.
    """
    from lightning import LightningModule

    class Notes(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)
            self.trained_on: list[list[str]] = []
            self.validated: list[list[str]] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.trained_on.append(batch["__key__"])
            return self.layer(batch["image"].mean((2, 3))).pow(2).mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.validated.append(batch["__key__"])

        def predict_step(self, batch: Any, batch_idx: int) -> list[str]:
            keys: list[str] = batch["__key__"]
            return keys

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Notes()


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [str(path) for path in write_shards(tmp_path_factory.mktemp("lightning"), COUNTS, seed=3)]


def make(paths: list[str], tmp_path: Path, **options: Any) -> streamload.Loader:
    defaults = {"batch_size": 5, "num_workers": 2, "output": "dict", "with_keys": True}
    return flat.make_loader(paths, cache_dir=tmp_path / "cache", cache_size="1GB", **{**defaults, **options})


def trainer(tmp_path: Path, **options: Any) -> Any:
    import lightning

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(
        accelerator="cpu", default_root_dir=tmp_path, **{"enable_checkpointing": False, **quiet, **options}
    )


def epochs_of(paths: list[str], tmp_path: Path, count: int, **options: Any) -> list[list[list[str]]]:
    with make(paths, tmp_path, **options) as loader:
        return [[batch["__key__"] for batch in loader] for _ in range(count)]


@pytest.mark.parametrize("sized", [True, pytest.param(False, marks=pytest.mark.deep)])
def test_fit_gives_the_epochs_of_a_plain_loop(sized: bool, paths: list[str], tmp_path: Path) -> None:
    options = {"num_samples": 40} if sized else {}
    first, second = epochs_of(paths, tmp_path, 2, **options)
    held_out = epochs_of(paths, tmp_path, 1, train=False)[0]
    model = noting_model()
    with make(paths, tmp_path, **options) as loader, make(paths, tmp_path, train=False) as validation:
        trainer(tmp_path, max_epochs=2, num_sanity_val_steps=2).fit(model, loader, validation)
        assert model.trained_on == first + second
        assert model.validated == held_out[:2] + 2 * held_out
        model.trained_on.clear()
        loader.set_epoch(0)
        trainer(
            tmp_path, max_epochs=2, limit_train_batches=3, val_check_interval=2, num_sanity_val_steps=0
        ).fit(model, loader, validation)
        assert len(model.trained_on) == 6
        assert model.trained_on[:3] == first[:3]


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize(
    "step", [pytest.param(5, marks=pytest.mark.deep), pytest.param(8, marks=pytest.mark.deep), 11]
)
@pytest.mark.sampled(1)
def test_fit_goes_on_where_its_checkpoint_was_saved(
    sized: bool, step: int, paths: list[str], tmp_path: Path
) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    options = {"num_samples": 40} if sized else {}
    expected = [keys for epoch in epochs_of(paths, tmp_path, 3, **options) for keys in epoch]
    model = noting_model()
    saves = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=step, save_top_k=-1)
    with make(paths, tmp_path, **options) as loader:
        trainer(tmp_path, max_steps=step, callbacks=[saves], enable_checkpointing=True).fit(model, loader)
    assert model.trained_on == expected[:step]
    [checkpoint] = (tmp_path / "saved").iterdir()
    resumed = noting_model()
    with make(paths, tmp_path, **options) as loader:
        trainer(tmp_path, max_steps=step + 10).fit(resumed, loader, ckpt_path=checkpoint)
    assert resumed.trained_on == expected[step : step + 10]


def test_predict_and_fabric_take_a_loader(paths: list[str], tmp_path: Path) -> None:
    import lightning

    [held_out] = epochs_of(paths, tmp_path, 1, train=False)
    with make(paths, tmp_path, train=False) as loader:
        assert trainer(tmp_path).predict(noting_model(), loader) == held_out
        fabric = lightning.Fabric(accelerator="cpu")
        assert [batch["__key__"] for batch in fabric.setup_dataloaders(loader)] == held_out


def test_lightning_does_not_doubt_the_length_of_a_loader(paths: list[str], tmp_path: Path) -> None:
    from lightning.fabric.utilities.data import has_len

    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "num_samples": 32, "cache_dir": tmp_path}
    with (
        flat.make_loader(paths, **options) as loader,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        assert has_len(loader)
    assert not [warning for warning in caught if "__len__" in str(warning.message)]
