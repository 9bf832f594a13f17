"""Declare every counter, gauge and histogram that the proxy keeps, in one place."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from .exposition import PREFIX, read_late

OTHER = "other"
"""Value of an open label once there are too many sets."""

THROTTLE_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
COMPLETION_BUCKETS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)
LAG_BUCKETS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)

M = TypeVar("M", bound=MetricWrapperBase)
LabelValues = tuple[str, ...]


class BoundedLabels(Collector, Generic[M]):
    """A labelled metric whose number of label sets clients cannot drive up.

    `open_labels` are those whose values clients choose. Once `max_sets` distinct sets are in use,
    a new one is counted with OTHER in its open labels. The remaining labels must have few values.
    It is the metric's collector: register it, and not the metric. Raises ValueError when `max_sets`
    is below 1 or an open label is not one of the metric's.
    """

    def __init__(
        self, metric: M, label_names: tuple[str, ...], open_labels: Collection[str], max_sets: int
    ) -> None:
        if max_sets < 1:
            raise ValueError(f"max_sets must be 1 or more, got {max_sets!r}")
        if not set(open_labels) <= set(label_names):
            raise ValueError(f"open labels {open_labels!r} are not all among {label_names!r}")
        self._metric = metric
        self._label_names = label_names
        self._is_open = tuple(name in open_labels for name in label_names)
        self._max_sets = max_sets
        self.children: dict[LabelValues, M] = {}
        """By its label values."""
        # Sets with OTHER are kept apart: they are few, and must not use up the room.
        self._others: dict[LabelValues, M] = {}
        self.last_values: dict[LabelValues, dict[str, None]] = {}
        """Of the sets in use, by their other values: what `forget` drops at once."""

    def of(self, *values: str) -> M:
        """Return the child for these label values, in the metric's order; hold it on hot paths.

        Raises ValueError when the number of values is not that of the labels.
        """
        child = self.children.get(values)
        if child is not None:
            return child
        if len(self.children) < self._max_sets:
            child = self._metric.labels(*values)
            self.children[values] = child
            self.last_values.setdefault(values[:-1], {})[values[-1]] = None
            self._others.pop(values, None)
            return child
        values = tuple(
            OTHER if is_open else value
            for is_open, value in zip(self._is_open, values, strict=True)
        )
        child = self._metric.labels(*values)
        if values not in self.children:
            self._others[values] = child
        return child

    def forget(self, **labels: str) -> int:
        """Drop the sets with these values and make room for as many; return how many.

        For clients that are gone: a child that somebody still holds is no longer exposed. All
        labels must be named, or all but the metric's last one: these sets are found without a walk
        over the others. Raises ValueError for other names.
        """
        names = self._label_names[: len(labels)]
        if len(names) < len(self._label_names) - 1 or set(names) != set(labels):
            raise ValueError(f"{sorted(labels)} are not {self._label_names}, nor all but the last")
        first = tuple(labels[name] for name in self._label_names[:-1])
        last = self.last_values.get(first, {})
        wanted = labels.get(self._label_names[-1])
        gone = list(last) if wanted is None else [wanted] if wanted in last else []
        for value in gone:
            del last[value]
            del self.children[*first, value]
            self._metric.remove(*first, value)
        if not last:
            self.last_values.pop(first, None)
        return len(gone)

    def describe(self) -> Iterable[Family]:
        """Return the family without samples."""
        return self._metric.describe()

    def collect(self) -> Iterable[Family]:
        """Return the family, whose samples are those of the moment at which each is read."""
        return [read_late(family, self._samples) for family in self.describe()]

    def _samples(self) -> Iterator[Sample]:
        for sets in (self.children, self._others):
            for values in tuple(sets):
                child = sets.get(values)
                if child is not None:
                    labels = dict(zip(self._label_names, values, strict=True))
                    for family in child.collect():
                        for sample in family.samples:
                            yield sample._replace(labels={**labels, **sample.labels})


class InstrumentRow(NamedTuple):
    """What users read of a metric."""

    name: str
    """With its prefix."""
    type: str
    labels: tuple[str, ...]
    meaning: str


class Instruments:
    """The proxy's own metrics, registered with `registry`; attributes are named like them.

    Metrics whose labels clients can influence are BoundedLabels, with at most `max_label_sets`
    sets each: use `.of(...)`. The others are plain: use `.labels(...)`. Turns off
    prometheus_client's `_created` series, for the whole process. Raises ValueError when
    `max_label_sets` is below 1.
    """

    def __init__(self, registry: CollectorRegistry, *, max_label_sets: int) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry
        self._max_label_sets = max_label_sets
        self.rows: list[InstrumentRow] = []
        """All of them, for documents."""
        bounded, plain = self._bounded, self._plain

        self.bytes_total = bounded(
            Counter,
            "bytes_total",
            "Bytes relayed to and from clients.",
            ("listener", "user", "client_id", "api"),
            ("user", "client_id"),
        )
        self.requests_total = bounded(
            Counter, "requests_total", "Requests received from clients.", ("api", "version")
        )
        self.violations_total = bounded(
            Counter,
            "violations_total",
            "Measurements that exceeded a quota.",
            ("quota_entity", "quota"),
            ("quota_entity",),
        )
        self.throttled_responses_total = bounded(
            Counter,
            "throttled_responses_total",
            "Responses held back, and requests kept waiting, to keep a quota.",
            ("quota_entity", "quota"),
            ("quota_entity",),
        )
        self.pid_bound_bytes = bounded(
            Gauge, "pid_bound_bytes", "Adaptive bound of a query, in bytes per second.", ("query",)
        )
        self.stage_state = bounded(
            Gauge,
            "stage_state",
            "1 while a node of a pipeline is held to a lower rate.",
            ("pipeline", "stage"),
        )
        self.stage_rate = bounded(
            Gauge,
            "stage_rate",
            "Rate in force of a node of a pipeline, in records per second.",
            ("pipeline", "stage"),
        )
        self.ledger_pending = bounded(
            Gauge, "ledger_pending", "Source batches that are not finished.", ("pipeline",)
        )
        self.ledger_completion_seconds = bounded(
            Histogram,
            "ledger_completion_seconds",
            "Time from the start of a source batch until all that came of it is done.",
            ("pipeline",),
            buckets=COMPLETION_BUCKETS_S,
        )
        self.ledger_failed_total = bounded(
            Counter,
            "ledger_failed_total",
            "Source batches that were not finished, by reason.",
            ("pipeline", "reason"),
            ("pipeline",),
        )
        self.throttle_seconds = plain(
            Histogram,
            "throttle_seconds",
            "Time for which a response was held back or a request kept waiting.",
            ("quota",),
            buckets=THROTTLE_BUCKETS_S,
        )
        self.delay_queue_size = plain(
            Gauge, "delay_queue_size", "Responses that wait in the delay queue.", ("api",)
        )
        self.delay_queue_lag_seconds = plain(
            Histogram,
            "delay_queue_lag_seconds",
            "Time by which a held response was released later than due.",
            buckets=LAG_BUCKETS_S,
        )
        self.connections = plain(Gauge, "connections", "Open client connections.", ("listener",))
        self.unbounded_clients = plain(
            Gauge, "unbounded_clients", "Connected clients that no rule bounds."
        )
        self.connections_rejected_total = plain(
            Counter,
            "connections_rejected_total",
            "Client connections refused, or closed for what they sent.",
            ("reason",),
        )
        self.upstream_errors_total = plain(
            Counter,
            "upstream_errors_total",
            "Failures to reach a broker or to talk to one.",
            ("reason",),
        )
        self.config_reloads_total = plain(
            Counter, "config_reloads_total", "Attempts to reload the configuration.", ("result",)
        )

    def _plain(
        self,
        kind: type[M],
        name: str,
        meaning: str,
        labels: LabelValues = (),
        registered: bool = True,
        **options: Any,
    ) -> M:
        self.rows.append(InstrumentRow(PREFIX + name, kind.__name__.lower(), labels, meaning))
        registry = self._registry if registered else None
        return kind(PREFIX + name, meaning, labels, registry=registry, **options)

    def _bounded(
        self,
        kind: type[M],
        name: str,
        meaning: str,
        labels: LabelValues,
        open_labels: LabelValues | None = None,
        **options: Any,
    ) -> BoundedLabels[M]:
        """Register a metric whose `open_labels`, or else all, have values that clients choose."""
        metric = self._plain(kind, name, meaning, labels, registered=False, **options)
        opened = labels if open_labels is None else open_labels
        made = BoundedLabels(metric, labels, opened, self._max_label_sets)
        self._registry.register(made)
        return made
