"""Tokenizers of several kinds behind one call for a batch (part of step I): list of str → int64[N, L].

Which ids are padding is read from what a tokenizer itself reports, never guessed from ids: many tokenizers
pad with an id that captions also have.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_64_hexdigest

from streamload.batches.simple_tokenizer import CachingTokenizer, is_simple_tokenizer
from streamload.errors import OptionError
from streamload.transforms.augment import SeededGenerators

CLIP_LENGTH = 77
_LONGEST = 1024
"""The longest model_max_length that is used: unlimited tokenizers have 10³⁰, long ones 100,000."""

_LONG_CAPTION = "a photograph of a dog " * 400
"""A caption of more tokens than any CLIP has room for: its row is truncated, without padding."""

_PROBES = (
    "", "a photo of a dog", "The  QUICK\tbrown fox\njumps", "naïve café – 東京 🗼", "don't they're 3.14159",
    "http://example.com/a?b=c&amp;d <p>markup</p> #hashtag", "!?;:…()[]{}", _LONG_CAPTION,
)  # fmt: skip
"""Captions by whose ids tokenizers are told apart."""

_IGNORED = -100
"""The label of a token that a loss of transformers leaves out."""

_END_TOKENS = ("eos_token_id", "eot_token_id", "eot_token", "sep_token_id")
"""The attributes of tokenizers that name the ids at the end of a caption."""

TEXT_COLUMNS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "labels": lambda ids, valid: ids.masked_fill(~valid, _IGNORED),
    "length": lambda _, valid: valid.sum(1),
}
"""Columns made of ids int64[N, L] and a mask bool[N, L] of the real ones, by the names of transformers."""


class Texts(NamedTuple):
    """The tokens of a batch.

    Attributes:
        ids: int64[N, L].
        others: all else that the tokenizer returned, by its names, such as `attention_mask` int64[N, L].
        valid: bool[N, L]: False is padding; None: that isn't asked for.
    """

    ids: torch.Tensor
    others: dict[str, torch.Tensor]
    valid: torch.Tensor | None = None

    def columns(self) -> list[str]:
        """The names of a batch's values that have a column for each token."""
        same = [name for name, value in self.others.items() if value.shape[1:2] == self.ids.shape[1:]]
        return ["text", "text_valid", *same]


def tokenizer_in(tokenizer: Any) -> Any:
    """Return the tokenizer of a processor of transformers, which takes texts for images; else the same."""
    inner = getattr(tokenizer, "tokenizer", None)
    return inner if hasattr(tokenizer, "image_processor") and callable(inner) else tokenizer


class RecordingTokenizer:
    """A tokenizer of transformers within another tokenizer: keeps the ids and the mask of its last call."""

    def __init__(self, tokenizer: Any):
        self.inner = tokenizer
        self.last: Mapping[str, Any] = {}

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the inner tokenizer, which also returns its mask."""
        result = self.inner(*args, **{**options, "return_attention_mask": True})
        self.last = result
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":  # asked for by copy and pickle, before there is one
            raise AttributeError(name)
        return getattr(self.inner, name)


class BatchTokenizer:
    """Calls a tokenizer by batch and checks its results; its own exceptions pass unchanged.

    A tokenizer that draws random numbers (open_clip's with a `reduction_mask`) is called caption by caption,
    with generators seeded by the caption's sample, so that ids don't depend on the rest of the batch.

    Picklable if the tokenizer is.

    Args:
        tokenizer: returns the ids.
        finds_padding: whether texts come with `valid`.
        columns: names of TEXT_COLUMNS that are made from ids and `valid`.
    """

    def __init__(
        self, tokenizer: Callable[..., Any], finds_padding: bool = False, columns: Sequence[str] = ()
    ) -> None:
        if finds_padding and _is_of_transformers(getattr(tokenizer, "tokenizer", None)):
            tokenizer = copy.copy(tokenizer)
            tokenizer.tokenizer = RecordingTokenizer(tokenizer.tokenizer)  # type: ignore[attr-defined]
        self._tokenizer = tokenizer
        self._finds_padding = finds_padding
        self._columns = tuple(columns)
        self._options = _transformers_options(tokenizer, finds_padding)
        self._length: int | None = None
        self._padding: tuple[int, bool] | None = None  # its id, and whether captions end with it
        self._draws: bool | None = None  # whether it draws random numbers; None: unknown
        if self._options or isinstance(tokenizer, CachingTokenizer):
            self._draws = False
        if _runs_threads(tokenizer):
            # As open_clip does: workers are enough parallelism, and the library warns of forks after a use.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def __call__(self, captions: list[str], seeds: Sequence[int]) -> Texts:
        """Tokenize a batch.

        Args:
            captions: one for each sample.
            seeds: uint64, for their random choices.

        Raises:
            TypeError: the tokenizer didn't return integers.
            ValueError: not one row for each caption, or rows of another length than before.
            OptionError: nothing says what is padding.
        """
        if self._draws is False:
            return self._texts(captions)
        with SeededGenerators() as generators:
            if self._draws is None:
                generators.seed(0)
                texts = self._texts(captions)
                if not generators.were_used(0):  # it may still draw, for longer captions
                    return texts
                self._draws = True
            rows = []
            for caption, seed in zip(captions, seeds, strict=True):
                generators.seed(seed)
                rows.append(self._texts([caption]))
        others = {name: torch.cat([row.others[name] for row in rows]) for name in rows[0].others}
        valid = [row.valid for row in rows if row.valid is not None]
        return Texts(torch.cat([row.ids for row in rows]), others, torch.cat(valid) if valid else None)

    def lengths(self, captions: list[str]) -> npt.NDArray[np.int64]:
        """The number of ids of each caption, without padding: int64[N].

        It is the sum of an `attention_mask`. Without one, padding is the id at the end of the row of an empty
        caption; where that is also the last id of a caption, the first of them counts.

        Raises:
            TypeError, ValueError: see `__call__`.
        """
        if self._options:  # in half the time without the padding
            unpadded = {**self._options, "padding": False, "return_tensors": None}
            rows = self._tokenizer(captions, **unpadded)["input_ids"]
            return np.array([len(row) for row in rows], np.int64)
        texts = self._texts(captions)
        mask = texts.others.get("attention_mask")
        if mask is not None:
            return np.asarray(mask.sum(1).numpy(), np.int64)
        if self._padding is None:
            empty, long = self._texts(["", _LONG_CAPTION]).ids[:, -1].tolist()
            self._padding = empty, empty == long
        padding, ends_captions = self._padding
        ids = texts.ids.numpy()
        others = ids[:, ::-1] != padding
        trailing = np.where(others.any(1), others.argmax(1), ids.shape[1])
        return np.asarray(ids.shape[1] - trailing + (ends_captions & (trailing > 0)), np.int64)

    def real_and_padding(self, texts: Texts) -> tuple[int, int]:
        """Count the real ids of a batch and its padding; zeros if nothing tells them apart."""
        valid = texts.valid
        if valid is None:
            valid = known_valid(self._tokenizer, texts.ids, texts.others)
        if valid is None or valid.shape != texts.ids.shape:
            return 0, 0
        real = int(valid.sum())
        return real, valid.numel() - real

    def draws(self) -> bool:
        """True if the tokenizer draws random numbers; call it where nobody else uses the generators."""
        if self._draws is None:
            with SeededGenerators() as generators:
                generators.seed(0)
                self._texts([_LONG_CAPTION])
                self._draws = generators.were_used(0) or None
        return bool(self._draws)

    def digest(self) -> str:
        """Return a digest of the ids of some captions; "" if the tokenizer fails at them, or draws otherwise.

        Call it where nobody else uses the generators.
        """
        captions, seeds = list(_PROBES), [0] * len(_PROBES)
        try:
            first, again = (self(captions, seeds).ids for _ in range(2))
        except Exception:  # of the user's function
            return ""
        if not torch.equal(first, again):
            return ""
        return xxh3_64_hexdigest(f"{list(first.shape)}".encode() + first.contiguous().numpy().tobytes())

    def _texts(self, captions: list[str]) -> Texts:
        result = self._tokenizer(captions, **self._options)
        named = dict(result) if isinstance(result, Mapping) else {"input_ids": result}
        ids = self._checked(named.pop("input_ids", None), len(captions))
        others = {name: self._checked_rows(name, value, len(ids)) for name, value in named.items()}
        if not self._finds_padding:
            return Texts(ids, others)
        valid = valid_ids(self._tokenizer, ids, others)
        if "attention_mask" not in getattr(self._tokenizer, "model_input_names", ["attention_mask"]):
            del others["attention_mask"]  # was asked for only to find the padding
        return Texts(ids, others | self._added(ids, valid, others), valid)

    def _added(
        self, ids: torch.Tensor, valid: torch.Tensor, others: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The columns of TEXT_COLUMNS that are asked for.

        Raises:
            OptionError: the tokenizer returned one of that name.
        """
        for name in self._columns:
            if name in others:
                raise OptionError(f"{self._name} returned {name} itself: leave it out of text_columns=")
        return {name: TEXT_COLUMNS[name](ids, valid) for name in self._columns}

    def _checked_rows(self, name: str, value: Any, count: int) -> torch.Tensor:
        """A value other than ids, checked: it has a row for each caption."""
        tensor = torch.as_tensor(value)
        if not tensor.ndim or len(tensor) != count:
            raise ValueError(
                f"{self._name} returned {name} {list(tensor.shape)} for {count} captions; expected a row "
                f"for each"
            )
        return tensor

    def _checked(self, result: Any, count: int) -> torch.Tensor:
        ids = self._as_tensor(result)
        if ids.ndim != 2 or len(ids) != count:
            raise ValueError(
                f"{self._name} returned {list(ids.shape)} for {count} captions; expected [{count}, L]: "
                f"a row for each caption, all padded to one length"
            )
        if self._length is None:
            self._length = ids.shape[1]
        if ids.shape[1] != self._length:
            raise ValueError(
                f"{self._name} returned rows of {ids.shape[1]} ids after rows of {self._length}; "
                f"expected one length: pad each batch to the same"
            )
        return ids

    def _as_tensor(self, result: Any) -> torch.Tensor:
        if isinstance(result, (list, tuple)) and len({np.shape(row) for row in result}) > 1:
            raise ValueError(f"{self._name} returned rows of several lengths; expected them padded to one")
        try:
            ids = result if isinstance(result, torch.Tensor) else torch.from_numpy(np.array(result))
        except TypeError:
            ids = None
        if ids is None or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            kind = type(result).__name__ if ids is None else f"{type(result).__name__} of {ids.dtype}"
            raise TypeError(f"{self._name} returned a {kind}; expected integer ids of shape [N, L]")
        return ids.long()

    @property
    def _name(self) -> str:
        return f"tokenizer {getattr(self._tokenizer, '__name__', type(self._tokenizer).__name__)}"


def adapt_tokenizer(
    tokenizer: Any, finds_padding: bool = False, columns: Sequence[str] = ()
) -> BatchTokenizer | None:
    """Wrap a tokenizer. To be called before worker processes are forked (see BatchTokenizer).

    Args:
        tokenizer: open_clip's, one of transformers, or any function from a list of str to ids [N, L] as
            tensor, array or lists; None for none. One of transformers pads and truncates to its
            `model_max_length`, or to 77 if that is unset or over 1024.
        finds_padding: whether texts say what is padding.
        columns: names of TEXT_COLUMNS that texts have beside ids.

    Raises:
        TypeError: it isn't callable.
    """
    if tokenizer is None:
        return None
    if not callable(tokenizer):
        raise TypeError(
            f"tokenizer is a {type(tokenizer).__name__}; expected open_clip's, one of transformers, "
            f"a function from a list of str to ids [N, L], or None"
        )
    if _is_simple(tokenizer) and is_simple_tokenizer(tokenizer):
        tokenizer = CachingTokenizer(tokenizer)
    return BatchTokenizer(tokenizer, finds_padding or bool(columns), columns)


def refuse_unknown_padding(option: str, tokenizer: Any, columns: Sequence[str]) -> None:
    """Refuse an option that goes by padding without ids, or where it isn't certain which are padding.

    Args:
        option: for the error.
        tokenizer: of the loader.
        columns: names of TEXT_COLUMNS that texts have beside ids.

    Raises:
        OptionError: it says why.
    """
    adapted = adapt_tokenizer(tokenizer, finds_padding=True, columns=columns)
    if adapted is None:
        raise OptionError(f"{option} is for ids: give a tokenizer")
    adapted(["a photo of a dog", ""], [0, 0])


def _is_of_transformers(tokenizer: Any) -> bool:
    return hasattr(tokenizer, "convert_tokens_to_ids") and hasattr(tokenizer, "model_max_length")


def _transformers_options(tokenizer: Any, finds_padding: bool) -> dict[str, Any]:
    """The arguments with which a tokenizer of transformers returns rows of one length."""
    if not _is_of_transformers(tokenizer) or tokenizer.model_max_length is None:
        return {}
    length = tokenizer.model_max_length
    options = {
        "padding": "max_length",
        "truncation": True,
        "max_length": int(length) if 0 < length <= _LONGEST else CLIP_LENGTH,
        "return_tensors": "pt",
    }
    return options | {"return_attention_mask": True} if finds_padding else options


def _runs_threads(tokenizer: Any) -> bool:
    """True if it is a fast tokenizer of transformers, or holds one as open_clip's does."""
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    return bool(getattr(inner, "is_fast", False))


def up_to_last(ids: torch.Tensor, end: int) -> torch.Tensor:
    """Mark each row's ids up to its last `end` token: bool[N, L], from int64[N, L]."""
    return (ids == end).flip(1).cumsum(1).flip(1) > 0


def recorded(ids: torch.Tensor, recorder: RecordingTokenizer) -> torch.Tensor | None:
    """Return the mask of the inner tokenizer's last call; None if its ids aren't these.

    Ids that the outer tokenizer has replaced by padding (open_clip's `strip_sep_token`) are padding, too.
    """
    inner, mask = (recorder.last.get(name) for name in ("input_ids", "attention_mask"))
    if not isinstance(inner, torch.Tensor) or mask is None or inner.shape != ids.shape:
        return None
    is_kept = ids == inner
    if not torch.isin(ids[~is_kept], torch.tensor([0, recorder.inner.pad_token_id or 0])).all():
        return None
    valid: torch.Tensor = mask.bool() & is_kept
    return valid


def declared(ids: torch.Tensor, tokenizer: Any) -> torch.Tensor | None:
    """Mark all but a tokenizer's `pad_token_id`; None if it has none, or ends captions with the same id."""
    pad = getattr(tokenizer, "pad_token_id", None)
    if not isinstance(pad, int) or pad in [getattr(tokenizer, name, None) for name in _END_TOKENS]:
        return None
    return ids != pad


def known_valid(tokenizer: Any, ids: torch.Tensor, others: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """As `valid_ids`, but None where nothing says what is padding."""
    recorder = getattr(tokenizer, "tokenizer", None)
    simple = tokenizer.original if isinstance(tokenizer, CachingTokenizer) else tokenizer
    if "attention_mask" in others:
        mask: torch.Tensor = others["attention_mask"]
        return mask.bool()
    if isinstance(recorder, RecordingTokenizer):
        return recorded(ids, recorder)
    if _is_simple(simple):
        return up_to_last(ids, simple.eot_token_id)
    return declared(ids, tokenizer)


def valid_ids(tokenizer: Any, ids: torch.Tensor, others: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mark the ids that aren't padding: bool[N, L].

    Args:
        tokenizer: which returned them; one that holds another has a RecordingTokenizer in its place.
        ids: int64[N, L].
        others: all else that it returned.

    Raises:
        OptionError: nothing says for certain what is padding.
    """
    valid = known_valid(tokenizer, ids, others)
    if valid is None or valid.shape != ids.shape:
        name = getattr(tokenizer, "__name__", type(tokenizer).__name__)
        raise OptionError(
            f"nothing says for certain which ids of tokenizer {name} are padding, which "
            f'text_padding="longest" and text_columns= need to know: return a dict of input_ids and '
            f"attention_mask, both [N, L], or give it a pad_token_id that is no other token's"
        )
    return valid


def _is_simple(tokenizer: Any) -> bool:
    """True if it is open_clip's SimpleTokenizer in any of its modes: each row ends with an end token."""
    names = [(kind.__module__, kind.__name__) for kind in type(tokenizer).__mro__]
    return ("open_clip.tokenizer", "SimpleTokenizer") in names
