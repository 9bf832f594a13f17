"""Declare every counter, gauge and histogram that the proxy keeps, in one place."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from .exposition import PREFIX
from .lock_free_counter import CounterChild, LockFreeCounter
from .lock_free_histogram import LockFreeHistogram

OTHER = "other"
"""Value of an open label once there are too many sets."""

THROTTLE_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
COMPLETION_BUCKETS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)
LAG_BUCKETS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
REQUEST_BUCKETS_S = (
    *(0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2),
    *(0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0),
)
LOOP_LAG_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

M = TypeVar("M")
LabelValues = tuple[str, ...]


class BoundedLabels(Collector, Generic[M]):
    """A labelled metric whose number of label sets clients cannot drive up.

    Once `max_sets` distinct sets are in use, a new one is counted with OTHER in its open labels,
    those whose values clients choose; the remaining ones must have few values. Register it, and not
    the metric. Raises ValueError when `max_sets` is below 1 or an open label is not the metric's.
    """

    def __init__(
        self, metric: Any, label_names: tuple[str, ...], open_labels: Collection[str], max_sets: int
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

    @property
    def is_full(self) -> bool:
        """Whether a set that is not in use would be counted with OTHER."""
        return len(self.children) >= self._max_sets

    def of(self, *values: str) -> M:
        """Return the child for these label values, in the metric's order; keep it on hot paths."""
        child = self.children.get(values)
        if child is not None:
            return child
        if not self.is_full:
            child = cast(M, self._metric.labels(*values))
            self.children[values] = child
            self.last_values.setdefault(values[:-1], {})[values[-1]] = None
            self._others.pop(values, None)
            return child
        pairs = zip(self._is_open, values, strict=True)
        values = tuple(OTHER if is_open else value for is_open, value in pairs)
        child = cast(M, self._metric.labels(*values))
        if values not in self.children:
            self._others[values] = child
        return child

    def forget(self, **labels: str) -> int:
        """Drop the sets with these values and make room for as many; return how many.

        A child that somebody still has is no longer exposed. All labels must be named, or all but
        the metric's last one; raises ValueError for other names.
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
        return cast(Iterable[Family], self._metric.describe())

    def collect(self) -> Iterable[Family]:
        """Yield the family; each sample is made when it is read, which can be done once."""
        for family in self.describe():
            family.samples = cast(list[Sample], self._samples())
            yield family

    def _samples(self) -> Iterator[Sample]:
        for sets in (self.children, self._others):
            for values in tuple(sets):
                child = sets.get(values)
                if child is not None:
                    labels = dict(zip(self._label_names, values, strict=True))
                    for family in cast(Collector, child).collect():
                        for sample in family.samples:
                            yield sample._replace(labels={**labels, **sample.labels})


class InstrumentRow(NamedTuple):
    """What users read of a metric."""

    name: str
    """With its prefix."""
    type: str
    labels: LabelValues
    meaning: str


class MetricAlias(Collector):
    """Exposes the samples of a gauge under another name."""

    def __init__(self, metric: BoundedLabels[Any], row: InstrumentRow) -> None:
        self._metric = metric
        self._row = row

    def describe(self) -> Iterable[Family]:
        """Return the family without samples."""
        return (Family(self._row.name, self._row.meaning, self._row.type),)

    def collect(self) -> Iterable[Family]:
        """Yield the family; each sample is made when it is read, which can be done once."""
        for family, source in zip(self.describe(), self._metric.collect(), strict=True):
            samples = (each._replace(name=self._row.name) for each in source.samples)
            family.samples = cast(list[Sample], samples)
            yield family


class Declarations:
    """Metrics that are registered with `registry` as they are declared.

    Turns off prometheus_client's `_created` series, for the whole process.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry
        self.rows: list[InstrumentRow] = []
        """All of them, for documents."""

    def _plain(
        self, kind: type[M], series: str, meaning: str, bounded: bool = False, **options: Any
    ) -> M:
        name, *labels = re.findall(r"\w+", series)
        registry = None if bounded else self.registry
        name = PREFIX + name
        metric = cast(Any, kind)(name, meaning, labels, registry=registry, **options)
        (family,) = metric.describe()
        self.rows.append(InstrumentRow(name, family.type, tuple(labels), meaning))
        return cast(M, metric)


class Instruments(Declarations):
    """The own metrics of a process that relays; attributes are named like them.

    Metrics whose labels clients can influence are BoundedLabels, with at most `max_label_sets`
    sets each: use `.of(...)`. The others are plain: use `.labels(...)`. The label `member` is added
    in each scrape. Raises ValueError when `max_label_sets` is below 1.
    """

    def __init__(self, registry: CollectorRegistry, *, max_label_sets: int) -> None:
        super().__init__(registry)
        self._max_label_sets = max_label_sets
        bounded, plain = self._bounded, self._plain
        # Name and labels; a star: clients choose the label's values.
        self.bytes_total: BoundedLabels[CounterChild] = bounded(
            LockFreeCounter,
            "bytes_total[listener,user*,client_id*,api]",
            "Bytes relayed to and from clients.",
        )
        self.requests_total: BoundedLabels[CounterChild] = bounded(
            LockFreeCounter, "requests_total[api*,version*]", "Requests received from clients."
        )
        self.violations_total = bounded(
            Counter, "violations_total[quota_entity*,quota]", "Measurements that exceeded a quota."
        )
        self.throttled_responses_total = bounded(
            Counter,
            "throttled_responses_total[quota_entity*,quota]",
            "Responses held back, and requests kept waiting, to keep a quota.",
        )
        self.expected_throttling = bounded(
            Gauge,
            "expected_throttling[quota_entity*,quota]",
            "1 where the rule says that being held to the quota is expected.",
        )
        self.would_throttle_total = bounded(
            Counter,
            "would_throttle_total[quota_entity*,quota]",
            "Measurements that exceeded a quota which is not enforced.",
        )
        self.would_throttle_seconds_total = bounded(
            Counter,
            "would_throttle_seconds_total[quota_entity*,quota]",
            "Seconds in which a measurement exceeded a quota which is not enforced.",
        )
        self.adaptive_bound_bytes = bounded(
            Gauge, "adaptive_bound_bytes[query*]", "Adaptive bound of a query, in bytes per second."
        )
        text = "Alias of adaptive_bound_bytes for one release more."
        self._alias(self.adaptive_bound_bytes, "pid_bound_bytes", text)
        self.stage_state = bounded(
            Gauge,
            "stage_state[pipeline*,stage*]",
            "1 while a node of a pipeline is held to a lower rate.",
        )
        self.stage_rate = bounded(
            Gauge,
            "stage_rate[pipeline*,stage*]",
            "Rate in force of a node of a pipeline, in records per second.",
        )
        self.adaptive_withheld_records = bounded(
            Gauge,
            "adaptive_withheld_records[query*]",
            "Records that a query's driver was not told of at its latest look-up, for its bound.",
        )
        self.ledger_pending = bounded(
            Gauge, "ledger_pending[pipeline*]", "Source batches that are not finished."
        )
        self.ledger_completion_seconds = bounded(
            Histogram,
            "ledger_completion_seconds[pipeline*]",
            "Time from the start of a source batch until all that came of it is done.",
            buckets=COMPLETION_BUCKETS_S,
        )
        self.ledger_failed_total = bounded(
            Counter,
            "ledger_failed_total[pipeline*,reason]",
            "Source batches that were not finished, by reason.",
        )
        sampled = "Of one request in 17 of an API, and of those that come 0.1 s after the last one."
        self.broker_seconds = plain(
            LockFreeHistogram,
            "broker_seconds[api]",
            f"Time from sending a request on to reading the head of its response. {sampled}",
            buckets=REQUEST_BUCKETS_S,
        )
        self.proxy_seconds = plain(
            LockFreeHistogram,
            "proxy_seconds[api]",
            f"Time that the proxy takes for a request and its response, without holds. {sampled}",
            buckets=REQUEST_BUCKETS_S,
        )
        self.hold_seconds = plain(
            LockFreeHistogram,
            "hold_seconds[api]",
            f"Time for which a request and its response are held, 0 for most. {sampled}",
            buckets=REQUEST_BUCKETS_S,
        )
        self.throttle_seconds = plain(
            Histogram,
            "throttle_seconds[quota]",
            "Time for which a response was held back or a request kept waiting.",
            buckets=THROTTLE_BUCKETS_S,
        )
        self.delay_queue_size = plain(
            Gauge, "delay_queue_size[api]", "Responses that wait in the delay queue."
        )
        self.kept_bytes = plain(
            Gauge, "kept_bytes", "Room in memory for requests and responses that are kept whole."
        )
        self.kept_bytes_waiting = plain(
            Gauge, "kept_bytes_waiting", "Requests and responses that wait for such room."
        )
        self.delay_queue_lag_seconds = plain(
            Histogram,
            "delay_queue_lag_seconds",
            "Time by which a held response was released later than due.",
            buckets=LAG_BUCKETS_S,
        )
        self.connections = plain(Gauge, "connections[listener]", "Open client connections.")
        self.connections_limit = plain(
            Gauge,
            "connections_limit",
            "Client connections that there may be, through all listeners.",
        )
        self.silent_connections = plain(
            Gauge, "silent_connections", "Open client connections that have sent no request yet."
        )
        self.unbounded_clients = plain(
            Gauge, "unbounded_clients", "Connected clients that no rule bounds."
        )
        self.overflow_clients = plain(
            Gauge,
            "overflow_clients[quota]",
            "Connected clients that share a sensor, since there is no room for their own.",
        )
        self.brokers_without_port = plain(
            Gauge,
            "brokers_without_port[listener]",
            "Brokers that clients are not told of, since broker_ports has no port for them.",
        )
        self.ready = plain(Gauge, "ready", "1 while /readyz answers 200.")
        self.cluster_reachable = plain(
            Gauge,
            "cluster_reachable",
            "1 while brokers answer when they are probed, also if they refuse the login.",
        )
        self.login_refused = plain(
            Gauge, "login_refused", "1 while the brokers refuse the login of the proxy itself."
        )
        self.state_writable = plain(
            Gauge, "state_writable", "1 while the state takes what is written to it."
        )
        self.certificate_not_after_timestamp_seconds = plain(
            Gauge,
            "certificate_not_after_timestamp_seconds[role,listener]",
            "When a certificate in use expires, in seconds since the epoch.",
        )
        self.event_loop_lag_seconds = plain(
            Histogram,
            "event_loop_lag_seconds",
            "Time by which a timer of the event loop is late, measured ten times a second.",
            buckets=LOOP_LAG_BUCKETS_S,
        )
        self.throttling_paused = plain(
            Gauge, "throttling_paused", "1 while quotas of some or all clients are paused."
        )
        self.rules_not_enforced = plain(
            Gauge, "rules_not_enforced", "Rules in force that are only observed."
        )
        self.connections_rejected_total = plain(
            Counter,
            "connections_rejected_total[reason]",
            "Client connections refused, or closed for what they sent.",
        )
        self.upstream_errors_total = plain(
            Counter,
            "upstream_errors_total[reason]",
            "Failures to reach a broker or to talk to one.",
        )
        self.config_reloads_total = plain(
            Counter, "config_reloads_total[result]", "Attempts to reload the configuration."
        )
        self.config_last_reload_successful = plain(
            Gauge,
            "config_last_reload_successful",
            "0 while the configuration's files have mistakes, so that what was read before holds.",
        )
        self.build_info = plain(Gauge, "build_info[version]", "1, with the version of the proxy.")
        # Of members that share clients with others; without any they stay at 0.
        self.steered_connections_total = plain(
            Counter,
            "steered_connections_total",
            "Connections let go to the member that owns their client.",
        )
        self.visits_bytes_total = plain(
            Counter,
            "visits_bytes_total",
            "Bytes of clients that were served at a member which does not own them.",
        )
        self.rules_digest = plain(
            Gauge,
            "rules_digest[tier,digest]",
            "1 with a digest of the rules in force: who shares clients should show the same.",
        )

    def _alias(self, metric: BoundedLabels[Any], name: str, meaning: str) -> None:
        """Expose the metric that was declared last under another name as well."""
        row = self.rows[-1]._replace(name=PREFIX + name, meaning=meaning)
        self.rows.append(row)
        self.registry.register(MetricAlias(metric, row))

    def _bounded(
        self, kind: type[Any], series: str, meaning: str, **options: Any
    ) -> BoundedLabels[Any]:
        metric = self._plain(kind, series, meaning, bounded=True, **options)
        open_labels = re.findall(r"(\w+)\*", series)
        made: BoundedLabels[Any] = BoundedLabels(
            metric, self.rows[-1].labels, open_labels, self._max_label_sets
        )
        self.registry.register(made)
        return made
