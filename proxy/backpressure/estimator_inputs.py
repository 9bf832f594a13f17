"""What an estimator needs to know of a batch, from what the proxy saw and the driver reported."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from metrics.clock import MS_PER_SECOND
from proxy.progress.report import BatchReport
from proxy.wire.topic_partition import TopicPartition

MAX_WAITING_INTERVALS = 1.0
"""Batch intervals that count as scheduling delay at most: missed triggers are skipped. A queue that
grew with each long batch, as in Spark Streaming, would keep the rate at its lowest long after."""

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

MIN_GAPS, MAX_GAPS = 3, 8
"""How many times between two batches have to be known to tell the interval; how many are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedBatch:
    """A batch that is done, and what is known of the query beside it."""

    time_ms: float
    """When it was done, on a clock of the caller's choice."""
    records: float
    processing_ms: float
    """How long it took, the proxy's own holds left out."""
    waited_ms: float = 0.0
    """For how long it would have waited before that, had batches been queued."""
    left: float | None = None
    """Records that were there at its trigger and that it left out; None when not known."""
    arrivals: float | None = None
    """Records per second that come in of late; None when not known."""
    most: float = math.inf
    """Records per second that the rule's own bound carries; infinite when not known."""


@dataclass(slots=True)
class TriggerInterval:
    """The interval of a query's processing-time trigger.

    Batches begin at multiples of it; one that takes longer is followed by the next at once (Spark's
    ProcessingTimeExecutor). So of the times between two beginnings, the one before done in time,
    the shortest is the interval, or a multiple of it while there is little to read.
    """

    learnt_ms: float | None = None
    """What was reported or learnt; None when nothing was."""
    _began_ms: float | None = None
    _execution_ms: float = 0.0
    _gaps_ms: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_GAPS))

    def begin_run(self) -> None:
        """Forget when batches began; the interval stays until another is learnt."""
        self._began_ms = None
        self._gaps_ms.clear()

    def add(self, batch: BatchReport | None, reported_ms: float | None) -> None:
        """Add a batch, or what a report says of the trigger's interval."""
        if batch is not None:
            began_ms = batch.timestamp_ms
            if self._began_ms is not None and began_ms - self._began_ms > self._execution_ms:
                self._gaps_ms.append(began_ms - self._began_ms)
            self._began_ms, self._execution_ms = began_ms, float(batch.execution_ms or 0)
            if len(self._gaps_ms) >= MIN_GAPS:
                self.learnt_ms = min(self._gaps_ms)
        self.learnt_ms = reported_ms or self.learnt_ms


@dataclass(slots=True)
class ThrottledRate:
    """How fast a query could read of late where a bound held it.

    A batch that is held for much of its time is not to be followed by a longer one, which would be
    held for longer still. Each batch that is not held lets the next one be larger.
    """

    rate: float | None = None
    """Records per second; None: it was not held."""

    def add(self, records: int, execution_ms: float, held_ms: float) -> None:
        """Add a batch: how long it took in all, and for how much of that it was held."""
        if held_ms > HELD_SHARE * execution_ms:
            self.rate = records / execution_ms * MS_PER_SECOND
        elif self.rate is not None:
            self.rate *= REACH_GROWTH

    def limit(self, rate: float, min_rate: float) -> float:
        """Return the rate to plan with, in place of this one; forget its own once that is reached.

        At least `min_rate`: one long hold must not end in the smallest batches.
        """
        if self.rate is None or self.rate >= rate:
            self.rate = None
            return rate
        return max(self.rate, min_rate)


@dataclass(slots=True)
class InputRate:
    """How fast the logs grow that a query reads, of late: see ARRIVALS_INTERVALS."""

    rate: float | None = None
    """Offsets per second; None when not known."""
    _ends: Mapping[TopicPartition, int] = field(default_factory=dict)
    _seen_ms: float = -math.inf
    _grown: float = 0.0
    _elapsed_ms: float = 0.0

    def add(
        self, ends: Mapping[TopicPartition, int], seen_ms: float, batch_interval_ms: float
    ) -> None:
        """Add where the logs ended at a time; one that was not known has not grown."""
        elapsed_ms = seen_ms - self._seen_ms
        if elapsed_ms <= 0 or not ends:
            return
        if self._ends:
            grown = sum([max(0, end - self._ends.get(key, end)) for key, end in ends.items()])
            kept = math.exp(-elapsed_ms / (ARRIVALS_INTERVALS * batch_interval_ms))
            self._grown = kept * self._grown + grown
            self._elapsed_ms = kept * self._elapsed_ms + elapsed_ms
            self.rate = self._grown / self._elapsed_ms * MS_PER_SECOND
        self._ends, self._seen_ms = ends, seen_ms


RatioState = tuple[float, float, float]
"""Amount, records, and records since then without any of it."""


@dataclass(slots=True)
class RecordRatio:
    """How much of something goes with a record, with DECAY from batch to batch.

    Batches with nothing of it count together with the one before: they had it then, as when a
    consumer has read ahead. Until that is used up the figure is too high; then a little too low for
    a while, as what was read counts by earlier batches.
    """

    state: RatioState = (0.0, 0.0, 0.0)
    _latest: float = 0.0

    def add(self, amount: float, records: float) -> None:
        """Add a batch."""
        total, counted, without = self.state
        if amount > 0:
            self._latest = amount / (records + without)
            total, counted = total * DECAY + amount, (counted + without) * DECAY + records
            without = 0.0
        else:
            without += records
        self.state = total, counted, without

    def resume(self, state: RatioState) -> None:
        """Resume from the state of an earlier process."""
        self.state = state
        self._latest = self.value or 0.0

    @property
    def value(self) -> float | None:
        """The ratio; None as long as it is not known."""
        total, counted, without = self.state
        return total / (counted + without) if total > 0 else None

    @property
    def steady(self) -> float | None:
        """The same; None also while the latest batches say something else, as after read-ahead."""
        value = self.value
        is_steady = value is not None and value / STEADY <= self._latest <= value * STEADY
        return value if is_steady else None


def queued_ms(waiting_ms: float, processing_ms: float, interval_ms: float) -> float:
    """Return how long the batch after one would wait that waited itself, had batches been queued.

    Lindley's recursion: W' = max(0, W + processing delay - batch interval), not beyond
    MAX_WAITING_INTERVALS. Spark Streaming has this queue, Structured Streaming skips triggers.
    """
    longest_ms = MAX_WAITING_INTERVALS * interval_ms
    return min(max(0.0, waiting_ms + processing_ms - interval_ms), longest_ms)


def batch_offsets(batch: BatchReport) -> int | None:
    """Return by how many offsets a batch went on, in each partition once.

    None when it is not said where it began in each: a first one, or a new partition.
    """
    offsets = 0
    for read in batch.ranges.values():
        if read.start is None:
            return None
        offsets += read.end - read.start
    return offsets
