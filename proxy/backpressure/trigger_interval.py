"""A query's trigger interval: from its rule, from the listener, or from when batches begin."""

from collections import deque

from proxy.progress.query import QueryProgress
from proxy.progress.report import BatchReport

GAPS = 8
"""How many times between the beginnings of two batches are kept."""

MIN_GAPS = 3
"""So many have to be known before one is taken for the interval."""


class TriggerInterval:
    """The interval of a query's processing-time trigger.

    Batches begin at multiples of it; one that takes longer is followed by the next at once (Spark's
    ProcessingTimeExecutor). So of the times between two beginnings, the one before done in time,
    the shortest is the interval, or a multiple of it while there is little to read.
    """

    def __init__(self) -> None:
        self.learnt_ms: float | None = None
        """What was reported or learnt; None when nothing was."""
        self._began_ms: float | None = None
        self._execution_ms = 0.0
        self._gaps: deque[float] = deque(maxlen=GAPS)

    def begin_run(self) -> None:
        """Forget when batches began; the interval stays until another is learnt."""
        self._began_ms = None
        self._gaps.clear()

    def add(self, batch: BatchReport) -> None:
        """Add a batch."""
        if self._began_ms is not None:
            gap_ms = batch.timestamp_ms - self._began_ms
            if gap_ms > self._execution_ms:
                self._gaps.append(gap_ms)
        self._began_ms, self._execution_ms = batch.timestamp_ms, float(batch.execution_ms or 0)
        if len(self._gaps) >= MIN_GAPS:
            self.learnt_ms = min(self._gaps)

    def of(self, query: QueryProgress, configured_ms: float | None) -> float | None:
        """Return the interval: what the rule says, else the listener, else what was learnt."""
        if query.trigger_interval_ms:
            self.learnt_ms = query.trigger_interval_ms
        return configured_ms or self.learnt_ms
