"""What a simulation is made of: events in order of time, links that transfers share, and request limits."""

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

Act = Callable[[], None]


class Events:
    """A clock that goes from one event to the next; what falls on one moment comes as it was asked for.

    Attributes:
        now: seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Act]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, act: Act) -> None:
        """Let something happen so many seconds from now; never, if that is without end."""
        if seconds < math.inf:
            heapq.heappush(self._due, (self.now + max(0.0, seconds), next(self._numbers), act))

    def every(self, seconds: float, act: Act) -> None:
        """Let something happen now and every so many seconds."""
        act()
        self.after(seconds, lambda: self.every(seconds, act))

    def run(self, until: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Go on to a time, or until something is over."""
        while self._due and self._due[0][0] <= until and not is_over():
            self.now, _, act = heapq.heappop(self._due)
            act()
        if not is_over():
            self.now = until


@dataclass
class Transfer:
    """Bytes on their way over a link."""

    kind: str
    begins_at: float
    ends_at: float  # in bytes that each transfer of its kind has had since the beginning
    done: Act
    is_under_way: bool = True


@dataclass
class _Kind:
    """Transfers of one kind: all of them have the same rate at any moment."""

    each: float
    together: float
    count: int = 0
    rate: float = 0.0
    had: float = 0.0  # bytes that a transfer has had that was there from the beginning
    carried: float = 0.0
    queue: list[tuple[float, int, Transfer]] = field(default_factory=list)

    @property
    def most(self) -> float:
        """The most that a transfer of it may have now, in bytes per second."""
        return min(self.each, self.together / self.count)


class Link:
    """A capacity shared fairly (max-min) by transfers, of kinds that are limited by themselves as well.

    Args:
        events: the clock.
        bytes_per_second: of all transfers together.
        kinds: of each kind the most bytes per second of one transfer, and of all of its transfers.
    """

    def __init__(self, events: Events, bytes_per_second: float, kinds: dict[str, tuple[float, float]]):
        self._events = events
        self._bytes_per_second = bytes_per_second
        self._kinds = {name: _Kind(*limits) for name, limits in kinds.items()}
        self._numbers = itertools.count()
        self._last = 0.0
        self._version = 0

    def start(self, kind: str, size: float, done: Act) -> Transfer:
        """Begin a transfer; `done` is called when its last byte has arrived."""
        self._advance()
        of = self._kinds[kind]
        transfer = Transfer(kind, of.had, of.had + size, done)
        heapq.heappush(of.queue, (transfer.ends_at, next(self._numbers), transfer))
        of.count += 1
        self._share()
        return transfer

    def stop(self, transfer: Transfer) -> float:
        """Break a transfer off, if it is under way; the bytes that it has carried in vain."""
        if not transfer.is_under_way:
            return 0.0
        self._advance()
        transfer.is_under_way = False
        of = self._kinds[transfer.kind]
        of.count -= 1
        self._share()
        return of.had - transfer.begins_at

    def carried(self, kind: str) -> float:
        """The bytes that all transfers of a kind have carried by now."""
        self._advance()
        return self._kinds[kind].carried

    def _advance(self) -> None:
        seconds = self._events.now - self._last
        self._last = self._events.now
        for of in self._kinds.values():
            if of.count:
                of.had += of.rate * seconds
                of.carried += of.rate * of.count * seconds

    def _share(self) -> None:
        """Give each kind its rate: who is limited by himself first, what he leaves to the others."""
        busy = sorted((of for of in self._kinds.values() if of.count), key=lambda of: of.most)
        free, transfers = self._bytes_per_second, sum(of.count for of in busy)
        for of in busy:
            of.rate = min(of.most, free / transfers)
            free -= of.rate * of.count
            transfers -= of.count
        self._version += 1
        version = self._version
        first = [
            (head.ends_at - of.had) / of.rate
            for of in busy
            if of.rate > 0 and (head := self._first(of)) is not None
        ]
        if first:
            self._events.after(min(first), lambda: self._arrive(version))

    def _arrive(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        arrived: list[Transfer] = []
        for of in self._kinds.values():
            # What rounding leaves, of a transfer or of a moment, isn't waited for.
            left = 1.0 + of.rate * 1e-6
            while (head := self._first(of)) is not None and head.ends_at - of.had < left:
                head.is_under_way = False
                of.count -= 1
                arrived.append(head)
        self._share()
        for transfer in arrived:
            transfer.done()

    @staticmethod
    def _first(of: _Kind) -> Transfer | None:
        while of.queue and not of.queue[0][2].is_under_way:
            heapq.heappop(of.queue)
        return of.queue[0][2] if of.queue else None


class Limit:
    """A store that answers so many requests a second, in turn, and refuses what would wait too long.

    Args:
        events: the clock.
        per_second: how many.
        patience_seconds: how long a request may wait.

    Attributes:
        asked, refused: requests until now.
    """

    def __init__(self, events: Events, per_second: float, patience_seconds: float):
        self._events = events
        self._per_second = per_second
        self._patience_seconds = patience_seconds
        self._free_at = 0.0
        self.asked = self.refused = 0.0

    def seconds_for(self, count: float) -> float:
        """Ask so often; the seconds until the last of them is served, without end if they are refused."""
        now = self._events.now
        self.asked += count
        if self._free_at - now > self._patience_seconds:
            self.refused += count
            return math.inf
        self._free_at = max(self._free_at, now) + count / self._per_second
        return self._free_at - now
