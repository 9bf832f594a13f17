"""Record a value once and keep every metric made of it, and their quotas, up to date.

Sensors are kept by name, and only while they are in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from .stats import MetricConfig, Room, WindowedSum

DEFAULT_EXPIRY_MS = 3_600_000.0
"""How long a sensor may be idle before it expires: one hour, as in Kafka."""


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
    """Metrics fed by the same values; it expires `DEFAULT_EXPIRY_MS` after the last one."""

    __slots__ = ("last_record_ms", "metrics", "name", "retired", "room")

    def __init__(self, name: str) -> None:
        self.name = name
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
