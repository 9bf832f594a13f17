"""Shows progress and lag of partitions, and what queries do, to Prometheus."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from metrics.clock import ms_to_s
from metrics.exposition import (
    OTHER,
    PREFIX,
    MetricRows,
    MetricTable,
    MetricTableCollector,
    child_samples,
    lazy_family,
)
from metrics.instruments import COMPLETION_BUCKETS_S
from metrics.lock_free import HistogramChild

from .query import BATCH_SECONDS, FollowedQuery
from .query_registry import QueryRegistry
from .report import TriggerKind


def _trigger_seconds(query: FollowedQuery, _: float) -> float | None:
    is_timed = query.trigger_kind is TriggerKind.PROCESSING_TIME
    return ms_to_s(query.trigger_interval_ms) if is_timed else None


OF_PARTITIONS = MetricTable(
    ("query", "topic", "partition"),
    {
        "partition_position": (
            "Offset below which a query was given everything.",
            lambda partition, _: partition.position,
        ),
        "partition_high_watermark": (
            "Offset behind the last record of the log.",
            lambda partition, _: partition.log.high_watermark,
        ),
        "partition_committed": (
            "Offset below which a query has completed everything.",
            lambda partition, _: partition.committed_to,
        ),
        "partition_lag": (
            "Records between what a query has completed and the log end.",
            lambda partition, _: partition.lag_records(),
        ),
        "partition_lag_seconds": (
            "Time for which the oldest record not completed is in the log.",
            lambda partition, now_ms: ms_to_s(partition.lag_ms(now_ms)),
        ),
        "partition_stuck": (
            "1 while nothing completes although there is lag.",
            lambda partition, _: float(partition.stuck),
        ),
        "partition_skipped_records_total": (
            "Records that a query did not read.",
            lambda partition, _: partition.skipped.records,
        ),
        "partition_refetched_records_total": (
            "Records given to a query that it had before.",
            lambda partition, _: partition.refetched_records,
        ),
    },
)

OF_QUERIES = MetricTable(
    ("query",),
    {
        "query_trigger_seconds": (
            "Interval of the processing-time trigger of a query's run; 0: as fast as it can.",
            _trigger_seconds,
        ),
        "spark_report_age_seconds": (
            "Time for which no report says what a query has completed.",
            lambda query, now_ms: ms_to_s(query.report_age_ms(now_ms)),
        ),
        "query_rows_total": ("Rows of a query's batches.", lambda query, _: query.rows),
        "query_failed": (
            "1 while the last run of a query has ended with an exception.",
            lambda query, _: float(query.has_failed),
        ),
    },
)

OF_ADVICE = MetricTable(
    ("query", "kind"),
    {
        "query_advice": (
            "1 while something of a query or its rule is to be mended, by the kind of advice.",
            lambda _, __: 1.0,
        ),
    },
)


class ProgressMetricsCollector(MetricTableCollector):
    """Shows the registry of queries."""

    def __init__(
        self, queries: QueryRegistry, clock_ms: Callable[[], float], max_label_sets: int
    ) -> None:
        self._queries = queries
        tables = (
            (OF_PARTITIONS, self._partitions),
            (OF_QUERIES, lambda: (((each.name,), each) for each in queries.queries)),
            (OF_ADVICE, self._advice),
        )
        super().__init__(tables, clock_ms, max_label_sets)

    def collect(self) -> Iterable[Metric]:
        """Yield the families; see MetricTableCollector."""
        yield from super().collect()
        text = "Time that batches of a query take, from their trigger on."
        yield lazy_family(BATCH_SECONDS, text, "histogram", self._batch_seconds())
        text = "Batch reports of queries, by what became of them."
        results = CounterMetricFamily(PREFIX + "spark_reports_total", text, labels=("result",))
        for result, count in self._queries.report_results.items():
            results.add_metric((str(result),), count)
        yield results

    def _partitions(self) -> MetricRows:
        for query in self._queries.queries:
            for each in tuple(query.partitions.values()):
                yield (query.name, each.topic, str(each.partition)), each

    def _advice(self) -> MetricRows:
        for query in self._queries.queries:
            for kind in tuple(query.advice):
                yield (query.name, str(kind)), query

    def _batch_seconds(self) -> Iterator[Sample]:
        """Yield the histograms of queries that have had a batch."""
        others = HistogramChild(BATCH_SECONDS, COMPLETION_BUCKETS_S)
        for number, query in enumerate(self._queries.queries):
            if number >= self.max_label_sets:
                others.add(query.batch_seconds)
            elif any(query.batch_seconds.counts):
                yield from child_samples(query.batch_seconds, {"query": query.name})
        if any(others.counts):
            yield from child_samples(others, {"query": OTHER})
