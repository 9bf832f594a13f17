"""Count what is on the path of every byte: prometheus_client's counters lock, and check, each time.

One thread counts, and the same one is scraped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.metrics_core import Metric as Family


class CounterChild:
    """The count of one label set. Where each call counts, add to `value` directly."""

    __slots__ = ("_name", "value")

    def __init__(self, name: str) -> None:
        self._name = name
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add `amount`, 0 or more."""
        self.value += amount

    def collect(self) -> Iterable[Family]:
        """Return the family with its one sample, without labels."""
        return (CounterMetricFamily(self._name, "", value=self.value),)


class LockFreeCounter:
    """A labelled counter, with those parts of prometheus_client's that `BoundedLabels` uses."""

    def __init__(
        self, name: str, documentation: str, labelnames: Sequence[str], registry: None = None
    ) -> None:
        assert registry is None, "BoundedLabels is registered, and not the counter"
        self._name = name
        self._documentation = documentation
        self._labelnames = labelnames
        self._children: dict[tuple[str, ...], CounterChild] = {}

    def labels(self, *values: str) -> CounterChild:
        """Return the child for these label values, the same one each time.

        Raises ValueError when they are not as many as the labels.
        """
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self._labelnames):
                raise ValueError(f"{len(values)} label values for {self._labelnames}")
            child = self._children[values] = CounterChild(self._name)
        return child

    def remove(self, *values: str) -> None:
        """Expose a child no longer."""
        self._children.pop(values, None)

    def describe(self) -> Iterable[Family]:
        """Return the family without samples."""
        return (CounterMetricFamily(self._name, self._documentation, labels=self._labelnames),)
