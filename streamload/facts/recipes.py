"""Recipes of columns of facts (`Shards(facts=…)`): token counts, JSON fields, users' functions, tables.

Each is a `shards.facts.Column`. Values depend on a sample's key and members alone, images excepted: the image
of a prepared shard has other bytes.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from streamload.batches.caption_choice import CaptionChoice
from streamload.batches.fields import read_number
from streamload.batches.tokenize import BatchTokenizer, adapt_tokenizer
from streamload.cache.selection import KeySpec, Repeat
from streamload.derived.proof.code import Describer
from streamload.errors import CaptionError, FeatureNotCacheable, OptionError, SampleError, add_note
from streamload.extension import Extension
from streamload.facts.repeats import RepeatedArrivals
from streamload.facts.tables import read_table
from streamload.join.options import FORMATS
from streamload.shards.columns import (
    BUILT_IN,
    IN_RECORDS,
    Column,
    Fact,
    FactFunction,
    FactNames,
    Facts,
    FactSample,
    Values,
)
from streamload.shards.facts import OneOfSeveral, column_digest
from streamload.shards.samples import JOINED, is_image

if TYPE_CHECKING:
    from streamload.join import JoinedRows

_PROBES = (
    "", "a", "A photo of a cat.", "the  quick\tbrown fox\njumps", "naïve café – 東京 🗼", "don't they're",
    "3.14159 2024-01-31 #hashtag @user", "http://example.com/a?b=c&amp;d", "<p>markup</p>", "a " * 2000,
    "ANTIDISESTABLISHMENTARIANISM supercalifragilisticexpialidocious", "x" * 500, "!?;:…()[]{}",
)  # fmt: skip
"""Texts by whose ids tokenizers are told apart."""


@dataclass(frozen=True, slots=True)
class TokenCount:
    """The number of a caption's tokens by the run's tokenizer, without padding; unknown without a caption."""

    captions: CaptionChoice
    tokenizer: BatchTokenizer
    digest: str
    dtype: str = "<u2"
    from_members: bool = True
    check_name: str = ""

    def needs(self, extensions: Collection[str]) -> Collection[str]:
        """Select those of a sample's extensions whose bytes are needed; none of them an image's."""
        return self.captions.needs(extensions)

    def make(self, samples: Sequence[FactSample]) -> Values:
        """Return the value of each sample."""
        captions = [self._caption(sample) for sample in samples]
        texts = [caption for caption in captions if caption is not None]
        values = np.full(len(samples), np.nan)
        if texts:
            values[[caption is not None for caption in captions]] = self.tokenizer.lengths(texts)
        return values

    def _caption(self, sample: FactSample) -> str | None:
        with contextlib.suppress(CaptionError):
            return self.captions.read(sample.members, seed=0)  # which draws nothing
        return None


@dataclass(frozen=True, slots=True)
class JsonField:
    """A number in a JSON member; unknown where it is missing, no number, or not finite."""

    key: KeySpec
    digest: str
    dtype: str = "<f8"
    from_members: bool = True
    check_name: str = ""

    def needs(self, extensions: Collection[str]) -> Collection[str]:
        """Select those of a sample's extensions whose bytes are needed; none of them an image's."""
        return _member(self.key, extensions)

    def make(self, samples: Sequence[FactSample]) -> Values:
        """Return the value of each sample."""
        values = np.full(len(samples), np.nan)
        for place, sample in enumerate(samples):
            chosen = self.key.choose(sample.members)
            if chosen is not None and chosen[1] is not None:
                with contextlib.suppress(SampleError):
                    values[place] = read_number(sample.members[chosen[0]], chosen[1])
        return values


@dataclass(frozen=True, slots=True)
class FunctionFact:
    """Result of a user's function for a sample: numbers, or None for unknown. Its errors propagate.

    Attributes:
        count: of the numbers that the function returns; 0: it returns one, and no sequence.
    """

    function: FactFunction
    digest: str
    dtype: str = "<f8"
    from_members: bool = True
    check_name: str = ""
    count: int = 0

    def needs(self, extensions: Collection[str]) -> Collection[str]:
        """Select those of a sample's extensions whose bytes are needed; none of them an image's."""
        return [name for name in extensions if not is_image(name)]

    def make(self, samples: Sequence[FactSample]) -> Values:
        """Return the value of each sample: float64[N], or float64[N, count]."""
        values = np.array([self._numbers(sample) for sample in samples], np.float64)
        return values.reshape(len(samples), *np.dtype(self.dtype).shape)

    def _numbers(self, sample: FactSample) -> list[float]:
        entry = sample.entry
        try:
            returned: Any = self.function(
                {"__key__": entry.key, "__images__": entry.images, **sample.members}
            )
            row = returned if self.count and returned is not None else [returned] * max(self.count, 1)
            numbers = [math.nan if number is None else float(number) for number in row]
            if len(numbers) != max(self.count, 1):
                raise OptionError(f"a function of facts= returned {len(numbers)} numbers, not {self.count}")
            return numbers
        except OverflowError:
            return [math.nan] * max(self.count, 1)
        except Exception as exc:
            add_note(exc, f"in a function of facts=, for sample {entry.key!r}")
            raise


@dataclass(frozen=True, slots=True)
class TableFact:
    """A value for each sample key, from a table; unknown for keys that it lacks or has with other values.

    Attributes:
        keys: uint64[N], xxh3_64 of the keys, ascending.
        values: float64[N].
    """

    keys: npt.NDArray[np.uint64] = field(repr=False)
    values: Values = field(repr=False)
    digest: str = ""
    dtype: str = "<f8"
    from_members: bool = False
    check_name: str = ""

    def needs(self, extensions: Collection[str]) -> Collection[str]:
        """Select those of a sample's extensions whose bytes are needed; none of them an image's."""
        return ()

    def make(self, samples: Sequence[FactSample]) -> Values:
        """Return the value of each sample."""
        hashes = [
            xxh3_64_intdigest(sample.entry.key.encode("utf-8", "surrogateescape")) for sample in samples
        ]
        hashed = np.array(hashes, np.uint64)
        if not len(self.keys):
            return np.full(len(hashed), np.nan)
        places = np.minimum(np.searchsorted(self.keys, hashed), len(self.keys) - 1)
        return np.where(self.keys[places] == hashed, self.values[places], np.nan)


@dataclass(frozen=True, slots=True)
class ImageBytes:
    """The size of a sample's image in the original shard; unknown if it has none."""

    image: KeySpec
    digest: str
    dtype: str = "<u4"
    from_members: bool = False
    check_name: str = ""

    def needs(self, extensions: Collection[str]) -> Collection[str]:
        """Select those of a sample's extensions whose bytes are needed; none of them an image's."""
        return ()

    def make(self, samples: Sequence[FactSample]) -> Values:
        """Return the value of each sample."""
        sizes = [sample.entry.sizes for sample in samples]
        chosen = [self.image.choose(members) for members in sizes]
        image_bytes = [
            math.nan if choice is None else members[choice[0]]
            for members, choice in zip(sizes, chosen, strict=True)
        ]
        return np.array(image_bytes, np.float64)


def joined_facts(facts: Facts | None, extensions: Iterable[Extension]) -> dict[FactNames, Fact]:
    """The facts of a run: those of Shards, and those that extensions bring.

    Raises:
        OptionError: two facts have one name, or an extension is given without a list.
    """
    if isinstance(extensions, Extension):
        raise OptionError(f"extensions={extensions!r:.100}; expected a list: put it in brackets")
    joined: dict[FactNames, Fact] = {}
    joined.update((names, fact) for names, fact in (facts or {}).items())
    for extension in extensions:
        for name, fact in extension.own_facts.items() if isinstance(extension, Extension) else ():
            if joined.setdefault(name, fact) != fact:
                raise OptionError(
                    f"the extension {extension.name!r} brings the fact {name!r}, and Shards(facts=…) or "
                    f"another extension has another one of this name: rename one of them"
                )
    return joined


def read_facts(
    facts: Facts | None,
    image_key: str | None,
    text_key: str | None,
    tokenizer: Any,
    probs: Sequence[float] | None = None,
    join: JoinedRows | None = None,
) -> dict[str, Column]:
    """The columns of a run, by name: those that are asked for, and "image_bytes". Reads tables.

    Args:
        facts: from `joined_facts`.
        image_key: of the run; None: it has no images.
        text_key: of the run; None: it has no captions.
        tokenizer: of the run; None: it has none.
        probs: the run's text_key_probs.
        join: rows of another file, which facts may read; None: there is none.

    Raises:
        OptionError: a form or name that can't be used, or a table that can't be read.
    """
    image = KeySpec(()) if image_key is None else KeySpec.parse(image_key)
    definition = ["image_bytes", image.choices]
    columns: dict[str, Column] = {"image_bytes": ImageBytes(image, column_digest(definition))}
    stored: dict[FactNames, Column] = {}
    for names, fact in (facts or {}).items():
        is_free = [isinstance(name, str) and name not in BUILT_IN for name in _names(names)]
        if not is_free or not all(is_free):
            raise OptionError(f"facts={{{names!r}: …}}; expected a name other than {', '.join(BUILT_IN)}")
        stored[names] = _column(names, fact, text_key, tokenizer, probs, join)
        _refuse_shared_version(names, stored)
    for names, column in stored.items():
        whole = join.column(column) if join is not None and isinstance(column, FunctionFact) else column
        for place, name in enumerate(_names(names)):
            if name in columns:
                raise OptionError(f"facts={{{names!r}: …}}; the name {name!r} has two facts: rename one")
            columns[name] = OneOfSeveral.of(whole, place) if isinstance(names, tuple) else whole
    return columns


def read_repeat(repeat: Any, columns: Mapping[str, Column]) -> Repeat | None:
    """Number of uses of samples, from `Shards(repeat=…)`.

    Args:
        repeat: the name of a fact, a function of an entry, or a pair of one and its version; None.
        columns: of the run.

    Raises:
        OptionError: anything else.
    """
    if repeat is None:
        return None
    if isinstance(repeat, str) and (repeat in columns or repeat in IN_RECORDS):
        definition = columns[repeat].digest if repeat in columns else repeat
        return Repeat(repeat, None, column_digest(["repeat", definition]), RepeatedArrivals)
    if isinstance(repeat, tuple) and len(repeat) == 2 and callable(repeat[0]) and isinstance(repeat[1], str):
        return Repeat("", repeat[0], column_digest(["repeat", "version", repeat[1]]), RepeatedArrivals)
    if callable(repeat):
        where = f"repeat={repeat!r:.60}"
        digest = column_digest(["repeat", "function", *_described(repeat, where)])
        return Repeat("", repeat, digest, RepeatedArrivals)
    names = ", ".join(dict.fromkeys([*columns, *BUILT_IN]))
    raise OptionError(
        f"repeat={repeat!r:.60}; expected the name of a fact ({names}), a function of a sample's index "
        f"entry, or a pair of a function and its version"
    )


def token_count(
    text_key: str | None, tokenizer: Any, probs: Sequence[float] | None, join: JoinedRows | None = None
) -> Column:
    """The column of a run's token counts.

    Raises:
        OptionError: there are no captions or no tokenizer, or one of both is random.
    """
    adapted = adapt_tokenizer(tokenizer)
    if text_key is None or adapted is None:
        raise OptionError("the fact 'tokens' needs a tokenizer, and a text_key that selects captions")
    if adapted.draws():
        raise OptionError(
            "the fact 'tokens' is the same in each epoch, but this tokenizer draws random numbers"
        )
    captions = CaptionChoice.parse(text_key, probs)
    captions.refuse_token_counts()
    several = ["first that isn't blank", captions.probs] if len(captions.choices) > 1 else []
    definition = ["tokens", captions.choices, *several, *_described_tokenizer(tokenizer, adapted)]
    counts = TokenCount(captions, adapted, column_digest(definition))
    return _with_rows(counts, KeySpec(captions.choices), join)


def _with_rows(column: Column, key: KeySpec, join: JoinedRows | None) -> Column:
    """A column, of samples with their rows of another file if its key reads these.

    Raises:
        OptionError: there is no such file, or it lacks the column.
    """
    if JOINED not in key.extensions:
        return column
    if join is None:
        raise OptionError(f"the fact {str(key)!r} needs the file: Shards(join=…)")
    join.table.check(key)
    return join.column(column)


def _column(
    names: FactNames,
    fact: Fact,
    text_key: str | None,
    tokenizer: Any,
    probs: Sequence[float] | None,
    join: JoinedRows | None,
) -> Column:
    where = f"facts={{{names!r}: {fact!r:.60}}}"
    count = len(names) if isinstance(names, tuple) else 0
    dtype, several = (f"({count},)<f8", [count]) if count else ("<f8", [])
    if isinstance(fact, tuple) and len(fact) == 2 and callable(fact[0]) and isinstance(fact[1], str):
        digest = column_digest(["function", "version", fact[1], *several])
        return FunctionFact(fact[0], digest, dtype, count=count)
    if callable(fact):
        digest = column_digest(["function", *_described(fact, where), *several])
        return FunctionFact(fact, digest, dtype, check_name=repr(names), count=count)
    if isinstance(names, tuple):
        raise OptionError(f"{where}; expected a function under several names, which returns so many numbers")
    if fact == "tokens":
        return token_count(text_key, tokenizer, probs, join)
    if not isinstance(fact, str | Path):
        raise OptionError(
            f'{where}; expected "tokens", "json:<field>", a table ({", ".join(FORMATS)}), a function, or a '
            f"pair of a function and its version"
        )
    table, column = _table(str(fact))
    if table is not None:
        keys, values = read_table(table, column or names)
        content = xxh3_128_hexdigest(keys.tobytes() + values.tobytes())
        return TableFact(keys, values, column_digest(["table", content]))
    key = KeySpec.parse(str(fact))
    if not all(path for _, path in key.choices):
        tables = " or ".join(FORMATS)
        raise OptionError(f'{where}; expected "tokens", "json:<field>", or the path of a {tables}')
    return _with_rows(JsonField(key, column_digest(["json", key.choices])), key, join)


def _refuse_shared_version(names: FactNames, columns: Mapping[FactNames, Column]) -> None:
    """Refuse another function under a version that a function of the run has: both would have one column."""
    column = columns[names]
    for other, before in columns.items():
        if before.digest == column.digest and isinstance(column, FunctionFact):
            assert isinstance(before, FunctionFact)
            if before.function != column.function:
                version = f"{' and '.join(_names(names))} 1"
                raise OptionError(
                    f"facts={{…}}: {other!r} and {names!r} are other functions under one version, and such a "
                    f'function is known by its version alone; give each its own: (function, "{version}")'
                )


def _names(key: FactNames) -> tuple[str, ...]:
    return key if isinstance(key, tuple) else (key,)


def _table(text: str) -> tuple[Path | None, str]:
    """The path of a table and the name of its column, from `path` or `path:column`; None: it isn't one."""
    if Path(text).suffix.lower() in FORMATS:
        return Path(text).expanduser(), ""
    path, _, column = text.rpartition(":")
    return (Path(path).expanduser(), column) if Path(path).suffix.lower() in FORMATS else (None, "")


def _described(function: Any, where: str) -> list[Any]:
    """Dependencies of a function's results beside its argument."""
    describer = Describer()
    try:
        described, patches = describer.value(function, where), describer.patches()
        return [described, patches, describer.arranged_code]
    except FeatureNotCacheable as exc:
        raise OptionError(
            f"{str(exc).partition('; ')[0]}; give the function with a version that you change with its code: "
            f'(function, "1")'
        ) from exc


def _described_tokenizer(tokenizer: Any, adapted: BatchTokenizer) -> list[Any]:
    """Dependencies of token counts: the class and vocabulary, and the lengths and ids of some captions."""
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    found: list[Any] = [type(tokenizer).__qualname__, type(inner).__qualname__]
    fast, vocabulary = getattr(inner, "backend_tokenizer", None), getattr(inner, "encoder", None)
    if fast is not None:
        parts = json.loads(fast.to_str())
        for last in ("padding", "truncation"):  # of its last call
            parts.pop(last, None)
        found.append(parts)
    elif isinstance(vocabulary, dict):
        found.append(sorted(vocabulary.items()))
    else:
        with contextlib.suppress(FeatureNotCacheable):
            describer = Describer()
            found.append([describer.value(tokenizer, "tokenizer"), describer.arranged_code])
    captions = list(_PROBES)
    return [*found, adapted.lengths(captions).tolist(), adapted(captions, [0] * len(captions)).ids.tolist()]


def _member(key: KeySpec, extensions: Collection[str]) -> Collection[str]:
    chosen = key.choose(extensions)
    return () if chosen is None else (chosen[0],)
