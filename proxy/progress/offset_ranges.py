"""Sets of offsets as ranges: memory per range, not per offset, and never more than a bound."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

MAX_RANGES = 128
"""How many ranges one set holds unless it is told otherwise."""

OffsetRange = tuple[int, int]
"""Offsets from the first up to but not including the second."""


class OffsetRanges:
    """A set of offsets: disjoint ranges in order, which do not touch.

    When there would be more than `max_ranges` of them, the two with the smallest gap between them
    become one, so the set may hold offsets that were never added and never lacks one that was.
    Use it only where that is the safe side. `filled_gaps` tells how many offsets came in that way.

    Adding and removing cost O(log n) to find the place and O(ranges touched); `max_ranges` bounds
    both. Raises ValueError when `max_ranges` is below 1.
    """

    __slots__ = ("_ends", "_max", "_starts", "filled_gaps")

    def __init__(self, max_ranges: int = MAX_RANGES) -> None:
        if max_ranges < 1:
            raise ValueError(f"max_ranges must be 1 or more, not {max_ranges}")
        self._max = max_ranges
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.filled_gaps = 0
        """How many offsets were taken in only to keep to the bound, since the set was made."""

    def __iter__(self) -> Iterator[OffsetRange]:
        return iter(list(zip(self._starts, self._ends, strict=True)))

    def __len__(self) -> int:
        return len(self._starts)

    def __repr__(self) -> str:
        return f"OffsetRanges({list(self)})"

    @property
    def first(self) -> int | None:
        """The lowest offset; None when there is none."""
        return self._starts[0] if self._starts else None

    def end_at(self, offset: int) -> int | None:
        """Return where the range that holds this offset ends; None when none does."""
        index = bisect_right(self._starts, offset) - 1
        return self._ends[index] if index >= 0 and offset < self._ends[index] else None

    def add(self, start: int, end: int) -> int:
        """Add the offsets from `start` to before `end`; return how many of them are new."""
        if start >= end:
            return 0
        starts, ends = self._starts, self._ends
        if ends and starts[-1] <= start <= ends[-1]:  # the usual case: reading on
            new = max(end - ends[-1], 0)
            ends[-1] += new
            return new
        low, high = bisect_left(ends, start), bisect_right(starts, end)
        new = end - start
        for index in range(low, high):
            new -= max(min(ends[index], end) - max(starts[index], start), 0)
        if low < high:
            start, end = min(start, starts[low]), max(end, ends[high - 1])
        starts[low:high] = (start,)
        ends[low:high] = (end,)
        self._keep_bound()
        return new

    def remove(self, start: int, end: int) -> None:
        """Remove the offsets from `start` to before `end`.

        At the bound a hole within a range may close again; see `filled_gaps`.
        """
        if start >= end or not self._starts:
            return
        starts, ends = self._starts, self._ends
        low, high = bisect_right(ends, start), bisect_left(starts, end)
        if low >= high:
            return
        left = [(starts[low], start)] if starts[low] < start else []
        right = [(end, ends[high - 1])] if end < ends[high - 1] else []
        starts[low:high] = [rest[0] for rest in left + right]
        ends[low:high] = [rest[1] for rest in left + right]
        self._keep_bound()

    def remove_below(self, offset: int) -> None:
        """Remove every offset below this one."""
        if self._starts and self._starts[0] < offset:
            self.remove(self._starts[0], offset)

    def clear(self) -> None:
        """Remove every offset."""
        self._starts.clear()
        self._ends.clear()

    def missing(self, start: int, end: int) -> list[OffsetRange]:
        """Return the ranges of `start` to before `end` that are not in the set, in order."""
        gaps: list[OffsetRange] = []
        for index in range(bisect_right(self._ends, start), len(self._starts)):
            if self._starts[index] >= end:
                break
            if self._starts[index] > start:
                gaps.append((start, self._starts[index]))
            start = self._ends[index]
        if start < end:
            gaps.append((start, end))
        return gaps

    def without(self, other: "OffsetRanges") -> list[OffsetRange]:
        """Return the ranges of this set that are not in the other one, in order."""
        return [gap for start, end in self for gap in other.missing(start, end)]

    def copy(self) -> "OffsetRanges":
        """Return a set of the same offsets with the same bound."""
        copy = OffsetRanges(self._max)
        copy._starts, copy._ends = self._starts.copy(), self._ends.copy()
        return copy

    def _keep_bound(self) -> None:
        while len(self._starts) > self._max:
            starts, ends = self._starts, self._ends
            gap, index = min((starts[i + 1] - ends[i], i) for i in range(len(starts) - 1))
            self.filled_gaps += gap
            del starts[index + 1]
            del ends[index]
