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

MAX_OFFSETS = 2**63
"""For one batch: there are no more."""

REPORT_WAIT_MS = 300.0
"""How long an answer waits for the report on the batch before; the two race."""

LATE_MS = 100.0
"""Where a report came later than that after its batch, none is waited for at the next look-up."""

REFUSED_GROWTH = 2
"""How many times more is advertised to a driver that planned no batch of what it got."""

LATE_BATCHES = 4
"""So many batches may be done and not reported: a driver with much to do reports them late."""

READS_ONCE = (TriggerKind.AVAILABLE_NOW, TriggerKind.ONCE)
"""Under these a run takes the ends of the logs once."""

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
    _on_wait: Callable[[float, float], object]
    """Is called with when an answer began to wait for a report, and when it was given."""
    _on_answered: Callable[[QueryProgress, bool, float], None]
    """Is called when drivers were answered, with whether they got something new, and the time."""
    rate: float | None = None
    """Records per second for the next batch; None when not known, and 0 lets none begin."""
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
        self.least_offsets = 0

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

    def record_start(
        self, query: QueryProgress, key: TopicPartition, offset: int, now_ms: float
    ) -> None:
        """Record the start of a log that the driver got."""
        if self.advertised.record_start(key, offset):
            self._on_answered(query, True, now_ms)

    def advertise(
        self,
        query: QueryProgress,
        connection: LookupConnection,
        log_ends: PartitionOffsets,
        now_ms: float,
    ) -> PartitionOffsets:
        """Return what to advertise in place of these real ends; record it."""
        if connection.waits_since_ms is not None:
            self._on_wait(connection.waits_since_ms, now_ms)
            connection.waits_since_ms = None
        progress = self._progress(query)
        why_not = self._why_not(progress, connection, now_ms)
        if why_not is None and progress.knows_more(log_ends, connection):
            why_not = "the driver asked again and read nothing: it knows more than is known here"
        ends = log_ends
        if why_not is None:
            ends = self._clamped(progress, connection, log_ends)
        else:
            self.state = ClampState(on=False, why=why_not, offsets=None)
        is_new = False
        for key, end in ends.items():
            is_new |= self.advertised.record(key, log_ends[key], end, connection, now_ms)
        self._on_answered(query, is_new, now_ms)
        return ends

    def _clamped(
        self, progress: DriverProgress, connection: LookupConnection, log_ends: PartitionOffsets
    ) -> PartitionOffsets:
        is_overdue = connection.wait_failed or self._is_late
        fitting, why = self._fitting(progress.query)
        if is_overdue and self._is_refused(progress, connection, log_ends, fitting):
            more = min(self._all_planned(progress) * REFUSED_GROWTH, MAX_OFFSETS)
            self.least_offsets = max(self.least_offsets, more)
            fitting, why = self._fitting(progress.query)
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

    def _fitting(self, query: QueryProgress) -> tuple[int, str]:
        """Return how many offsets the next batch is to have, and why."""
        rate, interval_ms = self.rate or 0.0, self._interval_ms(query) or 0.0
        if rate <= 0:
            return 0, "no batch may begin now"
        per_batch = rate * interval_ms / MS_PER_SECOND
        fitting = max(1, round(min(per_batch * self.offsets_per_record, MAX_OFFSETS)))
        why = f"{rate:,.0f} records/s make {fitting:,} offsets for one batch"
        if fitting < self.least_offsets:
            fitting = self.least_offsets
            why += f"; the driver plans none of so few, {fitting:,} are offered"
        return fitting, why

    def _all_planned(self, progress: DriverProgress) -> int:
        return sum(map(progress.planned, self.advertised))

    def _is_refused(
        self,
        progress: DriverProgress,
        connection: LookupConnection,
        keys: Collection[TopicPartition],
        fitting: int,
    ) -> bool:
        """Return whether the driver planned no batch of what it got last.

        It may have planned some of records that were read ahead, and Spark reports them late. So
        the first time it must be more than that.
        """
        refused = {key for key in keys if progress.is_refused(key, connection)}
        others = (key for key in keys if key not in refused)
        if not refused or any(progress.is_unreported(key, connection) for key in others):
            return False
        return self.least_offsets > 0 or self._all_planned(progress) >= LATE_BATCHES * fitting > 0

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
            reads_all = self.rate is None or query.trigger_kind in READS_ONCE
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
            (is_first and not is_bounded, "no batch of this run was reported yet"),
            (is_other, "the connection is newer than the latest report"),
            (self.rate is None, "no rate is known yet"),
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
        return DriverProgress(query, self.advertised, connections.event_ms, connections.is_resumed)

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
