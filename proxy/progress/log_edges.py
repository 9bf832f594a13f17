"""Where the log of a partition begins and ends, as far as is known, and whether it is the same."""

import math

from .lag import EndHistory

CUT_CONFIRM_MS = 1000.0
"""How long the log must be seen to end below what is completed before it is taken for another."""

MAX_FORMER_IDS = 4
"""How many ids of topics that are gone are remembered."""

MIN_END_AGE_MS = 100.0
"""An end that was learned later than that is recent, whoever asks."""

SILENCE_PER_AGE = 60.0
"""An end may be older by one millisecond for each so many that nothing was seen of its reader."""


def end_age_ms(silent_ms: float) -> float:
    """Return how old a known end may be before it is asked for.

    A batch that is processed for long reads and reports nothing. The end that is known is then at
    most 1/SILENCE_PER_AGE of that time old, and so is the part of what came meanwhile that lag
    leaves out.
    """
    return max(MIN_END_AGE_MS, silent_ms / SILENCE_PER_AGE)


class LogEdges:
    """The ends of one partition's log; times are monotonic milliseconds.

    A lower high watermark than the one known is left out: answers overtake each other, and one for
    read_committed ends at the last stable offset. One from a look-up that is even below what the
    query has completed means that the log is another one (a topic made anew, or cut after an
    unclean election), once a look-up CUT_CONFIRM_MS later says the same and none in between was
    higher.
    """

    __slots__ = (
        *("_cut_end", "_cut_ms", "_former_ids", "ends"),
        *("end_ms", "high_watermark", "log_start", "topic_id"),
    )

    def __init__(self) -> None:
        self.topic_id: bytes | None = None
        """None while only messages without topic ids were seen."""
        self._former_ids: list[bytes] = []
        self.ends = EndHistory()
        self.forget()

    def forget(self) -> None:
        """Forget the ends: the log is another one."""
        self.high_watermark: int | None = None
        self.end_ms = -math.inf
        """When an end was last learned, also one that was left out."""
        self.log_start: int | None = None
        self._cut_ms: float | None = None
        self._cut_end: int | None = None
        self.ends.clear()

    def record_high_watermark(self, end: int, now_ms: float) -> bool:
        """Take note of a high watermark; return whether it counts, not being below another."""
        if end < 0:
            return False
        self.end_ms = max(self.end_ms, now_ms)
        if self.high_watermark is not None and end < self.high_watermark:
            return False
        self.high_watermark = end
        self.ends.add(now_ms, end)
        return True

    def is_cut(self, end: int, now_ms: float) -> bool:
        """Take note of a looked-up end below what is completed; return whether it is certain."""
        self._cut_end = end
        if self._cut_ms is None:
            self._cut_ms = now_ms
        return now_ms - self._cut_ms >= CUT_CONFIRM_MS

    def is_whole(self) -> None:
        """Take note that the log is not cut, after all."""
        self._cut_ms = self._cut_end = None

    def may_be_cut_below(self, offset: int) -> bool:
        """Say whether the last look-up found the log to end below this offset."""
        return self._cut_end is not None and self._cut_end < offset

    def record_log_start(self, offset: int) -> bool:
        """Take note of the log start, which only goes up; return whether it went up."""
        if offset < 0 or (self.log_start is not None and offset <= self.log_start):
            return False
        self.log_start = offset
        return True

    def is_gone(self, topic_id: bytes) -> bool:
        """Say whether this is the id of a topic that had the name before."""
        return topic_id in self._former_ids

    def replace_id(self, topic_id: bytes) -> bool:
        """Take over a topic id that is not gone; return whether there was another one before."""
        replaced = self.topic_id is not None
        if self.topic_id is not None:
            self._former_ids = [*self._former_ids, self.topic_id][-MAX_FORMER_IDS:]
        self.topic_id = topic_id
        return replaced
