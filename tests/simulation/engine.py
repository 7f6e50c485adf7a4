"""Tasks of which exactly one runs at a time; who goes on is drawn from the seed, so a seed is one history.

A task is a real thread that waits for its turn. At each call of the operating system, and wherever it would
wait, it hands its turn over. Time is a number: each call takes a little of it, and when all tasks wait it
goes on to the next event.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import random
import sys
import threading
import traceback
from collections.abc import Callable

_TOLD_CALLS = 60
PATIENCE_SECONDS = 60.0
PATIENCE_CALLS = 100_000
"""Simulated time, and calls, without progress after which a simulation counts as one that doesn't end."""
_EPOCH_SECONDS = 1_700_000_000.0


class Killed(BaseException):
    """The process of this task is dead: nothing that it does has an effect any more."""


class Process:
    """A simulated process: its tasks, and what the kernel would close for it."""

    def __init__(self, engine: Engine, name: str, pid: int):
        self.name = name
        self.pid = pid
        self.is_alive = True
        self.stopped_until = 0.0
        self.was_stopped = False
        self.tasks: list[Task] = []
        self.descriptors: dict[int, str] = {}
        self._engine = engine

    def __repr__(self) -> str:
        state = "alive" if self.is_alive else "dead"
        return f"<Process {self.name}: {state}, {len(self.tasks)} tasks, {len(self.descriptors)} descriptors>"


class Task:
    """One thread of a process."""

    def __init__(self, process: Process, name: str):
        self.process = process
        self.name = name
        self.turn = threading.Lock()
        self.turn.acquire()
        self.ident = 0
        self.waits = False
        self.until: float | None = None
        self.waits_for = ""
        self.joining: list[Task] = []
        self.is_over = False


class TaskThread(threading.Thread):
    """The thread that a task runs in."""


class Engine:
    """Runs tasks in turn.

    Args:
        seed: of the history.
        kept_calls: how many of the last calls are kept for those who want to know.

    Attributes:
        rng: what all that is left open is drawn from.
        now: the simulated time, in seconds.
        failure: what went wrong first; None if nothing did.
        on_step: called in front of each call of the operating system with its name; may kill or stop.
        on_kill: closes what a dead process had open.
    """

    def __init__(self, seed: int, kept_calls: int):
        self.rng = random.Random(seed)
        self.now = _EPOCH_SECONDS
        self.steps = 0
        self._progress = (self.now, 0)
        self.failure: str | None = None
        self.current: Task | None = None
        self.on_step: Callable[[Process, str], None] = lambda process, call: None
        self.on_kill: Callable[[Process], None] = lambda process: None
        self.trace: collections.deque[tuple[float, str, str, str]] = collections.deque(maxlen=kept_calls)
        self._tasks: list[Task] = []
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count(1)
        self._over = threading.Lock()
        self._change_of_task = self.rng.choice([0.05, 0.15, 0.4, 0.9])
        self._call_seconds = self.rng.choice([2e-6, 2e-5, 1e-4])

    @property
    def seconds(self) -> float:
        """Simulated seconds since the beginning."""
        return self.now - _EPOCH_SECONDS

    def process(self, name: str, main: Callable[[], None]) -> Process:
        """Start a process."""
        process = Process(self, name, next(self._numbers))
        self.spawn(process, "main", main)
        return process

    def spawn(self, process: Process, name: str, target: Callable[[], object]) -> Task:
        """Start a task of a process."""
        task = Task(process, f"{process.name}/{name}")
        process.tasks.append(task)
        self._tasks.append(task)
        TaskThread(target=self._live, args=(task, target), name=task.name, daemon=True).start()
        return task

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something at a time from now; it must not wait."""
        heapq.heappush(self._agenda, (self.now + seconds, next(self._numbers), action))

    def run(self) -> None:
        """Let all tasks live until they are over."""
        self._over.acquire()
        first = self._next()
        if first is not None:
            self.current = first
            first.turn.release()
            self._over.acquire()

    def here(self) -> Task | None:
        """The task that calls; None for threads that aren't simulated."""
        task = self.current
        return task if task is not None and threading.get_ident() == task.ident else None

    def step(self, task: Task, call: str, what: object = "") -> None:
        """A call of the operating system is about to be made: somebody else may go on in front of it.

        Raises:
            Killed: this process is dead.
        """
        process = task.process
        if not process.is_alive:
            raise Killed
        self.steps += 1
        self.now += self._call_seconds
        self.trace.append((self.now, task.name, call, str(what)))
        since, steps = self._progress
        if self.now - since > PATIENCE_SECONDS or self.steps - steps > PATIENCE_CALLS:
            self.fail(f"no end in sight: nothing has come for {self.now - since:.0f} simulated seconds")
        self.on_step(process, call)
        if process.stopped_until > self.now or self.rng.random() < self._change_of_task:
            self._pass_on(task)
        if not process.is_alive:
            raise Killed

    def wait(self, task: Task, what: str, seconds: float | None = None) -> None:
        """Wait until woken, at most so long.

        Raises:
            Killed: this process is dead.
        """
        if not task.process.is_alive:
            raise Killed
        task.waits, task.waits_for = True, what
        task.until = None if seconds is None else self.now + max(seconds, 0.0)
        self._pass_on(task)
        task.waits = False
        if not task.process.is_alive:
            raise Killed

    def wake(self, task: Task) -> None:
        """End a task's wait."""
        task.waits = False

    def progress(self) -> None:
        """Somebody got something that it needed."""
        self._progress = (self.now, self.steps)

    def kill(self, process: Process) -> None:
        """SIGKILL."""
        if process.is_alive:
            process.is_alive = False
            self.trace.append((self.now, process.name, "KILLED", ""))
            self.on_kill(process)

    def stop(self, process: Process, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        if process.is_alive:
            process.stopped_until = self.now + seconds
            process.was_stopped = True
            self.trace.append((self.now, process.name, "STOPPED", f"{seconds:.2f} s"))

    def told_trace(self, calls: int) -> str:
        """The last calls, a line each."""
        last = list(self.trace)[-calls:]
        return "\n".join(f"  {at - _EPOCH_SECONDS:9.4f} {name:22} {call} {of}" for at, name, call, of in last)

    def fail(self, what: str) -> None:
        """Something doesn't hold: note it, and end all; the first is what counts."""
        if self.failure is None:
            here, self.current = self.current, None  # what tells of it is no task: it mustn't hand over
            self.failure = (
                f"{what}\n\nlast steps:\n{self.told_trace(_TOLD_CALLS)}\n\ntasks:\n{self._stacks()}"
            )
            self._agenda.clear()
            for task in self._tasks:
                self.kill(task.process)
            self.current = here

    def _live(self, task: Task, target: Callable[[], object]) -> None:
        task.turn.acquire()
        task.ident = threading.get_ident()
        try:
            if task.process.is_alive:
                target()
        except Killed:
            pass
        except BaseException:
            self.current = None
            error = traceback.format_exc()
            self.current = task
            self.fail(f"{task.name} ended by an error\n{error}")
        task.is_over = True
        task.process.tasks.remove(task)
        self._tasks.remove(task)
        for joining in task.joining:
            self.wake(joining)
        following = self._next()
        self.current = following
        (self._over if following is None else following.turn).release()

    def _pass_on(self, task: Task) -> None:
        following = self._next()
        assert following is not None
        if following is not task:
            self.current = following
            following.turn.release()
            task.turn.acquire()

    def _next(self) -> Task | None:
        """Who goes on; lets time pass while nobody can. None: all is over."""
        while True:
            while self._agenda and self._agenda[0][0] <= self.now:
                heapq.heappop(self._agenda)[2]()
            now, ready = self.now, []
            for task in self._tasks:
                if not task.process.is_alive:
                    return task  # dead ones go away at once
                may_go = not task.waits or (task.until is not None and task.until <= now)
                if may_go and task.process.stopped_until <= now:
                    ready.append(task)
            if ready:
                return ready[0] if len(ready) == 1 else self.rng.choice(ready)
            if not self._tasks and not self._agenda:
                return None
            coming = [agreed[0] for agreed in self._agenda[:1]]
            for task in self._tasks:
                at = task.until if task.waits else now
                if at is not None:
                    coming.append(max(at, task.process.stopped_until))
            if coming:
                self.now = min(coming)
            else:
                self.fail("deadlock: all wait for each other")

    def _stacks(self) -> str:
        frames = sys._current_frames()
        told = []
        for task in self._tasks:
            state = f"waits for {task.waits_for}" if task.waits else "could go on"
            told.append(f"  {task.name}: {state}")
            stack = traceback.extract_stack(frames[task.ident]) if task.ident in frames else []
            shipped = [
                frame for frame in stack if "/streamload/" in frame.filename or "job.py" in frame.filename
            ]
            told += [f"      {frame.filename}:{frame.lineno} {frame.line}" for frame in shipped[-5:]]
        return "\n".join(told)
