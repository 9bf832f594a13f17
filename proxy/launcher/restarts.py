"""Decide when a worker that has crashed is started again. Sans-I/O."""

from collections import deque

from proxy.member import SETTLED_S

FIRST_DELAY_S, MAX_DELAY_S = 0.1, 5.0
"""Before the second restart in a row, and at most; the first one comes at once."""

LOOP_WINDOW_S, LOOP_CRASHES = 60.0, 5
"""More crashes than that in such a time are a crash loop."""


class Restarts:
    """Of one worker. Times are of a monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._crashes: deque[float] = deque(maxlen=LOOP_CRASHES + 1)
        self._in_a_row = 0
        self.started_s = 0.0
        """Since when it serves."""
        self.count = 0
        """How often it was started again."""
        self.is_looping = False
        """Whether it crashes again and again, as of its last crash."""

    def crashed(self, now_s: float) -> float:
        """Record that it has ended by itself; return after how many seconds to start it again."""
        if now_s - self.started_s >= SETTLED_S:
            self._in_a_row = 0
            if self.is_looping and self.started_s > self._crashes[-1]:
                self.is_looping = False
                self._crashes.clear()
        self._crashes.append(now_s)
        self.count += 1
        if len(self._crashes) > LOOP_CRASHES and now_s - self._crashes[0] <= LOOP_WINDOW_S:
            self.is_looping = True
        delay_s = min(FIRST_DELAY_S * 2 ** (self._in_a_row - 1), MAX_DELAY_S)
        self._in_a_row += 1
        return delay_s if self._in_a_row > 1 else 0.0
