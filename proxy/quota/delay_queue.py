"""Release held responses when they are due, in order, each exactly once, without polling."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from metrics.clock import MS_PER_SECOND

COMPACT_QUEUE_AT = 64
"""A heap shorter than this is never compacted."""

SHORTEST_PAUSE_MS = 1.0
"""Between two releases by one reaper. What comes due within it goes out together: a timer for each
of thousands would cost more than its release."""

MAX_RELEASED = 50
"""By one reaper in a round of the event loop, so that others come in between when thousands are
due."""

Release = Callable[[], None]


@dataclass(slots=True, eq=False)
class DelayedResponse:
    """One held response, waiting in a `DelayQueue` until `due_ms` on the queue's clock."""

    left: Callable[[], None]
    """Tells the queue that it leaves."""
    due_ms: float
    release: Release | None
    """None once the entry was released or cancelled."""

    @property
    def waiting(self) -> bool:
        """True until the entry was released or cancelled."""
        return self.release is not None

    def cancel(self) -> Release | None:
        """Leave the queue at once; return the callback, or None if it had left already."""
        release, self.release = self.release, None
        if release is not None:
            self.left()
        return release

    def release_now(self) -> None:
        """Release before it is due; does nothing when it has left the queue."""
        release = self.cancel()
        if release is not None:
            release()


NOT_DELAYED = DelayedResponse(lambda: None, -math.inf, None)
"""Stands for what waits for nothing."""


@dataclass(slots=True, eq=False)
class DelayQueue:
    """Held responses of one API family, by due time, and then in order of arrival, with one timer.

    `call_at` calls back at a time of the monotonic clock, or at once when it has passed, and
    returns what cancels that; `on_late` gets for each entry how many seconds after its due time it
    is released. Adding and releasing costs O(log n), cancelling O(1), amortised. Not thread-safe.
    """

    api: str
    _clock_ms: Callable[[], float]
    _call_at: Callable[[float, Callable[[], None]], Callable[[], None]]
    _on_late: Callable[[float], None]
    _heap: list[tuple[float, int, DelayedResponse]] = field(default_factory=list)
    """Cancelled entries stay in it until they surface or the heap is compacted."""
    _size: int = 0
    _sequence: int = 0
    _cancel_timer: Callable[[], None] | None = None
    _armed_for_ms: float = math.inf
    _released_ms: float = -math.inf

    def __len__(self) -> int:
        return self._size

    @property
    def next_due_ms(self) -> float | None:
        """The earliest due time, or None when nothing is held."""
        while self._heap and not self._heap[0][2].waiting:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def add(self, due_ms: float, release: Release) -> DelayedResponse:
        """Hold a response until `due_ms`, then call `release` once."""
        delayed = DelayedResponse(self._count_left, due_ms, release)
        heappush(self._heap, (due_ms, self._sequence, delayed))
        self._sequence += 1
        self._size += 1
        if due_ms < self._armed_for_ms:
            self._arm()
        return delayed

    def release_due(self, now_ms: float, most: int | None = None) -> int:
        """Run the callback of each entry with `due_ms <= now_ms`, in order; return how many ran.

        What a callback adds waits for the next call. At most `most` entries leave the queue. Raises
        ExceptionGroup when some failed; the others ran regardless.
        """
        due: list[DelayedResponse] = []
        while self._heap and self._heap[0][0] <= now_ms and len(due) != most:
            due.append(heappop(self._heap)[2])
        released = 0
        errors: list[Exception] = []
        for delayed in due:
            release = delayed.cancel()
            if release is None:
                continue
            released += 1
            if now_ms < math.inf:
                self._on_late((now_ms - delayed.due_ms) / MS_PER_SECOND)
            try:
                release()
            except Exception as error:  # one response must not keep the others
                errors.append(error)
        if errors:
            raise ExceptionGroup(f"releasing {self.api} responses failed", errors)
        return released

    def release_all(self) -> None:
        """Release everything now, in order of due time, for a shutdown."""
        try:
            self.release_due(math.inf)
        finally:
            self._arm()

    def _count_left(self) -> None:
        """Count an entry no longer, and make room once most of the heap is dead."""
        self._size -= 1
        if len(self._heap) >= COMPACT_QUEUE_AT and self._size * 2 < len(self._heap):
            self._heap[:] = [entry for entry in self._heap if entry[2].waiting]
            heapify(self._heap)

    def _wake(self) -> None:
        self._cancel_timer = None
        self._armed_for_ms = -math.inf  # what is added meanwhile sets no timer
        try:
            if self.release_due(self._clock_ms(), MAX_RELEASED):
                self._released_ms = self._clock_ms()
        finally:
            self._armed_for_ms = math.inf
            self._arm()

    def _arm(self) -> None:
        next_due_ms = self.next_due_ms
        if next_due_ms == self._armed_for_ms:
            return
        if self._cancel_timer is not None:
            self._cancel_timer()
        self._cancel_timer = None
        self._armed_for_ms = math.inf
        if next_due_ms is not None:
            self._armed_for_ms = next_due_ms
            # What is due by the end of a release does not wait: a turn at a gate that it gave.
            if next_due_ms > self._released_ms:
                next_due_ms = max(next_due_ms, self._released_ms + SHORTEST_PAUSE_MS)
            self._cancel_timer = self._call_at(next_due_ms, self._wake)
