"""Preloaded by a forkserver, which would end at a SIGTERM to the process group, and its workers with it."""

import os
import signal

_before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, _before))
