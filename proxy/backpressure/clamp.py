"""Decide what end of the log a query's driver is told, so that its next batch has the right size.

Structured Streaming plans a batch up to the latest offsets that the driver is told at the trigger.
A driver that is told less plans less; it takes it amiss when it is told less than before. What is
told lies between what the query already knows and the truth, always.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from proxy.progress.query import QueryProgress
from proxy.quota.rules import Adaptive
from proxy.wire.offsets import LATEST, OffsetsAsk, TopicPartition

from .estimator import MS_PER_SECOND
from .position import EVENT_JITTER_MS, Position
from .shares import shares
from .told import MAX_PARTITIONS, KeptEnd, ToldEnds

MAX_OFFSETS = 2**63
"""For one batch: there are no more."""

RESUME_WAIT_MS = 6_000.0
"""How long after the start of this process an answer waits for the first report on a run that an
earlier process knew: the listener tries again after 5 s at the latest."""


class Lookups(Protocol):
    """One connection of the client: planner.DriverLookups."""

    @property
    def has_trust(self) -> bool:
        """Whether this is a connection of the present run's driver, for certain."""

    @property
    def oldest_answer_ms(self) -> float:
        """Since when a partition that is still read has been asked for on this connection."""

    def reported(self) -> None:
        """Take note that reports come."""


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
        on_wait: is told from when to when an answer waited for a report.
        on_told: is called when drivers of the query were told something new.

    """

    def __init__(
        self,
        settings: Adaptive,
        on_wait: Callable[[float, float], None],
        on_told: Callable[[QueryProgress], None],
    ) -> None:
        self.settings = settings
        self.on_wait = on_wait
        self._on_told = on_told
        self.rate: float | None = None
        """Records per second for the next batch; None when not known."""
        self.offsets_per_record = 1.0
        """How far the offsets go on with a record: more where transactions or compaction leave
        gaps, less where a query reads its source twice."""
        self.detached = False
        """Whether no adaptive rule is left for the query."""
        self.state = ClampState(on=False, why="the driver has not asked yet", offsets=None)
        self.told = ToldEnds()
        """What they know."""
        self._lookups: dict[Lookups, None] = {}
        self._event_ms = -math.inf
        self._resumed_ms = -math.inf
        """When the run of an earlier process was taken up; long ago if there was none."""
        self._is_missed = False
        """Whether a run was taken up and no report came since."""
        self._goes_on = False
        """Whether the run is the one that was taken up."""
        self._trusts_all = False
        """Whether all connections of that run are as good as open before its latest report."""
        self.heard_ms = -math.inf
        """When the first report came on the run that was taken up."""

    def resume(
        self,
        ends: Mapping[TopicPartition, KeptEnd],
        starts: Mapping[TopicPartition, int],
        now_ms: float,
    ) -> None:
        """Take up a run from an earlier process, which has told its driver this.

        The process ended with all its connections: those of now are newer than any report, and the
        driver's among them. So they are trusted from the first report on until one of them was
        open before a report.
        """
        self.told.restore(ends, starts, now_ms)
        self._resumed_ms = now_ms
        self._is_missed = True

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
        self.told.begin_run(self._event_ms, done)
        self._event_ms = self._resumed_ms = -math.inf
        self._is_missed = self._goes_on = self._trusts_all = False

    def reported(self, event_ms: float, now_ms: float, *, has_batch: bool) -> None:
        """Take note of a report on an event of this run, which the driver saw at `event_ms`."""
        self._event_ms = max(self._event_ms, event_ms)
        if has_batch:
            self.told.starts.clear()
        if self._is_missed:
            self._is_missed = False
            self._goes_on = self._trusts_all = True
            self.heard_ms = now_ms
        if self._trusts_all:
            self._trusts_all = not any(lookups.has_trust for lookups in self._lookups)
        for lookups in self._lookups:
            lookups.reported()

    @property
    def connections(self) -> int:
        """How many connections of the client are open."""
        return len(self._lookups)

    @property
    def waits_until_ms(self) -> float:
        """Until when an answer waits in any case, if it waits for a report."""
        return self._resumed_ms + RESUME_WAIT_MS if self._is_missed else -math.inf

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
        if why_not is None and self.rate == 0:
            _, bases = self._lags(position, lookups, latest, is_overdue=is_overdue)
            answers = self._clamped(position, latest, bases, dict.fromkeys(bases, 0))
            why, offsets = "no batch may begin now", 0
        elif why_not is None and self.rate is not None:
            per_batch = self.rate * (self.settings.batch_interval_ms or 0.0) / MS_PER_SECOND
            fitting = max(1, round(min(per_batch * self.offsets_per_record, MAX_OFFSETS)))
            lags, bases = self._lags(position, lookups, latest, is_overdue=is_overdue)
            answers = self._clamped(position, latest, bases, shares(fitting, lags))
            why = f"{self.rate:,.0f} records/s make {fitting:,} offsets for one batch"
            offsets = max(fitting, sum(lag > 0 for lag in lags.values()))
            if offsets > fitting:
                why += f"; each of {offsets:,} partitions gets one"
        self.state = ClampState(on=why_not is None, why=why, offsets=offsets)
        is_new = False
        for key, offset in answers.items():
            is_new |= self.told.remember(key, latest[key], offset, lookups, now_ms)
        if is_new:
            self._on_told(query)
        return answers

    def tell_earliest(self, query: QueryProgress, key: TopicPartition, offset: int) -> None:
        """Take note of the start of a log that the driver was told."""
        if self.told.remember_start(key, offset):
            self._on_told(query)

    def awaits_report(
        self, query: QueryProgress, lookups: Lookups, ask: OffsetsAsk, now_ms: float
    ) -> bool:
        """Say whether the batch that the driver planned last has not been reported yet.

        As long as no event is known that was after the end of an earlier process, it may not have
        been: what that process told in its last moments is not known here. Where the first batch
        of a run is bounded, the report that the run has started is waited for.
        """
        if self.detached or LATEST not in ask.timestamps.values():
            return False
        if self._is_missed:
            return True
        if query.ended or query.last_report_ms is None:
            return self.settings.initial_rate is not None
        if self._why_not(query, lookups, now_ms, may_be_late=True) is not None:
            return False
        if self._event_ms - EVENT_JITTER_MS < self._resumed_ms:
            return True
        position = self._position(query)
        return any(
            timestamp == LATEST and position.is_unreported(key, lookups)
            for key, timestamp in ask.timestamps.items()
        )

    def join(self, lookups: Lookups) -> bool:
        """Take in a connection; return whether a trusted one of a driver was open."""
        has_trusted = any(other.has_trust for other in self._lookups)
        self._lookups[lookups] = None
        return has_trusted

    def leave(self, lookups: Lookups) -> None:
        """Let go of a connection."""
        self._lookups.pop(lookups, None)

    def opened_before_report(self, opened_ms: float) -> bool:
        """Say whether a connection was open when the driver made the latest report."""
        return opened_ms < self._event_ms

    def _position(self, query: QueryProgress) -> Position:
        return Position(query, self.told, self._event_ms, self._goes_on)

    def _why_not(
        self,
        query: QueryProgress,
        lookups: Lookups,
        now_ms: float,
        *,
        may_be_late: bool = False,
    ) -> str | None:
        """Return why the truth is told; None when it is not."""
        if self.detached:
            return "no adaptive rule applies"
        if query.ended:
            return "the run has ended"
        if query.last_report_ms is None:
            return "no report came yet"
        silent_ms = now_ms - query.last_report_ms
        if silent_ms > self.settings.hold_ms and not may_be_late:
            return f"no report for {silent_ms / MS_PER_SECOND:,.0f} s"
        if self._position(query).is_unproved:
            if self.settings.initial_rate is None:
                return "no batch of this run was reported yet"
        elif not (self._trusts_all or lookups.has_trust):
            return "the connection is newer than the latest report"
        if self.rate is None or self.settings.batch_interval_ms is None:
            return "no rate is known yet"
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
                end = partition.high_watermark
                if end is not None and key not in latest and key not in self.told:
                    yield key, end
