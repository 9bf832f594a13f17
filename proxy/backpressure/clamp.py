"""Decide what end of the log a query's driver is told, so that its next batch has the right size.

Structured Streaming plans a batch up to the latest offsets that the driver is told at the trigger.
A driver that is told less plans less; it takes it amiss when it is told less than before. What is
told lies between what the query already knows and the truth, always.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from metrics.clock import MS_PER_SECOND
from proxy.progress.query import QueryProgress
from proxy.quota.rules import AdaptiveBound
from proxy.wire.list_offsets import LATEST, OffsetLookup
from proxy.wire.topic_partition import TopicPartition

from .interval import TriggerInterval
from .position import EVENT_JITTER_MS, Position
from .shares import shares
from .told import MAX_PARTITIONS, KeptEnd, ToldEnds
from .trust import LIFE_WAIT_MS, Lookups, Trust

MAX_OFFSETS = 2**63
"""For one batch: there are no more."""

REPORT_WAIT_MS = 300.0
"""How long an answer waits for the report on the batch before; the two race."""

LATE_MS = 100.0
"""Where a report came so long after its batch, or later, none is waited for at the next look-up."""

REFUSED_GROWTH = 2
"""How many times more is offered to a driver that planned no batch of what it was told."""

LATE_BATCHES = 4
"""So many batches may be done and not reported: a driver with much to do is told of them late."""

PROCESSING_TIME = "processing_time"
"""The trigger under which a run's first batch may be bounded; others read to the end, once."""

READS_ONCE = ("available_now", "once")
"""Triggers under which a run takes the ends of the logs once."""


@dataclass(frozen=True, slots=True)
class ClampState:
    """What came of the driver's last look-up, for people."""

    on: bool
    why: str
    offsets: int | None
    """For the next batch, over all partitions; None when the truth is told."""


class Clamp:
    """What one query's drivers are told, over all their connections.

    Args:
        settings: of the rule.
        interval: of the query's trigger.
        on_wait: is told from when to when an answer waited for a report.
        on_told: is called when drivers of the query were answered, with the time and whether they
            were told something new.

    """

    def __init__(
        self,
        settings: AdaptiveBound,
        interval: TriggerInterval,
        on_wait: Callable[[float, float], None],
        on_told: Callable[[QueryProgress, bool, float], None],
    ) -> None:
        self.settings = settings
        self._interval = interval
        self.on_wait = on_wait
        self._on_told = on_told
        self.rate: float | None = None
        """Records per second for the next batch; None when not known, and 0 lets none begin."""
        self.offsets_per_record = 1.0
        """How far the offsets go on with a record: more where transactions or compaction leave
        gaps, less where a query reads its source twice."""
        self.detached = False
        """Whether no adaptive rule is left for the query."""
        self.state = ClampState(on=False, why="the driver has not asked yet", offsets=None)
        self.told = ToldEnds()
        """What they know."""
        self.trust = Trust()
        """Whose connections they are."""
        self._is_late = False
        """Whether the latest report came so late that it is not worth while to wait for the next:
        Spark tells of a batch late where there is much to do."""
        self.least_offsets = 0
        """So many at least are offered for a batch: the driver planned none of fewer, as it does
        with the option minOffsetsPerTrigger. 0: none was refused in this run."""

    def resume(
        self,
        ends: Mapping[TopicPartition, KeptEnd],
        starts: Mapping[TopicPartition, int],
        instances: list[int],
        least_offsets: int,
        now_ms: float,
    ) -> None:
        """Take up a run from an earlier process, which has told its driver this."""
        self.told.restore(ends, starts, now_ms)
        self.trust.resume(instances, now_ms)
        self.least_offsets = least_offsets

    def begin_run(self, query: QueryProgress) -> None:
        """Forget what was told to the drivers of earlier runs, as far as it is done.

        What is not completed may be the end of a batch that this run takes up from the checkpoint:
        a run that is stopped or fails gives its batch up. And what was told after the last event
        may have been told to the driver of this run.
        """
        done: dict[TopicPartition, int | None] | None = None
        if query.progress_id in (None, query.query_id):
            position = self._position(query)
            done = {key: position.completed(key) for key in self.told}
        self.told.begin_run(self.trust.event_ms, done)
        self.trust.begin_run()
        self.least_offsets = 0

    def reported(self, event_ms: float, now_ms: float) -> None:
        """Record a report on an event of this run, which the driver saw at `event_ms`."""
        self.trust.reported(event_ms, now_ms)

    def done(self, offsets: int | None, age_ms: float) -> None:
        """Record that a batch of this run was reported, so long after its end.

        `offsets`: how many it had; None: not known.
        """
        self._is_late = age_ms > LATE_MS
        self.told.starts.clear()
        if offsets and offsets * REFUSED_GROWTH <= self.least_offsets:
            self.least_offsets = 0  # it does plan batches of so few

    def idle(self, query: QueryProgress, event_ms: float) -> None:
        """Record that the driver had nothing to plan: all that it was told by then is done.

        But not what it was told and never read: it waits until there is more.
        """
        position = self._position(query)
        unread = {key for key in self.told if position.is_unread(key)}
        self.told.idle(event_ms, unread)

    def tell(
        self,
        query: QueryProgress,
        lookups: Lookups,
        latest: dict[TopicPartition, int],
        now_ms: float,
        *,
        is_overdue: bool = False,
    ) -> dict[TopicPartition, int]:
        """Return what to tell instead of these real ends; remember it as told.

        `is_overdue`: the answer waited in vain for a report.
        """
        position = self._position(query)
        why_not = self._why_not(query, lookups, now_ms)
        if why_not is None and position.knows_more(latest, lookups):
            why_not = "the driver asked again and read nothing: it knows more than is known here"
        answers = latest
        offsets: int | None = None
        why = why_not or ""
        interval_ms = self._interval_ms(query)
        if why_not is None and self.rate is not None and interval_ms is not None:
            is_overdue = is_overdue or self._is_late
            fitting, why = self._fitting(self.rate, interval_ms)
            if is_overdue and self._is_refused(position, lookups, latest, fitting):
                self._offer_more(position)
                fitting, why = self._fitting(self.rate, interval_ms)
                is_overdue = False
            lags, bases = self._lags(position, lookups, latest, is_overdue=is_overdue)
            made = shares(fitting, lags) if self.rate > 0 else dict.fromkeys(lags, 0)
            offsets = max(fitting, sum(lag > 0 for lag in lags.values())) if self.rate > 0 else 0
            if offsets > fitting:
                why += f"; each of {offsets:,} partitions gets one"
            answers = self._clamped(position, latest, bases, made)
        self.state = ClampState(on=why_not is None, why=why, offsets=offsets)
        is_new = False
        for key, offset in answers.items():
            is_new |= self.told.remember(key, latest[key], offset, lookups, now_ms)
        self._on_told(query, is_new, now_ms)
        return answers

    def _fitting(self, rate: float, interval_ms: float) -> tuple[int, str]:
        """Return how many offsets the next batch is to have, and why."""
        if rate <= 0:
            return 0, "no batch may begin now"
        per_batch = rate * interval_ms / MS_PER_SECOND
        fitting = max(1, round(min(per_batch * self.offsets_per_record, MAX_OFFSETS)))
        why = f"{rate:,.0f} records/s make {fitting:,} offsets for one batch"
        if fitting < self.least_offsets:
            fitting = self.least_offsets
            why += f"; the driver plans none of so few, {fitting:,} are offered"
        return fitting, why

    def _is_refused(
        self,
        position: Position,
        lookups: Lookups,
        latest: Mapping[TopicPartition, int],
        fitting: int,
    ) -> bool:
        """Return whether the driver planned no batch of what it was told last.

        It may have planned some of records that were read ahead, and Spark tells of them late. So
        the first time it must be more than that.
        """
        refused = {key for key in latest if position.is_refused(key, lookups)}
        if not refused or any(
            position.is_unreported(key, lookups) for key in latest if key not in refused
        ):
            return False
        return self.least_offsets > 0 or self._offered(position) >= LATE_BATCHES * fitting > 0

    def _offer_more(self, position: Position) -> None:
        least = self._offered(position) * REFUSED_GROWTH
        self.least_offsets = max(self.least_offsets, min(least, MAX_OFFSETS))

    def _offered(self, position: Position) -> int:
        """Return how many offsets the driver was told of that are not known to be completed."""
        return sum(position.offered(key) for key in self.told)

    def tell_earliest(
        self, query: QueryProgress, key: TopicPartition, offset: int, now_ms: float
    ) -> None:
        """Record the start of a log that the driver was told."""
        if self.told.remember_start(key, offset):
            self._on_told(query, True, now_ms)

    def waits_until_ms(
        self,
        query: QueryProgress,
        lookups: Lookups,
        ask: OffsetLookup,
        since_ms: float,
        now_ms: float,
    ) -> float:
        """Return until when the answer to a look-up is to wait, long ago if it need not.

        It waits for a report on the batch that the driver planned last, where there was none yet;
        for one on the start of a run whose first batch may be bounded; and, on a connection that is
        not known to be the driver's, for a sign of life that makes it so.

        Args:
            query: whose driver asks.
            lookups: the connection.
            ask: what it asks for.
            since_ms: when it asked, monotonic.
            now_ms: the time.

        """
        if self.detached or LATEST not in ask.timestamps.values():
            return -math.inf
        trust = self.trust
        report_ms = max(since_ms, trust.heard_ms) + REPORT_WAIT_MS
        if trust.is_missed:
            return max(report_ms, trust.may_come_ms(lookups))
        if query.ended or (query.last_heard_ms is None and not trust.goes_on):
            return report_ms if self._may_bound_first(query) else -math.inf
        position = self._position(query)
        if self._why_not(query, lookups, now_ms, may_be_late=True) is None:
            keys = [key for key, timestamp in ask.timestamps.items() if timestamp == LATEST]
            return self._waits_for_report_ms(position, lookups, keys, report_ms)
        if trust.has(lookups) or position.is_unproved:
            return -math.inf
        may_come_ms = trust.may_come_ms(lookups)
        return may_come_ms if may_come_ms > now_ms else -math.inf

    def _waits_for_report_ms(
        self,
        position: Position,
        lookups: Lookups,
        keys: Iterable[TopicPartition],
        report_ms: float,
    ) -> float:
        """Return until when to wait for a report on the last batch, `report_ms` as a rule.

        As long as no event is known that was after the end of an earlier process, there may be one:
        what that process told in its last moments is not known here.
        """
        trust = self.trust
        if trust.event_ms - EVENT_JITTER_MS < trust.resumed_ms:
            is_heard = trust.heard_ms >= trust.resumed_ms
            if not is_heard and any(position.offered(key) for key in keys):
                return max(report_ms, trust.resumed_ms + LIFE_WAIT_MS)
            return report_ms
        if not self._is_late and any(position.is_unreported(key, lookups) for key in keys):
            return report_ms
        return -math.inf

    def _position(self, query: QueryProgress) -> Position:
        return Position(query, self.told, self.trust.event_ms, self.trust.goes_on)

    def _interval_ms(self, query: QueryProgress) -> float | None:
        return self._interval.of(query, self.settings.batch_interval_ms)

    def _may_bound_first(self, query: QueryProgress) -> bool:
        """Return whether a run's first batch may be bounded, as far as is known before it."""
        if self.settings.initial_rate is not None:
            return True
        return self.rate is not None and query.trigger_kind not in READS_ONCE

    def _why_not(
        self,
        query: QueryProgress,
        lookups: Lookups,
        now_ms: float,
        *,
        may_be_late: bool = False,
    ) -> str | None:
        """Return why the truth is told; None when it is not."""
        why = self._why_no_run(query, now_ms, may_be_late=may_be_late)
        if why is not None:
            return why
        if self._position(query).is_unproved:
            if self.settings.initial_rate is None and query.trigger_kind != PROCESSING_TIME:
                return "no batch of this run was reported yet"
        elif not self.trust.has(lookups):
            return "the connection is newer than the latest report"
        if self.rate is None:
            return "no rate is known yet"
        if self._interval_ms(query) is None:
            return "the trigger interval is not known yet"
        return None

    def _why_no_run(self, query: QueryProgress, now_ms: float, *, may_be_late: bool) -> str | None:
        """Return why no run is known whose batches are to be bounded; None when there is one."""
        if self.detached:
            return "no adaptive rule applies"
        if query.ended:
            return "the run has ended"
        heard_ms = query.last_heard_ms
        if heard_ms is None and self.trust.goes_on:
            heard_ms = self.trust.resumed_ms
        if heard_ms is None:
            return "no report came yet"
        silent_ms = now_ms - heard_ms
        if silent_ms > self.settings.hold_ms and not may_be_late:
            return f"no report for {silent_ms / MS_PER_SECOND:,.0f} s"
        if query.trigger_kind in READS_ONCE:
            return "the run reads to the end of the logs, once"
        return None

    def _lags(
        self,
        position: Position,
        lookups: Lookups,
        latest: dict[TopicPartition, int],
        *,
        is_overdue: bool,
    ) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
        """Return the lag of each partition, and from where it counts; not where that is unknown."""
        bases: dict[TopicPartition, int] = {}
        lags: dict[TopicPartition, int] = {}
        for key, end in self._ends(position.query, lookups, latest):
            base = position.base(key)
            if key in latest:
                done = position.done_by_now(key, lookups, is_overdue=is_overdue)
                if done is not None:
                    base = max(base or 0, done)
            if base is not None:
                bases[key], lags[key] = base, max(0, end - base)
        return lags, bases

    def _clamped(
        self,
        position: Position,
        latest: dict[TopicPartition, int],
        bases: Mapping[TopicPartition, int],
        made: Mapping[TopicPartition, int],
    ) -> dict[TopicPartition, int]:
        has_room = len(self.told) + len(latest) <= MAX_PARTITIONS
        may_begin_low = has_room and position.has_planned_nothing
        answers = {}
        for key, end in latest.items():
            base = bases.get(key)
            told = self.told.get(key)
            if base is None or (told is None and not may_begin_low):
                answers[key] = end
                continue
            answers[key] = min(end, max(base + made[key], told.offset if told else 0))
        return answers

    def _ends(
        self, query: QueryProgress, lookups: Lookups, latest: dict[TopicPartition, int]
    ) -> Iterator[tuple[TopicPartition, int]]:
        """Yield the real ends of all partitions: those asked for, the others as last seen."""
        yield from latest.items()
        oldest_ms = lookups.oldest_answer_ms
        for key, told in self.told.items():
            if key not in latest and told.told_ms >= oldest_ms:
                yield key, told.latest
        if query.run_batches == 0:
            # The first answers of a run: not all brokers have been asked.
            for key, partition in query.partitions.items():
                end = partition.log.high_watermark
                if end is not None and key not in latest and key not in self.told:
                    yield key, end
