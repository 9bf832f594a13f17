"""Estimate from finished batches how many records per second a query can take."""

import math
from typing import NamedTuple, Protocol

from proxy.quota.rules import Adaptive

MS_PER_SECOND = 1000.0

_NEVER = -1.0
"""Of latest time and rate before the first call, as in Spark."""


class EstimatorState(NamedTuple):
    """What an estimator keeps of the latest batch."""

    time_ms: float
    rate: float
    error: float


class RateEstimator(Protocol):
    """Turns each finished batch into a rate."""

    def compute(
        self,
        time_ms: float,
        elements: float,
        processing_delay_ms: float,
        scheduling_delay_ms: float,
    ) -> float | None:
        """Take a batch in; return the new rate in records per second, None for no new one.

        Args:
            time_ms: when the batch was done, on a clock of the caller's choice.
            elements: how many records it had.
            processing_delay_ms: how long it took to process them.
            scheduling_delay_ms: how long it had to wait before that.

        """

    def kept(self) -> EstimatorState | None:
        """Return what `restore` needs to go on in a later process; None before the first batch."""

    def restore(self, state: EstimatorState) -> None:
        """Go on from there."""


class PidEstimator:
    """The estimator of Spark Streaming: org.apache.spark.streaming.scheduler.rate.PIDRateEstimator.

    The error is the latest rate less the rate at which the batch was processed; its integral is
    what waits to be processed, which is the scheduling delay times the processing rate. The first
    batch only sets the latest rate.

    A batch that is not later than the one before, or has no elements or no processing delay, is
    passed over, and so is one whose figures are not finite or lead to a rate that is not.

    Args:
        settings: the batch interval, the gains and the lowest rate that is given.

    """

    __slots__ = ("_first_run", "_latest_error", "_latest_rate", "_latest_time_ms", "_settings")

    def __init__(self, settings: Adaptive) -> None:
        self._settings = settings
        self._first_run = True
        self._latest_time_ms = _NEVER
        self._latest_rate = _NEVER
        self._latest_error = _NEVER

    def compute(
        self,
        time_ms: float,
        elements: float,
        processing_delay_ms: float,
        scheduling_delay_ms: float,
    ) -> float | None:
        """See RateEstimator."""
        if not (time_ms > self._latest_time_ms and elements > 0 and processing_delay_ms > 0):
            return None
        settings = self._settings
        try:
            elapsed_s = (time_ms - self._latest_time_ms) / MS_PER_SECOND
            processing_rate = elements / processing_delay_ms * MS_PER_SECOND
            error = self._latest_rate - processing_rate
            historical_error = scheduling_delay_ms * processing_rate / settings.batch_interval_ms
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

    def kept(self) -> EstimatorState | None:
        """See RateEstimator."""
        if self._first_run:
            return None
        return EstimatorState(self._latest_time_ms, self._latest_rate, self._latest_error)

    def restore(self, state: EstimatorState) -> None:
        """See RateEstimator."""
        self._first_run = False
        self._latest_time_ms, self._latest_rate, self._latest_error = state
