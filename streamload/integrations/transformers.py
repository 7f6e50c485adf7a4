"""transformers' Trainer with streamload loaders in place of datasets.

    trainer = Trainer(model, arguments, train_dataset=loader, eval_dataset=other_loader)

Checkpoints contain the loader's state, and a resumed training continues with the next batch without reading
the earlier ones.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers.trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from streamload.errors import StateMismatch
from streamload.loader import Loader, gather_state

STATE_NAME = "streamload_state.json"

if TYPE_CHECKING:
    _Trainer = Any
else:
    _Trainer = object


class LoaderMixin(_Trainer):  # type: ignore[misc]
    """Makes a Trainer class accept loaders as datasets: `class Mine(LoaderMixin, TheirTrainer)`.

    Create loaders with output="hf". They yield on the Trainer's device unless they have one. In evaluation
    each process reads the whole set, as all ranks need the same number of batches. Arguments about datasets,
    such as `remove_unused_columns` and `group_by_length`, don't apply to loaders.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(_SaveState(self))

    def get_train_dataloader(self) -> Any:
        """The training batches."""
        if isinstance(self.train_dataset, Loader):
            return self._placed(self.train_dataset)
        return super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The batches of an evaluation."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            chosen = self.eval_dataset[chosen]
        return (
            self._placed(chosen) if isinstance(chosen, Loader) else super().get_eval_dataloader(eval_dataset)
        )

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The batches of a prediction."""
        if isinstance(test_dataset, Loader):
            return self._placed(test_dataset)
        return super().get_test_dataloader(test_dataset)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log numbers; with a LoaderMetrics callback those of a training step have the loader's, too."""
        wants = any(isinstance(callback, LoaderMetrics) for callback in self.callback_handler.callbacks)
        if wants and "loss" in logs and isinstance(self.train_dataset, Loader):
            logs = {**logs, **self.train_dataset.metrics()}
        super().log(logs, *args, **kwargs)

    def num_examples(self, dataloader: Any) -> int:
        """Samples per epoch."""
        if isinstance(dataloader, _Epochs):
            return dataloader.loader.num_samples or 0
        return int(super().num_examples(dataloader))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train; from a checkpoint, continue after the last batch that was trained on.

        Raises:
            StateMismatch: the checkpoint has no loader state, or one of different data.
        """
        if isinstance(self.train_dataset, Loader) and resume_from_checkpoint:
            checkpoint = resume_from_checkpoint
            if checkpoint is True:
                checkpoint = get_last_checkpoint(self.args.output_dir)  # type: ignore[no-untyped-call]
            if checkpoint is not None and not self.args.ignore_data_skip:
                self._load_state(Path(checkpoint) / STATE_NAME)
        with _nothing_skipped():
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_state(self, path: Path) -> None:
        try:
            self.train_dataset.load_state_dict(json.loads(path.read_text()))
        except FileNotFoundError:
            raise StateMismatch(
                f"{path} is missing: the checkpoint wasn't saved while training on a streamload loader; "
                f"ignore_data_skip=True in the TrainingArguments starts the data from the beginning"
            ) from None

    def _placed(self, loader: Loader) -> _Epochs:
        loader.place_on(self.args.device)
        asks = "return_loss" in inspect.signature(self.model.forward).parameters
        return _Epochs(loader, {"return_loss": True} if asks else {})


class Trainer(LoaderMixin, transformers.trainer.Trainer):
    """transformers' Trainer, with loaders for `train_dataset` and `eval_dataset`."""


class LoaderMetrics(transformers.TrainerCallback):
    """Adds `Loader.metrics()` to what the Trainer logs of its steps, and so to each tracker of `report_to`.

    trainer = Trainer(model, arguments, train_dataset=loader, callbacks=[LoaderMetrics()])
    """


class _Epochs:
    """A loader without `set_epoch`, which the Trainer would call: the loader counts its own epochs.

    Args:
        loader: its batches.
        added: to each batch: models like CLIP only return a loss if asked to.
    """

    def __init__(self, loader: Loader, added: dict[str, Any]):
        self.loader = loader
        self._added = added
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        return ({**batch, **self._added} for batch in batches) if self._added else batches

    def __len__(self) -> int:
        return len(self.loader)


class _SaveState(transformers.TrainerCallback):
    """Saves the loader's state with each checkpoint. Called on all ranks."""

    def __init__(self, trainer: LoaderMixin):
        self._trainer = trainer

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        loader = self._trainer.train_dataset
        if not isinstance(loader, Loader):
            return
        saved = gather_state(loader)
        if args.should_save:
            folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            half = folder / f"{STATE_NAME}.{os.getpid()}"
            half.write_text(json.dumps(saved))
            half.replace(folder / STATE_NAME)


@contextlib.contextmanager
def _nothing_skipped() -> Iterator[None]:
    """Keep the Trainer from skipping batches of a loader that has resumed by its state."""
    module: Any = transformers.trainer
    original = module.skip_first_batches

    @functools.wraps(original)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        return dataloader if isinstance(dataloader, _Epochs) else original(dataloader, num_batches)

    module.skip_first_batches = skip_first_batches
    try:
        yield
    finally:
        module.skip_first_batches = original
