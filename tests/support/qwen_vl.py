"""A processor of Qwen2.5-VL without a download, and samples of conversations as raw members.

Imports transformers, which takes a second: tests import this module as they run.
"""

import io
import json
import random
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SPECIAL = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen2-VL's, as its processor has it, but for videos."""
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% set body %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{% endset %}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ body }}{% endgeneration %}"
    "{% else %}{{ body }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The same with marks around what the assistant writes, its end token included, the line break not."""
WORDS = (
    "a",
    "red",
    "boat",
    "the",
    "lake, two",
    "dogs;",
    "größer als",
    "日本",
    "–",
    "what's  in\nthe",
    "<picture>?",
)


class Processor(Qwen2_5_VLProcessor):
    """Qwen2.5-VL's, without one for videos, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        if argument_name != "video_processor":
            return super().check_argument_for_proper_class(argument_name, argument)
        return None


def processor(template: str | None = TEMPLATE, **images: Any) -> Processor:
    """A processor whose tokenizer merges some letters, so that tokens cross the borders of words."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "s"), ("Ġ", "a"), ("i", "n")]
    vocabulary = [*letters, *("".join(pair) for pair in merges)]
    model = models.BPE({word: number for number, word in enumerate(vocabulary)}, merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL),
    )
    sizes = {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 30 * 28 * 28}, **images}
    return Processor(Qwen2VLImageProcessorPil(**sizes), fast, None, chat_template=template)


def picture(rng: random.Random, kind: str) -> bytes:
    """An image of any size and mode that its format has, in patches of noise."""
    width, height = rng.randint(8, 300), rng.randint(8, 300)
    mode = rng.choice({"jpg": ["RGB", "L", "CMYK"], "png": ["RGB", "RGBA", "P", "L"], "webp": ["RGB"]}[kind])
    noise = np.random.RandomState(rng.getrandbits(31)).randint(0, 256, (height // 8 + 1, width // 8 + 1, 3))
    image = Image.fromarray(noise.astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.convert(mode).save(buffer, {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}[kind])
    return buffer.getvalue()


def text(rng: random.Random) -> str:
    """Some words, beginning with a space or line breaks now and then."""
    return rng.choice(["", "", " ", "\n\n"]) + " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))


def sample(seed: int) -> tuple[dict[str, bytes | str], list[dict[str, Any]], list[str]]:
    """A raw sample, and what it means by this module: messages for a template, the members of its images.

    Its form follows from the seed: parts, OpenAI's, strings with placeholders, or LLaVA's.
    """
    rng = random.Random(seed)
    members = [f"{n}.{rng.choice(['jpg', 'png', 'webp'])}" for n in range(rng.randint(0, 6))]
    pairs = rng.randint(1, 3)
    roles = ["system"] * (rng.random() < 0.4) + ["user", "assistant"] * pairs
    shown = members[:]
    form = ("parts", "openai", "placeholders", "llava", "unnamed")[seed % 5]
    if form in ("parts", "openai"):
        rng.shuffle(shown)  # named: in another order than in the tar
    left = shown[:]
    messages: list[dict[str, Any]] = []
    for number, role in enumerate(roles):
        last = number == len(roles) - 2
        count = 0 if role != "user" else len(left) if last else rng.randint(0, len(left))
        parts = [{"type": "image"} for _ in range(count)]
        del left[:count]
        for _ in range(rng.randint(1, 2)):
            parts.insert(rng.randint(0, len(parts)), {"type": "text", "text": text(rng)})
        messages.append({"role": role, "content": parts})
    names = iter(shown)
    written: list[dict[str, Any]] = []
    for message in messages:
        parts = message["content"]
        if form in ("placeholders", "llava"):
            joined = "".join("<image>" if part["type"] == "image" else part["text"] for part in parts)
            role = {"user": "human", "assistant": "gpt"}.get(message["role"], message["role"])
            written.append(
                {"from": role, "value": joined}
                if form == "llava"
                else {"role": message["role"], "content": joined}
            )
            continue
        named: list[dict[str, Any]] = []
        for part in parts:
            if part["type"] == "image" and form == "parts":
                part = {"type": "image", "image": next(names)}
            elif part["type"] == "image" and form == "openai":
                part = {"type": "image_url", "image_url": {"url": f"file:///any/{seed:05d}.{next(names)}"}}
            named.append(part)
        written.append({"role": message["role"], "content": named})
    record: Any = {"messages": written}
    if form == "llava":
        record = {"id": seed, "conversations": written, "image": [f"coco/{name}" for name in shown]}
    elif form == "unnamed":
        record = written
    files = {member: picture(rng, member.rpartition(".")[2]) for member in members}
    return {"__key__": f"{seed:05d}", "json": json.dumps(record).encode(), **files}, messages, shown


def sizes(raw: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Width and height of a sample's images, by Pillow; 0 where it knows none."""
    found: dict[str, tuple[int, int]] = {}
    for name in raw:
        if name.endswith(("jpg", "png", "webp")):
            try:
                found[name] = Image.open(io.BytesIO(raw[name])).size
            except UnidentifiedImageError:
                found[name] = (0, 0)
    return found
