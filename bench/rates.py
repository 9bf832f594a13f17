"""Rates and quantiles from completion times."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import itemgetter

GIGABYTE = 1e9
# A completion ends a burst when the next one is later than this share of the mean spacing.
BURST_GAP_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    """Rate over a window, bytes per second.

    Attributes:
        plain: bytes of the responses completed within the window, over its length.
        interpolated: growth of the completed bytes, read off at both ends of the window on
            straight lines between the ends of bursts. One response, or one burst of all
            connections, may be more than 2 % of what a window carries; the plain figure then
            depends on where the window's edges fall.
        responses: responses completed within the window.

    """

    plain: float
    interpolated: float
    responses: int


Knot = tuple[float, int]
"""When a burst ended, and how many bytes were complete then."""


def rate_between(
    completed_s: Sequence[float], sizes: Sequence[int], start_s: float, end_s: float
) -> MeasuredRate:
    """Rate of responses of these sizes completed at these ascending times within [start_s, end_s].

    Without a burst that ends before the window or after it, interpolation begins at the first one
    or ends at the last one within it.
    """
    first, last = bisect_left(completed_s, start_s), bisect_right(completed_s, end_s)
    plain = sum(sizes[first:last]) / (end_s - start_s)
    knots = _burst_ends(completed_s, sizes)
    if len(knots) < 2:
        return MeasuredRate(plain, 0.0, last - first)
    start_s, end_s = max(start_s, knots[0][0]), min(end_s, knots[-1][0])
    if end_s <= start_s:
        return MeasuredRate(plain, 0.0, last - first)
    grown = _completed_at(knots, end_s) - _completed_at(knots, start_s)
    return MeasuredRate(plain, grown / (end_s - start_s), last - first)


def most_within(completed_s: Sequence[float], sizes: Sequence[int], window_s: float) -> int:
    """Most bytes that were completed, at these ascending times, in any window so long."""
    most = held = first = 0
    for time_s, size in zip(completed_s, sizes, strict=True):
        held += size
        while completed_s[first] <= time_s - window_s:
            held -= sizes[first]
            first += 1
        most = max(most, held)
    return most


def quantile(values: Sequence[float], share: float) -> float:
    """Smallest value that at least `share` (0 to 1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _burst_ends(completed_s: Sequence[float], sizes: Sequence[int]) -> list[Knot]:
    """Knots of the curve; the last completion is none, as its burst may have been cut off."""
    if len(completed_s) < 2:
        return []
    mean_spacing_s = (completed_s[-1] - completed_s[0]) / (len(completed_s) - 1)
    return [
        (time_s, completed_bytes)
        for (time_s, next_s), completed_bytes in zip(
            pairwise(completed_s), accumulate(sizes), strict=False
        )
        if next_s - time_s > BURST_GAP_SHARE * mean_spacing_s
    ]


def _completed_at(knots: Sequence[Knot], time_s: float) -> float:
    """Bytes completed at a time, on the straight line between the knots around it."""
    after = bisect_right(knots, time_s, key=itemgetter(0))
    if after == len(knots):
        return float(knots[-1][1])
    (left_s, left_bytes), (right_s, right_bytes) = knots[after - 1 : after + 1]
    return left_bytes + (time_s - left_s) / (right_s - left_s) * (right_bytes - left_bytes)
