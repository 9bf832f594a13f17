"""Count and measure what is on the path of many frames: prometheus_client's metrics lock each time.

One thread counts and observes, and the same one is scraped.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.utils import floatToGoString

VALUE, REQUESTS = range(2)  # in the cells of a counter


class CounterChild:
    """The count of one label set. Where each call counts, add to `cells` directly."""

    __slots__ = ("_name", "cells")

    def __init__(self, name: str) -> None:
        self._name = name
        self.cells = array("d", (0.0, 0.0))
        """`value` and `requests`."""

    @property
    def value(self) -> float:
        """What was counted."""
        return self.cells[VALUE]

    @property
    def requests(self) -> float:
        """How many requests it is of; it is not exposed."""
        return self.cells[REQUESTS]

    def inc(self, amount: float = 1) -> None:
        """Add `amount`, 0 or more."""
        self.cells[VALUE] += amount

    def collect(self) -> Iterable[Family]:
        """Return the family with its one sample, without labels."""
        return (CounterMetricFamily(self._name, "", value=self.value),)


class HistogramChild:
    """The histogram of one label set. Raises ValueError unless there are bounds, which ascend."""

    __slots__ = ("_name", "bounds", "counts", "total")

    def __init__(self, name: str, bounds: tuple[float, ...]) -> None:
        if not bounds or list(bounds) != sorted(set(bounds)):
            raise ValueError(f"bounds must ascend, not be {bounds!r}")
        self._name = name
        self.bounds = bounds
        """Upper bounds of all buckets but the last one, which has none."""
        self.counts = [0] * (len(bounds) + 1)
        """Of each bucket by itself."""
        self.total = 0.0
        """Sum of the observed values."""

    def observe(self, amount: float) -> None:
        """Count `amount` in the first bucket whose bound is not below it."""
        self.counts[bisect_left(self.bounds, amount)] += 1
        self.total += amount

    def add(self, other: HistogramChild) -> None:
        """Count what another one with the same bounds has counted."""
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def collect(self) -> Iterable[Family]:
        """Return the family with its samples, without labels."""
        bounds = [*map(floatToGoString, self.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(self.counts), strict=True))
        return (HistogramMetricFamily(self._name, "", buckets, self.total),)
