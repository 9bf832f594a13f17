"""Count and measure what is on the path of many frames: prometheus_client's metrics lock each time.

One thread counts and observes, and the same one is scraped.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Generic, TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

Child = TypeVar("Child")


class CounterChild:
    """The count of one label set. Where each call counts, add to `value` directly."""

    __slots__ = ("_name", "requests", "value")

    def __init__(self, name: str) -> None:
        self._name = name
        self.value = 0.0
        self.requests = 0.0
        """How many requests it is of, where that is counted; it is not exposed."""

    def inc(self, amount: float = 1) -> None:
        """Add `amount`, 0 or more."""
        self.value += amount

    def collect(self) -> Iterable[Family]:
        """Return the family with its one sample, without labels."""
        return (CounterMetricFamily(self._name, "", value=self.value),)


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


class LockFreeMetric(Collector, Generic[Child]):
    """A labelled metric with those parts of prometheus_client's that are of use here."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labelnames: Sequence[str],
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.name, self.documentation, self.labelnames = name, documentation, tuple(labelnames)
        self._children: dict[tuple[str, ...], Child] = {}
        if registry is not None:
            registry.register(self)

    def labels(self, *values: str) -> Child:
        """Return the child for these label values. Raises ValueError unless each has one."""
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self.labelnames):
                raise ValueError(f"{len(values)} label values for {self.labelnames}")
            child = self._children[values] = self.make_child()
        return child

    def remove(self, *values: str) -> None:
        """Expose a child no longer."""
        self._children.pop(values, None)

    def describe(self) -> Iterable[Family]:
        """Return the family without samples."""
        return (self.family({}),)

    def collect(self) -> Iterable[Family]:
        """Return the family with all samples."""
        return (self.family(self._children),)

    @abstractmethod
    def make_child(self) -> Child:
        """Return a child that has counted nothing."""

    @abstractmethod
    def family(self, children: Mapping[tuple[str, ...], Child]) -> Family:
        """Return the family with the samples of these children, by their label values."""


class LockFreeCounter(LockFreeMetric[CounterChild]):
    """A labelled counter."""

    def make_child(self) -> CounterChild:
        """Return a child that has counted nothing."""
        return CounterChild(self.name)

    def family(self, children: Mapping[tuple[str, ...], CounterChild]) -> Family:
        """Return the family with the samples of these children, by their label values."""
        family = CounterMetricFamily(self.name, self.documentation, labels=self.labelnames)
        for values, child in children.items():
            family.add_metric(values, child.value)
        return family


class LockFreeHistogram(LockFreeMetric[HistogramChild]):
    """A labelled histogram. Raises ValueError unless `buckets` ascend, or when there are none."""

    def __init__(self, *args: Any, buckets: Sequence[float], **options: Any) -> None:
        self._bounds = tuple(map(float, buckets))
        if not self._bounds or list(self._bounds) != sorted(set(self._bounds)):
            raise ValueError(f"buckets must ascend, not be {buckets!r}")
        super().__init__(*args, **options)

    def make_child(self) -> HistogramChild:
        """Return a child that has counted nothing."""
        return HistogramChild(self._bounds)

    def family(self, children: Mapping[tuple[str, ...], HistogramChild]) -> Family:
        """Return the family with the samples of these children, by their label values."""
        family = HistogramMetricFamily(self.name, self.documentation, labels=self.labelnames)
        for values, child in children.items():
            family.add_metric(values, child.cumulative(), child.total)
        return family
