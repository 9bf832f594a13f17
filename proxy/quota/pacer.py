"""The schedule that keeps one sensor's traffic at its bound."""

import math
from dataclasses import dataclass

from metrics.clock import MS_PER_SECOND

MAX_CARRY_MS = 3_600_000.0
"""What a client owes is forgotten beyond an hour, as its sensor is after an idle one."""

LARGE_DEBT_MS = 2000.0
"""A client that owes more goes on slowly until it owes less, so that its heartbeats, which wait
behind what is held, still arrive."""

REPAYING_SHARE = 0.05
"""Of the bound: what such a client still gets. The rest of it works the debt off."""


def throttle_time_ms(rate: float, bound: float, window_ms: float) -> int:
    """Return the whole milliseconds without traffic that bring `rate` down to `bound`; 0 if kept.

    Kafka's formula (`QuotaUtils.throttleTime`): 11 MB/s over 5 s against 10 MB/s gives 500 ms.
    """
    return max(0, round((rate - bound) / bound * window_ms))


@dataclass(slots=True)
class Pacer:
    """Schedules the traffic of one sensor so that it flows at the bound.

    Kafka's formula alone counts bytes when they are asked for. While they are held they leave the
    window, so with many connections the client gets up to twice its bound. And what a client takes
    at once after a quiet time is never paid back. Here the formula decides when throttling begins.
    The schedule knows what all traffic costs at the bound, from before that, too: the virtual
    scheduling algorithm of ITU-T I.371 (GCRA) with a tolerance of `burst_ms`. So no time of T
    seconds carries more than T + burst seconds' worth of the bound, but for what passes before the
    formula finds the client above it, and that is worked off.

    A client that has saved up its burst and is below the bound is judged by the formula again.
    """

    bound: float
    """Per second; above 0."""
    burst_ms: float
    """How much of its bound a client may save up; 0 or more."""
    carry_ms: float = MAX_CARRY_MS
    """What is owed beyond that is forgotten; above 0."""
    due_ms: float = -math.inf
    """When all that was charged has flowed at the bound; what is owed is this less the time."""
    next_ms: float = -math.inf
    """When what is charged next may flow: `due_ms`, or earlier while much is owed."""
    is_pacing: bool = False
    """Whether the schedule decides, and not the formula."""
    strict_until_ms: float = -math.inf
    """Until then the schedule decides for sure: the client may be at several members at once, or
    the formula knows nothing of a bound that was raised. Infinite where no credit of the formula is
    wanted."""
    loan_ms: float = 0.0
    """Until then the formula decides no longer once more of the bound is owed."""
    forgives_ms: float = math.inf
    """When a large debt is forgiven that has become so large by a lower bound."""

    def charge(self, size: float, throttle_ms: float, now_ms: float) -> float:
        """Add traffic; return its hold. `throttle_ms` is what the formula says, with it."""
        size_ms = size / self.bound * MS_PER_SECOND
        is_strict = now_ms < self.strict_until_ms
        if now_ms >= self.forgives_ms:
            self.forgives_ms = math.inf
            self.due_ms = min(self.due_ms, now_ms + LARGE_DEBT_MS)
        earliest_ms = now_ms - self.burst_ms
        if self.due_ms < earliest_ms:
            self.due_ms = earliest_ms
            self.is_pacing &= throttle_ms > 0 or is_strict
        self.due_ms += size_ms
        self.due_ms = min(self.due_ms, now_ms + self.carry_ms)
        if self.is_pacing:
            if self.due_ms - now_ms > LARGE_DEBT_MS:
                slowly_ms = max(self.next_ms, now_ms) + size_ms / REPAYING_SHARE
                self.next_ms = min(self.due_ms, slowly_ms)
            else:
                self.next_ms = self.due_ms
        elif throttle_ms > 0 or (is_strict and self.due_ms - now_ms > self.loan_ms):
            self.is_pacing = True
            self.next_ms = now_ms + min(throttle_ms, self.carry_ms)
            self.due_ms = max(self.due_ms, self.next_ms)
        else:
            return 0.0
        return max(self.next_ms - now_ms, 0.0)

    def owed_ms(self, now_ms: float) -> float:
        """Return for how long what is charged next waits for what was charged before; 0 or more."""
        return max(self.next_ms - now_ms, 0.0) if self.is_pacing else 0.0

    def allowance_ms(self, now_ms: float) -> float:
        """Return how much of the bound may pass at once, as far as the formula lets it."""
        is_strict = now_ms < self.strict_until_ms
        return self.loan_ms - (self.due_ms - now_ms) if is_strict else math.inf

    def is_as_new(self, now_ms: float) -> bool:
        """Return whether a schedule that owes nothing could as well begin now."""
        if self.strict_until_ms > -math.inf:
            return now_ms >= self.strict_until_ms or self.strict_until_ms == math.inf
        return not self.is_pacing

    def pace_immediately(self, until_ms: float, now_ms: float) -> None:
        """Have the schedule decide for sure until then; nothing is owed that was not before."""
        self.strict_until_ms = max(self.strict_until_ms, until_ms)
        if not self.is_pacing:
            self.is_pacing = True
            self.due_ms = self.next_ms = min(self.due_ms, now_ms)

    def debt_ms(self, now_ms: float) -> float:
        """Return in how long all that was charged has flowed; 0 while the formula decides."""
        return max(self.due_ms - now_ms, 0.0) if self.is_pacing else 0.0

    def owe(self, owed_ms: float, held_ms: float, now_ms: float) -> None:
        """Owe at least so much, if that is carried; much goes slowly when `held_ms` have passed."""
        owed_ms = min(owed_ms, self.carry_ms)
        if owed_ms <= self.debt_ms(now_ms):
            return
        slowly_ms = max(self.next_ms, now_ms + min(held_ms, owed_ms))
        self.is_pacing, self.due_ms = True, now_ms + owed_ms
        self.next_ms = slowly_ms if owed_ms > LARGE_DEBT_MS else self.due_ms

    def begin(self, rate: float, now_ms: float) -> None:
        """Pace a client that was not held until now from this moment on; it owes nothing."""
        if rate > self.bound or now_ms < self.strict_until_ms:
            self.is_pacing = True
            self.due_ms = self.next_ms = now_ms

    def end(self) -> None:
        """Forget what is owed."""
        self.is_pacing = False
        self.due_ms = self.next_ms = -math.inf

    def change(self, bound: float, burst_ms: float, now_ms: float) -> None:
        """Set what a schedule keeps that decides alone. What is owed is a number of bytes."""
        if self.due_ms > now_ms:
            self.due_ms = now_ms + (self.due_ms - now_ms) * self.bound / bound
        self.bound, self.burst_ms = bound, burst_ms

    def raise_bound(
        self, bound: float, allowance_ms: float, strict_until_ms: float, now_ms: float
    ) -> None:
        """Set a higher bound, which helps at once: what is owed takes less time.

        Its own credit the formula gives from `strict_until_ms` on, when it sees no more of the time
        before: what then passes is what both bounds allow. `allowance_ms` of the lower one it still
        let pass at once.
        """
        share = self.bound / bound
        is_strict = now_ms < self.strict_until_ms
        owed_ms = max(self.due_ms - now_ms, -self.burst_ms) * share
        if self.due_ms < now_ms - self.burst_ms:  # as `charge` would find it
            self.is_pacing &= allowance_ms <= 0 or is_strict
        if not self.is_pacing:
            loan_ms = owed_ms + max(allowance_ms, 0.0) * share
            self.loan_ms = min(loan_ms, self.loan_ms * share) if is_strict else loan_ms
        self.strict_until_ms = max(self.strict_until_ms, strict_until_ms)
        self.forgives_ms = math.inf
        self.due_ms = now_ms + owed_ms
        self.next_ms = now_ms + (self.next_ms - now_ms) * share
        self.bound = bound

    def lower_bound(self, bound: float, rate: float, forgives_ms: float, now_ms: float) -> None:
        """Set a lower bound; what was right under the higher one is not punished.

        A client that the formula judges, and finds above it at this `rate`, is paced from now on
        and owes nothing. What others owe is a number of bytes. If they take long now, the client
        goes on slowly, and owes little from `forgives_ms` on: when the rate looks back no further.
        """
        if self.is_pacing or now_ms < self.strict_until_ms:
            share = self.bound / bound
            if self.due_ms > now_ms:
                self.due_ms = now_ms + (self.due_ms - now_ms) * share
            else:  # of what was saved up as much stays as the formula would give
                free = max(1.0 - rate / bound, 0.0)
                self.due_ms = max(self.due_ms, now_ms - free * (forgives_ms - now_ms))
            self.loan_ms *= share
            if self.due_ms - now_ms > LARGE_DEBT_MS:
                self.forgives_ms = forgives_ms
            else:
                self.next_ms = self.due_ms
            self.bound = bound
        else:
            self.due_ms = min(self.due_ms, now_ms)
            self.bound = bound
            self.begin(rate, now_ms)
