"""Queries whose rules are adaptive: from the reports on their batches to bounds and next batches.

The offset look-ups on a connection wait for reports, and get earlier log ends.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from metrics.clock import MS_PER_SECOND
from metrics.exposition import MetricRows, MetricTable
from proxy.progress.query import MAX_QUERIES, AcceptedReport, FollowedQuery
from proxy.progress.query_registry import FORGET_AFTER_MS, Ownership, owns_all
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.manager import QuotaManager
from proxy.quota.meter import AdaptedBound
from proxy.quota.rules import AdaptiveSettings, Rule, RuleMatch
from proxy.state import Json, Record, UnwrittenRecords
from proxy.wire import list_offsets
from proxy.wire.list_offsets import LookupRequest
from proxy.wire.topic_partition import TopicPartition

from .backpressure_record import BOUND_RECORDS, BackpressureRecord, read_backpressure_record
from .driver_view import UNPLANNED, DriverView
from .drivers import PartitionOffsets, QueryConnection, QueryDrivers
from .measurements import QueryMeasurements

KIND = QuotaKind.CONSUMER_BYTE_RATE

RETURN_FACTOR, RETURN_STEP_MS, RETURN_STEPS = 1.5, 2000.0, 10
"""By how much the bound rises with each step back, the time between two, and after how many the
rule's own bound is in force, however far it is."""


OF_BOUNDS = MetricTable(
    ("query",),
    {
        "adaptive_bound_bytes": (
            "Adaptive bound of a query, in bytes per second.",
            lambda query, _: query.bound,
        ),
        "pid_bound_bytes": (
            "Alias of adaptive_bound_bytes for one release more.",
            lambda query, _: query.bound,
        ),
        "adaptive_withheld_records": (
            "Records that a query's driver was not told of at its latest look-up, for its bound.",
            lambda query, _: query.withheld,
        ),
    },
)


@dataclass(frozen=True, slots=True)
class BoundRecovery:
    """The way from an adapted bound back to the rule's own."""

    start: float
    """Bytes per second."""
    why: str
    since_ms: float

    def bound(self, static: float, now_ms: float) -> AdaptedBound:
        """Return the bound of this moment on the way to `static`; steps missed are caught up."""
        step = int((now_ms - self.since_ms) // RETURN_STEP_MS) + 1
        bytes_per_s = self.start * RETURN_FACTOR ** min(step, RETURN_STEPS)
        if step > RETURN_STEPS or bytes_per_s >= static:
            return AdaptedBound(None, f"{self.why}: the rule's own bound")
        return AdaptedBound(bytes_per_s, f"{self.why}: step {step} back to the rule's own bound")


@dataclass(eq=False)
class QueryBackpressure:
    """A query whose rule is adaptive; made by `Backpressure`.

    The bound is put in force in the quotas. `_on_change` is called when the query's record is out
    of date.
    """

    identity: ClientIdentity
    rule: Rule
    entity: str
    used_ms: float
    """When it was last known that the query is there."""
    _quotas: QuotaManager
    _on_change: Callable[["QueryBackpressure"], None]
    clamp: QueryDrivers = field(default_factory=QueryDrivers)
    _run_id: str | None = None
    _has_ended: bool = False
    label: str | None = None
    """Of its query, as of its latest report."""
    _report_ms: float | None = None
    """When the latest report of an event came."""
    _heard: tuple[str | None, float] | None = None
    """Who sent the latest report (None: an earlier process heard it), and when it came."""
    _rate: float | None = None
    _last_rate: float | None = None
    """What the latest run that had one could take; before this run has one of its own."""
    _why: str = "no batch was reported yet"
    ceiling: float | None = None
    """What `set_ceiling` allows, in records per second; None: what its batches can take."""
    _ceiling_why: str = ""
    _return: BoundRecovery | None = None
    _in_force: AdaptedBound | None = None

    def __post_init__(self) -> None:
        """Put the rule's own bound in force."""
        self._static = self.rule.ceilings[KIND]
        self.client_id = self.identity.client_id or ""
        self.measurements = measurements = QueryMeasurements(_adaptive(self.rule))
        self.record_bytes, self.record_hold = measurements.record_bytes, measurements.record_hold
        self._bound, self._bound_ms = AdaptedBound(None, self._why), self.used_ms
        self.bound = self._static
        """The bound in force, in bytes per second."""
        self._enforce(self.used_ms)

    @property
    def rate(self) -> float | None:
        """What its batches can take, in records per second; None when not known."""
        rate, most = self._rate, self.measurements.rule.max_rate
        return rate if rate is None or most is None else min(rate, most)

    @property
    def withheld(self) -> int:
        """How many records its driver was not told of at its latest look-up; 0 without a run."""
        if self._has_ended or self.clamp.detached:
            return 0
        return sum([end.log_end - end.offset for end in self.clamp.advertised.values()])

    def set_ceiling(self, ceiling: float | None, why: str, now_ms: float) -> None:
        """Set how many records per second the query may have at most; None: what it can take.

        For flow control between queries: it may be below the rule's min_rate, and 0 lets no batch
        begin. Raises ValueError when it is negative or no number.
        """
        if ceiling is not None and not ceiling >= 0:
            raise ValueError(f"the ceiling of {self.entity} must be 0 or more, not {ceiling!r}")
        self.ceiling, self._ceiling_why = ceiling, why
        self._enforce(now_ms)

    def record_report(self, accepted: AcceptedReport, now_ms: float) -> None:
        """Record a report that was accepted, and adapt the bound to it."""
        report, query, batch = accepted.report, accepted.query, accepted.report.batch
        is_heartbeat = report.event == "running"
        if report.run_id != query.run_id or (is_heartbeat and query.ended):
            return  # what comes late from a run before this one, or that is over
        self.label = query.name
        if report.run_id != self._run_id:
            self._begin_run(query, report.run_id, now_ms)
        self.used_ms = now_ms
        self.measurements.interval.add(batch, query.trigger_interval_ms)
        self.measurements.update(self.measurements.rule)
        heard, self._heard = self._heard, (report.sender, now_ms)
        drivers = self.clamp
        if is_heartbeat:
            is_known = report.last_batch_id == query.last_batch_id
            if report.is_waiting and is_known and heard is not None and heard[0] == report.sender:
                # After that report the run was between two batches, and had begun no other.
                drivers.waited_ms = heard[1]
            drivers.record_alive(now_ms, now_ms)
            self._enforce(now_ms)
            return
        event_ms, self._report_ms = now_ms - report.age_ms, now_ms
        drivers.record_report(event_ms, now_ms)
        if batch is not None and query.trigger_kind not in UNPLANNED:
            drivers.record_batch(batch.offsets, report.age_ms)
            rate, why = self.measurements.add(batch, event_ms, drivers, self._static)
            if rate is not None:
                self._rate = self._last_rate = rate
            if why is not None and (rate is not None or self._rate is None):
                self._why = why
        if self._rate is not None:
            self._return = None
        if report.event == "idle":
            self.measurements.waiting_ms = 0.0
            view = DriverView(query, drivers, self.measurements)
            drivers.record_idle(event_ms, set(filter(view.is_unread, drivers.advertised)))
        elif report.event == "terminated":
            self._has_ended = True
            self._forget_rate("the query failed" if report.error else "the query ended", now_ms)
        self._enforce(now_ms)
        self._on_change(self)

    def advertise(
        self, view: DriverView, log_ends: PartitionOffsets, *, is_new: bool
    ) -> PartitionOffsets:
        """Return what to advertise in place of these real ends; `is_new`: log starts were, too."""
        ends, query = log_ends, view.query
        if log_ends:
            ends, is_other = view.advertise(log_ends)
            is_new |= is_other
        if self._run_id is None and query.last_report_ms is not None and not query.ended:
            # The run was known before the client connected.
            self._run_id, self.label = query.run_id, query.name
        self._enforce(view.now_ms)
        if is_new and self._run_id is not None and not self._has_ended:
            self._on_change(self)
        return ends

    def tick(self, now_ms: float) -> None:
        """Do what is due; call it every second or so."""
        if self.clamp.connections:
            self.used_ms = now_ms
        hold_ms = self.measurements.rule.hold_ms
        if self._heard is not None and now_ms - self._heard[1] > hold_ms:
            self._begin_return(f"no report for more than {hold_ms / MS_PER_SECOND:g} s", now_ms)
        if self._return is not None:
            self._enforce(now_ms)

    def set_rule(self, rule: Rule, now_ms: float) -> None:
        """Set another rule, which is adaptive too."""
        self.rule, self._static = rule, rule.ceilings[KIND]
        self.measurements.update(_adaptive(rule))
        if self._rate is not None:
            self._rate = max(self._rate, self.measurements.rule.min_rate)
        self._enforce(now_ms)

    def detach(self, now_ms: float) -> None:
        """Put the rule's own bound back, and clamp nothing from now on."""
        self.clamp.detached = True
        self._quotas.adapt(KIND, self.entity, None, now_ms)

    def document(self, now_ms: float) -> dict[str, Json]:
        """Return what there is to show. Rates are records/s, bounds bytes/s, None if not known."""
        reported_ms, state = self._report_ms, "adaptive"
        if self._return is not None and self._bound.bound is not None:
            state = "returning"
        elif self._return is not None or (self._rate is None and self.ceiling is None):
            state = "static"
        return {
            "entity": self.entity,
            "client_id": self.identity.client_id,
            "query": self.label,
            "state": state,
            "rate": self.rate,
            "ceiling": self.ceiling,
            "bound": self.bound,
            "static_bound": self._static,
            "bound_age_s": (now_ms - self._bound_ms) / MS_PER_SECOND,
            "bytes_per_record": self.measurements.bytes_per_record.value,
            "offsets_per_record": self.measurements.per_record,
            "batch_interval_ms": self.measurements.interval_ms,
            "waiting_ms": self.measurements.waiting_ms,
            "reason": self._bound.reason,
            "report_age_s": None if reported_ms is None else (now_ms - reported_ms) / MS_PER_SECOND,
            "clamp": {
                "on": self.clamp.offsets is not None,
                "why": self.clamp.why,
                "offsets": self.clamp.offsets,
                "withheld": self.withheld,
            },
        }

    def key(self) -> str:
        """Return the key of its record."""
        return BOUND_RECORDS.key(self.client_id, self.entity)

    def record(self) -> Record | None:
        """Return what is to be kept of it; None when no run of its query is known."""
        if self._run_id is None:
            return None
        # As BackpressureRecord has it, but made without it: there may be thousands of partitions.
        value: Json = {
            "listener": self.identity.listener,
            "user": self.identity.user,
            "client_id": self.identity.client_id,
            "entity": self.entity,
            "label": self.label,
            "run_id": self._run_id,
            "has_ended": self._has_ended,
            "rate": self._rate,
            "last_rate": self._last_rate,
            **self.measurements.kept(),
            **self.clamp.kept(),
        }
        return Record.of(self.key(), value, BOUND_RECORDS.version)

    def resume(self, record: BackpressureRecord, now_ms: float) -> None:
        """Resume from what an earlier process kept, as if its last report had come just now."""
        self._run_id, self.label, self._has_ended = record.run_id, record.label, record.has_ended
        self._last_rate = record.last_rate
        self.measurements.resume(record, now_ms)
        if not record.has_ended:
            self._heard = None, now_ms
            if record.rate is not None:
                self._rate = max(record.rate, self.measurements.rule.min_rate)
                self._why = f"{self._rate:,.0f} records/s since before the restart"
            self.clamp.resume(record, now_ms)
        self._enforce(now_ms)

    def _begin_run(self, query: FollowedQuery, run_id: str, now_ms: float) -> None:
        if self._run_id is not None:
            done: dict[TopicPartition, int | None] | None = None
            if query.progress_id in (None, query.query_id):
                view = DriverView(query, self.clamp, self.measurements)
                done = {key: view.completed(key) for key in self.clamp.advertised}
            self.clamp.begin_run(query.run_began_ms, done)
        self._run_id, self._has_ended = run_id, False
        self.measurements.begin_run()
        self._forget_rate("a new run began", now_ms)

    def _forget_rate(self, why: str, now_ms: float) -> None:
        self._begin_return(why, now_ms)
        self._rate, self._why = None, why

    def _begin_return(self, why: str, now_ms: float) -> None:
        adapted = self._bound.bound
        if self._return is None and adapted is not None:
            self._return = BoundRecovery(adapted, why, now_ms)

    def _enforce(self, now_ms: float) -> None:
        """Put in force what is known now: the size of the next batch, and the bound."""
        settings, measured, drivers = self.measurements.rule, self.measurements, self.clamp
        steady, most = measured.bytes_per_record.steady, settings.max_rate
        readable = self._static / steady if steady is not None else None
        # Before the run has one: the rule's, that of a run before, or at most what can be read.
        known = self._rate or settings.initial_rate or measured.estimator.rate or self._last_rate
        rate = known or readable or most
        if rate is not None:
            rate = min(max(rate, settings.min_rate), most or rate)
            rate = measured.throttled_rate.limit(rate, settings.min_rate)
            if settings.estimator == "pid":
                # The other estimator knows what can be read in the time of a batch.
                rate = min(rate, readable or rate)
        is_fresh = known is None and measured.estimator.is_fresh
        drivers.start_rate = settings.min_rate if is_fresh else None
        if rate is not None and self.ceiling is not None:
            rate = min(rate, self.ceiling)
        drivers.rate = self.ceiling if rate is None else rate
        adapted = self._wanted(now_ms)
        if adapted != self._bound:
            self._bound, self._bound_ms = adapted, now_ms
        self.bound = self._static if adapted.bound is None else adapted.bound
        # A batch that was planned to fit is read as fast as its rule allows: each hold would only
        # make it longer.
        in_force = adapted._replace(bound=None) if drivers.offsets is not None else adapted
        if in_force != self._in_force:
            self._in_force = in_force
            self._quotas.adapt(KIND, self.entity, in_force, now_ms)

    def _wanted(self, now_ms: float) -> AdaptedBound:
        rate, size = self.rate, self.measurements.bytes_per_record.value
        adapted = AdaptedBound(None, self._why)
        if self._return is not None:
            adapted = self._return.bound(self._static, now_ms)
        elif rate is not None and size is not None:
            most = f", at most {rate:,.0f}" if rate != self._rate else ""
            adapted = AdaptedBound(rate * size, f"{self._why} of {size:,.0f} bytes{most}")
        elif rate is not None:
            adapted = AdaptedBound(None, f"{self._why}; the size of a record is not known yet")
        if self.ceiling and size is not None:  # at 0 nothing is planned, so nothing is read
            lower = self.ceiling * size
            if adapted.bound is None or lower < adapted.bound:
                adapted = AdaptedBound(lower, self._ceiling_why)
        if adapted.bound is not None and adapted.bound >= self._static:
            adapted = AdaptedBound(None, f"{adapted.reason}; the rule's own bound is lower")
        return adapted


@dataclass(slots=True, eq=False, kw_only=True)
class ConnectionLookups(QueryConnection):
    """The ListOffsets look-ups on one connection of a followed client.

    Executors look up offsets too; they get the real ones. They are known by their fetching, and
    one that has read all ahead, so that it fetches nothing on a new connection, by asking for the
    start of a log amid a run (InternalKafkaConsumer.getAvailableOffsetRange of Spark's Kafka
    source); drivers ask for that before a run's first batch, and of new partitions. So do all as
    long as they `follow` no adaptive rule.
    """

    query: FollowedQuery
    _backpressure: QueryBackpressure | None = None

    def follow(self, backpressure: QueryBackpressure | None) -> None:
        """Clamp by the rule that applies from now on; None: it is not adaptive."""
        before = self._backpressure
        if backpressure is before:
            return
        if before is not None:
            before.clamp.connections.discard(self)
        self._backpressure, self.waits_since_ms = backpressure, None
        if backpressure is not None:
            backpressure.clamp.connect(self)

    def closed(self) -> None:
        """Remove the connection; may be called twice."""
        self.follow(None)

    def wait_ms(self, ask: LookupRequest, now_ms: float) -> float:
        """Return how long the answer still waits for a report; at 0 it is to be `answered`."""
        view = self._recorded(ask, now_ms)
        if view is None or self.wait_failed or not view.keys:
            return 0.0
        until_ms = view.wait_until_ms()
        if until_ms == -math.inf:
            return 0.0
        self.waits_since_ms = view.asked_ms
        # One wait in vain is enough until the reports are back.
        self.wait_failed = until_ms <= now_ms
        return max(0.0, until_ms - now_ms)

    def answered(self, ask: LookupRequest, version: int, frame: bytes, now_ms: float) -> bytes:
        """Return the response as the driver may see it; record what it says.

        `frame` is whole, length included. Partitions with an error or without an offset, and other
        timestamps than LATEST, stay as they are. Raises MalformedResponse.
        """
        view, backpressure = self._recorded(ask, now_ms), self._backpressure
        log_ends: dict[TopicPartition, int] = {}
        is_new = False
        for key, answer in list_offsets.read_list_offsets_response(version, frame).items():
            if answer.error_code or answer.offset < 0:
                continue
            timestamp = ask.timestamps.get(key)
            if timestamp == list_offsets.EARLIEST:
                self.query.log_start(*key, answer.offset, now_ms)
                if view is not None:
                    is_new |= view.drivers.record_start(key, answer.offset)
            elif timestamp == list_offsets.LATEST:
                log_ends[key] = answer.offset
                # Else it is the last stable offset.
                if ask.isolation_level == list_offsets.READ_UNCOMMITTED:
                    self.query.log_end(*key, answer.offset, now_ms)
        if view is None or backpressure is None or not (log_ends or is_new):
            return frame
        view = replace(view, keys=log_ends.keys())
        advertised = backpressure.advertise(view, log_ends, is_new=is_new)
        if advertised == log_ends:  # most often, while the query keeps up
            return frame
        return list_offsets.change_offsets(version, frame, advertised)

    def _recorded(self, ask: LookupRequest, now_ms: float) -> DriverView | None:
        """Record a look-up; return the driver's view, None for an executor or without a rule."""
        backpressure = self._backpressure
        if backpressure is None or self.is_executor:
            return None
        drivers, every = backpressure.clamp, ask.timestamps.items()
        starts = [key for key, asked in every if asked == list_offsets.EARLIEST]
        ends = [key for key, asked in every if asked == list_offsets.LATEST]
        view = DriverView(self.query, drivers, backpressure.measurements, ends, self, now_ms)
        if not view.is_unproved and any(view.completed(key) is not None for key in starts):
            self.is_executor = True
            return None
        if not starts:
            drivers.record_lookup(self, ask.correlation_id)
        self.first_id = self.first_id or 0  # an executor's number may be near the driver's
        return view


def _adaptive(rule: Rule) -> AdaptiveSettings:
    assert rule.adaptive is not None, "Backpressure picks such rules only"
    return rule.adaptive


class Backpressure:
    """The bounds and batches of all queries whose rules are adaptive. Call `tick` every second.

    `on_change`: called when `unwritten` has something new. A query has a record from a run's first
    report until it is forgotten.
    """

    def __init__(self, quotas: QuotaManager, on_change: Callable[[], None] = lambda: None) -> None:
        self.unwritten = UnwrittenRecords()
        self._quotas = quotas
        self._by_client: dict[str, list[QueryBackpressure]] = {}
        """One of each client, unless rules tell its users apart."""
        self._generation = quotas.generation
        self._on_change = on_change
        self._owns = owns_all

    def of_identity(self, identity: ClientIdentity, now_ms: float) -> QueryBackpressure | None:
        """Return that of a client, made when it is new.

        None when its rule is not adaptive, or the client is not this member's. Beyond MAX_QUERIES,
        too: further queries keep the bounds of their rules.
        """
        self._follow_rules(now_ms)
        match, client_id = self._match(identity), identity.client_id
        if match is None or client_id is None or not self._owns.client(client_id):
            return None
        for query in self._by_client.get(client_id, ()):
            if query.entity == match.entity:
                return query
        if sum(map(len, self._by_client.values())) >= MAX_QUERIES:
            return None
        shared = self._quotas, self._changed
        query = QueryBackpressure(identity, match.rule, match.entity, now_ms, *shared)
        self._by_client.setdefault(client_id, []).append(query)
        return query

    def is_adaptive(self, identity: ClientIdentity) -> bool:
        """Return whether a client's rule is adaptive, whoever owns the client."""
        return self._match(identity) is not None

    def own(self, owns: Ownership, now_ms: float) -> None:
        """Adapt the bounds of these clients only; what is due of others is still in `unwritten`."""
        self._owns = owns
        for query in self._all():
            if not owns.client(query.client_id):
                self._changed(query)
                self.unwritten.leaving.add(query)
                self._remove(query, now_ms)

    def of_client(self, client_id: str) -> list[QueryBackpressure]:
        """Return what is adaptive for a client: one, unless rules tell its users apart."""
        return list(self._by_client.get(client_id, ()))

    def shown(self) -> MetricRows:
        """List the rows of OF_BOUNDS: those of which a report has said the label."""
        labelled = {query.label: query for query in self._all() if query.label is not None}
        return [((label,), query) for label, query in labelled.items()]

    def record_report(self, accepted: AcceptedReport, now_ms: float) -> QueryBackpressure | None:
        """Record a report that was accepted; return what it is about, the first if several."""
        self._follow_rules(now_ms)
        queries = self._by_client.get(accepted.query.client_id, ())
        for query in queries:
            query.record_report(accepted, now_ms)
        return queries[0] if queries else None

    def tick(self, now_ms: float) -> None:
        """Do what is due; a query without reports and connections is kept as long as progress."""
        self._follow_rules(now_ms)
        for query in self._all():
            query.tick(now_ms)
            if now_ms - query.used_ms > FORGET_AFTER_MS:
                self._drop(query, now_ms)

    @property
    def clients(self) -> list[str]:
        """Client ids of all that is adaptive."""
        return list(self._by_client)

    def load(self, records: Iterable[Record], now_ms: float) -> list[str]:
        """Resume what an earlier process kept, or another member; return which were not, and why.

        Call it before anything is known of their clients. Damaged ones stay; those that no
        adaptive rule applies to are deleted.
        """
        refused: list[str] = []
        for record in records:
            try:
                kept = read_backpressure_record(record)
                identity = ClientIdentity(kept.listener, kept.user, kept.client_id)
                match = self._match(identity)
                if match is None or match.entity != kept.entity:
                    self.unwritten.mark_deleted(BOUND_RECORDS.key(kept.client_id, kept.entity))
                    raise ValueError(
                        "no adaptive rule applies to the client any more; it is deleted"
                    )
                query = self.of_identity(identity, now_ms)
                if query is None:
                    raise ValueError("there are too many queries")
                query.resume(kept, now_ms)
            except ValueError as error:
                refused.append(f"pressure record {record.key!r} is left out: {error}")
        return refused

    def _match(self, identity: ClientIdentity) -> RuleMatch | None:
        match = self._quotas.table.match(KIND, identity)
        if match is None or match.rule.adaptive is None:
            return None
        # A pause gives some clients a sensor of their own; a query stays the same.
        return replace(match, entity=match.rule.entity(identity))

    def _changed(self, query: QueryBackpressure) -> None:
        if query in self._by_client.get(query.client_id, ()):
            # Else a driver's answer came after the query was let go.
            self.unwritten.mark_changed(query)
            self._on_change()

    def _all(self) -> list[QueryBackpressure]:
        return [query for queries in self._by_client.values() for query in queries]

    def _follow_rules(self, now_ms: float) -> None:
        """Set the rules that apply after a change of them; drop the queries that none does."""
        if self._generation == self._quotas.generation:
            return
        self._generation = self._quotas.generation
        for query in self._all():
            match = self._match(query.identity)
            if match is None or match.entity != query.entity:
                self._drop(query, now_ms)
            else:
                query.set_rule(match.rule, now_ms)

    def _drop(self, query: QueryBackpressure, now_ms: float) -> None:
        self.unwritten.mark_removed(query)
        self._on_change()
        self._remove(query, now_ms)

    def _remove(self, query: QueryBackpressure, now_ms: float) -> None:
        query.detach(now_ms)
        queries = self._by_client[query.client_id]
        queries.remove(query)
        if not queries:
            del self._by_client[query.client_id]
