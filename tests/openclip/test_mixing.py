"""Weights that follow open_clip's own training: losses by row, decisions, their log, a resume."""

import argparse
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import open_clip
import open_clip_train.data
import open_clip_train.main
import pytest
import torch
from open_clip_train.params import parse_args

from streamload.errors import OptionError
from streamload.integrations import openclip
from streamload.integrations.openclip import row_losses
from streamload.mixing import Progress
from streamload.steering.decisions import read_lines
from streamload.testing.shards import write_shards
from tests.openclip.tiny import Run

STEPS = 26  # of an epoch of 800 samples, as open_clip rounds them
EVERY = 3  # the policy changes nothing before step 30, which is in the second epoch


@pytest.fixture(scope="module")
def noise(scratch: Path) -> Path:
    """400 samples whose pictures and captions say nothing about each other."""
    write_shards(scratch / "mixed-noise", [200, 200])
    return scratch / "mixed-noise"


def decisions(path: Path) -> list[dict[str, Any]]:
    """The lines of a log of decisions, without their checksums."""
    return [line for line, _ in read_lines(path) if line["kind"] == "weights"]


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_a_training_reports_losses_and_decides_and_a_killed_one_goes_on_with_its_decisions(
    shards: list[Path], noise: Path, train: Callable[..., Run], tmp_path: Path
) -> None:
    """Killed in the second epoch, resumed after the first: the same decisions, batches and losses."""
    urls = f"{shards[0].parent}/{{00000..00003}}.tar::{noise}/{{00000..00001}}.tar"
    run = ("--train-data", urls, "--train-num-samples", "800", "--lr-scheduler", "const", "--workers", "2")
    log = tmp_path / "run" / "decisions.jsonl"
    plain = train(*run, "--train-data-upsampling-factors", "1::1", "--epochs", "1")
    assert not log.exists()
    shutil.rmtree(tmp_path / "run")

    mixed = (*run, "--streamload-mixing", f"progress={EVERY}", "--save-most-recent", "--resume", "latest")
    killed = train(*mixed, killed_behind=STEPS + 14)
    assert killed.losses[:STEPS] == plain.losses
    assert killed.keys(0, 0) == plain.keys(0, 0)
    before = decisions(log)
    assert [line["step"] for line in before] == list(range(EVERY, STEPS + 14, EVERY))
    for line in before:
        assert sum(source["reported"] for source in line["sources"]) == EVERY * 32
    learnt, unlearnable = before[-1]["sources"]
    assert learnt["loss"] < unlearnable["loss"]
    assert learnt["alignment"] > unlearnable["alignment"]

    resumed = train(*mixed)
    assert decisions(log)[: len(before)] == before
    assert [line["step"] for line in decisions(log)] == list(range(EVERY, 2 * STEPS, EVERY))
    assert resumed.losses[len(killed.losses) :][:14] == killed.losses[STEPS:]
    assert resumed.keys(0, 0)[:14] == killed.keys(0, 1)


@pytest.fixture
def installed(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(scratch / "cache"))
    original = open_clip_train.main.create_loss
    uninstall = openclip.install(mixing=Progress(every=2))
    assert open_clip_train.main.create_loss is not original
    yield
    uninstall()
    assert open_clip_train.main.create_loss is original


def arguments(noise: Path, directory: Path, *flags: str) -> argparse.Namespace:
    """As open_clip's main has them when it asks for data: 6 steps of 32 rows."""
    urls = f"{noise}/00000.tar::{noise}/00001.tar"
    words = (
        f"--dataset-type webdataset --train-num-samples 192 --batch-size 32 --workers 0 --logs {directory}"
    )
    args = parse_args([*words.split(), "--train-data", urls, *flags])
    args.world_size, args.rank, args.distill = 1, 0, args.distill_model is not None
    args.checkpoint_path = str(directory / "run" / "checkpoints")
    Path(args.checkpoint_path).mkdir(parents=True)
    return args


def losses_one_by_one(
    images: torch.Tensor, texts: torch.Tensor, scale: float, bias: float, *, is_sigmoid: bool
) -> torch.Tensor:
    """Each row's loss, from its definition."""
    logits = (scale * images @ texts.T + bias).double()
    found = []
    for row in range(len(logits)):
        if is_sigmoid:
            others = [column for column in range(len(logits)) if column != row]
            right = [torch.sigmoid(logits[row, row]), *torch.sigmoid(-logits[row, others])]
            found.append(-torch.stack(right).log().sum())
        else:
            right = [logits[row].softmax(0)[row], logits[:, row].softmax(0)[row]]
            found.append(-torch.stack(right).log().mean())
    return torch.stack(found)


@pytest.mark.parametrize("is_sigmoid", [False, True])
def test_a_row_of_weight_three_counts_as_three_negatives_of_the_others(is_sigmoid: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    images, texts = torch.nn.functional.normalize(torch.randn(2, 20, 4, generator=draw), dim=-1)
    weights = torch.tensor([1.0, 3.0, 0.0, 2.0]).repeat(5)
    found = row_losses.row_losses(
        images, texts, torch.tensor(8.0), torch.tensor(-2.0), is_sigmoid=is_sigmoid, weights=weights
    )
    for row in range(20):
        seen = [row] + [n for n in range(20) for _ in range(int(weights[n])) if n != row]
        alike = losses_one_by_one(images[seen], texts[seen], 8.0, -2.0, is_sigmoid=is_sigmoid)
        assert float(found[row]) == pytest.approx(float(alike[0]), rel=1e-5)


def test_what_cannot_be_learned_is_not_taken_for_learned_when_its_share_falls() -> None:
    """Rows of noise are told from all others, and not from each other."""
    draw, rows, losses = torch.Generator().manual_seed(1), 1024, {}

    def features(noise: torch.Tensor) -> torch.Tensor:
        """float[rows, 1 + 64 + rows]: a side for noise and for the others, what is random, what is clear."""
        said = torch.nn.functional.normalize(torch.randn(rows, 64, generator=draw), dim=-1) * noise
        return torch.cat([2 * noise - 1.0, said, torch.eye(rows) * ~noise], 1) / 2**0.5

    for share in (0.5, 0.125):
        noise = torch.arange(rows)[:, None] < share * rows
        images, texts = features(noise), features(noise)
        weights = torch.where(noise[:, 0], 0.5 / share, 0.5 / (1 - share))
        for name, given in (("as they are", None), ("weighted", weights)):
            found = row_losses.row_losses(images, texts, torch.tensor(8.0), weights=given)
            losses[name, share] = float(found[noise[:, 0]].mean())
    assert losses["as they are", 0.5] - losses["as they are", 0.125] > 1.0
    assert losses["weighted", 0.125] == pytest.approx(losses["weighted", 0.5], abs=0.1)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("flags", [(), ("--siglip",), ("--precision", "amp_bf16")])
def test_losses_by_row_are_logged_by_source_and_the_trainings_loss_stays_the_same(
    noise: Path, tmp_path: Path, flags: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_losses, "_CHUNK_ROWS", 10)
    args = arguments(noise, tmp_path, *flags)
    data = open_clip_train.data.get_data(args, (lambda image: torch.zeros(1), None))["train"]
    ours = open_clip_train.main.create_loss(args)
    plain = open_clip.factory.create_loss(args)
    draw = torch.Generator().manual_seed(1)
    seen: list[tuple[torch.Tensor, ...]] = []
    for _ in data.dataloader:
        results = []
        features = torch.nn.functional.normalize(torch.randn(2, 32, 4, generator=draw), dim=-1)
        for loss in (ours, plain):
            images, texts = (each.clone().requires_grad_() for each in features)
            bias = {"logit_bias": torch.tensor(-2.0)} if args.siglip else {}
            with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in args.precision):
                (value,) = loss(
                    image_features=images,
                    text_features=texts,
                    logit_scale=torch.tensor(8.0),
                    **bias,
                    output_dict=True,
                ).values()
            value.backward()
            results.append((value, images.grad, texts.grad))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*results, strict=True))
        rows = losses_one_by_one(*features, 8.0, -2.0 if args.siglip else 0.0, is_sigmoid=args.siglip)
        assert float(rows.mean()) == pytest.approx(results[0][0].item(), rel=1e-5 if not flags else 2e-2)
        seen.append((data.dataloader.loader.info.source, rows, (features[0] * features[1]).sum(-1)))
    lines = decisions(tmp_path / "run" / "decisions.jsonl")
    assert [line["step"] for line in lines] == [2, 4]
    for number, line in enumerate(lines):
        sources, rows, cosines = (torch.cat(each) for each in zip(*seen[2 * number :][:2], strict=True))
        for place, source in enumerate(line["sources"]):
            assert source["reported"] == int((sources == place).sum()) > 0
            assert source["loss"] == pytest.approx(float(rows[sources == place].mean()), rel=1e-5)
            assert source["alignment"] == pytest.approx(float(cosines[sources == place].mean()), abs=1e-5)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--accum-freq", "2"), "--accum-freq 2 computes the loss of several batches together"),
        (("--model", "coca_ViT-B-32"), "no losses by row are known for CoCaLoss"),
        (
            ("--distill-model", "ViT-B-32", "--distill-pretrained", "openai"),
            "no losses by row are known for DistillClipLoss",
        ),
    ],
)
def test_a_training_whose_losses_by_row_are_not_known_is_refused(
    noise: Path, tmp_path: Path, flags: Sequence[str], says: str
) -> None:
    args = arguments(noise, tmp_path, *flags)
    open_clip_train.data.get_data(args, (lambda image: torch.zeros(1), None))
    with pytest.raises(OptionError, match=f"--streamload-mixing progress: {says}.*schedule=FILE"):
        open_clip_train.main.create_loss(args)


@pytest.mark.usefixtures("installed")
def test_progress_over_data_that_we_do_not_read_is_refused(noise: Path, tmp_path: Path) -> None:
    args = arguments(noise, tmp_path, "--dataset-type", "synthetic")
    with pytest.raises(OptionError, match=r"streamload doesn't read the training data.*webdataset"):
        open_clip_train.main.create_loss(args)
