"""Show the registry's sensors and their bounds to Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from .registry import Registry

PREFIX = "kafka_quota_proxy_"
BOUND_METRIC = "bound_bytes"
BOUND_HELP = "Bound that the quota sets for the measured value, in the same unit."

Labels = tuple[tuple[str, str], ...]


class SensorCollector(Collector):
    """A prometheus_client collector: register it, and each scrape measures every sensor.

    One gauge family per metric name. Each metric with a quota has a sample with its labels in
    the family `bound_metric` as well. Of two metrics that share name and labels the later one is
    shown, since a scrape with a doubled series is refused as a whole.

    `clock_ms` gives monotonic milliseconds, from the clock that the sensors are fed with. Measuring
    drops old samples, so scrape in the thread that records.
    """

    def __init__(
        self,
        registry: Registry,
        clock_ms: Callable[[], float],
        prefix: str = PREFIX,
        bound_metric: str = BOUND_METRIC,
    ) -> None:
        self._registry = registry
        self._clock_ms = clock_ms
        self._prefix = prefix
        self._bound_metric = bound_metric

    def collect(self) -> Iterable[Family]:
        """Return the families of this moment; none while there are no sensors."""
        now_ms = self._clock_ms()
        helps = {self._bound_metric: BOUND_HELP}
        values: dict[str, dict[Labels, float]] = {}
        for sensor in self._registry:
            for metric in sensor.metrics:
                name = metric.name
                helps.setdefault(name.name, name.description)
                values.setdefault(name.name, {})[name.labels] = metric.measure(now_ms)
                quota = metric.config.quota
                if quota is not None:
                    values.setdefault(self._bound_metric, {})[name.labels] = quota.bound
        return [self._family(name, helps[name], series) for name, series in values.items()]

    def _family(self, name: str, description: str, series: dict[Labels, float]) -> Family:
        family = Family(self._prefix + name, description, "gauge")
        for labels, value in series.items():
            family.add_sample(family.name, dict(labels), value)
        return family
