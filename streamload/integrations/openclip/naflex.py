"""NaFlex batches and captions of several lengths, as OpenCLIP's development version has them.

Its NaFlex configuration becomes Patches: the same steps in the same order, for the same --seed. Captions are
padded to one length here, and each batch is then cut to its longest caption.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from streamload.errors import OptionError
from streamload.loader import Batches
from streamload.loader.groups import LARGEST_BLOCK
from streamload.patches.options import Patches

_FACTORIES = {True: "is_naflex_transform_factory", False: "is_naflex_eval_transform_factory"}


class PaddedCaptions:
    """A tokenizer whose rows all have the context length, padded on the right by its `pad_token_id`.

    Args:
        tokenizer: OpenCLIP's; called with pad=False it returns a list of int64[L].

    Raises:
        OptionError: nothing says how long captions are at most, or which id is padding.
    """

    def __init__(self, tokenizer: Callable[..., Any]) -> None:
        self.pad_token_id: int = _number_of(tokenizer, "pad_token_id")
        self._tokenizer = tokenizer
        self.context_length = _number_of(tokenizer, "context_length")

    def __call__(self, captions: list[str]) -> torch.Tensor:
        """Tokenize captions.

        Returns:
            int64[N, context length].

        Raises:
            OptionError: a caption ends with the id that is padding.
        """
        ids = torch.full((len(captions), self.context_length), self.pad_token_id, dtype=torch.int64)
        for row, tokens in zip(ids, self._tokenizer(captions, pad=False), strict=True):
            row[: len(tokens)] = tokens
            if len(tokens) and tokens[-1] == self.pad_token_id:
                raise OptionError(
                    f"tokenizer {type(self._tokenizer).__name__} ends captions with its pad_token_id "
                    f"{self.pad_token_id}: captions of several lengths need one that is no other token's"
                )
        return ids


def text_options(args: Any, tokenizer: Any, *, is_train: bool) -> dict[str, Any]:
    """The arguments of make_loader for captions: of one length, or padded to the longest of their batch.

    --length-bucketing changes something with the latter alone, in training: rows of about the same length are
    put together within blocks of --bucket-pool samples for each rank.

    Args:
        args: OpenCLIP's.
        tokenizer: OpenCLIP's.
        is_train: whether they are for training.

    Raises:
        OptionError: captions can't be had like this.
    """
    if not (getattr(args, "variable_text", False) or getattr(args, "genlip", False)):
        return {"tokenizer": tokenizer}
    bucketing = None
    if is_train and getattr(args, "length_bucketing", False):
        if getattr(args, "use_naflex", False):
            raise OptionError(
                "streamload doesn't support OpenCLIP's --length-bucketing with --use-naflex, whose steps are "
                "of several sizes: leave it out, and each batch is padded to its longest caption"
            )
        bucketing = min(args.bucket_pool * args.world_size, LARGEST_BLOCK)
    multiple = getattr(args, "text_pad_multiple", None) or 1
    batches = Batches(text_padding="longest", text_pad_multiple=multiple, bucketing=bucketing)
    return {"tokenizer": PaddedCaptions(tokenizer), "batches": batches}


def refuse_other_transforms(args: Any, naflex: Any, preprocess: Any, *, is_train: bool) -> None:
    """Refuse --use-naflex without a configuration, or with transforms that don't make patches.

    Raises:
        OptionError: it names what is missing.
    """
    if naflex is None:
        if getattr(args, "use_naflex", False):
            raise OptionError("--use-naflex: OpenCLIP gave no naflex_data_config; its legacy_main has none")
    elif not getattr(preprocess, _FACTORIES[is_train], False):
        raise OptionError("--use-naflex is for transforms by --aug-cfg use_timm=True naflex=True")
    elif len(naflex.train_patch_sizes) > 1:
        raise OptionError(
            f"streamload doesn't support several of OpenCLIP's --naflex-patch-sizes: give one of "
            f"{' '.join(str(height) for height, _ in naflex.train_patch_sizes)}"
        )


def training_steps(args: Any, naflex: Any, size: int, tokenizer: Any) -> list[tuple[int, int]]:
    """The steps of an epoch as OpenCLIP draws them: the most patches of an image, and the rows of a rank.

    As many rows as the budget of tokens has room for, a multiple of --naflex-batch-divisor, at least one; of
    a number of samples the last step has what is left.

    Args:
        args: OpenCLIP's.
        naflex: its NaFlex configuration.
        size: samples of an epoch; 0 where the configuration has its tokens.
        tokenizer: with GenLIP its length counts as tokens of a row.
    """
    text_tokens = tokenizer.context_length if getattr(args, "genlip", False) else 0
    left = -(-(size or naflex.train_num_image_tokens) // args.world_size)
    lengths, steps = _lengths(naflex, args.seed), []
    while left > 0:
        seq_len = next(lengths)
        budget = naflex.max_tokens_per_batch if size else min(naflex.max_tokens_per_batch, left)
        rows = max(1, budget // ((seq_len + text_tokens) * naflex.batch_divisor) * naflex.batch_divisor)
        if size:
            rows = min(rows, left)
        steps.append((seq_len, rows))
        left -= rows if size else rows * seq_len
    return steps


def training_patches(naflex: Any, steps: list[tuple[int, int]]) -> Patches:
    """The patches of a training with these steps."""
    (patch_size,) = naflex.train_patch_sizes
    return Patches(patch_size, sorted(set(naflex.train_seq_lens)), steps=steps)


def evaluation_patches(naflex: Any) -> Patches:
    """The patches of an evaluation: the most are --naflex-seq-lens' largest, or as the model was made for."""
    patch_size, seq_len = naflex.eval_config
    return Patches(patch_size, (seq_len,))


def _lengths(config: Any, seed: int) -> Iterator[int]:
    """Draw lengths from torch's generator, as OpenCLIP does."""
    generator = torch.Generator().manual_seed(seed)
    probs = config.train_seq_len_probs
    if probs is None:
        lengths = sorted(set(config.train_seq_lens))
        while True:
            yield lengths[int(torch.randint(0, len(lengths), (1,), generator=generator))]
    by_length = dict(sorted(dict(zip(config.train_seq_lens, probs, strict=True)).items()))
    lengths, total = list(by_length), sum(by_length.values())
    weights = torch.tensor([prob / total for prob in by_length.values()], dtype=torch.float32)
    while True:
        yield lengths[int(torch.multinomial(weights, 1, generator=generator))]


def _number_of(tokenizer: Any, name: str) -> int:
    number = getattr(tokenizer, name, None)
    if number is None:
        raise OptionError(
            f"captions of several lengths need a tokenizer with a {name}; {type(tokenizer).__name__} has none"
        )
    return int(number)
