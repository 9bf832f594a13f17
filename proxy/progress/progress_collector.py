"""Shows progress and lag of partitions, and what queries do, to Prometheus."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar, cast

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from metrics.clock import MS_PER_SECOND
from metrics.exposition import PREFIX
from metrics.instruments import COMPLETION_BUCKETS_S, OTHER
from metrics.lock_free import HistogramChild

from .partition import PartitionProgress
from .query import QueryProgress
from .query_registry import QueryRegistry
from .report import TriggerKind

PARTITION_LABELS = ("query", "topic", "partition")
QUERY_LABELS = ("query",)
ADVICE_LABELS = ("query", "kind")
BUCKET_LABELS = ("query", "le")

T = TypeVar("T")

Value: TypeAlias = float | None
"""None: not known, and not shown."""


@dataclass(frozen=True, slots=True)
class ExposedFigure(Generic[T]):
    """A gauge, or a counter, of partitions, queries or their advice."""

    name: str
    text: str
    value_of: Callable[[T, float], Value]
    """Called with the time."""

    @property
    def is_counter(self) -> bool:
        """Whether it only goes up."""
        return self.name.endswith(TOTAL)

    @property
    def is_highest(self) -> bool:
        """Whether the highest value is shown under `other`, in place of the sum."""
        return self.name.endswith(SECONDS)


TOTAL = "_total"
SECONDS = "_seconds"


def _lag_seconds(partition: PartitionProgress, now_ms: float) -> Value:
    lag_ms = partition.lag_ms(now_ms)
    return lag_ms / MS_PER_SECOND if lag_ms is not None else None


def _trigger_seconds(query: QueryProgress, _: float) -> Value:
    is_timed = query.trigger_kind is TriggerKind.PROCESSING_TIME
    interval_ms = query.trigger_interval_ms if is_timed else None
    return interval_ms / MS_PER_SECOND if interval_ms is not None else None


def _report_age_seconds(query: QueryProgress, now_ms: float) -> Value:
    age_ms = query.report_age_ms(now_ms)
    return age_ms / MS_PER_SECOND if age_ms is not None else None


OF_PARTITIONS: tuple[ExposedFigure[PartitionProgress], ...] = (
    ExposedFigure(
        "partition_position",
        "Offset below which a query was given everything.",
        lambda partition, _: partition.position,
    ),
    ExposedFigure(
        "partition_high_watermark",
        "Offset behind the last record of the log.",
        lambda partition, _: partition.log.high_watermark,
    ),
    ExposedFigure(
        "partition_committed",
        "Offset below which a query has completed everything.",
        lambda partition, _: partition.committed_to,
    ),
    ExposedFigure(
        "partition_lag",
        "Records between what a query has completed and the log end.",
        lambda partition, _: partition.lag_records(),
    ),
    ExposedFigure(
        "partition_lag_seconds",
        "Time for which the oldest record not completed is in the log.",
        _lag_seconds,
    ),
    ExposedFigure(
        "partition_stuck",
        "1 while nothing completes although there is lag.",
        lambda partition, _: float(partition.stuck),
    ),
    ExposedFigure(
        "partition_skipped_records_total",
        "Records that a query did not read.",
        lambda partition, _: partition.skipped.records,
    ),
    ExposedFigure(
        "partition_refetched_records_total",
        "Records given to a query that it had before.",
        lambda partition, _: partition.refetched_records,
    ),
)

OF_QUERIES: tuple[ExposedFigure[QueryProgress], ...] = (
    ExposedFigure(
        "query_trigger_seconds",
        "Interval of the processing-time trigger of a query's run; 0: as fast as it can.",
        _trigger_seconds,
    ),
    ExposedFigure(
        "spark_report_age_seconds",
        "Time for which no report says what a query has completed.",
        _report_age_seconds,
    ),
    ExposedFigure("query_rows_total", "Rows of a query's batches.", lambda query, _: query.rows),
    ExposedFigure(
        "query_failed",
        "1 while the last run of a query has ended with an exception.",
        lambda query, _: float(query.has_failed),
    ),
)

OF_ADVICE: tuple[ExposedFigure[object], ...] = (
    ExposedFigure(
        "query_advice",
        "1 while something of a query or its rule is to be mended, by the kind of advice.",
        lambda _, __: 1.0,
    ),
)

BATCH_SECONDS = "query_batch_seconds"


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
        of_partitions = [(each.name, tuple(each.partitions.values())) for each in queries]
        for partition_family in OF_PARTITIONS:
            rows = ((query, each) for query, of_query in of_partitions for each in of_query)
            yield self._family(partition_family, PARTITION_LABELS, rows, _partition_labels)
        for query_family in OF_QUERIES:
            of_queries = ((query.name, query) for query in queries)
            yield self._family(query_family, QUERY_LABELS, of_queries, lambda name, _: (name,))
        for advice_family in OF_ADVICE:
            advice = ((query.name, kind) for query in queries for kind in tuple(query.advice))
            yield self._family(advice_family, ADVICE_LABELS, advice, lambda *names: names)
        text = "Time that batches of a query take, from their trigger on."
        family = Metric(PREFIX + BATCH_SECONDS, text, "histogram")
        family.samples = cast(list[Sample], self._batch_seconds(queries))
        yield family
        text = "Batch reports of queries, by what became of them."
        results = CounterMetricFamily(PREFIX + "spark_reports_total", text, labels=("result",))
        for result, count in self._queries.reports.results.items():
            results.add_metric((str(result),), count)
        yield results

    def _family(
        self,
        shown: ExposedFigure[T],
        label_names: tuple[str, ...],
        rows: Iterable[tuple[str, T]],
        labels_of: Callable[[str, T], tuple[str, ...]],
    ) -> Metric:
        """Return a family whose samples are made from these rows as they are read."""
        kind = "counter" if shown.is_counter else "gauge"
        family = Metric(PREFIX + shown.name.removesuffix(TOTAL), shown.text, kind)
        samples = self._samples(shown, label_names, rows, labels_of)
        family.samples = cast(list[Sample], samples)
        return family

    def _samples(
        self,
        shown: ExposedFigure[T],
        label_names: tuple[str, ...],
        rows: Iterable[tuple[str, T]],
        labels_of: Callable[[str, T], tuple[str, ...]],
    ) -> Iterator[Sample]:
        others: float | None = None
        for number, (query, each) in enumerate(rows):
            value = shown.value_of(each, self._clock_ms())
            if value is None:
                continue
            if number < self._max_label_sets:
                yield _sample(shown.name, label_names, labels_of(query, each), value)
            elif others is None:
                others = value
            else:
                others = max(others, value) if shown.is_highest else others + value
        if others is not None:
            yield _sample(shown.name, label_names, (OTHER,) * len(label_names), others)

    def _batch_seconds(self, queries: Sequence[QueryProgress]) -> Iterator[Sample]:
        others = HistogramChild(COMPLETION_BUCKETS_S)
        for number, query in enumerate(queries):
            if number < self._max_label_sets:
                yield from _buckets(query.name, query.batch_seconds)
            else:
                others.add(query.batch_seconds)
        yield from _buckets(OTHER, others)


def _partition_labels(query: str, partition: PartitionProgress) -> tuple[str, ...]:
    return query, partition.topic, str(partition.partition)


def _buckets(query: str, seconds: HistogramChild) -> Iterator[Sample]:
    """Yield the samples of a query's histogram, if it has had a batch."""
    buckets = seconds.cumulative()
    _, count = buckets[-1]
    if not count:
        return
    for bound, below in buckets:
        yield _sample(f"{BATCH_SECONDS}_bucket", BUCKET_LABELS, (query, bound), below)
    yield _sample(f"{BATCH_SECONDS}_count", QUERY_LABELS, (query,), count)
    yield _sample(f"{BATCH_SECONDS}_sum", QUERY_LABELS, (query,), seconds.total)


def _sample(
    name: str, label_names: tuple[str, ...], labels: tuple[str, ...], value: float
) -> Sample:
    return Sample(PREFIX + name, dict(zip(label_names, labels, strict=True)), value)
