"""The loader's states of an OpenCLIP run: where they are stored, when they are written and loaded.

After three epochs OpenCLIP writes RUN/checkpoints/epoch_3.pt, or a folder epoch_3 for a sharded checkpoint;
the loader's state is RUN/streamload/epoch_3.json. States are only written with checkpoints: a state newer
than the weights would skip samples that the weights haven't seen. They aren't in the checkpoints' folder, as
OpenCLIP takes each file there for a checkpoint when it resumes from a --remote-sync.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from streamload.errors import StateMismatch
from streamload.integrations.openclip.arguments import rank_of
from streamload.loader import Loader, gather_state
from streamload.loader.position import Position
from streamload.loader.state import from_state
from streamload.ranks.distributed import gather

logger = logging.getLogger("streamload")

_FOLDER = "streamload"


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state that was read.

    Attributes:
        name: its path.
        state: the loader's state_dict.
        place: its position.
        factors: the run's --train-data-upsampling-factors.
    """

    name: str
    state: dict[str, Any]
    place: Position
    factors: str | None


class Saver:
    """Writes a run's states. All ranks iterate through it, in step; one writes.

    Args:
        checkpoints: OpenCLIP's folder of checkpoints.
        factors: the run's --train-data-upsampling-factors.
        writes: whether this rank writes.
    """

    def __init__(self, checkpoints: Path, factors: str | None, *, writes: bool):
        self._checkpoints = checkpoints
        self._folder = checkpoints.parent / _FOLDER
        self._factors = factors
        self._writes = writes

    def follow(self, loader: Loader) -> Iterator[Any]:
        """Yield the loader's next epoch, then write its state, before OpenCLIP writes its checkpoint."""
        yield from loader
        state = gather_state(loader)
        if self._writes:
            self._save(_name(state["epoch"]), state)
            self._prune(state["epoch"])

    def _save(self, name: str, state: dict[str, Any]) -> None:
        """Write a state; log a failure, which doesn't end the training."""
        path = self._folder / name
        try:
            _publish(path, json.dumps({"loader": state, "upsampling_factors": self._factors}))
        except OSError as exc:
            logger.warning("the loader's state was not written to %s: %s", path, exc)

    def _prune(self, epoch: int) -> None:
        """Remove states without a checkpoint, except this epoch's, whose checkpoint comes next."""
        kept = {_name(epoch)}
        if self._has_checkpoint("epoch_latest"):
            kept.add(_name(epoch - 1))
        for path in self._folder.glob("epoch_*.json"):
            if path.name not in kept and not self._has_checkpoint(path.stem):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _has_checkpoint(self, name: str) -> bool:
        """True if a checkpoint exists: a file, or a folder if sharded."""
        return (self._checkpoints / f"{name}.pt").exists() or (self._checkpoints / name).is_dir()


def run_folder(args: Any) -> Path | None:
    """The folder of a run's logs, in which its checkpoints are; None if it writes none."""
    logs = getattr(args, "logs", None)
    if not logs or logs.lower() == "none" or not getattr(args, "checkpoint_path", None):
        return None
    return Path(args.checkpoint_path).parent


def saver_for(args: Any) -> Saver | None:
    """The saver of a run with OpenCLIP's arguments; None if it writes no checkpoints."""
    if run_folder(args) is None:
        return None
    factors = getattr(args, "train_data_upsampling_factors", None)
    return Saver(Path(args.checkpoint_path), factors, writes=rank_of(args) == 0)


def take_up(loader: Loader, args: Any, epoch: int, moved: Sequence[tuple[str, str]] = ()) -> None:
    """Resume a loader from the state of the --resume checkpoint, if there is one.

    All ranks must call it; rank 0's state is used.

    Args:
        loader: of this rank.
        args: OpenCLIP's.
        epoch: the checkpoint's next epoch.
        moved: old and new URL prefixes of shards that have moved since the state was saved.

    Raises:
        StateMismatch: the state is of another run, or damaged; the message says how to continue without it.
    """
    state = gather(find_state(args.resume, epoch), loader.world_size)[0]
    if state is None:
        if rank_of(args) == 0:
            logger.info(
                "%s has no loader state: epoch %d starts from its first batch",
                args.resume,
                epoch,
            )
        return
    factors = getattr(args, "train_data_upsampling_factors", None)
    try:
        if state.factors != factors:
            raise StateMismatch(
                f"saved with --train-data-upsampling-factors {state.factors}, this run has {factors}"
            )
        loader.load_state_dict(state.state, moved=dict(moved))
    except StateMismatch as exc:
        raise _unusable(state.name, exc) from exc
    if rank_of(args) == 0:
        logger.info("epoch %d starts after %d samples, by %s", epoch, state.place.position, state.name)


def find_state(checkpoint: str, epoch: int) -> SavedState | None:
    """The state saved with a checkpoint, or None.

    Args:
        checkpoint: path of a file or folder, or a URL for fsspec.
        epoch: the checkpoint's next epoch.

    Raises:
        StateMismatch: the file isn't a state, or is damaged.
        OSError: it can't be read.
    """
    files, path = fsspec.core.url_to_fs(checkpoint.rstrip("/"))
    run = path.rpartition("/")[0].rpartition("/")[0]
    return _read(files, f"{run}/{_FOLDER}/{_name(epoch)}")


def _read(files: Any, path: str) -> SavedState | None:
    try:
        saved = json.loads(files.cat_file(path))
        return SavedState(path, saved["loader"], from_state(saved["loader"])[1], saved["upsampling_factors"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as exc:
        raise _unusable(path, exc) from exc


def _unusable(name: str, problem: Exception) -> StateMismatch:
    return StateMismatch(f"{name}: {problem}. To resume from OpenCLIP's checkpoint alone, remove this file")


def _name(epoch: int) -> str:
    """Name of the state after so many epochs."""
    return f"epoch_{epoch}.json"


def _publish(path: Path, text: str) -> None:
    """Write a file atomically and durably."""
    path.parent.mkdir(exist_ok=True)
    written = path.with_suffix(".tmp")
    with written.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    written.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
