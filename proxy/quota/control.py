"""Kafka's throttle time, and the brake that an adapted bound puts on reading."""

import math

from metrics.clock import MS_PER_SECOND

MAX_CARRY_MS = 3_600_000.0
"""What a client owes is forgotten beyond an hour, as its sensor is after an idle one."""

SAVED_INTERVALS = 2
"""How many batches an adaptive query may read at once. It reads each batch as fast as it can and
then nothing until the next one: to hold it within that time would only make its batches longer."""

LONGEST_BRAKE = 0.25
"""Batch intervals that a response is held at most because of an adapted bound."""


def throttle_time_ms(rate: float, bound: float, window_ms: float) -> int:
    """Return the whole milliseconds without traffic that bring `rate` down to `bound`.

    Kafka's formula (ClientQuotaManager, `QuotaUtils.throttleTime`): 11 MB/s measured over 5 s
    against a bound of 10 MB/s gives 500 ms. 0 when the bound is kept.

    Args:
        rate: measured, per second, in the unit of the bound.
        bound: above 0.
        window_ms: the time over which the rate was measured.

    """
    return max(0, round((rate - bound) / bound * window_ms))


class Brake:
    """Slows the reading of a query that is given more than it can process, a little at a time.

    A consumer reads ahead: one response may hold the records of many batches, and each wait makes
    a batch longer. So what goes over the bound passes, what follows waits until that is worked off,
    and no response waits for longer than a share of a batch interval. The size of batches is
    shaped where they are planned; this only keeps reading in step.

    Args:
        bound: per second; above 0.
        interval_ms: from one batch to the next.

    """

    __slots__ = ("bound", "due_ms", "interval_ms")

    def __init__(self, bound: float, interval_ms: float) -> None:
        self.bound = bound
        self.interval_ms = interval_ms
        self.due_ms = -math.inf
        """When all that was read before is worked off."""

    def owed_ms(self, now_ms: float) -> float:
        """Return for how long a response that came now would be held."""
        return min(max(self.due_ms - now_ms, 0.0), LONGEST_BRAKE * self.interval_ms)

    def hold_ms(self, size: float, now_ms: float) -> int:
        """Add a response; return for how many whole milliseconds to hold it."""
        owed_ms = self.owed_ms(now_ms)
        before_ms = max(self.due_ms, now_ms - SAVED_INTERVALS * self.interval_ms)
        due_ms = before_ms + size / self.bound * MS_PER_SECOND
        self.due_ms = min(due_ms, now_ms + MAX_CARRY_MS)
        return round(owed_ms)

    def follow(self, bound: float, interval_ms: float, now_ms: float) -> None:
        """Follow another bound; what is to be worked off is a number of bytes."""
        owed_ms = self.due_ms - now_ms
        if owed_ms > 0:
            self.due_ms = now_ms + min(owed_ms * self.bound / bound, MAX_CARRY_MS)
        self.bound, self.interval_ms = bound, interval_ms
