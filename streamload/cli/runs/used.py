"""`streamload runs used`: in which steps a run used a sample, or a shard."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
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
    one isn't uses_by_name. A shard that begins a key's name is read first for it, then all others.
    """
    from streamload.journal.history import RunHistory

    history = RunHistory(journal)
    branch = history.branch(segment)
    options = options_of(history, branch[-1][0], loader)
    shards = _shards(options)
    uses_by_name: dict[str, list[dict[str, Any]]] = {}
    for name in _names(names):
        if name in shards:
            uses_by_name[name] = _of_shard(branch, options, shards[name])
        else:
            uses_by_name[name] = _of_key(branch, options, name, _candidates(shards, name, shard))
    covered = [branch[0][1], branch[-1][2] - 1]
    if as_json:
        print_json({"covers": covered, "used": uses_by_name})
        return
    for name, rows in uses_by_name.items():
        for row in rows:
            steps = f"step {row['step']:,}"
            if row["last"] != row["step"]:
                steps = f"steps {row['step']:,} to {row['last']:,}"
            more = f", {row['samples']:,} samples" if name in shards else ""
            say(f"{name}: {steps}, pass {row['pass']}{more}")
        if not rows:
            say(f"{name}: in no step of {covered[0]:,} to {covered[1]:,}, which the journal covers")


def _names(names: Sequence[str]) -> Iterator[str]:
    for name in names:
        if "://" not in name and Path(name).is_file() and not name.endswith(".tar"):
            yield from filter(None, (line.strip() for line in Path(name).read_text().splitlines()))
        else:
            yield name


def _shards(options: LoaderOptions) -> dict[str, _Shard]:
    """The shards of a run by their URLs."""
    return {
        url: _Shard(url, number, place)
        for number, source in enumerate(options.sources)
        for place, url in enumerate(source.urls)
    }


def _candidates(shards: dict[str, _Shard], key: str, url: str | None) -> list[_Shard]:
    """The shards in which to look for a key, the likeliest first."""
    if url is not None:
        if url not in shards:
            raise OptionError(f"--shard {url} is no shard of the run")
        return [shards[url]]
    name = key.rpartition("/")[2]
    stems = {shard.url: shard.url.rpartition("/")[2].partition(".")[0] for shard in shards.values()}
    return sorted(shards.values(), key=lambda shard: not name.startswith(stems[shard.url]))


def _of_shard(branch: _Branch, options: LoaderOptions, shard: _Shard) -> list[dict[str, Any]]:
    """Of each pass the first and last step that used a sample of a shard."""
    by_pass: dict[tuple[int, int], list[Use]] = {}
    for origin, use in _uses(branch, options, shard):
        by_pass.setdefault((origin, use.pass_), []).append(use)
    return [
        {
            "step": min(use.first for use in of_pass),
            "last": max(use.last for use in of_pass),
            "pass": pass_,
            "samples": len(of_pass),
        }
        for (_, pass_), of_pass in by_pass.items()
    ]


def _of_key(
    branch: _Branch, options: LoaderOptions, key: str, candidates: Sequence[_Shard]
) -> list[dict[str, Any]]:
    """The steps that used a sample."""
    from streamload.loader.past import left_out_of, owned_by

    for shard in candidates:
        keys = _usable(options, shard)
        number = next((number for number, name in keys.items() if name == key), None)
        if number is not None:
            break
    else:
        raise OptionError(f"no shard of the run has a usable sample {key!r}; {len(candidates):,} were read")
    numbers = np.array([*keys], np.int64)
    steps = []
    for segment, first, stop in branch:
        owned = {
            group: owned_by(segment, options, make_loaders(), group, shard.source, shard.number, numbers)
            for group in range(segment.groups)
        }
        for use in _within(segment, first, stop, options, shard):
            numbers_owned = owned[use.group]
            if use.ordinal < len(numbers_owned) and numbers_owned[use.ordinal] == number:
                named = {(sample.key, sample.url) for sample in left_out_of(segment, use, options)}
                if not named & {(key, None), (key, redact(shard.url))}:
                    steps.append({"step": use.first, "last": use.last, "pass": use.pass_, "samples": 1})
    return steps


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
            if ended:
                entries = zip(numbers.tolist(), cache.view(shard).find(numbers.tolist()), strict=True)
                return {number: entry[1].key for number, entry in entries if entry is not None}
    return None


def _nothing(sample: dict[str, Any]) -> dict[str, Any]:
    return {"size": len(sample)}
