"""examples/count_scripts.py: an extension in one file, by the contract suite and as a newcomer runs it."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import streamload
from streamload.errors import OptionError
from streamload.observe.exposition import exposition
from streamload.testing.extension import ExtensionContract

EXAMPLE = Path(__file__).parents[2] / "examples" / "count_scripts.py"
spec = importlib.util.spec_from_file_location("count_scripts", EXAMPLE)
count_scripts = sys.modules["count_scripts"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(count_scripts)


class TestCountScripts(ExtensionContract):
    extension = count_scripts.CountScripts()
    adds = ("script",)
    state_keys = ("count_scripts",)
    damaged = (3, [1], {"latin": "many"})


@pytest.fixture
def urls():
    with count_scripts.made_shards() as folder:
        yield folder


def make(urls, cache_dir, workers):
    return streamload.make_loader(
        urls,
        batch_size=20,
        num_workers=workers,
        output="dict",
        shuffle=30,
        cache_dir=cache_dir,
        batches=streamload.Batches(extensions=[count_scripts.CountScripts()]),
    )


def test_a_run_with_two_workers_counts_scripts_and_resumes_its_counts(urls, tmp_path):
    names = dict(zip(count_scripts.CAPTIONS, ("latin", "cyrillic", "greek", "arabic", "hangul"), strict=True))
    with make(urls, tmp_path / "first", 2) as loader:
        batches = iter(loader)
        for _ in range(3):
            batch = next(batches)
            scripts = [count_scripts.SCRIPTS[place] for place in batch["script"].tolist()]
            assert scripts == [names[caption] for caption in batch["text"]]
        state = json.loads(json.dumps(loader.state_dict()))
        counts = state["count_scripts"]
        assert sum(counts.values()) == 60
        shown = exposition([loader.observer.page()])
        for name, count in counts.items():
            values = re.findall(
                rf'^streamload_extension_value{{.*name="count_scripts.{name}"}} (\d+)$', shown, re.MULTILINE
            )
            assert values == ([str(count)] if count else [])
    with make(urls, tmp_path / "second", 1) as loader:
        loader.load_state_dict(state)
        assert len(list(loader)) == 3
        counts = loader.state_dict()["count_scripts"]
        assert counts == {name: 24 if name in names.values() else 0 for name in count_scripts.SCRIPTS}


def test_it_prints_the_counts_as_a_newcomer_runs_it(tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "STREAMLOAD_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        f"{name}: 24 captions" for name in ("latin", "greek", "cyrillic", "arabic", "hangul")
    ]


def test_an_evaluation_with_it_fails():
    batches = streamload.Batches(extensions=[count_scripts.CountScripts()])
    with pytest.raises(OptionError, match="for training"):
        streamload.make_loader("a.tar", batches=batches, train=False)


def test_another_fact_of_the_name_of_its_own_fails():
    batches = streamload.Batches(extensions=[count_scripts.CountScripts()])
    shards = streamload.Shards(facts={"script": "json:script"})
    with pytest.raises(OptionError, match="'count_scripts' brings the fact 'script', and Shards"):
        streamload.make_loader("a.tar", batches=batches, shards=shards)


@pytest.mark.parametrize(
    ("extensions", "says"),
    [
        (["count"], "extensions has 'count'; expected a streamload.extension.Extension"),
        ([count_scripts.CountScripts()] * 2, "the name 'count_scripts' twice"),
    ],
)
def test_extensions_that_are_none_or_share_a_name_fail(extensions, says):
    with pytest.raises(OptionError, match=says):
        streamload.make_loader("a.tar", batches=streamload.Batches(extensions=extensions))
