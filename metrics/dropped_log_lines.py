"""Show how many lines of a process are missing in its log."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from .exposition import PREFIX


class DroppedLogLines(Collector):
    """Shows `count`, which is asked at each scrape: a process has one log, whatever it relays."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count

    def collect(self) -> Iterable[Family]:
        """Return the family with its one sample."""
        name, meaning = f"{PREFIX}log_lines_dropped", "Log lines that could not be written."
        return (CounterMetricFamily(name, meaning, value=self._count()),)
