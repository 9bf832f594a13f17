"""The estimator of Spark Streaming, for those who want it exactly."""

import math
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

from metrics.clock import MS_PER_SECOND
from proxy.quota.rules import AdaptiveBound

from .batch_cost import FinishedBatch

PidState = tuple[float, float, float]
"""Time, rate and error of the latest batch."""

NEVER: PidState = (-1.0, -1.0, -1.0)
"""That before the first batch, as in Spark."""

_parameters = attrgetter(
    *("batch_interval_ms", "min_rate", "proportional", "integral", "derivative")
)


@dataclass
class PidEstimator:
    """The estimator of Spark Streaming: org.apache.spark.streaming.scheduler.rate.PIDRateEstimator.

    The error is the latest rate less the rate at which the batch was processed; its integral is
    what waits to be processed, which is the scheduling delay times the processing rate. The first
    batch only sets the latest rate. Passed over is a batch that is not later than the one before,
    that has no elements or no processing delay, or whose figures or rate are not finite.

    A fixed cost per batch counts as slowness here, and smaller batches look slower still: see
    `cost.CostEstimator` for one that tells them apart.
    """

    _settings: AdaptiveBound
    state: PidState | None = None
    """What a later process needs to go on; None before the first batch."""
    kept_as: ClassVar[str] = "estimator"
    """See BackpressureRecord."""
    rate: ClassVar[None] = None
    """Each run begins anew."""
    is_fresh: ClassVar[bool] = True
    """It knows no more of a batch than the rate."""

    def compute(self, batch: FinishedBatch) -> float | None:
        """Add a batch; return the new rate in records per second, None for no new one."""
        settings, time_ms = self._settings, batch.time_ms
        interval_ms = settings.batch_interval_ms
        latest_ms, latest_rate, latest_error = self.state or NEVER
        is_new = time_ms > latest_ms
        if not (is_new and batch.records > 0 and batch.processing_ms > 0) or interval_ms is None:
            return None
        try:
            elapsed_s = (time_ms - latest_ms) / MS_PER_SECOND
            processing_rate = batch.records / batch.processing_ms * MS_PER_SECOND
            error = latest_rate - processing_rate
            historical_error = batch.waited_ms * processing_rate / interval_ms
            error_change = (error - latest_error) / elapsed_s
        except ArithmeticError:  # two times that are as good as the same, or figures beyond measure
            return None
        rate = (
            latest_rate
            - settings.proportional * error
            - settings.integral * historical_error
            - settings.derivative * error_change
        )
        if not all(map(math.isfinite, (time_ms, processing_rate, rate))):
            return None
        if self.state is None:
            self.state = time_ms, processing_rate, 0.0
            return None
        rate = max(settings.min_rate, rate)
        self.state = time_ms, rate, error
        return rate

    def update(self, settings: AdaptiveBound) -> None:
        """Estimate by other settings from now on; begin anew if they say something else here."""
        if _parameters(settings) != _parameters(self._settings):
            self.state = None
        self._settings = settings

    def begin_run(self) -> None:
        """Forget all."""
        self.state = None
