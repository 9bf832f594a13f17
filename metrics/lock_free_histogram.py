"""Measure what is on the path of many frames: prometheus_client's histograms lock, each time.

One thread observes, and the same one is scraped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString


class HistogramChild:
    """The histogram of one label set."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
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

    def cumulative(self) -> list[tuple[str, int]]:
        """Return the bound of each bucket as it is exposed, and what is not above it."""
        bounds = [*map(floatToGoString, self.bounds), "+Inf"]
        return list(zip(bounds, accumulate(self.counts), strict=True))


class LockFreeHistogram(Collector):
    """A labelled histogram with those parts of prometheus_client's that are of use here.

    Raises ValueError when `buckets` are not in ascending order, or none.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        labelnames: Sequence[str],
        registry: CollectorRegistry | None = None,
        *,
        buckets: Sequence[float],
    ) -> None:
        self._bounds = tuple(map(float, buckets))
        if not self._bounds or list(self._bounds) != sorted(set(self._bounds)):
            raise ValueError(f"buckets must ascend, not be {buckets!r}")
        self._name = name
        self._documentation = documentation
        self._labelnames = tuple(labelnames)
        self._children: dict[tuple[str, ...], HistogramChild] = {}
        if registry is not None:
            registry.register(self)

    def labels(self, *values: str) -> HistogramChild:
        """Return the child for these label values, the same one each time.

        Raises ValueError when they are not as many as the labels.
        """
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self._labelnames):
                raise ValueError(f"{len(values)} label values for {self._labelnames}")
            child = self._children[values] = HistogramChild(self._bounds)
        return child

    def describe(self) -> Iterable[Family]:
        """Return the family without samples."""
        return (self._family(),)

    def collect(self) -> Iterable[Family]:
        """Return the family with all samples."""
        family = self._family()
        for values, child in self._children.items():
            family.add_metric(values, child.cumulative(), child.total)
        return (family,)

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._name, self._documentation, labels=self._labelnames)
