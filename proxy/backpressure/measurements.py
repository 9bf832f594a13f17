"""What the batches of a query show: how many records it can take, and what a record costs."""

import math
from collections import deque
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace

from metrics.clock import MS_PER_SECOND
from proxy.progress.offset_ranges import RangeSet
from proxy.progress.report import BatchReport
from proxy.quota.rules import AdaptiveSettings
from proxy.state import Json
from proxy.wire.topic_partition import TopicPartition

from .backpressure_record import BackpressureRecord, RatioState
from .cost import CostEstimator, FinishedBatch, PidEstimator
from .drivers import QueryDrivers

MAX_HOLDS = 512
"""How many separate times of holding are kept; beyond it the closest ones count as one."""

MIN_PROCESSING_MS = 1.0
"""Of a batch that was held all the time."""

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


Estimator = CostEstimator | PidEstimator

ESTIMATORS: Mapping[str, type[Estimator]] = {"pid": PidEstimator, "cost": CostEstimator}


@dataclass(slots=True)
class PerRecordAverage:
    """How much of something goes with a record, with DECAY from batch to batch.

    Batches with nothing of it count together with the one before: they had it then, as when a
    consumer has read ahead. Until that is used up the figure is too high; then a little too low for
    a while, as what was read counts by earlier batches. Before the first that has some they do not
    count: theirs was read before anybody measured.
    """

    state: RatioState = (0.0, 0.0, 0.0)
    value: float | None = None
    """The ratio; None as long as it is not known."""
    steady: float | None = None
    """The same; None also while the latest batches say something else, as after read-ahead."""
    _latest: float = 0.0

    def add(self, amount: float, records: float) -> None:
        """Add a batch."""
        total, counted, without = self.state
        if amount > 0:
            self._latest = amount / (records + without)
            total, counted = total * DECAY + amount, (counted + without) * DECAY + records
            without = 0.0
        elif total > 0:
            without += records
        self._set((total, counted, without))

    def resume(self, state: RatioState) -> None:
        """Resume from the state of an earlier process."""
        self._latest = 0.0
        self._set(state)

    def _set(self, state: RatioState) -> None:
        self.state, (total, counted, without) = state, state
        self.value = value = total / (counted + without) if total > 0 else None
        latest = self._latest or value or 0.0
        is_steady = value is not None and value / STEADY <= latest <= value * STEADY
        self.steady, self._latest = value if is_steady else None, latest


def queued_ms(waiting_ms: float, processing_ms: float, interval_ms: float) -> float:
    """Return how long the batch after one would wait that waited itself, had batches been queued.

    Lindley's recursion: W' = max(0, W + processing delay - batch interval), not beyond
    MAX_WAITING_INTERVALS. Spark Streaming has this queue, Structured Streaming skips triggers.
    """
    longest_ms = MAX_WAITING_INTERVALS * interval_ms
    return min(max(0.0, waiting_ms + processing_ms - interval_ms), longest_ms)


class QueryMeasurements:
    """What is measured of one query, over all its runs, by the settings of its rule."""

    def __init__(self, settings: AdaptiveSettings) -> None:
        self.rule = self._settings = settings
        self.interval = TriggerInterval()
        self._reading_held = RangeSet[float](MAX_HOLDS)
        """When its Fetch responses were held; holds may be side by side."""
        self.held = RangeSet[float](MAX_HOLDS)
        """The same, and when the driver's look-ups waited."""
        self.bytes_per_record = PerRecordAverage()
        self.offsets_per_record = PerRecordAverage()
        self._bytes: float | None = None
        """Read since the last batch. None before the first: its beginning was not seen."""
        self._resumed_ms = -math.inf
        """When it was resumed from an earlier process; long ago if it was not."""
        self.processing_rate: float | None = None
        """Records per second in its latest batch, the proxy's own holds left out."""
        self.estimator: Estimator = ESTIMATORS[settings.estimator](settings)
        self._latest: FinishedBatch | None = None
        self._input_rate = InputRate()
        self.waiting_ms = 0.0
        """How long the next batch would have waited, had the batches been queued. 0 at the start of
        a run, and again when the query is idle."""
        self.throttled_rate = ThrottledRate()

    def begin_run(self) -> None:
        """Forget how fast the run before was, as far as the estimator does."""
        self.estimator.begin_run()
        self.interval.begin_run()
        self.waiting_ms = 0.0
        self.throttled_rate = ThrottledRate()

    @property
    def interval_ms(self) -> float | None:
        """The query's trigger interval: the rule's, else what was learnt; None: not known."""
        return self.rule.batch_interval_ms or self.interval.learnt_ms

    @property
    def per_record(self) -> float:
        """How far the offsets go on with a record, 1 when not known.

        More where transactions or compaction leave gaps, less where a query reads a source twice.
        """
        return self.offsets_per_record.value or 1.0

    def update(self, rule: AdaptiveSettings) -> None:
        """Measure by these settings from now on, and the query's own interval if they have none."""
        is_same, self.rule, before = rule is self.rule, rule, self._settings
        interval_ms = self.interval_ms
        if interval_ms is None or (is_same and interval_ms == before.batch_interval_ms):
            return
        self._settings = replace(rule, batch_interval_ms=interval_ms)
        if rule.estimator == before.estimator:
            self.estimator.update(self._settings)
        else:
            self.estimator = ESTIMATORS[rule.estimator](self._settings)

    def record_bytes(self, count: int) -> None:
        """Record a Fetch response of so many bytes."""
        if self._bytes is not None:
            self._bytes += count

    def record_hold(self, start_ms: float, due_ms: float) -> None:
        """Record from when to when a Fetch response is held."""
        self._reading_held.add(start_ms, due_ms)
        self.held.add(start_ms, due_ms)

    def add(
        self, batch: BatchReport, end_ms: float, drivers: QueryDrivers, static: float
    ) -> tuple[float | None, str | None]:
        """Add a batch that was done at `end_ms`; `static` is the rule's own bound, in bytes/s.

        Return the rate for those to come, in records per second, None for no new one, and from what
        it follows in words; None when nothing was measured, as without an interval.
        """
        interval_ms = self._settings.batch_interval_ms
        if interval_ms is None:
            return None, None
        execution_ms = float(batch.execution_ms or 0)
        start_ms = end_ms - execution_ms
        if start_ms < self._resumed_ms:
            # The proxy was away meanwhile: nobody knows for how long the batch had to wait.
            self._bytes = 0.0
            return None, None
        held_ms = self.held.covered(start_ms, end_ms)
        reading_held_ms = self._reading_held.covered(start_ms, end_ms)
        self.held.remove_below(start_ms)
        self._reading_held.remove_below(start_ms)
        # Others are processed while one response is held, so this may say too little, and the rate
        # be too high for a batch. To leave it in would be worse: a rate that only ever falls.
        processing_ms = max(MIN_PROCESSING_MS, execution_ms - held_ms)
        waited_ms = self.waiting_ms
        self.waiting_ms = queued_ms(waited_ms, processing_ms, interval_ms)
        ends = drivers.advertised
        seen_ms = max((end.answered_ms for end in ends.values()), default=-math.inf)
        log_ends = {key: end.log_end for key, end in ends.items()}
        self._input_rate.add(log_ends, seen_ms, interval_ms)
        # As Spark counts them: twice where a query reads a source twice.
        records, offsets = sum([source.rows for source in batch.sources]), batch.offsets
        if records > 0:
            if self._bytes is not None:
                self.bytes_per_record.add(self._bytes, records)
            self._bytes = 0.0
            if offsets is not None:
                self.offsets_per_record.add(offsets, records)
        if execution_ms <= 0 or records <= 0:
            return None, None
        self.throttled_rate.add(records, execution_ms, reading_held_ms)
        self.processing_rate = records / processing_ms * MS_PER_SECOND
        left, arrivals = drivers.left_out(batch.ranges), self._input_rate.rate
        size = self.bytes_per_record.steady
        per_offset = 1 / self.per_record
        time_ms = batch.timestamp_ms + execution_ms
        is_clock_back = self._latest is not None and time_ms < self._latest.time_ms
        if is_clock_back and isinstance(self.estimator, PidEstimator):
            self.estimator.begin_run()  # it would pass over all until the clock is there again
        self._latest = FinishedBatch(
            time_ms=time_ms,
            records=records,
            processing_ms=processing_ms,
            waited_ms=waited_ms,
            left=None if left is None else left * per_offset,
            arrivals=None if arrivals is None else arrivals * per_offset,
            most=math.inf if size is None else static / size,
        )
        rate = self.estimator.compute(self._latest)
        why = f"batch {batch.batch_id}: {records:,} records in {execution_ms:,.0f} ms"
        if held_ms > 0:
            why += f" (held {held_ms:,.0f} ms left out)"
        if rate is None:
            return None, f"{why}: the first of this run, no rate yet"
        return rate, f"{why} -> {rate:,.0f} records/s"

    def rate_after(self, offsets: float, start_ms: float, end_ms: float) -> float | None:
        """Return the rate as it would be after a batch of so many offsets; None: not known.

        Nothing is learnt of it: its report will come.
        """
        if self._latest is None or not isinstance(self.estimator, CostEstimator):
            return None
        records = offsets / self.per_record
        took_ms = max(MIN_PROCESSING_MS, end_ms - start_ms - self.held.covered(start_ms, end_ms))
        batch = replace(self._latest, records=records, processing_ms=took_ms, left=None)
        return copy(self.estimator).compute(batch)

    def kept(self) -> dict[str, Json]:
        """Return what a BackpressureRecord has of it."""
        return {
            "interval_ms": self.interval.learnt_ms,
            "reach": self.throttled_rate.rate,
            "waiting_ms": self.waiting_ms,
            "estimator": None,
            "cost": None,
            self.estimator.kept_as: self.estimator.state,
            "bytes_per_record": self.bytes_per_record.state,
            "offsets_per_record": self.offsets_per_record.state,
        }

    def resume(self, record: BackpressureRecord, now_ms: float) -> None:
        """Resume from what an earlier process measured."""
        self.interval.learnt_ms = record.interval_ms
        self.update(self.rule)
        self._resumed_ms = now_ms
        self.throttled_rate.rate = record.reach
        self.waiting_ms = record.waiting_ms
        self.estimator.state = getattr(record, self.estimator.kept_as)
        self.bytes_per_record.resume(record.bytes_per_record)
        self.offsets_per_record.resume(record.offsets_per_record)
