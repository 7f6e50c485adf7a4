"""What a loader shows by itself: flat numbers, a port for Prometheus, a recording."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import streamload
from streamload.errors import OptionError
from streamload.observe.recording import read_recording, recordings
from streamload.testing.shards import write_shards
from tests.cli.test_metrics import ranks_of, scraped
from tests.support import flat
from tests.support.pages import get


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for name in ("photos", "drawings"):
        write_shards(folder / name, [20, 20], seed=3)
    return folder


@pytest.fixture
def make(shards: Path, tmp_path: Path) -> Iterator[Any]:
    """Loaders of one cache; `make(batch_size=…)`."""
    made = []

    def make(**options: Any) -> streamload.Loader:
        sources = [
            streamload.Source(f"{shards}/{name}/{{00000..00001}}.tar", weight=weight, name=name)
            for name, weight in (("photos", 3.0), ("drawings", 1.0))
        ]
        common: dict[str, Any] = {"num_workers": 0, "batch_size": 4, "num_batches": 10}
        common |= {"cache_dir": tmp_path / "cache", "cache_size": "1GB"}
        made.append(flat.make_loader(sources, **common | options))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_metrics_are_the_numbers_since_the_last_call(workers: int, make: Any) -> None:
    loader = make(num_workers=workers)
    assert loader.metrics() == {}
    assert len(list(loader)) == 10
    found = loader.metrics()
    assert found["loader/source/photos/share"] == 0.75
    assert found["loader/source/drawings/weight"] == 1.0
    assert found["loader/samples_per_second"] > 0
    assert 0 < found["loader/data_wait"] <= 1
    nothing = loader.metrics()
    assert nothing["loader/samples_per_second"] == 0
    assert "loader/cache_hits" not in nothing
    list(loader)
    assert loader.metrics()["loader/samples_per_second"] > 0


def test_a_run_is_served_by_its_own_process_and_no_longer_than_it_lasts(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("STREAMLOAD_METRICS", listen)
    loader, other = make(), make()
    list(loader)
    list(other)  # of the same process: one server has both runs
    said = [record.message for record in caplog.records if "/metrics" in record.message]
    assert said == [f"/metrics is at http://{listen}"]
    found = scraped(f"http://{listen}")
    assert ranks_of(found) == {"0"}
    assert len({labels for name, labels in found if name == "streamload_run_info"}) == 2
    samples = [value for (name, _), value in found.items() if name == "streamload_samples_yielded_total"]
    assert samples == [40, 40]
    loader.close()
    with pytest.raises(Exception, match="refused"):
        get(f"http://{listen}/metrics")


def test_a_port_that_is_taken_is_one_warning_and_the_training_goes_on(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("STREAMLOAD_METRICS", listen)
        loader = make()
        for _ in range(3):
            assert len(list(loader)) == 10
        (said,) = [record.message for record in caplog.records if "metrics" in record.message]
        assert f"can't listen on {listen}" in said
        assert "the training goes on" in said
        assert loader.serve_metrics(listen) is None
    monkeypatch.setenv("STREAMLOAD_METRICS", "nowhere")
    with pytest.raises(OptionError, match="STREAMLOAD_METRICS='nowhere' is no address and port"):
        list(make())
    monkeypatch.delenv("STREAMLOAD_METRICS")
    with pytest.raises(OptionError, match="no address and port"):
        make().serve_metrics("nowhere")


def listening() -> set[Any]:
    """The addresses at which this process listens."""
    connections = psutil.Process().net_connections("inet")
    return {one.laddr for one in connections if one.status == psutil.CONN_LISTEN}


def test_by_default_there_is_no_port_and_no_thread(make: Any) -> None:
    loader = make()
    before, ports = set(threading.enumerate()), listening()  # other tests' servers may be in this process
    epoch = iter(loader)
    next(epoch)
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert not any("pages" in name for name in names), names
    assert listening() == ports


@pytest.mark.parametrize("by_variable", [True, False])
def test_a_recording_has_the_run_to_its_end_and_its_settings_without_secrets(
    by_variable: bool, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "records"
    if by_variable:
        monkeypatch.setenv("STREAMLOAD_RECORD", str(folder))
    loader = make(cache=streamload.Cache(shared="/mnt/key:secret"), num_workers=1)
    if not by_variable:
        loader.record(folder)
    for _ in range(2):
        list(loader)
    loader.close()
    (path,) = recordings(folder)
    found = read_recording(path)
    assert found.moments[-1].counters["samples_yielded"] == 80
    assert found.moments[-1].gauges["samples"] == {("photos",): 60, ("drawings",): 20}
    settings = found.about["settings"]
    assert settings["sources"] == "photos: 2 shards, drawings: 2 shards"
    assert (settings["batch_size"], settings["cache"]) == (4, "disk")
    assert "secret" not in path.read_text()
    list(loader)  # with new workers it is another run
    loader.close()
    assert len(recordings(folder)) == 2


def test_a_folder_that_cant_be_written_is_one_warning_and_the_training_goes_on(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    loader = make()
    loader.record(tmp_path / "file" / "folder")
    for _ in range(3):
        assert len(list(loader)) == 10
    assert sum("isn't recorded any further" in record.message for record in caplog.records) == 1
