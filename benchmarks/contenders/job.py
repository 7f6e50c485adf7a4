"""What a contender is asked to do and what it measures; without torch, of which their parent has no need."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

JITTERED = "open_clip, jittered"
SIDE = 224
READY = "ready"
"""The line by which a contender waits for its turn."""
TURN = 2
"""How many epochs a turn has: one to become warm again, and one that is measured."""


@dataclass(frozen=True)
class Job:
    """What a contender is asked to do.

    Attributes:
        urls: one pattern, with braces.
        samples: in all shards.
        epochs: how often to go through them.
        preprocess: "default" is the loader's own, "open_clip" open_clip's function, JITTERED that with colour
            jitter; "none" makes nothing of a sample but the number of its bytes.
        images: "float32", or "uint8" where a contender is to hand over bytes.
        compile: of streamload, whether it compiles preprocess.
        tokenizer: "words", "open_clip", or "numbers": the number at a caption's end in place of ids.
        shuffle: the window where the loader lets one choose; None for its default.
        packages: a folder whose packages stand behind the interpreter's own; None for none.
        convert_to: a folder: write the shards there in the loader's own format, and train on nothing.
        cache_bytes: the most that the loader's cache may hold; None for its default.
        keep: how many batches the consumer keeps; at the end of an epoch it looks whether they are still
            what they were.
        step_seconds: how long the consumer takes for each batch, besides.
        checks: of streamload, how the check of each sample that is read runs: "shipped", or for
            verification.py "timed" or "off".
        keeps: in strategies.py, where what was loaded or computed is kept: "nothing", "memory" or "disk".
        files: in strategies.py, a folder with a JPEG a sample, its label at the end of its name.
        prepare: of streamload, its recipe for prepared images; None for images as they are.
        drop_pages: let the kernel forget what it has cached of cache_dir before each epoch.
        start_method: how workers are started, "fork", "spawn" or "forkserver"; None for the loader's default.
        state: a file for the loader's state.
        save_after: behind so many batches of the last epoch the state goes there, or went; None for never.
        by_libraries: of the floor, by nothing of streamload's own.
        takes_up: begin with the state that is there, and go through the rest of its epoch.
        in_turn: wait before each turn of epochs but the first until it is this contender's.
    """

    urls: str
    samples: int
    epochs: int
    seed: int
    batch_size: int = 64
    workers: int = 2
    preprocess: str = "open_clip"
    images: Literal["float32", "uint8"] = "float32"
    compile: bool = True
    tokenizer: str = "words"
    shuffle: int | None = None
    cache_dir: str | None = None
    packages: str | None = None
    convert_to: str | None = None
    cache_bytes: int | None = None
    keep: int = 0
    step_seconds: float = 0.0
    checks: str = "shipped"
    keeps: str = "disk"
    files: str = ""
    prepare: str | None = None
    drop_pages: bool = False
    start_method: str | None = None
    state: str | None = None
    save_after: int | None = None
    by_libraries: bool = False
    takes_up: bool = False
    in_turn: bool = False

    @classmethod
    def from_argument(cls) -> "Job":
        job = cls(**json.loads(sys.argv[1]))
        if job.packages is not None and job.packages not in sys.path:
            sys.path.append(job.packages)
        return job

    def to_argument(self) -> str:
        return json.dumps(asdict(self))

    @property
    def resumes(self) -> bool:
        """Whether it has to do with states."""
        return self.state is not None

    @property
    def batches(self) -> int:
        """Of an epoch, or of what is left of one that is taken up."""
        return self.samples // self.batch_size - (self.save_after or 0 if self.takes_up else 0)

    def await_turn(self, epoch: int) -> None:
        """Say that a turn can begin, if the epoch is the first of one, and wait for the word."""
        if self.in_turn and epoch and epoch % TURN == 0:
            print(f"\n{READY}", flush=True)
            sys.stdin.readline()

    def saved_state(self) -> Any:
        """What another process saved."""
        assert self.state is not None
        import torch

        return torch.load(self.state, weights_only=False)


@dataclass
class Epoch:
    """What an epoch cost. Times are of the machine's monotonic clock, which all its processes share."""

    began: float
    first_batch: float = 0.0
    ended: float = 0.0
    batches: int = 0
    images: int = 0
    cpu_seconds: float = 0.0
    consumer_cpu_seconds: float = 0.0
    """Of `cpu_seconds`, what the consumer itself took for reading the batches; 0 where nobody reads them."""
    channel_mean: float = 0.0
    disk_bytes: int = 0
    """What was read from disks, by all processes."""
    waited_seconds: float = 0.0
    """From the first batch on, the consumer's time without one."""
    changed_batches: int = 0
    """Of those that it kept, the ones that weren't at the end what they had been."""
    numbers: list[int] = field(default_factory=list)
    """With numbers for ids, of each image which it is."""
    saving_seconds: float = 0.0
    """What saving the loader's state took."""


@dataclass
class Result:
    """What a contender measured.

    Attributes:
        imported: when the loader was made, and all that goes before it done.
        limits: what it doesn't do of what others do, in a few words each.
        making: when the loader began to be made, where that is measured.
    """

    imported: float
    epochs: list[Epoch]
    versions: dict[str, str]
    notes: dict[str, Any] = field(default_factory=dict)
    limits: Sequence[str] = ()
    making: float = 0.0

    def print(self) -> None:
        """In the last line of the output, whatever else a library has said there."""
        print(f"\n{json.dumps(asdict(self))}")


def versions(*names: str) -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "source"
    return found
