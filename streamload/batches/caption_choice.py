"""The caption of a sample that has several (step I): by order of preference, at paths into JSON, or drawn.

A choice is a member, or a path into a JSON member: `meta.caption` is a field of a field, `captions[0]` an
entry of a list, and `captions[*]` is one of its entries, drawn. Loaders whose captions are one member don't
load this module.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamload.batches.captions import read_caption
from streamload.batches.fields import no_field, no_object, read_json
from streamload.cache.selection import KeySpec
from streamload.errors import CaptionError, OptionError
from streamload.order.hashing import CAPTION, key, pick
from streamload.shards.json_paths import at_path

_DRAWN = "[*]"


@dataclass(frozen=True, slots=True)
class CaptionChoice:
    """Choice of a sample's caption.

    Attributes:
        choices: (extension, path) in order of preference; path None: the whole member.
        probs: how likely each choice comes first, not necessarily adding up to 1; empty: in their order.
    """

    choices: tuple[tuple[str, str | None], ...]
    probs: tuple[float, ...] = ()

    @classmethod
    def parse(cls, text_key: str, probs: Sequence[float] | None = None) -> CaptionChoice:
        """The choice of `Shards(text_key=…, text_key_probs=…)`.

        Raises:
            OptionError: it is no key.
        """
        return cls(KeySpec.parse(text_key).choices, tuple(map(float, probs or ())))

    @property
    def is_drawn(self) -> bool:
        """True if a sample's caption may be another one in each pass."""
        is_order_drawn = sum(prob > 0 for prob in self.probs) > 1
        return is_order_drawn or any(_DRAWN in (path or "") for _, path in self.choices)

    def refuse_token_counts(self) -> None:
        """Refuse what goes by the number of a caption's tokens, which is a fact of the sample.

        Raises:
            OptionError: captions are drawn.
        """
        if self.is_drawn:
            raise OptionError(
                f"text_key={str(KeySpec(self.choices))!r} draws a caption for each pass, and a token count "
                f"is the same in each: bucketing= and sample_weight= by the length of captions, and the fact "
                f"'tokens', need a caption that isn't drawn, without [*] and text_key_probs="
            )

    def needs(self, extensions: Collection[str]) -> Collection[str]:
        """Select the members that may have to be read among a sample's."""
        return [extension for extension, _ in self.choices if extension in extensions]

    def read(self, members: Mapping[str, memoryview | bytes], seed: int) -> str:
        """Return the first caption that isn't blank, by order of preference; the first blank one if all are.

        Choices that give none (no such member or field, no string, not UTF-8) are passed over.

        Args:
            members: of the sample, by extension.
            seed: of the sample, uint64.

        Raises:
            CaptionError: no choice gives a caption; it says why the first one didn't.
        """
        objects: dict[str, Any] = {}
        blank, why = None, ""  # no exception is kept: it would keep the sample, by its frames
        for number in self._order(seed):
            extension, path = self.choices[number]
            if extension not in members:
                continue
            try:
                if path is None:
                    caption = read_caption(members[extension])
                else:
                    if extension not in objects:
                        objects[extension] = read_json(members[extension], "caption", CaptionError)
                    caption = _caption_at(objects[extension], path, key(seed, CAPTION, 1, number))
            except CaptionError as exc:
                why = why or str(exc)
                continue
            if caption.strip():
                return caption
            blank = caption if blank is None else blank
        if blank is None:
            raise CaptionError(why)
        return blank

    def _order(self, seed: int) -> Sequence[int]:
        """The numbers of the choices in the order of preference for a sample.

        As open_clip's `_weighted_order`: choices with a probability are drawn one after another, each by its
        share among those that are left; the others follow in their order.
        """
        if not any(self.probs):
            return range(len(self.choices))
        left = [number for number, prob in enumerate(self.probs) if prob > 0]
        order: list[int] = []
        while left:
            stops = list(itertools.accumulate(self.probs[number] for number in left))
            point = (key(seed, CAPTION, 0, len(order)) >> 11) * 2.0**-53 * stops[-1]
            order.append(left.pop(min(bisect.bisect_right(stops, point), len(left) - 1)))
        return [*order, *(number for number in range(len(self.choices)) if number not in order)]


def check_probs(text_key: str | None, probs: Any) -> None:
    """Refuse probabilities that aren't of the choices of `text_key`.

    Raises:
        OptionError: it says what is expected.
    """
    count = 0 if text_key is None else len(text_key.split(";"))
    is_listed = isinstance(probs, Sequence) and not isinstance(probs, str) and 0 < len(probs) <= count
    if not is_listed or not all(type(prob) in (int, float) and 0 <= prob < math.inf for prob in probs):
        raise OptionError(
            f"text_key_probs={probs!r:.100}; expected a number from 0 on for each choice of "
            f"text_key={text_key!r}, or for the first ones"
        )


def _caption_at(value: Any, path: str, seed: int) -> str:
    if not isinstance(value, dict) and not path.startswith("["):
        raise no_object(value, "caption", CaptionError)
    leaves = list(at_path(value, path))
    if not leaves:
        raise no_field(value if isinstance(value, dict) else {}, path, "caption", CaptionError)
    if _DRAWN in path:
        texts = [entry for entry in leaves if isinstance(entry, str) and _is_unicode(entry)]
        leaves = [text for text in texts if text.strip()] or texts or leaves
    caption = leaves[pick(seed, 0, len(leaves))]
    if not isinstance(caption, str):
        hint = f" (an entry of a list is {path}[0], or {path}[*] for one that is drawn)"
        raise CaptionError(
            f"caption field {path!r} is a {type(caption).__name__}; expected a string"
            + (hint if isinstance(caption, list) else "")
        )
    if not _is_unicode(caption):
        raise CaptionError(f"caption field {path!r} has half of a surrogate pair")
    return caption


def _is_unicode(text: str) -> bool:
    """True if it can be encoded: JSON escapes can hold half a surrogate pair, on which tokenizers fail."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
