"""The wall clock beside the monotonic one: documents and records tell its time."""

from dataclasses import dataclass

from metrics.clock import MS_PER_SECOND

ROUND_MS = 3
"""Decimals of a millisecond that survive in wall-clock seconds kept as a float."""


@dataclass(frozen=True, slots=True)
class WallTime:
    """The distance of the clocks, taken once: a clock set anew matters only at the next start."""

    offset_ms: float

    @classmethod
    def at(cls, now_ms: float, now_s: float) -> "WallTime":
        """Make it from the two clocks read at one moment."""
        return cls(now_s * MS_PER_SECOND - now_ms)

    def to_s(self, time_ms: float) -> float:
        """Return the wall-clock seconds of a monotonic time."""
        return (time_ms + self.offset_ms) / MS_PER_SECOND

    def to_ms(self, time_s: float) -> float:
        """Return the monotonic time of wall-clock seconds."""
        return round(time_s * MS_PER_SECOND - self.offset_ms, ROUND_MS)
