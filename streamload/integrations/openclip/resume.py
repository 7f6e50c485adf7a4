"""The loader's states of an OpenCLIP run: where they lie, when they are written, which one a resume takes.

OpenCLIP writes RUN/checkpoints/epoch_3.pt behind three epochs. The loader's state of the same moment is
RUN/streamload/epoch_3.json, and RUN/streamload/latest.json is one within an epoch. They don't lie among the
checkpoints since OpenCLIP, resuming from a --remote-sync, takes whatever lies there for one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from streamload.errors import OptionError, StateMismatch
from streamload.loader import Loader, gather_state
from streamload.loader.place import Order, Place, from_state
from streamload.loader.together import gathered

logger = logging.getLogger("streamload")

_FOLDER = "streamload"
_LATEST = "latest.json"


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state as it was read.

    Attributes:
        name: where it lies.
        state: the loader's.
        order, place: what it tells.
        factors: the run's --train-data-upsampling-factors.
    """

    name: str
    state: dict[str, Any]
    order: Order
    place: Place
    factors: str | None

    def goes_on_from(self, start: SavedState) -> bool:
        """Whether it lies in the epoch that a state begins, of the same course."""
        here, there = self.place, start.place
        same = (here.epoch, here.sequence, here.began) == (there.epoch, there.sequence, there.position)
        return same and (self.order, self.factors) == (start.order, start.factors)


class Saver:
    """Writes a run's states; each rank has one and iterates by it, in step with the others.

    A state within an epoch is written before its last batch is handed out: no batch is trained on twice.

    Args:
        checkpoints: OpenCLIP's folder of them.
        factors: the run's --train-data-upsampling-factors.
        every: after how many batches of a rank a state is written; 0: only with each epoch.
        writes: whether this rank does it.
    """

    def __init__(self, checkpoints: Path, factors: str | None, every: int, *, writes: bool):
        self._checkpoints = checkpoints
        self._folder = checkpoints.parent / _FOLDER
        self._factors = factors
        self._every = every
        self._writes = writes

    def follow(self, loader: Loader) -> Iterator[Any]:
        """The batches of the loader's next epoch."""
        for number, batch in enumerate(loader, 1):
            if self._every and number % self._every == 0:
                self._save(_LATEST, gather_state(loader))
            yield batch
        state = gather_state(loader)
        self._save(_name(state["epoch"]), state)
        if self._writes:
            self._prune(state["epoch"])

    def _save(self, name: str, state: dict[str, Any]) -> None:
        """Write a state, or say that it can't be; a training doesn't end for that."""
        if not self._writes:
            return
        path = self._folder / name
        try:
            _publish(path, json.dumps({"loader": state, "upsampling_factors": self._factors}))
        except OSError as exc:
            logger.warning("the loader's state was not written to %s: %s", path, exc)

    def _prune(self, epoch: int) -> None:
        """Remove states whose checkpoints are gone, or never came; the one of this epoch is still to come."""
        kept = {_name(epoch)}
        if (self._checkpoints / "epoch_latest.pt").exists():
            kept.add(_name(epoch - 1))
        for path in self._folder.glob("epoch_*.json"):
            if path.name not in kept and not (self._checkpoints / f"{path.stem}.pt").exists():
                with contextlib.suppress(OSError):
                    path.unlink()


def saver_for(args: Any, save_steps: int) -> Saver | None:
    """The saver of a run with OpenCLIP's arguments; None where it writes no checkpoints.

    Raises:
        OptionError: states are asked for in such a run.
    """
    logs = getattr(args, "logs", None)
    if not logs or logs.lower() == "none" or not getattr(args, "checkpoint_path", None):
        if save_steps:
            raise OptionError(
                "states are saved beside OpenCLIP's checkpoints: --streamload-save-steps needs --logs"
            )
        return None
    return Saver(
        Path(args.checkpoint_path),
        getattr(args, "train_data_upsampling_factors", None),
        save_steps * getattr(args, "accum_freq", 1),
        writes=args.rank == 0,
    )


def take_up(loader: Loader, args: Any, epoch: int) -> None:
    """Let a loader go on by the state that belongs to the checkpoint of --resume, if there is one.

    All ranks have to call it; what rank 0 finds counts.

    Args:
        loader: of this rank.
        args: OpenCLIP's.
        epoch: at which the checkpoint goes on.

    Raises:
        StateMismatch: the state is of another run, or damaged; it says how to go on without it.
    """
    found = gathered(find_state(args.resume, epoch), loader.world_size)[0]
    if found is None:
        if args.rank == 0:
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
        loader.load_state_dict(found.state)
    except StateMismatch as exc:
        raise _unusable(found.name, exc) from exc
    if args.rank == 0:
        seen = found.place.position - found.place.began
        logger.info("epoch %d goes on behind %d samples, by %s", epoch, seen, found.name)


def find_state(checkpoint: str, epoch: int) -> SavedState | None:
    """The state that belongs to a checkpoint: the latest within its epoch, else that of its own moment.

    Args:
        checkpoint: its path, or a URL that fsspec opens.
        epoch: at which it goes on.

    Raises:
        StateMismatch: the file is no state, or a damaged one.
        OSError: it can't be read.
    """
    files, path = fsspec.core.url_to_fs(checkpoint)
    checkpoints = path.rpartition("/")[0]
    folder = f"{checkpoints.rpartition('/')[0]}/{_FOLDER}"
    start = _read(files, f"{folder}/{_name(epoch)}")
    if start is None or files.exists(f"{checkpoints}/epoch_{epoch + 1}.pt"):
        return start  # with the next checkpoint the epoch was over: this is another run that begins here
    within = _read(files, f"{folder}/{_LATEST}")
    return within if within is not None and within.goes_on_from(start) else start


def _read(files: Any, path: str) -> SavedState | None:
    try:
        saved = json.loads(files.cat_file(path))
        return SavedState(path, saved["loader"], *from_state(saved["loader"]), saved["upsampling_factors"])
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
