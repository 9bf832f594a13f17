"""Record a value once and keep every metric made of it, and their quotas, up to date."""

from __future__ import annotations

from dataclasses import dataclass

from .stats import MetricConfig, Room, WindowedSum

DEFAULT_EXPIRY_MS = 3_600_000.0
"""How long a sensor may be idle before it expires: one hour, as in Kafka."""


@dataclass(frozen=True, slots=True)
class MetricName:
    """A metric's name and labels."""

    name: str
    """In Prometheus' spelling, without the product's prefix: `rate_bytes`."""
    description: str
    labels: tuple[tuple[str, str], ...] = ()
    """Pairs of label and value; the same labels in the same order for all of one name."""


class QuotaViolation(Exception):  # noqa: N818 - Kafka's word; it is an outcome, not a failure
    """A measured value is outside its quota. The value that led to it has been recorded."""

    def __init__(self, metric_name: MetricName, value: float, bound: float) -> None:
        super().__init__(metric_name, value, bound)
        self.metric_name = metric_name
        self.value = value
        self.bound = bound

    def __str__(self) -> str:
        return f"{self.metric_name.name} is {self.value:g}, its bound {self.bound:g}"


class Metric:
    """One stat of a sensor under its name."""

    __slots__ = ("config", "name", "stat")

    def __init__(self, name: MetricName, stat: WindowedSum, config: MetricConfig) -> None:
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

    def __init__(
        self, name: str, *, created_ms: float = 0.0, expiry_ms: float = DEFAULT_EXPIRY_MS
    ) -> None:
        self.name = name
        self.expiry_ms = expiry_ms
        self.last_record_ms = created_ms
        self.retired = False
        """True once a registry has let it go: who holds it must ask for a new one."""
        self.metrics: tuple[Metric, ...] = ()
        """In the order of their adding."""
        self.room: Room | None = None
        """Of the only metric; None when there are more, or its stat knows none."""

    def add(self, metric_name: MetricName, stat: WindowedSum, config: MetricConfig) -> Metric:
        """Feed `stat` from now on; return its metric. Raises ValueError when there is this one."""
        key = (metric_name.name, metric_name.labels)
        if any((metric.name.name, metric.name.labels) == key for metric in self.metrics):
            raise ValueError(f"sensor {self.name!r} already has a metric {key!r}")
        metric = Metric(metric_name, stat, config)
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
        if len(metrics) == 1:
            (metric,) = metrics
            if room is None or room.is_over(metric.config, now_ms):
                self.room = metric.stat.room(metric.config, now_ms)

    @property
    def free(self) -> float:
        """How much can be recorded for certain before its quota is violated; 0 if not known."""
        return self.room.free if self.room is not None else 0.0

    @property
    def expires_ms(self) -> float:
        """When it expires unless another value comes."""
        return self.last_record_ms + self.expiry_ms
