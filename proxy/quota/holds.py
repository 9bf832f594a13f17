"""What a sensor's responses were held for of late, and whether its clients count as throttled."""

import math

from metrics import Count, MetricConfig, WindowedSum

LAST_MINUTE = MetricConfig(samples=12, window_ms=5000.0)
"""Sums reach back a minute, and up to one window further."""

QUIET_MS = 30_000.0
"""A client that is not held for this long is throttled no more. Longer than most single holds, so
that a steadily throttled client begins once and ends once."""


class Holds:
    """The holds of one sensor; made at its first one."""

    __slots__ = ("_count", "_total", "throttled", "until_ms")

    def __init__(self) -> None:
        self._count = Count()
        self._total = WindowedSum()
        self.until_ms = -math.inf
        """When the latest hold ends; it may lie in the past."""
        self.throttled = False
        """From the first hold until `QUIET_MS` after the end of the last one; kept by `add` and
        `end_if_quiet`."""

    def add(self, hold_ms: float, due_ms: float, now_ms: float) -> bool:
        """Take a hold in; return whether throttling begins with it."""
        self._count.record(LAST_MINUTE, 1.0, now_ms)
        self._total.record(LAST_MINUTE, hold_ms, now_ms)
        self.until_ms = max(self.until_ms, due_ms)
        begins = not self.throttled
        self.throttled = True
        return begins

    def end_if_quiet(self, now_ms: float) -> bool:
        """Return whether throttling ends now."""
        if self.throttled and now_ms - self.until_ms >= QUIET_MS:
            self.throttled = False
            return True
        return False

    def count(self, now_ms: float) -> int:
        """Return how many holds began in the last minute."""
        return int(self._count.measure(LAST_MINUTE, now_ms))

    def total_ms(self, now_ms: float) -> float:
        """Return for how long the holds that began in the last minute were to last, added up."""
        return self._total.measure(LAST_MINUTE, now_ms)
