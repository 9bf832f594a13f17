"""Shows progress and lag of partitions to Prometheus."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from metrics.clock import MS_PER_SECOND
from metrics.exposition import PREFIX
from metrics.instruments import OTHER

from .partition import PartitionProgress
from .query_registry import QueryRegistry

LABELS = ("query", "topic", "partition")

GAUGES = (
    ("partition_position", "Offset below which a query was given everything."),
    ("partition_high_watermark", "Offset behind the last record of the log."),
    ("partition_committed", "Offset below which a query has completed everything."),
    ("partition_lag", "Records between what a query has completed and the log end."),
    ("partition_lag_seconds", "Time for which the oldest record not completed is in the log."),
    ("partition_stuck", "1 while nothing completes although there is lag."),
)
COUNTERS = (
    ("partition_skipped_records_total", "Records that a query did not read."),
    ("partition_refetched_records_total", "Records given to a query that it had before."),
)
SECONDS = 4
"""The gauge that is not added up under `other`: its highest value is shown."""


class ProgressCollector(Collector):
    """A prometheus_client collector: register it, and each scrape reads the registry of queries.

    The first `max_label_sets` partitions (ValueError: below 1) have series of their own, in the
    order in which they came. The others are added up, with OTHER for query, topic and partition.
    Scrape in the registry's thread.
    """

    def __init__(
        self, queries: QueryRegistry, clock_ms: Callable[[], float], max_label_sets: int
    ) -> None:
        if max_label_sets < 1:
            raise ValueError(f"max_label_sets must be 1 or more, not {max_label_sets}")
        self._queries = queries
        self._clock_ms = clock_ms
        self._max_label_sets = max_label_sets

    def collect(self) -> Iterable[Metric]:
        """Return the families of this moment."""
        now_ms = self._clock_ms()
        families: list[GaugeMetricFamily | CounterMetricFamily] = [
            *(GaugeMetricFamily(PREFIX + name, text, labels=LABELS) for name, text in GAUGES),
            *(CounterMetricFamily(PREFIX + name, text, labels=LABELS) for name, text in COUNTERS),
        ]
        others: dict[int, float] = {}
        for number, (query, partition) in enumerate(self._queries.rows()):
            labels = (query, partition.topic, str(partition.partition))
            for index, value in enumerate(_values(partition, now_ms)):
                if value is None:
                    continue
                if number < self._max_label_sets:
                    families[index].add_metric(labels, value)
                elif index == SECONDS:
                    others[index] = max(others.get(index, value), value)
                else:
                    others[index] = others.get(index, 0) + value
        for index, value in others.items():
            families[index].add_metric((OTHER,) * len(LABELS), value)
        text = "Batch reports of queries, by what became of them."
        results = CounterMetricFamily(PREFIX + "spark_reports_total", text, labels=("result",))
        for result, count in self._queries.reports.results.items():
            results.add_metric((str(result),), count)
        return [*families, results]


def _values(partition: PartitionProgress, now_ms: float) -> tuple[float | None, ...]:
    """Return one for each family, None where it is not known."""
    lag_ms = partition.lag_ms(now_ms)
    return (
        partition.position,
        partition.log.high_watermark,
        partition.committed_to,
        partition.lag_records(),
        lag_ms / MS_PER_SECOND if lag_ms is not None else None,
        float(partition.stuck),
        partition.skipped.records,
        partition.refetched_records,
    )
