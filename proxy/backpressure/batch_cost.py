"""What a batch of a query costs: a fixed time, and a time for each record."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

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
"""No real time or number of records is larger."""


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
    """What is kept of a BatchCost."""

    fixed_ms: float
    fixed_doubt_ms: float
    """Standard deviation; so is the next."""
    each_ms: float
    each_doubt_ms: float
    correlation: float
    """Of the two, from -1 to 1."""
    widest: float
    noise: float
    """Standard deviation of a batch's time, as a part of it."""


@dataclass(frozen=True, slots=True)
class BatchCost:
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
