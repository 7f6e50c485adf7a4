"""The signals of a worker process, and those of the processes that it starts."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess

from streamload.worker.process import leave_signals_to_rank


def end_children_by_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as workers are started
    leave_signals_to_rank()
    signal.raise_signal(signal.SIGTERM)
    with subprocess.Popen(["sleep", "60"]) as command:
        command.terminate()
        assert command.wait() == -signal.SIGTERM
    forked = os.fork()
    if not forked:
        signal.pause()
    os.kill(forked, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == -signal.SIGTERM


def test_a_worker_outlives_a_sigterm_and_processes_that_it_starts_do_not() -> None:
    worker = multiprocessing.get_context("fork").Process(target=end_children_by_sigterm)
    worker.start()
    worker.join()
    assert worker.exitcode == 0


def get_sigterm() -> None:
    leave_signals_to_rank()
    signal.raise_signal(signal.SIGTERM)


def test_the_event_loop_of_the_rank_sees_no_signal_of_a_worker() -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        worker = multiprocessing.get_context("fork").Process(target=get_sigterm)
        worker.start()
        worker.join()
    finally:
        signal.set_wakeup_fd(before)
    os.close(writer)
    seen = os.read(reader, 64)  # its end, unless SIGCHLD came
    os.close(reader)
    assert signal.SIGTERM not in seen
