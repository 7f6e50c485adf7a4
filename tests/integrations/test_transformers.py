"""transformers' own Trainer on loaders: what the model sees, evaluates, and sees after resuming.

Its imports take seconds, which each process that collects this file would spend: tests import it as they run.
"""

import json
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import streamload
from streamload.testing.shards import write_shards
from tests.support import flat

COUNTS = [20, 30, 25]


def one_id(texts: list[str]) -> torch.Tensor:
    return torch.tensor([[zlib.crc32(text.encode())] for text in texts])


class Notes(torch.nn.Module):
    """Notes which captions it is trained on, batch by batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.trained_on: list[list[int]] = []
        self.evaluated: list[int] = []

    def forward(
        self,
        pixel_values: torch.Tensor,
        input_ids: torch.Tensor,
        attention_mask: Any = None,
        return_loss: bool = False,
    ) -> dict[str, torch.Tensor]:
        ids = input_ids[:, 0].tolist()
        if self.training:
            self.trained_on.append(ids)
        else:
            self.evaluated += ids
        assert return_loss
        loss = self.layer(pixel_values.float().mean((2, 3))).pow(2).mean()
        return {"loss": loss, "logits": input_ids[:, :1]}


def make(place: Path, **options: Any) -> streamload.Loader:
    urls = [str(path) for path in sorted((place / "data").glob("*.tar"))]
    return flat.make_loader(
        urls, one_id, output="hf", batch_size=5, cache_dir=place / "cache", cache_size="1GB", **options
    )


def train(place: Path, steps: int, resume: Any = None, folder: str = "out", **options: Any) -> Notes:
    """Run the Trainer, with an evaluation at its end."""
    from transformers import TrainingArguments

    from streamload.integrations.transformers import Trainer

    model = Notes()
    arguments = TrainingArguments(
        output_dir=str(place / folder),
        use_cpu=True,
        max_steps=steps,
        save_steps=4,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=5,
        per_device_eval_batch_size=5,
        report_to=[],
        disable_tqdm=True,
    )
    with make(place, **options) as loader, make(place, train=False, num_workers=0) as held_out:
        trainer = Trainer(model, arguments, train_dataset=loader, eval_dataset=held_out)
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.state.global_step == steps
        assert set(trainer.evaluate()) >= {"eval_loss"}
    return model


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("trainer")
    write_shards(place / "data", COUNTS, seed=3)
    return place


@pytest.mark.parametrize(
    "options",
    [pytest.param({"num_samples": 60}, marks=pytest.mark.deep), {"num_workers": 0}],
    ids=["sized", "one pass"],
)
def test_a_trainer_goes_on_exactly_where_its_checkpoint_was_saved(
    place: Path, options: dict[str, Any]
) -> None:
    folder = "-".join(options)
    with make(place, num_workers=0) as loader:  # all shards are indexed: a pass has a length
        expected = [batch["input_ids"][:, 0].tolist() for _ in range(2) for batch in loader]
    whole = train(place, 14, folder=folder, **options)
    if "num_samples" not in options:
        assert whole.trained_on == expected[: len(whole.trained_on)]
    assert len(whole.evaluated) == len(set(whole.evaluated)) == sum(COUNTS)
    for step in (4, 8, 12):
        checkpoint = str(place / folder / f"checkpoint-{step}")
        rest = train(place, 14, checkpoint, folder=f"{folder}-resumed", **options).trained_on
        assert rest == whole.trained_on[-len(rest) :]
        saved = json.loads((place / folder / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert saved["global_step"] == step
        assert len(whole.trained_on) - len(rest) in (
            2 * step,
            2 * step - 1,
        )  # the last update of a pass has one


@pytest.mark.deep
def test_a_checkpoint_without_a_state_is_refused(place: Path) -> None:
    from streamload.integrations.transformers import STATE_NAME

    train(place, 4, folder="stateless", num_samples=60)
    (place / "stateless" / "checkpoint-4" / STATE_NAME).unlink()
    with pytest.raises(streamload.errors.StateMismatch, match="ignore_data_skip"):
        train(place, 8, True, folder="stateless", num_samples=60)


def test_the_trainer_of_transformers_is_told_of_ours(place: Path) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(output_dir=str(place / "stock"), use_cpu=True, max_steps=1, report_to=[])
    with (
        make(place, num_samples=20) as loader,
        pytest.raises(TypeError, match=r"streamload\.integrations\.transformers\.Trainer"),
    ):
        Trainer(Notes(), arguments, train_dataset=loader).train()


@pytest.mark.deep
def test_two_ranks_train_on_disjoint_samples_and_resume(place: Path) -> None:
    said = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "--module",
            "tests.integrations.test_transformers",
            str(place),
        ],
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        text=True,
        timeout=150,
    )
    ranks = [json.loads(line.partition("seen ")[2]) for line in said.stdout.splitlines() if "seen " in line]
    assert len(ranks) == 2
    for seen in ranks:
        assert seen["resumed"] == seen["whole"][7:]  # the last update of an epoch has one batch
        assert seen["evaluated"] == sum(COUNTS)
    first_pass = [key for seen in ranks for batch in seen["whole"][:7] for key in batch]
    assert len(first_pass) == len(set(first_pass)) == 70


def main(place: Path) -> None:
    whole = train(place, 6, folder="two", num_workers=0, num_samples=70)
    resumed = train(
        place, 6, str(place / "two" / "checkpoint-4"), folder="two-resumed", num_workers=0, num_samples=70
    )
    seen = {"whole": whole.trained_on, "resumed": resumed.trained_on, "evaluated": len(set(whole.evaluated))}
    sys.stdout.write(f"seen {json.dumps(seen)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
