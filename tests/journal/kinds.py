"""The kinds of runs whose steps are made again."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamload import Images, Patches, Source
from streamload.mixing import Replay
from streamload.testing.server import Fault
from tests.journal.runs import (
    Data,
    Kind,
    Means,
    Seesaw,
    Stairs,
    area_of,
    by_mod,
    drawn,
    is_kept,
    length_of,
    rate_of,
    spelled,
    still,
)
from tests.support import flat

Make = Callable[[Data, Path, random.Random], Kind]
KINDS: dict[str, Make] = {}


def kind(make: Make) -> Make:
    """Register a kind by its function's name."""
    KINDS[make.__name__] = make
    return make


def mixed(data: Data, numbers: random.Random, **more: Any) -> dict[str, Any]:
    """Options of a run of two or three sources."""
    weights = {"a": 3.0, "b": 1.0, **({"c": 1.0} if numbers.random() < 0.5 else {})}
    return {"urls": data.sources(**weights), "num_batches": numbers.choice([9, 14]), **more}


def of_epochs(numbers: random.Random) -> dict[str, Any]:
    """One pass an epoch, or epochs of some steps that go on."""
    return numbers.choice([{}, {"num_batches": 11}, {"num_batches": 25}])


@kind
def plain(data: Data, directory: Path, numbers: random.Random) -> Kind:
    return Kind({"urls": data.urls("a"), **of_epochs(numbers)})


@kind
def default_transform(data: Data, directory: Path, numbers: random.Random) -> Kind:
    return Kind({"urls": data.urls("b"), "preprocess": None, **of_epochs(numbers)}, steps=12)


@kind
def weights(data: Data, directory: Path, numbers: random.Random) -> Kind:
    return Kind(mixed(data, numbers), ("weights",))


@kind
def sizes(data: Data, directory: Path, numbers: random.Random) -> Kind:
    return Kind({"urls": data.urls("a"), **of_epochs(numbers)}, ("sizes",))


@kind
def weights_and_sizes(data: Data, directory: Path, numbers: random.Random) -> Kind:
    return Kind(mixed(data, numbers), ("weights", "sizes"))


@kind
def buckets(data: Data, directory: Path, numbers: random.Random) -> Kind:
    return Kind(
        {
            "urls": data.urls("a"),
            "bucketing": numbers.choice([36, 48, "step"]),
            "text_padding": "longest",
            **of_epochs(numbers),
        }
    )


@kind
def buckets_weights_and_sizes(data: Data, directory: Path, numbers: random.Random) -> Kind:
    return Kind(
        mixed(data, numbers, bucketing=numbers.choice([36, 48, "step"]), text_padding="longest"),
        ("weights", "sizes"),
    )


@kind
def costs(data: Data, directory: Path, numbers: random.Random) -> Kind:
    options = {"urls": data.urls("a"), "cost": numbers.choice([length_of, (length_of, area_of)])}
    return Kind({**options, **of_epochs(numbers)}, ("sizes",))


@kind
def costs_and_weights(data: Data, directory: Path, numbers: random.Random) -> Kind:
    return Kind(mixed(data, numbers, cost=length_of), ("weights", "sizes"))


@kind
def cells(data: Data, directory: Path, numbers: random.Random) -> Kind:
    options = {"urls": data.urls("a"), "cost": (length_of, area_of), "max_tokens": 120, "max_patches": 150}
    return Kind({**options, **of_epochs(numbers)}, steps=25)


@kind
def cells_and_weights(data: Data, directory: Path, numbers: random.Random) -> Kind:
    return Kind(mixed(data, numbers, cost=length_of, max_tokens=120), ("weights",), steps=25)


@kind
def image_sizes(data: Data, directory: Path, numbers: random.Random) -> Kind:
    images = {"sizes": [(8, 8), (12, 6), (6, 12)], "sizes_by": numbers.choice(["cell", "step"])}
    options = {"urls": data.urls("a"), "microbatch": 2, "preprocess": None, **images, **of_epochs(numbers)}
    return Kind(options, steps=25)


@kind
def of_a_step(data: Data, directory: Path, numbers: random.Random) -> Kind:
    return Kind(mixed(data, numbers, sources="step"), ("weights",))


@kind
def of_a_rank(data: Data, directory: Path, numbers: random.Random) -> Kind:
    return Kind(mixed(data, numbers, sources="rank"), ("weights",), keeps_ranks=True)


@kind
def groups(data: Data, directory: Path, numbers: random.Random) -> Kind:
    count = numbers.choice([2, 3])
    return Kind(
        {"urls": data.urls("a", "b"), "groups": count, "num_batches": numbers.choice([8, 17])},
        ("sizes",),
        ranks=(1, count),
    )


@kind
def groups_of_sources(data: Data, directory: Path, numbers: random.Random) -> Kind:
    return Kind(mixed(data, numbers, groups=3), ("weights", "sizes"), ranks=(1, 3))


@kind
def groups_with_holes(data: Data, directory: Path, numbers: random.Random) -> Kind:
    keep = numbers.choice([None, is_kept])
    options = {"urls": data.urls("holes"), "groups": 3, "num_batches": 13, "keep": keep}
    return Kind(options, ("sizes",), ranks=(1, 3))


@kind
def holes(data: Data, directory: Path, numbers: random.Random) -> Kind:
    return Kind(
        {"urls": data.urls("holes", "a"), "keep": numbers.choice([None, is_kept]), **of_epochs(numbers)}
    )


@kind
def damaged(data: Data, directory: Path, numbers: random.Random) -> Kind:
    return Kind({"urls": data.urls("damaged", "b"), **of_epochs(numbers)}, ("sizes",))


@kind
def damaged_buckets(data: Data, directory: Path, numbers: random.Random) -> Kind:
    return Kind(
        {"urls": data.urls("damaged"), "bucketing": 36, "text_padding": "longest", **of_epochs(numbers)}
    )


@kind
def missing(data: Data, directory: Path, numbers: random.Random) -> Kind:
    urls = [*data.urls("a"), str(data.folder / "none.tar"), *data.urls("b"), str(data.folder / "gone.tar")]
    return Kind({"urls": urls, **of_epochs(numbers)})


def cut(data: Data, numbers: random.Random, is_missing: bool) -> tuple[list[str], Callable[[], object]]:
    """URLs of shards some of which can be read to some place only, or not at all, until they are mended."""
    urls, server = data.served("a", "holes")
    version = {"ETag": '"1"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
    faulty = {}
    for name in numbers.sample(urls, 5):
        path = name.removeprefix(f"{server.url}/")
        whole = (data.folder / path).read_bytes()
        place = len(whole) * numbers.randint(1, 9) // 5120 * 512
        faulty[path] = whole
        broken = Fault(body=whole[:place] + bytes([7]) * (len(whole) - place), headers=version)
        server.misbehave(path, Fault(status=404) if is_missing else broken)

    def heal() -> None:
        for path, whole in faulty.items():
            server.misbehave(path, Fault(body=whole, headers=version))

    return urls, heal


@kind
def given_up(data: Data, directory: Path, numbers: random.Random) -> Kind:
    urls, heal = cut(data, numbers, is_missing=False)
    return Kind({"urls": urls, **of_epochs(numbers)}, ("sizes",), heal=heal)


@kind
def given_up_in_groups(data: Data, directory: Path, numbers: random.Random) -> Kind:
    urls, heal = cut(data, numbers, is_missing=False)
    return Kind({"urls": urls, "groups": 3, "num_batches": 13}, ranks=(1, 3), heal=heal)


@kind
def missing_for_a_while(data: Data, directory: Path, numbers: random.Random) -> Kind:
    urls, heal = cut(data, numbers, is_missing=True)
    return Kind({"urls": urls, **of_epochs(numbers)}, heal=heal)


@kind
def features(data: Data, directory: Path, numbers: random.Random) -> Kind:
    net = Means().eval()
    options = {"urls": data.urls("a"), "preprocess": still, "features": {"f": net}, **of_epochs(numbers)}
    return Kind(options, ("sizes",), values=lambda batch: {"f": net(batch)}, steps=20)


@kind
def replayed_decisions(data: Data, directory: Path, numbers: random.Random) -> Kind:
    options = mixed(data, numbers, seed=7, lanes=3, shuffle=50)
    log = directory / "decisions.jsonl"
    first = {"decisions": log, "mixing": Seesaw(), "batch_size": 12, "num_workers": 0, "output": "dict"}
    first |= {"preprocess": still, "with_keys": True, "cache_dir": directory / "cache", "tokenizer": spelled}
    given = {**options, **first}
    with flat.make_loader(given.pop("urls"), **given) as loader:
        for _ in range(6):
            for batch in loader:
                loader.report(loss=[len(key) % 7 / 7 for key in batch["__key__"]])
    return Kind({**options, "mixing": Replay(log)})


@kind
def sources_in_buckets(data: Data, directory: Path, numbers: random.Random) -> Kind:
    options = mixed(data, numbers, sources="step", bucketing=36, text_padding="longest")
    return Kind(options, ("weights",))


@kind
def sizes_of_images_and_sources(data: Data, directory: Path, numbers: random.Random) -> Kind:
    images = {"sizes": [(8, 8), (12, 6), (6, 12)], "microbatch": 2, "preprocess": None}
    return Kind(mixed(data, numbers, **images), ("weights",), steps=25)


@kind
def repeats(data: Data, directory: Path, numbers: random.Random) -> Kind:
    return Kind({"urls": data.urls("a"), "repeat": rate_of, **of_epochs(numbers)}, ("sizes",))


@kind
def repeats_in_groups(data: Data, directory: Path, numbers: random.Random) -> Kind:
    options = mixed(data, numbers, repeat=rate_of, groups=3)
    return Kind(options, ("weights",), ranks=(1, 3))


@kind
def modalities(data: Data, directory: Path, numbers: random.Random) -> Kind:
    urls = [
        Source(data.urls("a"), 2.0, "a"),
        Source(data.urls("b"), 1.0, "b", modality="text"),
        Source(data.urls("c"), 1.0, "c", modality="image"),
    ]
    return Kind({"urls": urls, "num_batches": 12}, ("weights", "sizes"))


@kind
def patches(data: Data, directory: Path, numbers: random.Random) -> Kind:
    images = Images(patches=Patches(4, (4, 9, 16)))
    options = {"urls": data.urls("a"), "images": images, "preprocess": None, **of_epochs(numbers)}
    return Kind(options, ("sizes",), steps=25)


@kind
def listed_steps(data: Data, directory: Path, numbers: random.Random) -> Kind:
    steps = [(4, 4), (16, 2), (4, 4), (16, 2), (9, 3)]
    images = Images(patches=Patches(4, (4, 9, 16), steps=steps))
    options = {"urls": data.urls("a"), "images": images, "preprocess": None, "batch_size": None}
    return Kind({**options, "num_batches": numbers.choice([None, 7])}, keeps_ranks=True)


@kind
def facts(data: Data, directory: Path, numbers: random.Random) -> Kind:
    options = {"urls": data.urls("a", "b"), "facts": {"index": "json:index"}, "keep": by_mod}
    return Kind({**options, **of_epochs(numbers)})


@kind
def drawn_captions(data: Data, directory: Path, numbers: random.Random) -> Kind:
    options = {"urls": data.urls("a"), "text_key": "txt;json:digest", "text_key_probs": (0.5, 0.5)}
    return Kind({**options, "tokenizer": None, **of_epochs(numbers)})


@kind
def own_samples(data: Data, directory: Path, numbers: random.Random) -> Kind:
    options = {"urls": data.urls("a"), "preprocess": None, "tokenizer": None, "map_sample": drawn}
    return Kind({**options, **of_epochs(numbers)}, ("sizes",))


@kind
def policy(data: Data, directory: Path, numbers: random.Random) -> Kind:
    return Kind(mixed(data, numbers, mixing=Seesaw()), (), (1,), reports=True)


@kind
def policy_of_sizes(data: Data, directory: Path, numbers: random.Random) -> Kind:
    return Kind(mixed(data, numbers, batch_policy=Stairs()), ("weights",), (1,))
