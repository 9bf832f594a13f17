"""What a batch costs, and how large the next one is to be: by that, or as in Spark Streaming.

A batch costs a fixed time, and a time for each record.
"""

import math
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Annotated, ClassVar, NamedTuple, Self

from pydantic import Field

from metrics.clock import MS_PER_SECOND
from proxy.quota.rules import AdaptiveSettings

FIRST_NOISE, LEAST_NOISE, MOST_NOISE = 0.05, 0.02, 0.3
"""Standard deviation of a batch's time, as a part of it: until it is known; the least, the most."""

NOISE_WEIGHT = 0.1
"""Of the latest batch in it."""

MIN_NOISE_MS = 1.0
"""Spark counts in whole milliseconds."""

DRIFT, MAX_DRIFT = 0.05, 0.2
"""Standard deviation of a cost's change between batches, as a part of it: that of FIRST_NOISE, so a
cost is about the mean of the last two. And how uncertain that alone can make it."""

LEAST_SHARE = 0.1
"""Each cost drifts as if it were this part of a batch's time at least, that of a record by the
largest batch of late: one that was taken for 0 would stay 0 otherwise."""

WIDEST_KEPT = 0.99
"""What is left of that batch's size after one more batch."""

OUTLIER, FAR_WIDER = 3.0, 2.0
"""A batch further off than so many standard deviations changes nothing, unless the one before was
too, on the same side, or it is so many times as large as any."""

FIRST_DOUBT, CHANGE_DOUBT = 0.5, 0.5
"""Uncertainty, as a part of it, of what most of one batch's time went to, after that batch; of both
costs at a restart, and where everything takes longer than it did, or less."""

MIN_CERTAINTY = 0.1
"""The cost of a record is as good as unknown when less than this part of its square is certain."""

MAX_FIGURE = 1e15
"""No real time, rate or number of records is larger."""

Positive = Annotated[float, Field(gt=0, le=MAX_FIGURE)]
Amount = Annotated[float, Field(ge=0, le=MAX_FIGURE)]
Number = Annotated[float, Field(ge=-MAX_FIGURE, le=MAX_FIGURE)]


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


class CostState(NamedTuple):
    """What is kept of a BatchCostModel."""

    fixed_ms: Amount
    fixed_doubt_ms: Amount
    """Standard deviation; so is the next."""
    each_ms: Amount
    each_doubt_ms: Amount
    correlation: Annotated[float, Field(ge=-1, le=1)]
    """Of the two."""
    widest: Annotated[float, Field(ge=1, le=MAX_FIGURE)]
    noise: Annotated[float, Field(ge=LEAST_NOISE, le=MOST_NOISE)]
    """Standard deviation of a batch's time, as a part of it."""


@dataclass(frozen=True, slots=True)
class BatchCostModel:
    """`fixed_ms + each_ms * records`, both 0 or more, and how certain that is.

    A Kalman filter whose state, the two costs, takes a random walk: recursive least squares with
    forgetting (Ljung and Gunnarsson, "Adaptation and tracking in system identification", 1990) in
    proportion to a cost's size and no further than MAX_DRIFT, so that what is known of a record's
    cost outlasts any number of batches without records to speak of (Kulhavy's directional
    forgetting, 1987, has the same aim).
    """

    fixed_ms: float
    each_ms: float
    fixed_variance: float
    each_variance: float
    covariance: float
    widest: float
    """Records of the largest batch of late."""
    noise: float = FIRST_NOISE**2
    """Variance of a batch's time, as a part of its square."""
    surprise: int = 0
    """1 when the latest batch took far longer than expected, -1 when far less, else 0."""
    latest: tuple[float, float] = (0.0, 0.0)
    """Its records, and how long it took in milliseconds."""

    @classmethod
    def first(cls, records: float, took_ms: float, interval_ms: float) -> Self:
        """Return what one batch says, with nothing known before.

        A short one is fixed time mostly; that of a long one near the interval: users choose it so.
        """
        fixed_ms = min(took_ms * interval_ms / (took_ms + interval_ms), took_ms)  # rounded up
        variance = (FIRST_DOUBT * max(fixed_ms, took_ms - fixed_ms)) ** 2
        noise = (FIRST_NOISE * took_ms) ** 2
        each_ms, each_variance = (took_ms - fixed_ms) / records, (variance + noise) / records**2
        return cls(fixed_ms, each_ms, variance, each_variance, -variance / records, records)

    @classmethod
    def warm_up(cls, records: float, took_ms: float) -> Self:
        """Return what a first batch says in which Spark did much once: its time counts as fixed."""
        variance = (FIRST_DOUBT * took_ms) ** 2
        return cls(took_ms, 0.0, variance, (took_ms / records) ** 2, 0.0, records)

    @classmethod
    def of(cls, state: CostState) -> Self:
        """Return what was kept."""
        fixed_ms, fixed_doubt_ms, each_ms, each_doubt_ms, correlation, widest, noise = state
        variances = fixed_doubt_ms**2, each_doubt_ms**2
        covariance = correlation * fixed_doubt_ms * each_doubt_ms
        return cls(fixed_ms, each_ms, *variances, covariance, widest, noise**2)

    def state(self) -> CostState:
        """Return what `of` takes."""
        fixed_doubt_ms, each_doubt_ms = map(math.sqrt, (self.fixed_variance, self.each_variance))
        both = fixed_doubt_ms * each_doubt_ms
        correlation = min(max(self.covariance / both, -1.0), 1.0) if both > 0 else 0.0
        costs = self.fixed_ms, fixed_doubt_ms, self.each_ms, each_doubt_ms
        return CostState(*costs, correlation, self.widest, math.sqrt(self.noise))

    @property
    def is_sound(self) -> bool:
        """Whether all figures are numbers: those of no real batch may be beyond measure."""
        return all(map(MAX_FIGURE.__ge__, map(abs, self.state())))

    def after(self, records: float, took_ms: float) -> Self:
        """Return what is known after one more batch."""
        now = self.doubted(DRIFT, MAX_DRIFT, took_ms)
        usual_ms = now.time_ms(records)
        expected_ms, gap_ms = usual_ms + MIN_NOISE_MS, took_ms - usual_ms
        noise = now.noise * expected_ms**2
        far_ms = OUTLIER * math.sqrt(now.variance(records) + noise)
        surprise = 0 if abs(gap_ms) <= far_ms else 1 if gap_ms > 0 else -1
        if surprise and surprise == self.surprise:
            now = now.changed(*self.latest)
            gap_ms, noise = took_ms - now.time_ms(records), now.noise * took_ms**2
        elif surprise and records >= FAR_WIDER * self.widest:
            now = now.doubted(MAX_DRIFT, math.inf, took_ms)
            noise = now.noise * min(expected_ms, took_ms) ** 2
        elif surprise:
            gap_ms = 0.0
        # What is left of the gap afterwards, times the gap, is the noise on average.
        left = noise / (now.variance(records) + noise)
        # A change of the costs is no noise.
        seen = min(left * (gap_ms / expected_ms) ** 2, OUTLIER**2 * now.noise)
        relative = now.noise + NOISE_WEIGHT * (seen - now.noise)
        return replace(
            now.moved(records, gap_ms, noise),
            noise=min(max(relative, LEAST_NOISE**2), MOST_NOISE**2),
            surprise=surprise,
            latest=(records, took_ms),
            widest=max(records, WIDEST_KEPT * self.widest),
        )

    def restarted(self) -> Self:
        """Return what is known when the query was started again."""
        widest_ms = self.time_ms(self.widest)
        return replace(self.doubted(CHANGE_DOUBT, CHANGE_DOUBT, widest_ms), surprise=0)

    def time_ms(self, records: float) -> float:
        """Return how long a batch takes."""
        return self.fixed_ms + self.each_ms * records

    def variance(self, records: float) -> float:
        """Return how uncertain that is."""
        variance = self.fixed_variance + 2 * self.covariance * records
        return max(0.0, variance + self.each_variance * records**2)

    def largest(self, time_ms: float, *, doubt: float) -> float:
        """Return how many records may fit into a time: infinite when that is as good as unknown.

        The time that a batch takes is taken `doubt` standard deviations short. So what is not known
        is tried out: nothing is added to batches of sizes that there were, much to far larger ones.
        """
        slope = self.each_ms**2 - doubt**2 * self.each_variance
        if self.each_ms <= 0 or slope <= MIN_CERTAINTY * self.each_ms**2:
            return math.inf
        short_ms = time_ms - self.fixed_ms
        half = self.each_ms * short_ms + doubt**2 * self.covariance
        rest = short_ms**2 - doubt**2 * self.fixed_variance
        return max(0.0, (half + math.sqrt(max(0.0, half**2 - slope * rest))) / slope)

    def changed(self, records: float, took_ms: float) -> Self:
        """Return the estimate from a batch on with which all costs have changed.

        Each is as many times what it was, with doubt: the next batch tells, if its size is another.
        """
        factor = took_ms / (self.time_ms(records) + MIN_NOISE_MS)
        anew = replace(
            self,
            fixed_ms=self.fixed_ms * factor,
            each_ms=self.each_ms * factor,
            fixed_variance=(CHANGE_DOUBT * took_ms) ** 2,
            each_variance=(CHANGE_DOUBT * took_ms / records) ** 2,
            covariance=0.0,
        )
        return anew.moved(records, took_ms - anew.time_ms(records), self.noise * took_ms**2)

    def doubted(self, drift: float, most: float, took_ms: float) -> Self:
        """Return the estimate with a drift more doubt, up to `most` or what there is already."""
        fixed_size = max(self.fixed_ms, LEAST_SHARE * took_ms)
        each_size = max(self.each_ms, LEAST_SHARE * self.time_ms(self.widest) / self.widest)
        fixed = self.fixed_variance + (drift * fixed_size) ** 2
        each = self.each_variance + (drift * each_size) ** 2
        # Scaled together, so that what is certain of both costs together stays so.
        less_fixed = _part(max(self.fixed_variance, (most * fixed_size) ** 2), fixed)
        less_each = _part(max(self.each_variance, (most * each_size) ** 2), each)
        return replace(
            self,
            fixed_variance=fixed * less_fixed,
            each_variance=each * less_each,
            covariance=self.covariance * math.sqrt(less_fixed * less_each),
        )

    def moved(self, records: float, gap_ms: float, noise: float) -> Self:
        """Return the estimate moved by what a batch took longer than expected."""
        to_fixed = self.fixed_variance + self.covariance * records
        to_each = self.covariance + self.each_variance * records
        total = max(to_fixed + to_each * records, 0.0) + noise
        fixed_ms = self.fixed_ms + to_fixed / total * gap_ms
        each_ms = self.each_ms + to_each / total * gap_ms
        fixed_variance = max(0.0, self.fixed_variance - to_fixed**2 / total)
        each_variance = max(0.0, self.each_variance - to_each**2 / total)
        both = math.sqrt(fixed_variance * each_variance)
        covariance = min(max(self.covariance - to_fixed * to_each / total, -both), both)
        # A cost below 0 is one of 0; what is certain of the two together stays.
        if each_ms < 0:
            fixed_ms -= covariance / each_variance * each_ms if each_variance > 0 else 0.0
            each_ms = 0.0
        elif fixed_ms < 0:
            each_ms -= covariance / fixed_variance * fixed_ms if fixed_variance > 0 else 0.0
            fixed_ms = 0.0
        costs = max(0.0, fixed_ms), max(0.0, each_ms), fixed_variance, each_variance, covariance
        return type(self)(*costs, self.widest, self.noise, self.surprise, self.latest)


def _part(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole > 0 else 1.0


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
    """Gives batches the size whose time fits the trigger interval, learnt by `BatchCostModel`.

    The table in docs/spark.md, "How the size of a batch is chosen", says how long batches are to
    take. What is not known of the cost of a record makes them larger, up to what the rule's own
    bound carries in that time; one that was bounded is followed by one of GROWTH times its size or
    of the target time, at most. After one that took too long, nothing is tried out.

    The settings' batch interval has to be known before the first batch is added.
    """

    kept_as: ClassVar[str] = "cost"
    """See BackpressureRecord."""
    _settings: AdaptiveSettings
    _interval_ms: float = field(init=False)
    """0 while it is not known."""
    _cost: BatchCostModel | None = None
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
                cost = BatchCostModel.warm_up(records, took_ms)
            elif self._cost is None:
                cost = BatchCostModel.first(records, took_ms, self._interval_ms)
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

    def update(self, settings: AdaptiveSettings) -> None:
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
    def state(self, state: CostState | None) -> None:
        self._cost = BatchCostModel.of(state) if state is not None else None

    def _plan_anew(self) -> None:
        """Size the next batch by what is known without a batch before it."""
        cost, self._allowed = self._cost, 0.0
        if cost is not None and self._interval_ms > 0:
            self._allowed = self._fitting(cost, self._target_ms(cost), doubt=0.0)

    @property
    def _least(self) -> float:
        """The records of the smallest batch that the rule allows."""
        return self._settings.min_rate * self._interval_ms / MS_PER_SECOND

    def _target_ms(self, cost: BatchCostModel) -> float:
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

    def _fitting(self, cost: BatchCostModel, target_ms: float, *, doubt: float) -> float:
        most = self._readable(target_ms)
        is_known = not doubt or math.isfinite(cost.largest(target_ms, doubt=SIGNIFICANT))
        fitting = min(cost.largest(target_ms, doubt=doubt), most) if is_known else most
        return max(fitting, self._least)

    def _readable(self, target_ms: float) -> float:
        """Return how many records the rule's own bound lets be read in the time of a batch."""
        return self._most * max(target_ms, self._interval_ms) / MS_PER_SECOND

    def _at_most_as_usual(
        self, before: BatchCostModel | None, cost: BatchCostModel, records: float, took_ms: float
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

    def _needs_probe(self, cost: BatchCostModel, records: float, took_ms: float) -> bool:
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


PidState = tuple[Number, Positive, Number]
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

    _settings: AdaptiveSettings
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

    def update(self, settings: AdaptiveSettings) -> None:
        """Estimate by other settings from now on; begin anew if they say something else here."""
        if _parameters(settings) != _parameters(self._settings):
            self.state = None
        self._settings = settings

    def begin_run(self) -> None:
        """Forget all."""
        self.state = None
