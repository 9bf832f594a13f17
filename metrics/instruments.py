"""Declare every counter, gauge and histogram that the proxy keeps, in one place."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from .exposition import OTHER, PREFIX, child_samples, lazy_family
from .lock_free import CounterChild, HistogramChild

THROTTLE_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
COMPLETION_BUCKETS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)
LAG_BUCKETS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
REQUEST_BUCKETS_S = (
    *(0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2),
    *(0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0),
)
LOOP_LAG_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

_SAMPLED = "Of one request in 67 of an API, and of those that come 0.25 s after the last one."

M = TypeVar("M")
LabelValues = tuple[str, ...]


class BoundedLabels(Collector, Generic[M]):
    """A labelled metric whose number of label sets clients cannot drive up; register it alone.

    Once `max_sets` distinct sets are in use, a new one is counted with OTHER in its open labels,
    those whose values clients choose. `make` makes the child of a set, a collector that knows
    nothing of labels. Raises ValueError when `max_sets` is below 1 or an open label is not the
    metric's.
    """

    def __init__(
        self,
        make: Callable[[], M],
        meaning: str,
        label_names: tuple[str, ...],
        open_labels: Collection[str],
        max_sets: int,
    ) -> None:
        if max_sets < 1:
            raise ValueError(f"max_sets must be 1 or more, got {max_sets!r}")
        if not set(open_labels) <= set(label_names):
            raise ValueError(f"open labels {open_labels!r} are not all among {label_names!r}")
        (family,) = cast(Collector, make()).collect()
        self._family = family.name, meaning, family.type
        self._make = make
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
        if len(values) != len(self._label_names):
            raise ValueError(f"{len(values)} label values for {self._label_names}")
        if not self.is_full:
            child = self._others.pop(values, None) or self._make()
            self.children[values] = child
            self.last_values.setdefault(values[:-1], {})[values[-1]] = None
            return child
        pairs = zip(self._is_open, values, strict=True)
        values = tuple(OTHER if is_open else value for is_open, value in pairs)
        child = self.children.get(values) or self._others.get(values)
        if child is None:
            child = self._others[values] = self._make()
        return child

    def counted(self) -> list[tuple[LabelValues, M]]:
        """Return all children by their values, those with OTHER too."""
        return [*self.children.items(), *self._others.items()]

    def forget(self, *values: str) -> int:
        """Drop the sets with these values of all labels but the last one; return how many.

        A child that somebody still has is no longer exposed.
        """
        if len(values) != len(self._label_names) - 1:
            raise ValueError(f"{len(values)} label values for all but one of {self._label_names}")
        gone = self.last_values.pop(values, {})
        for value in gone:
            del self.children[*values, value]
        return len(gone)

    def describe(self) -> Iterable[Family]:
        """Return the family without samples."""
        return (Family(*self._family),)

    def collect(self) -> Iterable[Family]:
        """Return the same; each sample is made when it is read, which can be done once."""
        return (lazy_family(*self._family, self._samples()),)

    def _samples(self) -> Iterator[Sample]:
        for sets in (self.children, self._others):
            for values in tuple(sets):
                child = sets.get(values)
                if child is not None:
                    labels = dict(zip(self._label_names, values, strict=True))
                    yield from child_samples(cast(Collector, child), labels)


class _Declared(NamedTuple):
    """What a class says of a metric, which each of its instances makes."""

    kind: Any
    meaning: str
    labels: str
    options: dict[str, Any]
    is_bounded: bool = False


def plain_metric(kind: type[M], meaning: str, labels: str = "", **options: Any) -> M:
    """Declare a metric, named like the attribute."""
    return cast(M, _Declared(kind, meaning, labels, options))


def bounded_metric(make: Callable[[str], M], meaning: str, labels: str) -> BoundedLabels[M]:
    """Declare a metric with BoundedLabels whose children `make` makes by its name, without locks.

    A star is behind those labels whose values clients choose.
    """
    return cast(BoundedLabels[M], _Declared(make, meaning, labels, {}, is_bounded=True))


gauge, counter = partial(plain_metric, Gauge), partial(plain_metric, Counter)


def request_time_histogram(meaning: str) -> BoundedLabels[HistogramChild]:
    """Declare a histogram of a part of the time that requests take."""
    make = partial(HistogramChild, bounds=REQUEST_BUCKETS_S)
    return bounded_metric(make, f"{meaning} {_SAMPLED}", "api")


class Declarations:
    """The metrics that a subclass declares, registered with `registry` in their order.

    Those with BoundedLabels have at most `max_label_sets` sets each: use `.of(...)`. The others
    are plain: use `.labels(...)`. Raises ValueError when `max_label_sets` is below 1.
    Turns off prometheus_client's `_created` series, for the whole process.
    """

    def __init__(self, registry: CollectorRegistry, *, max_label_sets: int = 1) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry
        for name, declared in vars(type(self)).items():
            if isinstance(declared, _Declared):
                setattr(self, name, self._make(name, declared, max_label_sets))

    def _make(self, name: str, declared: _Declared, max_label_sets: int) -> Any:
        kind, meaning, labels, options, is_bounded = declared
        names, open_names = re.findall(r"\w+", labels), re.findall(r"(\w+)\*", labels)
        if not is_bounded:
            return kind(PREFIX + name, meaning, names, registry=self.registry, **options)
        make = partial(kind, PREFIX + name)
        made = BoundedLabels[Any](make, meaning, tuple(names), open_names, max_label_sets)
        self.registry.register(made)
        return made


class Instruments(Declarations):
    """The own metrics of a process that relays.

    Metrics whose labels clients can influence are bounded. The label `member` is added in each
    scrape. Of members that share clients with others are the last three, which stay at 0 without.
    """

    bytes_total = bounded_metric(
        CounterChild, "Bytes relayed to and from clients.", "listener, user*, client_id*, api"
    )
    requests_total = bounded_metric(
        CounterChild, "Requests received from clients.", "api*, version*"
    )
    ledger_completion_seconds = bounded_metric(
        partial(HistogramChild, bounds=COMPLETION_BUCKETS_S),
        "Time from the start of a source batch until all that came of it is done.",
        "pipeline*",
    )
    ledger_failed_total = bounded_metric(
        CounterChild, "Source batches that were not finished, by reason.", "pipeline*, reason"
    )
    broker_seconds = request_time_histogram(
        "Time from sending a request on to reading the head of its response."
    )
    proxy_seconds = request_time_histogram(
        "Time that the proxy takes for a request and its response, without holds."
    )
    hold_seconds = request_time_histogram(
        "Time for which a request and its response are held, 0 for most."
    )
    throttle_seconds = plain_metric(
        Histogram,
        "Time for which a response was held back or a request kept waiting.",
        "quota",
        buckets=THROTTLE_BUCKETS_S,
    )
    delay_queue_size = gauge("Responses that wait in the delay queue.", "api")
    kept_bytes = gauge("Room in memory for requests and responses that are kept whole.")
    kept_bytes_waiting = gauge("Requests and responses that wait for such room.")
    delay_queue_lag_seconds = plain_metric(
        Histogram,
        "Time by which a held response was released later than due.",
        buckets=LAG_BUCKETS_S,
    )
    connections = gauge("Open client connections.", "listener")
    connections_limit = gauge("Client connections that there may be, through all listeners.")
    silent_connections = gauge("Open client connections that have sent no request yet.")
    unbounded_clients = gauge("Connected clients that no rule bounds.")
    overflow_clients = gauge(
        "Connected clients that share a sensor, since there is no room for their own.", "quota"
    )
    brokers_without_port = gauge(
        "Brokers that clients are not told of, since broker_ports has no port for them.", "listener"
    )
    ready = gauge("1 while /readyz answers 200.")
    cluster_reachable = gauge(
        "1 while brokers answer when they are probed, also if they refuse the login."
    )
    login_refused = gauge("1 while the brokers refuse the login of the proxy itself.")
    state_writable = gauge("1 while the state takes what is written to it.")
    certificate_not_after_timestamp_seconds = gauge(
        "When a certificate in use expires, in seconds since the epoch.", "role, listener"
    )
    event_loop_lag_seconds = plain_metric(
        Histogram,
        "Time by which a timer of the event loop is late, measured ten times a second.",
        buckets=LOOP_LAG_BUCKETS_S,
    )
    throttling_paused = gauge("1 while quotas of some or all clients are paused.")
    rules_not_enforced = gauge("Rules in force that are only observed.")
    connections_rejected_total = counter(
        "Client connections refused, or closed for what they sent.", "reason"
    )
    upstream_errors_total = counter("Failures to reach a broker or to talk to one.", "reason")
    config_reloads_total = counter("Attempts to reload the configuration.", "result")
    config_last_reload_successful = gauge(
        "0 while the configuration's files have mistakes, so that what was read before holds."
    )
    topic_walks_total = counter(
        "Fetch responses and Produce requests that were walked for rules with a topic."
    )
    build_info = gauge("1, with the version of the proxy.", "version")
    steered_connections_total = counter("Connections let go to the member that owns their client.")
    visits_bytes_total = counter(
        "Bytes of clients that were served at a member which does not own them."
    )
    rules_digest = gauge(
        "1 with a digest of the rules in force: who shares clients should show the same.",
        "tier, digest",
    )


class UsageInstruments(Declarations):
    """What a process shows of its usage records, where it writes any."""

    usage_records_written_total = counter("Usage records written to their topic.")
    usage_records_lost_total = counter(
        "Usage records given up, since the cluster took none for too long."
    )
    usage_write_errors_total = counter("Attempts to write usage records that failed.")
    usage_written_age_seconds = gauge(
        "Time since usage records were written last; 0 before the first."
    )


class MemberInstruments(Declarations):
    """What a member of a tier shows of itself; `worker` is its number among those of its host."""

    workers = gauge("1: this member is alive; the sum is how many are.")
    worker_restarts_total = counter("Workers started again after they had died.", "worker")
    workers_crash_looping = gauge("1 if this member died soon after each start.")
    member_up = gauge("1 if the member of this machine answered this scrape.", "member")
    slots_owned = gauge("Slots that this member owns.")
    slot_moves_total = counter("Slots that came to this member from another one.")
    slots_overloaded = gauge("Slots that fill this member alone, so that no move makes it less.")
    members_silent = gauge("Other members that do not answer this one.")
    tier_generation = gauge(
        "Generation of the tier's group that this member is in; 0 while it is in none.", "tier"
    )
