"""A sample's JSON → messages for a chat template, and which member each of their images is.

Two forms are read. That of OpenAI and of transformers: a list, or an object with the list as `messages`, of
`{"role": …, "content": …}`, where the content is a string or a list of parts. And LLaVA's: an object with
`conversations` of `{"from": "human", "value": …}`. No image is decoded here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from streamload.errors import CaptionError
from streamload.shards.samples import is_image

PLACEHOLDER = "<image>"
"""Stands for an image in a content that is a string, in both forms."""
ASSISTANT = "assistant"

_ROLES = {"human": "user", "gpt": ASSISTANT}
"""The roles of LLaVA's form; others stay as they are, and a chat template refuses those that it lacks."""

Message = dict[str, Any]


class Conversation(NamedTuple):
    """A conversation of a sample.

    Attributes:
        messages: for `apply_chat_template`; images are parts `{"type": "image"}`.
        images: the extension of each image's member, in the order of these parts.
    """

    messages: list[Message]
    images: list[str]


def image_members(members: Mapping[str, object]) -> list[str]:
    """Return the extensions of a sample's images, in the order of the tar."""
    return [name for name in members if is_image(name)]


def read_conversation(record: object, key: str, members: Sequence[str]) -> Conversation:
    """Read a sample's JSON.

    A part may name its image (`{"type": "image", "image": "0.jpg"}`, or OpenAI's `image_url`); placeholders
    and parts without a name take the names of the object's `images` or `image`, in their order. A name is a
    member's extension or file name, in any folder. If no name is one of these, as where a data set was packed
    with other names, or there are none, the images are all image members in the order of the tar.

    Args:
        record: the parsed JSON.
        key: of the sample.
        members: the extensions of its images, in the order of the tar.

    Raises:
        CaptionError: neither form, or not as many images as are named, meant or there.
    """
    messages, part_names = [], []
    for turn in _turns(record):
        content, names = _content(turn["content"])
        messages.append({**turn, "content": content})
        part_names += names
    listed = _listed(record)
    if any(part_names):
        if not all(part_names):
            raise CaptionError("the conversation names some of its images, and has others without a name")
        listed = [name for name in part_names if name is not None]
    elif listed and len(listed) != len(part_names):
        raise CaptionError(
            f"the conversation has places for {len(part_names)} images, and a list of {len(listed)} names"
        )
    return Conversation(messages, _chosen(listed, len(part_names), key, members))


def _turns(record: object) -> Iterator[Message]:
    """The turns of either form, as messages with a content that isn't looked at yet."""
    turns: object = record
    if isinstance(record, dict):
        turns = record.get("messages", record.get("conversations"))
    if not isinstance(turns, list) or not turns:
        raise CaptionError(
            "expected a list of messages, or an object that has it as 'messages' or 'conversations'"
        )
    for turn in turns:
        if isinstance(turn, dict) and isinstance(turn.get("role"), str) and "content" in turn:
            yield turn
        elif isinstance(turn, dict) and isinstance(turn.get("from"), str) and "value" in turn:
            yield {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}
        else:
            raise CaptionError(
                f"{turn!r:.60} is no message: expected 'role' and 'content', or 'from' and 'value'"
            )


def _content(content: object) -> tuple[str | list[Message], list[str | None]]:
    """A message's content for a template, and the names of its images; None: one without a name.

    Nothing is stripped: what is around a placeholder stays in the text.
    """
    if isinstance(content, str):
        texts = content.split(PLACEHOLDER)
        if len(texts) == 1:
            return content, []
        parts: list[Message] = []
        for text in texts:
            parts += [{"type": "text", "text": text}] if text else []
            parts.append({"type": "image"})
        return parts[:-1], [None] * (len(texts) - 1)
    if not isinstance(content, list):
        raise CaptionError(f"a message's content is a {type(content).__name__}; expected a string or a list")
    parts, names = [], []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind in ("image", "image_url"):
            parts.append({"type": "image"})
            names.append(_name(part))
        else:
            raise CaptionError(f"a message has the part {part!r:.60}; expected a text or an image")
    return parts, names


def _name(part: Message) -> str | None:
    """The name of a part's image: `image`, `url` or `path`, or the URL of an `image_url`."""
    name = part.get("image_url", next((part[key] for key in ("image", "url", "path") if key in part), None))
    if isinstance(name, dict):
        name = name.get("url")
    return name if isinstance(name, str) else None


def _listed(record: object) -> list[str]:
    """The names of an object's images, outside of its messages."""
    names = record.get("images", record.get("image")) if isinstance(record, dict) else None
    if isinstance(names, str):
        return [names]
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _chosen(names: Sequence[str], count: int, key: str, members: Sequence[str]) -> list[str]:
    """The members of images with these names; without names that are members, all in the order of the tar."""
    files = {f"{key.rpartition('/')[2]}.{member}".lower(): member for member in members}
    by_name = {**files, **{member: member for member in members}}
    chosen = [by_name.get(name.rpartition("/")[2].lower()) for name in names]
    if not any(chosen):
        if count != len(members):
            raise CaptionError(
                f"the conversation has places for {count} images, and the sample has {len(members)} "
                f"({', '.join(members) or 'none'})"
            )
        return list(members)
    if missing := [name for name, member in zip(names, chosen, strict=True) if member is None]:
        raise CaptionError(
            f"the conversation has the image {missing[0]!a:.60}, which is none of the sample's "
            f"({', '.join(members)})"
        )
    return [member for member in chosen if member is not None]
