"""Clamp the log ends that a query's driver looks up, so that its next batch has the right size.

Structured Streaming plans a batch up to the latest offsets that the driver gets at the trigger. A
driver that gets less plans less; one that gets less than before takes it for lost data. What is
advertised lies between what the query already knows and the real end, always.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from metrics.clock import MS_PER_SECOND
from proxy.progress.query import QueryProgress
from proxy.progress.report import TriggerKind
from proxy.quota.rules import AdaptiveBound
from proxy.wire.list_offsets import LATEST, OffsetLookup
from proxy.wire.topic_partition import TopicPartition

from .advertised_ends import MAX_PARTITIONS, AdvertisedEnds, PartitionOffsets
from .backpressure_record import BackpressureRecord, by_partition
from .driver_connections import LIFE_WAIT_MS, DriverConnections, LookupConnection
from .driver_progress import EVENT_JITTER_MS, DriverProgress
from .estimator_inputs import TriggerInterval
from .measurements import BatchMeasurements

MAX_OFFSETS = 2**63
"""For one batch: there are no more."""

REPORT_WAIT_MS = 300.0
"""How long an answer waits for the report on the batch before; the two race."""

LATE_MS = 100.0
"""Where a report came later than that after its batch, none is waited for at the next look-up."""

OVERRUN = 1.1
"""A driver that looks up again so many trigger intervals after its last answer, or later, has had a
batch for all that time: it would have waited for a trigger otherwise."""

REFUSED_GROWTH = 2
"""How many times more is advertised to a driver that planned no batch of what it got."""

READS_ONCE = (TriggerKind.AVAILABLE_NOW, TriggerKind.ONCE)
"""Under these a run takes the ends of the logs once."""

UNPLANNED = (TriggerKind.CONTINUOUS, TriggerKind.REAL_TIME, TriggerKind.OTHER)
"""Under these a run plans no batches up to the ends that its driver looks up, or may not."""

Key = TypeVar("Key", bound=tuple[str, int])


@dataclass(frozen=True, slots=True)
class ClampState:
    """What came of the driver's last look-up, for people."""

    on: bool
    why: str
    offsets: int | None
    """For the next batch, over all partitions; None when it is not clamped."""


@dataclass(eq=False)
class Clamp:
    """What is advertised to one query's drivers, over all their connections."""

    settings: AdaptiveBound
    _interval: TriggerInterval
    _measurements: BatchMeasurements
    _on_answered: Callable[[QueryProgress, bool, float], None]
    """Is called when drivers were answered, with whether they got something new, and the time."""
    rate: float | None = None
    """Records per second for the next batch; None when not known, and 0 lets none begin."""
    start_rate: float | None = None
    """The same of a slow start under a processing-time trigger, as nothing is known of what a batch
    costs: then the driver gets what came in since its look-up before, if that is more. None
    otherwise."""
    offsets_per_record: float = 1.0
    """How far the offsets go on with a record: more where transactions or compaction leave gaps,
    less where a query reads its source twice."""
    detached: bool = False
    """Whether no adaptive rule is left for the query."""
    state: ClampState = ClampState(on=False, why="the driver has not asked yet", offsets=None)
    advertised: AdvertisedEnds = field(default_factory=AdvertisedEnds)
    connections: DriverConnections = field(default_factory=DriverConnections)
    _is_late: bool = False
    """Whether the latest report came late, as Spark's do where there is much to do: see LATE_MS."""
    waited_ms: float = -math.inf
    """See DriverProgress."""
    answered_ms: float = math.inf
    """See DriverProgress."""
    least_offsets: int = 0
    """So many at least are advertised for a batch: the driver planned none of fewer, as it does
    with the option minOffsetsPerTrigger. 0: none was refused in this run."""

    def resume(self, record: BackpressureRecord, now_ms: float) -> None:
        """Resume a run from what an earlier process advertised to its driver."""
        self.advertised.resume(by_partition(record.told), by_partition(record.starts), now_ms)
        self.connections.resume(record.instances, now_ms)
        self.least_offsets = record.least_offsets

    def begin_run(self, query: QueryProgress) -> None:
        """Forget what was advertised to the drivers of earlier runs, as far as it is done.

        What is not completed may be the end of a batch with which this run begins, from the
        checkpoint: a run that is stopped or fails gives its batch up. And what was advertised after
        the last event may have been given to the driver of this run.
        """
        done: dict[TopicPartition, int | None] | None = None
        if query.progress_id in (None, query.query_id):
            progress = self._progress(query)
            done = {key: progress.completed(key) for key in self.advertised}
        self.advertised.begin_run(self.connections.event_ms, done)
        self.connections.begin_run()
        self.least_offsets, self.waited_ms = 0, -math.inf
        if self.answered_ms < (query.run_began_ms or math.inf):
            self.answered_ms = math.inf

    def record_batch(self, offsets: int | None, age_ms: float) -> None:
        """Record that a batch of so many offsets, if known, was reported so long after its end."""
        self._is_late = age_ms > LATE_MS
        self.advertised.starts.clear()
        if offsets and offsets * REFUSED_GROWTH <= self.least_offsets:
            self.least_offsets = 0  # it does plan batches of so few

    def record_idle(self, query: QueryProgress, event_ms: float) -> None:
        """Record that there was nothing to plan: what was advertised and read by then is done."""
        progress = self._progress(query)
        self.advertised.record_idle(event_ms, set(filter(progress.is_unread, self.advertised)))

    def record_waiting(self, query: QueryProgress, last_batch_id: int | None, ms: float) -> None:
        """Record that the run was between two batches at some time after `ms`.

        All batches up to `last_batch_id` were done, and it had begun no other.
        """
        if last_batch_id == query.last_batch_id:
            self.waited_ms = ms

    def record_start(
        self, query: QueryProgress, key: TopicPartition, offset: int, now_ms: float
    ) -> None:
        """Record the start of a log that the driver got."""
        if self.advertised.record_start(key, offset):
            self._on_answered(query, True, now_ms)

    def has_completed(self, query: QueryProgress, key: TopicPartition) -> bool:
        """Return whether the present run is known to have completed a batch with this partition."""
        progress = self._progress(query)
        return not progress.is_unproved and progress.completed(key) is not None

    def advertise(
        self,
        query: QueryProgress,
        connection: LookupConnection,
        log_ends: PartitionOffsets,
        now_ms: float,
    ) -> PartitionOffsets:
        """Return what to advertise in place of these real ends; record it."""
        asked_ms = now_ms
        if connection.waits_since_ms is not None:
            asked_ms = connection.waits_since_ms
            self._measurements.held.add(asked_ms, now_ms)
            connection.waits_since_ms = None
        progress = self._progress(query)
        why_not = self._why_not(progress, connection, now_ms)
        if why_not is None and progress.knows_more(log_ends, connection, now_ms):
            why_not = "the driver asked again and read nothing: it knows more than is known here"
        ends = log_ends
        if why_not is None:
            ends = self._clamped(progress, connection, log_ends, asked_ms)
        else:
            self.state = ClampState(on=False, why=why_not, offsets=None)
        is_new, self.answered_ms = False, min(self.answered_ms, now_ms)
        for key, end in ends.items():
            is_new |= self.advertised.record(key, log_ends[key], end, connection, now_ms)
        self._on_answered(query, is_new, now_ms)
        return ends

    def _clamped(
        self,
        progress: DriverProgress,
        connection: LookupConnection,
        log_ends: PartitionOffsets,
        asked_ms: float,
    ) -> PartitionOffsets:
        is_overdue = connection.wait_failed or self._is_late
        new = self.advertised.new(log_ends)
        fitting, why = self._fitting(progress.query, new)
        after = self._after_overrun(progress, connection, log_ends, asked_ms)
        if after is not None and after < fitting:
            fitting = after
            why = f"the batch before, not reported yet, took long: {fitting:,} offsets for the next"
        if self._is_refused(progress, connection, log_ends):
            more = min(self._all_planned(progress) * REFUSED_GROWTH, MAX_OFFSETS)
            self.least_offsets = max(self.least_offsets, more)
            fitting, why = self._fitting(progress.query, new)
            is_overdue = False
        bases: dict[TopicPartition, int] = {}
        lags: dict[TopicPartition, int] = {}
        for key, log_end in self._log_ends(progress.query, connection, log_ends).items():
            base = progress.base(key)
            if key in log_ends:
                done = progress.done_by_now(key, connection, is_overdue=is_overdue)
                base = base if done is None else max(base or 0, done)
            if base is not None:
                bases[key], lags[key] = base, max(0, log_end - base)
        parts = apportion(fitting, lags) if fitting else dict.fromkeys(lags, 0)
        offsets = max(fitting, sum(lag > 0 for lag in lags.values())) if fitting else 0
        if offsets > fitting:
            why += f"; each of {offsets:,} partitions gets one"
        has_room = len(self.advertised) + len(log_ends) <= MAX_PARTITIONS
        may_begin_low = has_room and progress.has_planned_nothing
        ends = dict(log_ends)
        for key in log_ends.keys() & bases.keys():
            known = self.advertised.get(key)
            if known is not None or may_begin_low:
                before = known.offset if known is not None else 0
                ends[key] = min(log_ends[key], max(bases[key] + parts[key], before))
        self.state = ClampState(on=True, why=why, offsets=offsets)
        return ends

    def _after_overrun(
        self,
        progress: DriverProgress,
        connection: LookupConnection,
        keys: Collection[TopicPartition],
        asked_ms: float,
    ) -> int | None:
        """Return how many offsets are to follow an unreported batch that took long, if it did."""
        ends = self.advertised
        unreported = [ends[key] for key in keys if progress.is_unreported(key, connection)]
        planned_ms = max((end.raised_ms for end in unreported), default=math.inf)
        took_ms, query = asked_ms - planned_ms, progress.query
        is_timed = query.trigger_kind is TriggerKind.PROCESSING_TIME
        if not (is_timed and took_ms > OVERRUN * (query.trigger_interval_ms or math.inf)):
            return None
        if any(end.answered_ms > planned_ms for end in unreported):
            return None  # it has looked up since: there was a trigger without a batch
        offsets = self._all_planned(progress)
        for end in ends.values():  # other brokers may have answered to this trigger before
            if end.previous is not None and end.raised_ms - planned_ms > took_ms / 2:
                offsets -= end.offset - end.previous
        rate = self._measurements.rate_after(offsets, planned_ms, asked_ms)
        return None if rate is None else self._per_batch(query, rate)

    def _rate(self, query: QueryProgress) -> float | None:
        if self.start_rate is None or query.trigger_kind is not TriggerKind.PROCESSING_TIME:
            return self.rate
        return self.start_rate if self.rate is None else min(self.start_rate, self.rate)

    def _fitting(self, query: QueryProgress, new: int) -> tuple[int, str]:
        """Return how many offsets the next batch is to have, and why.

        In a slow start it may have all the `new` ones: a query that keeps up has the time for it.
        """
        rate = self._rate(query) or 0.0
        if rate <= 0:
            return 0, "no batch may begin now"
        fitting = self._per_batch(query, rate)
        why = f"{rate:,.0f} records/s make {fitting:,} offsets for one batch"
        if rate == self.start_rate:
            why += ": nothing is known of its cost yet"
            if new > fitting:
                fitting = min(new, self._per_batch(query, self.rate or math.inf))
                why += f"; {fitting:,} have just come in"
        if fitting < self.least_offsets:
            fitting = self.least_offsets
            why += f"; the driver plans none of so few, {fitting:,} are offered"
        return fitting, why

    def _per_batch(self, query: QueryProgress, rate: float) -> int:
        interval_ms = self._interval_ms(query) or 0.0
        offsets = rate * interval_ms / MS_PER_SECOND * self.offsets_per_record
        return max(1, round(min(offsets, MAX_OFFSETS)))

    def _all_planned(self, progress: DriverProgress) -> int:
        return sum(map(progress.planned, self.advertised))

    def _is_refused(
        self,
        progress: DriverProgress,
        connection: LookupConnection,
        keys: Collection[TopicPartition],
    ) -> bool:
        """Return whether the driver is known to have planned no batch of what it got last."""
        refused = {key for key in keys if progress.is_refused(key, connection)}
        others = (key for key in keys if key not in refused)
        return bool(refused) and not any(progress.is_unreported(k, connection) for k in others)

    def wait_until_ms(
        self,
        query: QueryProgress,
        connection: LookupConnection,
        ask: OffsetLookup,
        since_ms: float,
        now_ms: float,
    ) -> float:
        """Return until when the answer to a look-up is to wait, long ago if it need not.

        It waits for a report on the batch that the driver planned last, where there was none yet;
        for one on the start of a run whose first batch may be bounded; and, on a connection that is
        not known to be the driver's, for a sign of life that makes it so. It began at `since_ms`.
        """
        keys = [key for key, timestamp in ask.timestamps.items() if timestamp == LATEST]
        if self.detached or not keys:
            return -math.inf
        connections = self.connections
        report_ms = max(since_ms, connections.resumed_alive_ms) + REPORT_WAIT_MS
        if connections.awaits_run:
            return max(report_ms, connections.proved_by_ms(connection))
        if query.ended or (query.last_heard_ms is None and not connections.is_resumed):
            is_unbounded = self.rate is None and self.start_rate is None
            reads_all = is_unbounded or query.trigger_kind in READS_ONCE
            return -math.inf if reads_all and self.settings.initial_rate is None else report_ms
        progress = self._progress(query)
        if self._why_not(progress, connection, now_ms, may_be_late=True) is not None:
            is_settled = connections.is_driver(connection) or progress.is_unproved
            proved_by_ms = connections.proved_by_ms(connection)
            return -math.inf if is_settled or proved_by_ms <= now_ms else proved_by_ms
        # As long as no event is known that was after the end of an earlier process, there may be
        # one: what that process advertised in its last moments is not known here.
        if connections.event_ms - EVENT_JITTER_MS < connections.resumed_ms:
            is_alive = connections.resumed_alive_ms >= connections.resumed_ms
            if not is_alive and any(map(progress.planned, keys)):
                return max(report_ms, connections.resumed_ms + LIFE_WAIT_MS)
            return report_ms
        is_unreported = any(progress.is_unreported(key, connection) for key in keys)
        return report_ms if is_unreported and not self._is_late else -math.inf

    def _why_not(
        self,
        progress: DriverProgress,
        connection: LookupConnection,
        now_ms: float,
        *,
        may_be_late: bool = False,
    ) -> str | None:
        """Return why real ends go out, or None; `may_be_late`: however old the latest report is."""
        query, connections, settings = progress.query, self.connections, self.settings
        heard_ms = query.last_heard_ms
        if heard_ms is None and connections.is_resumed:
            heard_ms = connections.resumed_ms
        silent_ms = now_ms - heard_ms if heard_ms is not None else 0.0
        is_silent = silent_ms > settings.hold_ms and not may_be_late
        is_first, trigger = progress.is_unproved, query.trigger_kind
        # Under other triggers the first batch may read to the end, once.
        is_bounded = settings.initial_rate is not None or trigger is TriggerKind.PROCESSING_TIME
        is_other = not is_first and not connections.is_driver(connection)
        reasons = (
            (self.detached, "no adaptive rule applies"),
            (query.ended, "the run has ended"),
            (heard_ms is None, "no report came yet"),
            (is_silent, f"no report for {silent_ms / MS_PER_SECOND:,.0f} s"),
            (trigger in READS_ONCE, "the run reads to the end of the logs, once"),
            (trigger in UNPLANNED, "its trigger plans no batches that could be bounded"),
            (is_first and not is_bounded, "no batch of this run was reported yet"),
            (is_other, "the connection is newer than the latest report"),
            (self._rate(query) is None, "no rate is known yet"),
            (self._interval_ms(query) is None, "the trigger interval is not known yet"),
        )
        return next((why for applies, why in reasons if applies), None)

    def _log_ends(
        self, query: QueryProgress, connection: LookupConnection, log_ends: PartitionOffsets
    ) -> dict[TopicPartition, int]:
        """Return the real ends of all partitions: those looked up, the others as last seen."""
        oldest_ms = connection.answers_ms[0]
        advertised = self.advertised.items()
        found = {key: end.log_end for key, end in advertised if end.answered_ms >= oldest_ms}
        if query.run_batches == 0:
            # The first answers of a run: not all brokers have been asked.
            for key, partition in query.partitions.items():
                log_end = partition.log.high_watermark
                if log_end is not None and key not in self.advertised:
                    found[key] = log_end
        return found | dict(log_ends)

    def _progress(self, query: QueryProgress) -> DriverProgress:
        connections = self.connections
        return DriverProgress(
            query,
            self.advertised,
            connections.event_ms,
            self.waited_ms,
            self.answered_ms,
            connections.is_resumed,
        )

    def _interval_ms(self, query: QueryProgress) -> float | None:
        return self._interval.of(query, self.settings.batch_interval_ms)


def apportion(total: int, lags: Mapping[Key, int]) -> dict[Key, int]:
    """Share `total` out in proportion to lag, at least 1 to each partition that has any.

    Both of Spark's own limiters do so: in proportion alone, a partition with little lag would get
    nothing for as long as another has very much. The shares add up to `total` exactly, or to 1 for
    each partition with lag if these are more; none is above its lag. All are 0 or more.

    Those whose part is below 1 get 1; the others share the rest by largest remainders (Hamilton's
    method); of equal remainders the first key in order gets one more.
    """
    whole = sum(lags.values())
    if total >= whole:
        return dict(lags)
    made = {key: min(lag, 1) for key, lag in lags.items()}
    lagging = sorted((lag, key) for key, lag in lags.items() if lag)
    left = max(total, len(lagging))
    small = 0
    # Each of these leaves a smaller part of the rest to those after it.
    while small < len(lagging) and left * lagging[small][0] < whole:
        left -= 1
        whole -= lagging[small][0]
        small += 1
    parts = {key: divmod(left * lag, whole) for lag, key in lagging[small:]}
    made |= {key: part for key, (part, _) in parts.items()}
    spare = left - sum(part for part, _ in parts.values())
    for key in sorted(parts, key=lambda key: (-parts[key][1], key))[:spare]:
        made[key] += 1
    return made
