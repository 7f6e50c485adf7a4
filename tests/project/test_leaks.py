"""The check for what a test leaves behind: it sees each kind of thing, and lets go what is on its way out."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

Failed = pytest.fail.Exception


def test_a_block_that_leaves_nothing_passes(no_leaks, tmp_path):
    with no_leaks():
        (tmp_path / "file").write_text("closed again")
        subprocess.run([sys.executable, "-c", ""], check=True, timeout=60)


def test_a_thread_that_is_about_to_end_is_waited_for(no_leaks):
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    with no_leaks():
        thread.start()
        threading.Timer(0.1, end.set).start()


def test_a_thread_that_stays_fails(no_leaks):
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="forgotten")
    with pytest.raises(Failed, match="forgotten"), no_leaks(patience_seconds=0):
        thread.start()
    end.set()
    thread.join()


def test_a_child_process_that_stays_fails(no_leaks):
    with pytest.raises(Failed, match="child processes"), no_leaks(patience_seconds=0):
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process.communicate(timeout=60)


def test_a_descriptor_that_stays_fails(no_leaks, tmp_path):
    with pytest.raises(Failed, match="descriptors"), no_leaks(patience_seconds=0):
        descriptor = os.open(tmp_path / "file", os.O_CREAT | os.O_WRONLY)
    os.close(descriptor)


def test_a_file_in_shared_memory_that_stays_fails(no_leaks):
    left = Path(f"/dev/shm/streamload-test-{os.getpid()}")
    with pytest.raises(Failed, match=left.name), no_leaks(patience_seconds=0):
        left.touch()
    left.unlink()
