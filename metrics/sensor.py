"""Record a value once and keep every stat made of it, and their quotas, up to date.

Sensors are kept by name, and only while they are in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from .stats import Room, WindowedSum

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

    __slots__ = ("last_record_ms", "name", "retired", "room", "stats")

    def __init__(self, name: str, *stats: WindowedSum) -> None:
        self.name = name
        self.stats = stats
        self.last_record_ms = 0.0
        self.retired = False
        """True once a registry has let it go: who holds it must ask for a new one."""
        self.room: Room | None = None
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


S = TypeVar("S", bound=Sensor)


class Registry(Generic[S]):
    """Sensors by name.

    A sensor that is held beyond one call may have been removed meanwhile; `Sensor.retired` tells.
    """

    def __init__(self) -> None:
        self._sensors: dict[str, S] = {}

    def get(self, name: str) -> S | None:
        """Return the sensor of that name, or None."""
        return self._sensors.get(name)

    def add(self, sensor: S, now_ms: float) -> None:
        """Keep a sensor, of whose name there must be no other one; it is idle from now on."""
        sensor.last_record_ms = now_ms
        self._sensors[sensor.name] = sensor

    def remove(self, name: str) -> None:
        """Remove the sensor of that name, which there must be."""
        self._sensors.pop(name).retired = True

    def __iter__(self) -> Iterator[S]:
        """Iterate over the sensors of this moment, but for those that have gone when it is theirs.

        Changes during the loop are safe.
        """
        return (each for each in tuple(self._sensors.values()) if not each.retired)

    def __len__(self) -> int:
        return len(self._sensors)
