"""Shows progress and lag of partitions to Prometheus."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, cast

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from metrics.clock import MS_PER_SECOND
from metrics.exposition import PREFIX
from metrics.instruments import OTHER

from .partition import PartitionProgress
from .query_registry import QueryRegistry

LABELS = ("query", "topic", "partition")

Value: TypeAlias = float | None
"""None: not known, and not shown."""


def _lag_seconds(partition: PartitionProgress, now_ms: float) -> Value:
    lag_ms = partition.lag_ms(now_ms)
    return lag_ms / MS_PER_SECOND if lag_ms is not None else None


SECONDS = "partition_lag_seconds"
"""The gauge that is not added up under `other`: its highest value is shown."""

FAMILIES: tuple[tuple[str, str, Callable[[PartitionProgress, float], Value]], ...] = (
    (
        "partition_position",
        "Offset below which a query was given everything.",
        lambda partition, _: partition.position,
    ),
    (
        "partition_high_watermark",
        "Offset behind the last record of the log.",
        lambda partition, _: partition.log.high_watermark,
    ),
    (
        "partition_committed",
        "Offset below which a query has completed everything.",
        lambda partition, _: partition.committed_to,
    ),
    (
        "partition_lag",
        "Records between what a query has completed and the log end.",
        lambda partition, _: partition.lag_records(),
    ),
    (SECONDS, "Time for which the oldest record not completed is in the log.", _lag_seconds),
    (
        "partition_stuck",
        "1 while nothing completes although there is lag.",
        lambda partition, _: float(partition.stuck),
    ),
    (
        "partition_skipped_records_total",
        "Records that a query did not read.",
        lambda partition, _: partition.skipped.records,
    ),
    (
        "partition_refetched_records_total",
        "Records given to a query that it had before.",
        lambda partition, _: partition.refetched_records,
    ),
)
_TOTAL = "_total"


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
        """Yield the families, with the partitions of this moment.

        A partition is looked at when its sample is read, which can be done once. So who reads
        thousands of them can do other work between two.
        """
        partitions = self._queries.by_label()
        for name, text, value_of in FAMILIES:
            is_counter = name.endswith(_TOTAL)
            family = Metric(
                PREFIX + name.removesuffix(_TOTAL), text, "counter" if is_counter else "gauge"
            )
            family.samples = cast(list[Sample], self._samples(name, partitions, value_of))
            yield family
        text = "Batch reports of queries, by what became of them."
        results = CounterMetricFamily(PREFIX + "spark_reports_total", text, labels=("result",))
        for result, count in self._queries.reports.results.items():
            results.add_metric((str(result),), count)
        yield results

    def _samples(
        self,
        name: str,
        partitions: Sequence[tuple[str, Sequence[PartitionProgress]]],
        value_of: Callable[[PartitionProgress, float], Value],
    ) -> Iterator[Sample]:
        others: float | None = None
        rows = ((query, each) for query, of_query in partitions for each in of_query)
        for number, (query, partition) in enumerate(rows):
            value = value_of(partition, self._clock_ms())
            if value is None:
                continue
            if number < self._max_label_sets:
                labels = (query, partition.topic, str(partition.partition))
                yield _sample(name, labels, value)
            elif others is None:
                others = value
            else:
                others = max(others, value) if name == SECONDS else others + value
        if others is not None:
            yield _sample(name, (OTHER,) * len(LABELS), others)


def _sample(name: str, labels: tuple[str, ...], value: float) -> Sample:
    return Sample(PREFIX + name, dict(zip(LABELS, labels, strict=True)), value)
