"""What a measurement is asked for; and what of it may not be here."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from streamload.errors import OptionError


class NotHere(Exception):
    """A contender that this environment doesn't have; says why."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be measured.

    Attributes:
        name: which of measures.MEASURES.
        urls: of the shards.
        paths: where their bytes are on this machine.
        tier: the tier that has them.
        directory: for what a measurement writes.
        samples: that are read.
        size_bytes: of all shards.
        tokenizer: a model's name for open_clip's get_tokenizer; None leaves captions as strings.
        storage_options: for fsspec.
    """

    name: str
    urls: list[str]
    paths: list[str]
    tier: str | None
    directory: str
    workers: int
    batch_size: int
    samples: int
    size_bytes: int
    seed: int
    tokenizer: str | None
    storage_options: dict[str, Any] | None

    @property
    def batches(self) -> int:
        """Of each loader, the one at which the clock starts among them."""
        return self.samples // self.batch_size

    def to_json(self) -> str:
        """What the process reads."""
        return json.dumps(asdict(self))


def tokenizer_of(model: str | None) -> Any:
    """open_clip's tokenizer of a model, if it is the one that goes word by word, which the floor relies on.

    Raises:
        OptionError: open_clip isn't there, knows no such model, or has another kind of tokenizer for it.
    """
    if model is None:
        return None
    from streamload.batches.simple_tokenizer import is_simple_tokenizer

    try:
        import open_clip
    except (ImportError, RuntimeError) as exc:  # RuntimeError: a torchvision of another torch
        raise OptionError(f"--tokenizer={model}: open_clip can't be imported: {exc}") from exc
    if open_clip.get_model_config(model) is None:
        raise OptionError(f"--tokenizer={model}: open_clip has no such model; one that it has is ViT-B-32")
    tokenizer = open_clip.get_tokenizer(model)
    if not is_simple_tokenizer(tokenizer):
        raise OptionError(
            f"--tokenizer={model}: its tokenizer is a {type(tokenizer).__name__}; expected a model with "
            f"open_clip's SimpleTokenizer, such as ViT-B-32"
        )
    return tokenizer
