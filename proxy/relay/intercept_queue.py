"""Has frames that the lane has sent on shown a little later, a few connections at a time."""

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from metrics.clock import MS_PER_SECOND, clock_ms

SHOW_AFTER_MS = 250.0
"""For so long at most frames wait to be shown: the more of a connection, the less each takes."""

LOOK_EVERY_MS = 5.0
MOST_MS = 2.0
"""For how long they are shown at a time, while connections are served in between."""

MOST_UNSHOWN_BYTES = 4 << 20
"""Of all that wait; beyond that no time is left in between."""


@dataclass(slots=True, eq=False)
class InterceptQueue:
    """The frames of all connections that wait to be shown."""

    _call_later: Callable[[float, Callable[[], None]], object]
    """Calls after so many seconds."""
    _clock_ms: Callable[[], float] = clock_ms
    _is_called: bool = False
    cells: "array[int]" = field(default_factory=lambda: array("q", (0,)))
    """Their bytes."""
    waiting: deque[tuple[float, Callable[[], None]]] = field(default_factory=deque)
    """Since when, in the order of these times; some have been shown already. For reading."""

    def add(self, since_ms: float, show: Callable[[], None]) -> None:
        """Have the frames of a connection shown, of which the first came then."""
        self.waiting.append((since_ms, show))
        if not self._is_called:
            self._call_again(LOOK_EVERY_MS)

    def showing(self) -> Iterator[None]:
        """Show all that wait when it begins, a connection in each step."""
        for _ in range(len(self.waiting)):
            if not self.waiting:
                return
            self.waiting.popleft()[1]()
            yield

    def _call_again(self, after_ms: float) -> None:
        self._is_called = True
        self._call_later(after_ms / MS_PER_SECOND, self._show_some)

    def _show_some(self) -> None:
        self._is_called = False
        waiting, began_ms = self.waiting, self._clock_ms()
        due_ms, bytes_of = began_ms - SHOW_AFTER_MS, self.cells
        while waiting and (bytes_of[0] > MOST_UNSHOWN_BYTES or waiting[0][0] <= due_ms):
            if bytes_of[0] <= MOST_UNSHOWN_BYTES and self._clock_ms() > began_ms + MOST_MS:
                self._call_again(0.0)
                return
            waiting.popleft()[1]()
        if waiting:
            self._call_again(LOOK_EVERY_MS)
