"""What turns finished batches into the number of records per second that a query can take."""

import math
from dataclasses import dataclass
from typing import Protocol

from proxy.quota.rules import AdaptiveBound


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


class RateEstimator(Protocol):
    """Turns each finished batch of a query into a rate for those to come."""

    def compute(self, batch: FinishedBatch) -> float | None:
        """Add a batch; return the new rate in records per second, None for no new one."""

    @property
    def rate(self) -> float | None:
        """The rate in records per second that batches planned now should have; None: not known."""

    def begin_run(self) -> None:
        """Record that the query was started again: its batches may cost something else now."""

    def update(self, settings: AdaptiveBound) -> None:
        """Estimate by other settings, for the same estimator, from now on."""
