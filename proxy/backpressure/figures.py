"""What the batches of a query say: how many records it can take, and what a record costs."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from metrics.clock import MS_PER_SECOND
from proxy.progress.report import BatchReport
from proxy.quota.rules import AdaptiveBound
from proxy.state import Json
from proxy.wire.topic_partition import TopicPartition

from .batch_cost import CostState
from .cost import CostEstimator
from .estimator import Observed
from .inputs import Arrivals, HeldTime, PerRecord, RatioState, Reach, Reading, WaitingTime
from .pid import PidEstimator, PidState
from .records import Kept

MIN_PROCESSING_MS = 1.0
"""Of a batch that was held all the time."""


class Finding(NamedTuple):
    """What came of a batch."""

    rate: float | None
    """Records per second for those to come; None: nothing new."""
    figures: str
    """Of the batch, for people."""


class Figures:
    """The figures of one query, over all its runs.

    Args:
        settings: of the rule.

    """

    def __init__(self, settings: AdaptiveBound) -> None:
        self._settings = settings
        self._reading_held = HeldTime()
        self.held = HeldTime()
        """When its Fetch responses were held, and when the driver's look-ups waited."""
        self.bytes_per_record = PerRecord()
        self.offsets_per_record = PerRecord()
        self._bytes: float | None = None
        """Read since the last batch. None before the first: its reading was not seen from the
        beginning."""
        self._resumed_ms = -math.inf
        """When it was taken up from an earlier process; long ago if it was not."""
        self.processing_rate: float | None = None
        """Records per second in its latest batch, the proxy's own holds left out."""
        self._estimator = _estimator(settings)
        self._arrivals = Arrivals()
        self.waiting = WaitingTime()
        self.reach = Reach()

    @property
    def rate(self) -> float | None:
        """Records per second that batches planned now should have, by the runs before too."""
        return self._estimator.rate

    def begin_run(self) -> None:
        """Forget how fast the run before was, as far as the estimator does."""
        self._estimator.begin_run()
        self.waiting = WaitingTime()
        self.reach = Reach()

    def follow(self, settings: AdaptiveBound) -> None:
        """Go on under other settings."""
        before, self._settings = self._settings, settings
        if settings.estimator == before.estimator:
            self._estimator.follow(settings)
        else:
            self._estimator = _estimator(settings)

    def read(self, count: int) -> None:
        """Take note of a Fetch response of so many bytes."""
        if self._bytes is not None:
            self._bytes += count

    def reading_held(self, start_ms: float, due_ms: float) -> None:
        """Take note that a Fetch response is held from when to when."""
        self._reading_held.add(start_ms, due_ms)
        self.held.add(start_ms, due_ms)

    def add(
        self,
        batch: BatchReport,
        read: Reading,
        end_ms: float,
        log_ends: Mapping[TopicPartition, int],
        log_ends_ms: float,
        *,
        left: int | None,
        static: float,
    ) -> Finding | None:
        """Take a batch in; return None when it says nothing of the rate.

        Args:
            batch: of which the driver has reported.
            read: what it took from its sources.
            end_ms: when it was done.
            log_ends: of the partitions that the query reads, as they were seen last.
            log_ends_ms: when that was.
            left: offsets that were in the logs beyond its end then; None when not known.
            static: what the rule lets it read, in bytes per second.

        """
        execution_ms = float(batch.execution_ms or 0)
        start_ms = end_ms - execution_ms
        if start_ms < self._resumed_ms:
            # The proxy was away meanwhile: nobody knows for how long the batch had to wait.
            self._bytes = 0.0
            return None
        held_ms = self.held.within(start_ms, end_ms)
        reading_held_ms = self._reading_held.within(start_ms, end_ms)
        self.held.forget(start_ms)
        self._reading_held.forget(start_ms)
        # Others are processed while one response is held, so this may say too little, and the rate
        # be too high for a batch. To leave it in would be worse: a rate that only ever falls.
        processing_ms = max(MIN_PROCESSING_MS, execution_ms - held_ms)
        interval_ms = self._settings.batch_interval_ms
        waited_ms = 0.0
        if interval_ms is not None:
            waited_ms = self.waiting.add(processing_ms, interval_ms)
            self._arrivals.add(log_ends, log_ends_ms, interval_ms)
        if read.records > 0:
            if self._bytes is not None:
                self.bytes_per_record.add(self._bytes, read.records)
            self._bytes = 0.0
            if read.offsets is not None:
                self.offsets_per_record.add(read.offsets, read.records)
        if execution_ms <= 0 or read.records <= 0:
            return None
        self.reach.add(read.records, execution_ms, reading_held_ms)
        self.processing_rate = read.records / processing_ms * MS_PER_SECOND
        rate = None
        if interval_ms is not None:
            arrivals, size = self._arrivals.rate, self.bytes_per_record.steady
            per_offset = 1 / (self.offsets_per_record.value or 1.0)
            rate = self._estimator.compute(
                Observed(
                    time_ms=batch.timestamp_ms + execution_ms,
                    records=read.records,
                    processing_ms=processing_ms,
                    waited_ms=waited_ms,
                    left=None if left is None else left * per_offset,
                    arrivals=None if arrivals is None else arrivals * per_offset,
                    most=math.inf if size is None else static / size,
                )
            )
        figures = f"batch {batch.batch_id}: {read.records:,} records in {execution_ms:,.0f} ms"
        if held_ms > 0:
            figures += f" (held {held_ms:,.0f} ms left out)"
        return Finding(rate, figures)

    def kept(self) -> dict[str, Json]:
        """Return what a record says of it; see `Kept`."""
        estimator = self._estimator
        return {
            "reach": self.reach.rate,
            "waiting_ms": self.waiting.ms,
            "estimator": estimator.kept() if isinstance(estimator, PidEstimator) else None,
            "cost": estimator.kept() if isinstance(estimator, CostEstimator) else None,
            "bytes_per_record": self.bytes_per_record.kept(),
            "offsets_per_record": self.offsets_per_record.kept(),
        }

    def resume(self, kept: Kept, now_ms: float) -> None:
        """Go on from what an earlier process kept."""
        self._resumed_ms = now_ms
        self.reach.rate = kept.reach
        self.waiting.ms = kept.waiting_ms
        if isinstance(self._estimator, PidEstimator) and kept.estimator is not None:
            self._estimator.restore(PidState(*kept.estimator))
        elif isinstance(self._estimator, CostEstimator) and kept.cost is not None:
            self._estimator.restore(CostState(*kept.cost))
        self.bytes_per_record.restore(RatioState(*kept.bytes_per_record))
        self.offsets_per_record.restore(RatioState(*kept.offsets_per_record))


def _estimator(settings: AdaptiveBound) -> CostEstimator | PidEstimator:
    return PidEstimator(settings) if settings.estimator == "pid" else CostEstimator(settings)
