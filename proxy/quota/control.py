"""For how long a response must wait so that its client stays at its bound."""

import math

MS_PER_SECOND = 1000.0

MAX_CARRY_MS = 600_000.0
"""What a client owes is forgotten beyond ten minutes, so that it is never locked out for longer."""

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


class Pacer:
    """Schedules the responses of one sensor so that they leave at the bound.

    Kafka's formula alone counts bytes when they are asked for. While they are held they leave the
    window, so with many connections the client gets up to twice its bound. Here the formula
    decides when throttling begins. From then on each response moves the schedule by the time that
    it takes at the bound, and leaves when the schedule says so: the virtual scheduling algorithm
    of ITU-T I.371 (GCRA). The schedule remembers exactly what was not held, be it for rounding or
    for the longest delay, and for up to `memory_ms` what the client did not use.

    A client that asks for less than its bound falls behind the schedule; after `memory_ms` the
    formula decides again.
    """

    __slots__ = ("bound", "due_ms", "memory_ms")

    def __init__(self, bound: float, memory_ms: float) -> None:
        self.bound = bound
        """Per second; above 0."""
        self.memory_ms = memory_ms
        """How far the schedule may lie in the past; the time that the sensor looks back on."""
        self.due_ms = -math.inf
        """The schedule: when all that was charged has left at the bound."""

    def hold_ms(self, size: float, throttle_ms: float, now_ms: float, max_delay_ms: float) -> int:
        """Add a response to the schedule; return for how many whole milliseconds to hold it.

        Args:
            size: in the unit of the bound, times a second.
            throttle_ms: what the formula says for the sensor, this response included.
            now_ms: the time.
            max_delay_ms: the longest single hold. What is left over stays in the schedule, so the
                bound is kept as long as one round of responses takes no longer than this.

        """
        if self.is_pacing(now_ms):
            due_ms = self.due_ms + size / self.bound * MS_PER_SECOND
        elif throttle_ms > 0:
            due_ms = now_ms + throttle_ms
        else:
            return 0
        self.due_ms = min(due_ms, now_ms + MAX_CARRY_MS)
        return round(min(max(self.due_ms - now_ms, 0.0), max_delay_ms))

    def is_pacing(self, now_ms: float) -> bool:
        """Return whether the schedule decides, and not the formula."""
        return now_ms - self.due_ms <= self.memory_ms

    def change_bound(self, bound: float, rate: float, now_ms: float) -> None:
        """Follow a bound that was changed at run time, from this moment on.

        What was right under the old bound is not punished: a client that the new bound finds
        above it is paced from now on, without the wait that the formula would ask for. What it owes
        or has saved is a number of bytes, which a higher bound makes a shorter time.

        Args:
            bound: the new one.
            rate: what the sensor measures now.
            now_ms: the time.

        """
        if self.is_pacing(now_ms):
            self.due_ms = now_ms + (self.due_ms - now_ms) * min(1.0, self.bound / bound)
        elif rate > bound:
            self.due_ms = now_ms
        self.bound = bound


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
