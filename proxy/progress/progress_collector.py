"""Shows progress and lag of partitions, and what queries do, to Prometheus."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, cast

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from metrics.clock import in_seconds
from metrics.exposition import PREFIX
from metrics.instruments import COMPLETION_BUCKETS_S, OTHER
from metrics.lock_free import HistogramChild

from .query import QueryProgress
from .query_registry import QueryRegistry
from .report import TriggerKind

ValueOf: TypeAlias = Callable[[Any, float], float | None]
Figures: TypeAlias = Mapping[str, tuple[str, ValueOf]]
"""Of gauges, and of counters, whose names end in TOTAL: the text, and the value at a time. What is
not known is None, and not shown."""

SampleLabels: TypeAlias = dict[str, str]

TOTAL = "_total"
HIGHEST = "_seconds"
"""How names end whose highest value is shown under `other`, in place of the sum."""


def _trigger_seconds(query: QueryProgress, _: float) -> float | None:
    is_timed = query.trigger_kind is TriggerKind.PROCESSING_TIME
    return in_seconds(query.trigger_interval_ms) if is_timed else None


OF_PARTITIONS: Figures = {
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
        lambda partition, now_ms: in_seconds(partition.lag_ms(now_ms)),
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
}

OF_QUERIES: Figures = {
    "query_trigger_seconds": (
        "Interval of the processing-time trigger of a query's run; 0: as fast as it can.",
        _trigger_seconds,
    ),
    "spark_report_age_seconds": (
        "Time for which no report says what a query has completed.",
        lambda query, now_ms: in_seconds(query.report_age_ms(now_ms)),
    ),
    "query_rows_total": ("Rows of a query's batches.", lambda query, _: query.rows),
    "query_failed": (
        "1 while the last run of a query has ended with an exception.",
        lambda query, _: float(query.has_failed),
    ),
}

BATCH_SECONDS = PREFIX + "query_batch_seconds"


class ProgressCollector(Collector):
    """A prometheus_client collector: register it, and each scrape reads the registry of queries.

    The first `max_label_sets` partitions, queries and pieces of advice (ValueError: below 1) have
    series of their own, in the order in which they came. The others are added up, with OTHER for
    all labels. Scrape in the registry's thread.
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
        queries = self._queries.queries
        partitions = [(query.name, tuple(query.partitions.values())) for query in queries]
        for name, figure in OF_PARTITIONS.items():
            rows = (
                ({"query": query, "topic": each.topic, "partition": str(each.partition)}, each)
                for query, of_query in partitions
                for each in of_query
            )
            yield self._family(name, *figure, rows)
        for name, figure in OF_QUERIES.items():
            yield self._family(name, *figure, (({"query": each.name}, each) for each in queries))
        advice = (
            ({"query": query.name, "kind": kind}, query)
            for query in queries
            for kind in tuple(query.advice)
        )
        text = "1 while something of a query or its rule is to be mended, by the kind of advice."
        yield self._family("query_advice", text, lambda _, __: 1.0, advice)
        text = "Time that batches of a query take, from their trigger on."
        yield _streamed(BATCH_SECONDS, text, "histogram", self._batch_seconds(queries))
        text = "Batch reports of queries, by what became of them."
        results = CounterMetricFamily(PREFIX + "spark_reports_total", text, labels=("result",))
        for result, count in self._queries.report_results.items():
            results.add_metric((str(result),), count)
        yield results

    def _family(
        self,
        name: str,
        text: str,
        value_of: ValueOf,
        rows: Iterable[tuple[SampleLabels, object]],
    ) -> Metric:
        """Return a family whose samples are made from these rows as they are read."""

        def samples() -> Iterator[Sample]:
            others: tuple[SampleLabels, float] | None = None
            for number, (labels, each) in enumerate(rows):
                value = value_of(each, self._clock_ms())
                if value is None:
                    continue
                if number < self._max_label_sets:
                    yield Sample(PREFIX + name, labels, value)
                elif others is None:
                    others = dict.fromkeys(labels, OTHER), value
                elif name.endswith(HIGHEST):
                    others = others[0], max(others[1], value)
                else:
                    others = others[0], others[1] + value
            if others is not None:
                yield Sample(PREFIX + name, *others)

        kind = "counter" if name.endswith(TOTAL) else "gauge"
        return _streamed(PREFIX + name.removesuffix(TOTAL), text, kind, samples())

    def _batch_seconds(self, queries: Iterable[QueryProgress]) -> Iterator[Sample]:
        others = HistogramChild(COMPLETION_BUCKETS_S)
        for number, query in enumerate(queries):
            if number < self._max_label_sets:
                yield from _buckets(query.name, query.batch_seconds)
            else:
                others.add(query.batch_seconds)
        yield from _buckets(OTHER, others)


def _streamed(name: str, text: str, kind: str, samples: Iterator[Sample]) -> Metric:
    family = Metric(name, text, kind)
    family.samples = cast(list[Sample], samples)
    return family


def _buckets(label: str, seconds: HistogramChild) -> list[Sample]:
    """Return the samples of a query's histogram, if it has had a batch."""
    family = HistogramMetricFamily(BATCH_SECONDS, "", labels=("query",))
    if any(seconds.counts):
        family.add_metric((label,), seconds.cumulative(), seconds.total)
    return family.samples
