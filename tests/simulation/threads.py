"""Thread, Lock, Condition and Event for simulated tasks, with the meaning of `threading`'s own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .engine import Engine, Task


class Threads:
    """Stands for the module `threading` in the modules under simulation."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def Event(self) -> Event:  # noqa: N802
        return Event(self.engine)

    def Lock(self) -> Lock:  # noqa: N802
        return Lock(self.engine)

    def Condition(self) -> Condition:  # noqa: N802
        return Condition(self.engine)

    def Thread(self, target: Callable[[], object], name: str, daemon: bool = False) -> Thread:  # noqa: N802, FBT
        return Thread(self.engine, target, name)


class _OfEngine:
    def __init__(self, engine: Engine):
        self._engine = engine

    def _step(self, call: str) -> Task:
        task = self._engine.here()
        assert task is not None, "used outside of the simulation"
        self._engine.step(task, call)
        return task


class Event(_OfEngine):
    def __init__(self, engine: Engine):
        super().__init__(engine)
        self._is_set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        self._step("event.is_set")
        return self._is_set

    def set(self) -> None:
        self._step("event.set")
        self._is_set = True
        for task in self._waiting:
            self._engine.wake(task)

    def clear(self) -> None:
        self._step("event.clear")
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        task = self._step("event.wait")
        if not self._is_set:
            self._waiting.append(task)
            try:
                self._engine.wait(task, "an event", timeout)
            finally:
                self._waiting.remove(task)
        return self._is_set


class Lock(_OfEngine):
    """One that its owner may take again, as a Condition's."""

    def __init__(self, engine: Engine):
        super().__init__(engine)
        self.owner: Task | None = None
        self._depth = 0
        self._waiting: list[Task] = []

    def __enter__(self) -> bool:
        task = self._step("lock")
        while self.owner not in (None, task):
            self._waiting.append(task)
            try:
                self._engine.wait(task, f"a lock that {self.owner.name if self.owner else ''} has")
            finally:
                self._waiting.remove(task)
        self.owner = task
        self._depth += 1
        return True

    def acquire(self, timeout: float) -> bool:
        if self._engine.here() is None:  # of what the story itself looks at, while no task runs
            return False
        task, until = self._step("lock"), self._engine.now + timeout
        while self.owner is not None and self._engine.now < until:
            self._waiting.append(task)
            try:
                self._engine.wait(task, f"a lock that {self.owner.name} has", until - self._engine.now)
            finally:
                self._waiting.remove(task)
        if self.owner is not None:
            return False
        self.owner, self._depth = task, 1
        return True

    def release(self) -> None:
        self.__exit__()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.owner = None
            for task in self._waiting:
                self._engine.wake(task)


class Condition(Lock):
    def __init__(self, engine: Engine):
        super().__init__(engine)
        self._sleeping: list[Task] = []

    def wait(self, timeout: float | None = None) -> bool:
        task = self.owner
        assert task is not None
        assert task is self._engine.here()
        depth, self._depth = self._depth, 1
        self.__exit__()
        self._sleeping.append(task)
        try:
            self._engine.wait(task, "a condition", timeout)
            told = task not in self._sleeping
        finally:
            if task in self._sleeping:
                self._sleeping.remove(task)
        self.__enter__()
        self._depth = depth
        return told

    def notify_all(self) -> None:
        assert self.owner is self._engine.here()
        sleeping, self._sleeping = self._sleeping, []
        for task in sleeping:
            self._engine.wake(task)

    def notify(self, n: int = 1) -> None:
        assert self.owner is self._engine.here()
        for task in self._sleeping[:n]:
            self._sleeping.remove(task)
            self._engine.wake(task)


class Thread:
    native_id: int | None = None  # it is none of the system's

    def __init__(self, engine: Engine, target: Callable[[], object], name: str):
        self.name = name
        self._engine = engine
        self._target = target
        self._task: Any = None

    def start(self) -> None:
        here = self._engine.here()
        assert here is not None
        self._engine.step(here, "thread.start", self.name)
        self._task = self._engine.spawn(here.process, self.name.removeprefix("streamload-"), self._target)

    def join(self, timeout: float | None = None) -> None:
        here = self._engine.here()
        assert here is not None
        self._engine.step(here, "thread.join", self.name)
        while not self._task.is_over:
            self._task.joining.append(here)
            self._engine.wait(here, f"the end of {self.name}", timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_over
