"""Where the log of a partition begins and ends, as far as is known, and when it ended where."""

import math
from array import array
from bisect import bisect_right
from dataclasses import dataclass, field

CUT_CONFIRM_MS = 1000.0
"""How long the log must be seen to end below what is known before that is believed."""

MIN_END_AGE_MS = 100.0
"""A younger end is recent, whoever asks."""

SILENCE_PER_AGE = 60.0
"""An end may be older by one millisecond for each so many that nothing was seen of its reader."""

MAX_FORMER_IDS = 4
"""How many ids of topics that are gone are remembered."""

MAX_SAMPLES = 128
"""Of the end of one log; two kilobytes."""


def max_end_age_ms(silent_ms: float) -> float:
    """Return how old an end may be: lag in a long batch lacks at most 1/SILENCE_PER_AGE of it."""
    return max(MIN_END_AGE_MS, silent_ms / SILENCE_PER_AGE)


@dataclass(slots=True, eq=False)
class LogEndHistory:
    """When the end of a log was where: samples of (time, log end), linear between them.

    The end must not go back. Where it stands still, the first and the last time are kept, so what
    is appended after a pause is not dated into the pause. When there are MAX_SAMPLES, every second
    one goes and the first and the last stay: old times become coarse, none is cut off.
    """

    _times_ms: "array[float]" = field(default_factory=lambda: array("d"))
    _ends: "array[int]" = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, now_ms: float, end: int) -> None:
        """Record the log end; a lower one than before, or an earlier time, is left out."""
        times, ends = self._times_ms, self._ends
        if ends and (end < ends[-1] or now_ms < times[-1]):
            return
        if len(ends) > 1 and end == ends[-1] == ends[-2]:
            times[-1] = now_ms
            return
        times.append(now_ms)
        ends.append(end)
        if len(ends) >= MAX_SAMPLES:  # from 1 in steps of 2, without the last
            del times[1:-1:2], ends[1:-1:2]

    def cut(self, end: int) -> None:
        """Forget the samples of higher ends: the log has lost what was there."""
        kept = bisect_right(self._ends, end)
        del self._times_ms[kept:], self._ends[kept:]

    def passed_ms(self, offset: int) -> float | None:
        """Return when the log end went beyond `offset`, or was first seen there; None: not yet."""
        times, ends = self._times_ms, self._ends
        after = bisect_right(ends, offset)
        if after in (0, len(ends)):
            return times[0] if after < len(ends) else None
        before = after - 1
        share = (offset - ends[before]) / (ends[after] - ends[before])
        return times[before] + share * (times[after] - times[before])

    def forget_below(self, offset: int) -> None:
        """Forget the samples that only serve offsets below this one."""
        needless = max(bisect_right(self._ends, offset) - 1, 0)
        del self._times_ms[:needless], self._ends[:needless]


@dataclass(slots=True, eq=False)
class LogOffsets:
    """The ends of one partition's log; times are monotonic milliseconds.

    A lower high watermark than the one known is left out: answers overtake each other, and one for
    read_committed ends at the last stable offset. One from a look-up below what the query has
    completed means that the log is another one (a topic made anew, or cut after an unclean
    election), once a look-up CUT_CONFIRM_MS later says the same and none in between was higher. One
    of the proxy's own that is not as low is taken for the end in the same way: the log was cut.
    """

    topic_id: bytes | None = None
    """16 bytes; None while only messages without were seen."""
    former_topic_ids: list[bytes] = field(default_factory=list)
    """Of topics that had the name before."""
    high_watermark: int | None = None
    log_start_offset: int | None = None
    """The offset of the first record that is still there; it only goes up."""
    end_ms: float = -math.inf
    """When an end was last learned, also one that was left out."""
    cut_at: int | None = None
    """Where the last look-up found the log to end, if that was below what is completed."""
    ends: LogEndHistory = field(default_factory=LogEndHistory)
    _cut_since_ms: float = 0.0
    _lower_since_ms: float = math.inf
    """Since when own look-ups find the log to end below `high_watermark`."""

    def record_end(self, end: int, now_ms: float) -> bool:
        """Record a high watermark; return whether it counts: it is not below another."""
        if end < 0:
            return False
        self.end_ms = max(self.end_ms, now_ms)
        if self.high_watermark is not None and end < self.high_watermark:
            return False
        self.high_watermark, self._lower_since_ms = end, math.inf
        self.ends.add(now_ms, end)
        return True

    def record_start(self, offset: int) -> None:
        """Record the log start, which only goes up."""
        if offset >= 0 and (self.log_start_offset is None or offset > self.log_start_offset):
            self.log_start_offset = offset

    def record_own_lookup(self, end: int, now_ms: float) -> None:
        """Take a lower end than is known for the end, once it is certain."""
        if self.high_watermark is not None and end < self.high_watermark:
            self._lower_since_ms = min(self._lower_since_ms, now_ms)
            if now_ms - self._lower_since_ms >= CUT_CONFIRM_MS:
                self.high_watermark = end
                self.ends.cut(end)

    def is_cut(self, end: int, now_ms: float) -> bool:
        """Record a looked-up end below what is completed; return whether it is certain."""
        if self.cut_at is None:
            self._cut_since_ms = now_ms
        self.cut_at = end
        return now_ms - self._cut_since_ms >= CUT_CONFIRM_MS
