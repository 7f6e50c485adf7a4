"""Train a small CLIP in the processes that torchrun starts, on one node or several; run it again to resume.

    torchrun --nproc-per-node 2 examples/train_torchrun.py 's3://data/{00000..00009}.tar' --num-samples 10000

deploy/slurm/train.sbatch starts it on the nodes of a Slurm job. The checkpoint has the model and the loader's
state: after any stop the same samples follow, on another number of nodes and processes, too.
"""

import argparse
import os
from pathlib import Path

import torch
from small_clip import SmallClip, tokenize
from torch.nn.parallel import DistributedDataParallel

import streamload


def train(urls: str, num_samples: int, batch_size: int, epochs: int, every: int, checkpoint: Path) -> None:
    """One process's training."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group()
    rank = torch.distributed.get_rank()
    with streamload.make_loader(
        urls, tokenize, batch_size=batch_size, num_samples=num_samples, num_workers=2, device="auto"
    ) as loader:
        model = DistributedDataParallel(SmallClip().to(loader.device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        first_epoch = step = 0
        if checkpoint.exists():
            saved = torch.load(checkpoint, map_location=loader.device)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["loader"])
            first_epoch, step = saved["epoch"], saved["step"]
        for epoch in range(first_epoch, epochs):
            loader.set_epoch(epoch)
            for images, texts in loader:
                loss = model(images, texts)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if step % every == 0:
                    state = streamload.gather_state(loader)  # on all ranks
                    if rank == 0:
                        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                        new = checkpoint.with_suffix(".new")
                        torch.save({**parts, "loader": state, "epoch": epoch, "step": step}, new)
                        new.rename(checkpoint)
                        print(f"epoch {epoch + 1}, step {step}: loss {loss.item():.2f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("urls")
    parser.add_argument("--num-samples", type=int, required=True, help="of an epoch")
    parser.add_argument("--batch-size", type=int, default=32, help="of each process")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"), help="seen by all nodes")
    train(**vars(parser.parse_args()))
