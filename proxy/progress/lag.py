"""How long ago the log reached an offset: what turns a lag in records into one in time."""

from array import array
from bisect import bisect_right

MAX_SAMPLES = 128
"""Samples per partition; two kilobytes."""


class EndHistory:
    """When the end of a log was where: samples of (time, log end), linear between them.

    The end must not go back. Where it stands still, the first and the last time are kept, so what
    is appended after a pause is not dated into the pause. When there are MAX_SAMPLES, every second
    one goes and the first and the last stay: old times become coarse, none is cut off.
    """

    __slots__ = ("_ends", "_times_ms")

    def __init__(self) -> None:
        self._times_ms = array("d")
        self._ends = array("q")

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, now_ms: float, end: int) -> None:
        """Take note of the log end; a lower one than before, or an earlier time, is left out."""
        times, ends = self._times_ms, self._ends
        if ends:
            if end < ends[-1] or now_ms < times[-1]:
                return
            if end == ends[-1] and len(ends) > 1 and ends[-2] == end:
                times[-1] = now_ms
                return
        times.append(now_ms)
        ends.append(end)
        if len(ends) >= MAX_SAMPLES:
            self._thin()

    def passed_ms(self, offset: int) -> float | None:
        """Return when the log end went beyond `offset`; None when it has not, as far as is known.

        When it was beyond it before the first sample, that sample's time: it was then or earlier.
        """
        times, ends = self._times_ms, self._ends
        after = bisect_right(ends, offset)
        if after == len(ends):
            return None
        if after == 0:
            return times[0]
        before = after - 1
        share = (offset - ends[before]) / (ends[after] - ends[before])
        return times[before] + share * (times[after] - times[before])

    def forget_below(self, offset: int) -> None:
        """Drop the samples that only serve offsets below this one."""
        needless = bisect_right(self._ends, offset) - 1
        if needless > 0:
            del self._times_ms[:needless]
            del self._ends[:needless]

    def clear(self) -> None:
        """Forget everything: the log is another one."""
        del self._times_ms[:]
        del self._ends[:]

    def _thin(self) -> None:
        # From 1 in steps of 2, without the last.
        del self._times_ms[1:-1:2]
        del self._ends[1:-1:2]
