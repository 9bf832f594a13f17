"""How a metric is sampled and which bound it is held to."""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_WINDOW_MS = 1.0
"""Shortest window: a rate over less than Kafka's own clock tick says nothing."""


@dataclass(frozen=True, slots=True)
class Quota:
    """A bound on a measured value, in the unit of the metric that carries it.

    Raises ValueError when the bound is not a finite number.
    """

    bound: float
    """The largest value allowed, or the smallest for a lower bound."""
    is_upper: bool = True
    """True for an upper bound, False for a lower one."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.bound):
            raise ValueError(f"a quota's bound must be a finite number, got {self.bound!r}")

    @classmethod
    def upper(cls, bound: float) -> Quota:
        """Return a quota that values above `bound` violate."""
        return cls(bound, is_upper=True)

    @classmethod
    def lower(cls, bound: float) -> Quota:
        """Return a quota that values below `bound` violate."""
        return cls(bound, is_upper=False)

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
    """How many windows a measurement looks back on, 1 or more."""
    window_ms: float = 1000.0
    """Length of one window."""
    event_window: int | None = None
    """A window also ends after this many events; None for no such limit."""
    quota: Quota | None = None
    """The bound on the measured value; None for no bound."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples must be 1 or more, got {self.samples!r}")
        if not (math.isfinite(self.window_ms) and self.window_ms >= MIN_WINDOW_MS):
            raise ValueError(
                f"window_ms must be finite and at least {MIN_WINDOW_MS:g}, got {self.window_ms!r}"
            )
        if self.event_window is not None and self.event_window < 1:
            raise ValueError(f"event_window must be 1 or more, got {self.event_window!r}")
