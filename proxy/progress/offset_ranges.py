"""Sets of offsets, or of times, as ranges: memory per range, and never more than a bound.

Of ranges that were skipped each is counted once, and none is dropped silently.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Self, TypeVar

MAX_RANGES = 128
"""How many ranges one set has unless another bound is given."""

MAX_SKIPS = 16
"""How many are kept one by one; the two oldest become one when there are more."""


Point = TypeVar("Point", int, float)

OffsetRange = tuple[int, int]
"""Offsets from the first up to but not including the second."""


class RangeSet(Generic[Point]):
    """A set of points of one axis: disjoint ranges in order, which do not touch.

    When there would be more than `max_ranges` of them, the two with the smallest gap between them
    become one, so the set may have points that were never added and never lacks one that was;
    `filled_gaps` says how much came in that way. With `drop_lowest` the lowest range goes instead,
    and the set may lack what was added and has nothing else. Use each only on its safe side.

    Adding and removing cost O(log n) to find the place and O(ranges touched); `max_ranges` bounds
    both. Raises ValueError when `max_ranges` is below 1.
    """

    __slots__ = ("_drop_lowest", "_max", "ends", "filled_gaps", "starts")

    def __init__(self, max_ranges: int = MAX_RANGES, *, drop_lowest: bool = False) -> None:
        if max_ranges < 1:
            raise ValueError(f"max_ranges must be 1 or more, not {max_ranges}")
        self._max = max_ranges
        self._drop_lowest = drop_lowest
        self.starts: list[Point] = []
        self.ends: list[Point] = []
        """Of the ranges, in order; for reading."""
        self.filled_gaps: Point = 0
        """How much was taken in only to keep to the bound, since the set was made."""

    def __iter__(self) -> Iterator[tuple[Point, Point]]:
        return iter(list(zip(self.starts, self.ends, strict=True)))

    def __len__(self) -> int:
        return len(self.starts)

    def end_at(self, point: Point) -> Point | None:
        """Return where the range that has this point ends; None when none has it."""
        index = bisect_right(self.starts, point) - 1
        return self.ends[index] if index >= 0 and self.ends[index] > point else None

    def covered(self, start: Point, end: Point) -> Point:
        """Return how much of the range from `start` to before `end` is in the set."""
        covered: Point = 0
        for low, high in self.within(start, max(start, end)) if self.starts else ():
            covered += high - low
        return covered

    def add(self, start: Point, end: Point) -> Point:
        """Add what is from `start` to before `end`; return how much of it was not in the set."""
        if start >= end:
            return 0
        starts, ends = self.starts, self.ends
        if ends and starts[-1] <= start <= ends[-1]:  # the usual case: reading on
            new = end - ends[-1]
            if new <= 0:
                return 0
            ends[-1] = end
            return new
        new = end - start - self.covered(start, end)
        low, high = bisect_left(ends, start), bisect_right(starts, end)
        if low < high:
            start, end = min(start, starts[low]), max(end, ends[high - 1])
        starts[low:high] = (start,)
        ends[low:high] = (end,)
        self._keep_bound()
        return new

    def extend(self, start: Point, end: Point) -> bool:
        """Add what is from `start` to `end`, if the last range ends at `start`; return whether."""
        ends = self.ends
        if not ends or ends[-1] != start or start >= end:
            return False
        ends[-1] = end
        return True

    def remove(self, start: Point, end: Point) -> None:
        """Remove `start` to before `end`; at the bound such a hole may close: `filled_gaps`."""
        starts, ends = self.starts, self.ends
        low, high = bisect_right(ends, start), bisect_left(starts, end)
        if start >= end or low >= high:
            return
        rest = [(starts[low], start), (end, ends[high - 1])]
        left = [each for each in rest if each[0] < each[1]]
        starts[low:high] = [each[0] for each in left]
        ends[low:high] = [each[1] for each in left]
        self._keep_bound()

    def remove_below(self, point: Point) -> None:
        """Remove every point below this one."""
        starts, ends = self.starts, self.ends
        gone = bisect_right(ends, point)
        del starts[:gone], ends[:gone]
        if starts and starts[0] < point:
            starts[0] = point

    def clear(self) -> None:
        """Remove every point."""
        self.starts.clear()
        self.ends.clear()

    def missing(self, start: Point, end: Point) -> list[tuple[Point, Point]]:
        """Return the ranges of `start` to before `end` that are not in the set, in order."""
        gaps: list[tuple[Point, Point]] = []
        for index in range(bisect_right(self.ends, start), bisect_left(self.starts, end)):
            if self.starts[index] > start:
                gaps.append((start, self.starts[index]))
            start = self.ends[index]
        if start < end:
            gaps.append((start, end))
        return gaps

    def within(self, start: Point, end: Point) -> list[tuple[Point, Point]]:
        """Return the parts of the ranges that are from `start` to before `end`, in order."""
        low, high = bisect_right(self.ends, start), bisect_left(self.starts, end)
        ranges = zip(self.starts[low:high], self.ends[low:high], strict=True)
        return [(max(first, start), min(last, end)) for first, last in ranges]

    def copy(self) -> Self:
        """Return a set of the same points with the same bound."""
        copy = type(self)(self._max, drop_lowest=self._drop_lowest)
        copy.starts, copy.ends = self.starts.copy(), self.ends.copy()
        return copy

    def _keep_bound(self) -> None:
        starts, ends = self.starts, self.ends
        while len(starts) > self._max:
            if self._drop_lowest:
                del starts[0], ends[0]
            else:
                gap, index = min((starts[i + 1] - ends[i], i) for i in range(len(starts) - 1))
                self.filled_gaps += gap
                del starts[index + 1], ends[index]


OffsetRanges = RangeSet[int]
"""Offsets of one partition."""


class SkipReason(StrEnum):
    """Why a range was skipped."""

    RETENTION = "retention"
    """The broker removed it before the query had read it."""
    OUT_OF_RANGE = "out_of_range"
    """The query asked for it, was told that it is not there, and went on behind it."""
    NEW_CHECKPOINT = "new_checkpoint"
    """Another query, with a checkpoint of its own, took over and began behind it."""
    RECREATED = "recreated"
    """It was unread when the topic was made anew."""
    UNEXPLAINED = "unexplained"
    """A batch began behind the end of the one before, and no report was lost."""
    SEVERAL = "several"
    """Older ranges with different reasons, shown as one."""


@dataclass(frozen=True, slots=True)
class SkippedRange:
    """A range that the query will not read, or has not read in order."""

    start: int
    end: int
    """The offset behind it."""
    reason: SkipReason
    records: int
    """How many offsets were skipped; less than the range has when it stands for several."""
    at_ms: float
    """When it was noticed; of several the latest."""

    def with_newer(self, newer: "SkippedRange") -> "SkippedRange":
        """Return one that stands for both."""
        return SkippedRange(
            min(self.start, newer.start),
            max(self.end, newer.end),
            self.reason if self.reason is newer.reason else SkipReason.SEVERAL,
            self.records + newer.records,
            newer.at_ms,
        )


@dataclass(slots=True, eq=False)
class SkippedRanges:
    """Skipped ranges of a partition; what is `known`, or in a narrow gap of it, counts no more."""

    known: OffsetRanges = field(default_factory=OffsetRanges)
    ranges: list[SkippedRange] = field(default_factory=list)
    """In order of time; at most MAX_SKIPS."""
    records: int = 0
    """How many offsets were skipped, ever."""

    def add(self, start: int, end: int, reason: SkipReason, now_ms: float) -> list[OffsetRange]:
        """Record a skipped range; return the parts of it that are new."""
        new = self.known.missing(start, end)
        for low, high in new:
            self.known.add(low, high)
            self.records += high - low
            self.ranges.append(SkippedRange(low, high, reason, high - low, now_ms))
            if len(self.ranges) > MAX_SKIPS:
                self.ranges[:2] = (self.ranges[0].with_newer(self.ranges[1]),)
        return new
