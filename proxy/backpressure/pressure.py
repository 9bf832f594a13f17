"""One query: from the reports on its batches to the bound of its reading and the next batch."""

import math
from collections.abc import Callable
from dataclasses import asdict, replace

from prometheus_client import Gauge

from metrics import BoundedLabels
from metrics.clock import MS_PER_SECOND
from proxy.progress.query import QueryProgress
from proxy.progress.report import BatchReport
from proxy.progress.report_handler import AcceptedReport
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.manager import QuotaManager
from proxy.quota.rules import AdaptiveBound, Rule
from proxy.state import Json, Record

from .bound import Bound, Return
from .clamp import Clamp
from .figures import Figures
from .inputs import Reading, reading
from .interval import TriggerInterval
from .records import FORMAT, Kept, by_topic, key_of

KIND = QuotaKind.CONSUMER_BYTE_RATE


class QueryPressure:
    """A query whose rule is adaptive; made by `control.Backpressure`.

    Args:
        identity: the client that it reads with.
        entity: whose reading is bounded; see `Rule.entity`.
        rule: an adaptive one.
        quotas: where the bound is put in force.
        gauges: shows it, by the query's label.
        now_ms: the monotonic time.
        on_change: is called when its record is out of date.

    """

    def __init__(
        self,
        identity: ClientIdentity,
        entity: str,
        rule: Rule,
        quotas: QuotaManager,
        gauges: BoundedLabels[Gauge],
        now_ms: float,
        *,
        on_change: Callable[["QueryPressure"], None],
    ) -> None:
        self.identity = identity
        self.entity = entity
        self.used_ms = now_ms
        """When it was last known that the query is there."""
        self._quotas = quotas
        self._gauges = gauges
        self._on_change = on_change
        self._settings = _adaptive(rule)
        self._static = rule.bounds[KIND]
        self._interval = TriggerInterval()
        self._figures = Figures(self._settings)
        self.clamp = Clamp(self._settings, self._interval, self._figures.held.add, self._has_told)
        """What its drivers are told."""
        self._run_id: str | None = None
        self._has_ended = False
        self._label: str | None = None
        self._report_ms: float | None = None
        self._alive_ms: float | None = None
        """From then on the bound is held without a report."""
        self._rate: float | None = None
        self._last_rate: float | None = None
        """What the latest run that had one could take; before this run has one of its own."""
        self._why = "no batch was reported yet"
        self._ceiling: float | None = None
        self._ceiling_why = ""
        self._return: Return | None = None
        self._bound = self._in_force = Bound(None, self._why)
        self._bound_ms = now_ms
        """Since when."""
        self._is_shaped = False
        """Whether its batches are shaped where they are planned: then reading is not held."""
        quotas.adapt(KIND, entity, None, self._why, now_ms)
        self._enforce(now_ms)

    @property
    def rate(self) -> float | None:
        """What its batches can take, in records per second; None when not known."""
        if self._rate is None or self._settings.max_rate is None:
            return self._rate
        return min(self._rate, self._settings.max_rate)

    @property
    def processing_rate(self) -> float | None:
        """Records per second in its latest batch, the proxy's own holds left out."""
        return self._figures.processing_rate

    @property
    def batch_interval_ms(self) -> float | None:
        """The query's trigger interval; None when not known."""
        return self._settings.batch_interval_ms or self._interval.learnt_ms

    @property
    def ceiling(self) -> float | None:
        """What `limit` allows, in records per second; None: what its batches can take."""
        return self._ceiling

    @property
    def bound(self) -> float:
        """The bound in force, in bytes per second."""
        adapted = self._bound.bytes_per_s
        return self._static if adapted is None else adapted

    @property
    def bytes_per_record(self) -> float | None:
        """What a record costs to read; None when not known."""
        return self._figures.bytes_per_record.value

    def read(self, count: int) -> None:
        """Take note of a Fetch response of so many bytes."""
        self._figures.read(count)

    def held(self, start_ms: float, due_ms: float) -> None:
        """Take note that a Fetch response to the query is held from when to when."""
        self._figures.reading_held(start_ms, due_ms)

    def limit(self, ceiling: float | None, why: str, now_ms: float) -> None:
        """Let the query have no more than so many records per second; None: what it can take.

        For flow control between queries: it may be below the rule's min_rate, and 0 lets no batch
        begin. Raises ValueError when it is negative or no number.
        """
        if ceiling is not None and not ceiling >= 0:
            raise ValueError(f"the ceiling of {self.entity} must be 0 or more, not {ceiling!r}")
        self._ceiling, self._ceiling_why = ceiling, why
        self._enforce(now_ms)

    def reported(self, accepted: AcceptedReport, now_ms: float) -> None:
        """Take in a report that the registry has accepted."""
        report, query = accepted.report, accepted.query
        is_greeting = report.event == "running"
        if report.run_id != query.run_id or (is_greeting and query.ended):
            return  # what comes late from a run before this one, or that is over
        self.used_ms = now_ms
        if query.name != self._label:
            self._forget_gauge()
            self._label = query.name
        if report.run_id != self._run_id:
            self._begin_run(query, report.run_id, now_ms)
        self._alive_ms = now_ms
        self._follow_interval(query, report.batch)
        if is_greeting:
            self.clamp.trust.greeted(now_ms)
            self._enforce(now_ms)
            return
        event_ms = now_ms - report.age_ms
        self._report_ms = now_ms
        self.clamp.reported(event_ms, now_ms)
        if self._rate is not None:
            self._return = None
        if report.batch is not None:
            read = reading(report.batch)
            self.clamp.done(read.offsets, report.age_ms)
            self._add_batch(report.batch, read, event_ms)
        elif report.event == "idle":
            self._figures.waiting.ms = 0.0
            self.clamp.idle(query, event_ms)
        elif report.event == "terminated":
            self._has_ended = True
            self._forget_rate("the query failed" if report.error else "the query ended", now_ms)
        self._enforce(now_ms)
        self._on_change(self)

    def tick(self, now_ms: float) -> None:
        """Do what is due; call it every second or so."""
        if self.clamp.trust.connections:
            self.used_ms = now_ms
        if self._alive_ms is None:
            return
        if now_ms - self._alive_ms > self._settings.hold_ms:
            hold_s = self._settings.hold_ms / MS_PER_SECOND
            self._go_back(f"no report for more than {hold_s:g} s", now_ms)
        if self._return is not None:
            self._enforce(now_ms)

    def follow(self, rule: Rule, now_ms: float) -> None:
        """Go on under another rule, which is adaptive too."""
        self._settings = self.clamp.settings = settings = _adaptive(rule)
        self._static = rule.bounds[KIND]
        self._set_interval(self.batch_interval_ms)
        if self._rate is not None:
            self._rate = max(self._rate, settings.min_rate)
        self._enforce(now_ms)

    def detach(self, now_ms: float) -> None:
        """Put the rule's own bound back, and tell drivers the truth from now on."""
        self.clamp.detached = True
        self._forget_gauge()
        self._quotas.adapt(KIND, self.entity, None, None, now_ms)

    def document(self, now_ms: float) -> dict[str, Json]:
        """Return what there is to show. Rates are records/s, bounds bytes/s, None if not known."""
        reported_ms = self._report_ms
        return {
            "entity": self.entity,
            "client_id": self.identity.client_id,
            "query": self._label,
            "state": self._state(),
            "rate": self.rate,
            "ceiling": self._ceiling,
            "bound": self.bound,
            "static_bound": self._static,
            "bound_age_s": (now_ms - self._bound_ms) / MS_PER_SECOND,
            "bytes_per_record": self.bytes_per_record,
            "offsets_per_record": self.clamp.offsets_per_record,
            "batch_interval_ms": self.batch_interval_ms,
            "waiting_ms": self._figures.waiting.ms,
            "reason": self._bound.reason,
            "report_age_s": None if reported_ms is None else (now_ms - reported_ms) / MS_PER_SECOND,
            "clamp": {**asdict(self.clamp.state), "withheld": self.clamp.told.withheld},
        }

    @property
    def key(self) -> str:
        """Of its record."""
        return key_of(self.identity.client_id or "", self.entity)

    def record(self) -> Record | None:
        """Return what is to be kept of it; None when no run of its query is known.

        It is made for all partitions that the query reads.
        """
        if self._run_id is None or self.clamp.detached:
            return None
        # As Kept has it, but made without it: there may be thousands of partitions.
        value: Json = {
            "listener": self.identity.listener,
            "user": self.identity.user,
            "client_id": self.identity.client_id,
            "entity": self.entity,
            "label": self._label,
            "run_id": self._run_id,
            "has_ended": self._has_ended,
            "interval_ms": self._interval.learnt_ms,
            "rate": self._rate,
            "last_rate": self._last_rate,
            "instances": self.clamp.trust.instances(),
            "least_offsets": self.clamp.least_offsets,
            **self._figures.kept(),
            "told": by_topic(self.clamp.told.kept()),
            "starts": by_topic(self.clamp.told.starts),
        }
        return Record.of(self.key, value, FORMAT.version)

    def resume(self, kept: Kept, now_ms: float) -> None:
        """Go on from what an earlier process kept, as if its last report had come just now."""
        self._run_id, self._label, self._has_ended = kept.run_id, kept.label, kept.has_ended
        self._last_rate = kept.last_rate
        self._interval.restore(kept.interval_ms)
        self._set_interval(self.batch_interval_ms)
        self._figures.resume(kept, now_ms)
        if kept.has_ended:
            self._enforce(now_ms)
            return
        self._alive_ms = now_ms
        if kept.rate is not None:
            self._rate = max(kept.rate, self._settings.min_rate)
            self._why = f"{self._rate:,.0f} records/s since before the restart"
        self.clamp.resume(
            kept.ends(), kept.log_starts(), kept.instances, kept.least_offsets, now_ms
        )
        self._enforce(now_ms)

    def _follow_interval(self, query: QueryProgress, batch: BatchReport | None) -> None:
        if batch is not None:
            self._interval.add(batch)
        self._set_interval(self._interval.of(query, self._settings.batch_interval_ms))

    def _set_interval(self, interval_ms: float | None) -> None:
        if interval_ms is not None:
            self._figures.follow(replace(self._settings, batch_interval_ms=interval_ms))

    def _has_told(self, query: QueryProgress, is_new: bool, now_ms: float) -> None:
        """Follow an answer to a driver's look-up."""
        if self._run_id is None and query.last_report_ms is not None and not query.ended:
            # The run was known before the client connected.
            self._run_id, self._label = query.run_id, query.name
        if self.clamp.state.on != self._is_shaped:
            self._enforce(now_ms)
        if is_new and self._run_id is not None and not self._has_ended:
            self._on_change(self)

    def _state(self) -> str:
        if self._return is not None:
            return "static" if self._bound.bytes_per_s is None else "returning"
        return "static" if self._rate is None and self._ceiling is None else "adaptive"

    def _begin_run(self, query: QueryProgress, run_id: str, now_ms: float) -> None:
        if self._run_id is not None:
            self.clamp.begin_run(query)
        self._run_id, self._has_ended = run_id, False
        self._interval.begin_run()
        self._figures.begin_run()
        self._forget_rate("a new run began", now_ms)

    def _add_batch(self, batch: BatchReport, read: Reading, end_ms: float) -> None:
        """Take a batch in that was done at `end_ms`."""
        if self.batch_interval_ms is None:
            return
        ends = {key: told.latest for key, told in self.clamp.told.items()}
        ends_ms = max((told.told_ms for _, told in self.clamp.told.items()), default=-math.inf)
        left = self.clamp.told.left({key: each.end for key, each in batch.ranges.items()})
        found = self._figures.add(
            batch, read, end_ms, ends, ends_ms, left=left, static=self._static
        )
        if found is None:
            return
        rate, figures = found
        if rate is not None:
            self._rate = self._last_rate = rate
            self._return = None
            self._why = f"{figures} -> {rate:,.0f} records/s"
        elif self._rate is None:
            self._why = f"{figures}: the first of this run, no rate yet"

    def _forget_rate(self, why: str, now_ms: float) -> None:
        self._go_back(why, now_ms)
        self._rate, self._why = None, why

    def _go_back(self, why: str, now_ms: float) -> None:
        """Begin the way back to the rule's own bound, unless it is in force or has begun."""
        adapted = self._bound.bytes_per_s
        if self._return is None and adapted is not None:
            self._return = Return(adapted, why, now_ms)

    def _enforce(self, now_ms: float) -> None:
        """Put in force what follows from all that is known."""
        rate = self.rate if self._rate is not None else self._first_rate()
        if rate is not None:
            rate = self._figures.reach.limit(rate, self._settings.min_rate)
            if self._settings.estimator == "pid":
                # The other estimator knows what can be read in the time of a batch.
                rate = min(rate, self._readable or rate)
        known = [known for known in (rate, self._ceiling) if known is not None]
        self.clamp.rate = min(known, default=None)
        self.clamp.offsets_per_record = self._figures.offsets_per_record.value or 1.0
        self._is_shaped = self.clamp.state.on
        bound = self._wanted(now_ms)
        if bound != self._bound:
            self._bound, self._bound_ms = bound, now_ms
        # A batch that was planned to fit is read as fast as its rule allows: each hold would only
        # make it longer.
        in_force = replace(bound, bytes_per_s=None) if self._is_shaped else bound
        if in_force != self._in_force:
            self._in_force = in_force
            self._quotas.adapt(KIND, self.entity, in_force.bytes_per_s, in_force.reason, now_ms)
        if self._label is not None:
            self._gauges.of(self._label).set(self.bound)

    def _first_rate(self) -> float | None:
        """Return the rate for the batches of a run before it has one; None: no bound is known.

        The rule's `initial_rate`, else what is known of the runs before, else what the rule lets be
        read.
        """
        settings = self._settings
        rate = settings.initial_rate or self._figures.rate or self._last_rate or self._readable
        if rate is None:
            return None
        return min(max(rate, settings.min_rate), settings.max_rate or rate)

    @property
    def _readable(self) -> float | None:
        """Records per second that the rule lets be read; None when their size is not known."""
        size = self._figures.bytes_per_record.steady
        return self._static / size if size is not None else None

    def _wanted(self, now_ms: float) -> Bound:
        size = self.bytes_per_record
        bound = Bound(None, self._why)
        if self._return is not None:
            bound = self._return.bound(self._static, now_ms)
        elif self.rate is not None and size is not None:
            bound = Bound(self.rate * size, f"{self._why} of {size:,.0f} bytes")
            if self.rate != self._rate:
                bound = replace(bound, reason=f"{bound.reason}, at most {self.rate:,.0f}")
        elif self.rate is not None:
            bound = Bound(None, f"{self._why}; the size of a record is not known yet")
        if self._ceiling and size is not None:  # at 0 nothing is planned, so nothing is read
            lower = self._ceiling * size
            if bound.bytes_per_s is None or lower < bound.bytes_per_s:
                bound = Bound(lower, self._ceiling_why)
        if bound.bytes_per_s is not None and bound.bytes_per_s >= self._static:
            bound = Bound(None, f"{bound.reason}; the rule's own bound is lower")
        return bound

    def _forget_gauge(self) -> None:
        if self._label is not None:
            self._gauges.forget(query=self._label)


def _adaptive(rule: Rule) -> AdaptiveBound:
    if rule.adaptive is None:
        raise ValueError(f"{rule.title} is not adaptive")
    return rule.adaptive
