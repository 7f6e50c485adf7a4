"""Conversations with images for vision-language models: a sample's JSON and images → ids, labels, patches.

    recipe = Conversations(AutoProcessor.from_pretrained("Qwen/Qwen2.5-VL-3B-Instruct"))
    workers = streamload.Workers(map_sample=recipe.example, collate=recipe.flat)

The processor is one of transformers for models whose images have sizes of their own: those of Qwen2-VL,
Qwen2.5-VL, Qwen3-VL. This module doesn't import transformers. Which image is which member: messages.py.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_128_hexdigest

from streamload.batches.fields import read_json
from streamload.errors import CaptionError, DecodeError, OptionError
from streamload.integrations.conversations.messages import (
    ASSISTANT,
    Conversation,
    Message,
    image_members,
    read_conversation,
)
from streamload.transforms.by_pillow import decode_to_pillow
from streamload.transforms.limits import DEFAULT_MAX_IMAGE_PIXELS, check_pixels

IGNORED = -100
"""The label of a token that losses leave out."""

_JSON = "json"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OF_PROCESSOR = ("image_processor", "tokenizer", "image_token", "apply_chat_template")
_OF_IMAGES = ("get_number_of_image_patches", "merge_size", "patch_size", "temporal_patch_size")
_PACKAGES = ("transformers", "tokenizers", "jinja2", "pillow", "torchvision")
"""Packages whose version may change what a processor makes."""

Example = Mapping[str, torch.Tensor]


class Conversations:
    """The recipe of samples that are conversations; picklable, and the same sample gives the same example.

    Ids are those of the tokenizer's `apply_chat_template`, with as many image tokens as the processor puts
    there: those of `processor(text=[processor.apply_chat_template(messages)], images=[…])`, unless its
    tokenizer adds tokens to what the template writes. Pixels and grids are the image processor's, of images
    that are decoded to Pillow's own RGB; they are turned by no EXIF orientation.

    Labels are -100 outside of the assistant's turns. If the template has `{% generation %}` marks, what is
    between these is learned, as by TRL's `assistant_only_loss`; otherwise all that a turn adds to the prompt
    for it, its end token and line break included, as by Qwen's own finetuning. A token that is only partly in
    a turn counts, as in transformers. Image tokens, and the first token of a sample, are never learned.

    A sample that can't be used (no conversation, another number of images, too long) is counted as a bad
    sample; a cell goes without it. See docs/guides/vision-language.md.

    Args:
        processor: of transformers, with a fast tokenizer.
        max_length: samples of more tokens, image tokens included, are bad samples; None: any length.
        chat_template: in place of the processor's own.
        max_image_pixels: larger images, before the processor resizes them, are bad samples, as with
            `Images(max_pixels=…)`, which is for images that the loader decodes.
    """

    def __init__(
        self,
        processor: Any,
        *,
        max_length: int | None = None,
        chat_template: str | None = None,
        max_image_pixels: int = DEFAULT_MAX_IMAGE_PIXELS,
    ) -> None:
        _refuse_unusable(processor)
        template = chat_template or getattr(processor, "chat_template", None)
        template = template or processor.tokenizer.chat_template
        if not isinstance(template, str):
            raise OptionError(
                f"the processor has no single chat template, but {template!r:.60}: give chat_template="
            )
        self.max_length = max_length
        self.max_image_pixels = max_image_pixels
        self._template = template
        self._has_marks = _GENERATION.search(template) is not None
        # By this prefix the description of the recipe (loader/described_code.py) leaves the object out; the
        # digest, which is described, stands for it.
        self._streamload_processor = processor
        self._image_token = int(processor.tokenizer.convert_tokens_to_ids(processor.image_token))
        self._merged = int(processor.image_processor.merge_size) ** 2
        self.digest = _digest(processor)
        # Workers are enough parallelism, and the library warns of forks after a use.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def __deepcopy__(self, _: dict[int, Any]) -> Conversations:
        """A recipe never changes, so a copy is the recipe itself."""
        return self

    def example(self, sample: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Make an example of a raw sample: a `map_sample`.

        Returns:
            `input_ids` and `labels` int64[T], `pixel_values` float32[P, D], `image_grid_thw` int64[n, 3].

        Raises:
            CaptionError: the sample isn't such a conversation, or is too long.
            DecodeError: an image can't be decoded, or is more than 200 times as long as wide.
        """
        conversation = self._conversation(sample, image_members(sample))
        pixels, grids = self._pixels([sample[name] for name in conversation.images])
        ids, is_learned = self._learned(conversation.messages)
        repeats = self._repeats(ids, grids.prod(1).tolist())
        ids, is_learned = np.repeat(ids, repeats), np.repeat(is_learned, repeats)
        labels = np.where(is_learned & (ids != self._image_token), ids, IGNORED)
        labels[:1] = IGNORED  # the last token of the sample before it doesn't predict it
        return {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "pixel_values": pixels,
            "image_grid_thw": grids,
        }

    def costs(self, members: Mapping[str, Any]) -> tuple[float, float]:
        """Count tokens and patches of a sample's example, without decoding: a function for `Shards(facts=…)`.

        Args:
            members: `__key__`, bytes by extension, and in `__images__` (width, height) by extension.

        Returns:
            Numbers of tokens and patches; NaN for both if the sample can't be used, or if the size of an
            image isn't known.
        """
        sizes: Mapping[str, tuple[int, int]] = members["__images__"]
        try:
            conversation = self._conversation(members, list(sizes))
            patches = [self._patches(*sizes[name]) for name in conversation.images]
            repeats = self._repeats(self._ids(conversation.messages), patches)
        except (CaptionError, DecodeError):
            return math.nan, math.nan
        return float(repeats.sum()), float(sum(patches))

    def flat(self, examples: Sequence[Example]) -> dict[str, torch.Tensor]:
        """Join examples to one sequence without padding, as Qwen-VL's finetuning does: a `collate`.

        Its collator gives `cu_seqlens` as `attention_mask`. `position_ids` are those of `get_rope_index`.

        Returns:
            `input_ids` and `labels` int64[1, T], `position_ids` int64[3, 1, T], `positions` int64[1, T] that
            begin at 0 with each sample, `cu_seqlens` int32[N + 1], `pixel_values` float32[P, D],
            `image_grid_thw` int64[n, 3].
        """
        lengths = torch.tensor([0, *(len(example["input_ids"]) for example in examples)])
        return {
            "input_ids": torch.cat([example["input_ids"] for example in examples])[None],
            "labels": torch.cat([example["labels"] for example in examples])[None],
            "position_ids": torch.cat([self._positions(example) for example in examples], 1)[:, None],
            "positions": torch.cat([torch.arange(len(example["input_ids"])) for example in examples])[None],
            "cu_seqlens": lengths.cumsum(0).int(),
            "pixel_values": torch.cat([example["pixel_values"] for example in examples]),
            "image_grid_thw": torch.cat([example["image_grid_thw"] for example in examples]),
        }

    def shifted(self, examples: Sequence[Example]) -> dict[str, torch.Tensor]:
        """Join examples to one sequence with the labels of the next token, as torchtitan does: a `collate`.

        Each sample's last token is only a label, so there is one token less of each.

        Returns:
            `input`, `labels` and `positions` int64[T], where positions begin at 0 with each sample;
            `mrope_positions` int64[T, 3], `pixel_values` float32[P, D], `grid_thw` int64[n, 3].
        """
        return {
            "input": torch.cat([example["input_ids"][:-1] for example in examples]),
            "labels": torch.cat([example["labels"][1:] for example in examples]),
            "positions": torch.cat([torch.arange(len(example["input_ids"]) - 1) for example in examples]),
            "mrope_positions": torch.cat(
                [self._positions(example)[:, :-1] for example in examples], 1
            ).T.contiguous(),
            "pixel_values": torch.cat([example["pixel_values"] for example in examples]),
            "grid_thw": torch.cat([example["image_grid_thw"] for example in examples]),
        }

    def _conversation(self, sample: Mapping[str, Any], members: Sequence[str]) -> Conversation:
        if _JSON not in sample:
            raise CaptionError(f"the sample has no member {_JSON!r} with its conversation")
        record = read_json(sample[_JSON], "conversation", CaptionError)
        return read_conversation(record, str(sample["__key__"]), members)

    def _pixels(self, files: Sequence[bytes]) -> tuple[torch.Tensor, torch.Tensor]:
        """Patches and grids of images."""
        processor = self._streamload_processor.image_processor
        if not files:
            width = 3 * processor.temporal_patch_size * processor.patch_size**2
            return torch.empty(0, width), torch.empty(0, 3, dtype=torch.int64)
        images = [decode_to_pillow(file, self.max_image_pixels) for file in files]
        try:
            inputs = processor(images=images, return_tensors="pt")
        except ValueError as exc:
            sizes = ", ".join(f"{image.width}×{image.height}" for image in images)
            raise DecodeError(f"the image processor refuses one of the images ({sizes}): {exc}") from exc
        return inputs["pixel_values"], inputs["image_grid_thw"]

    def _patches(self, width: int, height: int) -> int:
        """Number of patches of an image of this size."""
        if width < 1 or height < 1:
            raise DecodeError("the size of an image isn't known by its header")
        check_pixels(height, width, self.max_image_pixels)
        processor = self._streamload_processor.image_processor
        try:
            count = processor.get_number_of_image_patches(height, width, {})  # {}: for transformers 4.53
        except ValueError as exc:
            raise DecodeError(f"the image processor refuses an image of {width}×{height}: {exc}") from exc
        return int(count)

    def _repeats(self, ids: npt.NDArray[np.int64], patches: Sequence[int]) -> npt.NDArray[np.int64]:
        """Number of times that each id of a text with one token for each image comes: its image's tokens."""
        places = np.flatnonzero(ids == self._image_token)
        if len(places) != len(patches):
            raise CaptionError(
                f"the text has {len(places)} image tokens for {len(patches)} images: the chat template "
                f"writes none for an image, or a message has such a token in its text"
            )
        repeats = np.ones(len(ids), np.int64)
        repeats[places] = np.array(patches, np.int64) // self._merged
        if self.max_length is not None and repeats.sum() > self.max_length:
            raise CaptionError(
                f"the conversation has {repeats.sum():,} tokens, more than max_length={self.max_length:,}"
            )
        return repeats

    def _ids(self, messages: list[Message]) -> npt.NDArray[np.int64]:
        """Ids of a conversation, with one token for each image."""
        return np.array(self._apply(messages, tokenize=True, return_dict=True)["input_ids"], np.int64)

    def _learned(self, messages: list[Message]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Ids as `_ids`, and which of these the assistant has written."""
        if self._has_marks:
            encoded = self._apply(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return np.array(encoded["input_ids"], np.int64), np.array(encoded["assistant_masks"], np.bool_)
        text = self._apply(messages, tokenize=False)
        encoded = self._streamload_processor.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True
        )
        starts, stops = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
        is_learned = np.zeros(len(starts), np.bool_)
        for start, stop in self._turns(messages, text):
            is_learned |= (starts < stop) & (stops > start)
        return np.array(encoded["input_ids"], np.int64), is_learned

    def _turns(self, messages: list[Message], text: str) -> Iterator[tuple[int, int]]:
        """Where in the text of a conversation the assistant's turns are."""
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            if number == 0:
                raise CaptionError("the conversation begins with the assistant, whose turn has no prompt")
            prompt = self._apply(messages[:number], tokenize=False, add_generation_prompt=True)
            answered = self._apply(messages[: number + 1], tokenize=False)
            if not (text.startswith(answered) and answered.startswith(prompt)):
                raise OptionError(
                    "the chat template writes the beginning of a conversation otherwise once a message "
                    "follows, so nothing tells which tokens are the assistant's: give chat_template= with "
                    "{% generation %} and {% endgeneration %} around them"
                )
            yield len(prompt), len(answered)

    def _apply(self, messages: list[Message], **options: Any) -> Any:
        """Apply the chat template; what it refuses is a bad sample."""
        from jinja2 import TemplateError  # of transformers, which needs it for any chat template

        try:
            return self._streamload_processor.tokenizer.apply_chat_template(
                messages, chat_template=self._template, **options
            )
        except TemplateError as exc:
            raise CaptionError(f"the chat template refuses the conversation: {exc}") from exc

    def _positions(self, example: Example) -> torch.Tensor:
        """Positions of an example's tokens in time, height and width, int64[3, T], as of `get_rope_index`.

        A text goes on after the largest position before it, in all three; an image's tokens have their places
        in its grid.
        """
        is_image = example["input_ids"] == self._image_token
        grids = example["image_grid_thw"] // torch.tensor([1, *[math.isqrt(self._merged)] * 2])
        pieces, place, position = [], 0, 0
        starts = is_image.nonzero()[:, 0][grids.prod(1).cumsum(0) - grids.prod(1)].tolist()
        for start, (frames, height, width) in zip(starts, grids.tolist(), strict=True):
            pieces.append((torch.arange(start - place) + position).expand(3, -1))
            position += start - place
            axes = torch.meshgrid(*map(torch.arange, (frames, height, width)), indexing="ij")
            pieces.append(torch.stack(axes).reshape(3, -1) + position)
            position += max(height, width)
            place = start + frames * height * width
        pieces.append((torch.arange(len(is_image) - place) + position).expand(3, -1))
        return torch.cat(pieces, 1)


def _refuse_unusable(processor: Any) -> None:
    """Refuse a processor without patches, or without what tells which token is where."""
    images = getattr(processor, "image_processor", None)
    lacking = [name for name in _OF_PROCESSOR if not hasattr(processor, name)]
    lacking += [f"image_processor.{name}" for name in _OF_IMAGES if not hasattr(images, name)]
    if lacking:
        raise OptionError(
            f"{type(processor).__name__} has no {', '.join(lacking)}; expected the processor of a model like "
            f"Qwen2.5-VL, by transformers 4.53 or newer. For other models write map_sample= yourself"
        )
    if not processor.tokenizer.is_fast:
        raise OptionError(
            f"{type(processor.tokenizer).__name__} is a slow tokenizer, which doesn't tell where in the text "
            f"its tokens are; give a processor with a fast one"
        )


def _digest(processor: Any) -> str:
    """What of a processor decides on ids and pixels."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = ""
    tokenizer = json.loads(processor.tokenizer.backend_tokenizer.to_str())
    for last in ("padding", "truncation"):  # of its last call
        tokenizer.pop(last, None)
    images = processor.image_processor.to_dict()
    special = {name: str(token) for name, token in processor.tokenizer.special_tokens_map.items()}
    parts = [type(processor).__name__, versions, tokenizer, special, images]
    return xxh3_128_hexdigest(json.dumps(parts, sort_keys=True, default=str).encode())
