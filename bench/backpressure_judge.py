"""What the figure `backpressure` says of a job: lag, completion and batches, with and without."""

import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from bench.backpressure_jobs import RATE, TRIGGER_S
from bench.backpressure_run import Batch, Watch

MOST_RATIO = 1.1
LAG_FLOOR = RATE * TRIGGER_S / 2
"""Records: a lag that is higher by no more than half an interval's input counts as the same."""
COMPLETION_FLOOR_S = TRIGGER_S
"""A completion that is later by no more than one trigger counts as the same."""
LONGEST_TRIGGERS = 1.5
LEAST_SHARE = 0.95
"""Of the batches that have to end within `LONGEST_TRIGGERS`."""
FIRST_BATCHES = 2
"""Little is known of the query yet: only the very first is judged, by the next figure."""
FIRST_TRIGGERS = 2.0
"""As many triggers the first batch may take at most."""
LEAST_BATCHES = 5
"""Of the way without adaptive: with fewer, the machine was too busy for the job to say a thing."""


@dataclass(frozen=True, slots=True)
class Figures:
    """How a query, or the worst of a way's queries, fared.

    Attributes:
        mean_lag: records, from the start until the way without adaptive was through.
        max_lag: records.
        completion_s: from the last record fed until all was processed.
        complete: whether it was; else `completion_s` is how long one waited.
        first: the first batch, in triggers.
        longest: the longest batch after the first two, in triggers.
        share: of the batches after the first two, which took at most 1.5 triggers.
        rows: records per batch, median.
        batches: how many there were.

    """

    mean_lag: float
    max_lag: float
    completion_s: float
    complete: bool
    first: float
    longest: float
    share: float
    rows: float
    batches: int


@dataclass(frozen=True, slots=True)
class Ratios:
    """Figures in proportion to those without adaptive; 1 where they differ by a floor or less."""

    mean_lag: float
    max_lag: float
    completion: float

    def hold(self) -> bool:
        """Whether none is above what is allowed."""
        return max(self.mean_lag, self.max_lag, self.completion) <= MOST_RATIO


def figures_of(watch: Watch, query: str, until_s: float) -> Figures:
    """Measure a query; its mean lag until `until_s`, on the clock of the watch."""
    batches = [batch for batch in watch.batches[query] if batch.rows]
    lags = lag_of(watch, query)
    settled = [batch.duration_s / TRIGGER_S for batch in batches[FIRST_BATCHES:]]
    ended_s = watch.completed_s(query)
    return Figures(
        mean_lag=_mean(lags, until_s),
        max_lag=max(lag for _, lag in lags),
        completion_s=max(0.0, (ended_s or watch.over_s) - watch.fed_s),
        complete=ended_s is not None,
        first=batches[0].duration_s / TRIGGER_S if batches else 0.0,
        longest=max(settled, default=0.0),
        share=statistics.fmean(each <= LONGEST_TRIGGERS for each in settled) if settled else 0.0,
        rows=statistics.median(batch.rows for batch in batches) if batches else 0.0,
        batches=len(batches),
    )


def lag_of(watch: Watch, query: str) -> list[tuple[float, int]]:
    """Give the lag at each look at the ends: their sum less what the query has completed."""
    batches: Sequence[Batch] = sorted(watch.batches[query], key=lambda batch: batch.ended_s)
    ended_s = [batch.ended_s for batch in batches]
    completed = [0, *(batch.completed for batch in batches)]
    return [
        (at_s, max(0, end - completed[bisect_right(ended_s, at_s)])) for at_s, end in watch.ends
    ]


def worst(found: Sequence[Figures]) -> Figures:
    """Join the figures of several queries that run at the same time: the worst of each."""
    return Figures(
        mean_lag=max(each.mean_lag for each in found),
        max_lag=max(each.max_lag for each in found),
        completion_s=max(each.completion_s for each in found),
        complete=all(each.complete for each in found),
        first=max(each.first for each in found),
        longest=max(each.longest for each in found),
        share=min(each.share for each in found),
        rows=min(each.rows for each in found),
        batches=min(each.batches for each in found),
    )


def over_rounds(found: Sequence[Figures]) -> Figures:
    """Join the figures of rounds: means, and the worst where it is about the worst."""
    return Figures(
        mean_lag=statistics.fmean(each.mean_lag for each in found),
        max_lag=max(each.max_lag for each in found),
        completion_s=statistics.fmean(each.completion_s for each in found),
        complete=all(each.complete for each in found),
        first=max(each.first for each in found),
        longest=max(each.longest for each in found),
        share=statistics.fmean(each.share for each in found),
        rows=statistics.fmean(each.rows for each in found),
        batches=sum(each.batches for each in found),
    )


def ratios(adaptive: Figures, none: Figures) -> Ratios:
    """Compare a way with the one without adaptive."""
    return Ratios(
        _ratio(adaptive.mean_lag, none.mean_lag, LAG_FLOOR),
        _ratio(adaptive.max_lag, none.max_lag, LAG_FLOOR),
        _ratio(adaptive.completion_s, none.completion_s, COMPLETION_FLOOR_S),
    )


def _ratio(value: float, base: float, floor: float) -> float:
    """Divide; what is small on both sides, or differs by a floor or less, makes no ratio."""
    if abs(value - base) <= floor:
        return 1.0
    return max(value, floor) / max(base, floor)


def _mean(lags: Sequence[tuple[float, int]], until_s: float) -> float:
    counted = [lag for at_s, lag in lags if at_s <= until_s]
    return statistics.fmean(counted) if counted else 0.0
