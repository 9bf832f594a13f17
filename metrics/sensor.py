"""Record a value once and keep every metric made of it, and their quotas, up to date.

Sensors are kept by name, and only while they are in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Generic, TypeVar

from .stats import MetricConfig, Room, WindowedSum

DEFAULT_EXPIRY_MS = 3_600_000.0
"""How long a sensor may be idle before it expires: one hour, as in Kafka."""

COMPACT_AT_ENTRIES = 64
"""With fewer entries more than sensors, those of removed sensors are not worth the work."""


class QuotaViolation(Exception):  # noqa: N818 - Kafka's word; it is an outcome, not a failure
    """A measured value is outside its quota. The value that led to it has been recorded."""

    def __init__(self, metric_name: str, value: float, bound: float) -> None:
        super().__init__(metric_name, value, bound)
        self.metric_name = metric_name
        self.value = value
        self.bound = bound

    def __str__(self) -> str:
        return f"{self.metric_name} is {self.value:g}, its bound {self.bound:g}"


class Metric:
    """One stat of a sensor under its name, such as `rate_bytes`."""

    __slots__ = ("config", "name", "stat")

    def __init__(self, name: str, stat: WindowedSum, config: MetricConfig) -> None:
        self.name = name
        self.stat = stat
        self.config = config
        """May be replaced at any time: a new quota holds at once and the history stays. New
        samples or windows hold for what comes; the old history has gone after `samples` windows.
        """

    def measure(self, now_ms: float) -> float:
        """Return the present value; old samples are dropped on the way."""
        return self.stat.measure(self.config, now_ms)


class Sensor:
    """Metrics fed by the same values; it expires `expiry_ms` after the last one."""

    __slots__ = ("expiry_ms", "last_record_ms", "metrics", "name", "retired", "room")

    def __init__(self, name: str) -> None:
        self.name = name
        self.expiry_ms = DEFAULT_EXPIRY_MS
        self.last_record_ms = 0.0
        self.retired = False
        """True once a registry has let it go: who holds it must ask for a new one."""
        self.metrics: tuple[Metric, ...] = ()
        """In the order of their adding."""
        self.room: Room | None = None
        """Of the only metric; None when there are more, or its stat knows none."""

    def add(self, name: str, stat: WindowedSum, config: MetricConfig) -> Metric:
        """Feed `stat` from now on; return its metric. Raises ValueError when there is this one."""
        if any(metric.name == name for metric in self.metrics):
            raise ValueError(f"sensor {self.name!r} already has a metric {name!r}")
        metric = Metric(name, stat, config)
        self.metrics = (*self.metrics, metric)
        self.room = None
        return metric

    def record(self, value: float, now_ms: float) -> None:
        """Update all stats, then check all quotas. Raises QuotaViolation for the first broken."""
        self.last_record_ms = now_ms
        metrics, room = self.metrics, self.room
        if room is not None:
            if room.record(metrics[0].config, value, now_ms):
                return
            room.free -= value  # it is recorded all the same
        for metric in metrics:
            metric.stat.record(metric.config, value, now_ms)
        for metric in metrics:
            config = metric.config
            quota = config.quota
            if quota is not None:
                measured = metric.stat.measure(config, now_ms)
                if not quota.accepts(measured):
                    raise QuotaViolation(metric.name, measured, quota.bound)
        if len(metrics) == 1 and (room is None or room.is_over(config, now_ms)):
            self.room = metric.stat.room(config, now_ms)

    @property
    def expires_ms(self) -> float:
        """When it expires unless another value comes."""
        return self.last_record_ms + self.expiry_ms


S = TypeVar("S", bound=Sensor)


class Registry(Generic[S]):
    """Sensors by name; those that are idle go by `expiring`.

    A sensor that is held beyond one call may have been removed meanwhile; `Sensor.retired` tells.
    """

    def __init__(self) -> None:
        self._sensors: dict[str, S] = {}
        # By the earliest time at which each can expire: what is recorded only moves it later. So a
        # sensor is looked at once in its `expiry_ms`.
        self._due: list[tuple[float, int, S]] = []
        self._number = count()

    def get(self, name: str) -> S | None:
        """Return the sensor of that name, or None."""
        return self._sensors.get(name)

    def add(self, sensor: S, now_ms: float) -> None:
        """Keep a sensor, of whose name there must be no other one; it is idle from now on."""
        sensor.last_record_ms = now_ms
        self._sensors[sensor.name] = sensor
        heappush(self._due, (sensor.expires_ms, next(self._number), sensor))

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

    def __iter__(self) -> Iterator[S]:
        """Iterate over the sensors of this moment, but for those that have gone when it is theirs.

        Changes during the loop are safe.
        """
        return (each for each in tuple(self._sensors.values()) if not each.retired)

    def __len__(self) -> int:
        return len(self._sensors)
