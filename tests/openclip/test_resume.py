"""open_clip's own --resume on our loader: trainings that were killed, checkpoints with and without states."""

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import open_clip_train.data
import pytest
from open_clip_train.params import parse_args

from streamload.errors import StateMismatch
from streamload.integrations import openclip
from streamload.integrations.openclip.resume import find_state
from streamload.testing.shards import read_oracle, write_shards
from tests.openclip.tiny import Run
from tests.support.s3 import S3Server


def keys_of(shards: list[Path]) -> set[str]:
    return {key for shard in shards for key, _ in read_oracle(shard)}


def taken(*runs: Run) -> list[str]:
    """What trainings took, one behind the other, all ranks of a step together."""
    steps = []
    for run in runs:
        for parts in itertools.zip_longest(*([b for b in own if b.train] for own in run.batches)):
            assert None not in parts, "the ranks took different numbers of batches"
            steps.append([key for part in parts for key in part.keys])
    return list(itertools.chain(*steps))


@pytest.mark.timeout(400)
@pytest.mark.deep
def test_a_killed_run_goes_on_with_the_samples_that_its_weights_have_not_seen(
    shards: list[Path], train: Callable[..., Run], tmp_path: Path
) -> None:
    """800 samples in epochs of 256; killed 4 batches into the second, whose samples come again."""
    urls = f"{shards[0].parent}/{{00000..00003}}.tar"
    run = ("--train-data", urls, "--train-num-samples", "256", "--epochs", "3", "--save-frequency", "1")
    run = (*run, "--delete-previous-checkpoint", "--resume", "latest")
    killed = train(*run, "--workers", "2", killed_behind=12)
    assert [len(killed.keys(0, epoch)) for epoch in (0, 1, 2)] == [8, 4, 0]
    resumed = train(*run, "--workers", "1")
    assert [len(resumed.keys(0, epoch)) for epoch in (0, 1)] == [8, 8]
    assert taken(resumed)[: 4 * 32] == taken(killed)[8 * 32 :]
    trained = taken(killed)[: 8 * 32] + taken(resumed)
    assert len(set(trained)) == len(trained) == 3 * 256
    assert "epoch 1 starts after 256 samples, by " in resumed.log
    assert {path.name for path in (tmp_path / "run" / "checkpoints").glob("*.pt")} == {"epoch_3.pt"}
    states = {path.name for path in (tmp_path / "run" / "streamload").iterdir()}
    assert states <= {"epoch_2.json", "epoch_3.json"}


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_two_ranks_that_are_killed_are_gone_on_from_by_one(
    shards: list[Path], train: Callable[..., Run]
) -> None:
    urls = f"{shards[0].parent}/{{00000..00003}}.tar"
    run = ("--train-data", urls, "--train-num-samples", "384", "--workers", "1", "--save-most-recent")
    killed = train(*run, "--batch-size", "32", ranks=2, killed_behind=7)
    epochs = [[killed.keys(rank, epoch) for rank in (0, 1)] for epoch in (0, 1)]
    assert [len(own) for own in epochs[0]] == [6, 6]
    first, again = [
        [key for parts in zip(*epoch, strict=False) for keys in parts for key in keys] for epoch in epochs
    ]
    ended = train(*run, "--resume", "latest", "--batch-size", "64")
    assert [len(keys) for keys in ended.keys(0, 0)] == [64] * 6
    trained = first + taken(ended)
    assert taken(ended)[: len(again)] == again != []
    assert len(set(trained)) == len(trained) == 2 * 384
    assert set(trained) <= keys_of(shards)


class Training:
    """What open_clip's main does with data and checkpoints, in this process: epochs of 2 batches of 8."""

    def __init__(self, directory: Path, shards: str, *flags: str):
        self.checkpoints = directory / "logs" / "run" / "checkpoints"
        self.states = directory / "logs" / "run" / "streamload"
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        fixed = [
            "--dataset-type",
            "webdataset",
            "--train-num-samples",
            "16",
            "--batch-size",
            "8",
            "--workers",
            "0",
        ]
        self.args = parse_args([*fixed, "--logs", f"{directory}/logs", "--train-data", shards, *flags])
        self.args.world_size, self.args.rank = 1, 0
        self.args.checkpoint_path = str(self.checkpoints)

    def run(
        self, begin: int, end: int, *, cut: int | None = None, checkpoint: str | None = None
    ) -> list[str]:
        """Captions of epochs begin to end, after `cut` batches of the last of which it is given up."""
        self.args.resume = checkpoint
        data = open_clip_train.data.get_data(self.args, (lambda image: image.size, None), epoch=begin)[
            "train"
        ]
        seen = []
        for epoch in range(begin, end):
            data.set_epoch(epoch)
            for number, (_, captions) in enumerate(data.dataloader, 1):
                seen += captions
                if epoch == end - 1 and number == cut:
                    return seen
            self.checkpoint(epoch + 1).touch()
        return seen

    def checkpoint(self, epoch: int) -> Path:
        return self.checkpoints / f"epoch_{epoch}.pt"


@pytest.fixture(autouse=True)
def cache(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", str(scratch / "cache"))


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    uninstall = openclip.install()
    yield
    uninstall()


@pytest.fixture(scope="module")
def noise(scratch: Path) -> str:
    """60 samples in 3 shards."""
    write_shards(scratch / "noise", [20] * 3)
    return f"{scratch}/noise/{{00000..00002}}.tar"


def test_the_epoch_of_the_checkpoint_begins_where_it_began(noise: str, tmp_path: Path) -> None:
    whole = Training(tmp_path / "whole", noise).run(0, 3)
    killed = Training(tmp_path, noise)
    assert killed.run(0, 2, cut=1) == whole[:24]
    assert sorted(path.name for path in killed.states.iterdir()) == ["epoch_1.json"]
    assert killed.run(1, 3, checkpoint=str(killed.checkpoint(1))) == whole[16:]


def test_a_run_that_begins_at_an_older_checkpoint_gets_the_epoch_after_it(noise: str, tmp_path: Path) -> None:
    run = Training(tmp_path, noise)
    whole = run.run(0, 3)
    for epoch in (2, 1, 1):
        assert run.run(epoch, epoch + 1, checkpoint=str(run.checkpoint(epoch))) == whole[16 * epoch :][:16]


@pytest.mark.parametrize("latest", [False, True])
def test_the_folder_of_a_sharded_checkpoint_has_its_state(noise: str, tmp_path: Path, latest: bool) -> None:
    """As --fsdp-checkpoint sharded of the development version writes them; its path may end in a slash."""
    whole = Training(tmp_path / "whole", noise).run(0, 4)
    run = Training(tmp_path, noise)
    run.run(0, 2)
    for epoch in (1, 2):
        run.checkpoint(epoch).unlink()
        (run.checkpoints / f"epoch_{epoch}").mkdir()
    name = "epoch_2"
    if latest:
        name = "epoch_latest"
        (run.checkpoints / "epoch_2").rename(run.checkpoints / name)
    assert run.run(2, 4, cut=2, checkpoint=f"{run.checkpoints}/{name}/") == whole[32:]
    assert sorted(path.name for path in run.states.iterdir()) == [
        f"epoch_{epoch}.json" for epoch in (1, 2, 3)
    ]


def test_states_go_with_their_checkpoints(noise: str, tmp_path: Path) -> None:
    run = Training(tmp_path, noise)
    run.run(0, 4)
    run.checkpoint(2).unlink()
    run.checkpoint(4).rename(run.checkpoints / "epoch_latest.pt")
    run.run(4, 5, checkpoint=str(run.checkpoints / "epoch_latest.pt"))
    left = sorted(path.name for path in run.states.iterdir())
    assert left == [f"epoch_{epoch}.json" for epoch in (1, 3, 4, 5)]


def test_a_checkpoint_without_a_state_is_resumed_with_a_line_in_the_log(
    noise: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Training(tmp_path, noise)
    run.run(0, 2, cut=1)
    (run.states / "epoch_1.json").unlink()
    fresh = Training(tmp_path / "fresh", noise)
    with caplog.at_level("INFO", logger="streamload"):
        seen = run.run(1, 2, checkpoint=str(run.checkpoint(1)))
    assert [message for message in caplog.messages if "has no loader state" in message]
    assert seen == fresh.run(1, 2)


def test_states_of_a_remote_sync_are_found_beside_its_checkpoints(
    noise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Training(tmp_path, noise)
    run.run(0, 2, cut=1)
    with S3Server() as s3:
        for name, value in s3.environ.items():
            monkeypatch.setenv(name, value)
        s3.create_bucket("bucket")
        s3.put_files("bucket", run.checkpoint(1), prefix="logs/run/checkpoints/")
        s3.put_files("bucket", *run.states.iterdir(), prefix="logs/run/streamload/")
        found = find_state("s3://bucket/logs/run/checkpoints/epoch_1.pt", 1)
        assert find_state("s3://bucket/elsewhere/checkpoints/epoch_1.pt", 1) is None
    assert found is not None
    assert found.state == json.loads((run.states / "epoch_1.json").read_text())["loader"]


def test_a_state_that_does_not_fit_is_an_error_that_names_its_file(noise: str, tmp_path: Path) -> None:
    run = Training(tmp_path, noise)
    run.run(0, 1)
    checkpoint, state = str(run.checkpoint(1)), run.states / "epoch_1.json"
    way_out = "To resume from OpenCLIP's checkpoint alone, remove this file"
    parts = noise.replace("..00002", "..00001") + "::" + noise.replace("00000..", "00002..")
    for shards, flags, said in (
        (noise.replace("..00002", "..00001"), (), "another data set"),
        (noise, ("--seed", "1"), "another seed"),
        (parts, ("--train-data-upsampling-factors", "1::2"), "factors None, this run has 1::2"),
    ):
        with pytest.raises(StateMismatch, match=f"{state}: .*{said}.*{way_out}"):
            Training(tmp_path, shards, *flags).run(1, 2, checkpoint=checkpoint)
    for damaged in ("{", "[]", "{}", '{"loader": {}, "upsampling_factors": null}'):
        state.write_text(damaged)
        with pytest.raises(StateMismatch, match=f"{state}: .*{way_out}"):
            run.run(1, 2, checkpoint=checkpoint)


def test_a_state_that_can_not_be_written_does_not_end_the_training(
    noise: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Training(tmp_path, noise)
    run.states.write_text("in the way")
    assert len(run.run(0, 1)) == 16
    assert len([message for message in caplog.messages if "was not written to" in message]) == 1


def test_without_logs_no_state_is_written(noise: str, tmp_path: Path) -> None:
    run = Training(tmp_path, noise, "--logs", "none")
    assert len(run.run(0, 1)) == 16
    assert not run.states.exists()


def test_a_resume_goes_on_in_shards_that_were_moved(noise: str, tmp_path: Path) -> None:
    whole = Training(tmp_path / "whole", noise).run(0, 3)
    run = Training(tmp_path, noise)
    run.run(0, 1)
    was, now = str(Path(noise).parent), tmp_path / "moved"
    shutil.copytree(was, now)
    there = Training(tmp_path, noise.replace(was, str(now)))
    with pytest.raises(StateMismatch, match=r"another data set.*--streamload-moved OLD NEW"):
        there.run(1, 3, checkpoint=str(run.checkpoint(1)))
    uninstall = openclip.install(moved=[(was, str(now))])
    try:
        assert there.run(1, 3, checkpoint=str(run.checkpoint(1))) == whole[16:]
    finally:
        uninstall()
