"""Some thousand cases of `make fuzz`, and what it has found: each find is a test of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from streamload.loader import checks
from streamload.order.group import GroupOrder
from tests.fuzzing import decoders, indexes, kernels, runner, sanitized, tars, trainings, troubles, urls

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("target", "cases"), [("tars", 3000), ("indexes", 2000), ("urls", 400), ("kernels", 1500)]
)
def test_a_few_thousand_cases_hold(target, cases):
    ends, failure = runner.run_here(target, cases, seed=7)
    assert failure is None, str(failure)
    assert ends.total() == cases
    assert min(ends.values()) > cases // 100  # no way to end is left out


@pytest.mark.parametrize(
    ("target", "cases"),
    [
        ("trainings", 2),
        ("troubles", 2),
        pytest.param("troubles", 8, marks=pytest.mark.deep),
        pytest.param("decoders", 1, marks=pytest.mark.deep),
    ],
)
def test_some_trainings_hold(target, cases):
    ends, failure = runner.run_here(target, cases, seed=7)
    assert failure is None, str(failure)
    assert ends.total() == cases


def _one_back(cursor):
    return cursor._replace(skip=max(0, cursor.skip - 1))


@pytest.mark.deep
def test_a_resume_that_gives_a_sample_again_is_found(monkeypatch):
    plain = GroupOrder.mark_at
    monkeypatch.setattr(GroupOrder, "mark_at", lambda self, at: _one_back(plain(self, at)))
    failures = (runner.run_here("trainings", 1, 7, number)[1] for number in range(5))
    assert any(failure is not None and "resumed, it differs" in failure.trace for failure in failures)


def test_a_pass_that_ends_normally_with_too_many_bad_samples_is_found(monkeypatch):
    monkeypatch.setattr(checks, "exceeds", lambda *counts, **options: False)
    failures = (runner.run_here("troubles", 1, 1, number)[1] for number in (7, 11, 15))
    assert any(failure is not None and "ended with ['']" in failure.trace for failure in failures)


def test_the_command_runs_in_all_processors_and_shows_a_failure_so_that_it_can_be_run_again(tmp_path):
    command = [sys.executable, "-m", "tests.fuzzing", "--cases", "60", "--seed", "3", "--target", "urls"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert "urls: 60 cases of seed 3 in" in done.stdout
    broken = tmp_path / "sitecustomize.py"
    broken.write_text(
        "import streamload.urls as u\nplain = u.expand_urls\nu.expand_urls = lambda urls: plain(urls)[:3]\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 1
    assert "run it again with --target urls --seed 3 --case" in done.stderr
    assert "input: Case(pattern=" in done.stderr


def test_a_case_is_made_from_its_seed_and_number_alone():
    for module in (tars, indexes, urls, kernels, trainings, troubles, decoders):
        first, second = (module.make(runner.random.Random(5 << 40 | 77)) for _ in range(2))
        assert first == second


def planted(module, name, replacement, monkeypatch):
    """How a target takes a fault that is planted: the failure of its first few thousand cases."""
    owner, _, attribute = name.rpartition(".")
    target = module
    for part in owner.split(".") if owner else ():
        target = getattr(target, part)
    monkeypatch.setattr(target, attribute, replacement)
    return runner.run_here(module.__name__.rpartition(".")[2], 3000, seed=1)[1]


def test_a_parser_that_takes_the_last_long_name_is_found(monkeypatch):
    plain = tars.TarParser._extend

    def last_wins(self, body):
        self._long_name = None
        plain(self, body)

    failure = planted(tars, "TarParser._extend", last_wins, monkeypatch)
    assert "to tarfile" in failure.trace


def test_a_parser_that_believes_any_checksum_is_found(monkeypatch):
    monkeypatch.setattr("streamload.shards.tar._checksum_holds", lambda block: True)
    _, failure = runner.run_here("tars", 3000, seed=1)
    assert failure is not None


def test_a_scanner_that_takes_up_one_block_late_is_found(monkeypatch):
    from streamload.shards.samples import ShardScanner

    def late(entry, **options):
        return ShardScanner(entry.stop + -entry.stop % 512 + 512, entry.number + 1, **options)

    failure = planted(tars, "ShardScanner.after", late, monkeypatch)
    assert "from byte" in failure.trace


def test_a_reader_that_checks_no_records_is_found(monkeypatch):
    monkeypatch.setattr("streamload.shards.index.count_valid", lambda data, number: len(data) // 64)
    _, failure = runner.run_here("indexes", 3000, seed=1)
    assert failure is not None
    assert "AssertionError: 6 entries of 5" in failure.trace


def test_a_redaction_that_forgets_users_is_found(monkeypatch):
    failure = planted(urls, "urls.redact", lambda url: url.partition("?")[0], monkeypatch)
    assert "shown" in failure.trace


needs_sanitizers = pytest.mark.skipif(
    bool(sanitized.why_not()), reason=f"{sanitized.why_not()}, to build with"
)


def fuzz_the_c_code(*options):
    command = [sys.executable, "-m", "tests.fuzzing", "--target", "kernels", "--seed", "3", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@needs_sanitizers
def test_the_c_code_touches_no_byte_that_is_not_its_own():
    done = fuzz_the_c_code("--cases", "500")
    assert done.returncode == 0, done.stderr[-3000:]
    for end in ("left to libjpeg-turbo", "decoded", "resized", "normalised", "refused", "a box"):
        assert f" {end}" in done.stdout


@pytest.mark.deep
@needs_sanitizers
def test_a_header_that_is_read_beyond_its_end_is_found(tmp_path):
    source = (sanitized.SOURCES / "_before.c").read_text()
    assert "if (at > end)" in source
    (tmp_path / "_before.c").write_text(source.replace("if (at > end)", "if (0)", 1))
    done = fuzz_the_c_code("--cases", "1000", "--sources", str(tmp_path))
    assert done.returncode == 1
    assert "heap-buffer-overflow" in done.stderr
    assert "in read_header" in done.stderr
    assert "run it again with --target kernels --seed 3 --case" in done.stderr
