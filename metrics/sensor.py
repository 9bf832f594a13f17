"""Record a value once and keep every stat made of it, and their quotas, up to date."""

from __future__ import annotations

from .stats import Headroom, WindowedSum

DEFAULT_EXPIRY_MS = 3_600_000.0
"""How long a sensor may be idle before it expires: one hour, as in Kafka."""


class QuotaViolation(Exception):  # noqa: N818 - Kafka's word; it is an outcome, not a failure
    """A measured value is outside its quota. The value that led to it has been recorded."""

    def __init__(self, stat: WindowedSum, value: float, bound: float) -> None:
        super().__init__(stat, value, bound)
        self.stat = stat
        self.value = value
        self.bound = bound

    def __str__(self) -> str:
        return f"{type(self.stat).__name__} is {self.value:g}, its bound {self.bound:g}"


class Sensor:
    """Stats fed by the same values; it expires `DEFAULT_EXPIRY_MS` after the last one."""

    __slots__ = ("last_record_ms", "name", "room", "stats")

    def __init__(self, name: str, *stats: WindowedSum) -> None:
        self.name = name
        self.stats = stats
        self.last_record_ms = 0.0
        self.room: Headroom | None = None
        """Of the only stat; None when there are more, or it knows none."""

    def record(self, value: float, now_ms: float) -> None:
        """Update all stats, then check all quotas. Raises QuotaViolation for the first broken."""
        self.last_record_ms = now_ms
        stats, room = self.stats, self.room
        if room is not None:
            if room.record(value, now_ms):
                return
            room.free -= value  # it is recorded all the same
        for stat in stats:
            stat.record(value, now_ms)
        for stat in stats:
            quota = stat.config.quota
            if quota is not None:
                measured = stat.measure(now_ms)
                if not quota.accepts(measured):
                    raise QuotaViolation(stat, measured, quota.bound)
        if len(stats) == 1 and (room is None or room.is_over(now_ms)):
            self.room = stat.room(now_ms)

    def is_expired(self, now_ms: float) -> bool:
        """Return whether no value has come for so long that it may go."""
        return now_ms - self.last_record_ms >= DEFAULT_EXPIRY_MS
