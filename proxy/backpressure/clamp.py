"""Decide what end of the log a query's driver is told, so that its next batch has the right size.

Structured Streaming plans a batch up to the latest offsets that the driver is told at the trigger.
A driver that is told less plans less; it takes it amiss when it is told less than before. What is
told lies between what the query already knows and the truth, always.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from proxy.progress.query import QueryProgress
from proxy.quota.rules import Adaptive
from proxy.wire.offsets import LATEST, OffsetsAsk, TopicPartition

from .estimator import MS_PER_SECOND
from .shares import shares

MAX_PARTITIONS = 10_000
"""Of one query; the ends of further ones are always told truly."""

MAX_OFFSETS = 2**63
"""For one batch: there are no more."""

EVENT_JITTER_MS = 50.0
"""By how much a driver's event may seem later than it was: its report was under way so long."""


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


@dataclass(slots=True)
class _Told:
    """One partition, as a driver of this client knows it."""

    latest: int
    """The real end when it was last answered."""
    offset: int
    """What was told instead, or the same."""
    told_ms: float
    """When."""
    raised_ms: float
    """When it last became more."""
    raised_on: Lookups
    """On which connection."""
    idle_at: int = 0
    """All below had been read when the query was idle."""


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

    """

    def __init__(self, settings: Adaptive, on_wait: Callable[[float, float], None]) -> None:
        self.settings = settings
        self.on_wait = on_wait
        self.rate: float | None = None
        """Records per second for the next batch; None when not known."""
        self.offsets_per_record = 1.0
        """How far the offsets go on with a record: more where transactions or compaction leave
        gaps, less where a query reads its source twice."""
        self.detached = False
        """Whether no adaptive rule is left for the query."""
        self.state = ClampState(on=False, why="the driver has not asked yet", offsets=None)
        self._lookups: dict[Lookups, None] = {}
        self._told: dict[TopicPartition, _Told] = {}
        self._earliest: dict[TopicPartition, int] = {}
        self._event_ms = -math.inf

    def begin_run(self) -> None:
        """Forget what was told to the drivers of earlier runs.

        What was told after the last event of theirs may have been told to the driver of this one,
        or may be the end of a batch that this one takes up from the checkpoint: it is kept.
        """
        self._told = {k: told for k, told in self._told.items() if told.told_ms > self._event_ms}
        self._earliest.clear()
        self._event_ms = -math.inf

    def reported(self, event_ms: float) -> None:
        """Take note of a report on an event of this run, which the driver saw at `event_ms`."""
        self._event_ms = max(self._event_ms, event_ms)
        for lookups in self._lookups:
            lookups.reported()

    def idle(self, event_ms: float) -> None:
        """Take note that the query had nothing to do: all that it was told by then is done."""
        for told in self._told.values():
            if told.told_ms < event_ms:
                told.idle_at = told.offset

    @property
    def connections(self) -> int:
        """How many connections of the client are open."""
        return len(self._lookups)

    @property
    def withheld(self) -> int:
        """How many offsets the driver was not told of, when it asked last."""
        return sum(told.latest - told.offset for told in self._told.values())

    def tell(
        self,
        query: QueryProgress,
        lookups: Lookups,
        latest: dict[TopicPartition, int],
        now_ms: float,
    ) -> dict[TopicPartition, int]:
        """Return what to tell instead of these real ends; remember it as told."""
        why_not = self._why_not(query, lookups, now_ms)
        answers = latest
        offsets: int | None = None
        why = why_not or ""
        if why_not is None and self.rate is not None:
            per_batch = self.rate * self.settings.batch_interval_ms / MS_PER_SECOND
            offsets = max(1, round(min(per_batch * self.offsets_per_record, MAX_OFFSETS)))
            answers = self._clamped(query, lookups, latest, offsets)
            why = f"{self.rate:,.0f} records/s make {offsets:,} offsets for one batch"
        self.state = ClampState(on=why_not is None, why=why, offsets=offsets)
        for key, offset in answers.items():
            self._remember(key, latest[key], offset, lookups, now_ms)
        return answers

    def tell_earliest(self, key: TopicPartition, offset: int) -> None:
        """Take note of the start of a log that the driver was told."""
        if key in self._earliest or len(self._earliest) < MAX_PARTITIONS:
            self._earliest[key] = offset

    def awaits_report(
        self, query: QueryProgress, lookups: Lookups, ask: OffsetsAsk, now_ms: float
    ) -> bool:
        """Say whether the batch that the driver planned last has not been reported yet."""
        if self._why_not(query, lookups, now_ms, may_be_late=True) is not None:
            return False
        return any(
            timestamp == LATEST
            and (told := self._told.get(key)) is not None
            and told.raised_on is lookups
            and told.raised_ms > self._event_ms - EVENT_JITTER_MS
            and told.offset > (self._base(query, key) or 0)
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
        if query.run_batches == 0:
            if self.settings.initial_rate is None:
                return "no batch of this run was reported yet"
        elif not lookups.has_trust:
            return "the connection is newer than the latest report"
        if self.rate is None:
            return "no rate is known yet"
        return None

    def _clamped(
        self,
        query: QueryProgress,
        lookups: Lookups,
        latest: dict[TopicPartition, int],
        offsets: int,
    ) -> dict[TopicPartition, int]:
        ends = dict(self._ends(query, lookups, latest))
        bases = {key: self._base(query, key) for key in ends}
        lags = {
            key: max(0, end - base) for key, end in ends.items() if (base := bases[key]) is not None
        }
        made = shares(offsets, lags)
        has_room = len(self._told) + len(latest) <= MAX_PARTITIONS
        may_begin_low = has_room and _has_planned_nothing(query)
        answers = {}
        for key, end in latest.items():
            base = bases[key]
            told = self._told.get(key)
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
        for key, told in self._told.items():
            if key not in latest and told.told_ms >= oldest_ms:
                yield key, told.latest
        if query.run_batches == 0:
            # The first answers of a run: not all brokers have been asked.
            for key, partition in query.partitions.items():
                end = partition.high_watermark
                if end is not None and key not in latest and key not in self._told:
                    yield key, end

    def _base(self, query: QueryProgress, key: TopicPartition) -> int | None:
        """Return the offset from which the next batch takes its share; None when not known.

        It is what this run has completed. Before its first report: what the same query completed
        in an earlier run, or the start of the log as the driver was told.
        """
        partition = query.partitions.get(key)
        base: int | None = None
        if partition is not None and (
            partition.run_id == query.run_id
            or (query.run_batches == 0 and query.progress_id == query.query_id)
        ):
            base = partition.completed_to
        if base is None and query.run_batches == 0:
            base = self._earliest.get(key)
        if base is None:
            return None
        told = self._told.get(key)
        log_start = partition.log_start if partition is not None else None
        return max(base, told.idle_at if told else 0, log_start or 0)

    def _remember(
        self,
        key: TopicPartition,
        latest: int,
        offset: int,
        lookups: Lookups,
        now_ms: float,
    ) -> None:
        told = self._told.get(key)
        if told is not None:
            if offset > told.offset:
                told.raised_ms, told.raised_on = now_ms, lookups
            told.latest, told.offset, told.told_ms = latest, offset, now_ms
            told.idle_at = min(told.idle_at, offset)
        elif len(self._told) < MAX_PARTITIONS:
            self._told[key] = _Told(latest, offset, now_ms, now_ms, lookups)


def _has_planned_nothing(query: QueryProgress) -> bool:
    """Say whether the run has no batch yet, for certain: then it knows no end of any log.

    A run that reads without a report may have taken up a batch from its checkpoint, or one that it
    planned when it was not bounded: its end is not known here.
    """
    if query.run_batches > 0 or query.run_began_ms is None:
        return False
    last_read_ms = query.last_read_ms
    return last_read_ms is None or last_read_ms < query.run_began_ms
