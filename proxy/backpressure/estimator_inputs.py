"""What an estimator needs to know of a batch, from what the proxy saw and the driver reported."""

import math
from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

from metrics.clock import MS_PER_SECOND
from proxy.progress.report import BatchReport
from proxy.wire.topic_partition import TopicPartition

MAX_HOLDS = 512
"""How many separate times of holding are kept; beyond it the closest ones count as one."""

MAX_WAITING_INTERVALS = 1.0
"""How many batch intervals at most count as scheduling delay: triggers that are missed are skipped,
so that never more than one is late. A queue that grew with each long batch, as that of Spark
Streaming, would keep the rate at its lowest long after."""

HELD_SHARE = 0.1
"""A batch that was held for more than this part of its time was throttled."""

REACH_GROWTH = 1.5
"""From one batch that is not throttled to the next."""

ARRIVALS_INTERVALS = 5.0
"""What came in so many batch intervals ago counts for 1/e of what comes in now."""

STEADY = 2.0
"""A ratio is steady when the latest batches alone give no more than so many times it, nor less."""

DECAY = 0.8
"""Weight of the earlier batches in a ratio, each time that one is added."""


class HeldTime:
    """When responses were held, as times that do not overlap. Holds may be side by side."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []

    def add(self, start_ms: float, end_ms: float) -> None:
        """Add a hold; it may reach into the future. Nothing when it does not last."""
        if not end_ms > start_ms:
            return
        starts, ends = self._starts, self._ends
        first = last = bisect_left(ends, start_ms)
        while last < len(starts) and starts[last] <= end_ms:
            start_ms, end_ms = min(start_ms, starts[last]), max(end_ms, ends[last])
            last += 1
        starts[first:last], ends[first:last] = [start_ms], [end_ms]
        if len(starts) > MAX_HOLDS:
            self._close_gaps()

    def within(self, start_ms: float, end_ms: float) -> float:
        """Return for how long of this time anything was held."""
        return sum(
            max(0.0, min(end, end_ms) - max(start, start_ms))
            for start, end in zip(self._starts, self._ends, strict=True)
        )

    def forget(self, before_ms: float) -> None:
        """Drop what ended before this time."""
        gone = bisect_left(self._ends, before_ms)
        del self._starts[:gone]
        del self._ends[:gone]

    def __len__(self) -> int:
        return len(self._starts)

    def _close_gaps(self) -> None:
        """Halve the list: the shorter gaps count as held."""
        gaps = [start - end for end, start in zip(self._ends, self._starts[1:], strict=False)]
        by_length = sorted(range(len(gaps)), key=gaps.__getitem__)
        kept = sorted(by_length[len(gaps) // 2 :])
        self._starts = [self._starts[0]] + [self._starts[index + 1] for index in kept]
        self._ends = [self._ends[index] for index in kept] + [self._ends[-1]]


class SchedulingDelay:
    """How long the next batch would have waited, had the batches been queued.

    Lindley's recursion: W' = max(0, W + processing delay - batch interval). Spark Streaming has
    this queue; Structured Streaming skips triggers instead, so it is kept here, and not beyond
    MAX_WAITING_INTERVALS.
    """

    __slots__ = ("ms",)

    def __init__(self) -> None:
        self.ms = 0.0
        """0 at the start of a run, and again when the query is idle."""

    def add(self, processing_delay_ms: float, batch_interval_ms: float) -> float:
        """Add a batch; return for how long itself would have waited."""
        waited_ms = self.ms
        longest_ms = MAX_WAITING_INTERVALS * batch_interval_ms
        self.ms = min(max(0.0, self.ms + processing_delay_ms - batch_interval_ms), longest_ms)
        return waited_ms


class ThrottledRate:
    """How fast a query could read of late where a bound held it.

    A batch that is held for much of its time is not to be followed by a longer one, whatever its
    processing alone could take: it would be held for longer still. Each batch that is not held
    lets the next one be larger.
    """

    __slots__ = ("rate",)

    def __init__(self) -> None:
        self.rate: float | None = None
        """Records per second; None: it was not held."""

    def add(self, records: int, execution_ms: float, held_ms: float) -> None:
        """Add a batch: how long it took in all, and for how much of that it was held."""
        if held_ms > HELD_SHARE * execution_ms:
            self.rate = records / execution_ms * MS_PER_SECOND
        elif self.rate is not None:
            self.rate *= REACH_GROWTH

    def limit(self, rate: float, min_rate: float) -> float:
        """Return the rate to plan with, in place of this one; no more is known once it is reached.

        It is never below the lowest rate: one long hold must not end in the smallest batches.
        """
        if self.rate is None or self.rate >= rate:
            self.rate = None
            return rate
        return max(self.rate, min_rate)


class InputRate:
    """How fast the logs grow that a query reads, of late: see ARRIVALS_INTERVALS."""

    __slots__ = ("_elapsed_ms", "_ends", "_grown", "_seen_ms")

    def __init__(self) -> None:
        self._ends: Mapping[TopicPartition, int] = {}
        self._seen_ms = -math.inf
        self._grown = self._elapsed_ms = 0.0

    def add(
        self, ends: Mapping[TopicPartition, int], seen_ms: float, batch_interval_ms: float
    ) -> None:
        """Add where the logs ended at a time; one that was not known has not grown."""
        elapsed_ms = seen_ms - self._seen_ms
        if elapsed_ms <= 0 or not ends:
            return
        if self._ends:
            grown = sum(max(0, end - self._ends.get(key, end)) for key, end in ends.items())
            kept = math.exp(-elapsed_ms / (ARRIVALS_INTERVALS * batch_interval_ms))
            self._grown = kept * self._grown + grown
            self._elapsed_ms = kept * self._elapsed_ms + elapsed_ms
        self._ends, self._seen_ms = ends, seen_ms

    @property
    def rate(self) -> float | None:
        """Offsets per second; None when not known."""
        return self._grown / self._elapsed_ms * MS_PER_SECOND if self._elapsed_ms else None


RatioState = tuple[float, float, float]
"""Amount, records, and records since then without any of it."""


class RecordRatio:
    """How much of something goes with a record, with DECAY from batch to batch.

    Batches with nothing of it count together with the one before: they had it then, as when a
    consumer has read ahead. Until what was read ahead is used up the figure is too high, never too
    low.
    """

    __slots__ = ("_latest", "state")

    def __init__(self) -> None:
        self.state: RatioState = (0.0, 0.0, 0.0)
        self._latest = 0.0

    def add(self, amount: float, records: float) -> None:
        """Add a batch."""
        before, before_records, without = self.state
        if amount <= 0:
            self.state = before, before_records, without + records
            return
        self._latest = amount / (records + without)
        self.state = before * DECAY + amount, (before_records + without) * DECAY + records, 0.0

    def resume(self, state: RatioState) -> None:
        """Go on from the state of an earlier process."""
        self.state = state
        self._latest = self.value or 0.0

    @property
    def value(self) -> float | None:
        """None as long as it is not known."""
        amount, records, without = self.state
        return amount / (records + without) if amount > 0 else None

    @property
    def steady(self) -> float | None:
        """The same; None also while it is far from what the latest batches alone say.

        As when a consumer has just read ahead what came at once.
        """
        value = self.value
        if value is None or not value / STEADY <= self._latest <= value * STEADY:
            return None
        return value


class BatchInput(NamedTuple):
    """What a batch took from its Kafka sources."""

    records: int
    """As Spark counts them: twice where a query reads a source twice."""
    offsets: int | None
    """How far it went on, over all partitions; None when it does not say where it began in each:
    in a first batch, and where a partition is new."""


def batch_input(batch: BatchReport) -> BatchInput:
    """Return what a batch read; a partition that several sources read goes on once."""
    records = sum(source.rows for source in batch.sources)
    offsets = 0
    for read in batch.ranges.values():
        if read.start is None:
            return BatchInput(records, None)
        offsets += read.end - read.start
    return BatchInput(records, offsets)
