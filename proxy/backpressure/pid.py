"""The estimator of Spark Streaming, for those who want it exactly."""

import math
from typing import NamedTuple

from metrics.clock import MS_PER_SECOND
from proxy.quota.rules import AdaptiveBound

from .estimator import Observed

_NEVER = -1.0
"""Of latest time and rate before the first call, as in Spark."""


class PidState(NamedTuple):
    """What is kept of the latest batch."""

    time_ms: float
    rate: float
    error: float


class PidEstimator:
    """The estimator of Spark Streaming: org.apache.spark.streaming.scheduler.rate.PIDRateEstimator.

    The error is the latest rate less the rate at which the batch was processed; its integral is
    what waits to be processed, which is the scheduling delay times the processing rate. The first
    batch only sets the latest rate.

    A batch that is not later than the one before, or has no elements or no processing delay, is
    passed over, and so is one whose figures are not finite or lead to a rate that is not.

    A fixed cost per batch counts as slowness here, and smaller batches look slower still: see
    `cost.CostEstimator` for one that tells them apart.

    Args:
        settings: the batch interval, which is known, the gains and the lowest rate.

    """

    __slots__ = ("_first_run", "_latest_error", "_latest_rate", "_latest_time_ms", "_settings")

    def __init__(self, settings: AdaptiveBound) -> None:
        self._settings = settings
        self._first_run = True
        self._latest_time_ms = _NEVER
        self._latest_rate = _NEVER
        self._latest_error = _NEVER

    def compute(self, batch: Observed) -> float | None:
        """See RateEstimator: None for the first batch of a run, and one that is passed over."""
        time_ms, interval_ms = batch.time_ms, self._settings.batch_interval_ms
        is_new = time_ms > self._latest_time_ms
        if not (is_new and batch.records > 0 and batch.processing_ms > 0) or interval_ms is None:
            return None
        settings = self._settings
        try:
            elapsed_s = (time_ms - self._latest_time_ms) / MS_PER_SECOND
            processing_rate = batch.records / batch.processing_ms * MS_PER_SECOND
            error = self._latest_rate - processing_rate
            historical_error = batch.waited_ms * processing_rate / interval_ms
            error_change = (error - self._latest_error) / elapsed_s
        except ArithmeticError:  # two times that are as good as the same, or figures beyond measure
            return None
        rate = (
            self._latest_rate
            - settings.proportional * error
            - settings.integral * historical_error
            - settings.derivative * error_change
        )
        if not all(map(math.isfinite, (time_ms, processing_rate, rate))):
            return None
        self._latest_time_ms = time_ms
        if self._first_run:
            self._first_run = False
            self._latest_rate = processing_rate
            self._latest_error = 0.0
            return None
        self._latest_rate = max(settings.min_rate, rate)
        self._latest_error = error
        return self._latest_rate

    @property
    def rate(self) -> float | None:
        """See RateEstimator: None, each run begins anew."""
        return None

    def begin_run(self) -> None:
        """See RateEstimator: all is forgotten."""
        self._first_run = True
        self._latest_time_ms = self._latest_rate = self._latest_error = _NEVER

    def follow(self, settings: AdaptiveBound) -> None:
        """See RateEstimator: under other figures it begins anew."""
        if _figures(settings) != _figures(self._settings):
            self.begin_run()
        self._settings = settings

    def kept(self) -> PidState | None:
        """Return what `restore` needs to go on in a later process; None before the first batch."""
        if self._first_run:
            return None
        return PidState(self._latest_time_ms, self._latest_rate, self._latest_error)

    def restore(self, state: PidState) -> None:
        """Go on from there."""
        self._first_run = False
        self._latest_time_ms, self._latest_rate, self._latest_error = state


def _figures(settings: AdaptiveBound) -> tuple[float | None, ...]:
    gains = (settings.proportional, settings.integral, settings.derivative)
    return (settings.batch_interval_ms, settings.min_rate, *gains)
