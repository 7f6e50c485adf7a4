"""`streamload runs used`: in which steps a run used a sample, or a shard."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from streamload.cli.options import AsJson
from streamload.cli.runs.options import Journal, LoaderName, SegmentName, make_loaders, options_of
from streamload.cli.terminal import print_json, say
from streamload.errors import OptionError, StreamloadError
from streamload.urls import redact

if TYPE_CHECKING:
    from streamload.journal.history import Segment
    from streamload.loader.options import LoaderOptions
    from streamload.loader.past import Use

    _Branch = Sequence[tuple[Segment, int, int]]

_BATCH = 1024


class _Shard(NamedTuple):
    """A shard of the run: its URL, its source, and its index there."""

    url: str
    source: int
    number: int


def used(
    journal: Journal,
    names: Annotated[
        list[str],
        typer.Argument(help="Keys of samples, URLs of shards, or files with one of these a line."),
    ],
    shard: Annotated[
        str | None,
        typer.Option(help="The URL of the shard that keys are in. None: it is looked for by reading shards."),
    ] = None,
    segment: SegmentName = None,
    loader: LoaderName = None,
    as_json: AsJson = False,
) -> None:
    """Tell in which steps a run used samples, or any sample of a shard, and in which pass over the data.

    What the order gave to steps, as far as the journal goes: a sample that came as the replacement of a bad
    one isn't found. A key is looked for in all shards whose names it begins with; if none has it, in the
    others, until one does.
    """
    from streamload.journal.history import RunHistory

    history = RunHistory(journal)
    branch = history.branch(segment)
    options = options_of(history, branch[-1][0], loader)
    shards = _shards(options)
    branch = [(part, first, stop) for part, first, stop in branch if first < stop]
    uses_by_name: dict[str, list[dict[str, Any]]] = {}
    for name in _names(names):
        if "://" in name or shards.keys() & {name}:
            uses_by_name[redact(name)] = _of_shards(branch, options, _named(shards, name))
        else:
            uses_by_name[name] = _of_key(branch, options, name, _candidates(shards, name, shard))
    covered = _covered(branch)
    if as_json:
        print_json({"covers": covered, "used": uses_by_name})
        return
    for name, rows in uses_by_name.items():
        for row in rows:
            steps = f"step {row['step']:,}"
            if row["last"] != row["step"]:
                steps = f"steps {row['step']:,} to {row['last']:,}"
            more = f" of {row['source']}" if len(options.sources) > 1 else ""
            more += f", {row['samples']:,} samples" if name == row["url"] else f", {row['url']}"
            say(f"{name}: {steps}, pass {row['pass']}{more}")
        if not rows:
            steps = ", ".join(f"{first:,} to {last:,}" for first, last in covered) or "any"
            say(f"{name}: in no step of {steps}, which the journal covers")


def _covered(branch: _Branch) -> list[list[int]]:
    """The first and last steps that are recorded without a gap: a killed process loses its last ones."""
    covered: list[list[int]] = []
    for _, first, stop in branch:
        if covered and covered[-1][1] == first - 1:
            covered[-1][1] = stop - 1
        else:
            covered.append([first, stop - 1])
    return covered


def _names(names: Sequence[str]) -> Iterator[str]:
    for name in names:
        if "://" not in name and Path(name).is_file() and not name.endswith(".tar"):
            yield from filter(None, (line.strip() for line in Path(name).read_text().splitlines()))
        else:
            yield name


def _shards(options: LoaderOptions) -> dict[str, list[_Shard]]:
    """The shards of a run by their URLs, which several sources may have."""
    by_url: dict[str, list[_Shard]] = {}
    for number, source in enumerate(options.sources):
        for place, url in enumerate(source.urls):
            by_url.setdefault(url, []).append(_Shard(url, number, place))
    return by_url


def _named(shards: dict[str, list[_Shard]], url: str) -> list[_Shard]:
    """The shards that have a URL, which may be without secrets.

    Raises:
        OptionError: there are none.
    """
    without_secrets = (of_url for name, of_url in shards.items() if redact(name) == url)
    matches = shards.get(url) or [*itertools.chain(*without_secrets)]
    if not matches:
        raise OptionError(f"{redact(url)} is no shard of the run")
    return matches


def _candidates(shards: dict[str, list[_Shard]], key: str, url: str | None) -> list[list[_Shard]]:
    """Sets of shards in which to look for a key until one has it, the likeliest first."""
    if url is not None:
        return [_named(shards, url)]
    name, likely, unlikely = key.rpartition("/")[2], list[_Shard](), list[list[_Shard]]()
    for shard, of_url in shards.items():
        if name.startswith(shard.rpartition("/")[2].partition(".")[0]):
            likely += of_url
        else:
            unlikely.append(of_url)
    return [likely, *unlikely]


def _of_shards(branch: _Branch, options: LoaderOptions, shards: Sequence[_Shard]) -> list[dict[str, Any]]:
    """The first and the last step of each pass that used a sample of shards."""
    by_pass: dict[tuple[_Shard, int, int, int], list[Use]] = {}
    for shard in shards:
        for number, use in _uses(branch, options, shard):
            by_pass.setdefault((shard, number, use.origin, use.pass_), []).append(use)
    return [_row(options, shard, of_pass) for (shard, *_), of_pass in by_pass.items()]


def _row(options: LoaderOptions, shard: _Shard, of_pass: Sequence[Use]) -> dict[str, Any]:
    return {
        "step": min(use.first for use in of_pass),
        "last": max(use.last for use in of_pass),
        "pass": of_pass[0].pass_,
        "source": options.sources[shard.source].name,
        "url": redact(shard.url),
        "samples": len(of_pass),
    }


def _of_key(
    branch: _Branch, options: LoaderOptions, key: str, candidates: Sequence[Sequence[_Shard]]
) -> list[dict[str, Any]]:
    """The steps that used a sample.

    Raises:
        OptionError: none of the shards has it; or samples are repeated by their own rates.
    """
    if options.repeat is not None:
        raise OptionError("steps that used a sample aren't found with repeat=, only those that used a shard")
    read = 0
    for shards in candidates:
        read += len(shards)
        numbers = {shard: _usable(options, shard) for shard in shards}
        having = [(shard, keys) for shard, keys in numbers.items() if key in keys.values()]
        if having:
            break
    else:
        raise OptionError(f"no shard of the run has a usable sample {key!r}; {read:,} were read")
    rows = [row for shard, keys in having for row in _of_sample(branch, options, key, shard, keys)]
    return sorted(rows, key=itemgetter("step"))


def _of_sample(
    branch: _Branch, options: LoaderOptions, key: str, shard: _Shard, keys: dict[int, str]
) -> Iterator[dict[str, Any]]:
    """The steps that used a key of a shard."""
    import numpy as np

    from streamload.loader.past import left_out_of, owned_by

    numbers = np.array([*keys], np.int64)
    for segment, first, stop in branch:
        owned = owned_by(segment, options, make_loaders(), shard.source, shard.number, numbers)
        for use in _within(segment, first, stop, options, shard):
            numbers_owned = owned[use.group]
            if use.ordinal < len(numbers_owned) and keys[int(numbers_owned[use.ordinal])] == key:
                left_out = {(sample.key, sample.url) for sample in left_out_of(segment, use, options)}
                if not left_out & {(key, None), (key, redact(shard.url))}:
                    yield _row(options, shard, [use])


def _uses(branch: _Branch, options: LoaderOptions, shard: _Shard) -> Iterator[tuple[int, Use]]:
    for number, (segment, first, stop) in enumerate(branch):
        for use in _within(segment, first, stop, options, shard):
            yield number, use


def _within(segment: Segment, first: int, stop: int, options: LoaderOptions, shard: _Shard) -> Iterator[Use]:
    """The uses of a shard's samples in the steps of a segment that led on."""
    from streamload.loader.past import uses

    for use in uses(segment, options, make_loaders(), shard.source, shard.number):
        if first <= use.last and use.first < stop:
            yield use


def _usable(options: LoaderOptions, shard: _Shard) -> dict[int, str]:
    """The keys of the usable samples of a shard by their numbers; it is fetched where the cache lacks it."""
    from streamload.loader import make_loader
    from streamload.loader.groups import Shards, Workers

    place = options.first_shards[shard.source] + shard.number
    keys = _in_cache(options, place)
    if keys is None:
        passed = make_loader(
            shard.url,
            train=False,
            num_workers=0,
            batch_size=_BATCH,
            shards=Shards(image_key=None, text_key=None, storage_options=options.storage_options),
            workers=Workers(map_sample=_nothing),
            cache=options.cache,
            cache_dir=options.cache_dir,
            cache_size=options.cache_size,
        )
        with passed as loader:
            for _ in loader:
                pass
        keys = _in_cache(options, place)
    if keys is None:
        raise OptionError(f"{redact(shard.url)} can't be read, or the cache has no room for it")
    return keys


def _in_cache(options: LoaderOptions, shard: int) -> dict[int, str] | None:
    from streamload.loader.counting import indexes
    from streamload.metrics import Counters

    original = replace(options, images=replace(options.images, prepare=None))
    for cache in itertools.chain(indexes(options, Counters()), indexes(original, Counters())):
        with contextlib.closing(cache), contextlib.suppress(StreamloadError):
            numbers, ended = cache.arrived(shard)
            if ended and numbers.size:
                entries = zip(numbers.tolist(), cache.view(shard).find(numbers.tolist()), strict=True)
                return {number: entry[1].key for number, entry in entries if entry is not None}
    return None


def _nothing(sample: dict[str, Any]) -> dict[str, Any]:
    return {"size": len(sample)}
