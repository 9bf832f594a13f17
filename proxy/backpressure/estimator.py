"""Estimate from finished batches how many records per second a query can take."""

import math
from typing import Protocol

MS_PER_SECOND = 1000.0

_NEVER = -1.0
"""Of latest time and rate before the first call, as in Spark."""


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


class PidEstimator:
    """The estimator of Spark Streaming: org.apache.spark.streaming.scheduler.rate.PIDRateEstimator.

    The error is the latest rate less the rate at which the batch was processed; its integral is
    what waits to be processed, which is the scheduling delay times the processing rate. The first
    batch only sets the latest rate.

    A batch that is not later than the one before, or has no elements or no processing delay, is
    passed over, and so is one whose figures are not finite or lead to a rate that is not.

    Args:
        batch_interval_ms: time between two batches; above 0.
        proportional: gain for the error; 0 or more.
        integral: gain for the accumulated error; 0 or more.
        derivative: gain for the change of the error per second; 0 or more.
        min_rate: the lowest rate that is given, in records per second; above 0.

    Raises:
        ValueError: a setting is out of range or not finite.

    """

    __slots__ = (
        *("_batch_interval_ms", "_derivative", "_integral", "_min_rate", "_proportional"),
        *("_first_run", "_latest_error", "_latest_rate", "_latest_time_ms"),
    )

    def __init__(
        self,
        batch_interval_ms: float,
        *,
        proportional: float = 1.0,
        integral: float = 0.2,
        derivative: float = 0.0,
        min_rate: float = 100.0,
    ) -> None:
        for name, value in {"batch_interval_ms": batch_interval_ms, "min_rate": min_rate}.items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be above 0, not {value!r}")
        gains = {"proportional": proportional, "integral": integral, "derivative": derivative}
        for name, value in gains.items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be 0 or more, not {value!r}")
        self._batch_interval_ms = batch_interval_ms
        self._proportional = proportional
        self._integral = integral
        self._derivative = derivative
        self._min_rate = min_rate
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
        try:
            elapsed_s = (time_ms - self._latest_time_ms) / MS_PER_SECOND
            processing_rate = elements / processing_delay_ms * MS_PER_SECOND
            error = self._latest_rate - processing_rate
            historical_error = scheduling_delay_ms * processing_rate / self._batch_interval_ms
            error_change = (error - self._latest_error) / elapsed_s
        except ArithmeticError:  # two times that are as good as the same, or figures beyond measure
            return None
        rate = (
            self._latest_rate
            - self._proportional * error
            - self._integral * historical_error
            - self._derivative * error_change
        )
        if not all(map(math.isfinite, (time_ms, processing_rate, rate))):
            return None
        self._latest_time_ms = time_ms
        if self._first_run:
            self._first_run = False
            self._latest_rate = processing_rate
            self._latest_error = 0.0
            return None
        self._latest_rate = max(self._min_rate, rate)
        self._latest_error = error
        return self._latest_rate
