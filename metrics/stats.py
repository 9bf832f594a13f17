"""Turn single recorded values into sums and rates over the recent past.

The rules are those of Apache Kafka's `SampledStat` and `Rate` since 3.8 (its change 15889): of a
ring of samples, each of which covers one window of time, one is dropped when its *last event* is
`samples * window` old, not its start. That would make the rate dip at each rollover.

Every `now_ms` is monotonic and must not go back. One thread: measuring drops old samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from metrics.clock import MS_PER_SECOND

CERTAIN_PART = 0.999
"""Of what a bound leaves free: the rest is for the rounding of sums."""

MIN_WINDOW_MS = 1.0
"""Shortest window: a rate over less than Kafka's own clock tick says nothing."""


@dataclass(frozen=True, slots=True)
class Quota:
    """A bound on a measured value. Raises ValueError when it is not a finite number."""

    bound: float
    is_upper: bool = True
    """Whether the bound is the largest value allowed; else it is the smallest."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.bound):
            raise ValueError(f"a quota's bound must be a finite number, got {self.bound!r}")

    def accepts(self, value: float) -> bool:
        """Return whether `value` is within the bound; the bound itself is."""
        return value <= self.bound if self.is_upper else value >= self.bound


@dataclass(frozen=True, slots=True)
class MetricConfig:
    """Sampling of one metric; the defaults are Kafka's for client quotas.

    Raises ValueError when `samples` or `event_window` is below 1, or `window_ms` below
    MIN_WINDOW_MS or not finite.
    """

    samples: int = 11
    """How many windows a measurement looks back on."""
    window_ms: float = 1000.0
    event_window: int | None = None
    """A window also ends after this many events; None for no such limit."""
    quota: Quota | None = None

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples must be 1 or more, got {self.samples!r}")
        if not (math.isfinite(self.window_ms) and self.window_ms >= MIN_WINDOW_MS):
            raise ValueError(
                f"window_ms must be finite and at least {MIN_WINDOW_MS:g}, got {self.window_ms!r}"
            )
        if self.event_window is not None and self.event_window < 1:
            raise ValueError(f"event_window must be 1 or more, got {self.event_window!r}")


class Sample:
    """What happened in one window."""

    __slots__ = ("events", "last_event_ms", "start_ms", "value")

    def __init__(self, now_ms: float) -> None:
        self.reset(now_ms)

    def reset(self, now_ms: float) -> None:
        """Begin a new window."""
        self.value = 0.0
        self.events = 0
        self.start_ms = now_ms
        self.last_event_ms = now_ms


class Headroom:
    """What a sum takes in without a measurement until a sample is complete or obsolete."""

    __slots__ = ("_config", "_end_ms", "_sample", "_stat", "free")

    def __init__(self, stat: WindowedSum, sample: Sample, end_ms: float, free: float) -> None:
        self._stat, self._config = stat, stat.config
        self._sample = sample
        self._end_ms = end_ms
        self.free = free
        """What is left of it."""

    def is_over(self, now_ms: float) -> bool:
        """Return whether its time has come, or the stat has another configuration now."""
        return now_ms >= self._end_ms or self._stat.config is not self._config

    def record(self, value: float, now_ms: float) -> bool:
        """Record `value` as the stat itself does if that keeps the quota; return whether so."""
        if value > self.free or now_ms >= self._end_ms or self._stat.config is not self._config:
            return False
        sample = self._sample
        self.free -= value
        sample.value += value
        sample.events += 1
        sample.last_event_ms = now_ms
        return True


class WindowedSum:
    """The sum of the recent values, in a ring of samples; 0 when there are none."""

    __slots__ = ("_current", "_earliest_event_ms", "_oldest_start_ms", "_samples", "config")

    def __init__(self, config: MetricConfig) -> None:
        self.config = config
        """May be replaced at any time: a new quota holds at once and the history stays. New
        samples or windows hold for what comes; the old history has gone after `samples` windows.
        """
        self._samples: list[Sample] = []
        self._current = 0
        # Both are kept up to date by _refresh(), so that a record between two rollovers needs
        # no walk over the ring. _earliest_event_ms may lag behind: events only move forward.
        self._oldest_start_ms = math.inf
        self._earliest_event_ms = math.inf

    def record(self, value: float, now_ms: float) -> None:
        """Add `value` to the current sample; first start a new one if that is complete."""
        config = self.config
        sample = self._samples[self._current] if self._samples else self._append(now_ms)
        if now_ms - sample.start_ms >= config.window_ms or (
            config.event_window is not None and sample.events >= config.event_window
        ):
            sample = self._advance(now_ms)
        sample.value += value
        sample.events += 1
        sample.last_event_ms = now_ms

    def measure(self, now_ms: float) -> float:
        """Drop obsolete samples and return the sum of the others."""
        self._purge(now_ms)
        total = 0.0
        for sample in self._samples:  # faster than sum() over a generator
            total += sample.value
        return total

    def events(self, now_ms: float) -> int:
        """Drop obsolete samples and return how many values the others have."""
        self._purge(now_ms)
        return sum(sample.events for sample in self._samples)

    def room(self, now_ms: float) -> Headroom | None:  # noqa: ARG002
        """Return what can be recorded for certain before the quota must be checked, if known."""
        return None

    def _purge(self, now_ms: float) -> None:
        """Reset each sample whose last event is `samples * window_ms` old or older."""
        expiry_ms = self.config.samples * self.config.window_ms
        if now_ms - self._earliest_event_ms < expiry_ms:
            return
        for sample in self._samples:
            if now_ms - sample.last_event_ms >= expiry_ms:
                sample.reset(now_ms)
        self._refresh()

    def _append(self, now_ms: float) -> Sample:
        sample = Sample(now_ms)
        self._samples.append(sample)
        self._refresh()
        return sample

    def _advance(self, now_ms: float) -> Sample:
        # One slot more than `samples`, for the sample that reaches into the measured time.
        self._current = (self._current + 1) % (self.config.samples + 1)
        if self._current >= len(self._samples):
            return self._append(now_ms)
        sample = self._samples[self._current]
        sample.reset(now_ms)
        self._refresh()
        return sample

    def _refresh(self) -> None:
        self._oldest_start_ms = min(sample.start_ms for sample in self._samples)
        self._earliest_event_ms = min(sample.last_event_ms for sample in self._samples)


class Rate(WindowedSum):
    """The sum of the recent values per second.

    The divisor is Kafka's `Rate.windowSize`: the time since the oldest sample began, filled up to
    `samples - 1` whole windows, so that a fresh stat reports no huge rate for its first value.
    """

    __slots__ = ()

    def room(self, now_ms: float) -> Headroom | None:
        """Return it: until a sample is complete the rate is over no less time; values only go."""
        config, quota = self.config, self.config.quota
        if config.event_window is not None or quota is None or not quota.is_upper:
            return None
        if not self._samples:
            return None
        total = WindowedSum.measure(self, now_ms)
        # Of fewer windows it counts `samples - 1` at least, and may count more for a moment.
        least_ms = max((config.samples - 1) * config.window_ms, now_ms - self._oldest_start_ms)
        free = quota.bound * least_ms / MS_PER_SECOND - total
        sample = self._samples[self._current]
        obsolete_ms = self._earliest_event_ms + config.samples * config.window_ms
        end_ms = min(sample.start_ms + config.window_ms, obsolete_ms)
        return Headroom(self, sample, end_ms, free * CERTAIN_PART)

    def measure(self, now_ms: float) -> float:
        """Return the rate per second."""
        total = WindowedSum.measure(self, now_ms)
        return total * MS_PER_SECOND / self.window_size_ms(now_ms)

    def window_size_ms(self, now_ms: float) -> float:
        """Return the time that the rate is taken over, at least MIN_WINDOW_MS; it is never 0."""
        config = self.config
        self._purge(now_ms)
        if not self._samples:
            self._append(now_ms)  # an empty stat begins its first sample now
        window_ms = config.window_ms
        elapsed_ms = now_ms - self._oldest_start_ms
        missing = config.samples - 1 - elapsed_ms // window_ms
        if missing > 0:
            elapsed_ms += missing * window_ms
        return elapsed_ms if elapsed_ms >= MIN_WINDOW_MS else window_ms
