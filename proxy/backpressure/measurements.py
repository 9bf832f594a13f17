"""What the batches of a query show: how many records it can take, and what a record costs."""

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from operator import attrgetter

from metrics.clock import MS_PER_SECOND
from proxy.progress.offset_ranges import RangeSet
from proxy.progress.report import BatchReport
from proxy.quota.rules import AdaptiveBound
from proxy.state import Json
from proxy.wire.topic_partition import TopicPartition

from .advertised_ends import AdvertisedEnd, left_out
from .backpressure_record import BackpressureRecord
from .cost import CostEstimator
from .estimator_inputs import (
    FinishedBatch,
    InputRate,
    RecordRatio,
    ThrottledRate,
    TriggerInterval,
    batch_offsets,
    queued_ms,
)
from .pid import PidEstimator

MAX_HOLDS = 512
"""How many separate times of holding are kept; beyond it the closest ones count as one."""

MIN_PROCESSING_MS = 1.0
"""Of a batch that was held all the time."""


_parameters = attrgetter(
    *("estimator", "batch_interval_ms", "min_rate", "proportional", "integral", "derivative")
)
"""With others a PidEstimator begins anew."""


class BatchMeasurements:
    """What is measured of one query, over all its runs, by the settings of its rule."""

    def __init__(self, settings: AdaptiveBound) -> None:
        self.rule = self._settings = settings
        self.interval = TriggerInterval()
        self._reading_held = RangeSet[float](MAX_HOLDS)
        """When its Fetch responses were held; holds may be side by side."""
        self.held = RangeSet[float](MAX_HOLDS)
        """The same, and when the driver's look-ups waited."""
        self.bytes_per_record = RecordRatio()
        self.offsets_per_record = RecordRatio()
        self._bytes: float | None = None
        """Read since the last batch. None before the first: its beginning was not seen."""
        self._resumed_ms = -math.inf
        """When it was resumed from an earlier process; long ago if it was not."""
        self.processing_rate: float | None = None
        """Records per second in its latest batch, the proxy's own holds left out."""
        self.estimator = _estimator(settings)
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

    def update(self, rule: AdaptiveBound) -> None:
        """Measure by these settings from now on, and the query's own interval if they have none."""
        self.rule, interval_ms = rule, rule.batch_interval_ms or self.interval.learnt_ms
        if interval_ms is None:
            return
        before, self._settings = self._settings, replace(rule, batch_interval_ms=interval_ms)
        if isinstance(self.estimator, CostEstimator) and rule.estimator == "cost":
            self.estimator.update(self._settings)
        elif _parameters(self._settings) != _parameters(before):
            self.estimator = _estimator(self._settings)

    def record_bytes(self, count: int) -> None:
        """Record a Fetch response of so many bytes."""
        if self._bytes is not None:
            self._bytes += count

    def record_hold(self, start_ms: float, due_ms: float) -> None:
        """Record from when to when a Fetch response is held."""
        self._reading_held.add(start_ms, due_ms)
        self.held.add(start_ms, due_ms)

    def add(
        self,
        batch: BatchReport,
        end_ms: float,
        advertised: Mapping[TopicPartition, AdvertisedEnd],
        static: float,
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
        seen_ms = max((end.answered_ms for end in advertised.values()), default=-math.inf)
        log_ends = {key: end.log_end for key, end in advertised.items()}
        self._input_rate.add(log_ends, seen_ms, interval_ms)
        # As Spark counts them: twice where a query reads a source twice.
        records, offsets = sum([source.rows for source in batch.sources]), batch_offsets(batch)
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
        left, arrivals = left_out(advertised, batch.ranges), self._input_rate.rate
        size = self.bytes_per_record.steady
        per_offset = 1 / (self.offsets_per_record.value or 1.0)
        self._latest = FinishedBatch(
            time_ms=batch.timestamp_ms + execution_ms,
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
        records = offsets / (self.offsets_per_record.value or 1.0)
        took_ms = max(MIN_PROCESSING_MS, end_ms - start_ms - self.held.covered(start_ms, end_ms))
        batch = replace(self._latest, records=records, processing_ms=took_ms, left=None)
        return copy(self.estimator).compute(batch)

    def kept(self) -> dict[str, Json]:
        """Return what a BackpressureRecord has of it."""
        is_cost, state = isinstance(self.estimator, CostEstimator), self.estimator.state
        return {
            "interval_ms": self.interval.learnt_ms,
            "reach": self.throttled_rate.rate,
            "waiting_ms": self.waiting_ms,
            "estimator": None if is_cost else state,
            "cost": state if is_cost else None,
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
        if isinstance(self.estimator, CostEstimator):
            self.estimator.state = record.cost
        else:
            self.estimator.state = record.estimator
        self.bytes_per_record.resume(record.bytes_per_record)
        self.offsets_per_record.resume(record.offsets_per_record)


def _estimator(settings: AdaptiveBound) -> CostEstimator | PidEstimator:
    return PidEstimator(settings) if settings.estimator == "pid" else CostEstimator(settings)
