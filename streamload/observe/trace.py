"""Trace: what workers and fills do beside the training's steps, as rows of torch.profiler's Chrome trace.

torch.profiler sees one process, so its trace shows workers as a gap. Spans come as files of the processes
(worker/stages.py); this module starts and ends them, and merges them by the clock that both use.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streamload.descriptors import in_this_process
from streamload.errors import OptionError
from streamload.ipc import ControlBlock
from streamload.worker.stages import Spans

_ADJACENT_NS = 20_000_000
"""Waits for one shard with shorter gaps are one span: a reader that waits looks again and again."""
_WAIT_ROW = 1 << 30
"""The row of data waits, beside the threads of the training."""


class Trace:
    """Spans of a loader's processes, from its making for a number of steps.

    Args:
        control: of the loader.
        steps: batches that the training takes until it ends.

    Attributes:
        is_done: all steps were taken, or `stop` was called.
    """

    def __init__(self, control: ControlBlock, steps: int):
        self.is_done = False
        self._control = control
        self._left = steps
        self._folder = tempfile.mkdtemp(prefix="streamload-trace-")
        remove = functools.partial(shutil.rmtree, self._folder, ignore_errors=True)
        weakref.finalize(self, in_this_process(remove))
        control.tracing.write({"folder": self._folder})
        self._own = Spans(control, "training")

    def waited(self, waited_ns: int) -> None:
        """The training loop has just waited for so long."""
        now_ns = time.time_ns()
        self._own.add("data wait", now_ns - waited_ns, now_ns)

    def took(self) -> bool:
        """The training loop took a batch; returns whether it was the last of the trace."""
        self._left -= 1
        if self._left <= 0:
            self.stop()
        return self.is_done

    def stop(self) -> None:
        """End the spans; those so far can be merged. Idempotent."""
        if not self.is_done:
            self.is_done = True
            self._control.tracing.write({"folder": ""})

    def merge(self, path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> int:
        """Add the spans to a trace that `torch.profiler.profile.export_chrome_trace` wrote.

        Args:
            path: of the trace, .json or .json.gz.
            out: where the result is written; None: over it.

        Returns:
            How many spans were added.

        Raises:
            OptionError: it is no such trace.
        """
        self.stop()
        source, target = Path(path), Path(path if out is None else out)
        try:
            raw = source.read_bytes()
            trace = json.loads(gzip.decompress(raw) if source.suffix == ".gz" else raw)
            events, base_ns = trace["traceEvents"], int(trace.get("baseTimeNanoseconds", 0))
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise OptionError(
                f"{source} is no trace of torch.profiler ({exc!r}): give the file that "
                f"export_chrome_trace wrote"
            ) from exc
        spans = list(self.events(base_ns))
        text = json.dumps({**trace, "traceEvents": [*events, *spans]}).encode()
        half = target.with_name(f"{target.name}.{os.getpid()}")
        half.write_bytes(gzip.compress(text) if target.suffix == ".gz" else text)
        half.replace(target)
        return sum(event["ph"] == "X" for event in spans)

    def events(self, base_ns: int = 0) -> Iterator[dict[str, Any]]:
        """The spans as events of the Chrome trace format.

        Args:
            base_ns: the time since the epoch that the trace counts from.
        """
        for number, path in enumerate(sorted(Path(self._folder).glob("*.jsonl"))):
            lines = path.read_text().splitlines()
            if lines:
                yield from _process_events(lines, base_ns, number)


def _process_events(lines: list[str], base_ns: int, number: int) -> Iterator[dict[str, Any]]:
    """The events of one process; a line that was cut by a full disk or a kill is left out."""
    head = json.loads(lines[0])
    pid, is_worker = head["pid"], head["pid"] != os.getpid()
    if is_worker:
        yield _named("process_name", pid, 0, {"name": f"streamload {head['process']}"})
        yield _named("process_sort_index", pid, 0, {"sort_index": number})
    rows: dict[int, str] = {}
    for name, began_ns, ended_ns, thread, about, thread_name in _joined(lines[1:]):
        row = _WAIT_ROW if name == "data wait" else thread
        rows.setdefault(row, name if row == _WAIT_ROW else thread_name)
        yield {
            "ph": "X",
            "cat": "streamload",
            "name": name,
            "pid": pid,
            "tid": row,
            "ts": (began_ns - base_ns) / 1000,
            "dur": (ended_ns - began_ns) / 1000,
            "args": about,
        }
    for row, name in rows.items():
        if is_worker or row == _WAIT_ROW or row != threading.get_native_id():
            yield _named("thread_name", pid, row, {"name": f"streamload {name}"})


def _joined(lines: list[str]) -> Iterator[list[Any]]:
    """The spans of lines, with adjacent waits of a thread for the same shard made one."""
    waiting: dict[int, list[Any]] = {}
    for line in lines:
        try:
            span = json.loads(line)
            name, began_ns, ended_ns, thread, about, _ = span
        except ValueError:
            continue
        if name != "wait for bytes":
            yield span
            continue
        last = waiting.get(thread)
        if last is not None and last[4] == about and began_ns - last[2] < _ADJACENT_NS:
            last[2] = ended_ns
        else:
            if last is not None:
                yield last
            waiting[thread] = span
    yield from waiting.values()


def _named(kind: str, pid: int, row: int, about: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": row, "ts": 0, "args": about}
