"""The loader's states of an OpenCLIP run: where they lie, when they are written, which one a resume takes.

OpenCLIP writes RUN/checkpoints/epoch_3.pt, or a folder epoch_3 of a sharded checkpoint, after three epochs.
The loader's state of the same moment is RUN/streamload/epoch_3.json. A state belongs to a checkpoint: a newer
one would leave out samples that the weights haven't seen, so there is none within an epoch. They don't lie
among the checkpoints since OpenCLIP, resuming from a --remote-sync, takes whatever lies there for one.
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
from streamload.loader.distributed import gathered
from streamload.loader.position import Position, from_state

logger = logging.getLogger("streamload")

_FOLDER = "streamload"


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state as it was read.

    Attributes:
        name: where it lies.
        state: the loader's.
        place: what it tells.
        factors: the run's --train-data-upsampling-factors.
    """

    name: str
    state: dict[str, Any]
    place: Position
    factors: str | None


class Saver:
    """Writes a run's states; each rank has one and iterates by it, in step with the others.

    Args:
        checkpoints: OpenCLIP's folder of them.
        factors: the run's --train-data-upsampling-factors.
        writes: whether this rank does it.
    """

    def __init__(self, checkpoints: Path, factors: str | None, *, writes: bool):
        self._checkpoints = checkpoints
        self._folder = checkpoints.parent / _FOLDER
        self._factors = factors
        self._writes = writes

    def follow(self, loader: Loader) -> Iterator[Any]:
        """The batches of the loader's next epoch; then its state is written, before OpenCLIP's checkpoint."""
        yield from loader
        state = gather_state(loader)
        if self._writes:
            self._save(_name(state["epoch"]), state)
            self._prune(state["epoch"])

    def _save(self, name: str, state: dict[str, Any]) -> None:
        """Write a state, or say that it can't be; a training doesn't end for that."""
        path = self._folder / name
        try:
            _publish(path, json.dumps({"loader": state, "upsampling_factors": self._factors}))
        except OSError as exc:
            logger.warning("the loader's state was not written to %s: %s", path, exc)

    def _prune(self, epoch: int) -> None:
        """Remove states whose checkpoints are gone, or never came; the one of this epoch is still to come."""
        kept = {_name(epoch)}
        if self._has_checkpoint("epoch_latest"):
            kept.add(_name(epoch - 1))
        for path in self._folder.glob("epoch_*.json"):
            if path.name not in kept and not self._has_checkpoint(path.stem):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _has_checkpoint(self, name: str) -> bool:
        """Whether there is one of this name: a file, or the folder of a sharded one."""
        return (self._checkpoints / f"{name}.pt").exists() or (self._checkpoints / name).is_dir()


def saver_for(args: Any) -> Saver | None:
    """The saver of a run with OpenCLIP's arguments; None where it writes no checkpoints."""
    logs = getattr(args, "logs", None)
    if not logs or logs.lower() == "none" or not getattr(args, "checkpoint_path", None):
        return None
    factors = getattr(args, "train_data_upsampling_factors", None)
    return Saver(Path(args.checkpoint_path), factors, writes=rank_of(args) == 0)


def take_up(loader: Loader, args: Any, epoch: int, moved: Sequence[tuple[str, str]] = ()) -> None:
    """Let a loader go on by the state that belongs to the checkpoint of --resume, if there is one.

    All ranks have to call it; what rank 0 finds counts.

    Args:
        loader: of this rank.
        args: OpenCLIP's.
        epoch: at which the checkpoint goes on.
        moved: where shards were when the state was saved, and where they are now.

    Raises:
        StateMismatch: the state is of another run, or damaged; it says how to go on without it.
    """
    found = gathered(find_state(args.resume, epoch), loader.world_size)[0]
    if found is None:
        if rank_of(args) == 0:
            logger.info(
                "no state of the loader belongs to %s: epoch %d begins at its own beginning",
                args.resume,
                epoch,
            )
        return
    factors = getattr(args, "train_data_upsampling_factors", None)
    try:
        if found.factors != factors:
            raise StateMismatch(
                f"saved with --train-data-upsampling-factors {found.factors}, and this is {factors}"
            )
        loader.load_state_dict(found.state, moved=dict(moved))
    except StateMismatch as exc:
        raise _unusable(found.name, exc) from exc
    if rank_of(args) == 0:
        logger.info("epoch %d begins after %d samples, by %s", epoch, found.place.position, found.name)


def find_state(checkpoint: str, epoch: int) -> SavedState | None:
    """The state that was saved with a checkpoint; None if there is none.

    Args:
        checkpoint: its path, of a file or folder, or a URL that fsspec opens.
        epoch: at which it goes on.

    Raises:
        StateMismatch: the file is no state, or a damaged one.
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
    return StateMismatch(
        f"{name}: {problem}. To resume with OpenCLIP's checkpoint alone, move this file away"
    )


def _name(epoch: int) -> str:
    """Of the state behind so many epochs."""
    return f"epoch_{epoch}.json"


def _publish(path: Path, text: str) -> None:
    """Write a file so that it is there as a whole, or as it was before."""
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
