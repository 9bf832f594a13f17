"""Choose the size of batches from what they cost, or as Spark Streaming does."""

import math
from dataclasses import dataclass, field
from operator import attrgetter
from typing import ClassVar

from metrics.clock import MS_PER_SECOND
from proxy.quota.rules import AdaptiveBound

from .batch_cost import BatchCost, CostState, FinishedBatch

LONGEST = 1.25
"""Batch intervals planned for at most where one is enough for any: real ones stay within 1.5."""

WORTHWHILE = 11.0
"""A batch of so many times its fixed time loses an eleventh to it; a longer one gains little."""

USEFUL = 0.75
"""Part of a multiple of the interval that the fixed time may take where it is more than one."""

HEADROOM = 1.1
"""A query keeps up when it can take so many times what comes in."""

WARM_UP = 5.0
"""A query's first batch says nothing of the cost if it took all there was in at most so many batch
intervals: most of that is what Spark does once, such as loading and compiling."""

FULL = 0.9
"""A batch of so much of what was allowed was bounded by it, if nobody knows what it left out."""

SIGNIFICANT = 3.0
"""The cost of a record that is not so many standard deviations above 0 is as good as unknown."""

GROWTH = 4.0
"""How many times as large as a bounded batch the next may be, if time alone does not allow more."""

SAFE = 0.9
"""Part of the target time that a batch is to take which only the one before it speaks for."""

PROBE = 0.5
"""Part of a batch that is let in to see what is fixed of its time."""

CAREFUL = 2
"""Batches in which nothing is tried out, from one on that took far longer than expected."""

FIRST_PROBE, LAST_PROBE = 2, 32
"""How many bounded batches do not fit before a probe: at first, and at most after further ones."""

DRAINING = 2.0
"""A query drains a backlog when it takes so many times what comes in."""

CERTAIN = 0.1
"""There is no probe when the cost of a record is known up to this part of it."""


@dataclass(slots=True)
class CostEstimator:
    """Gives batches the size whose time fits the trigger interval, learnt by `BatchCost`.

    The table in docs/spark.md, "How the size of a batch is chosen", says how long batches are to
    take. What is not known of the cost of a record makes them larger, up to what the rule's own
    bound carries in that time; one that was bounded is followed by one of GROWTH times its size or
    of the target time, at most. After one that took too long, nothing is tried out.

    The settings' batch interval has to be known before the first batch is added.
    """

    kept_as: ClassVar[str] = "cost"
    """See BackpressureRecord."""
    _settings: AdaptiveBound
    _interval_ms: float = field(init=False)
    """0 while it is not known."""
    _cost: BatchCost | None = None
    _arrivals: float | None = None
    _most: float = math.inf
    _allowed: float = 0.0
    """Records of the next batch; before the first one, nobody knows whether it was bounded."""
    _behind: int = 0
    """Bounded batches, one after the other, that did not fit: see `_needs_probe`."""
    _patience: int = FIRST_PROBE
    _careful: int = 0
    """Batches left of those: see `_at_most_as_usual`."""

    def __post_init__(self) -> None:
        """Have the interval at hand."""
        self._interval_ms = self._settings.batch_interval_ms or 0.0

    def compute(self, batch: FinishedBatch) -> float | None:
        """Add a batch; return the new rate in records/s; None: any will do, or none is learnt."""
        records, took_ms = batch.records, batch.processing_ms
        if not (1 <= records < math.inf and 0 < took_ms < math.inf):
            return None
        try:
            is_short = took_ms <= WARM_UP * self._interval_ms
            if self._cost is None and is_short and batch.left == 0:
                cost = BatchCost.warm_up(records, took_ms)
            elif self._cost is None:
                cost = BatchCost.first(records, took_ms, self._interval_ms)
            else:
                cost = self._cost.after(records, took_ms)
            if not cost.is_sound:
                return None
        except ArithmeticError:  # figures beyond measure
            return None
        before = self._cost
        was_bounded = records >= FULL * self._allowed if batch.left is None else batch.left > 0
        self._cost, self._arrivals, self._most = cost, batch.arrivals, batch.most
        target_ms = self._target_ms(cost)
        self._allowed = self._fitting(cost, target_ms, doubt=1.0 if took_ms <= target_ms else 0.0)
        if was_bounded:
            # So many more take no longer than that, whatever part of the time is fixed.
            safe = SAFE * target_ms / took_ms * records
            safe = min(safe, GROWTH * records, self._readable(target_ms))
            self._allowed = max(self._allowed, safe)
            growth = max(GROWTH, target_ms / took_ms)
            needs_probe = self._needs_probe(cost, records, took_ms)
            can_shrink = PROBE * records >= self._least
            if needs_probe and can_shrink and took_ms >= FULL * target_ms:
                growth = PROBE
            self._allowed = min(self._allowed, max(growth * records, self._least))
            if needs_probe and not can_shrink:
                self._allowed = max(self._allowed, records / PROBE)
        most = self._at_most_as_usual(before, cost, records, took_ms)
        self._allowed = min(self._allowed, most)
        return self.rate

    @property
    def rate(self) -> float | None:
        """Records per second that batches planned now should have; None: not known."""
        if not 0 < self._allowed < math.inf:
            return None
        return self._allowed / self._interval_ms * MS_PER_SECOND

    @property
    def is_fresh(self) -> bool:
        """Whether nothing is known of what a batch costs."""
        return self._cost is None

    def begin_run(self) -> None:
        """Record that the query was started again: its batches may cost something else now."""
        self._behind, self._patience, self._careful = 0, FIRST_PROBE, 0
        if self._cost is not None:
            cost = self._cost.restarted()
            self._cost = cost if cost.is_sound else None
        self._plan_anew()

    def update(self, settings: AdaptiveBound) -> None:
        """Estimate by other settings from now on; what is known of the costs stays."""
        before_ms, self._settings = self._interval_ms, settings
        self._interval_ms = settings.batch_interval_ms or 0.0
        if self._interval_ms != before_ms:
            self._plan_anew()

    @property
    def state(self) -> CostState | None:
        """What a later process needs to go on; None before the first batch."""
        return self._cost.state() if self._cost is not None else None

    @state.setter
    def state(self, state: tuple[float, ...] | None) -> None:
        self._cost = BatchCost.of(CostState(*state)) if state is not None else None

    def _plan_anew(self) -> None:
        """Size the next batch by what is known without a batch before it."""
        cost, self._allowed = self._cost, 0.0
        if cost is not None and self._interval_ms > 0:
            self._allowed = self._fitting(cost, self._target_ms(cost), doubt=0.0)

    @property
    def _least(self) -> float:
        """The records of the smallest batch that the rule allows."""
        return self._settings.min_rate * self._interval_ms / MS_PER_SECOND

    def _target_ms(self, cost: BatchCost) -> float:
        interval_ms, fixed_ms = self._interval_ms, cost.fixed_ms
        worthwhile_ms = WORTHWHILE * fixed_ms
        has_room = fixed_ms < interval_ms
        if has_room:
            target_ms = min(max(worthwhile_ms, interval_ms), LONGEST * interval_ms)
        else:
            target_ms = math.ceil(fixed_ms / (USEFUL * interval_ms)) * interval_ms
        if self._arrivals is None:
            return target_ms
        load = cost.each_ms * self._arrivals / MS_PER_SECOND
        if load <= 1 - 1 / WORTHWHILE:
            free = 1 - load * HEADROOM
            needed_ms = fixed_ms / free if free > 0 else math.inf
            return max(target_ms, min(worthwhile_ms, needed_ms))
        return target_ms if has_room else worthwhile_ms

    def _fitting(self, cost: BatchCost, target_ms: float, *, doubt: float) -> float:
        most = self._readable(target_ms)
        is_known = not doubt or math.isfinite(cost.largest(target_ms, doubt=SIGNIFICANT))
        fitting = min(cost.largest(target_ms, doubt=doubt), most) if is_known else most
        return max(fitting, self._least)

    def _readable(self, target_ms: float) -> float:
        """Return how many records the rule's own bound lets be read in the time of a batch."""
        return self._most * max(target_ms, self._interval_ms) / MS_PER_SECOND

    def _at_most_as_usual(
        self, before: BatchCost | None, cost: BatchCost, records: float, took_ms: float
    ) -> float:
        """Return how many records at most keep the next batch as long as they are to be.

        A batch that took far longer than expected had a pause, or all is slower from now on. The
        next one tells which of these; and what of the time is fixed, as it is far smaller.
        """
        is_first = before is not None and cost.surprise > 0 >= before.surprise
        if cost.surprise > 0:
            self._careful = CAREFUL
        if not self._careful:
            return math.inf
        self._careful -= 1
        usual = before if before is not None and is_first else cost
        part = max(self._target_ms(usual), LONGEST * self._interval_ms) / took_ms
        if is_first and part < 1:
            part = min(part, PROBE)
        return max(part * records, self._least)

    def _needs_probe(self, cost: BatchCost, records: float, took_ms: float) -> bool:
        """Return whether bounded batches do not fit, and nobody knows what is fixed of their time.

        They do not when the query falls behind, or when those that drain a backlog take more than
        the interval although the fixed time is believed to be less.
        """
        taken, arrivals = records / max(took_ms, self._interval_ms) * MS_PER_SECOND, self._arrivals
        is_long = took_ms > self._interval_ms > cost.fixed_ms
        if arrivals is None or not (taken < arrivals or (is_long and taken > DRAINING * arrivals)):
            self._behind, self._patience = 0, FIRST_PROBE
            return False
        self._behind += 1
        if self._behind < self._patience or cost.each_variance <= (CERTAIN * cost.each_ms) ** 2:
            return False
        self._behind, self._patience = 0, min(2 * self._patience, LAST_PROBE)
        return True


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
    CostEstimator for one that tells them apart.
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
