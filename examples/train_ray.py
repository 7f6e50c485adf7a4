"""Train a small CLIP by Ray Train; after a worker or node is lost, all go on from the last checkpoint.

    python examples/train_ray.py 's3://bucket/{00000..00009}.tar' --num-samples 10000 --workers 2

On a cluster: `ray job submit --working-dir examples -- python train_ray.py …`. Needs ray[train].
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from small_clip import SmallClip, tokenize

import streamload


def train(config: dict[str, Any]) -> None:
    """One worker's training: rank and nodes are those that Ray tells torch.distributed."""
    model = ray.train.torch.prepare_model(SmallClip())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with streamload.make_loader(
        config["urls"],
        tokenize,
        batch_size=config["batch_size"],
        num_samples=config["num_samples"],
        num_workers=1,
        device=ray.train.torch.get_device(),
    ) as loader:
        first_epoch = step = 0
        if checkpoint := ray.train.get_checkpoint():
            with checkpoint.as_directory() as folder:
                saved = torch.load(Path(folder) / "all.pt", map_location=loader.device)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["loader"])
            first_epoch, step = saved["epoch"], saved["step"]
        for epoch in range(first_epoch, config["epochs"]):
            loader.set_epoch(epoch)
            for images, texts in loader:
                loss = model(images, texts)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if step % config["every"] == 0:
                    report(model, optimizer, loader, epoch, step, loss.item())


def report(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: streamload.Loader,
    epoch: int,
    step: int,
    loss: float,
) -> None:
    """Give Ray a checkpoint, which rank 0 writes; called by all."""
    state = streamload.gather_state(loader)
    metrics = {"epoch": epoch + 1, "step": step, "loss": loss}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**parts, "loader": state, "epoch": epoch, "step": step}, Path(folder) / "all.pt")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("urls")
    parser.add_argument("--num-samples", type=int, required=True, help="of an epoch")
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="one for each worker")
    parser.add_argument("--storage", default=str(Path("ray-results").absolute()), help="seen by all nodes")
    given = vars(parser.parse_args())
    result = ray.train.torch.TorchTrainer(
        train,
        train_loop_config=given,
        scaling_config=ray.train.ScalingConfig(num_workers=given["workers"], use_gpu=given["gpu"]),
        run_config=ray.train.RunConfig(
            name="small-clip",
            storage_path=given["storage"],
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    ).fit()
    print(f"step {result.metrics['step']}: loss {result.metrics['loss']:.2f}")
