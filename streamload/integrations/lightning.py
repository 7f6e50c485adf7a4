"""The loader's numbers in Lightning's loggers: TensorBoard, W&B, MLflow, CSV.

trainer = lightning.Trainer(callbacks=[LoaderMetrics()], …)
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback

from streamload.loader import Loader


class LoaderMetrics(Callback):
    """Logs `Loader.metrics()` of the training's loader every `log_every_n_steps`, on the first rank."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Called after each training step."""
        loader = trainer.train_dataloader
        if not isinstance(loader, Loader) or not trainer.loggers:
            return
        if trainer.global_step % trainer.log_every_n_steps == 0:
            numbers = loader.metrics()
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=trainer.global_step)
