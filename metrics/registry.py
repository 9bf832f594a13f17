"""Keep the sensors by name: bounded in number, and only while they are in use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Generic, TypeVar

from .sensor import DEFAULT_EXPIRY_MS, Sensor

COMPACT_AT_ENTRIES = 64
"""With fewer entries more than sensors, those of removed sensors are not worth the work."""


S = TypeVar("S", bound=Sensor)


class RegistryFull(Exception):  # noqa: N818 - says what the registry is
    """There are as many live sensors as the registry may hold."""


class Registry(Generic[S]):
    """Sensors by name, at most `max_sensors`; one idle for `expiry_ms` makes room.

    A sensor that is held beyond one call may have been removed meanwhile; `Sensor.retired` tells.
    Raises ValueError when `max_sensors` is below 1 or `expiry_ms` not above 0.
    """

    def __init__(self, max_sensors: int, expiry_ms: float = DEFAULT_EXPIRY_MS) -> None:
        if max_sensors < 1:
            raise ValueError(f"max_sensors must be 1 or more, got {max_sensors!r}")
        if not expiry_ms > 0:
            raise ValueError(f"expiry_ms must be above 0, got {expiry_ms!r}")
        self.max_sensors = max_sensors
        self.expiry_ms = expiry_ms
        self._sensors: dict[str, S] = {}
        # By the earliest time at which each can expire: what is recorded only moves it later. So a
        # sensor is looked at once in `expiry_ms`, not for each new name.
        self._due: list[tuple[float, int, S]] = []
        self._number = count()

    def get(self, name: str) -> S | None:
        """Return the sensor of that name, or None."""
        return self._sensors.get(name)

    def get_or_create(self, name: str, factory: Callable[[], S], now_ms: float) -> S:
        """Return the sensor of that name; if there is none, keep the one that `factory` makes.

        Raises RegistryFull when all are in use, and ValueError when that one has another name.
        """
        sensor = self._sensors.get(name)
        if sensor is not None:
            return sensor
        if len(self._sensors) >= self.max_sensors:
            self.expire(now_ms)
            if len(self._sensors) >= self.max_sensors:
                raise RegistryFull(f"all {self.max_sensors} sensors are in use")
        sensor = factory()
        if sensor.name != name:
            raise ValueError(f"asked for sensor {name!r}, the factory made {sensor.name!r}")
        sensor.expiry_ms = self.expiry_ms
        sensor.last_record_ms = now_ms
        self._sensors[name] = sensor
        heappush(self._due, (sensor.expires_ms, next(self._number), sensor))
        return sensor

    def remove(self, name: str) -> bool:
        """Remove the sensor; return whether there was one."""
        sensor = self._sensors.pop(name, None)
        if sensor is None:
            return False
        sensor.retired = True
        if len(self._due) > 2 * len(self._sensors) + COMPACT_AT_ENTRIES:
            self._due = [entry for entry in self._due if not entry[2].retired]
            heapify(self._due)
        return True

    def expire(self, now_ms: float) -> list[str]:
        """Remove all idle sensors; return their names."""
        return [sensor.name for sensor in self.expiring(now_ms) if sensor is not None]

    def expiring(self, now_ms: float) -> Iterator[S | None]:
        """Remove idle sensors in steps; yield each of those examined, None when it stays."""
        while self._due and self._due[0][0] <= now_ms:
            _, number, sensor = self._due[0]
            if not sensor.retired and sensor.expires_ms > now_ms:
                heapreplace(self._due, (sensor.expires_ms, number, sensor))
                yield None
                continue
            heappop(self._due)
            yield sensor if not sensor.retired and self.remove(sensor.name) else None

    def __contains__(self, name: str) -> bool:
        return name in self._sensors

    def __iter__(self) -> Iterator[S]:
        """Iterate over the sensors of this moment; changes during the loop are safe."""
        return iter(tuple(self._sensors.values()))

    def __len__(self) -> int:
        return len(self._sensors)
