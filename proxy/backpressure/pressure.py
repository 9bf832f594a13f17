"""One query: from the reports on its batches to the bound of its reading and the next batch."""

from dataclasses import asdict, replace

from prometheus_client import Gauge

from metrics import BoundedLabels
from proxy.progress.book import Accepted
from proxy.progress.report import Batch
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.manager import QuotaManager
from proxy.quota.rules import Adaptive, Rule
from proxy.state import Json

from .bound import Bound, Return
from .clamp import Clamp
from .estimator import MS_PER_SECOND, PidEstimator, RateEstimator
from .inputs import HeldTime, PerRecord, Reach, WaitingTime, reading

KIND = QuotaKind.CONSUMER_BYTE_RATE

MIN_PROCESSING_MS = 1.0
"""Of a batch that was held all the time."""


class QueryPressure:
    """A query whose rule is adaptive; made by `control.Backpressure`.

    Args:
        identity: the client that it reads with.
        entity: whose reading is bounded; see `Rule.entity`.
        rule: an adaptive one.
        quotas: where the bound is put in force.
        gauges: shows it, by the query's label.
        now_ms: the monotonic time.

    """

    def __init__(
        self,
        identity: ClientIdentity,
        entity: str,
        rule: Rule,
        quotas: QuotaManager,
        gauges: BoundedLabels[Gauge],
        now_ms: float,
    ) -> None:
        self.identity = identity
        self.entity = entity
        self.used_ms = now_ms
        """When it was last known that the query is there."""
        self._quotas = quotas
        self._gauges = gauges
        self._settings = _adaptive(rule)
        self._static = rule.bounds[KIND]
        self._reading_held = HeldTime()
        self._held = HeldTime()
        """That, and the waits of the driver's look-ups."""
        self.clamp = Clamp(self._settings, self._held.add)
        """What its drivers are told."""
        self._estimator: RateEstimator = PidEstimator(self._settings)
        self._waiting = WaitingTime()
        self._reach = Reach()
        self._bytes_per_record = PerRecord()
        self._offsets_per_record = PerRecord()
        self._bytes: float | None = None
        """Read since the last batch. None before the first: its reading was not seen from the
        beginning."""
        self._run_id: str | None = None
        self._label: str | None = None
        self._report_ms: float | None = None
        self.processing_rate: float | None = None
        """Records per second in its latest batch, the proxy's own holds left out."""
        self._rate: float | None = None
        self._why = "no batch was reported yet"
        self._ceiling: float | None = None
        self._ceiling_why = ""
        self._return: Return | None = None
        self._bound = Bound(None, self._why)
        self._bound_ms = now_ms
        """Since when."""
        quotas.adapt(KIND, entity, None, self._why, now_ms)
        self._enforce(now_ms)

    @property
    def rate(self) -> float | None:
        """What its batches can take, in records per second; None when not known."""
        if self._rate is None or self._settings.max_rate is None:
            return self._rate
        return min(self._rate, self._settings.max_rate)

    @property
    def batch_interval_ms(self) -> float:
        """The query's trigger interval, as its rule says."""
        return self._settings.batch_interval_ms

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
        return self._bytes_per_record.value

    def read(self, count: int) -> None:
        """Take note of a Fetch response of so many bytes."""
        if self._bytes is not None:
            self._bytes += count

    def held(self, start_ms: float, due_ms: float) -> None:
        """Take note that a Fetch response to the query is held from when to when."""
        self._reading_held.add(start_ms, due_ms)
        self._held.add(start_ms, due_ms)

    def limit(self, ceiling: float | None, why: str, now_ms: float) -> None:
        """Let the query have no more than so many records per second; None: what it can take.

        For flow control between queries: it may be below the rule's min_rate. Raises ValueError
        when it is not above 0.
        """
        if ceiling is not None and not ceiling > 0:
            raise ValueError(f"the ceiling of {self.entity} must be above 0, not {ceiling!r}")
        self._ceiling, self._ceiling_why = ceiling, why
        self._enforce(now_ms)

    def reported(self, accepted: Accepted, now_ms: float) -> None:
        """Take in a report that the book has accepted."""
        report, query = accepted.report, accepted.query
        if report.run_id != query.run_id:
            return  # what comes late from a run before this one
        self.used_ms = now_ms
        if query.name != self._label:
            self._forget_gauge()
            self._label = query.name
        if report.run_id != self._run_id:
            self._begin_run(report.run_id, now_ms)
        event_ms = now_ms - report.age_ms
        self._report_ms = now_ms
        self.clamp.reported(event_ms)
        if self._rate is not None:
            self._return = None
        if report.batch is not None:
            self._add_batch(report.batch, event_ms)
        elif report.event == "idle":
            self._waiting.ms = 0.0
            self.clamp.idle(event_ms)
        elif report.event == "terminated":
            self._forget_rate("the query failed" if report.error else "the query ended", now_ms)
        self._enforce(now_ms)

    def tick(self, now_ms: float) -> None:
        """Do what is due; call it every second or so."""
        if self.clamp.connections:
            self.used_ms = now_ms
        if self._report_ms is None:
            return
        if now_ms - self._report_ms > self._settings.hold_ms:
            hold_s = self._settings.hold_ms / MS_PER_SECOND
            self._go_back(f"no report for more than {hold_s:g} s", now_ms)
        if self._return is not None:
            self._enforce(now_ms)

    def follow(self, rule: Rule, now_ms: float) -> None:
        """Go on under another rule, which is adaptive too."""
        settings, before = _adaptive(rule), self._settings
        self._settings = self.clamp.settings = settings
        self._static = rule.bounds[KIND]
        if _of_estimator(settings) != _of_estimator(before):
            self._estimator = PidEstimator(settings)
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
            "waiting_ms": self._waiting.ms,
            "reason": self._bound.reason,
            "report_age_s": None if reported_ms is None else (now_ms - reported_ms) / MS_PER_SECOND,
            "clamp": {**asdict(self.clamp.state), "withheld": self.clamp.withheld},
        }

    def _state(self) -> str:
        if self._return is not None:
            return "static" if self._bound.bytes_per_s is None else "returning"
        return "static" if self._rate is None and self._ceiling is None else "adaptive"

    def _begin_run(self, run_id: str, now_ms: float) -> None:
        if self._run_id is not None:
            self.clamp.begin_run()
        self._run_id = run_id
        self._estimator = PidEstimator(self._settings)
        self._waiting = WaitingTime()
        self._reach = Reach()
        self._forget_rate("a new run began", now_ms)

    def _add_batch(self, batch: Batch, end_ms: float) -> None:
        """Take a batch in that was done at `end_ms`."""
        read = reading(batch)
        execution_ms = float(batch.execution_ms or 0)
        start_ms = end_ms - execution_ms
        held_ms = self._held.within(start_ms, end_ms)
        reading_held_ms = self._reading_held.within(start_ms, end_ms)
        self._held.forget(start_ms)
        self._reading_held.forget(start_ms)
        # Others are processed while one response is held, so this may say too little, and the rate
        # be too high for a batch. To leave it in would be worse: a rate that only ever falls.
        processing_ms = max(MIN_PROCESSING_MS, execution_ms - held_ms)
        waited_ms = self._waiting.add(processing_ms, self._settings.batch_interval_ms)
        if read.records > 0:
            if self._bytes is not None:
                self._bytes_per_record.add(self._bytes, read.records)
            self._bytes = 0.0
            if read.offsets is not None:
                self._offsets_per_record.add(read.offsets, read.records)
        if execution_ms <= 0 or read.records <= 0:
            return
        self._reach.add(read.records, execution_ms, reading_held_ms)
        self.processing_rate = read.records / processing_ms * MS_PER_SECOND
        rate = self._estimator.compute(
            batch.timestamp_ms + execution_ms, read.records, processing_ms, waited_ms
        )
        figures = f"batch {batch.batch_id}: {read.records:,} records in {execution_ms:,.0f} ms"
        if held_ms > 0:
            figures += f" (held {held_ms:,.0f} ms left out)"
        if rate is not None:
            self._rate = rate
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
        rate = self.rate if self._rate is not None else self._settings.initial_rate
        if rate is not None:
            rate = self._reach.limit(rate, self._settings.min_rate)
        known = [known for known in (rate, self._ceiling) if known is not None]
        self.clamp.rate = min(known, default=None)
        self.clamp.offsets_per_record = self._offsets_per_record.value or 1.0
        bound = self._wanted(now_ms)
        if bound != self._bound:
            self._bound, self._bound_ms = bound, now_ms
            self._quotas.adapt(KIND, self.entity, bound.bytes_per_s, bound.reason, now_ms)
        if self._label is not None:
            self._gauges.of(self._label).set(self.bound)

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
        if self._ceiling is not None and size is not None:
            lower = self._ceiling * size
            if bound.bytes_per_s is None or lower < bound.bytes_per_s:
                bound = Bound(lower, self._ceiling_why)
        if bound.bytes_per_s is not None and bound.bytes_per_s >= self._static:
            bound = Bound(None, f"{bound.reason}; the rule's own bound is lower")
        return bound

    def _forget_gauge(self) -> None:
        if self._label is not None:
            self._gauges.forget(query=self._label)


def _adaptive(rule: Rule) -> Adaptive:
    if rule.adaptive is None:
        raise ValueError(f"{rule.title} is not adaptive")
    return rule.adaptive


def _of_estimator(settings: Adaptive) -> tuple[float, ...]:
    gains = (settings.proportional, settings.integral, settings.derivative)
    return (settings.batch_interval_ms, settings.min_rate, *gains)
