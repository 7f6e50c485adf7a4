"""`streamload bench` on a real server: every measurement runs once, and table, JSON and verdict agree."""

import importlib.util
import json
import sys
import tarfile
from pathlib import Path

import pytest

from examples.photograph_shards import write_photograph_shards
from streamload.cli import main
from streamload.profile.verdict import BenchFigures, verdict
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, write_shards

SHARDS, SAMPLES, BATCH = 2, 8, 4
MEASURED = ["origin", "disk", "decode alone", "floor, uint8", "floor, float32", "streamload"]


@pytest.fixture
def bench(capsys, monkeypatch, tmp_path):
    """Run the command; gives its exit code, stdout and stderr."""

    def run(*arguments):
        command = [
            "streamload",
            "bench",
            *map(str, arguments),
            "--cache-dir",
            str(tmp_path / "place" / "cache"),
        ]
        monkeypatch.setattr(sys, "argv", command)
        monkeypatch.setenv("COLUMNS", "400")
        try:
            main()
        except SystemExit as exc:
            return exc.code or 0, *capsys.readouterr()
        return 0, *capsys.readouterr()

    return run


def one_line(done):
    code, out, err = done
    assert code == 2, err
    assert out == ""
    (line,) = [line for line in err.splitlines() if line.startswith("streamload: ")]
    assert err.rstrip().endswith(line)
    return line


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    directory = tmp_path_factory.mktemp("shards")
    write_photograph_shards(directory, SHARDS * SAMPLES, SAMPLES)
    return directory


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_all_is_measured_and_table_json_and_verdict_agree(bench, shards, tmp_path):
    out = tmp_path / "out.json"
    with ShardServer.spawn(shards) as server:
        urls = f"{server.url}/{{00000..00007}}.tar?X-Amz-Signature=hush"
        command = ["--workers", 1, "--batch-size", BATCH, "--rounds", 1, "--samples", 12, "--json", out]
        code, table, err = bench(urls, *command)
        log = server.log
    assert code == 0, err
    text = out.read_text()
    found = json.loads(text)

    # Two of the eight shards have enough samples; they come to be measured on, and once more in the round.
    assert {request.path.partition("?")[0] for request in log if request.sent} == {"00000.tar", "00001.tar"}
    size = sum((shards / f"0000{number}.tar").stat().st_size for number in range(SHARDS))
    assert sum(request.sent for request in log) == 2 * size
    assert found["data"]["bytes"] == size
    assert (found["data"]["samples"], found["data"]["usable"]) == (SHARDS * SAMPLES, SHARDS * SAMPLES)
    assert "hush" not in text
    assert "hush" not in table

    rows = {row["label"]: row for row in found["rounds"]}
    assert [*rows] == [*found["medians"]] == [name for name in MEASURED if name not in found["left_out"]]
    assert found["settings"]["samples"] == 12
    for name in ("decode alone", "floor, uint8", "floor, float32"):
        assert rows[name]["images"] == 12
    assert rows["streamload"]["images"] == 12 - BATCH  # the first batch starts the clock
    each = size / (SHARDS * SAMPLES)
    assert rows["origin"]["images_per_second"] == pytest.approx(rows["origin"]["bytes_per_second"] / each)

    floor = found["medians"]["floor, float32"]["images_per_second"]
    lines = table.splitlines()
    for name, row in found["medians"].items():
        (line,) = [line for line in lines if line.startswith(f"{name} ")]
        cells = line.removeprefix(name).split()
        rate = f"{row['images_per_second']:,.0f}"
        expected = [rate, f"{rate}–{rate}"]
        expected += [f"{row['images_per_second'] / floor:.2f}"] if "images" in row else []
        expected += [f"{row['cpu_us_per_image']:,.0f}"] if "images" in row else []
        expected += [f"{row['bytes_per_second'] / 1e6:,.0f}"] if "bytes_per_second" in row else []
        assert cells == expected, name
    for name, why in found["left_out"].items():
        assert f"not measured: {name}: {why}" in lines

    judged = verdict(figures_of(found))
    assert found["verdict"]["first_epoch"] == judged.first_epoch
    assert found["verdict"]["later_epochs"] == judged.later_epochs
    assert tuple(found["verdict"]["lines"]) == judged.lines
    assert lines[-len(judged.lines) :] == list(judged.lines)
    assert found["versions"].keys() >= {"python", "streamload", "torch"}
    assert list((tmp_path / "place").iterdir()) == []  # nothing is left, and no cache was made


def figures_of(found):
    """The verdict's input, read out of the JSON alone."""
    rates = {name: row["images_per_second"] for name, row in found["medians"].items()}
    cpu = {name: row["cpu_us_per_image"] for name, row in found["medians"].items() if "images" in row}
    return BenchFigures(
        link=rates["origin"],
        disk=rates.get("disk"),
        loader=rates["streamload"],
        consumer=None,
        floor_cpu_us=cpu["floor, float32"],
        loader_cpu_us=cpu["streamload"],
        workers=found["settings"]["workers"],
        cores=found["machine"]["cores"],
        width=found["data"]["mean_width"],
        height=found["data"]["mean_height"],
        size_bytes=found["data"]["bytes"],
        samples=found["data"]["usable"],
        batch_size=found["settings"]["batch_size"],
    )


def test_urls_that_can_not_be_used_fail_with_one_line(bench, tmp_path):
    assert "an unbalanced brace" in one_line(bench("shards/{00..1.tar"))
    assert "gone.tar: no such file" in one_line(bench(tmp_path / "gone.tar"))
    (tmp_path / "page.tar").write_text("<html>" * 200)
    assert "not a tar" in one_line(bench(tmp_path / "page.tar"))
    with ShardServer(tmp_path) as server:
        assert "404" in one_line(bench(f"{server.url}/gone.tar"))
    assert list((tmp_path / "place").iterdir()) == []


def test_a_json_file_in_no_folder_fails_before_anything_is_measured(bench, tmp_path):
    line = one_line(bench(tmp_path / "gone.tar", "--json", tmp_path / "none" / "out.json"))
    assert f"there is no folder {tmp_path / 'none'}" in line


def test_a_shard_without_samples_fails_with_one_line(bench, tmp_path):
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    assert "empty.tar: no samples" in one_line(bench(tmp_path / "empty.tar"))


def test_samples_without_captions_fail_naming_what_they_have(bench, tmp_path):
    (path,) = write_shards(tmp_path, [4], options=ShardOptions(without_text_every=1))
    line = one_line(bench(path))
    assert "none of 4 samples has a JPEG (.jpg, .jpeg) and a caption (.txt)" in line
    assert line.endswith("found .jpg, .json")


def test_fewer_samples_than_three_batches_fail_with_the_next_step(bench, tmp_path):
    (path,) = write_shards(tmp_path, [12], options=ShardOptions(without_text_every=12))
    line = one_line(bench(path, "--batch-size", 4))
    assert "11 samples are less than 3 batches of 4: give a smaller --batch-size" in line


@pytest.mark.parametrize("option", [("--workers", 0), ("--rounds", 0), ("--batch-size", "many")])
def test_an_option_that_makes_no_sense_fails_with_usage(bench, option):
    code, _, err = bench("shards.tar", *option)
    assert code == 2
    assert option[0] in err


def test_a_tokenizer_without_open_clip_fails_with_one_line(bench, shards):
    if importlib.util.find_spec("open_clip") is not None:
        pytest.skip("open_clip is here; tests/profile/test_openclip.py has this environment's part")
    line = one_line(bench(shards / "00000.tar", "--tokenizer", "ViT-B-32"))
    assert "--tokenizer=ViT-B-32: open_clip is not installed here" in line


@pytest.mark.deep
def test_a_measurement_that_fails_ends_the_command_with_its_own_words(bench, tmp_path):
    (path,) = write_shards(tmp_path, [12])
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        for member in tar:
            if member.name.endswith(".jpg"):  # a sound header, and nothing that can be decoded
                data[member.offset_data + 300 : member.offset_data + member.size] = bytes(member.size - 300)
    Path(path).write_bytes(data)
    line = one_line(bench(path, "--batch-size", 4, "--workers", 1, "--rounds", 1))
    assert "decode alone failed: RuntimeError: a worker of the floor failed: ValueError" in line
