"""examples/drop_short_captions.py: what it leaves out is counted, by the contract suite and by itself."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamload.observe.exposition import exposition
from streamload.testing.extension import ExtensionContract
from streamload.testing.resume import Layout
from streamload.testing.shards import read_oracle

EXAMPLE = Path(__file__).parents[2] / "examples" / "drop_short_captions.py"
spec = importlib.util.spec_from_file_location("drop_short_captions", EXAMPLE)
drop_short_captions = sys.modules["drop_short_captions"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(drop_short_captions)


class TestDropShortCaptions(ExtensionContract):
    extension = drop_short_captions.DropShortCaptions(3)
    layouts = (Layout(2, 1), Layout(1, 0))

    @pytest.fixture(autouse=True)
    def shards_of_the_example(self):
        with drop_short_captions.made_shards() as self.urls:
            yield

    def write_data(self, folder):
        return self.urls

    def test_the_count_of_an_epoch_and_the_metric_are_those_of_the_shards(self, tmp_path):
        captions = [
            members["txt"].decode()
            for path in Path(self.urls).glob("*.tar")
            for _, members in read_oracle(path)
        ]
        short = sum(len(caption.split()) < 3 for caption in captions)
        with self.make(self.urls, cache_dir=tmp_path / "cache", num_workers=2) as loader:
            rows = sum(len(batch["text"]) for batch in loader)
            loader.observer.tick(is_due=True)
            shown = exposition([loader.observer.page()])
        assert loader.stats().samples_left_out == {"short_captions": short}
        assert rows == len(captions) - short
        assert "streamload_samples_left_out_total{" in shown
        assert f'name="short_captions"}} {short}' in shown


@pytest.mark.deep
def test_it_runs_without_urls(tmp_path):
    environment = {**os.environ, "STREAMLOAD_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, EXAMPLE], capture_output=True, text=True, check=True, env=environment, timeout=120
    )
    assert done.stdout == "60 samples, 60 left out\n"
