"""Upkeep beside a training on the same tier, in processes of their own: every epoch exact, and no error."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import multiprocessing
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import streamload
from streamload import Workers
from streamload.cache.garbage import clear, collect_garbage
from streamload.cache.inventory import take_inventory
from streamload.cache.repair import repair
from streamload.cache.tier import Tier
from streamload.cache.verify import verify
from streamload.testing.server import ShardServer
from streamload.testing.shards import read_oracle, write_shards
from tests.support.tiers import flip

COUNTS = [25, 40, 10, 30, 22]
EPOCHS = 2


def fingerprint(sample: dict[str, Any]) -> dict[str, Any]:
    members = sorted((name, data) for name, data in sample.items() if not name.startswith("__"))
    return {"digest": hashlib.sha256(repr(members).encode()).hexdigest()}


def train(urls: str, root: Path, limit: int, results: multiprocessing.SimpleQueue[Any]) -> None:
    """Some epochs over a tier that holds a part of the data; tells of each what it saw."""
    try:
        with streamload.make_loader(
            urls,
            batch_size=3,
            num_workers=2,
            workers=Workers(map_sample=fingerprint),
            batches=streamload.Batches(with_keys=True),
            train=False,
            shuffle=20,
            cache_dir=root,
            cache_size=limit,
            shards=streamload.Shards(on_error="raise"),
        ) as loader:
            for _ in range(EPOCHS):
                results.put(
                    [pair for batch in loader for pair in zip(batch["__key__"], batch["digest"], strict=True)]
                )
            results.put(loader.stats().as_dict())
    except BaseException as exc:
        results.put(repr(exc))
        raise


def upkeep(tier: Tier, rng: random.Random, done: collections.Counter[str], harm: bool) -> None:
    """One round of all that a user may call, in some order."""
    jobs = ["verify", "repair", "gc", "clear", "stat", *(["harm"] if harm else [])]
    for job in rng.sample(jobs, len(jobs)):
        if job == "verify":
            looks = [look for look in verify(tier) if look is not None]
            done["verified"] += len(looks)
            done["found"] += sum(look.damage is not None for look in looks)
        elif job == "repair":
            bad = [
                look.damage
                for look in verify(tier, take_out=True)
                if look is not None and look.damage is not None
            ]
            done["found"] += len(bad)
            done["repaired"] += sum(one.is_done for one in repair(tier, bad))
        elif job == "gc":
            removal = collect_garbage(tier, all_parts=rng.random() < 0.5)
            done["collected"] += len(removal.removed)
        elif job == "clear":
            if rng.random() < 0.2:
                removal = clear(tier)
                done["cleared"] += len(removal.removed)
                done["in use"] += len(removal.kept)
        elif job == "stat":
            take_inventory(tier)
        else:
            with contextlib.suppress(FileNotFoundError, IndexError):
                data = rng.choice(sorted((tier.root / "shards").iterdir())) / "data"
                flip(data, rng.randrange(data.stat().st_size))
                done["harmed"] += 1


@pytest.mark.deep
@pytest.mark.parametrize(
    "harm",
    [pytest.param(False, id="sound"), pytest.param(True, id="with bits that flip", marks=pytest.mark.deep)],
)
def test_a_training_does_not_notice_what_is_done_to_its_tier(harm: bool, tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "data", COUNTS, seed=51)
    oracle = collections.Counter(
        (key, fingerprint(dict(members))["digest"]) for path in paths for key, members in read_oracle(path)
    )
    limit = sum(path.stat().st_size for path in paths) * 7 // 10
    rng, done = random.Random(7), collections.Counter[str]()
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.SimpleQueue[Any] = context.SimpleQueue()
    with ShardServer(tmp_path / "data", bytes_per_second=1e6) as server:
        urls = f"{server.url}/{{00000..{len(COUNTS) - 1:05d}}}.tar"
        training = context.Process(target=train, args=(urls, tmp_path / "tier", limit, results))
        tier = Tier(tmp_path / "tier", limit)
        training.start()
        seen: list[Any] = []
        while training.is_alive() or not results.empty():
            upkeep(tier, rng, done, harm)
            time.sleep(0.02)
            while not results.empty():
                seen.append(results.get())
        training.join()
    assert training.exitcode == 0, seen[-1:]
    epochs = seen[:EPOCHS]
    assert [collections.Counter(map(tuple, epoch)) == oracle for epoch in epochs] == [True] * EPOCHS
    assert len({tuple(map(tuple, epoch)) for epoch in epochs}) == 1  # evaluation: the same order in each
    assert done["verified"] > 10, done
    assert done["cleared"] > 3, done
    assert done["in use"] > 0, done
    assert not harm or done["harmed"] > 3, done
    if not harm:
        assert done["found"] == 0, done
        assert seen[EPOCHS]["checksum_failures"] == 0
    tier.sweep()  # as the next run does: what was still read when it was taken away has stayed till now
    assert not list((tier.root / "trash").iterdir())
    assert not list((tier.root / "runs").iterdir())


@pytest.mark.deep
def test_a_warm_up_ends_whole_though_the_tier_is_cleaned_all_the_time(tmp_path: Path) -> None:
    """Fills and evictions of another process, beside `gc` and `verify` as commands."""
    write_shards(tmp_path / "data", COUNTS, seed=52)
    root = tmp_path / "tier"
    Tier(root, 10**9)
    command = [sys.executable, "-m", "streamload"]
    with ShardServer(tmp_path / "data", bytes_per_second=4e5) as server:
        urls = f"{server.url}/{{00000..{len(COUNTS) - 1:05d}}}.tar"
        filling = subprocess.Popen(
            [*command, "warm", urls, "--cache-dir", str(root), "--concurrency", "3"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        rounds = 0
        while filling.poll() is None:
            for words in (["gc", "--all-parts"], ["verify", "--repair"], ["stat"]):
                upkeep = subprocess.run(
                    [*command, "cache", *words, "--json", "--cache-dir", str(root)],
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=120,
                )
                assert upkeep.returncode == 0, upkeep.stderr
                report = json.loads(upkeep.stdout)
                if words[0] == "gc":
                    assert all(item["path"].startswith(("trash/", "runs/")) for item in report["removed"])
            rounds += 1
        assert filling.stdout is not None
        output = filling.stdout.read()
        filling.stdout.close()
    assert filling.returncode == 0, output
    assert f"{len(COUNTS)} of {len(COUNTS)} shards are in" in output
    assert rounds > 0
    assert [look.damage for look in verify(Tier(root)) if look is not None] == [None] * len(COUNTS)
