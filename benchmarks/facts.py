"""What facts of samples cost: to make them, and to read them by reference.

Question: what does it take to make the token count and a JSON field of each sample, beside tokenizing its
caption for a batch? What does a fact take that is there, by reference?

Command: python -m benchmarks.facts

One shard in a tier, as a fill leaves it, in this process alone. The tokenizer is a fast one of transformers,
trained on the captions. Each round removes the files beside the index and makes them again ("made"), opens
the shard anew and takes the values from them ("from files"), and looks up a million references, 64 at a time.

- us_per_sample: wall time by sample or reference.

Result: results/facts.json; docs/guides/facts.md has the numbers in words.

Explanation: making a fact of members reads the whole sample, since its checksum covers all of them: 13 µs of
60 kB. Counting tokens needs no padding and no tensors, which is half of what tokenizing for a batch takes.
"""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, turns
from benchmarks.contenders.job import versions
from streamload.batches.tokenize import adapt_tokenizer
from streamload.cache.fill import fill
from streamload.cache.selection import Selection
from streamload.cache.shard import ShardList, shard_of
from streamload.cache.shard_cache import ShardCache
from streamload.cache.tier import Tier
from streamload.facts.recipes import read_facts
from streamload.facts.shard_facts import ShardFacts
from streamload.metrics import Counters
from streamload.origins.origin import open_origin
from streamload.shards.columns import Column
from streamload.testing.server import ShardServer
from streamload.urls import expand_urls

SAMPLES, IMAGE_BYTES, REFERENCES, AT_ONCE = 4000, 60_000, 1_000_000, 64
TOKENIZING, TOKENS = "tokenizing for batches of 256", "tokens made"


def main() -> None:
    given = turns.arguments(__doc__, rounds=7, names=["streamload"])
    samples, references = (200, 10_000) if given.quick else (SAMPLES, REFERENCES)
    with tempfile.TemporaryDirectory(prefix="streamload-bench-") as place:
        captions = captions_of(samples)
        tokenizer = trained(captions)
        forms = {"tokens": "tokens", "score": "json:score"}
        columns = read_facts(forms, "jpg", "txt", tokenizer)
        url, tier = filled(Path(place), captions)
        rows: list[dict[str, Any]] = []
        for round_ in range(given.rounds):
            measures = measured(url, tier, columns, captions, tokenizer, references)
            for label, us in measures.items():
                row = {"label": label, "contender": "streamload", "round": round_}
                rows.append({**row, "load_before": machine.load(), "us_per_sample": us})
    medians = turns.medians(rows)
    tokens = medians[TOKENS]["us_per_sample"] / medians[TOKENIZING]["us_per_sample"]
    by_reference = medians["three facts by reference"]["us_per_sample"]
    turns.write(
        given,
        "facts",
        {
            "settings": {"samples": samples, "image_bytes": IMAGE_BYTES, "references": references},
            "versions": {"streamload": versions("streamload", "transformers", "tokenizers", "numpy")},
            "seeds": [0],
            "rounds": rows,
            "medians": medians,
            "targets": [
                turns.target("token counts, times tokenizing", tokens, at_most=1.1),
                turns.target("three facts by reference, µs", by_reference, at_most=1.0),
            ],
        },
    )


def measured(
    url: str,
    tier: Tier,
    columns: Mapping[str, Column],
    captions: Sequence[str],
    tokenizer: Any,
    references: int,
) -> dict[str, float]:
    """Microseconds by sample or reference, by what was done."""
    adapted, count = adapt_tokenizer(tokenizer), len(captions)
    assert adapted is not None
    found = {
        TOKENIZING: _us(
            lambda: [
                adapted(list(captions[at : at + 256]), [0] * len(captions[at : at + 256]))
                for at in range(0, count, 256)
            ],
            count,
        )
    }
    cases = {TOKENS: ["tokens"], "JSON field made": ["score"], "both made": ["tokens", "score"]}
    for label, names in cases.items():
        for file in tier.root.glob("shards/*/facts.*"):
            file.unlink()
        with opened(url, tier, columns) as cache:
            found[label] = _us(lambda names=names: cache.facts(0, range(count), names), count)
    with opened(url, tier, columns) as cache:
        names = ["tokens", "score"]
        found["both from files"] = _us(lambda: cache.facts(0, range(count), names), count)
        numbers, names = np.random.default_rng(0).integers(0, count, references), ["tokens", "score", "width"]
        found["three facts by reference"] = _us(
            lambda: [
                cache.facts(0, numbers[at : at + AT_ONCE], names) for at in range(0, references, AT_ONCE)
            ],
            references,
        )
    return found


def _us(run: Callable[[], object], count: int) -> float:
    began = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - began) / count


@contextlib.contextmanager
def opened(url: str, tier: Tier, columns: Mapping[str, Column]) -> Any:
    """The shard, open."""
    shards, selection = (
        ShardList(expand_urls(url), None),
        Selection((), columns=columns, open_companion=ShardFacts),
    )
    cache = ShardCache(tier, shards, selection, skip=True, counts=Counters(), counted=lambda shard: True)
    with contextlib.closing(cache):
        cache.arrived(0)
        yield cache


def filled(place: Path, captions: Sequence[str]) -> tuple[str, Tier]:
    """The URL of a shard of noise with these captions, and a tier that has it."""
    (place / "data").mkdir()
    rng = np.random.default_rng(0)
    with tarfile.open(place / "data" / "0.tar", "w") as tar:
        for number, caption in enumerate(captions):
            fields = {
                "score": number / 7,
                "url": f"http://host/{number:064d}",
                "width": 640,
                "caption": caption,
            }
            members = {
                "jpg": rng.bytes(IMAGE_BYTES),
                "json": json.dumps(fields).encode(),
                "txt": caption.encode(),
            }
            for extension, data in members.items():
                info = tarfile.TarInfo(f"{number:08d}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    tier = Tier(place / "tier", 10 * 10**9)
    with ShardServer(place / "data") as server:
        shard = shard_of(f"{server.url}/0.tar", None)
        part = tier.claim(shard.digest)
        assert part is not None
        fill(part, shard, lambda: open_origin(shard.url), next_use=lambda: 0.0, stop=threading.Event())
    return shard.url, tier


def captions_of(samples: int) -> list[str]:
    """Captions of 5 to 24 words, out of 4,000."""
    rng = np.random.default_rng(0)
    letters = list("abcdefghijklmnoprstuvw")
    words = ["".join(rng.choice(letters, rng.integers(2, 10))) for _ in range(4000)]
    return [" ".join(rng.choice(words, rng.integers(5, 25))) for _ in range(samples)]


def trained(captions: Sequence[str]) -> Any:
    """A fast tokenizer of transformers by byte pairs, with the length of CLIP's."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE(unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = ["[PAD]", "[UNK]"]
    inner.train_from_iterator(
        captions, trainers.BpeTrainer(vocab_size=3000, special_tokens=special, show_progress=False)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", model_max_length=77
    )


if __name__ == "__main__":
    main()
