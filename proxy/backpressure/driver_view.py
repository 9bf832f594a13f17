"""What is known of a driver that looks up log ends, what follows (`DECISIONS`), and what it gets.

Structured Streaming plans a batch up to the latest offsets that the driver gets at the trigger, and
works on one batch at a time: a driver that looks up the end of a log again has done all that it
planned before. One that gets less plans less; one that gets less than before takes it for lost
data. What is advertised lies between what the query already knows and the real end, always.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from metrics.clock import MS_PER_SECOND
from proxy.progress.query import MAX_PARTITIONS, FollowedQuery
from proxy.progress.report import TriggerKind
from proxy.quota.shares import apportion_by_weight
from proxy.wire.topic_partition import TopicPartition

from .drivers import NO_CONNECTION, REFUSED_GROWTH, PartitionOffsets, QueryConnection, QueryDrivers
from .measurements import QueryMeasurements

REPORT_WAIT_MS = 300.0
"""How long an answer waits for the report on the batch before; the two race."""

RESUME_WAIT_MS = 6_000.0
"""How long after a restart an answer waits for a known run: listeners try again within 5 s."""

LIFE_WAIT_MS = 3_000.0
"""The longest time between two signs of life of a run: listeners send one each second."""

RETRIES_MS = 2000.0
"""After its first answer, when a driver that knows later ends looks up for the third time: Spark's
fetchOffset.retryIntervalMs, twice."""

EVENT_JITTER_MS = 50.0
"""By how much a driver's event may seem later than it was: its report was under way so long."""

MAX_OFFSETS = 2**63
"""For one batch: there are no more."""

OVERRUN = 1.1
"""A driver that looks up again so many trigger intervals after its last answer, or later, has had a
batch for all that time: it would have waited for a trigger otherwise."""

READS_ONCE = (TriggerKind.AVAILABLE_NOW, TriggerKind.ONCE)
"""Under these a run takes the ends of the logs once."""

UNPLANNED = (TriggerKind.CONTINUOUS, TriggerKind.REAL_TIME, TriggerKind.OTHER)
"""Under these a run plans no batches up to the ends that its driver looks up, or may not."""


@dataclass(frozen=True)
class DriverView:
    """A driver at the moment of a look-up."""

    query: FollowedQuery
    drivers: QueryDrivers
    measurements: QueryMeasurements
    keys: Collection[TopicPartition] = ()
    """The partitions whose ends are looked up."""
    connection: QueryConnection = NO_CONNECTION
    now_ms: float = 0.0

    def why_real(self) -> str | None:
        """Return why an answer that is due has the real ends; None: those of a batch."""
        why = next(row.why for row in DECISIONS if row.applies(self))
        silent_s = (self.silent_ms or 0.0) / MS_PER_SECOND
        return why and why.format(silent=f"{silent_s:,.0f} s")

    def wait_until_ms(self) -> float:
        """Return until when the answer waits; long ago: it does not."""
        waits = (row.until_ms for row in DECISIONS if row.until_ms and row.applies(self))
        return next(waits)(self)

    def until_report(self) -> float:
        """Return until when to wait for a report on the batch before."""
        return max(self.asked_ms, self.drivers.resumed_alive_ms) + REPORT_WAIT_MS

    def until_started(self) -> float:
        """Return the same of a report on the start of a run whose first batch may be bounded."""
        drivers = self.drivers
        has_rate = drivers.rate is not None or drivers.start_rate is not None
        is_bounded = has_rate and self.query.trigger_kind not in READS_ONCE
        may_be_bounded = is_bounded or self.measurements.rule.initial_rate is not None
        return self.until_report() if may_be_bounded else -math.inf

    def until_proved(self) -> float:
        """Return until when to wait for a sign of life that shows whose the connection is."""
        drivers, opened_ms = self.drivers, self.connection.opened_ms
        until_ms, may_come = opened_ms + LIFE_WAIT_MS, drivers.alive_ms > opened_ms - LIFE_WAIT_MS
        if drivers.resumed_alive_ms < drivers.resumed_ms:  # another was taken for the driver's
            until_ms, may_come = drivers.resumed_ms + RESUME_WAIT_MS, True
        waits = _may_be_anyones(self) and may_come and self.now_ms < until_ms
        return until_ms if waits else -math.inf

    @property
    def asked_ms(self) -> float:
        """Since when the answer has waited."""
        since_ms = self.connection.waits_since_ms
        return self.now_ms if since_ms is None else since_ms

    @property
    def is_timed(self) -> bool:
        """Whether the run has a processing-time trigger."""
        return self.query.trigger_kind is TriggerKind.PROCESSING_TIME

    @property
    def interval_ms(self) -> float | None:
        """What the rule says, else what was learnt or reported, but for 0 s; None: not known."""
        return self.measurements.interval_ms or self.query.trigger_interval_ms or None

    @property
    def rate(self) -> float | None:
        """Records per second for the next batch; None: not known."""
        rate, start_rate = self.drivers.rate, self.drivers.start_rate
        if start_rate is None or not self.is_timed:
            return rate
        return start_rate if rate is None else min(start_rate, rate)

    def per_batch(self, rate: float) -> int:
        """Return how many offsets a batch has at so many records per second."""
        records = min(rate, MAX_OFFSETS) * (self.interval_ms or 0.0) / MS_PER_SECOND
        return max(1, round(min(records * self.measurements.per_record, MAX_OFFSETS)))

    @property
    def is_unproved(self) -> bool:
        """Whether no batch of the run has proved where it is."""
        return self.query.run_batches == 0 and not self.drivers.is_resumed

    @property
    def silent_ms(self) -> float | None:
        """For how long nothing was heard of the run; None: nothing ever was."""
        heard_ms = self.query.last_heard_ms
        if heard_ms is None and self.drivers.is_resumed:
            heard_ms = self.drivers.resumed_ms
        return None if heard_ms is None else self.now_ms - heard_ms

    @property
    def may_miss_ends(self) -> bool:
        """Whether an earlier process may have advertised more in its last moments.

        It may as long as no event is known that was after its end.
        """
        return self.drivers.event_ms - EVENT_JITTER_MS < self.drivers.resumed_ms

    @property
    def is_lifeless(self) -> bool:
        """Whether a run that was resumed amid a batch has given no sign of life."""
        is_alive = self.drivers.resumed_alive_ms >= self.drivers.resumed_ms
        return not is_alive and any(map(self.planned, self.keys))

    @property
    def has_planned_nothing(self) -> bool:
        """Whether the run has no batch yet, for certain: then it knows no end of any log.

        One that reads without a report may be in a batch planned before: its end is not known.
        """
        began_ms = self.query.run_began_ms
        return self.is_unproved and began_ms is not None and self._last_read_ms < began_ms

    @property
    def knows_more(self) -> bool:
        """Whether a driver that looks up again may know later ends than it was given here.

        An earlier run may have read past this proxy. Spark looks up again and again when it gets
        less than it knows, and fails the query if that does not help. A run that has read or waited
        since its first answer has got beyond that; its later batches may have been read ahead.
        """
        first_ms, ends = self.drivers.answered_ms, self.drivers.advertised
        if not self.is_unproved or self.now_ms < first_ms + RETRIES_MS:
            return False
        return max(self._last_read_ms, self.drivers.waited_ms) < first_ms and any(
            end.raised_on is self.connection
            and end.offset < end.log_end
            and self._last_read_ms < end.raised_ms
            for end in map(ends.get, self.keys)
            if end is not None
        )

    @property
    def is_refused(self) -> bool:
        """Whether the driver is known to have planned no batch of what it got last.

        That nothing was fetched does not show it: small records are read ahead of their batch.
        """
        ends, here = self.drivers.advertised, self.connection
        refused = {
            key
            for key in ends.keys() & self.keys
            if ends[key].answered_on is ends[key].raised_on is here
            and ends[key].raised_ms < self.drivers.waited_ms
            and self.planned(key) > 0
        }
        return bool(refused) and not any(map(self.is_unreported, set(self.keys) - refused))

    def completed(self, key: TopicPartition) -> int | None:
        """Return what this run has completed; before its first report the same query's before."""
        query, partition = self.query, self.query.partitions.get(key)
        is_same_query = query.run_batches == 0 and query.progress_id == query.query_id
        if partition is not None and (partition.run_id == query.run_id or is_same_query):
            return partition.committed_to
        return None

    def base(self, key: TopicPartition) -> int | None:
        """Return the offset from which the next batch takes its part; None when not known.

        What is completed; before the first report also the log start that the driver was given.
        """
        base = self.completed(key)
        if base is None and self.query.run_batches == 0:
            base = self.drivers.starts.get(key)
        if base is None:
            return None
        end, partition = self.drivers.advertised.get(key), self.query.partitions.get(key)
        log_start = partition.log.log_start_offset if partition is not None else None
        return max(base, end.idle_offset if end else 0, log_start or 0)

    def planned(self, key: TopicPartition) -> int:
        """Return how many offsets were advertised that are not known to be completed."""
        end = self.drivers.advertised.get(key)
        return max(0, end.offset - (self.base(key) or 0)) if end is not None else 0

    def is_unread(self, key: TopicPartition) -> bool:
        """Return whether nothing was read of the query since more was advertised of this.

        Then no batch was planned up to there, or one whose records were all read ahead.
        """
        end, partition = self.drivers.advertised.get(key), self.query.partitions.get(key)
        if end is None or not self.planned(key) or self._last_read_ms >= end.raised_ms:
            return False
        position = partition.position if partition is not None else None
        return position is None or position < end.offset

    def is_unreported(self, key: TopicPartition) -> bool:
        """Return whether a batch up to what was advertised last here is not reported yet.

        Spark may tell the listener late, of the batch before: one that ended at the `previous`.
        """
        end = self.drivers.advertised.get(key)
        if end is None or end.raised_on is not self.connection:
            return False
        base = self.base(key) or 0
        is_newer = end.raised_ms > self.drivers.event_ms - EVENT_JITTER_MS
        return base < end.offset and (is_newer or base == end.previous)

    def done_by_now(self, key: TopicPartition, *, is_overdue: bool) -> int | None:
        """Return what a driver that looks up again here has completed, reported or not.

        Its batch is done, or it knew before what was advertised. None when that is not known.
        `is_overdue`: an answer waited in vain for a report, and none came since.
        """
        end = self.drivers.advertised.get(key)
        if end is None or end.answered_on is not self.connection:
            return None
        if end.raised_on is self.connection:
            is_done = is_overdue and self.is_unreported(key)
        else:
            is_done = self.is_unproved or (is_overdue and self.planned(key) > 0)
        return end.offset if is_done else None

    def advertise(self, log_ends: PartitionOffsets) -> tuple[PartitionOffsets, bool]:
        """Return what to advertise in place of these real ends, and whether that is new."""
        connection, drivers, now_ms = self.connection, self.drivers, self.now_ms
        self.measurements.held.add(self.asked_ms, now_ms)
        why = self.why_real()
        if why is None:
            ends = self._clamped(log_ends)
        else:
            ends, drivers.why, drivers.offsets = log_ends, why, None
        connection.waits_since_ms = None
        is_new, drivers.answered_ms = False, min(drivers.answered_ms, now_ms)
        for key, end in ends.items():
            is_new |= drivers.record_end(key, log_ends[key], end, connection, now_ms)
        connection.answers_ms.append(now_ms)
        return ends, is_new

    def _clamped(self, log_ends: PartitionOffsets) -> PartitionOffsets:
        drivers = self.drivers
        if is_refused := self.is_refused:
            more = min(self._all_planned() * REFUSED_GROWTH, MAX_OFFSETS)
            drivers.least_offsets = max(drivers.least_offsets, more)
        is_overdue = not is_refused and (self.connection.wait_failed or drivers.is_late)
        fitting, why = self._fitting(drivers.grown(log_ends))
        after = None if is_refused else self._after_overrun()
        if after is not None and after < fitting:
            fitting = after
            why = f"the batch before, not reported yet, took long: {fitting:,} offsets for the next"
        bases: dict[TopicPartition, int] = {}
        lags: dict[TopicPartition, int] = {}
        for key, log_end in self._all_log_ends(log_ends).items():
            base = self.base(key)
            if key in log_ends:
                done = self.done_by_now(key, is_overdue=is_overdue)
                base = base if done is None else max(base or 0, done)
            if base is not None:
                bases[key], lags[key] = base, max(0, log_end - base)
        parts = split_by_lag(fitting, lags) if fitting else dict.fromkeys(lags, 0)
        offsets = max(fitting, sum(lag > 0 for lag in lags.values())) if fitting else 0
        if offsets > fitting:
            why += f"; each of {offsets:,} partitions gets one"
        has_room = len(drivers.advertised) + len(log_ends) <= MAX_PARTITIONS
        may_begin_low = has_room and self.has_planned_nothing
        ends = dict(log_ends)
        for key in log_ends.keys() & bases.keys():
            known = drivers.advertised.get(key)
            if known is not None or may_begin_low:
                before = known.offset if known is not None else 0
                ends[key] = min(log_ends[key], max(bases[key] + parts[key], before))
        drivers.why, drivers.offsets = why, offsets
        return ends

    def _after_overrun(self) -> int | None:
        """Return how many offsets are to follow an unreported batch that took long, if it did."""
        ends, query = self.drivers.advertised, self.query
        unreported = [ends[key] for key in self.keys if self.is_unreported(key)]
        planned_ms = max((end.raised_ms for end in unreported), default=math.inf)
        took_ms = self.asked_ms - planned_ms
        if not (self.is_timed and took_ms > OVERRUN * (query.trigger_interval_ms or math.inf)):
            return None
        if any(end.answered_ms > planned_ms for end in unreported):
            return None  # it has looked up since: there was a trigger without a batch
        offsets = self._all_planned()
        for end in ends.values():  # other brokers may have answered to this trigger before
            if end.previous is not None and end.raised_ms - planned_ms > took_ms / 2:
                offsets -= end.offset - end.previous
        rate = self.measurements.rate_after(offsets, planned_ms, self.asked_ms)
        return None if rate is None else self.per_batch(rate)

    def _fitting(self, grown: int) -> tuple[int, str]:
        """Return how many offsets the next batch is to have, and why.

        In a slow start it may have all by which the logs have `grown`: a query that keeps up has
        the time for it.
        """
        drivers, rate = self.drivers, self.rate or 0.0
        if rate <= 0:
            return 0, "no batch may begin now"
        fitting = self.per_batch(rate)
        why = f"{rate:,.0f} records/s make {fitting:,} offsets for one batch"
        if rate == drivers.start_rate:
            why += ": nothing is known of its cost yet"
            if grown > fitting:
                fitting = min(grown, self.per_batch(drivers.rate or math.inf))
                why += f"; {fitting:,} have just come in"
        if fitting < drivers.least_offsets:
            fitting = drivers.least_offsets
            why += f"; the driver plans none of so few, {fitting:,} are offered"
        return fitting, why

    def _all_planned(self) -> int:
        return sum(map(self.planned, self.drivers.advertised))

    def _all_log_ends(self, log_ends: PartitionOffsets) -> dict[TopicPartition, int]:
        """Return the real ends of all partitions: those looked up, the others as last seen."""
        oldest_ms, known = self.connection.answers_ms[0], self.drivers.advertised
        found = {key: end.log_end for key, end in known.items() if end.answered_ms >= oldest_ms}
        if self.query.run_batches == 0:
            # The first answers of a run: not all brokers have been asked.
            for key, partition in self.query.partitions.items():
                log_end = partition.log.high_watermark
                if log_end is not None and key not in known:
                    found[key] = log_end
        return found | dict(log_ends)

    @cached_property
    def _last_read_ms(self) -> float:
        """When the query read last; costs a walk over all partitions."""
        read_ms = self.query.last_read_ms
        return -math.inf if read_ms is None else read_ms


def split_by_lag(total: int, lags: PartitionOffsets) -> dict[TopicPartition, int]:
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
    in_order = dict(sorted((key, lag) for lag, key in lagging[small:]))
    return made | apportion_by_weight(left, in_order)


class LookupDecision(NamedTuple):
    """When it applies, what the driver gets then, and what its answer waits for."""

    applies: Callable[[DriverView], bool]
    why: str | None
    """Why it gets the real ends; None: it gets those of a batch of the right size."""
    until_ms: Callable[[DriverView], float] | None = lambda _: -math.inf
    """None: the row counts when the answer is due, and makes none wait."""


def _is_silent(view: DriverView) -> bool:
    return (view.silent_ms or 0.0) > view.measurements.rule.hold_ms


def _may_read_to_the_end(view: DriverView) -> bool:
    """Return whether it is a first batch; under a processing-time trigger it is bounded, too."""
    has_initial_rate = view.measurements.rule.initial_rate is not None
    return view.is_unproved and not (has_initial_rate or view.is_timed)


def _may_be_anyones(view: DriverView) -> bool:
    return not (view.is_unproved or view.drivers.is_driver(view.connection))


def _may_be_unreported(view: DriverView) -> bool:
    return not view.drivers.is_late and any(map(view.is_unreported, view.keys))


def _after_restart(wait_ms: float) -> Callable[[DriverView], float]:
    """Return until when to wait for the first sign of life: so long after a restart."""
    return lambda view: max(view.until_report(), view.drivers.resumed_ms + wait_ms)


_NOT_HEARD = "no report came yet"
_NEWER = "the connection is newer than the latest report"
_ONCE = "the run reads to the end of the logs, once"
_UNPLANNED = "its trigger plans no batches that could be bounded"
_MORE = "the driver asked again and read nothing: it knows more than is known here"

DECISIONS = (
    LookupDecision(lambda of: of.drivers.detached, "no adaptive rule applies"),
    LookupDecision(lambda of: of.drivers.awaits_run, _NOT_HEARD, _after_restart(RESUME_WAIT_MS)),
    LookupDecision(lambda of: of.query.ended, "the run has ended", DriverView.until_started),
    LookupDecision(lambda of: of.silent_ms is None, _NOT_HEARD, DriverView.until_started),
    LookupDecision(_is_silent, "no report for {silent}", None),
    LookupDecision(lambda of: of.query.trigger_kind in READS_ONCE, _ONCE, DriverView.until_proved),
    LookupDecision(
        lambda of: of.query.trigger_kind in UNPLANNED, _UNPLANNED, DriverView.until_proved
    ),
    LookupDecision(_may_read_to_the_end, "no batch of this run was reported yet"),
    LookupDecision(_may_be_anyones, _NEWER, DriverView.until_proved),
    LookupDecision(lambda of: of.rate is None, "no rate is known yet"),
    LookupDecision(lambda of: of.interval_ms is None, "the trigger interval is not known yet"),
    LookupDecision(lambda of: of.knows_more, _MORE, None),
    LookupDecision(
        lambda of: of.may_miss_ends and of.is_lifeless, None, _after_restart(LIFE_WAIT_MS)
    ),
    LookupDecision(lambda of: of.may_miss_ends, None, DriverView.until_report),
    LookupDecision(_may_be_unreported, None, DriverView.until_report),
    LookupDecision(lambda _: True, None),
)
"""The first that applies is taken; docs/spark.md has the same rows."""
