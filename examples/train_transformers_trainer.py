"""Train transformers' CLIPModel with its Trainer on shards that arrive meanwhile; run it again to resume.

    python examples/train_transformers_trainer.py 's3://bucket/shards/{00000..00009}.tar' --steps 1000

Loaders take the place of datasets, the Trainer's arguments apply, and checkpoints contain the loader's state:
a second run continues with the batch after the checkpoint's last one. Without URLs it makes shards of
photographs in its output folder. Needs `pip install transformers accelerate`.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from photograph_shards import write_photograph_shards
from train_transformers_clip import caption, model_for, tokenizer_of
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import streamload
from streamload import Workers
from streamload.integrations.transformers import Trainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", nargs="?", help="shards in the WebDataset convention")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("trained"))
    args = parser.parse_args()
    shards = args.output / "shards"
    if not args.urls and not (shards / "sizes.json").exists():  # written last
        write_photograph_shards(shards, samples=384, samples_per_shard=64)
    train(args, args.urls or str(shards))


def train(args: argparse.Namespace, urls: str) -> None:
    torch.manual_seed(0)
    common: dict[str, Any] = {"num_workers": args.workers, "device": "auto"}
    with streamload.make_loader(
        urls, workers=Workers(map_sample=caption), num_samples=256, **common
    ) as first:
        tokenizer = tokenizer_of(text for batch in first for text in batch["text"])
    common |= {"tokenizer": tokenizer, "output": "hf", "batch_size": args.batch_size}
    arguments = TrainingArguments(
        output_dir=str(args.output),
        max_steps=args.steps,
        save_steps=max(1, args.steps // 4),
        eval_strategy="steps",
        eval_steps=max(1, args.steps // 2),
        learning_rate=2e-3,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        report_to=[],
    )
    with (
        streamload.make_loader(urls, num_samples=12 * args.batch_size, **common) as loader,
        streamload.make_loader(urls, train=False, **common) as held_out,
    ):
        trainer = Trainer(model_for(tokenizer), arguments, train_dataset=loader, eval_dataset=held_out)
        checkpoint = get_last_checkpoint(args.output) if args.output.is_dir() else None
        print(f"going on from {checkpoint}" if checkpoint else "beginning")
        trainer.train(resume_from_checkpoint=checkpoint)
        print(f"step {trainer.state.global_step}: loss {trainer.evaluate()['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
