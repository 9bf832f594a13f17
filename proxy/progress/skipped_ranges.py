"""Keeps the ranges of a partition that were skipped: each counted once, none dropped silently."""

from dataclasses import dataclass, field
from enum import StrEnum

from .offset_ranges import OffsetRange, OffsetRanges

MAX_SKIPS = 16
"""How many are kept one by one; the two oldest become one when there are more."""


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
