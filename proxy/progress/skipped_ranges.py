"""Keeps the ranges of a partition that were skipped: each counted once, none dropped silently."""

from dataclasses import dataclass

from .events import SkipReason
from .offset_ranges import OffsetRange, OffsetRanges

MAX_SKIPS = 16
"""How many are kept one by one; the two oldest become one when there are more."""


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
    """When it was noticed; the latest time when it stands for several."""


class SkippedRanges:
    """The skipped ranges of one partition.

    What is skipped again, for whatever reason, is not counted again until `forget_below` was
    called for it. The number of known ranges is bounded (see OffsetRanges): beyond it, what lies in
    a narrow gap between two skipped ranges counts as known.
    """

    __slots__ = ("_known", "records", "skips")

    def __init__(self) -> None:
        self._known = OffsetRanges()
        self.skips: list[SkippedRange] = []
        """In order of time; at most MAX_SKIPS."""
        self.records = 0
        """How many offsets were skipped, ever."""

    @property
    def filled_gaps(self) -> int:
        """How many offsets count as known only to keep to the bound."""
        return self._known.filled_gaps

    def add(self, start: int, end: int, reason: SkipReason, now_ms: float) -> list[OffsetRange]:
        """Take note of a skipped range; return the parts of it that are new."""
        new = self._known.missing(start, end)
        for low, high in new:
            self._known.add(low, high)
            self.records += high - low
            self.skips.append(SkippedRange(low, high, reason, high - low, now_ms))
            if len(self.skips) > MAX_SKIPS:
                self.skips[:2] = (_joined(*self.skips[:2]),)
        return new

    def end_at(self, offset: int) -> int | None:
        """Return where the skipped range that holds this offset ends; None when none does."""
        return self._known.end_at(offset)

    def forget_below(self, offset: int) -> None:
        """Let what is skipped below this offset from now on count anew; the log stays."""
        self._known.remove_below(offset)

    def forget_known(self) -> None:
        """Let everything count anew: the log or the query began again. What was logged stays."""
        self._known.clear()


def _joined(older: SkippedRange, newer: SkippedRange) -> SkippedRange:
    return SkippedRange(
        min(older.start, newer.start),
        max(older.end, newer.end),
        older.reason if older.reason is newer.reason else SkipReason.SEVERAL,
        older.records + newer.records,
        newer.at_ms,
    )
